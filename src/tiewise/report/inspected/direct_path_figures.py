"""The direct path as figures: how asymmetric it is, and the requested pairs."""

from __future__ import annotations

import html
from collections.abc import Mapping

import plotly.graph_objects as go

from tiewise.analysis.direct_path_found import DirectPathFound
from tiewise.core.numerals import plain
from tiewise.report import theme
from tiewise.report.bars import finish
from tiewise.report.grid import Table
from tiewise.report.inspected.figures_of_pairs import pair_panels
from tiewise.report.sheet import Panel

KINDS = {
    "gain and scales alone": "linear",
    "as the model applies it": "asymmetry",
    "less row and column means": "centred",
}
CAPTION = (
    "‖M − Mᵀ‖²/‖M‖² of the direct path over all tokens: 0 symmetric, 2 as two unrelated tables (grey line), 4 "
    "antisymmetric. One table at both ends is symmetric until the final norm divides each row by its own length."
)


def panels(found: Mapping[str, DirectPathFound]) -> list[Panel]:
    """Return the asymmetry, and logits and probabilities of the requested pairs."""
    asked = {label: one.pairs for label, one in found.items()}
    return [Panel(_asymmetry(found), CAPTION, _table(found)), *pair_panels(asked)]


def _asymmetry(found: Mapping[str, DirectPathFound]) -> go.Figure:
    figure = go.Figure()
    for position, (label, one) in zip(theme.places(list(found)), found.items(), strict=True):
        look = theme.style(position)
        values = [getattr(one, kind).ratio for kind in KINDS.values()]
        figure.add_bar(
            name=html.escape(label),
            x=list(KINDS),
            y=values,
            marker={"color": look.colour, "line": {"width": 0}},
            text=[plain(value, 2) for value in values],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{x}: %{y:.4f}<extra>%{fullData.name}</extra>",
        )
    figure.update_layout(barmode="group", bargap=0.35)
    figure.add_hline(y=2, line={"width": 1, "color": "#8a8f99"})
    finish(figure, "Asymmetry of the direct path", "‖M − Mᵀ‖²/‖M‖²")
    figure.update_xaxes(type="category")
    figure.update_yaxes(range=[0, max(2.3, 1.15 * max(max(trace.y) for trace in figure.data))])
    return figure.update_layout(showlegend=True)


def _table(found: Mapping[str, DirectPathFound]) -> Table:
    rows = [[name, *(plain(getattr(one, kind).ratio) for one in found.values())] for name, kind in KINDS.items()]
    return Table(["‖M − Mᵀ‖²/‖M‖²", *found], rows)
