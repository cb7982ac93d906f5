"""Curves of one name as a figure: a colour per model, a dash per line."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from tiewise.core.measurement import NONE, Curve, Listing, Quantity
from tiewise.report.drawing import DASHES, QUIET, UNSAID, Style, finish, marker
from tiewise.report.report_page import Panel

LOWEST = 1e-9  # position of 0 on a logarithmic axis
MOST_ROWS = 64  # maximum number of rows in a curve's table
MOST_MARKERS = 32  # maximum number of points of a line with markers
FEW_LAYERS = 12  # an axis that ends below this value has a tick at each integer


def lines(curves: Sequence[Curve], looks: Mapping[str, Style], digits: int | None = None) -> Panel:
    """Draw curves of one name. A model has a colour, and each of its lines a dash.

    The first curve has its interval as a band.

    Args:
        curves: at least one; the first decides title, axes and caption.
        looks: style of each model.
        digits: digits after the point in the table and hover labels; None: as many as a value's size needs.
    """
    figure, first = go.Figure(), curves[0]
    _add_curves(figure, curves, looks, digits)
    every_x: set[float] = set()
    for curve in curves:
        every_x.update(curve.x)
    x = sorted(every_x)
    if x:  # without points a level has no start and end
        _add_levels(figure, curves, x[0], x[-1])
    _set_axes(figure, first, x)
    return Panel(figure, first.why, _table(curves, x, digits))


def _add_curves(figure: go.Figure, curves: Sequence[Curve], looks: Mapping[str, Style], digits: int | None) -> None:
    """Add every curve. Dashes distinguish a model's lines, or models that have one line each."""
    kinds = list(dict.fromkeys(curve.which for curve in curves))
    for curve in curves:
        look = looks[curve.of]
        dash = look.dash
        if len(kinds) > 1:
            dash = DASHES[kinds.index(curve.which) % len(DASHES)]
        width, marker_size = 1.6, 4
        if curve.which == kinds[0]:
            width, marker_size = 2.2, 6
            _add_band(figure, curve, look)
        y = _drawable(curve, curve.y)
        mode = "lines"
        if len(y) <= MOST_MARKERS:
            mode = "lines+markers"
        figure.add_scatter(
            x=list(curve.x),
            y=y,
            name=html.escape(curve.line),
            legendgroup=curve.line,
            mode=mode,
            line=go.scatter.Line(color=look.colour, width=width, dash=dash),
            marker=marker(look.colour, marker_size, look.marker),
            customdata=_values_with_intervals(curve, digits),
            hovertemplate="%{customdata}",
        )
        if curve.mark in curve.x:
            _add_mark(figure, curve, look, y[curve.x.index(curve.mark)])


def _drawable(curve: Curve, values: Sequence[float]) -> list[float]:
    """Return values that the curve's axis can represent: above 0 if it is logarithmic."""
    if not curve.log:
        return list(values)
    return [max(value, LOWEST) for value in values]


def _add_band(figure: go.Figure, curve: Curve, look: Style) -> None:
    """Add a curve's interval as a band, if it has one."""
    low = _drawable(curve, curve.low)
    if all(math.isnan(value) for value in low):
        return
    figure.add_scatter(
        x=[*curve.x, *reversed(curve.x)],
        y=[*curve.high, *reversed(low)],
        mode="lines",
        line_width=0,
        fill="toself",
        fillcolor=look.colour,
        opacity=0.18,
        **UNSAID,
        legendgroup=curve.line,
    )


def _add_mark(figure: go.Figure, curve: Curve, look: Style, y: float) -> None:
    """Add a ring around the point of a curve that is the model's actual value."""
    ring = marker(look.colour, 15, f"{look.marker}-open", 2.2)
    figure.add_scatter(x=[curve.mark], y=[y], mode="markers", marker=ring, **UNSAID, legendgroup=curve.line)


def _add_levels(figure: go.Figure, curves: Sequence[Curve], start: float, end: float) -> None:
    """Add a dotted line from `start` to `end` at every level of the curves.

    The first curve that has a level names it. NaN is a level that could not be estimated, and has no line.
    """
    levels: dict[tuple[float, str], str] = {}  # (level, its name) → the model that has this level
    for curve in reversed(curves):
        if curve.level is not None and math.isfinite(curve.level):
            levels[curve.level, curve.level_name] = curve.of
    for (level, name), model in levels.items():
        label = name
        if len(levels) > 1:
            label = f"{name}, {model}"
        figure.add_scatter(
            x=[start, end],
            y=[level, level],
            mode="lines",
            name=html.escape(label),
            showlegend=bool(name),
            line=go.scatter.Line(color=QUIET, width=1.6, dash="dot"),
            hoverinfo="skip",
        )


def _set_axes(figure: go.Figure, first: Curve, x: Sequence[float]) -> None:
    """Set title and both axes from the first curve. `x` has every x of the figure, ascending."""
    finish(figure, first.name, first.unit).update_xaxes(title=first.along, zeroline=False)
    figure.update_layout(hovermode="x unified")
    if x and 1 < x[-1] < FEW_LAYERS:  # layers are integers
        figure.update_xaxes(dtick=1)
    if first.unit == "%":
        figure.update_yaxes(title="", tickformat=".0%")
    if first.ticks:
        groups = list(range(len(first.ticks)))
        labels = [html.escape(tick) for tick in first.ticks]
        figure.update_xaxes(tickvals=groups, ticktext=labels, range=[-0.3, groups[-1] + 0.3])
    if first.log_x:
        figure.update_xaxes(type="log", dtick=math.log10(4))
    if first.log:
        figure.update_yaxes(type="log", dtick=1, tickformat="~g")


def _table(curves: Sequence[Curve], x: Sequence[float], digits: int | None) -> Listing:
    """Return a row for each x that a curve has, and a column for each curve."""
    columns = []
    for curve in curves:
        texts = _values_with_intervals(curve, digits)
        columns.append(dict(zip(curve.x, texts, strict=True)))
    first, rows = curves[0], []
    for value in _thinned(x):
        name = f"{value:,.10g}"
        if first.ticks:
            name = first.ticks[int(value)]
        rows.append([name, *(column.get(value, NONE) for column in columns)])
    return Listing("", [first.along, *(curve.line for curve in curves)], rows)


def _thinned(x: Sequence[float]) -> Sequence[float]:
    """Return at most `MOST_ROWS` + 1 of the values, about equally many per doubling."""
    if len(x) <= MOST_ROWS:
        return x
    indices = {round(len(x) ** (k / MOST_ROWS)) - 1 for k in range(MOST_ROWS + 1)}
    return [x[i] for i in sorted(indices)]


def _values_with_intervals(curve: Curve, digits: int | None) -> list[str]:
    """Return every value of a curve with its interval as text."""
    lows, highs = curve.low, curve.high
    if not lows:
        lows = highs = (math.nan,) * len(curve.y)
    texts = []
    for y, low, high in zip(curve.y, lows, highs, strict=True):
        texts.append(str(Quantity("", y, low, high, unit=curve.unit or "value", digits=digits)))
    return texts
