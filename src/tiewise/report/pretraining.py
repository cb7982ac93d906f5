"""What the page shows of ALBERTs beside the losses: masked tokens and pairs judged right, and the bytes of a step."""

from __future__ import annotations

import html
from collections.abc import Iterator

import plotly.graph_objects as go

from tiewise.core.numerals import plain, size
from tiewise.planning.costs import training_bytes
from tiewise.report import shares, theme
from tiewise.report.bars import finish, stacked
from tiewise.report.grid import Table
from tiewise.report.sheet import Panel
from tiewise.training.results import MASKED, Comparison

_CAPTIONS = {
    MASKED: "Of held-out tokens that were masked, those whose right token had the largest logit.",
    "sop": "Pairs of held-out segments that follow each other, half of them swapped; the line is chance.",
    "nsp": "Held-out segments, the second from another document in half of the pairs; the line is chance.",
}


def share_panels(comparison: Comparison) -> Iterator[Panel]:
    """One panel per share that was measured."""
    for name in shares.measured(comparison):
        yield Panel(share_figure(comparison, name), _CAPTIONS[name], _share_table(comparison, name))


def share_figure(comparison: Comparison, name: str) -> go.Figure:
    """Draw what each arm judges right, with 95 % intervals over seeds (`tiewise.report.shares`)."""
    figure = go.Figure()
    for position, arm in zip(theme.places(comparison.arms), comparison.arms, strict=True):
        found = shares.over_seeds(comparison.of(arm), name)
        if found is None:
            continue
        look = theme.style(position)
        figure.add_scatter(
            x=[found.value],
            y=[label(arm)],
            mode="markers",
            marker={"color": look.colour, "size": 9, "symbol": look.marker},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [found.high - found.value],
                "arrayminus": [found.value - found.low],
                "thickness": 1.6,
                "width": 5,
                "color": look.colour,
            },
            hovertemplate=f"{shares.percent(found)}<extra>{html.escape(arm)}</extra>",
            showlegend=False,
        )
    if name != MASKED:
        figure.add_vline(x=shares.CHANCE, line={"width": 1, "color": "#8a8f99"})
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    heading = shares.NAMES[name] if name == MASKED else f"{shares.NAMES[name]}: {shares.PAIRS[name]}"
    figure = finish(figure, heading.capitalize(), None)
    figure.update_xaxes(title="share judged right", tickformat=".1~%", nticks=6)
    return figure.update_layout(height=130 + 40 * max(len(figure.data), 1), margin={**theme.MARGIN, "t": 52})


def memory_panel(comparison: Comparison) -> Panel | None:
    """Bytes of weights, gradients and the optimizer's two moments by arm, as counted; None where no run says enough."""
    runs = {arm: found[0] for arm in comparison.arms if (found := comparison.of(arm))}
    counted = {
        arm: training_bytes(run.total_parameters, run.trainable_parameters, "float32")["adamw"]
        for arm, run in runs.items()
        if run.shares and run.trainable_parameters is not None
    }
    if not counted:
        return None
    parts = {arm: {"weights": b.weights, "gradients": b.gradients, "moments": b.state} for arm, b in counted.items()}
    figure = stacked(parts, "Memory of training, as counted", "bytes", size).update_xaxes(ticksuffix="B")
    caption = (
        "fp32 weights, gradients, and the two moments that AdamW and LAMB keep: 16 bytes for each parameter that is "
        "trained, however often it is used. What is kept for the backward pass comes on top, and sharing does not "
        "change it: every application of a layer keeps its own."
    )
    rows = [[arm, *map(size, (b.weights, b.gradients, b.state, b.total))] for arm, b in counted.items()]
    return Panel(figure, caption, Table(["arm", "weights", "gradients", "moments", "together"], rows))


def share_lead(comparison: Comparison) -> str:
    """Say what the shares are, and what knowing nothing but frequencies gives on the same masked tokens."""
    unigram = next((run.unigram_nll for run in comparison.runs if run.unigram_nll is not None), None)
    said = [shares.NOTE]
    if unigram is not None:
        said.append(
            "The same masked tokens have an nll of "
            f"{plain(unigram)} by the training text’s frequencies alone, which a model that reads nothing reaches."
        )
    return "".join(f"<p>{html.escape(line)}</p>" for line in said)


def label(arm: str) -> str:
    """An arm as plotly text, what its layers share on a line of its own."""
    return html.escape(arm).replace("+share=", "<br>+share=")


def _share_table(comparison: Comparison, name: str) -> Table:
    rows = [
        [arm, shares.percent(shares.over_seeds(runs, name)), shares.points(comparison.difference(arm, f"share:{name}"))]
        for arm in comparison.arms
        if (runs := comparison.of(arm))
    ]
    return Table(["arm", "right, 95 % interval", f"points minus {comparison.reference}, 95 % interval"], rows)
