"""What the page shows with each figure: one sentence on how to read it, and its numbers as a table.

A panel whose data a comparison lacks is left out, so a short run gives a short page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import plotly.graph_objects as go

from tiewise.core.numerals import count, plain, signed
from tiewise.report import figures
from tiewise.report.grid import Table
from tiewise.report.heat_map import asymmetry, centred, direct_path
from tiewise.report.labels import visible
from tiewise.report.series import (
    Series,
    Value,
    cosine,
    difference_series,
    heldout_nll,
    path_b_share,
    series,
    train_nll,
)
from tiewise.report.sheet import Panel
from tiewise.training.results import Comparison, DirectPath
from tiewise.training.statistics import gaps, interval

THIN = "Thick lines are means over seeds, thin lines single seeds."
EACH = "Each interval is 95 % on its own: of twenty that hold zero in truth, about one excludes it by chance."


def loss_panels(comparison: Comparison) -> Iterator[Panel]:
    """Differences first, then the losses over training."""
    reference = comparison.reference
    if comparison.differences:
        yield Panel(figures.paired_differences(comparison), _gap_caption(comparison), _differences(comparison))
    if any(d.metric.startswith("frequency:") for d in comparison.differences):
        caption = (
            f"Below zero an arm predicts these tokens better than {reference} does; rare tokens are on the left. {EACH}"
        )
        yield Panel(figures.by_frequency(comparison), caption, _frequency(comparison))
    yield from _curve(
        comparison, figures.held_out_difference, heldout_nll, f"Below zero an arm is ahead of {reference}. {THIN}", True
    )
    yield from _curve(comparison, figures.held_out_loss, heldout_nll, f"Lower is better. {THIN}")
    yield from _curve(
        comparison, figures.training_loss, train_nll, f"The loss of the batches that each step learned from. {THIN}"
    )


def path_panels(comparison: Comparison) -> Iterator[Panel]:
    """Shares and cosine of the two gradient paths."""
    share = (
        "Path A is the gradient through the lookup, Path B the one through the output projection, of one table or of "
        f"two; above 50 % the output end pulls harder than the input end. {THIN}"
    )
    angle = (
        f"Above zero the two paths agree, at zero they are unrelated, below zero they work against each other. {THIN}"
    )
    yield from _curve(comparison, figures.path_share, path_b_share, share)
    yield from _curve(comparison, figures.path_cosine, cosine, angle)


def parameter_panels(comparison: Comparison) -> Iterator[Panel]:
    """Parameters by component."""
    arms = {arm: runs[0] for arm in comparison.arms if (runs := comparison.of(arm))}
    if arms:
        names = list(dict.fromkeys(name for run in arms.values() for name in run.parameters))
        rows = [
            [arm, *(count(run.parameters.get(name, 0)) for name in names), count(run.total_parameters)]
            for arm, run in arms.items()
        ]
        caption = "A table used at both ends is counted once."
        yield Panel(figures.parameters(comparison), caption, Table(["arm", *names, "total"], rows))


def direct_path_panels(comparison: Comparison) -> Iterator[Panel]:
    """One heat map per arm."""
    shown = [path for path in comparison.direct_path if path.tokens]
    for path, figure in zip(shown, direct_path(comparison), strict=True):
        caption = (
            "Logit of the next token (column) that the current token's embedding alone (row) produces at the output, "
            "less what its row and its column have in common; colours saturate on the diagonal."
        )
        yield Panel(figure, caption, _heat_map(path))


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


def _curve(
    comparison: Comparison,
    draw: Callable[[Comparison], go.Figure],
    value: Value,
    caption: str,
    minus_reference: bool = False,
) -> Iterator[Panel]:
    curves = difference_series(comparison, value) if minus_reference else series(comparison, value)
    if curves:
        yield Panel(draw(comparison), caption, _steps(curves))


def _steps(curves: list[Series]) -> Table:
    by_arm = [dict(zip(curve.steps, curve.mean, strict=True)) for curve in curves]
    steps = sorted(set().union(*by_arm))
    rows = [[count(step), *(plain(values.get(step)) for values in by_arm)] for step in steps]
    return Table(["step", *(curve.arm for curve in curves)], rows)


def _gap_caption(comparison: Comparison) -> str:
    caption = "Left of zero an arm has the lower loss; the bar is the 95 % interval over paired seeds."
    found = gaps(comparison)
    if found is None:
        return caption
    # as the figure subtracts: the reference is what is taken away
    names, sign = ("untied − tied", -1) if comparison.reference == "tied" else ("tied − untied", 1)
    tying, generalisation = (signed(sign * gap.mean) for gap in found)
    return (
        f"{caption} {names} is {tying} in training (the tying gap) and {generalisation} on held-out text (the "
        "generalisation gap)."
    )


def _differences(comparison: Comparison) -> Table:
    rows = [
        [f"{d.arm} · {name}", signed(d.mean), interval(d), plain(d.detectable), str(d.n)]
        for metric, name in (
            ("heldout_nll", "held-out nll"),
            ("train_nll", "training nll"),
            ("bits_per_byte", "bits per byte"),
        )
        for d in comparison.differences
        if d.metric == metric
    ]
    return Table(["arm and measure", "difference", "95 % interval", "smallest detectable", "pairs"], rows)


def _frequency(comparison: Comparison) -> Table:
    header = ["occurrences", "held-out tokens"]
    labels: dict[str, list[str]] = {}
    for arm in comparison.arms:
        runs = comparison.of(arm)
        header.append(f"{arm}: nll")
        for bin_ in runs[0].frequency if runs else ():
            found = [b.nll for run in runs for b in run.frequency if b.label == bin_.label and b.nll is not None]
            row = labels.setdefault(bin_.label, [bin_.label, count(bin_.tokens)])
            row.append(plain(sum(found) / len(found) if found else None))
    for arm in comparison.arms[1:]:
        header += [f"{arm}: difference", "95 % interval"]
        for label, row in labels.items():
            d = comparison.difference(arm, f"frequency:{label}")
            row += [signed(d.mean), interval(d)] if d else [plain(None), plain(None)]
    return Table(header, list(labels.values()))


def _heat_map(path: DirectPath) -> Table:
    labels = [visible(token) for token in path.tokens]
    rows = [
        [label, *(signed(float(value), 2) for value in row)]
        for label, row in zip(labels, centred(path.logits), strict=True)
    ]
    return Table(["current ↓ next →", *labels], rows)
