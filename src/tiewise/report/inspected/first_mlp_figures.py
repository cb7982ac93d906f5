"""The direct path with the first MLP in it, as figures."""

from __future__ import annotations

import html
from collections.abc import Mapping

import plotly.graph_objects as go

from tiewise.internals.first_mlp import FirstMlp
from tiewise.report import theme
from tiewise.report.bars import finish
from tiewise.report.grid import Table
from tiewise.report.inspected.figures_of_heat import heat_panels
from tiewise.report.inspected.figures_of_pairs import pair_panels
from tiewise.report.inspected.first_mlp import asked, shown
from tiewise.report.sheet import Panel

PATHS = {"direct path": "without", "with the first MLP": "within"}
CAPTION = (
    "‖S − Sᵀ‖²/‖S‖² of the logits that sampled tokens give each other: 0 symmetric, 2 unrelated (grey line). Solid "
    "bars: S as it is; hatched: less its row and column means, which the normaliser and a bias take up. Whiskers: 95 % "
    "intervals over tokens."
)


def panels(found: Mapping[str, FirstMlp]) -> list[Panel]:
    """Return asymmetry without and with the MLP, the requested pairs, and the heat maps where there is a text."""
    text = next((one.text for one in found.values() if one.text), ())
    targets = {label: one.target for label, one in found.items() if one.target is not None}
    maps = [
        (title, view.heat)
        for label, one in found.items()
        for title, view in ((f"Direct path of {label}", one.without), (f"{label} with its first MLP", one.within))
        if view.heat is not None
    ]
    return [
        Panel(_asymmetry(found), CAPTION, _table(found)),
        *pair_panels(asked(found), text),
        *heat_panels(targets, maps),
    ]


def _asymmetry(found: Mapping[str, FirstMlp]) -> go.Figure:
    figure = go.Figure()
    for position, (label, one) in zip(theme.places(list(found)), found.items(), strict=True):
        for kind, said in (("ratio", ""), ("centred", ", centred")):
            estimates = [getattr(getattr(one, path).asymmetry, kind) for path in PATHS.values()]
            figure.add_bar(
                name=html.escape(f"{label}{said}"),
                x=list(PATHS),
                y=[e.value for e in estimates],
                error_y={
                    "array": [e.high - e.value for e in estimates],
                    "arrayminus": [e.value - e.low for e in estimates],
                    "thickness": 1.4,
                    "width": 4,
                    "color": "#8a8f99",
                },
                marker={
                    "color": theme.style(position).colour,
                    "opacity": 0.55 if said else 1.0,
                    "pattern": {"shape": "/" if said else "", "size": 6, "solidity": 0.25},
                    "line": {"width": 0},
                },
                customdata=[shown(e) for e in estimates],
                hovertemplate="%{x}: %{customdata}<extra>%{fullData.name}</extra>",
            )
    figure.update_layout(barmode="group", bargap=0.35)
    figure.add_hline(y=2, line={"width": 1, "color": "#8a8f99"})
    figure.update_xaxes(type="category")
    figure.update_yaxes(range=[0, max(2.2, 1.1 * max(max(trace.y) for trace in figure.data))])
    return finish(figure, "How much asymmetry the first MLP gives back", "‖S − Sᵀ‖²/‖S‖²")


def _table(found: Mapping[str, FirstMlp]) -> Table:
    rows = [
        [f"{label}{said}", *(shown(getattr(view.asymmetry, kind)) for view in (one.without, one.within)), change]
        for label, one in found.items()
        for kind, said in (("ratio", ""), ("centred", ", centred"))
        for change in [shown(getattr(one.change, kind), True)]
    ]
    return Table(["‖S − Sᵀ‖²/‖S‖²", *PATHS, "change"], rows)
