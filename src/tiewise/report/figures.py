"""A comparison in plotly figures, the same objects in a notebook and in the page.

>>> held_out_loss(comparison).show()                                    # doctest: +SKIP

Every arm keeps its colour, dash and marker through all figures; thin lines are single seeds, thick ones their mean.
Heat maps of the direct path are in `tiewise.report.heat_map`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

import plotly.graph_objects as go

from tiewise.core.numerals import count
from tiewise.report import theme
from tiewise.report.bars import finish, stacked
from tiewise.report.series import (
    Series,
    cosine,
    difference_series,
    heldout_nll,
    path_b_share,
    series,
    train_nll,
)
from tiewise.training.results import Comparison, Difference

NATS = "nats per token"


def held_out_loss(comparison: Comparison) -> go.Figure:
    """Held-out nll over training."""
    return _lines(comparison, series(comparison, heldout_nll), "Held-out loss", NATS)


def training_loss(comparison: Comparison) -> go.Figure:
    """Training nll over training."""
    return _lines(comparison, series(comparison, train_nll), "Training loss", NATS)


def held_out_difference(comparison: Comparison) -> go.Figure:
    """Held-out nll minus the reference's over training, paired by seed."""
    title = f"Held-out loss minus {comparison.reference} over training"
    figure = _lines(comparison, difference_series(comparison, heldout_nll), title, f"difference, {NATS}")
    return figure.add_hline(y=0, line={"width": 1, "color": "#8a8f99"})


def path_share(comparison: Comparison) -> go.Figure:
    """‖B‖ / (‖A‖ + ‖B‖) over training, with a line at one half."""
    label = "‖B‖ / (‖A‖ + ‖B‖)"
    figure = _lines(comparison, series(comparison, path_b_share), "Share of the output path in the gradient", label)
    figure.update_yaxes(range=[0, 1], tickformat=".0%")
    return figure.add_hline(y=0.5, line={"width": 1, "color": "#8a8f99"})


def path_cosine(comparison: Comparison) -> go.Figure:
    """Cosine between the gradients of the two paths over training."""
    title = "Do both paths pull the same way?"
    figure = _lines(comparison, series(comparison, cosine), title, "cosine of Path A and Path B")
    return figure.add_hline(y=0, line={"width": 1, "color": "#8a8f99"})


def by_frequency(comparison: Comparison) -> go.Figure:
    """Held-out nll minus the reference's, by how often a token occurs in the training text, with 95 % intervals."""
    figure = go.Figure()
    for arm, position in _others(comparison):
        found = [d for d in comparison.differences if d.arm == arm and d.metric.startswith("frequency:")]
        if found:
            labels = [d.metric.removeprefix("frequency:") for d in found]
            figure.add_trace(_points(arm, position, found, x=labels, y=[d.mean for d in found], along="y"))
    figure.update_layout(scattermode="group", scattergap=0.7)
    figure.update_xaxes(title="times the token occurs in the training text", type="category", categoryorder="trace")
    figure.add_hline(y=0, line={"width": 1, "color": "#8a8f99"})
    return finish(figure, f"Difference to {comparison.reference} by token frequency", f"difference, {NATS}")


def paired_differences(comparison: Comparison) -> go.Figure:
    """Training and held-out nll minus the reference's, with 95 % intervals: a forest plot."""
    figure = go.Figure()
    for metric, name in (("heldout_nll", "held-out"), ("train_nll", "training")):
        for arm, position in _others(comparison):
            found = comparison.difference(arm, metric)
            if found:
                row = f"{html.escape(arm)} · {name}"
                trace = _points(arm, position, [found], x=[found.mean], y=[row], along="x")
                hollow = metric == "train_nll"
                trace.marker.symbol = f"{trace.marker.symbol}-open" if hollow else trace.marker.symbol
                figure.add_trace(trace.update(showlegend=False))
    figure.add_vline(x=0, line={"width": 1, "color": "#8a8f99"})
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    figure = finish(figure, f"Paired differences to {comparison.reference}", None)
    figure.update_xaxes(title=f"difference, {NATS}")
    return figure.update_layout(height=110 + 46 * max(len(figure.data), 1))


def parameters(comparison: Comparison) -> go.Figure:
    """Unique parameters of every arm by component, stacked."""
    arms = {arm: runs[0].parameters for arm in comparison.arms if (runs := comparison.of(arm))}
    return stacked(arms, "Where the parameters are", "unique parameters", count, first="body")


def _others(comparison: Comparison) -> Iterable[tuple[str, int]]:
    placed = zip(comparison.arms, theme.places(comparison.arms), strict=True)
    return ((arm, place) for arm, place in placed if arm != comparison.reference)


def _lines(comparison: Comparison, curves: Sequence[Series], title: str, unit: str) -> go.Figure:
    figure, places = go.Figure(), dict(zip(comparison.arms, theme.places(comparison.arms), strict=True))
    for curve in curves:
        look = theme.style(places[curve.arm])
        group = {"legendgroup": curve.arm, "mode": "lines", "x": curve.steps}
        for values in curve.seeds.values() if len(curve.seeds) > 1 else ():
            thin = {"color": look.colour, "width": 1}
            figure.add_scatter(**group, y=values, line=thin, opacity=0.3, showlegend=False, hoverinfo="skip")
        figure.add_scatter(
            **group,
            y=curve.mean,
            name=html.escape(curve.arm),
            line={"color": look.colour, "width": 2.2, "dash": look.dash},
            hovertemplate="%{y:.4f}",
        )
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(title="training step", zeroline=False)
    return finish(figure, title, unit)


def _points(
    arm: str, position: int, found: Sequence[Difference], *, x: Sequence, y: Sequence, along: str
) -> go.Scatter:
    look = theme.style(position)
    half = [0 if d.low is None or d.high is None else (d.high - d.low) / 2 for d in found]
    bars = {"array": half, "thickness": 1.6, "width": 5, "color": look.colour}
    ends = ["one pair, no interval" if d.low is None else f"95 % interval {d.low:+.4f} to {d.high:+.4f}" for d in found]
    return go.Scatter(
        x=x,
        y=y,
        name=html.escape(arm),
        mode="markers",
        marker={"color": look.colour, "size": 9, "symbol": look.marker},
        customdata=ends,
        hovertemplate=f"%{{{along}:+.4f}}<br>%{{customdata}}<extra>{html.escape(arm)}</extra>",
        **{f"error_{along}": bars},
    )
