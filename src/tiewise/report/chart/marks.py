"""Lines, dots, bars and cells of a chart.

All places are in per cent of the plot, so a chart fits every width. Marks are of two sorts: stretched ones, which are
in an SVG that stretches both sides to 100 units, and free ones, which keep their shape.
"""

from __future__ import annotations

import html
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tiewise.report.chart.axis import ChartAxis, Record, is_number
from tiewise.report.chart.symbols import DASHES, is_open, paint_of_bar, symbol_id, symbols_of

LEVELS = 40  # colours between zero and each end of a diverging scale
STRONG = 29  # level from which a cell's text has the page's colour
HOLLOW = ' fill="none"'
BAR = (-0.08, 0.42)  # top and bottom of a bar in its row, from the row's middle; its name is above it


@dataclass(frozen=True)
class ChartPlane:
    """Both axes of a chart."""

    x: ChartAxis
    y: ChartAxis

    def point(self, x: float | None, y: float | None) -> tuple[float, float] | None:
        """Return a point in per cent from the left and from the top. None if an axis cannot show it."""
        left, up = self.x.place(x), self.y.place(y)
        if left is None or up is None:
            return None
        return left, 100 - up


@dataclass
class ChartMarks:
    """Elements of a chart, by sort."""

    stretched: list[str] = field(default_factory=list)
    free: list[str] = field(default_factory=list)


def number(value: float) -> str:
    """Return a number with at most three decimals."""
    return f"{value:.3f}".rstrip("0").rstrip(".")


def draw(figure: Record, plane: ChartPlane) -> ChartMarks:
    """Return the marks of all traces.

    Raises:
        KeyError: a trace has a marker, dash or pattern that has no counterpart here.
    """
    marks = ChartMarks()
    for shape in figure["layout"].get("shapes", ()):
        marks.stretched.append(_level_line(shape, plane))
    starts: dict[str, float] = defaultdict(float)
    for index, trace in enumerate(figure["data"]):
        if trace["type"] == "bar":
            marks.free += _bars(index, trace, plane, starts)
        elif trace["type"] == "heatmap":
            marks.stretched += _cells(trace, plane, figure["layout"]["coloraxis"]["cmax"])
        else:
            _add_scatter(marks, index, trace, plane)
    return marks


def _level_line(shape: Record, plane: ChartPlane) -> str:
    """Return a vertical line over the whole height."""
    left = plane.x.place(shape["x0"]) or 0.0
    line = shape["line"]
    return f'<path d="M{number(left)} 0V100"{_stroke(line["color"], line["width"], line.get("dash", "solid"))}/>'


def _stroke(colour: str, width: float, dash: str) -> str:
    """Return the attributes of a line."""
    dashes = ""
    if DASHES[dash]:
        dashes = f' stroke-dasharray="{DASHES[dash]}"'
    return f' stroke="{colour}" stroke-width="{width:g}"{dashes}'


def _add_scatter(marks: ChartMarks, index: int, trace: Record, plane: ChartPlane) -> None:
    """Add band, line, intervals and markers of a trace."""
    points = [plane.point(x, y) for x, y in zip(trace["x"], trace["y"], strict=True)]
    shared = f' data-trace="{index}"{_opacity(trace)}'
    if trace.get("fill"):
        marks.stretched.append(f'<path class="band"{shared} d="{_path(points)}Z" fill="{trace["fillcolor"]}"/>')
        return
    mode = trace["mode"]
    if "lines" in mode:
        line = trace["line"]
        stroke = _stroke(line["color"], line.get("width", 2), line.get("dash", "solid"))
        marks.stretched.append(f'<path class="line"{shared} d="{_path(points)}"{stroke}/>')
    if trace.get("error_x", {}).get("visible"):
        marks.stretched.append(_intervals(trace, plane, shared))
    if "markers" in mode:
        _add_markers(marks, trace, points, shared)


def _opacity(trace: Record) -> str:
    """Return the attribute of a translucent trace."""
    opacity = trace.get("opacity", trace.get("marker", {}).get("opacity", 1))
    if opacity == 1:
        return ""
    return f' opacity="{opacity:g}"'


def _path(points: Iterable[tuple[float, float] | None]) -> str:
    """Return a path through points. A point that cannot be shown interrupts it."""
    commands = []
    command = "M"
    for point in points:
        if point is None:
            command = "M"
            continue
        commands.append(f"{command}{number(point[0])} {number(point[1])}")
        command = "L"
    return "".join(commands)


def _intervals(trace: Record, plane: ChartPlane, shared: str) -> str:
    """Return the horizontal intervals of a trace as one path."""
    error = trace["error_x"]
    commands = []
    for x, y, above, below in zip(trace["x"], trace["y"], error["array"], error["arrayminus"], strict=True):
        ends = plane.point(x - below, y), plane.point(x + above, y)
        if above or below:
            commands.append(_path(ends))
    return f'<path class="interval"{shared} d="{"".join(commands)}"{_stroke(trace["marker"]["color"], 2, "solid")}/>'


def _add_markers(marks: ChartMarks, trace: Record, points: Sequence[tuple[float, float] | None], shared: str) -> None:
    """Add the markers of a trace. Filled circles are one path, whose points have round ends."""
    marker = trace["marker"]
    colour, size = marker["color"], marker["size"]
    symbols = symbols_of(trace, len(points))
    if set(symbols) == {"circle"}:
        dots = "".join(f"M{number(point[0])} {number(point[1])}h0" for point in points if point)
        path = f'<path class="dots"{shared} d="{dots}"{_stroke(colour, size, "solid")}/>'
        marks.stretched.append(path)
        return
    outline = f' stroke="{colour}" stroke-width="{marker.get("line", {}).get("width", 0) or 0:g}"'
    uses = []
    for symbol, point in zip(symbols, points, strict=True):
        if point:
            name = html.escape(symbol_id(symbol, size))
            hollow = HOLLOW * is_open(symbol)
            uses.append(f'<use href="#{name}" x="{number(point[0])}%" y="{number(point[1])}%"{hollow}/>')
    marks.free.append(f'<g class="points"{shared} fill="{colour}"{outline}>{"".join(uses)}</g>')


def _bars(index: int, trace: Record, plane: ChartPlane, starts: dict[str, float]) -> Iterator[str]:
    """Yield the bars of a trace, each at the end of its row's last one. `starts` has the ends by row."""
    fill = paint_of_bar(trace)
    for row, (name, length) in enumerate(zip(trace["y"], trace["x"], strict=True)):
        start = starts[name]
        starts[name] += length
        corner, end = plane.point(start, row + BAR[0]), plane.point(start + length, row + BAR[1])
        if length and corner and end:
            place = f'x="{number(corner[0])}%" y="{number(corner[1])}%"'
            size = f'width="{number(end[0] - corner[0])}%" height="{number(end[1] - corner[1])}%"'
            yield f'<rect class="bar" data-trace="{index}" {place} {size} fill="{fill}"/>'


def level_of(value: float, top: float) -> int:
    """Return the colour of a value, from −LEVELS to LEVELS.

    Values beyond `top` have the colours of the ends.
    """
    return max(-LEVELS, min(LEVELS, round(LEVELS * value / top)))


def _cells(trace: Record, plane: ChartPlane, top: float) -> Iterator[str]:
    """Yield a path for each colour, which has all cells of that colour."""
    corners: dict[int, list[str]] = defaultdict(list)
    for row, values in enumerate(trace["z"]):
        for column, value in enumerate(values):
            corner, end = plane.point(column - 0.5, row - 0.5), plane.point(column + 0.5, row + 0.5)
            if is_number(value) and corner and end:
                size = f"h{number(end[0] - corner[0])}v{number(end[1] - corner[1])}"
                back = f"h{number(corner[0] - end[0])}"
                corners[level_of(value, top)].append(f"M{number(corner[0])} {number(corner[1])}{size}{back}z")
    for level, cells in sorted(corners.items()):
        yield f'<path class="cells" data-level="{level}" d="{"".join(cells)}" style="fill:{heat_colour(level)}"/>'


def heat_colour(level: int) -> str:
    """Return the colour of a level in CSS.

    The page defines the colours of zero and of both ends, by theme.
    """
    pole = "--low"
    if level > 0:
        pole = "--high"
    return f"color-mix(in srgb,var({pole}) {100 * abs(level) / LEVELS:g}%,var(--zero))"


def rows_of_bars(figure: Record) -> Sequence[str]:
    """Return the names of the rows of bars; empty for other figures."""
    first: Mapping[str, Sequence[str]] = next(iter(figure["data"]), {})
    if first.get("type") == "bar":
        return first["y"]
    return ()


def interval_ends(trace: Record) -> Iterator[float]:
    """Yield both ends of each horizontal interval of a trace."""
    error = trace.get("error_x", {})
    if error.get("visible"):
        for x, above, below in zip(trace["x"], error["array"], error["arrayminus"], strict=True):
            if is_number(x) and math.isfinite(above + below):
                yield from (x - below, x + above)
