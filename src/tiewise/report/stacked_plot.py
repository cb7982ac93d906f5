"""Parts that add up, as horizontal stacks of bars."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import plotly.graph_objects as go

from tiewise.core.measurement import NONE, Listing
from tiewise.report.drawing import finish
from tiewise.report.report_page import Panel

PART_COLOURS = ("#8a8f99", "#5f86b8", "#b88a4e", "#6fa287", "#a47fae", "#b86f72")
PART_PATTERNS = ("", "/", "\\", "x", ".", "-")


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
        title: title of the figure.
        unit: unit of the values.
        show: formats a value.
        why: caption, which explains the figure.
        first: part that all bars share; it is drawn first, so that differing parts are next to each other.
        total: header of a last column of the table with each bar's sum.
    """
    parts = list(dict.fromkeys(chain.from_iterable(values.values())))
    bars = [html.escape(bar) for bar in values]
    figure = go.Figure()
    for position, part in enumerate(sorted(parts, key=lambda part: part != first)):
        lengths = [of_bar.get(part, 0) for of_bar in values.values()]
        figure.add_bar(
            name=html.escape(part),
            y=bars,
            x=lengths,
            marker_color=PART_COLOURS[position % len(PART_COLOURS)],
            marker_pattern=_pattern(position),
            customdata=[show(value) for value in lengths],
        )
    hover = "%{y}: %{customdata}<extra>%{fullData.name}</extra>"
    figure.update_traces(orientation="h", marker_line_width=0, hovertemplate=hover)
    height = 140 + 44 * max(len(values), 1)
    finish(figure, title, None).update_layout(barmode="stack", bargap=0.45, legend_traceorder="normal", height=height)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    figure.update_xaxes(title=unit, exponentformat="B")  # 8B: billions of parameters, no giga
    return Panel(figure, why, _table_of_parts(values, parts, show, total))


def _pattern(position: int) -> go.bar.marker.Pattern:
    """Return the hatching of a part, which is readable without colours."""
    shape = PART_PATTERNS[position % len(PART_PATTERNS)]
    return go.bar.marker.Pattern(shape=shape, fillmode="overlay", size=6, solidity=0.18)


def _table_of_parts(
    values: Mapping[str, Mapping[str, float]], parts: Sequence[str], show: Callable[[float], str], total: str
) -> Listing:
    """Return a row for each bar and a column for each part. `total`, if set, is the header of the sums."""
    header, rows = ["", *parts], []
    if total:
        header.append(total)
    for bar, of_bar in values.items():
        texts = {part: show(value) for part, value in of_bar.items()}
        row = [bar, *(texts.get(part, NONE) for part in parts)]
        if total:
            row.append(show(sum(of_bar.values())))
        rows.append(row)
    return Listing("", header, rows)
