"""A grid of numbers as a heat map, rows against columns.

Indices are the coordinates, not labels: two tokens may have the same label, and plotly must not parse "2024" as a date.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from tiewise.core.measurement import Grid, Listing, plain, visible
from tiewise.report.drawing import QUIET, UNSAID, finish, marker, title_of, token_label
from tiewise.report.report_page import Panel

MAP_HEIGHT = 430  # pixels
ROW_HEIGHT = 44  # pixels per row with texts


def heat_map(grid: Grid) -> Panel:
    """Draw a grid. A cell without a number is crossed, or has its text."""
    heat = _HeatMap(grid)
    heat.arrange()
    heat.mark_empty_cells()
    return Panel(heat.figure, grid.why, heat.table())


class _HeatMap:
    """State of a heat map."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.row_axis, self.column_axis = "current token", "next token"
        if grid.axes[0]:
            self.row_axis, self.column_axis = grid.axes
        self.row_labels = [token_label(row) for row in grid.rows]
        self.column_labels = [token_label(column) for column in grid.columns]
        self.values = [[_drawable(value) for value in row] for row in grid.values]
        self.figure = go.Figure(self._cells())

    def _cells(self) -> go.Heatmap:
        """Return the coloured cells, with their texts if they have a number."""
        hover_labels = []
        for row_label in self.row_labels:
            hover_labels.append([[row_label, column_label] for column_label in self.column_labels])
        text_template = None
        if self.grid.texts:
            text_template = "%{text}"
        return go.Heatmap(
            x=list(range(len(self.column_labels))),
            y=list(range(len(self.row_labels))),
            z=self.values,
            customdata=hover_labels,
            text=self._texts_of_numbers(),
            texttemplate=text_template,
            coloraxis="coloraxis",
            hovertemplate="%{customdata[0]} → %{customdata[1]}: %{z:+.3f}<extra></extra>",
            xgap=1,
            ygap=1,
        )

    def _texts_of_numbers(self) -> list[list[str]]:
        """Return the texts of cells with a number, "" for any other cell.

        Empty for a grid without texts.
        """
        texts = []
        for row, of_row in zip(self.values, self.grid.texts, strict=False):  # a grid may have no texts
            texts.append(["" if value is None else text for value, text in zip(row, of_row, strict=True)])
        return texts

    def arrange(self) -> None:
        """Set title, height and colours, and write the labels along both axes."""
        height, tick_angle = MAP_HEIGHT, -60
        if self.grid.texts:
            height = min(MAP_HEIGHT, 190 + ROW_HEIGHT * len(self.row_labels))
            tick_angle = 0
        bar = go.layout.coloraxis.ColorBar(orientation="h", thickness=8, len=0.7, y=1.01, yanchor="bottom", title="")
        colours = go.layout.Coloraxis(cmin=-self.grid.top, cmax=self.grid.top, colorbar=bar)
        finish(self.figure, title_of(self.grid.name, self.grid.of), None)
        self.figure.update_layout(height=height, coloraxis=colours)
        self.figure.update_xaxes(
            title=self.column_axis,
            tickangle=tick_angle,
            tickvals=list(range(len(self.column_labels))),
            ticktext=self.column_labels,
        )
        self.figure.update_yaxes(
            title=self.row_axis,
            autorange="reversed",
            tickvals=list(range(len(self.row_labels))),
            ticktext=self.row_labels,
        )
        for axis in (self.figure.layout.xaxis, self.figure.layout.yaxis):
            axis.update(showgrid=False, zeroline=False, tickfont_size=11)

    def mark_empty_cells(self) -> None:
        """Mark every cell without a number by its text, or by a cross."""
        x, y = [], []
        for i, row in enumerate(self.values):
            for j, value in enumerate(row):
                if value is None:
                    x.append(j)
                    y.append(i)
        if not x:
            return
        mode, texts = "markers", None
        if self.grid.texts:
            mode = "text"
            texts = [self.grid.texts[i][j] for i, j in zip(y, x, strict=True)]
        self.figure.add_scatter(
            x=x,
            y=y,
            marker=marker(QUIET, 4, "x-thin", 1),
            mode=mode,
            text=texts,
            textfont_color=QUIET,
            **UNSAID,
        )
        self.figure.update_xaxes(range=[-0.5, len(self.column_labels) - 0.5])

    def table(self) -> Listing:
        """Return the grid as a table, with its texts if it has some."""
        texts: Sequence[Sequence[str]] = self.grid.texts
        if not texts:
            texts = [[plain(value, 3) for value in row] for row in self.values]
        rows = [[visible(name), *of_row] for name, of_row in zip(self.grid.rows, texts, strict=True)]
        columns = [visible(column) for column in self.grid.columns]
        return Listing("", [f"{self.row_axis} ↓ {self.column_axis} →", *columns], rows)


def _drawable(value: float) -> float | None:
    """Return a number with four digits; None, which plotly leaves empty, for NaN."""
    if math.isnan(value):
        return None
    return round(value, 4)
