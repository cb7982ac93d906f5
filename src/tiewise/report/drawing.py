"""Parts of all figures: a style for each arm or model, markers, token labels, titles, margins.

An arm or model has the same colour (`core/measurement.py`), dash and marker in all figures, in both themes.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from tiewise.core.measurement import COLOURS, places, visible
from tiewise.report.report_page import LIGHT, MARGIN

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
QUIET = "#8a8f99"
# Options of traces without legend entry and hover text.
UNSAID: dict[str, Any] = {"showlegend": False, "hoverinfo": "skip"}


@dataclass(frozen=True)
class Style:
    """Colour, dash and marker of one arm or model in every figure."""

    colour: str
    dash: str
    marker: str


def style(index: int) -> Style:
    """Return the `index`-th style. The periods differ in length, so 168 styles are distinct."""
    return Style(COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)], MARKERS[index % len(MARKERS)])


def styles(names: Iterable[str]) -> dict[str, Style]:
    """Return a style for each name."""
    return {name: style(place) for name, place in places(names).items()}


def finish(figure: go.Figure, title: str, unit: str | None) -> go.Figure:
    """Give a figure its template, title, height and margins, and its y axis a title."""
    figure.update_layout(template=LIGHT, title=html.escape(title), height=380, margin=MARGIN)
    if unit:
        figure.update_yaxes(title=unit)
    return figure


def title_of(name: str, model: str) -> str:
    """Return the title of a figure, which may belong to one model."""
    if not model:
        return name
    return f"{name}: {model}"


def marker(colour: str, size: float, symbol: str | Sequence[str] = "circle", width: float = 0) -> go.scatter.Marker:
    """Return a marker with a coloured outline. `symbol` may be a list, one for each point."""
    return go.scatter.Marker(color=colour, size=size, symbol=symbol, line_color=colour, line_width=width)


def token_label(token: str) -> str:
    """Return a token as plotly text: visible and escaped. plotly does not treat quotes as markup."""
    return html.escape(visible(token), quote=False)
