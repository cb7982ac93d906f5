"""`write_report`: a comparison as one HTML file (see `tiewise.report.sheet`): the verdict, one table, then figures.

Every arm keeps its colour, dash and marker through all figures; thin lines are single seeds, thick ones their mean. A
figure whose data a comparison lacks is left out, so a short run gives a short page.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tiewise.core.estimates import interaction
from tiewise.core.files import size, write_result
from tiewise.core.found import NATS, NONE, Curve, Grid, Listing, count, plain, signed, visible
from tiewise.planning.costs import training_bytes
from tiewise.report import comparison_found
from tiewise.report.dot_plot import dots
from tiewise.report.drawing import UNSAID, styles
from tiewise.report.heat_map import heat_map
from tiewise.report.line_plot import lines
from tiewise.report.sheet import PageSection, Panel, Sheet
from tiewise.report.stacked_plot import stacked
from tiewise.report.training_curves import (
    AHEAD,
    COSINE,
    OUTPUT_SHARE,
    TRAINING,
    VALIDATION,
    OverTraining,
    over_training,
)
from tiewise.training.results import MASKED, ArmDirectPath, Comparison, gaps

NOTE = (
    "±: standard deviation over seeds. Differences are paired by seed; 95 % intervals (Student’s t). "
    "nll: nats per token; perplexity: exp of its mean. Memory: weights, gradients, moments in fp32."
)
BIGRAMS = "Last columns: logit of “right after left” less “left after right”; 0 in one table without maps."
DIRECT_PATH = "Logit of the next token (column) by the current (row), less what rows and columns share."
MEMORY = "16 bytes a parameter, all in fp32."
HALF = "Half of the pairs are {}; line: chance."
JUDGED = {
    MASKED: "Right: its logit is the largest.",
    "sop": HALF.format("swapped"),
    "nsp": HALF.format("of two documents"),
}
METRICS = {"heldout_nll": "validation nll", "train_nll": "training nll", "bits_per_byte": "bits per byte"}
DRAWN_METRICS = ("heldout_nll", "train_nll")  # bits per byte have another unit


def write_report(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Write the page to `path`, whole or not at all, and return it.

    Raises:
        RunError: when the file cannot be written there.
    """
    return write_result(render(comparison), path, "--out")


def render(comparison: Comparison) -> str:
    """Return the page as text; sections that have nothing to show are left out of it."""
    seeds = len(comparison.seeds)
    arms = ", ".join(comparison.arms)
    summary = (comparison_found.verdict(comparison), comparison_found.surprised(comparison))
    return Sheet(
        command_name="compare",
        title=f"{arms}: tiewise comparison",
        subject=f"{arms} · {seeds} seed{'' if seeds == 1 else 's'}",
        heading="What was found",
        answer=[sentence for sentence in summary if sentence],
        results=PageSection(
            "Results",
            paired_differences(comparison),
            tables=[comparison_found.results(comparison)],
            notes=[*comparison.finding.splitlines(), NOTE],
        ),
        sections=[
            *_paper_sections(comparison),
            PageSection("Loss", _loss_panels(comparison)),
            _shares_section(comparison),
            PageSection("Gradient paths", training_panels(comparison, OUTPUT_SHARE, COSINE)),
            PageSection("Parameters", parameter_panels(comparison)),
            PageSection(
                "Direct path",
                direct_path_panels(comparison),
                folded=[bigrams(comparison)],
                notes=[BIGRAMS] if comparison.bigrams else [],
                kind="panels maps",
            ),
        ],
        command=comparison.command,
        made=[_starting_point(comparison)],
        facts=[
            ("Setting", list(_flat(comparison.setting))),
            ("Data", list(_flat(comparison.data))),
            ("Versions", list(_flat({"tiewise": comparison.version, **comparison.env}))),
        ],
        banner=comparison_found.demo_banner(comparison.demo),
    ).render()


def _paper_sections(comparison: Comparison) -> list[PageSection]:
    """Return a section for each paper that published results of such arms."""
    published = comparison_found.beside_papers(comparison)
    return [PageSection(title, said=sentences, tables=[table]) for title, (sentences, table) in published.items()]


def _loss_panels(comparison: Comparison) -> list[Panel]:
    """Return the figures of losses: by token frequency, then over training."""
    return [*frequency_panels(comparison), *training_panels(comparison, AHEAD, VALIDATION, TRAINING)]


def _shares_section(comparison: Comparison) -> PageSection:
    """Return the section of an ALBERT's right answers; empty of any other model."""
    title, panels = "Masked tokens and pairs", share_panels(comparison)
    if not panels:
        return PageSection(title)
    notes = [comparison_found.SHARES_NOTE]
    unigram = next((run.unigram_nll for run in comparison.runs if run.unigram_nll is not None), None)
    if unigram is not None:
        notes.append(f"Masked tokens’ nll by frequencies alone: {plain(unigram)}.")
    return PageSection(title, panels, notes=notes)


def _starting_point(comparison: Comparison) -> PageSection:
    """Return the first loss and settings of each arm's first run, and all trials that chose the settings."""
    chosen = ["arm", "init std", "learning rate"]
    starts = []
    for arm in comparison.arms:
        for run in comparison.of(arm)[:1]:
            settings = [arm, f"{run.init_std:g}", f"{run.learning_rate:g}"]
            starts.append([*settings, plain(run.predicted_initial_nll), plain(run.initial_nll)])
    trials = []
    for trial in comparison.tuning:
        settings = [trial["arm"], _fact(trial["init"]), _fact(trial["learning_rate"])]
        trials.append([*settings, plain(trial["nll"]), "chosen" if trial["chosen"] else ""])
    return PageSection(
        "Starting point of each arm",
        tables=[Listing("Start of each arm", [*chosen, "predicted first loss", "measured first loss"], starts)],
        folded=[Listing("All tuning trials", [*chosen, "nll of the tuning split", ""], trials)],
    )


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, value) pairs of nested facts, both in words."""
    for key, value in facts.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}, ")
        else:
            yield name, _fact(value)


def _fact(value: Any) -> str:
    """Return a value of JSON in words."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(_fact(each) for each in value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def training_panels(comparison: Comparison, *every: OverTraining) -> list[Panel]:
    """Return a figure for each of these numbers over training that was measured."""
    panels, looks = [], styles(comparison.arms)
    curves = {arm: {run.seed: run.curve for run in comparison.of(arm)} for arm in comparison.arms}
    for measured in every:
        means, single = over_training(curves, comparison.reference, measured)
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
    """Return a forest plot of losses minus the reference's with 95 % intervals, a row for each arm and loss.

    Bits per byte are in its table alone.
    """
    if not comparison.differences:
        return []
    drawn, rows = [], []
    for metric, name in METRICS.items():
        for d in comparison.differences:
            if d.metric != metric:
                continue
            q = comparison_found.difference(d)
            rows.append([f"{d.arm} · {name}", str(q), plain(d.detectable), str(d.n)])
            if metric in DRAWN_METRICS and not math.isnan(d.mean):
                drawn.append(replace(q, name=f"{d.arm} · {name.removesuffix(' nll')}", main=metric == "heldout_nll"))
    caption = "Left of zero: lower loss after the last step. Bars: 95 % intervals over seeds, for this held-out text."
    title = f"Paired differences to {comparison.reference}"
    panel = dots(title, drawn, styles(comparison.arms), forest=True, why=caption + _gaps_in_words(comparison))
    panel.figure.update_xaxes(title=f"difference, {NATS}")
    header = ["arm and measure", "difference [95 %]", "detected in 80 of 100", "pairs"]
    return [replace(panel, table=Listing("", header, rows))]


def _gaps_in_words(comparison: Comparison) -> str:
    """Return tying gap and generalisation gap as a sentence. "" if tied or untied was not trained."""
    both = gaps(comparison)
    if both is None:
        return ""
    names, sign = "tied − untied", 1
    if comparison.reference == "tied":  # as the figure subtracts: the reference is taken away
        names, sign = "untied − tied", -1
    tying, generalisation = (signed(sign * gap.mean) for gap in both)
    return f" {names}: {tying} in training (tying gap), {generalisation} in validation (generalisation gap)."


def frequency_panels(comparison: Comparison) -> list[Panel]:
    """Return validation nll minus the reference's by how often a token occurs in the training text."""
    binned = [d for d in comparison.differences if d.metric.startswith("frequency:")]
    if not binned:
        return []
    bins = list(dict.fromkeys(d.metric for d in binned))
    curves = []
    for arm in dict.fromkeys(d.arm for d in binned):
        points = [(bins.index(d.metric), comparison_found.difference(d)) for d in binned if d.arm == arm]
        curve = Curve.through(
            f"Difference to {comparison.reference} by token frequency",
            points,
            along="occurrences in the training text",
            unit=f"difference, {NATS}",
            of=arm,
            level=0.0,
            ticks=tuple(name.removeprefix("frequency:") for name in bins),
            why="Below zero: better; one interval in twenty excludes zero by chance.",
        )
        curves.append(curve)
    panel = lines(curves, styles(comparison.arms), digits=4)
    return [replace(panel, table=_frequency_table(comparison))]


def _frequency_table(comparison: Comparison) -> Listing:
    """Return a row for each bin of frequency: each arm's mean nll over seeds, then differences to the reference."""
    arms = comparison.arms
    tokens_of_bins: dict[str, int] = {}
    for run in comparison.runs:
        tokens_of_bins.update({of_bin.label: of_bin.tokens for of_bin in run.frequency})
    rows = []
    for label, tokens in tokens_of_bins.items():
        row = [label, count(tokens)]
        for arm in arms:
            nlls = _bin_nlls(comparison, arm, label)
            row.append(plain(statistics.fmean(nlls) if nlls else None))
        for arm in arms[1:]:
            d = comparison.difference(arm, f"frequency:{label}")
            row.append(NONE if d is None else str(comparison_found.difference(d)))
        rows.append(row)
    header = ["occurrences", "validation tokens", *(f"{arm}: nll" for arm in arms)]
    header += [f"{arm}: difference [95 %]" for arm in arms[1:]]
    return Listing("", header, rows)


def _bin_nlls(comparison: Comparison, arm: str, label: str) -> list[float]:
    """Return the nll in one bin of frequency of every run of an arm that has one."""
    nlls: list[float] = []
    for run in comparison.of(arm):
        nlls += [of_bin.nll for of_bin in run.frequency if of_bin.label == label and of_bin.nll is not None]
    return nlls


def share_panels(comparison: Comparison) -> list[Panel]:
    """Return a figure for each share of right answers that was measured; none but for ALBERTs."""
    panels = []
    findings = comparison_found.found(comparison)
    by_arm = {arm: {q.name: q for q in finding.quantities} for arm, finding in findings.items()}
    header = ["arm", "right [95 %]", f"minus {comparison.reference} [95 %]"]
    for name, title in comparison_found.SHARES.items():
        drawn, rows = [], []
        for arm, quantities in by_arm.items():
            difference = next((str(q) for q in quantities.values() if q.name.startswith(f"{name} −")), NONE)
            rows.append([arm, str(quantities.get(title, NONE)), difference])
            if title in quantities:
                drawn.append(replace(quantities[title], name=arm))
        if drawn:
            panel = dots(title.capitalize(), drawn, styles(comparison.arms), forest=True, why=JUDGED[name])
            panels.append(replace(panel, table=Listing("", header, rows)))
    return panels


def parameter_panels(comparison: Comparison) -> list[Panel]:
    """Return unique parameters of every arm by component, and of ALBERTs the bytes of a training step, as counted."""
    first_runs = {arm: comparison.of(arm)[0] for arm in comparison.arms if comparison.of(arm)}
    if not first_runs:
        return []
    parts = {arm: run.parameters for arm, run in first_runs.items()}
    caption = "A table at both ends is counted once."
    panels = [
        stacked(parts, "Where the parameters are", "unique parameters", count, caption, first="body", total="total")
    ]
    memory = {}
    for arm, run in first_runs.items():
        if run.shares and run.trainable_parameters is not None:
            counted = training_bytes(run.total_parameters, run.trainable_parameters, "float32")["adamw"]
            memory[arm] = {
                "weights": counted["weights"],
                "gradients": counted["gradients"],
                "moments": counted["state"],
            }
    if memory:
        panel = stacked(memory, "Memory of training, as counted", "bytes", size, MEMORY, total="together")
        panel.figure.update_xaxes(ticksuffix="B")
        panels.append(panel)
    return panels


def direct_path_panels(comparison: Comparison) -> list[Panel]:
    """Return a heat map for each arm: logits of next tokens by the lookup alone, multiplied by the head.

    All are on one colour scale, which reaches to the largest value off any diagonal: a tied table's holds squared
    norms that would drown the rest.
    """
    paths = [path for path in comparison.direct_path if path.tokens]
    interactions = [interaction(np.array(path.logits)) for path in paths]
    off_diagonal = [np.abs(values - np.diag(np.diag(values))) for values in interactions]
    top = max((float(values.max()) for values in off_diagonal), default=0.0) or 1.0
    panels = []
    for path, values in zip(paths, interactions, strict=True):
        tokens, rows = tuple(path.tokens), tuple(map(tuple, values.tolist()))
        panels.append(heat_map(Grid("Direct path", tokens, tokens, rows, top, of=path.arm, why=DIRECT_PATH)))
    return panels


def bigrams(comparison: Comparison) -> Listing:
    """Return the most asymmetric bigrams with each arm's direct-path logit difference between the two orders."""
    rows = []
    for pair in comparison.bigrams:
        left, right = pair["left"], pair["right"]
        row = [f"{visible(left)} → {visible(right)}", count(pair["count"])]
        row += [f"{pair['forward']:.3g}", f"{pair['backward']:.3g}"]
        row += [signed(asymmetry(path, left, right), 3) for path in comparison.direct_path]
        rows.append(row)
    arms = [path.arm for path in comparison.direct_path]
    header = ["bigram", "count", "p(right | left)", "p(left | right)", *arms]
    return Listing("Most asymmetric bigrams", header, rows)


def asymmetry(path: ArmDirectPath, left: str, right: str) -> float | None:
    """Return logit(right after left) − logit(left after right). None where the map lacks one of the two."""
    if left not in path.tokens or right not in path.tokens:
        return None
    i, j = path.tokens.index(left), path.tokens.index(right)
    return path.logits[i][j] - path.logits[j][i]
