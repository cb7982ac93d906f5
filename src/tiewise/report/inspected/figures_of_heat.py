"""Heat maps side by side: what a text has, and what paths say, on one colour scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from tiewise.analysis.heat import HeatMap
from tiewise.numerals import signed
from tiewise.report.grid import Table
from tiewise.report.heat_map import heat_map
from tiewise.report.labels import token_label, visible
from tiewise.report.sheet import Panel

TARGET = (
    "How much likelier the next token (column) is behind the current one (row) than anywhere in the text, log Q/(ππ) "
    "in nats, less what its row and its column have in common. Crosses: pairs that the text never has."
)
SAID = (
    "log p(next | current) − log π(next) in nats, by the path's softmax over the whole vocabulary and the text's π, "
    "less what its row and its column have in common; colours end where the text's do."
)


def heat_panels(targets: Mapping[str, HeatMap], said: Sequence[tuple[str, HeatMap]]) -> list[Panel]:
    """Return the text's maps, each once, then those of paths.

    Args:
        targets: label of the model → the text in its tokens.
        said: title → map of a path.
    """
    limit = max((_largest(one) for one in targets.values()), default=0.0) or 1.0
    made = []
    shown: list[HeatMap] = []
    for label, target in targets.items():
        if target not in shown:
            title = "Bigrams of the text" if not shown else f"Bigrams of the text in the tokens of {label}"
            shown.append(target)
            made.append(Panel(_drawn(target, limit, title), TARGET, _table(target)))
    return made + [Panel(_drawn(one, limit, title), SAID, _table(one)) for title, one in said]


def _largest(target: HeatMap) -> float:
    """The largest value off the diagonal, either side of 0."""
    values = target.interaction
    off = values[~np.eye(len(values), dtype=bool) & ~np.isnan(values)]
    return float(np.abs(off).max(initial=0.0))


def _drawn(one: HeatMap, limit: float, title: str) -> go.Figure:
    values = _shown(one)
    figure = heat_map(one.texts, values, limit, title)
    unseen = [(j, i) for i, row in enumerate(values) for j, value in enumerate(row) if value is None]
    if unseen:
        labels = [token_label(text) for text in one.texts]
        figure.add_scatter(
            x=[x for x, _ in unseen],
            y=[y for _, y in unseen],
            mode="markers",
            marker={"symbol": "x-thin", "size": 4, "line": {"width": 1, "color": "#8a8f99"}},
            customdata=[[labels[i], labels[j]] for j, i in unseen],
            hovertemplate="%{customdata[0]} → %{customdata[1]}: never in the text<extra></extra>",
            showlegend=False,
        )
    return figure.update_layout(height=560, xaxis={"range": [-0.5, len(values) - 0.5]})


def _table(one: HeatMap) -> Table:
    labels = [visible(text) for text in one.texts]
    rows = [[label, *(signed(value, 2) for value in row)] for label, row in zip(labels, _shown(one), strict=True)]
    return Table(["current ↓ next →", *labels], rows)


def _shown(one: HeatMap) -> list[list[float | None]]:
    return [[None if np.isnan(value) else round(float(value), 3) for value in row] for row in one.interaction]
