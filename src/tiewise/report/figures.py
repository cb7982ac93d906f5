"""Figures of anything that was measured, each a `Panel`: how to read it, and its numbers as a table.

dots, lines                 of quantities (`dot_plot`) and of curves (`line_plot`)
stacked, heat_map, plane    of parts that add up, of a grid, of points
panels                      all that a section's `Found` has to show
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import plotly.graph_objects as go

from tiewise.core.found import NONE, Found, Grid, Listing, Points, Quantity, Stack, plain, visible
from tiewise.report.dot_plot import dots
from tiewise.report.drawing import QUIET, UNSAID, Style, finish, marker, styles, token_label
from tiewise.report.line_plot import lines
from tiewise.report.sheet import Panel

PART_COLOURS = ("#8a8f99", "#5f86b8", "#b88a4e", "#6fa287", "#a47fae", "#b86f72")
PART_PATTERNS = ("", "/", "\\", "x", ".", "-")
GROUP_COLOURS = ("#8a8f99", "#2f7fd1", "#13879a", "#2a9468", "#c98a06", "#d4475a")  # from rare to frequent
MAP_HEIGHT = 430  # pixels
Part = TypeVar("Part")
Cells = list[list[float | None]]  # row by row; None where a grid has no number


def panels(found: Mapping[str, Found]) -> list[Panel]:
    """Return all figures of a section, or dots of every unit if it has none.

    In order: quantities that ask for a figure as dots, stacks, curves, grids and points.
    """
    findings = list(found.values())
    quantities = list(chain.from_iterable(one.quantities for one in findings))
    looks = styles([*found, *(q.of for q in quantities)])  # models, then what else was measured
    figures = [
        dots(title, in_figure, looks) for title, in_figure in _grouped(quantities, lambda q: q.figure).items() if title
    ]
    stacks = chain.from_iterable(one.stacks for one in findings)
    figures += [_stacked_bars(name, bars) for name, bars in _grouped(stacks, lambda stack: stack.name).items()]
    curves = chain.from_iterable(one.curves for one in findings)
    figures += [lines(of_name, looks) for of_name in _grouped(curves, lambda curve: curve.name).values()]
    figures += [heat_map(grid) for grid in _distinct_grids(findings)]
    figures += [plane(points) for points in chain.from_iterable(one.points for one in findings)]
    return figures or _dots_by_unit(quantities, looks)


def _grouped(parts: Iterable[Part], key: Callable[[Part], str]) -> dict[str, list[Part]]:
    """Return parts by their key, in the order in which the keys first occur."""
    groups: dict[str, list[Part]] = {}
    for part in parts:
        groups.setdefault(key(part), []).append(part)
    return groups


def _stacked_bars(name: str, bars: Sequence[Stack]) -> Panel:
    """Draw stacks of one name. One that several models share has a name of its own, and is drawn once."""
    values = {}
    for bar in bars:
        label = bar.bar or f"{bar.of}, its own"
        values[label] = dict(bar.parts)
    first = bars[0]
    first_part, _ = first.parts[0]
    return stacked(values, name, first.unit, plain, first.why, first=first_part)


def _distinct_grids(findings: Iterable[Found]) -> list[Grid]:
    """Return every grid once, those of one name together."""
    by_name = _grouped(chain.from_iterable(one.grids for one in findings), lambda grid: grid.name)
    # grids with NaN are never equal, so their texts are compared
    return list({repr(grid): grid for grid in chain.from_iterable(by_name.values())}.values())


def _dots_by_unit(quantities: Sequence[Quantity], looks: Mapping[str, Style]) -> list[Panel]:
    """Draw a figure for each unit in which something has an interval."""
    units = dict.fromkeys(q.unit for q in quantities if not math.isnan(q.low))
    return [dots(unit.capitalize(), [q for q in quantities if q.unit == unit], looks) for unit in units]


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
    """Draw {bar: {part: value}} as horizontal stacks in the order of the parts.

    Args:
        values: parts of each bar.
        title: of the figure.
        unit: of the values.
        show: writes a value.
        why: how to read the figure.
        first: the part that all bars share, so that parts that differ are next to each other.
        total: heads a last column of the table with each bar's sum.
    """
    parts = list(dict.fromkeys(chain.from_iterable(values.values())))
    figure = go.Figure()
    for position, part in enumerate(sorted(parts, key=lambda part: part != first)):
        lengths = [of_bar.get(part, 0) for of_bar in values.values()]
        figure.add_bar(
            name=html.escape(part),
            y=[html.escape(bar) for bar in values],
            x=lengths,
            marker_color=PART_COLOURS[position % len(PART_COLOURS)],
            marker_pattern_shape=PART_PATTERNS[position % len(PART_PATTERNS)],  # for eyes that see no colour
            customdata=[show(value) for value in lengths],
        )
    pattern = go.bar.marker.Pattern(fillmode="overlay", size=6, solidity=0.18)
    hover = "%{y}: %{customdata}<extra>%{fullData.name}</extra>"
    figure.update_traces(orientation="h", marker_pattern=pattern, marker_line_width=0, hovertemplate=hover)
    height = 140 + 44 * max(len(values), 1)
    finish(figure, title, None).update_layout(barmode="stack", bargap=0.45, legend_traceorder="normal", height=height)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    figure.update_xaxes(title=unit, exponentformat="B")  # 8B: billions of parameters, no giga
    return Panel(figure, why, _table_of_parts(values, parts, show, total))


def _table_of_parts(
    values: Mapping[str, Mapping[str, float]], parts: Sequence[str], show: Callable[[float], str], total: str
) -> Listing:
    """Return a row for each bar and a column for each part. `total`, if given, heads the sums."""
    header, rows = ["", *parts], []
    if total:
        header.append(total)
    for bar, of_bar in values.items():
        row = [bar, *(show(of_bar[part]) if part in of_bar else NONE for part in parts)]
        if total:
            row.append(show(sum(of_bar.values())))
        rows.append(row)
    return Listing("", header, rows)


def plane(points: Points) -> Panel:
    """Draw points, a colour for each group; those that are named carry their label."""
    figure = go.Figure()
    for group in sorted(set(points.groups)):
        members = [i for i, of_point in enumerate(points.groups) if of_point == group]
        x, y, labels = _coordinates(points, members)
        figure.add_scatter(
            x=x,
            y=y,
            text=labels,
            name=html.escape(points.legend[group]),
            mode="markers",
            marker=marker(GROUP_COLOURS[group % len(GROUP_COLOURS)], 4),
            marker_opacity=0.65,
            hovertemplate="%{text}<extra>%{fullData.name}</extra>",
        )
    x, y, labels = _coordinates(points, points.named)
    figure.add_scatter(
        x=x,
        y=y,
        text=labels,
        mode="markers+text",
        textposition="top center",
        textfont_size=11,
        marker=marker(QUIET, 8, "circle-open", 1),
        **UNSAID,
    )
    finish(figure, _title_of(points.name, points.of), None)
    figure.update_layout(height=480, legend_itemsizing="constant")
    figure.update_xaxes(title=points.axes[0]).update_yaxes(title=points.axes[1])
    rows = [[visible(points.labels[i]), *(plain(value, 3) for value in points.xy[i])] for i in points.named]
    return Panel(figure, points.why, Listing("", ["token", *points.axes], rows))


def _title_of(name: str, model: str) -> str:
    """Return the title of a figure that may be of one model."""
    return f"{name}: {model}" if model else name


def _coordinates(points: Points, chosen: Sequence[int]) -> tuple[list[float], list[float], list[str]]:
    """Return (x, y, labels) of some of the points."""
    x = [round(points.xy[i][0], 4) for i in chosen]
    y = [round(points.xy[i][1], 4) for i in chosen]
    return x, y, [token_label(points.labels[i]) for i in chosen]


def heat_map(grid: Grid) -> Panel:
    """Draw a grid, rows against columns; cells without a number are crossed, or hold their text."""
    row_axis, column_axis = grid.axes if grid.axes[0] else ("current token", "next token")
    values: Cells = [[None if math.isnan(value) else round(value, 4) for value in row] for row in grid.values]
    figure = go.Figure(_cells_of(grid, values))
    bar = go.layout.coloraxis.ColorBar(orientation="h", thickness=8, len=0.7, y=1.01, yanchor="bottom", title="")
    height = MAP_HEIGHT
    if grid.texts:
        height = min(MAP_HEIGHT, 190 + 44 * len(grid.rows))
    finish(figure, _title_of(grid.name, grid.of), None).update_layout(
        height=height, coloraxis=go.layout.Coloraxis(cmin=-grid.top, cmax=grid.top, colorbar=bar)
    )
    figure.update_xaxes(
        title=column_axis,
        tickangle=0 if grid.texts else -60,
        tickvals=list(range(len(grid.columns))),
        ticktext=[token_label(column) for column in grid.columns],
    )
    figure.update_yaxes(
        title=row_axis,
        autorange="reversed",
        tickvals=list(range(len(grid.rows))),
        ticktext=[token_label(row) for row in grid.rows],
    )
    for axis in (figure.layout.xaxis, figure.layout.yaxis):
        axis.update(showgrid=False, zeroline=False, tickfont_size=11)
    _mark_empty_cells(figure, grid, values)
    cells: Sequence[Sequence[str]] = grid.texts or [[plain(value, 3) for value in row] for row in values]
    rows = [[visible(name), *row] for name, row in zip(grid.rows, cells, strict=True)]
    header = [f"{row_axis} ↓ {column_axis} →", *(visible(column) for column in grid.columns)]
    return Panel(figure, grid.why, Listing("", header, rows))


def _cells_of(grid: Grid, values: Cells) -> go.Heatmap:
    """Return the coloured cells, with their texts where they have a number.

    Positions, not labels, are the coordinates: two tokens may look alike, and "2024" must not become a date.
    """
    columns = [token_label(column) for column in grid.columns]
    hover_labels, texts = [], []
    for name in grid.rows:
        label = token_label(name)
        hover_labels.append([[label, column] for column in columns])
    for row, of_row in zip(values, grid.texts, strict=False):  # a grid may have no texts
        texts.append(["" if value is None else text for value, text in zip(row, of_row, strict=True)])
    return go.Heatmap(
        x=list(range(len(grid.columns))),
        y=list(range(len(grid.rows))),
        z=values,
        customdata=hover_labels,
        text=texts,
        texttemplate="%{text}" if grid.texts else None,
        coloraxis="coloraxis",
        hovertemplate="%{customdata[0]} → %{customdata[1]}: %{z:+.3f}<extra></extra>",
        xgap=1,
        ygap=1,
    )


def _mark_empty_cells(figure: go.Figure, grid: Grid, values: Cells) -> None:
    """Mark every cell without a number with a cross, or with its text if the grid has texts."""
    empty: list[tuple[int, int]] = []  # (row, column)
    for i, row in enumerate(values):
        empty += [(i, j) for j, value in enumerate(row) if value is None]
    if not empty:
        return
    figure.add_scatter(
        x=[j for _, j in empty],
        y=[i for i, _ in empty],
        marker=marker(QUIET, 4, "x-thin", 1),
        mode="text" if grid.texts else "markers",
        text=[grid.texts[i][j] for i, j in empty] if grid.texts else None,
        textfont_color=QUIET,
        **UNSAID,
    )
    figure.update_xaxes(range=[-0.5, len(grid.columns) - 0.5])
