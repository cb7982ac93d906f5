"""A figure of plotly as static HTML and SVG.

The SVG has the same data as the figure. It adapts to every width without a script: places are in per cent, texts keep
their size, and the page's style sheet moves names of rows above their rows on a phone.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from tiewise.report.chart import labels
from tiewise.report.chart.axis import ChartAxis, Record, axis_of
from tiewise.report.chart.legend import legend
from tiewise.report.chart.marks import ChartMarks, ChartPlane, draw, interval_ends, number, rows_of_bars

ROW, TALL_ROW, BAR_ROW, TEXT_ROW = 38, 52, 46, 44  # pixels of a row of dots, of the same on a phone, of bars, of texts
LEAST_CELL, MAP_HEIGHT = 14, 300  # pixels of a map's row, and of all its rows
OUTSIDE = 110  # pixels of a figure's height outside the plot
DEFAULT_HEIGHT = 380


class ChartKind(Enum):
    """Sort of a chart, which decides where texts are."""

    BARS = "bars"
    MAP = "map"
    ROWS = "rows"
    CURVES = "curves"


@dataclass(frozen=True)
class _Heights:
    """Pixels of the plot on a wide page and on a phone."""

    usual: int
    narrow: int


def static_chart(figure: Record, label: str) -> str:
    """Return a figure as HTML with one SVG.

    Args:
        figure: data and layout as plotly.js reads them.
        label: description for readers who do not see the figure.

    Raises:
        KeyError: the figure has a trace, marker or dash that has no counterpart here.
    """
    kind = _kind_of(figure)
    plane = _plane_of(figure, kind)
    heights = _heights_of(figure, kind, plane)
    marks = draw(figure, plane)
    bottom = labels.bottom_labels(plane.x, turned=bool(figure["layout"].get("xaxis", {}).get("tickangle")))
    side, left = _side_texts(figure, kind, plane)
    inner = list(labels.names_of_points(figure, plane, heights.usual))
    if kind is ChartKind.MAP:
        inner += labels.cell_texts(figure, plane)
    left = max(left, bottom.left)
    room = f"--left:{left}px;--right:{bottom.right}px;--bottom:{bottom.usual}px;--low-bottom:{bottom.narrow}px"
    room += f";--height:{heights.usual}px;--tall:{heights.narrow}px;--edge:{bottom.left}px"
    return (
        f'<div class="chart {kind.value}">{legend(figure)}{_title(plane.y.title, "unit")}'
        f'<div class="frame" style="{room}">'
        f'<svg role="img" aria-label="{html.escape(label)}"{_ranges(plane)}>'
        f"{_stretched(kind, plane, marks)}{''.join(marks.free)}{bottom.texts}{side}{''.join(inner)}</svg></div>"
        f"{_title(plane.x.title, 'unit along')}</div>"
    )


def _kind_of(figure: Record) -> ChartKind:
    """Return the sort of a figure."""
    types = {trace["type"] for trace in figure["data"]}
    if "heatmap" in types:
        return ChartKind.MAP
    if "bar" in types:
        return ChartKind.BARS
    if "ticktext" in figure["layout"].get("yaxis", {}):
        return ChartKind.ROWS
    return ChartKind.CURVES


def _plane_of(figure: Record, kind: ChartKind) -> ChartPlane:
    """Return both axes of a figure."""
    layout = figure["layout"]
    x_options, y_options = layout.get("xaxis", {}), layout.get("yaxis", {})
    if kind is ChartKind.BARS:
        rows = rows_of_bars(figure)
        y = ChartAxis(len(rows) - 0.5, -0.5, False, y_options)
        return ChartPlane(axis_of(x_options, _sums_of_bars(figure), from_zero=True), y)
    if kind is ChartKind.MAP:
        cells = figure["data"][0]
        columns, rows = cells["x"], cells["y"]
        return ChartPlane(
            ChartAxis(-0.5, len(columns) - 0.5, False, x_options), ChartAxis(len(rows) - 0.5, -0.5, False, y_options)
        )
    return ChartPlane(axis_of(x_options, _x_values(figure)), axis_of(y_options, _y_values(figure)))


def _sums_of_bars(figure: Record) -> list[float]:
    """Return the length of each row of bars."""
    return [sum(lengths) for lengths in zip(*(trace["x"] for trace in figure["data"]), strict=True)]


def _x_values(figure: Record) -> Iterator[float]:
    """Yield every x of a figure: points, ends of intervals and vertical lines."""
    for trace in figure["data"]:
        yield from trace["x"]
        yield from interval_ends(trace)
    for shape in figure["layout"].get("shapes", ()):
        yield shape["x0"]


def _y_values(figure: Record) -> Iterator[float]:
    """Yield every y of a figure."""
    return chain.from_iterable(trace["y"] for trace in figure["data"])


def _heights_of(figure: Record, kind: ChartKind, plane: ChartPlane) -> _Heights:
    """Return the heights of the plot."""
    if kind is ChartKind.BARS:
        height = BAR_ROW * max(len(rows_of_bars(figure)), 1)
        return _Heights(height, height)
    if kind is ChartKind.ROWS:
        return _heights_of_rows([tick.text for tick in plane.y.ticks])
    height = figure["layout"].get("height", DEFAULT_HEIGHT) - OUTSIDE
    if kind is ChartKind.MAP:
        trace = figure["data"][0]
        rows = max(len(trace["y"]), 1)
        height = max(LEAST_CELL * rows, MAP_HEIGHT)
        if trace.get("text"):
            height = TEXT_ROW * rows
    return _Heights(height, height)


def _heights_of_rows(names: list[str]) -> _Heights:
    """Return the heights of rows of dots; every row has room for the longest name."""
    rows = max(len(names), 1)
    lines = max((name.count("\n") + 1 for name in names), default=1)
    above = max((len(labels.lines_above(name)) for name in names), default=1)
    return _Heights(max(ROW, labels.LINE * lines + 8) * rows, (TALL_ROW + labels.LINE * (above - 1)) * rows)


def _side_texts(figure: Record, kind: ChartKind, plane: ChartPlane) -> tuple[str, int]:
    """Return the texts left of the plot, and the pixels that they need there."""
    if kind is ChartKind.BARS:
        return labels.bar_labels(figure, rows_of_bars(figure), plane), 0
    if kind is ChartKind.MAP:
        return labels.map_labels(plane.y)
    if kind is ChartKind.ROWS:
        return labels.row_labels(plane.y)
    return labels.side_labels(plane.y)


def _title(words: str, name: str) -> str:
    """Return the title of an axis; "" without one."""
    if not words:
        return ""
    return f'<p class="{name}">{html.escape(words, quote=False)}</p>'


def _ranges(plane: ChartPlane) -> str:
    """Return both ends of each axis as attributes: logarithms to base 10 on a logarithmic axis."""
    x, y = plane.x, plane.y
    return f' data-x="{x.start:.10g} {x.end:.10g}" data-y="{y.start:.10g} {y.end:.10g}"'


def _stretched(kind: ChartKind, plane: ChartPlane, marks: ChartMarks) -> str:
    """Return the SVG of grid lines and stretched marks."""
    parts = [*_grid(kind, plane), *marks.stretched]
    return f'<svg class="stretched" viewBox="0 0 100 100" preserveAspectRatio="none">{"".join(parts)}</svg>'


def _grid(kind: ChartKind, plane: ChartPlane) -> Iterator[str]:
    """Yield grid lines, and the line at zero."""
    if kind is ChartKind.MAP:
        return
    lines = [f"M{number(tick.place)} 0V100" for tick in plane.x.ticks]
    if kind is not ChartKind.BARS:
        lines += [f"M0 {number(100 - tick.place)}H100" for tick in plane.y.ticks]
    yield f'<path class="grid" d="{"".join(lines)}"/>'
    zero = plane.y.place(0)
    has_zero_line = kind is ChartKind.CURVES and plane.y.options.get("zeroline", True)
    if has_zero_line and zero is not None and 0 <= zero <= 100:
        yield f'<path class="zero" d="M0 {number(100 - zero)}H100"/>'
