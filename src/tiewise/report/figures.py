"""Figures of anything that was measured, each a `Panel`: how to read it, and its numbers as a table.

    lines, dots, stacked, heat_map, plane    one figure each, of curves, quantities, parts, a grid, points
    panels                                   all that a section's `Found` has to show
    write_inspection                         the page of an inspection: a section's answer, and its panels

Whatever is compared keeps its colour (`core/found.py`), dash and marker through all figures, in both themes.
"""

from __future__ import annotations

import html
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go

from tiewise.core.files import write_result
from tiewise.core.found import COLOURS, NONE, Curve, Found, Grid, Listing, Points, Quantity, places, plain, visible
from tiewise.inspection.inspection import Inspection
from tiewise.report import faces
from tiewise.report.sheet import LIGHT, MARGIN, PageSection, Panel, Sheet

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
PART_COLOURS = ("#8a8f99", "#5f86b8", "#b88a4e", "#6fa287", "#a47fae", "#b86f72")
PART_PATTERNS = ("", "/", "\\", "x", ".", "-")
GROUP_COLOURS = ("#8a8f99", "#2f7fd1", "#13879a", "#2a9468", "#c98a06", "#d4475a")  # from rare to frequent
QUIET = "#8a8f99"
INTERVALS = "Bars and bands: 95 % intervals; grey strokes: no effect; grey crosses: permuted data."
LEAST_SHOWN = {"probability": 1e-12}  # where a value that is smaller still is drawn, by unit
LOWEST = 1e-9  # where 0 is drawn on an axis of orders of magnitude
MOST_ROWS = 64  # of a curve's table
UNSAID: dict[str, Any] = {"showlegend": False, "hoverinfo": "skip"}  # of what no legend and no hover names


@dataclass(frozen=True)
class Style:
    """How one arm or model is drawn in every figure."""

    colour: str
    dash: str
    marker: str


def style(place: int) -> Style:
    """Style at a place; the periods differ in length, so 168 of them look different."""
    return Style(COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)], MARKERS[place % len(MARKERS)])


def styles(names: Iterable[str]) -> dict[str, Style]:
    """A style for each of these, by its place."""
    return {name: style(place) for name, place in places(names).items()}


def panels(found: Mapping[str, Found]) -> list[Panel]:
    """Figures: quantities that ask for one as dots, stacks, curves, grids; dots of every unit where there is none."""

    def gathered(kind: str, key: str = "name") -> dict[str, list[Any]]:
        """All parts of one kind, by what they are drawn as."""
        groups: dict[str, list[Any]] = {}
        for part in (part for one in found.values() for part in getattr(one, kind)):
            groups.setdefault(getattr(part, key), []).append(part)
        return groups

    of_title = gathered("quantities", "figure")
    quantities = [q for one in found.values() for q in one.quantities]
    looks = styles([*found, *(q.of for q in quantities)])  # beside the models, what else was measured
    made = [dots(title, asked, looks) for title, asked in of_title.items() if title]
    for name, bars in gathered("stacks").items():  # one that several models share is drawn once
        values = {bar.bar or f"{bar.of}, its own": dict(bar.parts) for bar in bars}
        made.append(stacked(values, name, bars[0].unit, plain, bars[0].why, first=next(iter(bars[0].parts))[0]))
    made += [lines(curves, looks) for curves in gathered("curves").values()]
    grids = {repr(grid): grid for grids in gathered("grids").values() for grid in grids}  # NaN is not NaN
    made += map(heat_map, grids.values())
    made += [plane(points) for one in found.values() for points in one.points]
    units = dict.fromkeys(q.unit for q in quantities if not math.isnan(q.low))
    return made or [dots(unit.capitalize(), [q for q in quantities if q.unit == unit], looks) for unit in units]


def finish(figure: go.Figure, title: str, unit: str | None) -> go.Figure:
    """Give a figure its template, title, height and margins, and its y axis a title."""
    figure.update_layout(template=LIGHT, title=html.escape(title), height=380, margin=MARGIN)
    return figure.update_yaxes(title=unit) if unit else figure


def _marker(colour: str, size: float, symbol: Any = "circle", width: float = 0) -> go.scatter.Marker:
    """A marker and its outline, in one colour."""
    return go.scatter.Marker(color=colour, size=size, symbol=symbol, line_color=colour, line_width=width)


def dots(
    title: str, quantities: Sequence[Quantity], looks: Mapping[str, Style], forest: bool = False, why: str = INTERVALS
) -> Panel:
    """A row for each name and a dot for each model; in a forest one dot a row, where hollow is not the main one."""
    names = list(dict.fromkeys(q.name for q in quantities))
    models = [label for label in looks if any(q.of == label for q in quantities)]
    units = [unit.replace("%", "share") for unit in dict.fromkeys(q.unit for q in quantities)]
    figure, hover = go.Figure(), "%{customdata}<extra>%{fullData.name}</extra>"
    chance = [(q.chance, q.name) for q in quantities if q.chance is not None]
    permuted = [(value, q.name) for q in quantities for value in q.null]
    series = (("no effect", chance, "line-ns-open", 16), ("permuted", permuted, "x-thin-open", 7))
    for what, points, symbol, size in () if forest else series:
        if points:
            figure.add_scatter(
                x=[value for value, _ in points],
                y=[names.index(name) for _, name in points],
                name=what,
                mode="markers",
                marker=_marker(QUIET, size, symbol, 1.6),
                customdata=[f"{html.escape(name)}: {Quantity('', value, unit='value')}" for value, name in points],
                hovertemplate=hover,
            )
    for level in {value for value, _ in chance} if forest else {0.0}:
        if units != ["probability"]:  # whose axis has no 0
            figure.add_vline(x=level, line_width=1, line_color=QUIET)
    for position, label in enumerate(models):
        look, own = looks[label], [q for q in quantities if q.of == label]
        beside = 0 if forest else (position - (len(models) - 1) / 2) * 0.5 / len(models)
        x = [max(q.value, LEAST_SHOWN.get(q.unit, q.value)) for q in own]
        symbols = [look.marker if q.main or not forest else f"{look.marker}-open" for q in own]
        figure.add_scatter(
            x=x,
            y=[names.index(q.name) + beside for q in own],
            name=html.escape(label),
            showlegend=not forest,
            mode="markers",
            marker=_marker(look.colour, 9, symbols, 1.6),
            error_x_array=[0.0 if math.isnan(q.high) else q.high - at for q, at in zip(own, x, strict=True)],
            error_x_arrayminus=[0.0 if math.isnan(q.low) else at - q.low for q, at in zip(own, x, strict=True)],
            error_x_visible=any(not math.isnan(q.low) for q in own),
            error_x_symmetric=False,
            customdata=[f"{html.escape(q.name)}: {q}" for q in own],
            hovertemplate=hover,
        )
    figure.update_traces(error_x_thickness=1.6, error_x_width=4)
    finish(figure, title, None).update_layout(height=150 + (46 if forest else 38) * max(len(names), 1))
    # lines as long as a phone has room for; what a layer shares stands in one of its own
    parts = [html.escape(name).replace("+share=", "\n+share=").split("\n") for name in names]
    ticks = ["<br>".join(line for part in of for line in wrap(part, 24)) for of in parts]
    figure.update_yaxes(tickvals=list(range(len(names))), ticktext=ticks, zeroline=False)
    figure.update_yaxes(range=[len(names) - 0.4, -0.6]).update_xaxes(title=", ".join(units), zeroline=False)
    if units == ["share"]:
        figure.update_xaxes(title="", tickformat=".1~%" if forest else ".0%")
    if units == ["probability"]:
        figure.update_xaxes(type="log", dtick=1, exponentformat="power")
    rows = [[q.name, q.of, str(q), q.no_effect] for q in quantities]
    return Panel(figure, why, Listing("", ["measure", "model", "value [95 %]", "no effect"], rows))


def stacked(
    values: Mapping[str, Mapping[str, float]],
    title: str,
    unit: str,
    show: Callable[[float], str],
    why: str,
    *,
    first: str = "",
    total: str = "",
) -> Panel:
    """{bar: {part: value}} as horizontal stacks in the order of the parts; `show` writes a value.

    `first` is the part that all bars share, so that what differs stands side by side; `total` heads a last column of
    the table with each bar's sum.
    """
    names, figure = list(dict.fromkeys(name for parts in values.values() for name in parts)), go.Figure()
    for position, name in enumerate(sorted(names, key=lambda name: name != first)):
        found = [parts.get(name, 0) for parts in values.values()]
        figure.add_bar(
            name=html.escape(name),
            y=[html.escape(bar) for bar in values],
            x=found,
            marker_color=PART_COLOURS[position % len(PART_COLOURS)],
            marker_pattern_shape=PART_PATTERNS[position % len(PART_PATTERNS)],  # for eyes that see no colour
            customdata=[show(value) for value in found],
        )
    pattern = go.bar.marker.Pattern(fillmode="overlay", size=6, solidity=0.18)
    hover = "%{y}: %{customdata}<extra>%{fullData.name}</extra>"
    figure.update_traces(orientation="h", marker_pattern=pattern, marker_line_width=0, hovertemplate=hover)
    height = 140 + 44 * max(len(values), 1)
    finish(figure, title, None).update_layout(barmode="stack", bargap=0.45, legend_traceorder="normal", height=height)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    figure.update_xaxes(title=unit, exponentformat="B")  # 8B: billions of parameters, no giga
    rows = [[bar, *(show(parts[name]) if name in parts else NONE for name in names)] for bar, parts in values.items()]
    if total:
        rows = [[*row, show(sum(parts.values()))] for row, parts in zip(rows, values.values(), strict=True)]
        names.append(total)
    return Panel(figure, why, Listing("", ["", *names], rows))


def lines(curves: Sequence[Curve], looks: Mapping[str, Style], digits: int | None = None) -> Panel:
    """Curves of one name: a model's colour, a dash for each line of it; the first has its interval as a band."""
    figure, first = go.Figure(), curves[0]
    which = list(dict.fromkeys(curve.which for curve in curves))
    for curve in curves:
        # a model's own dash where each has one line
        dash = DASHES[which.index(curve.which) % len(DASHES)] if len(which) > 1 else looks[curve.of].dash
        _draw(figure, curve, looks[curve.of], dash, curve.which == which[0], digits)
    # the first curve that has a level names it; NaN is a level that could not be estimated
    finite = [curve for curve in reversed(curves) if curve.level is not None and math.isfinite(curve.level)]
    levels = {(curve.level, curve.level_name): curve.of for curve in finite}
    every = sorted({x for curve in curves for x in curve.x})
    for (level, said), of in levels.items() if every else ():  # no point at all: every number was none
        figure.add_scatter(
            x=[every[0], every[-1]],
            y=[level, level],
            mode="lines",
            name=html.escape(said if len(levels) == 1 else f"{said}, {of}"),
            showlegend=bool(said),
            line=go.scatter.Line(color=QUIET, width=1.6, dash="dot"),
            hoverinfo="skip",
        )
    finish(figure, first.name, first.unit).update_xaxes(title=first.along, zeroline=False)
    figure.update_layout(hovermode="x unified")
    if every and 1 < every[-1] < 12:  # layers are whole
        figure.update_xaxes(dtick=1)
    if first.unit == "%":
        figure.update_yaxes(title="", tickformat=".0%")
    if first.ticks:
        groups = list(range(len(first.ticks)))
        figure.update_xaxes(tickvals=groups, ticktext=[*map(html.escape, first.ticks)], range=[-0.3, groups[-1] + 0.3])
    if first.log_x:
        figure.update_xaxes(type="log", dtick=math.log10(4))
    if first.log:
        figure.update_yaxes(type="log", dtick=1, tickformat="~g")
    # every x that a curve has, a column for each curve; of many about as many for each doubling
    if len(every) > MOST_ROWS:
        every = [every[i] for i in sorted({round(len(every) ** (k / MOST_ROWS)) - 1 for k in range(MOST_ROWS + 1)})]
    columns = [dict(zip(curve.x, _written(curve, digits), strict=True)) for curve in curves]
    names = [first.ticks[int(x)] if first.ticks else f"{x:,.10g}" for x in every]
    rows = [[name, *(column.get(x, NONE) for column in columns)] for name, x in zip(names, every, strict=True)]
    return Panel(figure, first.why, Listing("", [first.along, *(curve.line for curve in curves)], rows))


def _draw(figure: go.Figure, curve: Curve, look: Style, dash: str, main: bool, digits: int | None) -> None:
    """Add a line; of the main ones the interval too, as a band."""
    y, low = ([max(value, LOWEST) if curve.log else value for value in values] for values in (curve.y, curve.low))
    hidden = UNSAID | {"legendgroup": curve.line}
    if main and any(not math.isnan(value) for value in low):
        figure.add_scatter(
            x=[*curve.x, *reversed(curve.x)],
            y=[*curve.high, *reversed(low)],
            mode="lines",
            line_width=0,
            fill="toself",
            fillcolor=look.colour,
            opacity=0.18,
            **hidden,
        )
    figure.add_scatter(
        x=list(curve.x),
        y=y,
        name=html.escape(curve.line),
        legendgroup=curve.line,
        mode="lines+markers" if len(y) <= 32 else "lines",
        line=go.scatter.Line(color=look.colour, width=2.2 if main else 1.6, dash=dash),
        marker=_marker(look.colour, 6 if main else 4, look.marker),
        customdata=_written(curve, digits),
        hovertemplate="%{customdata}",
    )
    if curve.mark in curve.x:
        open_ = _marker(look.colour, 15, f"{look.marker}-open", 2.2)
        at = y[curve.x.index(curve.mark)]
        figure.add_scatter(x=[curve.mark], y=[at], mode="markers", marker=open_, **hidden)


def _written(curve: Curve, digits: int | None) -> list[str]:
    """Every value of a curve with its interval."""
    ends = zip(curve.low, curve.high, strict=True) if curve.low else ((math.nan, math.nan) for _ in curve.y)
    unit = curve.unit or "value"
    return [str(Quantity("", y, *both, unit=unit, digits=digits)) for y, both in zip(curve.y, ends, strict=True)]


def plane(points: Points) -> Panel:
    """Points, a colour for each group, some with their label."""

    def drawn(chosen: Sequence[int], **more: Any) -> None:
        figure.add_scatter(
            x=[round(points.xy[i][0], 4) for i in chosen],
            y=[round(points.xy[i][1], 4) for i in chosen],
            text=[token_label(points.labels[i]) for i in chosen],
            **more,
        )

    figure = go.Figure()
    for place in sorted(set(points.groups)):
        drawn(
            [i for i, group in enumerate(points.groups) if group == place],
            name=html.escape(points.legend[place]),
            mode="markers",
            marker=_marker(GROUP_COLOURS[place % len(GROUP_COLOURS)], 4),
            marker_opacity=0.65,
            hovertemplate="%{text}<extra>%{fullData.name}</extra>",
        )
    ring = _marker(QUIET, 8, "circle-open", 1)
    drawn(points.named, mode="markers+text", textposition="top center", textfont_size=11, marker=ring, **UNSAID)
    finish(figure, f"{points.name}{points.of and f': {points.of}'}", None)
    figure.update_layout(height=480, legend_itemsizing="constant")
    figure.update_xaxes(title=points.axes[0]).update_yaxes(title=points.axes[1])
    rows = [[visible(points.labels[i]), *(plain(value, 3) for value in points.xy[i])] for i in points.named]
    return Panel(figure, points.why, Listing("", ["token", *points.axes], rows))


def heat_map(grid: Grid) -> Panel:
    """What follows what, or is like what: rows against columns; cells without a number are crossed."""
    values = [[None if math.isnan(value) else round(value, 4) for value in row] for row in grid.values]
    labels, columns = [*map(token_label, grid.rows)], [*map(token_label, grid.columns)]
    down, across = list(range(len(labels))), list(range(len(columns)))
    row_axis, column_axis = grid.axes if grid.axes[0] else ("current token", "next token")
    # positions, not labels, are the coordinates: two tokens may look alike, and "2024" must not become a date
    figure = go.Figure(
        go.Heatmap(
            x=across,
            y=down,
            z=values,
            customdata=[[[row, column] for column in columns] for row in labels],
            text=[
                ["" if z is None else t for z, t in zip(*both, strict=True)]
                for both in zip(values, grid.texts, strict=False)
            ],
            texttemplate="%{text}" if grid.texts else None,
            coloraxis="coloraxis",
            hovertemplate="%{customdata[0]} → %{customdata[1]}: %{z:+.3f}<extra></extra>",
            xgap=1,
            ygap=1,
        )
    )
    bar = go.layout.coloraxis.ColorBar(orientation="h", thickness=8, len=0.7, y=1.01, yanchor="bottom", title="")
    finish(figure, f"{grid.name}{grid.of and f': {grid.of}'}", None).update_layout(
        height=min(430, 190 + 44 * len(labels)) if grid.texts else 430,
        coloraxis=go.layout.Coloraxis(cmin=-grid.top, cmax=grid.top, colorbar=bar),
    )
    figure.update_xaxes(title=column_axis, tickangle=0 if grid.texts else -60, tickvals=across, ticktext=columns)
    figure.update_yaxes(title=row_axis, autorange="reversed", tickvals=down, ticktext=labels)
    for axis in (figure.layout.xaxis, figure.layout.yaxis):
        axis.update(showgrid=False, zeroline=False, tickfont_size=11)
    empty = [(j, i) for i, row in enumerate(values) for j, value in enumerate(row) if value is None]
    if empty:
        x, y = zip(*empty, strict=True)
        figure.add_scatter(
            x=x,
            y=y,
            marker=_marker(QUIET, 4, "x-thin", 1),
            mode="text" if grid.texts else "markers",
            text=[grid.texts[i][j] for j, i in empty] if grid.texts else None,
            textfont_color=QUIET,
            **UNSAID,
        )
        figure.update_xaxes(range=[-0.5, len(columns) - 0.5])
    written = grid.texts or [[plain(value, 3) for value in row] for row in values]
    rows = [[visible(name), *row] for name, row in zip(grid.rows, written, strict=True)]
    return Panel(figure, grid.why, Listing("", [f"{row_axis} ↓ {column_axis} →", *map(visible, grid.columns)], rows))


def token_label(token: str) -> str:
    """Return a token as plotly text: visible, and with its markup escaped (a quote is no markup to plotly)."""
    return html.escape(visible(token), quote=False)


# the page of an inspection


def write_inspection(inspection: Inspection, folder: str | os.PathLike[str], command: str) -> Path:
    """Write `report.html` into `folder`, whole or not at all, and return its path.

    Raises:
        RunError: when the file cannot be written there.
    """
    return write_result(inspection_page(inspection, command), Path(folder) / "report.html", "--out")


def inspection_page(inspection: Inspection, command: str) -> str:
    """Return the page as text: the verdict, what can decide, then an answer, a table and a figure for each section."""
    models = [subject.label for subject in inspection.subjects]
    (evidence,) = inspection.sections[0].found.values()
    decisive, sections = faces.deciding(evidence, models), []
    for part in (part for part in inspection.sections[1:] if part.found):
        title, figures = faces.title(part.name), panels(part.found)
        said, tables = [faces.sentence(part.found)], [faces.summary(part.found, title)]
        folded, notes = [*faces.every(part.found)], faces.notes(part)
        sections.append(PageSection(title, figures[:1], said, tables, figures[1:], folded, notes))
    return Sheet(
        command_name="inspect",
        title=f"{', '.join(models)}: tiewise inspection",
        subject=", ".join(models),
        heading=faces.TITLE,
        answer=[faces.verdict(evidence)],
        results=PageSection("What can decide", tables=[decisive], folded=[faces.evidence(evidence)]),
        sections=[*sections, PageSection("Not measured", notes=faces.absent(inspection.sections))],
        command=command,
        facts=[("Models", [(subject.label, str(subject.folder.path)) for subject in inspection.subjects])],
        contents=True,
    ).render()
