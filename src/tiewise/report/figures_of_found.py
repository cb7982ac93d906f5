"""A section's `Found` as figures: one for each name of curves, a heat map for each grid, else quantities as dots."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from tiewise.core.found import Curve, Found, Grid, Quantity, Stack, visible
from tiewise.core.numerals import NONE, plain
from tiewise.report import theme
from tiewise.report.bars import finish, stacked
from tiewise.report.faces import no_effect
from tiewise.report.grid import Table
from tiewise.report.heat_map import heat_map
from tiewise.report.inspected.dots import QUIET, Dot, Series, dot_plot
from tiewise.report.sheet import Panel

INTERVALS = (
    "Bars and bands are 95 % intervals. Grey strokes are what no effect gives, grey crosses what permuted data gave."
)
LOWEST = 1e-9  # what a value that is exactly 0 is drawn at where the axis is one of orders of magnitude


def panels(found: Mapping[str, Found]) -> list[Panel]:
    """Figures, in the order in which a section gives them: curves and grids; dots where it has neither."""
    curves: dict[str, list[Curve]] = {}
    stacks: dict[str, list[Stack]] = {}
    grids: list[Grid] = []
    for one in found.values():
        for curve in one.curves:
            curves.setdefault(curve.name, []).append(curve)
        for stack in one.stacks:
            stacks.setdefault(stack.name, []).append(stack)
        grids += (grid for grid in one.grids if all(repr(grid) != repr(drawn) for drawn in grids))  # NaN is not NaN
    looks = dict(zip(found, map(theme.style, theme.places(list(found))), strict=True))
    made = [_stacked(name, bars) for name, bars in stacks.items()]
    made += [_lines(name, drawn, looks) for name, drawn in curves.items()]
    made += [_heat(grid) for grid in grids]
    every = [q for one in found.values() for q in one.quantities]
    titles = dict.fromkeys(q.figure for q in every if q.figure)
    made += [_dots(title, [q for q in every if q.figure == title], looks) for title in titles]
    if not made:
        units = dict.fromkeys(q.unit for q in every if not math.isnan(q.low))
        made = [_dots(unit.capitalize(), [q for q in every if q.unit == unit], looks) for unit in units]
    return made


def _dots(title: str, quantities: Sequence[Quantity], looks: Mapping[str, theme.Style]) -> Panel:
    """A row for each quantity, a dot for each model."""
    step = 0.5 / max(len(looks), 1)
    chance = [Dot(q.name, q.chance) for q in quantities if q.chance is not None]
    permuted = [Dot(q.name, value) for q in quantities for value in q.null]
    series = [
        Series("no effect", chance, QUIET, "line-ns-open", 16),
        Series("permuted", permuted, QUIET, "x-thin-open", 7),
    ]
    for position, (label, look) in enumerate(looks.items()):
        place = step * (position - (len(looks) - 1) / 2)
        dots = [Dot(q.name, q.value, *_ends(q)) for q in quantities if q.of == label]
        series.append(Series(label, dots, look.colour, look.marker, offset=place))
    rows = [[q.name, q.of, str(q), no_effect(q)] for q in quantities]
    table = Table(["measure", "model", "value [95 %]", "no effect"], rows)
    figure = dot_plot(series, title, quantities[0].unit)
    if quantities[0].unit == "%":
        figure.update_xaxes(title="", tickformat=".0%")
    return Panel(figure, INTERVALS, table)


def _ends(q: Quantity) -> tuple[float | None, float | None]:
    return (None, None) if math.isnan(q.low) else (q.low, q.high)


def _stacked(name: str, bars: Sequence[Stack]) -> Panel:
    """Bars of parts; a bar that several models share is drawn once."""
    values = {bar.bar or f"{bar.of}, its own": dict(bar.parts) for bar in bars}
    parts = list(dict.fromkeys(part for one in values.values() for part in one))
    rows = [[bar, *(plain(one.get(part)) for part in parts)] for bar, one in values.items()]
    figure = stacked(values, name, bars[0].unit, plain, parts[0])
    return Panel(figure, bars[0].why, Table(["", *parts], rows))


def _lines(name: str, curves: Sequence[Curve], looks: Mapping[str, theme.Style]) -> Panel:
    """Curves of one name: a model's colour, a dash for each line of it; the first has its interval as a band."""
    figure, first = go.Figure(), curves[0]
    which = list(dict.fromkeys(curve.which for curve in curves))
    for curve in curves:
        _draw(figure, curve, looks[curve.of], theme.DASHES[which.index(curve.which)])
    levels = {(curve.level, curve.level_name) for curve in curves if curve.level is not None}
    for level, said in levels:
        whose = said if len(levels) == 1 else f"{said}, {next(c.of for c in curves if c.level == level)}"
        figure.add_scatter(
            x=[min(x for c in curves for x in c.x), max(x for c in curves for x in c.x)],
            y=[level, level],
            mode="lines",
            name=html.escape(whose),
            showlegend=bool(said),
            line={"color": QUIET, "width": 1.6, "dash": "dot"},
        )
    figure = finish(figure, name, first.unit).update_xaxes(title=first.along, zeroline=False)
    longest = max(x for curve in curves for x in curve.x)
    if 1 < longest < 12:  # layers are whole
        figure.update_xaxes(dtick=1)
    if first.unit == "%":
        figure.update_yaxes(title="", tickformat=".0%")
    if first.log_x:
        figure.update_xaxes(type="log", dtick=math.log10(4))
    if first.log:
        figure.update_yaxes(type="log", dtick=1, tickformat="~g")
    return Panel(figure, first.why, _points(curves))


def _draw(figure: go.Figure, curve: Curve, look: theme.Style, dash: str) -> None:
    y = [max(value, LOWEST) if curve.log else value for value in curve.y]
    if any(not math.isnan(low) for low in curve.low) and dash == "solid":
        figure.add_scatter(
            x=[*curve.x, *reversed(curve.x)],
            y=[*curve.high, *reversed([max(low, LOWEST) if curve.log else low for low in curve.low])],
            fill="toself",
            fillcolor=look.colour,
            opacity=0.18,
            line={"width": 0},
            mode="lines",
            showlegend=False,
            hoverinfo="skip",
        )
    figure.add_scatter(
        x=list(curve.x),
        y=y,
        name=html.escape(curve.line),
        mode="lines+markers" if len(y) <= 32 else "lines",
        line={"color": look.colour, "width": 2.2 if dash == "solid" else 1.6, "dash": dash},
        marker={"symbol": look.marker, "size": 6 if dash == "solid" else 4, "color": look.colour},
        customdata=[_at(curve, i) for i in range(len(y))],
        hovertemplate=f"{html.escape(curve.along)} %{{x}}: %{{customdata}}",
    )
    if curve.mark in curve.x:
        figure.add_scatter(
            x=[curve.mark],
            y=[y[curve.x.index(curve.mark)]],
            mode="markers",
            marker={"symbol": f"{look.marker}-open", "size": 15, "color": look.colour, "line": {"width": 2.2}},
            showlegend=False,
            hoverinfo="skip",
        )


def _at(curve: Curve, i: int) -> str:
    low, high = (curve.low[i], curve.high[i]) if curve.low else (math.nan, math.nan)
    return str(Quantity("", curve.y[i], low, high, unit=curve.unit or "value"))


def _points(curves: Sequence[Curve]) -> Table:
    """Every x that a curve has, a column for each curve."""
    every = sorted({x for curve in curves for x in curve.x})
    places = [{x: i for i, x in enumerate(curve.x)} for curve in curves]
    rows = [
        [f"{x:g}", *(_at(c, at[x]) if x in at else NONE for c, at in zip(curves, places, strict=True))] for x in every
    ]
    return Table([curves[0].along, *(curve.line for curve in curves)], rows)


def _heat(grid: Grid) -> Panel:
    """A heat map; cells without a number are crossed."""
    values = [[None if math.isnan(value) else value for value in row] for row in grid.values]
    figure = heat_map(grid.rows, values, grid.top, f"{grid.name}{grid.of and f': {grid.of}'}")
    empty = [(j, i) for i, row in enumerate(values) for j, value in enumerate(row) if value is None]
    if empty:
        figure.add_scatter(
            x=[x for x, _ in empty],
            y=[y for _, y in empty],
            mode="markers",
            marker={"symbol": "x-thin", "size": 4, "line": {"width": 1, "color": QUIET}},
            hoverinfo="skip",
            showlegend=False,
        )
        figure.update_layout(xaxis={"range": [-0.5, len(values) - 0.5]})
    if grid.axes[0]:
        figure.update_yaxes(title=grid.axes[0])
        figure.update_xaxes(title=grid.axes[1])
    rows = [[visible(name), *(plain(value, 3) for value in row)] for name, row in zip(grid.rows, values, strict=True)]
    return Panel(figure, grid.why, Table(["", *map(visible, grid.columns)], rows))
