"""The atlas: differences between tied and untied decoders over a grid of sizes.

    nearest_settings({"width": 768, "layers": 12, "vocab": 50257})   the nearest settings of the atlas

`data/atlas.csv` has a line for each result of a study (docs/sweep.md defines its columns). Only lines that differ in
sizes count here, at the best step and the best learning rate of each arm (`tune`): at one rate for both, tied and
untied models differ by that choice. All other settings have the defaults of `tiewise compare`. Outside the convex
hull of their logarithms there is no evidence, and messages say so. A factor counts the same in each size, up or down.
"""

from __future__ import annotations

import csv
import io
import math
import pkgutil
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

from tiewise.core import Late
from tiewise.core.step_names import BEST

optimize = Late("scipy.optimize")  # a plan outside the trained range does not need it
SIZES = ("width", "layers", "vocab", "tokens", "seen")  # columns of the atlas; seen: tokens trained on
NOUNS = {"width": "width", "layers": "depth", "vocab": "vocabulary"}  # sizes of a model in messages
# settings that decide the sizes or do not change the model; all others must have their defaults
SIZE_SETTINGS = {"arms", "seeds", "text", "split", "tokenizer", "train_tokens", "width", "layers", "heads"}
SIZE_SETTINGS |= {"steps", "minutes", "measured", "out", "tune", "learning_rate"}
TEXT = "builtin"  # other texts were trained at one size only, so their differences may come from the text
KIND = "decoder"  # kind of model trained at all these sizes; other kinds have separate studies (docs/dev/atlas.md)
SIGNS = {("tied", "untied"): 1, ("untied", "tied"): -1}  # (arm, reference) → sign of tied − untied
SLACK = math.log(1.05)  # tolerance of equal sizes: no two texts have equally many tokens
AtlasRecord = dict[str, Any]


@cache
def atlas_records() -> tuple[AtlasRecord, ...]:
    """Return the trained settings of the atlas; of equal settings, the one with the most seeds.

    A record has the keys of a plan's record. `difference` is tied − untied with its interval `low`, `high` and standard
    `error`, in nats per token of held-out text: below zero tying is better. `sign` is −1 or 1 if that difference is
    significant, else 0. `step` names the step of the losses. `command` repeats the training.
    """
    text = (pkgutil.get_data("tiewise", "planning/data/atlas.csv") or b"").decode()
    by_sizes: dict[tuple[Any, ...], AtlasRecord] = {}
    for line in csv.DictReader(io.StringIO(text)):
        if not _differs_in_sizes_only(line):
            continue
        record = _tied_minus_untied(line)
        sizes_key = record["text"], *logs(record, SIZES)
        other = by_sizes.setdefault(sizes_key, record)
        by_sizes[sizes_key] = max(other, record, key=itemgetter("seeds"))
    return tuple(by_sizes.values())


def _differs_in_sizes_only(line: Mapping[str, str]) -> bool:
    """Return whether a line compares tuned tied and untied models with default settings except sizes."""
    settings = set(re.findall(r"--(?:set )?'?([a-z_]+)", line["command"]))
    has_usual_settings = (
        "tune" in settings and settings <= SIZE_SETTINGS and line["text"] == TEXT and line["layers"] != "0"
    )
    is_of_tying = (line["arm"], line["reference"]) in SIGNS
    has_best_step = bool(line["error"] and line["last"])  # studies of the last step alone have nothing in `last`
    return is_of_tying and has_best_step and has_usual_settings


def _tied_minus_untied(line: Mapping[str, str]) -> AtlasRecord:
    """Return a line of the atlas as a record whose difference is tied − untied."""
    sign = SIGNS[line["arm"], line["reference"]]
    low, value, high = sorted(sign * float(line[name]) for name in ("heldout_low", "heldout", "heldout_high"))
    record: AtlasRecord = {name: line[name] for name in ("study", "text", "command")}
    record |= {name: int(line[name]) for name in (*SIZES, "seeds")}
    record |= {"sign": sign * int(line["sign"]), "difference": value, "low": low, "high": high}
    record["error"] = float(line["error"])
    record["step"] = BEST
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
        noun = NOUNS[name]
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
    points = {logs(record, axes) for record in atlas_records()}
    return _is_in_hull(sorted(points), logs(clip_to_trained(sizes), axes))


def _varied_sizes(names: Iterable[str]) -> list[str]:
    """Return the names of sizes in which the settings of the atlas differ."""
    varied = []
    for name in names:
        trained = {record[name] for record in atlas_records()}
        if len(trained) > 1:
            varied.append(name)
    return varied


def _is_in_hull(points: Sequence[Sequence[float]], point: Sequence[float]) -> bool:
    """Return whether points [n, d] enclose a point [d].

    They do if a linear program finds weights ≥ 0 of sum 1 whose mean of the points is the point.
    """
    coordinates, ones = zip(*points, strict=True), [1.0] * len(points)
    weights = optimize.linprog(ones, A_eq=[*coordinates, ones], b_eq=[*point, 1.0])
    return bool(weights.success)


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
