"""Measurements: the results of an inspection's sections, as data.

    Quantity     one number with its interval, its value under no effect, and the conclusion it supports
    Curve        numbers along an axis (depth, step, rank, frequency)
    Grid         numbers over two axes
    Stack        parts that add up, a bar
    Points       tokens in a plane
    Listing      a table of names and numbers
    Measurement  the answer in one sentence, with all of the above

A section returns a `Measurement` and nothing else. Text, tables, figures and JSON are made from it by one function each
(`report/views.py`), so a new section has all of them. Each boundary has the same colour in every figure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tiewise.core.files import format_bytes
from tiewise.core.result import MINUS as MINUS
from tiewise.core.result import PrintedResult, Row

NONE = "–"
NATS = "nats per token"
TINY = 1e-8  # size below which a quantity with a unit is printed as 3.4e−09
ONE, TWO, NEITHER = "one table", "two tables", "neither"
_WHITE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})


def plain(value: float | None, digits: int = 4, sign: str = "") -> str:
    """Return a number as text: 5.2851, or a dash if it was not measured.

    A zero has no sign.
    """
    if value is None or not math.isfinite(value):
        return NONE
    text = f"{value:{sign},.{digits}f}".replace("-", MINUS)
    is_zero = not text.strip("+−0.,")
    return text.lstrip("+−") if is_zero else text


def signed(value: float | None, digits: int = 4) -> str:
    """Return a number with its sign: +0.0123 or −0.0123. Otherwise as `plain`."""
    return plain(value, digits, "+")


def magnitudes(low: float, high: float, digits: int = 4) -> str:
    """Return an interval that excludes zero as text without its sign: 0.043–0.062."""
    smaller, larger = sorted((abs(low), abs(high)))
    return f"{plain(smaller, digits)}–{plain(larger, digits)}"


def loss_digits(*losses: float) -> int:
    """Return the digits after the point of losses: 3, or 5 if all are small."""
    largest = max(abs(loss) for loss in losses)
    if largest >= 0.01 or largest == 0:
        return 3
    return 5


def percent(share: float, digits: int | None = None) -> str:
    """Return a share in per cent, with `digits` after the point.

    By default it has at least two significant digits.

    >>> percent(0.6243), percent(0.00345), percent(1.4), percent(0.2834, digits=1)
    ('62 %', '0.34 %', '140 %', '28.3 %')
    """
    if digits is not None:
        return f"{plain(100 * share, digits)} %"
    if share >= 0.1:
        return f"{plain(100 * share, 0)} %"
    return f"{100 * share:.2g} %".replace("-", MINUS)


def count(value: float) -> str:
    """Return a whole number with thousands separators: 1,234,567."""
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
    text = token.translate(_WHITE)
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text) or "(empty)"


@dataclass(frozen=True)
class Quantity:
    """One number, with its interval and its reading as evidence.

    `value [low, high]` is a value with its 95 % interval, NaN if there is none. A quantity with a `question` is
    evidence: it supports `below` or `above` if its whole interval is on that side of every value under no effect.
    """

    name: str  # label of its row in tables and figures: "after the best rotation"
    value: float
    low: float = math.nan
    high: float = math.nan
    n: int = 0  # independent values behind it
    chance: float | None = None  # the value under no effect
    null: tuple[float, ...] = ()  # values of permuted data
    of: str = ""  # name of the model, arm or table
    unit: str = ""  # "nats per token", "cosine", "bytes", "" for a count; "%" and "points": a share
    digits: int | None = None  # after the point; None: chosen by the size of the value
    deviation: float = math.nan  # standard deviation over seeds, printed if there is no interval
    main: bool = True  # whether the first table of the section lists it
    figure: str = ""  # title of the dot plot that contains it
    question: str = ""  # the question that it answers
    below: str = NEITHER
    above: str = NEITHER
    p: float | None = None  # p value of the question; None: Student's t of the interval
    why: str = ""  # explanation for the reader

    @classmethod
    def of_estimate(cls, name: str, estimate: Any, **more: Any) -> Quantity:
        """Return the quantity of an `Estimate`, or of None.

        The value is NaN without an estimate; the interval is NaN if the estimate has at most one row.
        """
        if estimate is None:
            return cls(name, math.nan, **more)
        if estimate.rows <= 1:
            return cls(name, estimate.value, n=estimate.rows, **more)
        return cls(name, estimate.value, estimate.low, estimate.high, estimate.rows, **more)

    @property
    def speaks(self) -> str:
        """The conclusion that it supports: `below`, `above`, or neither.

        It is neither if the interval contains the values under no effect.
        """
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
        """The values under no effect, as text: `chance`, and the largest of permuted data."""
        digits = 3 if self.unit != "%" else 4
        parts = []
        if self.chance is not None:
            parts.append(plain(self.chance, digits))
        if self.null:
            parts.append(f"permuted up to {plain(max(self.null), digits)}")
        return ", ".join(parts) or NONE

    def __str__(self) -> str:
        """Return the number as tables and figures print it.

        That is 0.192 [0.184, 0.199], 5.2851 ± 0.0042 over seeds, 12.3 MB, or the value alone; "diverged" for an
        infinity, and a dash for NaN.
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
        """Tells whether the value is a share, printed in percent."""
        return self.unit in ("%", "points")

    def _written(self, number: float) -> str:
        """Return one of the quantity's numbers as text, in its unit and with its digits."""
        if self._is_tiny():
            return f"{number:.2g}".replace("-", MINUS)
        return plain(100.0 * number if self._is_share else number, self._digits())

    def _is_tiny(self) -> bool:
        """Tells whether eight digits after the point could not show the value."""
        if self.digits is not None or self._is_share or not self.unit:
            return False
        return 0 < self._largest() < TINY

    def _largest(self) -> float:
        """Return the largest size among the value and its interval."""
        return max(abs(x) for x in (self.value, self.low, self.high) if math.isfinite(x))

    def _digits(self) -> int:
        """Return the digits after the point: as declared, or by the size of the value."""
        if self.digits is not None:
            return self.digits
        if self._is_share:
            return 1
        if not self.unit:
            return 0
        largest = self._largest()
        if largest >= 0.01 or largest == 0:
            return 3
        return 5 if largest >= 1e-4 else 8


@dataclass(frozen=True)
class Curve:
    """One line of a figure.

    The curves of one `name` share a figure: each `of` has a colour, each `which` a dash pattern.
    """

    name: str  # title of the figure
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()  # lower limits of 95 % intervals, one for each point, or none
    high: tuple[float, ...] = ()
    along: str = "step"  # name of the x axis
    unit: str = ""
    of: str = ""
    which: str = ""  # name of the line among several of one model: "logit lens", "fresh weights"
    level: float | None = None  # a value to compare with, drawn dotted
    level_name: str = ""
    mark: float | None = None  # the x of the model itself
    log: bool = False  # whether the y axis is logarithmic
    log_x: bool = False  # whether the x axis is logarithmic
    ticks: tuple[str, ...] = ()  # labels at x = 0, 1, 2, … if x counts groups
    why: str = ""  # the caption

    @property
    def line(self) -> str:
        """The curve's label in the legend."""
        return ", ".join(part for part in (self.of, self.which) if part)

    @classmethod
    def through(cls, name: str, points: Iterable[tuple[float, Any]], **more: Any) -> Curve:
        """Return the curve through points (x, estimate).

        Points whose estimate is None or not finite are left out.
        """
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
    """Numbers over two axes, drawn as a heat map; NaN for a missing number."""

    name: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    top: float = 1.0  # the colours range from −top to top
    axes: tuple[str, str] = ("", "")  # names of the rows' and the columns' axis
    of: str = ""
    why: str = ""
    texts: tuple[tuple[str, ...], ...] = ()  # texts of the cells, in the figure and in the table; "" for none


@dataclass(frozen=True)
class Stack:
    """One bar of a figure. The stacks of one `name` share a figure."""

    name: str
    bar: str  # label of the bar; "" for the model itself
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
    groups: tuple[int, ...]  # index in `legend` of each point
    legend: tuple[str, ...]  # names of the groups
    named: tuple[int, ...] = ()  # indices of the points that are drawn with their label
    axes: tuple[str, str] = ("", "")
    of: str = ""
    why: str = ""


@dataclass(frozen=True)
class Listing:
    """A table of text, whose first column names the row."""

    name: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    of: str = ""


@dataclass(frozen=True, repr=False)
class Measurement(PrintedResult):
    """Result of one section, for one model or several."""

    answer: str  # the section's question answered in half a sentence, without the model's name
    quantities: tuple[Quantity, ...] = ()
    curves: tuple[Curve, ...] = ()
    grids: tuple[Grid, ...] = ()
    stacks: tuple[Stack, ...] = ()
    points: tuple[Points, ...] = ()
    listings: tuple[Listing, ...] = ()
    notes: tuple[str, ...] = ()  # what the section left out, and cautions for the reader

    def about(self, label: str) -> Measurement:
        """Return a copy in which each part without a model's name gets `label`."""
        labelled: dict[str, Any] = {}
        for part_field in fields(self):
            if part_field.name not in ("answer", "notes"):
                parts = getattr(self, part_field.name)
                labelled[part_field.name] = tuple(part if part.of else replace(part, of=label) for part in parts)
        return replace(self, **labelled)

    def __getitem__(self, name: str) -> Quantity:
        """Return the first quantity of this name. Raises KeyError if there is none."""
        return {quantity.name: quantity for quantity in reversed(self.quantities)}[name]

    def answer_text(self) -> str:
        """Return the answer."""
        return self.answer

    def rows(self) -> list[Row]:
        """Return a row for every quantity: name, value, 95 % interval and unit."""
        columns = ("of", "name", "value", "low", "high", "unit")
        return [{column: getattr(quantity, column) for column in columns} for quantity in self.quantities]

    def record(self) -> dict[str, Any]:
        """Return all parts as plain values for JSON."""
        return asdict(self)


# colours of every figure and page: mid tones with a contrast of at least 3 : 1 on both backgrounds; a label always
# repeats the meaning of a colour

COLOURS = ("#2f7fd1", "#d1660a", "#2a9468", "#9466d6", "#d4475a", "#13879a", "#9a7b12", "#c4559c")
# boundary → index of its colour in COLOURS
PLACES = {"tied": 0, "untied": 1, "factored": 2, "projected": 3, "residual": 4, "spd": 5, "factored-untied": 6}
PATHS = {"lookup-path": 5, "head-path": 7}  # gradient path of a table → index of its colour
BACKGROUNDS = {"light": "#fbfaf8", "dark": "#17191d"}  # the same as --page in report/templates/report.css
# colours of a diverging scale: negative, zero, positive
DIVERGING = {"light": ("#2166ac", "#f7f5f1", "#b2441a"), "dark": ("#5aa2ea", "#1f2227", "#ee8a4a")}
# the kind of boundary at the start of a name, or of a folder in a path
_KIND = re.compile(rf"(?:^|/)({'|'.join(sorted(PLACES, key=len, reverse=True))})(?![a-z])")


def places(names: Iterable[str]) -> dict[str, int]:
    """Return an index into COLOURS for each name of a boundary, model or other object.

    The first name that contains a kind of boundary gets that kind's index. The other names get indices that are free,
    but never those of tied and untied.
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
