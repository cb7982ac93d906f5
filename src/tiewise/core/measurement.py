"""A measurement is data, said once: what every section of an inspection finds, and all that is made of it.

    Quantity     one number: with its interval, what no effect gives, and what it would speak for
    Curve        numbers along an axis (depth, step, rank, frequency)
    Grid         numbers over two axes
    Stack        parts that add up, a bar
    Points       tokens in a plane
    Listing      rows of names and numbers that a reader looks up
    Measurement  the answer in one sentence, and these

A section makes a `Measurement` and nothing else. Words, tables, figures and JSON are functions of it, each written once
(`report/views.py`), so that a new section has all of them. Boundaries have one colour each, wherever they are drawn.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tiewise.core.files import format_bytes

MINUS, NONE = "−", "–"
NATS = "nats per token"
ONE, TWO, NEITHER = "one table", "two tables", "neither"
_WHITE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})


def plain(value: float | None, digits: int = 4, sign: str = "") -> str:
    """5.2851, or a dash where no number was measured; a zero has no sign."""
    if value is None or not math.isfinite(value):
        return NONE
    text = f"{value:{sign},.{digits}f}".replace("-", MINUS)
    is_zero = not text.strip("+−0.,")
    return text.lstrip("+−") if is_zero else text


def signed(value: float | None, digits: int = 4) -> str:
    """+0.0123 or −0.0123, or a dash where no number was measured; a zero has no sign."""
    return plain(value, digits, "+")


def count(value: float) -> str:
    """1,234,567."""
    return f"{value:,.0f}"


def rounded(value: float) -> float:
    """Return `value` with three significant digits, an integer as an integer.

    >>> rounded(4_837_343_232), rounded(0.12749)
    (4840000000, 0.127)
    """
    short = float(f"{value:.3g}")
    return int(short) if isinstance(value, int) else short


def visible(token: str) -> str:
    """Make white space and control characters of a token visible: " the" becomes ␣the."""
    shown = token.translate(_WHITE)
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in shown) or "(empty)"


@dataclass(frozen=True)
class Quantity:
    """One number.

    `value [low, high]` is a value with its 95 % interval; NaN where there is none. A quantity with a `question` is read
    as evidence: it speaks for `below` or `above` where its interval lies wholly on that side of all no effect gives.
    """

    name: str  # a row of tables and figures, in plain words: "after the best rotation"
    value: float
    low: float = math.nan
    high: float = math.nan
    n: int = 0  # independent values behind it
    chance: float | None = None  # what no effect gives
    null: tuple[float, ...] = ()  # what permuted data gave
    of: str = ""  # the model, arm or table
    unit: str = ""  # "nats per token", "cosine", "bytes", "" for a count; "%" and "points": a share
    digits: int | None = None  # after the point; None as many as its size asks for
    deviation: float = math.nan  # standard deviation over seeds, where that stands in place of an interval
    main: bool = True  # whether it stands in the one table that a reader sees first
    figure: str = ""  # title of the dot plot that it is always drawn in
    question: str = ""
    below: str = NEITHER
    above: str = NEITHER
    p: float | None = None  # of its question, where it is not that of Student's t behind the interval
    why: str = ""  # how to read it, where a reader would ask

    @classmethod
    def of_estimate(cls, name: str, found: Any, **more: Any) -> Quantity:
        """Return an estimate under a name; without one, or without an interval, NaN."""
        if found is None:
            return cls(name, math.nan, **more)
        if found.rows <= 1:
            return cls(name, found.value, n=found.rows, **more)
        return cls(name, found.value, found.low, found.high, found.rows, **more)

    @property
    def speaks(self) -> str:
        """What it speaks for: `below`, `above`, or neither if the interval contains what no effect gives."""
        no_effect = (self.chance or 0.0, *self.null)
        if math.isnan(self.low) or math.isnan(self.high):
            return NEITHER
        if self.high < min(no_effect):
            return self.below
        if self.low > max(no_effect):
            return self.above
        return NEITHER

    @property
    def no_effect(self) -> str:
        """What no effect gives, in words: its chance, and the most that permuted data gave."""
        digits = 3 if self.unit != "%" else 4
        parts = []
        if self.chance is not None:
            parts.append(plain(self.chance, digits))
        if self.null:
            parts.append(f"permuted up to {plain(max(self.null), digits)}")
        return ", ".join(parts) or NONE

    def __str__(self) -> str:
        """Return the one form in which a number is written.

        That is 0.192 [0.184, 0.199], 5.2851 ± 0.0042 over seeds, 12.3 MB, or the value alone; "diverged" for an
        infinity, and a dash for nan.
        """
        if math.isinf(self.value):
            return "diverged"
        if math.isnan(self.value):
            return NONE
        if self.unit == "bytes":
            return format_bytes(self.value)
        value = self._written(self.value)
        mark = " %" if self.unit == "%" else ""
        if not math.isnan(self.low):
            return f"{value}{mark} [{self._written(self.low)}, {self._written(self.high)}]"
        if not math.isnan(self.deviation):
            return f"{value} ± {self._written(self.deviation)}"
        return f"{value}{mark}"

    @property
    def _is_share(self) -> bool:
        """Whether the value is a share, written in hundredths."""
        return self.unit in ("%", "points")

    def _written(self, number: float) -> str:
        """Return one of the quantity's numbers in its scale, with its digits after the point."""
        return plain(100.0 * number if self._is_share else number, self._digits())

    def _digits(self) -> int:
        """Return the digits after the point: as declared, or as many as the size of the value asks for."""
        if self.digits is not None:
            return self.digits
        if self._is_share:
            return 1
        if not self.unit:
            return 0
        largest = max(abs(x) for x in (self.value, self.low, self.high) if math.isfinite(x))
        if largest >= 0.01 or largest == 0:
            return 3
        return 5 if largest >= 1e-4 else 8


@dataclass(frozen=True)
class Curve:
    """One line of a figure, which holds the curves of one `name`: a colour for each `of`, a dash for each `which`."""

    name: str  # title of the figure
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()  # 95 % intervals, as many as points; none where there are none
    high: tuple[float, ...] = ()
    along: str = "step"  # what x is
    unit: str = ""
    of: str = ""
    which: str = ""  # of several lines of one model: "logit lens", "fresh weights"
    level: float | None = None  # a value to compare with, drawn dotted
    level_name: str = ""
    mark: float | None = None  # the x that is the model's own
    log: bool = False  # whether y falls over orders of magnitude
    log_x: bool = False  # whether x doubles from point to point
    ticks: tuple[str, ...] = ()  # what is written at x = 0, 1, 2, … where x counts groups
    why: str = ""  # the caption

    @property
    def line(self) -> str:
        """What the legend calls it."""
        return ", ".join(part for part in (self.of, self.which) if part)

    @classmethod
    def through(cls, name: str, points: Iterable[tuple[float, Any]], **more: Any) -> Curve:
        """Return the curve through (x, estimate or None); what is none, or no number, is left out."""
        rows = []
        for x, estimate in points:
            if estimate is not None and math.isfinite(estimate.value):
                rows.append((x, estimate.value, estimate.low, estimate.high))
        if not rows:
            return cls(name, (), (), **more)
        x_values, values, low, high = zip(*rows, strict=True)
        return cls(name, x_values, values, low, high, **more)


@dataclass(frozen=True)
class Grid:
    """Numbers over two axes, drawn as a heat map; NaN where there is none."""

    name: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    top: float = 1.0  # the end of the colours, both ways
    axes: tuple[str, str] = ("", "")  # of rows and columns
    of: str = ""
    why: str = ""
    texts: tuple[tuple[str, ...], ...] = ()  # what is written in the cells, and in the table; "" nothing


@dataclass(frozen=True)
class Stack:
    """One bar of a figure, which holds the stacks of one `name`."""

    name: str
    bar: str  # "" for the model's own
    parts: tuple[tuple[str, float], ...]  # from the bottom up
    unit: str = ""
    of: str = ""
    why: str = ""


@dataclass(frozen=True)
class Points:
    """Tokens as points of a plane, a colour for each group."""

    name: str
    xy: tuple[tuple[float, float], ...]
    labels: tuple[str, ...]
    groups: tuple[int, ...]  # of each point: its place in `legend`
    legend: tuple[str, ...]  # names of the groups
    named: tuple[int, ...] = ()  # places of points that carry their label
    axes: tuple[str, str] = ("", "")
    of: str = ""
    why: str = ""


@dataclass(frozen=True)
class Listing:
    """Rows of text that a reader looks up, the first column naming the row."""

    name: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    of: str = ""


@dataclass(frozen=True)
class Measurement:
    """What one section found of one model, or of several."""

    answer: str  # the section's question answered in half a sentence, without the model's name
    quantities: tuple[Quantity, ...] = ()
    curves: tuple[Curve, ...] = ()
    grids: tuple[Grid, ...] = ()
    stacks: tuple[Stack, ...] = ()
    points: tuple[Points, ...] = ()
    listings: tuple[Listing, ...] = ()
    notes: tuple[str, ...] = ()  # what was left out, and what a reader must know

    def about(self, label: str) -> Measurement:
        """Return it with everything that names no model as of this one."""
        labelled: dict[str, Any] = {}
        for kind in fields(self):
            if kind.name not in ("answer", "notes"):
                parts = getattr(self, kind.name)
                labelled[kind.name] = tuple(part if part.of else replace(part, of=label) for part in parts)
        return replace(self, **labelled)

    def __getitem__(self, name: str) -> Quantity:
        """Return the first quantity of this name; KeyError where there is none."""
        return {quantity.name: quantity for quantity in reversed(self.quantities)}[name]

    def record(self) -> dict[str, Any]:
        """Everything as plain values for JSON."""
        return asdict(self)


# colours that mean the same in every figure and page: mid tones, with a contrast of at least 3 : 1 on both backgrounds;
# they never carry meaning alone

COLOURS = ("#2f7fd1", "#d1660a", "#2a9468", "#9466d6", "#d4475a", "#13879a", "#9a7b12", "#c4559c")
# the place in these of each boundary, whatever the figure
PLACES = {"tied": 0, "untied": 1, "factored": 2, "projected": 3, "residual": 4, "spd": 5, "factored-untied": 6}
PATHS = {"lookup-path": 5, "head-path": 7}  # of the two gradients of a table
BACKGROUNDS = {"light": "#fbfaf8", "dark": "#17191d"}  # the same as --page in report/templates/report.css
# from negative over zero to positive
DIVERGING = {"light": ("#2166ac", "#f7f5f1", "#b2441a"), "dark": ("#5aa2ea", "#1f2227", "#ee8a4a")}
# the kind of boundary that a name begins with, or one of the folders of a path
_KIND = re.compile(rf"(?:^|/)({'|'.join(sorted(PLACES, key=len, reverse=True))})(?![a-z])")


def places(names: Iterable[str]) -> dict[str, int]:
    """A place for each of these: boundaries, models that are called by one, or anything else.

    The first of a kind of boundary has that kind's place in every figure; what is left takes places that are free, but
    never those of tied and untied.
    """
    distinct = list(dict.fromkeys(names))
    place_of: dict[str, int] = {}
    for name in distinct:
        kind = _KIND.search(name)
        if kind and PLACES[kind[1]] not in place_of.values():
            place_of[name] = PLACES[kind[1]]
    taken = set(place_of.values())
    place = 0
    for name in distinct:
        if name in place_of:
            continue
        while place in taken or place % len(COLOURS) <= PLACES["untied"]:
            place += 1
        place_of[name] = place
        taken.add(place)
    return {name: place_of[name] for name in distinct}
