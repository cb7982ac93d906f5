"""Texts of a chart: ticks along both axes, names of points, numbers in cells.

No two texts overlap. A text without room at the width of a phone is hidden there; one without room at the usual width
is left out. The table under each figure has all of them.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

from tiewise.report.chart.axis import AxisTick, ChartAxis, Record, is_number
from tiewise.report.chart.marks import STRONG, ChartPlane, level_of, number
from tiewise.report.chart.text_width import shortened, text_width

NARROW, USUAL = 220, 420  # pixels of the plot's width on a phone, and in a column of a desktop
GAP = 8  # pixels between two texts
LINE = 13  # pixels of a line of text
ONE_LINE = 46  # letters of a row's name in one line of a phone
CELL_NAME = 16  # letters of the name of a map's row or column
SIZE = 12  # pixels of the font
LEVEL_DEPTH, LEAST_RIGHT = 26, 12  # pixels below the plot for level texts, and right of it
SPARE = " spare"  # class of texts that a phone hides
# (turned everywhere, turned on a phone) → classes of a tick
TICK_CLASSES = {(False, False): "tick", (False, True): "tick turned-narrow", (True, True): "tick turned"}


@dataclass(frozen=True)
class BottomLabels:
    """Texts under the plot, and the pixels that they need.

    Attributes:
        texts: SVG elements.
        usual: pixels below the plot.
        narrow: the same on a phone.
        left: pixels left of the plot.
        right: pixels right of the plot.
    """

    texts: str
    usual: int
    narrow: int
    left: int
    right: int


def text(words: str, attributes: str) -> str:
    """Return an SVG text."""
    return f"<text{attributes}>{html.escape(words, quote=False)}</text>"


def bottom_labels(axis: ChartAxis, *, turned: bool) -> BottomLabels:
    """Return the texts along the horizontal axis.

    Names turn if they have no room side by side; of numbers, some are left out.

    Args:
        axis: the axis.
        turned: True if names are always turned.
    """
    ticks = axis.ticks
    if turned:
        ticks = [AxisTick(tick.place, shortened(tick.text, CELL_NAME)) for tick in ticks]
    turns_usual = turned or (axis.has_names and _is_crowded(ticks, USUAL))
    turns_narrow = turns_usual or (axis.has_names and _is_crowded(ticks, NARROW))
    usual, narrow = _apart(ticks, USUAL, turns_usual), _apart(ticks, NARROW, turns_narrow)
    name = TICK_CLASSES[turns_usual, turns_narrow]
    texts, widths = [], []
    for index in sorted(usual):
        spare = SPARE * (index not in narrow)
        place = f' class="{name}{spare}" x="{number(ticks[index].place)}%" y="100%" dy="18"'
        texts.append(text(ticks[index].text, place))
        widths.append(text_width(ticks[index].text, SIZE))
    depth = math.ceil(0.87 * max(widths, default=0)) + 16
    halves = [math.ceil(width / 2) for width in widths] or [0]
    return BottomLabels(
        "".join(texts),
        usual=(LEVEL_DEPTH, depth)[turns_usual],
        narrow=(LEVEL_DEPTH, depth)[turns_narrow],
        left=halves[0],
        right=max(LEAST_RIGHT, (halves[-1] - 4) * (not turns_usual)),
    )


def _is_crowded(ticks: Sequence[AxisTick], width: int) -> bool:
    """Return whether level texts have no room in a plot of this width."""
    return len(_apart(ticks, width, turned=False)) < len(ticks)


def _apart(ticks: Sequence[AxisTick], width: int, turned: bool) -> set[int]:
    """Return the indices of ticks whose texts have room in a plot of this width."""
    indices, free_from = set(), -math.inf
    for index, tick in sorted(enumerate(ticks), key=lambda pair: pair[1].place):
        half, gap = text_width(tick.text, SIZE) / 2, GAP
        if turned:
            half, gap = LINE / 2, 0
        middle = tick.place / 100 * width
        if middle - half >= free_from:
            indices.add(index)
            free_from = middle + half + gap
    return indices


def side_labels(axis: ChartAxis) -> tuple[str, int]:
    """Return the texts along a vertical axis of numbers, and the pixels that they need."""
    ticks = axis.ticks
    texts = [text(tick.text, f' class="side" x="-8" y="{number(100 - tick.place)}%" dy=".35em"') for tick in ticks]
    return "".join(texts), _widest([tick.text for tick in ticks])


def map_labels(axis: ChartAxis) -> tuple[str, int]:
    """Return the names of a map's rows, and the pixels that they need."""
    texts, names = [], []
    for tick in axis.ticks:
        names.append(shortened(tick.text, CELL_NAME))
        texts.append(text(names[-1], f' class="side cell" x="-6" y="{number(100 - tick.place)}%" dy=".35em"'))
    return "".join(texts), _widest(names)


def row_labels(axis: ChartAxis) -> tuple[str, int]:
    """Return the names of rows, and the pixels that they need left of the plot.

    A name is left of its row, in short lines. On a phone it is above its row.
    """
    texts, widths = [], []
    for tick in axis.ticks:
        lines = tick.text.split("\n")
        widths += lines
        y = number(100 - tick.place)
        first = -LINE * (len(lines) - 1) / 2
        texts.append(_lines(lines, "row beside", -10, y, first))
        above = lines_above(tick.text)
        texts.append(_lines(above, "row above", 0, y, -LINE * len(above) - 8))
    return "".join(texts), _widest(widths)


def lines_above(name: str) -> list[str]:
    """Return the lines of a row's name on a phone, where it is above its row."""
    return wrap(name.replace("\n", " "), ONE_LINE)


def _lines(lines: Sequence[str], name: str, x: int, y: str, first: float) -> str:
    """Return a text of several lines, the first one `first` pixels below the place y."""
    if len(lines) == 1:
        return text(lines[0], f' class="{name}" x="{x}" y="{y}%" dy="{first + 4:g}"')
    spans = []
    for index, line in enumerate(lines):
        step: float = LINE
        if index == 0:
            step = first + 4
        spans.append(f'<tspan x="{x}" dy="{step:g}">{html.escape(line, quote=False)}</tspan>')
    return f'<text class="{name}" y="{y}%">{"".join(spans)}</text>'


def bar_labels(figure: Record, names: Sequence[str], plane: ChartPlane) -> str:
    """Return the names of bars, each above its bar, with the bar's text."""
    values = figure["data"][0].get("text") or []
    texts = []
    for row, name in enumerate(names):
        place = plane.point(0, row - 0.5)
        if place is None:
            continue
        words = html.unescape(name)
        if values:
            words = f"{words}: {values[row]}"
        texts.append(text(words, f' class="row over" x="0" y="{number(place[1])}%" dy="16"'))
    return "".join(texts)


def _widest(lines: Sequence[str]) -> int:
    """Return the pixels of the widest line, with a margin."""
    return max((text_width(line, SIZE) for line in lines), default=0) + 12


def cell_texts(figure: Record, plane: ChartPlane) -> Iterator[str]:
    """Yield the numbers in the cells of a map."""
    trace = figure["data"][0]
    top = figure["layout"]["coloraxis"]["cmax"]
    columns = max(len(trace["x"]), 1)
    for row, texts in enumerate(trace.get("text") or ()):
        for column, words in enumerate(texts):
            point, value = plane.point(column, row), trace["z"][row][column]
            if words and point and is_number(value):
                classes = ["in-cell"]
                if abs(level_of(value, top)) >= STRONG:
                    classes.append("strong")
                if text_width(words, 10) + 2 > NARROW / columns:
                    classes.append("spare")
                place = f' class="{" ".join(classes)}" x="{number(point[0])}%" y="{number(point[1])}%" dy=".35em"'
                yield text(words, place)


def names_of_points(figure: Record, plane: ChartPlane, height: int) -> Iterator[str]:
    """Yield the names of points, as many as have room."""
    points = list(_named_points(figure, plane))
    usual = _without_overlap(points, USUAL, height)
    narrow = _without_overlap(points, NARROW, height)
    for index in sorted(usual):
        point = points[index]
        spare = SPARE * (index not in narrow)
        anchor = ANCHORS[_side(point.x)]
        style = f' style="text-anchor:{anchor}"'
        place = f' class="name{spare}"{style} x="{number(point.x)}%" y="{number(point.y)}%" dy="{point.below}"'
        yield text(point.words, place)


@dataclass(frozen=True)
class _NamedPoint:
    """Text at a point in per cent; `below` is its baseline in pixels below the point."""

    words: str
    x: float
    y: float
    below: int


ANCHORS: Mapping[int, str] = {0: "start", 1: "middle", 2: "end"}


def _side(x: float) -> int:
    """Return 0 for a point near the left edge, 2 near the right edge, else 1."""
    return (x > 12) + (x > 88)


def _named_points(figure: Record, plane: ChartPlane) -> Iterator[_NamedPoint]:
    """Yield each text at a point of the figure."""
    for trace in figure["data"]:
        if "text" not in trace.get("mode", ""):
            continue
        below = 4  # in the middle of a cell
        if "markers" in trace["mode"]:
            below = -8
        for x, y, words in zip(trace["x"], trace["y"], trace["text"], strict=True):
            point = plane.point(x, y)
            if words and point:
                yield _NamedPoint(html.unescape(words), *point, below)


def _without_overlap(points: Sequence[_NamedPoint], width: int, height: int) -> set[int]:
    """Return the indices of texts that have room in a plot of this size.

    Earlier texts have priority.
    """
    boxes: list[tuple[float, float, float]] = []  # left, right, middle
    indices = set()
    for index, point in enumerate(points):
        length = text_width(point.words, 11) + 4
        left = point.x / 100 * width - length * _side(point.x) / 2
        middle = point.y / 100 * height + point.below
        is_free = all(left > b or left + length < a or abs(middle - y) > LINE for a, b, y in boxes)
        if is_free:
            boxes.append((left, left + length, middle))
            indices.add(index)
    return indices
