"""Figures of a comparison, each a `Panel`: losses, shares of right answers, gradients, parameters, direct paths.

Every arm has the same colour, dash and marker in all figures. Thin lines are single seeds, thick ones their mean. A
function returns no figure if the comparison lacks its data.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tiewise.core.estimates import interaction_residuals
from tiewise.core.files import format_bytes
from tiewise.core.measurement import NATS, NONE, Curve, Grid, Listing, Quantity, count, plain, signed
from tiewise.planning.costs import training_bytes
from tiewise.report import comparison_measurement
from tiewise.report.dot_plot import dots
from tiewise.report.drawing import UNSAID, styles
from tiewise.report.heat_map import heat_map
from tiewise.report.line_plot import lines
from tiewise.report.report_page import Panel
from tiewise.report.stacked_plot import stacked
from tiewise.report.training_curves import OUTPUT_SHARE, OverTraining, moments_of, over_training
from tiewise.training.results import AT_LAST, MASKED, Comparison, Difference, RunResult, gaps, has_earlier_steps

DIRECT_PATH = "Logit of the next token (column) by the current (row), less what rows and columns share."
MEMORY = "16 bytes a parameter, all in fp32."
HALF = "Half of the pairs are {}; line: chance."
JUDGED = {
    MASKED: "Right: its logit is the largest.",
    "sop": HALF.format("swapped"),
    "nsp": HALF.format("of two documents"),
}
METRICS = {"heldout_nll": "validation nll", "train_nll": "training nll", "bits_per_byte": "bits per byte"}
METRICS_AT_LAST = {
    f"{AT_LAST}heldout_nll": "validation nll, last step",
    f"{AT_LAST}train_nll": "training nll, last step",
}
PLOTTED_METRICS = {"heldout_nll": "validation", "train_nll": "training"}  # bits per byte have another unit
BIN = "frequency:"  # prefix of a bin's label in the metric of a difference


def training_panels(comparison: Comparison, *every: OverTraining) -> list[Panel]:
    """Return a figure over training for each of these numbers that was measured."""
    moments = moments_of(comparison)
    looks = styles(comparison.arms)
    panels = []
    for measured in every:
        means, single = over_training(moments, comparison.reference, measured)
        if not means:
            continue
        panel = lines(means, looks, digits=4)
        for curve in single:
            panel.figure.add_scatter(
                x=curve.x,
                y=curve.y,
                line_color=looks[curve.of].colour,
                legendgroup=curve.of,
                mode="lines",
                line_width=1,
                opacity=0.3,
                **UNSAID,
            )
        if measured is OUTPUT_SHARE:
            panel.figure.update_yaxes(range=[0, 1], tickformat=".0%")
        panels.append(panel)
    return panels


def paired_differences(comparison: Comparison) -> list[Panel]:
    """Return a forest plot of losses minus the reference's, a row for each arm and loss.

    It has 95 % intervals. Bits per byte are only in its table.
    """
    if not comparison.differences:
        return []
    step = "after the last step"
    if has_earlier_steps(comparison):
        step = "at each run's best step by its tuning text"
    caption = f"Left of zero: lower loss {step}. Bars: 95 % intervals."
    caption += _gaps_in_words(comparison)
    title = f"Paired differences to {comparison.reference}"
    panel = dots(title, _plotted_differences(comparison), styles(comparison.arms), forest=True, why=caption)
    panel.figure.update_xaxes(title=f"difference, {NATS}")
    rows = []
    metrics = METRICS
    if has_earlier_steps(comparison):
        metrics = METRICS | METRICS_AT_LAST
    for metric, name in metrics.items():
        for d in _differences_of(comparison, metric):
            difference = str(comparison_measurement.difference(d))
            rows.append([f"{d.arm} · {name}", difference, d.verdict or NONE, plain(d.detectable), str(d.n)])
    header = ["arm and measure", "difference [95 %]", "verdict", "detected in 80 of 100", "pairs"]
    return [replace(panel, table=Listing("", header, rows))]


def _differences_of(comparison: Comparison, metric: str) -> list[Difference]:
    """Return the differences of one metric, one for each arm."""
    return [d for d in comparison.differences if d.metric == metric]


def _plotted_differences(comparison: Comparison) -> list[Quantity]:
    """Return the finite differences of losses, those of validation as the main ones."""
    quantities = []
    for metric, name in PLOTTED_METRICS.items():
        for d in _differences_of(comparison, metric):
            if not math.isnan(d.mean):
                is_main = metric == "heldout_nll"
                quantities.append(replace(comparison_measurement.difference(d), name=f"{d.arm} · {name}", main=is_main))
    return quantities


def _gaps_in_words(comparison: Comparison) -> str:
    """Return tying gap and generalisation gap as a sentence. "" if tied or untied was not trained."""
    both = gaps(comparison)
    if both is None:
        return ""
    names, sign = "tied − untied", 1
    if comparison.reference == "tied":  # the sign is that of the figure: arm minus reference
        names, sign = "untied − tied", -1
    tying, generalisation = (signed(sign * gap.mean) for gap in both)
    return f" {names}: {tying} in training (tying gap), {generalisation} in validation (generalisation gap)."


def frequency_panels(comparison: Comparison) -> list[Panel]:
    """Return validation nll minus the reference's by how often a token occurs in the training text."""
    binned = [d for d in comparison.differences if d.metric.startswith(BIN)]
    if not binned:
        return []
    bins = list(dict.fromkeys(d.metric for d in binned))
    points: dict[str, list[tuple[int, Quantity]]] = {}  # arm → (index of the bin, difference)
    for d in binned:
        points.setdefault(d.arm, []).append((bins.index(d.metric), comparison_measurement.difference(d)))
    ticks = tuple(metric.removeprefix(BIN) for metric in bins)
    curves = []
    for arm, of_arm in points.items():
        curve = Curve.through(
            f"Difference to {comparison.reference} by token frequency",
            of_arm,
            along="occurrences in the training text",
            unit=f"difference, {NATS}",
            of=arm,
            level=0.0,
            ticks=ticks,
            why="Below zero: better; one interval in twenty excludes zero by chance.",
        )
        curves.append(curve)
    panel = lines(curves, styles(comparison.arms), digits=4)
    return [replace(panel, table=_frequency_table(comparison))]


def _frequency_table(comparison: Comparison) -> Listing:
    """Return a row for each bin: each arm's mean nll, then the differences to the reference."""
    tokens_of_bins: dict[str, int] = {}
    for run in comparison.runs:
        tokens_of_bins.update({of_bin.label: of_bin.tokens for of_bin in run.frequency})
    means = _mean_nlls_of_bins(comparison)
    arms, others = comparison.arms, comparison.arms[1:]
    rows = []
    for label, tokens in tokens_of_bins.items():
        row = [label, count(tokens)]
        row += [plain(means.get((arm, label))) for arm in arms]
        for arm in others:
            difference = comparison.difference(arm, f"{BIN}{label}")
            row.append(str(comparison_measurement.difference(difference)))
        rows.append(row)
    header = ["occurrences", "validation tokens", *(f"{arm}: nll" for arm in arms)]
    header += [f"{arm}: difference [95 %]" for arm in others]
    return Listing("", header, rows)


def _mean_nlls_of_bins(comparison: Comparison) -> dict[tuple[str, str], float]:
    """Return the mean nll over runs by (arm, bin of frequency), of measured bins."""
    nlls: dict[tuple[str, str], list[float]] = {}
    for run in comparison.runs:
        for of_bin in run.frequency:
            if of_bin.nll is not None:
                nlls.setdefault((run.arm, of_bin.label), []).append(of_bin.nll)
    return {place: statistics.fmean(of_runs) for place, of_runs in nlls.items()}


def share_panels(comparison: Comparison) -> list[Panel]:
    """Return a figure for each measured share of right answers; only ALBERTs have some."""
    panels = []
    for name in comparison_measurement.SHARES:
        panel = _share_panel(comparison, name)
        if panel is not None:
            panels.append(panel)
    return panels


def _share_panel(comparison: Comparison, name: str) -> Panel | None:
    """Return a forest plot of one share of right answers, a row for each arm. None if no arm has it."""
    shares, rows = [], []
    for arm, runs in comparison_measurement.finished_runs(comparison).items():
        right = comparison_measurement.share(runs, name)
        difference = comparison_measurement.share_difference(comparison, arm, name)
        rows.append([arm, str(right or NONE), str(difference or NONE)])
        if right is not None:
            shares.append(replace(right, name=arm, of=arm))
    if not shares:
        return None
    title = comparison_measurement.SHARES[name].capitalize()
    panel = dots(title, shares, styles(comparison.arms), forest=True, why=JUDGED[name])
    header = ["arm", "right [95 %]", f"minus {comparison.reference} [95 %]"]
    return replace(panel, table=Listing("", header, rows))


def parameter_panels(comparison: Comparison) -> list[Panel]:
    """Return unique parameters of every arm by component.

    ALBERTs have a second figure: the bytes of a training step, as counted.
    """
    runs = comparison_measurement.first_runs(comparison)
    if not runs:
        return []
    parts = {arm: run.parameters for arm, run in runs.items()}
    caption = "A table at both ends is counted once."
    title = "Where the parameters are"
    panels = [stacked(parts, title, "unique parameters", count, caption, first="body", total="total")]
    memory = _training_memory(runs)
    if memory:
        panel = stacked(memory, "Memory of training, as counted", "bytes", format_bytes, MEMORY, total="together")
        panel.figure.update_xaxes(ticksuffix="B")
        panels.append(panel)
    return panels


def _training_memory(runs: Mapping[str, RunResult]) -> dict[str, dict[str, int]]:
    """Return the bytes of an ALBERT's training step by arm and part."""
    memory = {}
    for arm, run in runs.items():
        if run.shares and run.trainable_parameters is not None:
            counted = training_bytes(run.total_parameters, run.trainable_parameters, "float32")["adamw"]
            memory[arm] = {
                "weights": counted["weights"],
                "gradients": counted["gradients"],
                "moments": counted["state"],
            }
    return memory


def direct_path_panels(comparison: Comparison) -> list[Panel]:
    """Return a heat map for each arm: next-token logits of the lookup times the head.

    All have one colour scale, which ends at the largest value off any diagonal. The diagonal of a tied table has
    squared norms, in comparison with which all other values would be invisible.
    """
    paths = [path for path in comparison.direct_path if path.tokens]
    interactions = [interaction_residuals(np.array(path.logits)) for path in paths]
    top = _largest_off_diagonal(interactions) or 1.0
    panels = []
    for path, values in zip(paths, interactions, strict=True):
        tokens, rows = tuple(path.tokens), tuple(map(tuple, values.tolist()))
        panels.append(heat_map(Grid("Direct path", tokens, tokens, rows, top, of=path.arm, why=DIRECT_PATH)))
    return panels


def _largest_off_diagonal(matrices: Iterable[NDArray[np.float64]]) -> float:
    """Return the largest absolute value off the diagonals of square matrices; 0 without any matrix."""
    largest = []
    for values in matrices:
        off_diagonal = values - np.diag(np.diag(values))
        largest.append(float(np.abs(off_diagonal).max()))
    return max(largest, default=0.0)
