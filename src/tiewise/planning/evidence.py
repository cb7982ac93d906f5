"""What the atlas found of tying: tied against untied decoders over a grid of sizes, and what that says of others.

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
from typing import TYPE_CHECKING, Any

from tiewise.core import Late
from tiewise.core.found import plain, signed

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
    found: dict[tuple[Any, ...], Row] = {}
    for row in csv.DictReader(io.StringIO(text)):
        sign = SIGNS.get((row["arm"], row["reference"]), 0)
        others = {*re.findall(r"--(?:set )?'?([a-z_]+)", row["command"])} - FREE
        if not sign or not row["error"] or others or row["text"] != TEXT or row["layers"] == "0":
            continue
        made: Row = {name: row[name] for name in ("study", "text", "command")}
        made |= {name: int(row[name]) for name in (*SIZES, "seeds")} | {"sign": sign * int(row["sign"])}
        low, value, high = sorted(sign * float(row[name]) for name in ("heldout_low", "heldout", "heldout_high"))
        made |= {"difference": value, "low": low, "high": high, "error": float(row["error"])}
        place = made["text"], *logs(made, SIZES)
        if place not in found or found[place]["seeds"] < made["seeds"]:
            found[place] = made
    return tuple(found.values())


def logs(sizes: Mapping[str, Any], names: Iterable[str]) -> tuple[float, ...]:
    """Logarithms of the sizes that are named."""
    return tuple(math.log(sizes[name]) for name in names)


def clipped(sizes: Mapping[str, float]) -> dict[str, float]:
    """The nearest sizes between the smallest and the largest that were trained."""
    every = {name: [row[name] for row in rows()] for name in sizes}
    return {name: min(max(size, min(every[name])), max(every[name])) for name, size in sizes.items()}


def beyond(sizes: Mapping[str, float]) -> dict[str, float]:
    """Sizes above or below all that were trained, each by its factor to the nearest."""
    found = {name: sizes[name] / size for name, size in clipped(sizes).items()}
    return {name: factor for name, factor in found.items() if abs(math.log(factor)) > SLACK}


def in_words(factors: Mapping[str, float]) -> str:
    """A width 6 times the largest and a depth 0.5 times the smallest: what `beyond` found."""
    what = {name: f"an {said}" if said[0] in "aeiou" else f"a {said}" for name, said in SIZES.items()}
    said = [f"{what[name]} {x:.2g} times the {'largest' if x > 1 else 'smallest'}" for name, x in factors.items()]
    return " and ".join(filter(None, (", ".join(said[:-1]), said[-1])))


def holds(sizes: Mapping[str, float]) -> bool:
    """Whether what was trained encloses these sizes; a size that all of it shares must be that one."""
    axes = _varied(sizes)
    points = sorted({logs(row, axes) for row in rows()})
    return not beyond(sizes) and (not axes or surface.enclosed(points, logs(clipped(sizes), axes)))


def _varied(names: Iterable[str]) -> list[str]:
    """Those of the sizes in which settings of the atlas differ."""
    return [name for name in names if len({row[name] for row in rows()}) > 1]


def _measured() -> tuple[list[str], list[Any]]:
    """Axes of the surface, and what it is fitted to: points [n, d], differences, standard errors and seeds, all [n]."""
    axes, facts = _varied(SIZES), [[row["difference"], row["error"], row["seeds"]] for row in rows()]
    return axes, [np.array([logs(row, axes) for row in rows()]), *np.array(facts).T]


def near(sizes: Mapping[str, float], kind: str = KIND) -> dict[str, Any] | None:
    """The nearest settings as a plan's record has them, `within` the atlas if their `kind` is, too; None of nothing."""
    if not rows():
        return None
    goal = logs(sizes, sizes)
    place = min((logs(row, sizes) for row in rows()), key=lambda at: math.dist(at, goal))
    found = sorted((row for row in rows() if logs(row, sizes) == place), key=lambda row: (row["tokens"], row["seen"]))
    within, apart = kind == KIND and holds(sizes), beyond(sizes)
    return {"kind": kind, "within": within, "beyond": apart, "distance": math.dist(place, goal), "rows": found}


def expectation(sizes: Mapping[str, float], found: float, seeds: int, other: str = "") -> Expectation:
    """Hold a difference over so many seeds against the atlas; `other` says what no row of it has, if anything.

    The interval is that in which a figure of so many seeds is predicted to lie with 95 % probability. A figure inside
    it is as expected only if the interval is narrower than ± `NARROW`: a wider one would hold nearly anything.
    """
    unknown = Expectation(UNKNOWN, found, math.nan, math.nan, math.nan)
    if other:
        return replace(unknown, why=f"nothing in the atlas was trained with {other}")
    if factors := beyond(sizes):
        return replace(unknown, why=f"this run has {in_words(factors)} of the atlas")
    axes, measured = _measured()
    made, known = surface.fit(*measured), score()
    if made is None or known is None or not holds(sizes):
        return replace(unknown, why="the settings of the atlas do not enclose this run’s")
    e = made.at(logs(clipped(sizes), axes), seeds)
    inside, half = e.low <= found <= e.high, e.high - e.value
    if inside and half >= NARROW:
        wide = f"its prediction there is {signed(e.value, 2)} ± {plain(half, 2)} nats per token"
        return replace(unknown, why=f"{wide}, and only one narrower than ± {NARROW} could agree")
    verdict = EXPECTED if inside else SURPRISE
    return Expectation(verdict, found, e.value, e.low, e.high, settings=known.settings, held=known.held)


def score() -> SurfaceScore | None:
    """How well the surface predicts settings of the atlas that it was not shown; None of too few."""
    measured = _measured()[1]
    left_out = surface.leave_one_out(*measured)
    return surface.scored(measured[1], left_out) if left_out else None
