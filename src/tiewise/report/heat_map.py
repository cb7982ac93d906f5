"""The direct path as heat maps: which next token does the lookup alone, multiplied by the head, already ask for?

The two-way additive part is taken out first: softmax ignores a row's constant, and a column's constant is a token
that is likely everywhere. Both are fitted on the entries off the diagonal, since a tied table's diagonal holds squared
norms that would drown the rest. What is symmetric stays symmetric under this.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence

import numpy as np
import plotly.graph_objects as go

from tiewise.core.found import visible
from tiewise.core.numerals import count, signed
from tiewise.report.grid import Table
from tiewise.report.labels import token_label
from tiewise.report.sheet import Panel
from tiewise.report.theme import LIGHT, MARGIN
from tiewise.training.results import ArmDirectPath, Comparison

CAPTION = (
    "Logit of the next token (column) that the current token's embedding alone (row) produces at the output, less what "
    "its row and its column have in common; colours saturate on the diagonal."
)


def centred(logits: Sequence[Sequence[float]]) -> np.ndarray:
    """Remove from [n, n] logits the least-squares fit m + a_i + b_j of the entries with i ≠ j.

    With r and c the off-diagonal means of rows and columns, g the overall one and k = 1/(n−1), the normal equations
    give a = (r − g + k(c − g)) / (1 − k²), and b likewise. Fewer than three tokens leave nothing to fit but g.
    """
    x = np.asarray(logits, dtype=float)
    n = len(x)
    if n < 2:
        return np.zeros_like(x)
    off = ~np.eye(n, dtype=bool)
    overall = x[off].mean()
    if n == 2:
        return x - overall
    k = 1 / (n - 1)
    row = (x * off).sum(1) * k - overall
    column = (x * off).sum(0) * k - overall
    a, b = ((row + k * column) / (1 - k * k), (column + k * row) / (1 - k * k))
    return x - overall - a[:, None] - b[None, :]


def direct_path_panels(comparison: Comparison) -> Iterator[Panel]:
    """One heat map per arm, all on one colour scale that reaches to the largest value off any diagonal."""
    maps = [(path, centred(path.logits)) for path in comparison.direct_path if path.tokens]
    limit = max((float(np.abs(x - np.diag(np.diag(x))).max()) for _, x in maps), default=0.0) or 1.0
    for path, values in maps:
        labels = [visible(token) for token in path.tokens]
        rows = [[label, *(signed(float(x), 2) for x in row)] for label, row in zip(labels, values, strict=True)]
        figure = heat_map(path.tokens, values.round(4).tolist(), limit, f"Direct path of {path.arm}")
        yield Panel(figure, CAPTION, Table(["current ↓ next →", *labels], rows))


def bigrams(comparison: Comparison) -> Table:
    """List the most asymmetric bigrams with each arm's direct-path logit difference between the two orders."""
    paths = comparison.direct_path
    rows = [
        [
            f"{visible(pair['left'])} → {visible(pair['right'])}",
            count(pair["count"]),
            f"{pair['forward']:.3g}",
            f"{pair['backward']:.3g}",
            *(signed(asymmetry(path, pair["left"], pair["right"]), 3) for path in paths),
        ]
        for pair in comparison.bigrams
    ]
    header = ["bigram", "count", "p(right | left)", "p(left | right)", *(path.arm for path in paths)]
    return Table(header, rows)


def asymmetry(path: ArmDirectPath, left: str, right: str) -> float | None:
    """logit(right after left) − logit(left after right); None where the map lacks one of the two."""
    if left not in path.tokens or right not in path.tokens:
        return None
    i, j = path.tokens.index(left), path.tokens.index(right)
    return path.logits[i][j] - path.logits[j][i]


def heat_map(tokens: Sequence[str], values: Sequence[Sequence[float | None]], limit: float, title: str) -> go.Figure:
    """Draw what follows what: rows are current tokens [n], columns next ones, as a user wrote them.

    None among `values` [n][n] leaves a cell empty; colours end at `limit`, either side of 0.
    """
    labels = [token_label(token) for token in tokens]
    places = list(range(len(labels)))
    # positions, not labels, are the coordinates: two tokens may look alike, and "2024" must not become a date
    figure = go.Figure(
        go.Heatmap(
            x=places,
            y=places,
            z=values,
            customdata=[[[row, column] for column in labels] for row in labels],
            coloraxis="coloraxis",
            hovertemplate="%{customdata[0]} → %{customdata[1]}: %{z:+.3f}<extra></extra>",
            xgap=1,
            ygap=1,
        )
    )
    ticks = {"tickvals": places, "ticktext": labels, "showgrid": False, "zeroline": False, "tickfont": {"size": 11}}
    figure.update_layout(
        template=LIGHT,
        title=html.escape(title),
        height=430,
        margin=MARGIN,
        xaxis={**ticks, "title": "next token", "tickangle": -60},
        yaxis={**ticks, "title": "current token", "autorange": "reversed"},
        coloraxis={
            "cmin": -limit,
            "cmax": limit,
            "colorbar": {"orientation": "h", "thickness": 8, "len": 0.7, "y": 1.01, "yanchor": "bottom", "title": ""},
        },
    )
    return figure
