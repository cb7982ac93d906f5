"""Tokens as points of a plane, a colour for each group."""

from __future__ import annotations

import html
from collections.abc import Iterable

import plotly.graph_objects as go

from tiewise.core.measurement import Listing, Points, plain, visible
from tiewise.report.drawing import QUIET, UNSAID, finish, marker, title_of, token_label
from tiewise.report.report_page import Panel

GROUP_COLOURS = ("#8a8f99", "#2f7fd1", "#13879a", "#2a9468", "#c98a06", "#d4475a")  # from rare to frequent


def plane(points: Points) -> Panel:
    """Draw points, a colour for each group. Named points have their label."""
    figure = go.Figure()
    members: dict[int, list[int]] = {}  # group → indices of its points
    for place, group in enumerate(points.groups):
        members.setdefault(group, []).append(place)
    for group in sorted(members):
        x, y, labels = _coordinates(points, members[group])
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
    finish(figure, title_of(points.name, points.of), None)
    figure.update_layout(height=480, legend_itemsizing="constant")
    figure.update_xaxes(title=points.axes[0]).update_yaxes(title=points.axes[1])
    rows = []
    for place in points.named:
        x_value, y_value = points.xy[place]
        rows.append([visible(points.labels[place]), plain(x_value, 3), plain(y_value, 3)])
    return Panel(figure, points.why, Listing("", ["token", *points.axes], rows))


def _coordinates(points: Points, places: Iterable[int]) -> tuple[list[float], list[float], list[str]]:
    """Return (x, y, labels) of the points with these indices."""
    x, y, labels = [], [], []
    for place in places:
        x_value, y_value = points.xy[place]
        x.append(round(x_value, 4))
        y.append(round(y_value, 4))
        labels.append(token_label(points.labels[place]))
    return x, y, labels
