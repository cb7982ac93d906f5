"""What the page shows of a comparison: figures, each with one sentence on how to read it and its numbers as a table.

>>> line_panel(comparison, HELD_OUT).figure.show()                      # doctest: +SKIP

Every arm keeps its colour, dash and marker through all figures; thin lines are single seeds, thick ones their mean. A
panel whose data a comparison lacks is left out, so a short run gives a short page. Heat maps of the direct path are in
`tiewise.report.heat_map`.
"""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from tiewise.core.found import Quantity
from tiewise.core.numerals import NONE, count, plain, signed, size
from tiewise.planning.costs import training_bytes
from tiewise.report import theme
from tiewise.report.comparison_found import CHANCE, NATS, PAIRS, SHARES, difference, found, measured_shares, share
from tiewise.report.grid import Table
from tiewise.report.sheet import Panel
from tiewise.training.results import MASKED, Comparison, CurvePoint, gaps

THIN = "Thick lines are means over seeds, thin lines single seeds."
EACH = "Each interval is 95 % on its own: of twenty that hold zero in truth, about one excludes it by chance."
LEVEL = {"width": 1, "color": "#8a8f99"}
JUDGED = {
    MASKED: "Of held-out tokens that were masked, those whose right token had the largest logit.",
    "sop": "Pairs of held-out segments that follow each other, half of them swapped; the line is chance.",
    "nsp": "Held-out segments, the second from another document in half of the pairs; the line is chance.",
}


@dataclass(frozen=True)
class Measured:
    """A number of every moment of training, and its figure; {reference} stands for the reference's name."""

    title: str
    unit: str
    caption: str
    value: Callable[[CurvePoint], float | None]
    paired: bool = False  # whether the reference's value of the same seed is taken away
    level: float | None = None  # a value to compare with


def _output_share(point: CurvePoint) -> float | None:
    """‖B‖ / (‖A‖ + ‖B‖): the output projection's share of the two gradient norms."""
    if point.path_a is None or point.path_b is None or point.path_a + point.path_b == 0:
        return None
    return point.path_b / (point.path_a + point.path_b)


HELD_OUT = Measured("Held-out loss", NATS, f"Lower is better. {THIN}", lambda point: point.heldout_nll)
AHEAD = Measured(
    "Held-out loss minus {reference} over training",
    f"difference, {NATS}",
    f"Below zero an arm is ahead of {{reference}}. {THIN}",
    lambda point: point.heldout_nll,
    paired=True,
    level=0.0,
)
TRAINING = Measured(
    "Training loss", NATS, f"The loss of the batches that each step learned from. {THIN}", lambda point: point.train_nll
)
OUTPUT_SHARE = Measured(
    "Share of the output path in the gradient",
    "‖B‖ / (‖A‖ + ‖B‖)",
    "The lookup path is the gradient through the lookup, the head path that through the head, of one table or of two; "
    f"above 50 % the output end pulls harder than the input end. {THIN}",
    _output_share,
    level=0.5,
)
COSINE = Measured(
    "Do both paths pull the same way?",
    "cosine of lookup path and head path",
    f"Above zero the two paths agree, at zero they are unrelated, below zero they work against each other. {THIN}",
    lambda point: point.cosine,
    level=0.0,
)


@dataclass(frozen=True)
class ArmCurve:
    """One arm's curve at the steps where every one of its seeds was measured."""

    arm: str
    steps: list[int]
    seeds: dict[int, list[float]]  # seed → value per step
    mean: list[float]


def curves(comparison: Comparison, measured: Measured) -> list[ArmCurve]:
    """Each arm's curve, where it is paired over the reference's seeds; one that was never measured is left out."""

    def of(arm: str) -> dict[int, dict[int, float]]:
        return {
            run.seed: {p.step: v for p in run.curve if (v := measured.value(p)) is not None and math.isfinite(v)}
            for run in comparison.of(arm)
        }

    made, base = [], of(comparison.reference)
    for arm in comparison.arms:
        own = of(arm)
        if measured.paired:
            own = {
                seed: {step: own[seed][step] - base[seed][step] for step in own[seed].keys() & base[seed].keys()}
                for seed in own.keys() & base.keys()
            }
        steps = sorted(set.intersection(*map(set, own.values()))) if own else []
        if steps and not (measured.paired and arm == comparison.reference):
            seeds = {seed: [values[step] for step in steps] for seed, values in sorted(own.items())}
            mean = [statistics.fmean(column) for column in zip(*seeds.values(), strict=True)]
            made.append(ArmCurve(arm, steps, seeds, mean))
    return made


def line_panel(comparison: Comparison, measured: Measured) -> Panel | None:
    """Draw a number over training; None where it was never measured."""
    figure, looks, drawn = go.Figure(), _looks(comparison), curves(comparison, measured)
    if not drawn:
        return None
    for curve in drawn:
        look = looks[curve.arm]
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
    figure.update_layout(hovermode="x unified").update_xaxes(title="training step", zeroline=False)
    figure = theme.finish(figure, measured.title.format(reference=comparison.reference), measured.unit)
    if measured is OUTPUT_SHARE:
        figure.update_yaxes(range=[0, 1], tickformat=".0%")
    if measured.level is not None:
        figure.add_hline(y=measured.level, line=LEVEL)
    by_arm = [dict(zip(curve.steps, curve.mean, strict=True)) for curve in drawn]
    rows = [[count(step), *(plain(values.get(step)) for values in by_arm)] for step in sorted(set().union(*by_arm))]
    table = Table(["step", *(curve.arm for curve in drawn)], rows)
    return Panel(figure, measured.caption.format(reference=comparison.reference), table)


def paired_differences(comparison: Comparison) -> Panel | None:
    """Held-out and training nll minus the reference's with 95 % intervals, a row for each arm: a forest plot."""
    if not comparison.differences:
        return None
    rows = [
        Row(arm, f"{html.escape(arm)} · {name}", q, hollow=name == "training")
        for name in ("held-out", "training")
        for arm, one in found(comparison).items()
        for q in one.quantities
        if q.name.startswith(f"{name} −") and not math.isnan(q.value)
    ]
    figure = _intervals(comparison, rows, f"Paired differences to {comparison.reference}")
    figure.add_vline(x=0, line=LEVEL).update_xaxes(title=f"difference, {NATS}")
    caption = "Left of zero an arm has the lower loss; the bar is the 95 % interval over paired seeds."
    if (both := gaps(comparison)) is not None:
        # as the figure subtracts: the reference is what is taken away
        names, sign = ("untied − tied", -1) if comparison.reference == "tied" else ("tied − untied", 1)
        tying, generalisation = (signed(sign * gap.mean) for gap in both)
        caption += (
            f" {names} is {tying} in training (the tying gap) and {generalisation} on held-out text (the "
            "generalisation gap)."
        )
    metrics = {"heldout_nll": "held-out nll", "train_nll": "training nll", "bits_per_byte": "bits per byte"}
    lines = [
        [f"{d.arm} · {name}", str(difference(d)), plain(d.detectable), str(d.n)]
        for metric, name in metrics.items()
        for d in comparison.differences
        if d.metric == metric
    ]
    return Panel(
        figure, caption, Table(["arm and measure", "difference [95 %]", "smallest detectable", "pairs"], lines)
    )


def frequency_panel(comparison: Comparison) -> Panel | None:
    """Held-out nll minus the reference's, by how often a token occurs in the training text, with 95 % intervals."""
    binned = [d for d in comparison.differences if d.metric.startswith("frequency:")]
    if not binned:
        return None
    figure, looks = go.Figure(), _looks(comparison)
    for arm in (arm for arm in comparison.arms if arm != comparison.reference):
        own = [d for d in binned if d.arm == arm]
        if own:
            labels = [d.metric.removeprefix("frequency:") for d in own]
            marks = _marks([difference(d) for d in own], looks[arm], "y")
            figure.add_scatter(x=labels, y=[d.mean for d in own], name=html.escape(arm), **marks)
    figure.update_layout(scattermode="group", scattergap=0.7).add_hline(y=0, line=LEVEL)
    figure.update_xaxes(title="times the token occurs in the training text", type="category", categoryorder="trace")
    figure = theme.finish(figure, f"Difference to {comparison.reference} by token frequency", f"difference, {NATS}")
    caption = (
        f"Below zero an arm predicts these tokens better than {comparison.reference} does; rare tokens are on the left."
        f" {EACH}"
    )
    header = ["occurrences", "held-out tokens"]
    rows: dict[str, list[str]] = {}
    for arm in comparison.arms:
        runs = comparison.of(arm)
        header.append(f"{arm}: nll")
        for bin_ in runs[0].frequency if runs else ():
            nll = [b.nll for run in runs for b in run.frequency if b.label == bin_.label and b.nll is not None]
            row = rows.setdefault(bin_.label, [bin_.label, count(bin_.tokens)])
            row.append(plain(statistics.fmean(nll) if nll else None))
    for arm in comparison.arms[1:]:
        header.append(f"{arm}: difference [95 %]")
        for label, row in rows.items():
            d = comparison.difference(arm, f"frequency:{label}")
            row.append(str(difference(d)) if d else NONE)
    return Panel(figure, caption, Table(header, list(rows.values())))


def parameter_panel(comparison: Comparison) -> Panel | None:
    """Unique parameters of every arm by component, stacked; None where no run finished."""
    arms = {arm: runs[0] for arm in comparison.arms if (runs := comparison.of(arm))}
    if not arms:
        return None
    parts = {arm: run.parameters for arm, run in arms.items()}
    names = list(dict.fromkeys(name for held in parts.values() for name in held))
    rows = [
        [arm, *(count(run.parameters.get(name, 0)) for name in names), count(run.total_parameters)]
        for arm, run in arms.items()
    ]
    figure = theme.stacked(parts, "Where the parameters are", "unique parameters", count, first="body")
    return Panel(figure, "A table used at both ends is counted once.", Table(["arm", *names, "total"], rows))


def memory_panel(comparison: Comparison) -> Panel | None:
    """Bytes of weights, gradients and the optimizer's two moments by arm of ALBERTs, as counted."""
    runs = {arm: found[0] for arm in comparison.arms if (found := comparison.of(arm))}
    counted = {
        arm: training_bytes(run.total_parameters, run.trainable_parameters, "float32")["adamw"]
        for arm, run in runs.items()
        if run.shares and run.trainable_parameters is not None
    }
    if not counted:
        return None
    parts = {arm: {"weights": b.weights, "gradients": b.gradients, "moments": b.state} for arm, b in counted.items()}
    figure = theme.stacked(parts, "Memory of training, as counted", "bytes", size).update_xaxes(ticksuffix="B")
    caption = (
        "fp32 weights, gradients, and the two moments that AdamW and LAMB keep: 16 bytes for each parameter that is "
        "trained, however often it is used. What is kept for the backward pass comes on top, and sharing does not "
        "change it: every application of a layer keeps its own."
    )
    rows = [[arm, *map(size, (b.weights, b.gradients, b.state, b.total))] for arm, b in counted.items()]
    return Panel(figure, caption, Table(["arm", "weights", "gradients", "moments", "together"], rows))


def share_panels(comparison: Comparison) -> Iterator[Panel]:
    """What each arm judges right, a panel for each share that was measured (`comparison_found.share`)."""
    for name in measured_shares(comparison):
        rows, lines = [], []
        for arm, one in found(comparison).items():
            q = share(comparison.of(arm), name)
            if q is not None:
                # what its layers share, on a line of its own
                rows.append(Row(arm, html.escape(arm).replace("+share=", "<br>+share="), q))
            minus = next((str(q) for q in one.quantities if q.name.startswith(f"{name} −")), NONE)
            lines.append([arm, str(q or NONE), minus])
        title = SHARES[name] if name == MASKED else f"{SHARES[name]}: {PAIRS[name]}"
        figure = _intervals(comparison, rows, title.capitalize()).update_layout(margin={**theme.MARGIN, "t": 52})
        figure.update_xaxes(title="share judged right", tickformat=".1~%", nticks=6)
        if name != MASKED:
            figure.add_vline(x=CHANCE, line=LEVEL)
        header = ["arm", "right [95 %]", f"minus {comparison.reference} [95 %]"]
        yield Panel(figure, JUDGED[name], Table(header, lines))


@dataclass(frozen=True)
class Row:
    """A quantity of an arm in a figure with a row for each."""

    arm: str
    label: str  # as plotly reads it
    quantity: Quantity
    hollow: bool = False


def _intervals(comparison: Comparison, rows: Sequence[Row], title: str) -> go.Figure:
    figure, looks = go.Figure(), _looks(comparison)
    for row in rows:
        marks = _marks([row.quantity], looks[row.arm], "x", row.hollow)
        figure.add_scatter(x=[row.quantity.value], y=[row.label], name=html.escape(row.arm), showlegend=False, **marks)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return theme.finish(figure, title, None).update_layout(height=110 + 46 * max(len(rows), 1))


def _marks(quantities: Sequence[Quantity], look: theme.Style, along: str, hollow: bool = False) -> dict[str, Any]:
    """How an arm's quantities are drawn: its marker, and their intervals along an axis."""
    ends = [(q.value, q.value) if math.isnan(q.low) else (q.low, q.high) for q in quantities]
    return {
        "mode": "markers",
        "marker": {"color": look.colour, "size": 9, "symbol": f"{look.marker}-open" if hollow else look.marker},
        "customdata": [f"{q}, one pair, no interval" if math.isnan(q.low) else str(q) for q in quantities],
        "hovertemplate": "%{customdata}<extra>%{fullData.name}</extra>",
        f"error_{along}": {
            "symmetric": False,
            "array": [high - q.value for q, (_, high) in zip(quantities, ends, strict=True)],
            "arrayminus": [q.value - low for q, (low, _) in zip(quantities, ends, strict=True)],
            "thickness": 1.6,
            "width": 5,
            "color": look.colour,
        },
    }


def _looks(comparison: Comparison) -> dict[str, theme.Style]:
    return dict(zip(comparison.arms, map(theme.style, theme.places(comparison.arms)), strict=True))
