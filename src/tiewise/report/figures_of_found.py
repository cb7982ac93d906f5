"""A section's `Found` as figures: one for each name of curves, a heat map for each grid, else quantities as dots."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from tiewise.core.found import Curve, Found, Grid, Points, Quantity, Stack, visible
from tiewise.core.numerals import NONE, plain
from tiewise.report import theme
from tiewise.report.faces import no_effect
from tiewise.report.grid import Table
from tiewise.report.heat_map import heat_map, token_label
from tiewise.report.sheet import Panel

INTERVALS = (
    "Bars and bands are 95 % intervals. Grey strokes are what no effect gives, grey crosses what permuted data gave."
)
LEAST_SHOWN = {"probability": 1e-12}  # where a value that is smaller still is drawn, by unit
MOST_ROWS = 64  # of a curve's table
COLOURS_BY_GROUP = ("#8a8f99", "#2f7fd1", "#13879a", "#2a9468", "#c98a06", "#d4475a")  # from rare to frequent
QUIET = "#8a8f99"
ROW = 34  # pixels for each row of dots
LOWEST = 1e-9  # what a value that is exactly 0 is drawn at where the axis is one of orders of magnitude


def panels(found: Mapping[str, Found]) -> list[Panel]:
    """Figures: quantities that ask for one as dots, stacks, curves, grids; dots of every unit where there is none."""
    curves: dict[str, list[Curve]] = {}
    stacks: dict[str, list[Stack]] = {}
    grids: list[Grid] = []
    for one in found.values():
        for curve in one.curves:
            curves.setdefault(curve.name, []).append(curve)
        for stack in one.stacks:
            stacks.setdefault(stack.name, []).append(stack)
        grids += (grid for grid in one.grids if all(repr(grid) != repr(drawn) for drawn in grids))  # NaN is not NaN
    other = [q.of for one in found.values() for q in one.quantities]  # what is measured beside the models themselves
    names = list(dict.fromkeys([*found, *other]))
    looks = dict(zip(names, map(theme.style, theme.places(names)), strict=True))
    every = [q for one in found.values() for q in one.quantities]
    titles = dict.fromkeys(q.figure for q in every if q.figure)
    made = [_dots(title, [q for q in every if q.figure == title], looks) for title in titles]
    made += [_stacked(name, bars) for name, bars in stacks.items()]
    made += [_lines(name, drawn, looks) for name, drawn in curves.items()]
    made += [_heat(grid) for grid in grids]
    made += [_plane(points) for one in found.values() for points in one.points]
    if not made:
        units = dict.fromkeys(q.unit for q in every if not math.isnan(q.low))
        made = [_dots(unit.capitalize(), [q for q in every if q.unit == unit], looks) for unit in units]
    return made


def _dots(title: str, quantities: Sequence[Quantity], looks: Mapping[str, theme.Style]) -> Panel:
    """A row for each quantity, a dot for each model."""
    looks = {label: look for label, look in looks.items() if any(q.of == label for q in quantities)}
    step = 0.5 / max(len(looks), 1)
    chance = [Dot(q.name, q.chance) for q in quantities if q.chance is not None]
    permuted = [Dot(q.name, value) for q in quantities for value in q.null]
    series = [
        DotSeries("no effect", chance, QUIET, "line-ns-open", 16),
        DotSeries("permuted", permuted, QUIET, "x-thin-open", 7),
    ]
    for position, (label, look) in enumerate(looks.items()):
        place = step * (position - (len(looks) - 1) / 2)
        own = [q for q in quantities if q.of == label]
        dots = [Dot(q.name, max(q.value, LEAST_SHOWN.get(q.unit, q.value)), q.low, q.high) for q in own]
        series.append(DotSeries(label, dots, look.colour, look.marker, offset=place))
    rows = [[q.name, q.of, str(q), no_effect(q)] for q in quantities]
    table = Table(["measure", "model", "value [95 %]", "no effect"], rows)
    units = [unit.replace("%", "share") for unit in dict.fromkeys(q.unit for q in quantities)]
    figure = _dot_plot(series, title, ", ".join(units))
    if units == ["share"]:
        figure.update_xaxes(title="", tickformat=".0%")
    if units == ["probability"]:
        figure.update_xaxes(type="log", dtick=1, exponentformat="power")
    return Panel(figure, INTERVALS, table)


def _stacked(name: str, bars: Sequence[Stack]) -> Panel:
    """Bars of parts; a bar that several models share is drawn once."""
    values = {bar.bar or f"{bar.of}, its own": dict(bar.parts) for bar in bars}
    parts = list(dict.fromkeys(part for one in values.values() for part in one))
    rows = [[bar, *(plain(one.get(part)) for part in parts)] for bar, one in values.items()]
    figure = theme.stacked(values, name, bars[0].unit, plain, parts[0])
    return Panel(figure, bars[0].why, Table(["", *parts], rows))


def _lines(name: str, curves: Sequence[Curve], looks: Mapping[str, theme.Style]) -> Panel:
    """Curves of one name: a model's colour, a dash for each line of it; the first has its interval as a band."""
    figure, first = go.Figure(), curves[0]
    which = list(dict.fromkeys(curve.which for curve in curves))
    for curve in curves:
        _draw(figure, curve, looks[curve.of], theme.DASHES[which.index(curve.which) % len(theme.DASHES)])
    # the first curve that has a level names it; NaN is a level that could not be estimated
    finite = [curve for curve in reversed(curves) if curve.level is not None and math.isfinite(curve.level)]
    levels = {(curve.level, curve.level_name): curve.of for curve in finite}
    for (level, said), of in levels.items():
        whose = said if len(levels) == 1 else f"{said}, {of}"
        figure.add_scatter(
            x=[min(x for c in curves for x in c.x), max(x for c in curves for x in c.x)],
            y=[level, level],
            mode="lines",
            name=html.escape(whose),
            showlegend=bool(said),
            line={"color": QUIET, "width": 1.6, "dash": "dot"},
        )
    figure = theme.finish(figure, name, first.unit).update_xaxes(title=first.along, zeroline=False)
    longest = max(x for curve in curves for x in curve.x)
    if 1 < longest < 12:  # layers are whole
        figure.update_xaxes(dtick=1)
    if first.unit == "%":
        figure.update_yaxes(title="", tickformat=".0%")
    if first.ticks:
        figure.update_xaxes(tickvals=list(range(len(first.ticks))), ticktext=[*map(html.escape, first.ticks)])
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
    """Every x that a curve has, a column for each curve; of many about as many for each doubling."""
    every, ticks = sorted({x for curve in curves for x in curve.x}), curves[0].ticks
    if len(every) > MOST_ROWS:
        every = [every[i] for i in sorted({round(len(every) ** (k / MOST_ROWS)) - 1 for k in range(MOST_ROWS + 1)})]
    places = [{x: i for i, x in enumerate(curve.x)} for curve in curves]
    rows = []
    for x in every:
        cells = (_at(curve, at[x]) if x in at else NONE for curve, at in zip(curves, places, strict=True))
        rows.append([ticks[int(x)] if ticks else f"{x:g}", *cells])
    return Table([curves[0].along, *(curve.line for curve in curves)], rows)


def _plane(points: Points) -> Panel:
    """Points, a colour for each group, some with their label."""
    figure = go.Figure()
    for place in sorted(set(points.groups)):
        chosen = [i for i, group in enumerate(points.groups) if group == place]
        figure.add_scatter(
            x=[round(points.xy[i][0], 4) for i in chosen],
            y=[round(points.xy[i][1], 4) for i in chosen],
            name=html.escape(points.legend[place]),
            mode="markers",
            marker={"color": COLOURS_BY_GROUP[place % len(COLOURS_BY_GROUP)], "size": 4, "opacity": 0.65},
            text=[token_label(points.labels[i]) for i in chosen],
            hovertemplate="%{text}<extra>%{fullData.name}</extra>",
        )
    figure.add_scatter(
        x=[round(points.xy[i][0], 4) for i in points.named],
        y=[round(points.xy[i][1], 4) for i in points.named],
        mode="markers+text",
        text=[token_label(points.labels[i]) for i in points.named],
        textposition="top center",
        textfont={"size": 11},
        marker={"symbol": "circle-open", "size": 8, "color": QUIET},
        showlegend=False,
        hoverinfo="skip",
    )
    figure = theme.finish(figure, f"{points.name}{points.of and f': {points.of}'}", None)
    figure.update_layout(height=480, legend={"itemsizing": "constant"})
    figure.update_xaxes(title=points.axes[0]).update_yaxes(title=points.axes[1])
    rows = [[visible(points.labels[i]), *(plain(value, 3) for value in points.xy[i])] for i in points.named]
    return Panel(figure, points.why, Table(["token", *points.axes], rows))


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


@dataclass(frozen=True)
class Dot:
    """A value in a row, with its 95 % interval where it has one."""

    row: str
    value: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class DotSeries:
    """Dots that are drawn alike."""

    name: str  # in the legend; text as it was written
    dots: Sequence[Dot]  # at most one for each row, or several where no intervals are drawn
    colour: str
    symbol: str  # a marker of plotly
    size: int = 9
    offset: float = 0.0  # where in its row a dot lies, from −0.5 (top) to 0.5


def _dot_plot(series: Sequence[DotSeries], title: str, unit: str) -> go.Figure:
    """Draw series over rows, from top to bottom in the order in which rows first occur."""
    rows = list(dict.fromkeys(dot.row for one in series for dot in one.dots))
    place = {row: position for position, row in enumerate(rows)}
    figure = go.Figure()
    for one in series:
        if one.dots:
            figure.add_trace(_dot_trace(one, place))
    figure.add_vline(x=0, line={"width": 1, "color": QUIET})
    ticks = {"tickvals": list(place.values()), "ticktext": [html.escape(row) for row in rows]}
    figure.update_yaxes(**ticks, range=[len(rows) - 0.4, -0.6], zeroline=False)
    figure = theme.finish(figure, title, None)
    figure.update_xaxes(title=unit, zeroline=False)
    return figure.update_layout(height=150 + ROW * max(len(rows), 1))


def _dot_trace(one: DotSeries, place: dict[str, int]) -> go.Scatter:
    bars = any(not math.isnan(dot.low) for dot in one.dots)
    reach = {
        "array": [0.0 if math.isnan(dot.high) else dot.high - dot.value for dot in one.dots],
        "arrayminus": [0.0 if math.isnan(dot.low) else dot.value - dot.low for dot in one.dots],
        "symmetric": False,
        "thickness": 1.6,
        "width": 4,
        "color": one.colour,
    }
    line = {"color": one.colour, "width": 1.6}
    return go.Scatter(
        x=[dot.value for dot in one.dots],
        y=[place[dot.row] + one.offset for dot in one.dots],
        name=html.escape(one.name),
        mode="markers",
        marker={"color": one.colour, "size": one.size, "symbol": one.symbol, "line": line},
        error_x=reach if bars else None,
        customdata=[f"{html.escape(d.row)}: {Quantity('', d.value, d.low, d.high, unit='value')}" for d in one.dots],
        hovertemplate="%{customdata}<extra>%{fullData.name}</extra>",
    )
