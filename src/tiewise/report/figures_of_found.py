"""A section's `Found` as figures: one for each name of curves, a heat map for each grid, else quantities as dots."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import plotly.graph_objects as go

from tiewise.found import Curve, Found, Grid, Quantity
from tiewise.numerals import NONE, plain
from tiewise.report import theme
from tiewise.report.bars import finish
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
    for one in found.values():
        for curve in one.curves:
            curves.setdefault(curve.name, []).append(curve)
    labels = list(found)
    made = [_lines(name, drawn, labels) for name, drawn in curves.items()]
    made += [_heat(grid) for one in found.values() for grid in one.grids]
    return made or list(_dots(found))


def _dots(found: Mapping[str, Found]) -> Iterator[Panel]:
    """One dot plot for each unit that has intervals, a row for each quantity, a dot for each model."""
    every = [q for one in found.values() for q in one.quantities if not math.isnan(q.low)]
    for unit in dict.fromkeys(q.unit for q in every):
        of_unit = [q for q in every if q.unit == unit]
        step = 0.5 / max(len(found), 1)
        series = [
            Series(
                "no effect", [Dot(q.name, q.chance) for q in of_unit if q.chance is not None], QUIET, "line-ns-open", 16
            ),
            Series("permuted", [Dot(q.name, value) for q in of_unit for value in q.null], QUIET, "x-thin-open", 7),
        ]
        for position, label in enumerate(found):
            look = theme.style(position)
            dots = [Dot(q.name, q.value, q.low, q.high) for q in of_unit if q.of == label]
            series.append(
                Series(label, dots, look.colour, look.marker, offset=step * (position - (len(found) - 1) / 2))
            )
        yield Panel(dot_plot(series, unit.capitalize(), unit), INTERVALS, Table(*_listed(of_unit)))


def _listed(quantities: Iterable[Quantity]) -> tuple[list[str], list[list[str]]]:
    return ["measure", "model", "value [95 %]", "no effect"], [[q.name, q.of, str(q), no_effect(q)] for q in quantities]


def _lines(name: str, curves: Sequence[Curve], labels: Sequence[str]) -> Panel:
    """Curves of one name: a model's colour, a dash for each line of it; the first has its interval as a band."""
    figure, first = go.Figure(), curves[0]
    which = list(dict.fromkeys(curve.which for curve in curves))
    for curve in curves:
        _draw(figure, curve, theme.style(labels.index(curve.of)), theme.DASHES[which.index(curve.which)])
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
    if longest < 12:  # layers are whole
        figure.update_xaxes(dtick=1)
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
    values = [[None if math.isnan(value) else value for value in row] for row in grid.values]
    figure = heat_map(grid.rows, values, grid.top, f"{grid.name}: {grid.of}")
    if grid.axes[0]:
        figure.update_yaxes(title=grid.axes[0])
        figure.update_xaxes(title=grid.axes[1])
    rows = [[name, *(plain(value, 3) for value in row)] for name, row in zip(grid.rows, values, strict=True)]
    return Panel(figure, grid.why, Table(["", *grid.columns], rows))
