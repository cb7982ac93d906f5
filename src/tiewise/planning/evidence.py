"""The atlas: tied against untied decoders over a grid of sizes, and what that says of other sizes.

    near({"width": 768, "layers": 12, "vocab": 50257})   the nearest of them, and whether all enclose these sizes
    expectation({"width": 64, …}, found=-0.02, seeds=3)  what their surface predicts there, and whether that was found
    score()                                              how well it predicts those of them that it was not shown

`data/atlas.csv` holds the rows of every study (docs/sweep.md says its columns). Those count here that differ in
sizes alone: everything else is as the bare `tiewise compare` has it. Beyond the hull of their logarithms there is no
evidence, which is said. A factor counts the same in each size, up or down.
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

np, surface = Late("numpy"), Late("tiewise.planning.surface")  # a plan beyond the atlas needs neither
SIZES = {  # a row's column → what it is called
    "width": "width",
    "layers": "depth",
    "vocab": "vocabulary",
    "tokens": "amount of text",
    "seen": "length of training",
}
# settings that sizes are made of, or that change no model; every other one must be the default
FREE = {"arms", "seeds", "text", "split", "tokenizer", "train_tokens", "width", "layers", "heads"}
FREE |= {"steps", "minutes", "measured", "out"}
MADE = "synthetic"  # how the name of a made language begins, which says nothing of people's
TEXT = "builtin"  # on other texts one size alone was trained: what differs there need not be the sizes
KIND = "decoder"  # what was trained at all these sizes; other kinds have studies of their own (docs/atlas.md)
SIGNS = {("tied", "untied"): 1, ("untied", "tied"): -1}  # (arm, reference) → what makes the row tied − untied
SLACK = math.log(1.05)  # sizes as near as this are alike: no two texts have equally many tokens
NARROW = 0.12  # nats per token: the differences of the atlas have a standard deviation of 0.19
Row = dict[str, Any]
EXPECTED, SURPRISE, UNKNOWN = "as expected", "a surprise", "no expectation"


@dataclass(frozen=True)
class Expectation:
    """What the atlas expected of tied − untied where a comparison was made, and whether that was found."""

    verdict: str  # as expected, a surprise, or no expectation
    found: float  # nats per token
    value: float  # expected; nan where there is no expectation
    low: float
    high: float
    why: str = ""  # there is no expectation; empty where there is one
    settings: int = 0  # of the atlas, each predicted from the others
    held: int = 0  # of those settings: found within such an interval


@cache
def rows() -> tuple[Row, ...]:
    """What was trained at every place of the atlas, by the row with the most seeds, as a plan's record has it.

    `difference` is tied − untied with its interval `low`, `high` and standard error, in nats per token of held-out
    text: below zero tying is better. `sign` is −1 or 1 where that is detected; `command` repeats it.
    """
    text = (pkgutil.get_data("tiewise", "planning/data/atlas.csv") or b"").decode()
    at_place: dict[tuple[Any, ...], Row] = {}
    for line in csv.DictReader(io.StringIO(text)):
        if not _counts(line):
            continue
        row = _tied_minus_untied(line)
        place = row["text"], *logs(row, SIZES)
        if place not in at_place or at_place[place]["seeds"] < row["seeds"]:
            at_place[place] = row
    return tuple(at_place.values())


def _counts(line: Mapping[str, str]) -> bool:
    """Return whether a line of the atlas compares tied and untied models that differ from others in sizes alone."""
    settings = set(re.findall(r"--(?:set )?'?([a-z_]+)", line["command"]))
    has_usual_settings = settings <= FREE and line["text"] == TEXT and line["layers"] != "0"
    is_of_tying = (line["arm"], line["reference"]) in SIGNS
    return is_of_tying and bool(line["error"]) and has_usual_settings


def _tied_minus_untied(line: Mapping[str, str]) -> Row:
    """Return a line of the atlas as a row, its difference as tied − untied."""
    sign = SIGNS[line["arm"], line["reference"]]
    low, value, high = sorted(sign * float(line[name]) for name in ("heldout_low", "heldout", "heldout_high"))
    row: Row = {name: line[name] for name in ("study", "text", "command")}
    row |= {name: int(line[name]) for name in (*SIZES, "seeds")}
    row |= {"sign": sign * int(line["sign"]), "difference": value, "low": low, "high": high}
    row["error"] = float(line["error"])
    return row


def logs(sizes: Mapping[str, Any], names: Iterable[str]) -> tuple[float, ...]:
    """Return logarithms of the sizes that are named."""
    return tuple(math.log(sizes[name]) for name in names)


def clipped(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return the nearest sizes between the smallest and the largest that were trained."""
    nearest = {}
    for name, size in sizes.items():
        trained = [row[name] for row in rows()]
        nearest[name] = min(max(size, min(trained)), max(trained))
    return nearest


def beyond(sizes: Mapping[str, float]) -> dict[str, float]:
    """Return sizes above or below all that were trained, each by its factor to the nearest."""
    factors = {name: sizes[name] / size for name, size in clipped(sizes).items()}
    return {name: factor for name, factor in factors.items() if abs(math.log(factor)) > SLACK}


def in_words(factors: Mapping[str, float]) -> str:
    """Return factors of `beyond` as: a width 6 times the largest and a depth 0.5 times the smallest."""
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


def holds(sizes: Mapping[str, float]) -> bool:
    """Return whether trained models enclose these sizes. A size that all of them share must be that one."""
    if beyond(sizes):
        return False
    axes = _varied(sizes)
    if not axes:
        return True
    points = sorted({logs(row, axes) for row in rows()})
    return bool(surface.enclosed(points, logs(clipped(sizes), axes)))


def _varied(names: Iterable[str]) -> list[str]:
    """Return those of the sizes in which settings of the atlas differ."""
    varied = []
    for name in names:
        trained = {row[name] for row in rows()}
        if len(trained) > 1:
            varied.append(name)
    return varied


def _measured() -> tuple[list[str], list[Any]]:
    """Return axes of the surface, and its data: points [n, d], differences, standard errors and seeds, all [n]."""
    axes, points, facts = _varied(SIZES), [], []
    for row in rows():
        points.append(logs(row, axes))
        facts.append([row["difference"], row["error"], row["seeds"]])
    return axes, [np.array(points), *np.array(facts).T]


def near(sizes: Mapping[str, float], kind: str = KIND) -> dict[str, Any] | None:
    """Return the nearest settings as a plan's record has them; None of an empty atlas.

    They are `within` the atlas if it encloses the sizes and trained models of this `kind`.
    """
    if not rows():
        return None
    goal = logs(sizes, sizes)
    by_place: dict[tuple[float, ...], list[Row]] = {}
    for row in rows():
        by_place.setdefault(logs(row, sizes), []).append(row)
    place = min(by_place, key=lambda logarithms: math.dist(logarithms, goal))
    return {
        "kind": kind,
        "within": kind == KIND and holds(sizes),
        "beyond": beyond(sizes),
        "distance": math.dist(place, goal),
        "rows": sorted(by_place[place], key=itemgetter("tokens", "seen")),
    }


def expectation(sizes: Mapping[str, float], found: float, seeds: int, other: str = "") -> Expectation:
    """Compare a difference over so many seeds with the atlas.

    `other` names what no row of the atlas has, if anything. The interval is that in which a figure of so many seeds is
    predicted to lie with 95 % probability. A figure inside it is as expected only if the interval is narrower than
    ± `NARROW`: a wider one would hold nearly anything.
    """
    unknown = Expectation(UNKNOWN, found, math.nan, math.nan, math.nan)
    if other:
        return replace(unknown, why=f"nothing in the atlas was trained with {other}")
    factors = beyond(sizes)
    if factors:
        return replace(unknown, why=f"this run has {in_words(factors)} of the atlas")
    axes, data = _measured()
    fitted, scores = surface.fit(*data), score()
    if fitted is None or scores is None or not holds(sizes):
        return replace(unknown, why="the settings of the atlas do not enclose this run’s")
    predicted = fitted.at(logs(clipped(sizes), axes), seeds)
    verdict, half = SURPRISE, predicted.high - predicted.value
    if predicted.low <= found <= predicted.high:
        verdict = EXPECTED
    if verdict == EXPECTED and half >= NARROW:
        wide = f"its prediction there is {signed(predicted.value, 2)} ± {plain(half, 2)} nats per token"
        return replace(unknown, why=f"{wide}, and only one narrower than ± {NARROW} could agree")
    return Expectation(
        verdict,
        found,
        predicted.value,
        predicted.low,
        predicted.high,
        settings=scores.settings,
        held=scores.held,
    )


def score() -> SurfaceScore | None:
    """Return how well the surface predicts settings that were left out; None of too few."""
    _, data = _measured()
    left_out = surface.leave_one_out(*data)
    if not left_out:
        return None
    scores: SurfaceScore = surface.scored(data[1], left_out)
    return scores
