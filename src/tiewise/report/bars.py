"""Stacked bars, and what every figure is finished with."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping

import plotly.graph_objects as go

from tiewise.report import theme


def finish(figure: go.Figure, title: str, unit: str | None) -> go.Figure:
    """Give a figure its template, title, height and margins, and its y axis a title."""
    figure.update_layout(template=theme.LIGHT, title=html.escape(title), height=380, margin=theme.MARGIN)
    return figure.update_yaxes(title=unit) if unit else figure


def stacked(
    values: Mapping[str, Mapping[str, float]], title: str, unit: str, shown: Callable[[float], str], first: str = ""
) -> go.Figure:
    """Draw {bar: {part: value}} as horizontal stacks.

    Args:
        values: parts in the order in which they are stacked; `first` comes before all.
        title: of the figure.
        unit: of the axis.
        shown: a value as text, for the pointer.
        first: the part that all bars share, so that what differs stands side by side.
    """
    names = dict.fromkeys(name for parts in values.values() for name in parts)
    figure = go.Figure()
    for position, name in enumerate(sorted(names, key=lambda name: name != first)):
        found = [parts.get(name, 0) for parts in values.values()]
        figure.add_trace(
            go.Bar(
                name=html.escape(name),
                orientation="h",
                y=[html.escape(bar) for bar in values],
                x=found,
                marker=theme.component(position),
                customdata=[shown(value) for value in found],
                hovertemplate="%{y}: %{customdata}<extra>%{fullData.name}</extra>",
            )
        )
    figure.update_layout(barmode="stack", bargap=0.45, legend={"traceorder": "normal"})
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    figure = finish(figure, title, None)
    figure.update_xaxes(title=unit, exponentformat="B")  # 8B: billions of parameters, no giga
    return figure.update_layout(height=140 + 44 * max(len(values), 1))
