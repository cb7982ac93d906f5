"""A repeated block applied more or less often than in training, as figures: the nll, and what still changes."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from itertools import islice

import plotly.graph_objects as go

from tiewise.analysis.estimates import Estimate
from tiewise.internals.application_sweep import Applied, Sweep
from tiewise.internals.sharing_costs import packaged_costs
from tiewise.report import sharing_costs, theme
from tiewise.report.bars import finish
from tiewise.report.grid import Table
from tiewise.report.inspected.refinement import shown
from tiewise.report.sheet import Panel

Measured = Callable[[Applied], Estimate | None]
Points = list[tuple[int, Estimate]]
_MARKED = "The large open marker is the number of applications that the model was trained with."


def panels(found: Mapping[str, Sweep]) -> list[Panel]:
    """Return nll, its difference to the model's own and change by number of applications, and what sharing saves."""
    nll = f"{_MARKED} Dotted: the tokens' frequencies alone. Bands are 95 % intervals over windows."
    more = f"Window by window, so that how hard a text is takes no part; above 0 is worse than as trained. {_MARKED}"
    change = f"‖h after − h before‖ / ‖h before‖ of the last of n applications, mean over tokens. {_MARKED}"
    return [
        Panel(_nll_figure(found), nll, _table(found, _nll)),
        Panel(_more_figure(found), more, _table(found, _more)),
        Panel(_change_figure(found), change, _table(found, _change)),
        *map(sharing_costs.panel, packaged_costs()),
    ]


def _nll(one: Applied) -> Estimate | None:
    return one.nll


def _more(one: Applied) -> Estimate | None:
    return one.more


def _change(one: Applied) -> Estimate | None:
    return one.change


def _nll_figure(found: Mapping[str, Sweep]) -> go.Figure:
    figure = _lines(found, _nll)
    alike = len({one.unigram for one in found.values()}) == 1
    placed = zip(theme.places(list(found)), found.items(), strict=True)
    for position, (label, one) in islice(placed, 1 if alike else None):
        figure.add_scatter(
            x=[1, _longest(found)],
            y=[one.unigram.value] * 2,
            mode="lines",
            name="token frequencies" if alike else f"{html.escape(label)}, frequencies",
            line={"color": "#8a8f99" if alike else theme.style(position).colour, "width": 1.6, "dash": "dot"},
            hovertemplate=shown(one.unigram),
        )
    return finish(figure, "Nll by how often the block is applied", "nats per token")


def _more_figure(found: Mapping[str, Sweep]) -> go.Figure:
    figure = _lines(found, _more).add_hline(y=0, line={"width": 1, "color": "#8a8f99"})
    return finish(figure, "Nll less that of the model as trained", "difference, nats per token")


def _change_figure(found: Mapping[str, Sweep]) -> go.Figure:
    figure = finish(_lines(found, _change), "Change by one more application", "relative change")
    return figure.update_yaxes(type="log", dtick=1, tickformat="~g")


def _lines(found: Mapping[str, Sweep], value: Measured) -> go.Figure:
    """Draw a measure of every model over n, with bands, the trained n marked."""
    figure = go.Figure()
    for position, (label, one) in zip(theme.places(list(found)), found.items(), strict=True):
        points = [(step.times, e) for step in one.course if (e := value(step)) is not None]
        look = theme.style(position)
        figure.add_trace(_band(points, look))
        figure.add_scatter(
            x=[x for x, _ in points],
            y=[e.value for _, e in points],
            name=html.escape(label),
            mode="lines+markers",
            line={"color": look.colour, "width": 2.2, "dash": look.dash},
            marker={"symbol": look.marker, "size": 5, "color": look.colour},
            customdata=[shown(e) for _, e in points],
            hovertemplate="%{x} times: %{customdata}",
        )
        figure.add_trace(_trained(one, value, look))
    longest = _longest(found)
    step = max(1, longest // 6)
    ticks = {"tickvals": [1, *range(max(step, 2), longest + 1, step)], "range": [0.5, longest + 0.5]}
    return figure.update_xaxes(title="applications of the block", zeroline=False, **ticks)


def _trained(one: Sweep, value: Measured, look: theme.Style) -> go.Scatter:
    own = value(one.own)
    return go.Scatter(
        x=[] if own is None else [one.trained],
        y=[] if own is None else [own.value],
        mode="markers",
        marker={"symbol": f"{look.marker}-open", "size": 15, "color": look.colour, "line": {"width": 2.2}},
        showlegend=False,
        hoverinfo="skip",
    )


def _band(points: Points, look: theme.Style) -> go.Scatter:
    """Area between the ends of the intervals."""
    x = [x for x, _ in points]
    return go.Scatter(
        x=[*x, *reversed(x)],
        y=[*(e.high for _, e in points), *reversed([e.low for _, e in points])],
        fill="toself",
        fillcolor=look.colour,
        opacity=0.18,
        line={"width": 0},
        mode="lines",
        showlegend=False,
        hoverinfo="skip",
    )


def _longest(found: Mapping[str, Sweep]) -> int:
    return max(len(one.course) for one in found.values())


def _table(found: Mapping[str, Sweep], value: Measured) -> Table:
    rows = [
        [str(n), *(shown(value(one.course[n - 1])) if n <= len(one.course) else shown(None) for one in found.values())]
        for n in range(1, _longest(found) + 1)
    ]
    return Table(["applications", *found], rows)
