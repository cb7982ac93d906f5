"""Quantities as dots with intervals: a row for each name and a dot for each model."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from textwrap import wrap

import plotly.graph_objects as go

from tiewise.core.measurement import Listing, Quantity
from tiewise.report.drawing import QUIET, Style, finish, marker
from tiewise.report.report_page import Panel

INTERVALS = "Bars and bands: 95 % intervals; grey strokes: no effect; grey crosses: permuted data."
AXIS_MINIMUM = {"probability": 1e-12}  # smaller values are drawn at this one, by unit
LABEL_WIDTH = 24  # letters in a line of a row's name, as many as fit on a phone
ROW_HEIGHT, FOREST_ROW_HEIGHT, LINE_HEIGHT = 38, 46, 17  # pixels of a row at least, and of a line of its name
SPREAD = 0.5  # share of a row's height over which its dots are spread
HOVER = "%{customdata}<extra>%{fullData.name}</extra>"


def dots(
    title: str, quantities: Sequence[Quantity], looks: Mapping[str, Style], forest: bool = False, why: str = INTERVALS
) -> Panel:
    """Draw a row for each name and a dot for each model.

    Args:
        title: title of the figure.
        quantities: the quantities to draw.
        looks: style of each model, in the order of the legend.
        forest: each row has one dot, which is hollow if its quantity is not the main one.
        why: caption, which explains the figure.
    """
    plot = _DotPlot(quantities, forest)
    if not forest:
        plot.add_no_effect()
        plot.add_permuted()
    plot.add_level_lines()
    plot.add_models(looks)
    plot.arrange(title)
    rows = [[q.name, q.of, str(q), q.no_effect] for q in quantities]
    return Panel(plot.figure, why, Listing("", ["measure", "model", "value [95 %]", "no effect"], rows))


class _DotPlot:
    """State of a dot plot. Rows are numbered from the top."""

    def __init__(self, quantities: Sequence[Quantity], is_forest: bool) -> None:
        self.quantities = quantities
        self.is_forest = is_forest
        self.names = list(dict.fromkeys(q.name for q in quantities))
        self.units = [unit.replace("%", "share") for unit in dict.fromkeys(q.unit for q in quantities)]
        self.figure = go.Figure()

    def add_no_effect(self) -> None:
        """Add a grey stroke at each quantity's value for no effect."""
        self._add_grey("no effect", self._chances(), "line-ns-open", 16)

    def _chances(self) -> list[tuple[str, float]]:
        """Return (row's name, value) of the values for no effect."""
        return [(q.name, q.chance) for q in self.quantities if q.chance is not None]

    def add_permuted(self) -> None:
        """Add a grey cross at each value measured on permuted data."""
        points: list[tuple[str, float]] = []
        for q in self.quantities:
            points += [(q.name, value) for value in q.null]
        self._add_grey("permuted", points, "x-thin-open", 7)

    def _add_grey(self, label: str, points: Sequence[tuple[str, float]], symbol: str, size: float) -> None:
        """Add (row's name, value) points under one label of the legend, if there are any."""
        if not points:
            return
        x, y, hover_texts = [], [], []
        for name, value in points:
            x.append(value)
            y.append(self.names.index(name))
            hover_texts.append(f"{html.escape(name)}: {Quantity('', value, unit='value')}")
        self.figure.add_scatter(
            x=x,
            y=y,
            name=label,
            mode="markers",
            marker=marker(QUIET, size, symbol, 1.6),
            customdata=hover_texts,
            hovertemplate=HOVER,
        )

    def add_level_lines(self) -> None:
        """Add a vertical line at zero, or in a forest at each no-effect value."""
        if self.units == ["probability"]:  # the axis of probabilities is logarithmic and has no 0
            return
        levels = {0.0}
        if self.is_forest:
            levels = {value for _, value in self._chances()}
        for level in levels:
            self.figure.add_vline(x=level, line_width=1, line_color=QUIET)

    def add_models(self, looks: Mapping[str, Style]) -> None:
        """Add the dots of every model that has a quantity. Dots of one row are spread around its middle."""
        measured = {q.of for q in self.quantities}
        models = [label for label in looks if label in measured]
        for position, label in enumerate(models):
            offset: float = 0
            if not self.is_forest:
                offset = (position - (len(models) - 1) / 2) * SPREAD / len(models)
            self._add_model(label, looks[label], offset)
        self.figure.update_traces(error_x_thickness=1.6, error_x_width=4)

    def _add_model(self, label: str, look: Style, offset: float) -> None:
        """Add the dots of one model with their intervals, `offset` rows below the rows' middle."""
        x, y, symbols, hover_texts = [], [], [], []
        below, above = [], []  # lengths of the intervals' sides
        has_interval = False
        for q in self.quantities:
            if q.of != label:
                continue
            value = max(q.value, AXIS_MINIMUM.get(q.unit, q.value))
            x.append(value)
            y.append(self.names.index(q.name) + offset)
            symbols.append(self._symbol(q, look))
            hover_texts.append(f"{html.escape(q.name)}: {q}")
            below.append(_length(value - q.low))
            above.append(_length(q.high - value))
            if not math.isnan(q.low):
                has_interval = True
        self.figure.add_scatter(
            x=x,
            y=y,
            name=html.escape(label),
            showlegend=not self.is_forest,
            mode="markers",
            marker=marker(look.colour, 9, symbols, 1.6),
            error_x_array=above,
            error_x_arrayminus=below,
            error_x_visible=has_interval,
            error_x_symmetric=False,
            customdata=hover_texts,
            hovertemplate=HOVER,
        )

    def _symbol(self, quantity: Quantity, look: Style) -> str:
        """Return the marker of a quantity. In a forest plot, only main quantities are filled."""
        if self.is_forest and not quantity.main:
            return f"{look.marker}-open"
        return look.marker

    def arrange(self, title: str) -> None:
        """Set title and height, write the rows' names, and scale the axis of values."""
        row_height, share_format = ROW_HEIGHT, ".0%"
        if self.is_forest:
            row_height, share_format = FOREST_ROW_HEIGHT, ".1~%"
        labels = _row_labels(self.names)
        most_lines = max((label.count("<br>") + 1 for label in labels), default=1)
        row_height = max(row_height, LINE_HEIGHT * most_lines)
        finish(self.figure, title, None).update_layout(height=150 + row_height * max(len(self.names), 1))
        self.figure.update_yaxes(tickvals=list(range(len(self.names))), ticktext=labels, zeroline=False)
        self.figure.update_yaxes(range=[len(self.names) - 0.4, -0.6])
        self.figure.update_xaxes(title=", ".join(self.units), zeroline=False)
        if self.units == ["share"]:
            self.figure.update_xaxes(title="", tickformat=share_format)
        if self.units == ["probability"]:
            self.figure.update_xaxes(type="log", dtick=1, exponentformat="power")


def _length(length: float) -> float:
    """Return the length of one side of an interval. NaN, a side without an end, becomes 0."""
    if math.isnan(length):
        return 0.0
    return length


def _row_labels(names: Iterable[str]) -> list[str]:
    """Return names of rows as plotly text, in short lines. How layers are shared starts a new line."""
    labels = []
    for name in names:
        lines: list[str] = []
        for part in html.escape(name).replace("+share=", "\n+share=").split("\n"):
            lines += wrap(part, LABEL_WIDTH)
        labels.append("<br>".join(lines))
    return labels
