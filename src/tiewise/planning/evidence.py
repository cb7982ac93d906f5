"""What the atlas found of tying: comparisons of tied with untied decoders over a grid of sizes, and what they say of others.

    near(width=768, layers=12, vocab=50257)      the nearest of them, and whether they enclose these sizes
    expected({"width": 64, …}, seeds=3)          what their surface predicts there, with its interval
    score()                                      how well it predicts those of them that it was not shown

`catalogue/atlas.csv` holds the rows of every study (docs/sweep.md says its columns). Of them count here what differs in
sizes alone (`SIZES`): everything else is as the bare `tiewise compare` has it. Beyond the hull of their logarithms there is no
evidence, which is said; a factor counts the same in each size, up or down.
"""

from __future__ import annotations

import csv
import io
import math
import pkgutil
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from tiewise.core import Late

if TYPE_CHECKING:
    from tiewise.planning.surface import Score

np, surface = Late("numpy"), Late("tiewise.planning.surface")  # of which a plan beyond the atlas needs nothing
SIZES = ("width", "layers", "vocab", "tokens", "seen")
# settings that sizes are made of, or that change no model; every other one must be the default
FREE = ("arms", "seeds", "text", "split", "tokenizer", "train_tokens", "width", "layers", "heads", "steps", "minutes")
FREE += ("measured", "out")
MADE = "synthetic"  # how the name of a made language begins, which says nothing of people's
WORDS = {  # of a size above all that were trained, and below them
    "width": ("{} times wider", "{} times narrower"),
    "layers": ("{} times deeper", "{} times shallower"),
    "vocab": ("of {} times the vocabulary", "of a vocabulary {} times smaller"),
    "tokens": ("on {} times the text", "on {} times less text"),
    "seen": ("trained {} times longer", "trained {} times shorter"),
}
EXPECTED, SURPRISE, UNKNOWN = "as expected", "a surprise", "no expectation"


@dataclass(frozen=True)
class Trained:
    """Tied minus untied at one place of the atlas, in nats per token of held-out text: below zero tying is better."""

    study: str
    width: int
    layers: int
    vocab: int
    tokens: int  # of training text
    seen: int  # of them, each as often as it came
    difference: float
    low: float
    high: float
    error: float  # standard error
    seeds: int
    sign: int  # −1 tying is better, 1 worse, 0 no difference detected
    command: str  # repeats it

    def logs(self, sizes: Mapping[str, float]) -> list[float]:
        """Logarithms of the sizes that are asked for."""
        return [math.log(getattr(self, name)) for name in sizes]


@dataclass(frozen=True)
class Expectation:
    """What the atlas expected of tied − untied where a comparison was made, and whether it came so."""

    verdict: str  # as expected, a surprise, or no expectation
    why: str  # there is none
    found: float  # nats per token
    value: float  # what was expected
    low: float
    high: float
    settings: int  # that were left out, to be predicted by the others,
    held: int  # and how many of them lay within such intervals


@cache
def rows() -> tuple[Trained, ...]:
    """Every place of the atlas once, by the row with the most seeds."""
    text = (pkgutil.get_data("tiewise", "catalogue/atlas.csv") or b"").decode()
    found: dict[tuple[int, ...], Trained] = {}
    for row in csv.DictReader(io.StringIO(text)):
        options = re.findall(r"--(?:set )?'?([a-z_]+)", row["command"])
        flipped = (row["arm"], row["reference"]) == ("untied", "tied")
        if not (flipped or (row["arm"], row["reference"]) == ("tied", "untied")) or not row["error"]:
            continue
        sizes = [int(float(row[name])) for name in SIZES]
        if set(options) - {*FREE} or min(sizes) < 1 or f"--text {MADE}" in row["command"]:
            continue
        at = [float(row[name]) for name in ("heldout", "heldout_low", "heldout_high")]
        value, low, high = (-at[0], -at[2], -at[1]) if flipped else at
        sign = int(row["sign"]) * (-1 if flipped else 1)
        seeds = int(row["seeds"])
        made = Trained(row["study"], *sizes, value, low, high, float(row["error"]), seeds, sign, row["command"])
        if tuple(sizes) not in found or found[tuple(sizes)].seeds < seeds:
            found[tuple(sizes)] = made
    return tuple(found.values())


def beyond(sizes: Mapping[str, float]) -> dict[str, float]:
    """Sizes that are larger or smaller than any that was trained: their factor to the nearest."""
    found = {}
    for name, size in sizes.items():
        every = [getattr(row, name) for row in rows()]
        found[name] = size / min(max(size, min(every)), max(every))
    return {name: factor for name, factor in found.items() if abs(math.log(factor)) > math.log(1.05)}


def in_words(factors: Mapping[str, float]) -> str:
    """6 times wider, of 6.1 times the vocabulary."""
    said = [WORDS[name][x < 1].format(f"{max(x, 1 / x):.2g}") for name, x in factors.items()]
    return " and ".join(filter(None, (", ".join(said[:-1]), said[-1])))


def holds(sizes: Mapping[str, float]) -> bool:
    """Whether the settings that were trained enclose these sizes."""
    if beyond(sizes):
        return False
    # what all agree in, nothing can enclose
    axes = [name for name in sizes if len({getattr(row, name) for row in rows()}) > 1]
    points = {tuple(row.logs(dict.fromkeys(axes, 0.0))) for row in rows()}
    return not axes or surface.enclosed(sorted(points), [math.log(sizes[name]) for name in axes])
