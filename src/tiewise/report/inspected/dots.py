"""Dot plots: one row for each thing measured, in it a dot with its interval for each series."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from tiewise.core.numerals import plain
from tiewise.report.bars import finish

QUIET = "#8a8f99"
_ROW = 34  # pixels for each row


@dataclass(frozen=True)
class Dot:
    """A value in a row, with its 95 % interval where it has one."""

    row: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Dots that are drawn alike.

    Args:
        name: in the legend; text as it was written.
        dots: at most one for each row, or several where no intervals are drawn.
        colour: of marker and interval.
        symbol: a marker of plotly.
        size: of the marker.
        offset: where in its row a dot lies, from −0.5 (top) to 0.5.
    """

    name: str
    dots: Sequence[Dot]
    colour: str
    symbol: str
    size: int = 9
    offset: float = 0.0


def dot_plot(series: Sequence[Series], title: str, unit: str) -> go.Figure:
    """Draw series over rows, from top to bottom in the order in which rows first occur."""
    rows = list(dict.fromkeys(dot.row for one in series for dot in one.dots))
    place = {row: position for position, row in enumerate(rows)}
    figure = go.Figure()
    for one in series:
        if one.dots:
            figure.add_trace(_trace(one, place))
    figure.add_vline(x=0, line={"width": 1, "color": QUIET})
    ticks = {"tickvals": list(place.values()), "ticktext": [html.escape(row) for row in rows]}
    figure.update_yaxes(**ticks, range=[len(rows) - 0.4, -0.6], zeroline=False)
    figure = finish(figure, title, None)
    figure.update_xaxes(title=unit, zeroline=False)
    return figure.update_layout(height=150 + _ROW * max(len(rows), 1))


def _trace(one: Series, place: dict[str, int]) -> go.Scatter:
    bars = any(dot.low is not None for dot in one.dots)
    reach = {
        "array": [0.0 if dot.high is None else dot.high - dot.value for dot in one.dots],
        "arrayminus": [0.0 if dot.low is None else dot.value - dot.low for dot in one.dots],
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
        customdata=[f"{html.escape(dot.row)}: {_shown(dot)}" for dot in one.dots],
        hovertemplate="%{customdata}<extra>%{fullData.name}</extra>",
    )


def _shown(dot: Dot) -> str:
    bounds = "" if dot.low is None else f" [{plain(dot.low)}, {plain(dot.high)}]"
    return plain(dot.value) + bounds
