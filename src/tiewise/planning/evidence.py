"""The atlas: differences between tied and untied decoders over a grid of sizes.

    nearest_settings({"width": 768, "layers": 12, "vocab": 50257})   the nearest settings of the atlas
    assess_difference({"width": 64, …}, -0.02, seeds=3)              the predicted difference, and a verdict
    score()                                                          quality of predictions of settings left out

`data/atlas.csv` has a line for each result of a study (docs/sweep.md defines its columns). Only lines that differ in
sizes count here: all other settings have the defaults of `tiewise compare`. Outside the convex hull of their
logarithms there is no evidence, and messages say so. A factor counts the same in each size, up or down.
"""

from __future__ import annotations

import csv
import io
import math
import pkgutil
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from tiewise.core import Late
from tiewise.core.measurement import plain, signed

if TYPE_CHECKING:
    from tiewise.planning.surface import SurfaceScore

np, surface = Late("numpy"), Late("tiewise.planning.surface")  # a plan outside the atlas needs neither
SIZES = {  # column of the atlas → its name in messages
    "width": "width",
    "layers": "depth",
    "vocab": "vocabulary",
    "tokens": "amount of text",
    "seen": "length of training",
}
# settings that decide the sizes or do not change the model; all others must have their defaults
SIZE_SETTINGS = {"arms", "seeds", "text", "split", "tokenizer", "train_tokens", "width", "layers", "heads"}
SIZE_SETTINGS |= {"steps", "minutes", "measured", "out"}
SYNTHETIC = "synthetic"  # prefix of the names of artificial languages, which are no evidence about natural ones
TEXT = "builtin"  # other texts were trained at one size only, so their differences may come from the text
KIND = "decoder"  # kind of model trained at all these sizes; other kinds have separate studies (docs/dev/atlas.md)
SIGNS = {("tied", "untied"): 1, ("untied", "tied"): -1}  # (arm, reference) → sign of tied − untied
SLACK = math.log(1.05)  # tolerance of equal sizes: no two texts have equally many tokens
NARROW = 0.12  # nats per token: the differences of the atlas have a standard deviation of 0.19
AtlasRecord = dict[str, Any]
EXPECTED, SURPRISE, UNKNOWN = "as expected", "a surprise", "no expectation"


@dataclass(frozen=True)
class Expectation:
    """Comparison of a measured difference tied − untied with the atlas's prediction."""

    verdict: str  # as expected, a surprise, or no expectation
    found: float  # measured, nats per token
    value: float  # predicted; nan without a prediction
    low: float
    high: float
    why: str = ""  # reason why there is no prediction; "" if there is one
    settings: int = 0  # number of settings of the atlas, each predicted from the others
    held: int = 0  # number of those whose result is within the predicted interval


@cache
def atlas_records() -> tuple[AtlasRecord, ...]:
    """Return the trained settings of the atlas; of equal settings, the one with the most seeds.

    A record has the keys of a plan's record. `difference` is tied − untied with its interval `low`, `high` and standard
    `error`, in nats per token of held-out text: below zero tying is better. `sign` is −1 or 1 if that difference is
    significant, else 0. `command` repeats the training.
    """
    text = (pkgutil.get_data("tiewise", "planning/data/atlas.csv") or b"").decode()
    by_sizes: dict[tuple[Any, ...], AtlasRecord] = {}
    for line in csv.DictReader(io.StringIO(text)):
        if not _differs_in_sizes_only(line):
            continue
        record = _tied_minus_untied(line)
        sizes_key = record["text"], *logs(record, SIZES)
        if sizes_key not in by_sizes or by_sizes[sizes_key]["seeds"] < record["seeds"]:
            by_sizes[sizes_key] = record
    return tuple(by_sizes.values())


def _differs_in_sizes_only(line: Mapping[str, str]) -> bool:
    """Return whether a line compares tied and untied models with default settings except sizes."""
    settings = set(re.findall(r"--(?:set )?'?([a-z_]+)", line["command"]))
    has_usual_settings = settings <= SIZE_SETTINGS and line["text"] == TEXT and line["layers"] != "0"
    is_of_tying = (line["arm"], line["reference"]) in SIGNS
    return is_of_tying and bool(line["error"]) and has_usual_settings


def _tied_minus_untied(line: Mapping[str, str]) -> AtlasRecord:
    """Return a line of the atlas as a record whose difference is tied − untied."""
    sign = SIGNS[line["arm"], line["reference"]]
    low, value, high = sorted(sign * float(line[name]) for name in ("heldout_low", "heldout", "heldout_high"))
    record: AtlasRecord = {name: line[name] for name in ("study", "text", "command")}
    record |= {name: int(line[name]) for name in (*SIZES, "seeds")}
    record |= {"sign": sign * int(line["sign"]), "difference": value, "low": low, "high": high}
    record["error"] = float(line["error"])
    return record


def logs(sizes: Mapping[str, Any], names: Iterable[str]) -> tuple[float, ...]:
    """Return the logarithms of the named sizes."""
    return tuple(math.log(sizes[name]) for name in names)


def clip_to_trained(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return the sizes, each clipped to the range that was trained."""
    nearest = {}
    for name, size in sizes.items():
        trained = [record[name] for record in atlas_records()]
        nearest[name] = min(max(size, min(trained)), max(trained))
    return nearest


def factors_beyond(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return the sizes outside the trained range, each as a factor of the nearest trained size."""
    factors = {name: sizes[name] / size for name, size in clip_to_trained(sizes).items()}
    return {name: factor for name, factor in factors.items() if abs(math.log(factor)) > SLACK}


def in_words(factors: Mapping[str, float]) -> str:
    """Return factors as text.

    An example: a width 6 times the largest and a depth 0.5 times the smallest.
    """
    parts = []
    for name, factor in factors.items():
        noun = SIZES[name]
        article = "an" if noun[0] in "aeiou" else "a"
        end = "largest" if factor > 1 else "smallest"
        parts.append(f"{article} {noun} {factor:.2g} times the {end}")
    *first, last = parts
    if not first:
        return last
    return f"{', '.join(first)} and {last}"


def encloses(sizes: Mapping[str, float]) -> bool:
    """Return whether trained models enclose these sizes.

    A size that is the same in all trained models must have that value.
    """
    if factors_beyond(sizes):
        return False
    axes = _varied_sizes(sizes)
    if not axes:
        return True
    points = sorted({logs(record, axes) for record in atlas_records()})
    return bool(surface.enclosed(points, logs(clip_to_trained(sizes), axes)))


def _varied_sizes(names: Iterable[str]) -> list[str]:
    """Return the names of sizes in which the settings of the atlas differ."""
    varied = []
    for name in names:
        trained = {record[name] for record in atlas_records()}
        if len(trained) > 1:
            varied.append(name)
    return varied


def _surface_data() -> tuple[list[str], list[Any]]:
    """Return the axes of the surface, and its data.

    The data are points [n, d], differences, standard errors and seeds, all [n].
    """
    axes, points, facts = _varied_sizes(SIZES), [], []
    for record in atlas_records():
        points.append(logs(record, axes))
        facts.append([record["difference"], record["error"], record["seeds"]])
    return axes, [np.array(points), *np.array(facts).T]


def nearest_settings(sizes: Mapping[str, float], kind: str = KIND) -> dict[str, Any] | None:
    """Return the nearest settings, with the keys of a plan's record. None if the atlas is empty.

    `within` is true if the atlas encloses the sizes and trained models of this `kind`.
    """
    if not atlas_records():
        return None
    goal = logs(sizes, sizes)
    by_sizes: dict[tuple[float, ...], list[AtlasRecord]] = {}
    for record in atlas_records():
        by_sizes.setdefault(logs(record, sizes), []).append(record)
    sizes_key = min(by_sizes, key=lambda logarithms: math.dist(logarithms, goal))
    return {
        "kind": kind,
        "within": kind == KIND and encloses(sizes),
        "beyond": factors_beyond(sizes),
        "distance": math.dist(sizes_key, goal),
        "rows": sorted(by_sizes[sizes_key], key=itemgetter("tokens", "seen")),
    }


def assess_difference(sizes: Mapping[str, float], difference: float, seeds: int, other: str = "") -> Expectation:
    """Compare a measured difference over so many seeds with the atlas.

    `other` names a setting that no line of the atlas has; "" if there is none. The predicted interval contains a result
    of so many seeds with 95 % probability. A result inside it is as expected only if the interval is narrower than ±
    `NARROW`, because a wider one would contain nearly every result.
    """
    unknown = Expectation(UNKNOWN, difference, math.nan, math.nan, math.nan)
    if other:
        return replace(unknown, why=f"nothing in the atlas was trained with {other}")
    factors = factors_beyond(sizes)
    if factors:
        return replace(unknown, why=f"this run has {in_words(factors)} of the atlas")
    axes, data = _surface_data()
    fitted, scores = surface.fit(*data), score()
    if fitted is None or scores is None or not encloses(sizes):
        return replace(unknown, why="the settings of the atlas do not enclose this run’s")
    predicted = fitted.at(logs(clip_to_trained(sizes), axes), seeds)
    verdict, half = SURPRISE, predicted.high - predicted.value
    if predicted.low <= difference <= predicted.high:
        verdict = EXPECTED
    if verdict == EXPECTED and half >= NARROW:
        wide = f"its prediction there is {signed(predicted.value, 2)} ± {plain(half, 2)} nats per token"
        return replace(unknown, why=f"{wide}, and only one narrower than ± {NARROW} could agree")
    return Expectation(
        verdict,
        difference,
        predicted.value,
        predicted.low,
        predicted.high,
        settings=scores.settings,
        held=scores.covered,
    )


def score() -> SurfaceScore | None:
    """Return how well the surface predicts settings that were left out. None if they are too few."""
    _, data = _surface_data()
    left_out = surface.leave_one_out(*data)
    if not left_out:
        return None
    scores: SurfaceScore = surface.score_predictions(data[1], left_out)
    return scores
