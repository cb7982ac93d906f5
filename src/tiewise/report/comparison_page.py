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
from tiewise.report import comparison_found as told
from tiewise.report.dot_plot import dots
from tiewise.report.drawing import UNSAID, styles
from tiewise.report.figures import heat_map, stacked
from tiewise.report.line_plot import lines
from tiewise.report.sheet import PageSection, Panel, Sheet
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


def write_report(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Write the page to `path`, whole or not at all, and return it.

    Raises:
        RunError: when the file cannot be written there.
    """
    return write_result(render(comparison), path, "--out")


def render(comparison: Comparison) -> str:
    """Return the page as text; sections that have nothing to show are left out of it."""
    seeds, arms, shares = len(comparison.seeds), ", ".join(comparison.arms), share_panels(comparison)
    unigram = next((run.unigram_nll for run in comparison.runs if run.unigram_nll is not None), None)
    by_frequency = f"Masked tokens’ nll by frequencies alone: {plain(unigram)}."
    starts = [
        [arm, f"{r.init_std:g}", f"{r.learning_rate:g}", plain(r.predicted_initial_nll), plain(r.initial_nll)]
        for arm in comparison.arms
        for r in comparison.of(arm)[:1]
    ]
    chosen = ["arm", "init std", "learning rate"]
    trials = [
        [t["arm"], _fact(t["init"]), _fact(t["learning_rate"]), plain(t["nll"]), "chosen" if t["chosen"] else ""]
        for t in comparison.tuning
    ]
    begun = [Listing("Start of each arm", [*chosen, "predicted first loss", "measured first loss"], starts)]
    tried = [Listing("All tuning trials", [*chosen, "nll of the tuning split", ""], trials)]
    notes = (*comparison.finding.splitlines(), NOTE)
    of_shares = [told.SHARES_NOTE, *([] if unigram is None else [by_frequency])] if shares else []
    loss = [*frequency_panels(comparison), *training_panels(comparison, told.AHEAD, told.VALIDATION, told.TRAINING)]
    logits, of_bigrams = direct_path_panels(comparison), [BIGRAMS] if comparison.bigrams else []
    return Sheet(
        command_name="compare",
        title=f"{arms}: tiewise comparison",
        subject=f"{arms} · {seeds} seed{'' if seeds == 1 else 's'}",
        heading="What was found",
        answer=[*filter(None, (told.verdict(comparison), told.surprised(comparison)))],
        results=PageSection("Results", paired_differences(comparison), tables=[told.results(comparison)], notes=notes),
        sections=[
            *(PageSection(t, said=said, tables=[table]) for t, (said, table) in told.beside_papers(comparison).items()),
            PageSection("Loss", loss),
            PageSection("Masked tokens and pairs", shares, notes=of_shares),
            PageSection("Gradient paths", training_panels(comparison, told.OUTPUT_SHARE, told.COSINE)),
            PageSection("Parameters", parameter_panels(comparison)),
            PageSection("Direct path", logits, folded=[bigrams(comparison)], notes=of_bigrams, kind="panels maps"),
        ],
        command=comparison.command,
        made=[PageSection("Starting point of each arm", folded=tried, tables=begun)],
        facts=[
            ("Setting", list(_flat(comparison.setting))),
            ("Data", list(_flat(comparison.data))),
            ("Versions", list(_flat({"tiewise": comparison.version, **comparison.env}))),
        ],
        banner=told.DEMO.capitalize() if comparison.demo else "",
    ).render()


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in facts.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}, ")
        else:
            yield name, _fact(value)


def _fact(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(map(_fact, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def training_panels(comparison: Comparison, *every: told.OverTraining) -> list[Panel]:
    """Numbers over training; none that never was measured."""
    panels, looks = [], styles(comparison.arms)
    curves = {arm: {run.seed: run.curve for run in comparison.of(arm)} for arm in comparison.arms}
    for measured in every:
        means, single = told.over_training(curves, comparison.reference, measured)
        if not means:
            continue
        panel = lines(means, looks, digits=4)
        thin = {"mode": "lines", "line_width": 1, "opacity": 0.3, **UNSAID}
        for one in single:
            panel.figure.add_scatter(x=one.x, y=one.y, line_color=looks[one.of].colour, legendgroup=one.of, **thin)
        if measured is told.OUTPUT_SHARE:
            panel.figure.update_yaxes(range=[0, 1], tickformat=".0%")
        panels.append(panel)
    return panels


def paired_differences(comparison: Comparison) -> list[Panel]:
    """Validation and training nll minus the reference's with 95 % intervals, a row for each arm: a forest plot."""
    if not comparison.differences:
        return []
    metrics = {"heldout_nll": "validation nll", "train_nll": "training nll", "bits_per_byte": "bits per byte"}
    every = [(d, name) for metric, name in metrics.items() for d in comparison.differences if d.metric == metric]
    drawn = [
        replace(told.difference(d), name=f"{d.arm} · {name.removesuffix(' nll')}", main=d.metric == "heldout_nll")
        for d, name in every
        if d.metric != "bits_per_byte" and not math.isnan(d.mean)
    ]
    caption = "Left of zero: lower loss after the last step. Bars: 95 % intervals over seeds, for this held-out text."
    if (both := gaps(comparison)) is not None:
        # as the figure subtracts: the reference is what is taken away
        names, sign = ("untied − tied", -1) if comparison.reference == "tied" else ("tied − untied", 1)
        tying, generalisation = (signed(sign * gap.mean) for gap in both)
        caption += f" {names}: {tying} in training (tying gap), {generalisation} in validation (generalisation gap)."
    rows = [[f"{d.arm} · {name}", str(told.difference(d)), plain(d.detectable), str(d.n)] for d, name in every]
    header = ["arm and measure", "difference [95 %]", "detected in 80 of 100", "pairs"]
    title, looks = f"Paired differences to {comparison.reference}", styles(comparison.arms)
    panel = dots(title, drawn, looks, forest=True, why=caption)
    panel.figure.update_xaxes(title=f"difference, {NATS}")
    return [replace(panel, table=Listing("", header, rows))]


def frequency_panels(comparison: Comparison) -> list[Panel]:
    """Validation nll minus the reference's, by how often a token occurs in the training text, with 95 % intervals."""
    binned = [d for d in comparison.differences if d.metric.startswith("frequency:")]
    if not binned:
        return []
    arms, bins = comparison.arms, list(dict.fromkeys(d.metric for d in binned))
    curves = [
        Curve.through(
            f"Difference to {comparison.reference} by token frequency",
            ((bins.index(d.metric), told.difference(d)) for d in binned if d.arm == arm),
            along="occurrences in the training text", unit=f"difference, {NATS}", of=arm, level=0.0,
            ticks=tuple(name.removeprefix("frequency:") for name in bins),
            why="Below zero: better; one interval in twenty excludes zero by chance.",
        )
        for arm in dict.fromkeys(d.arm for d in binned)
    ]  # fmt: skip
    rows = []
    for label, tokens in {one.label: one.tokens for run in comparison.runs for one in run.frequency}.items():
        own = (
            [
                one.nll
                for run in comparison.of(arm)
                for one in run.frequency
                if one.label == label and one.nll is not None
            ]
            for arm in arms
        )
        nlls = (plain(statistics.fmean(measured) if measured else None) for measured in own)
        against = (comparison.difference(arm, f"frequency:{label}") for arm in arms[1:])
        rows.append([label, count(tokens), *nlls, *(str(told.difference(d)) if d else NONE for d in against)])
    header = ["occurrences", "validation tokens", *(f"{arm}: nll" for arm in arms)]
    header += [f"{arm}: difference [95 %]" for arm in arms[1:]]
    return [replace(lines(curves, styles(arms), digits=4), table=Listing("", header, rows))]


def share_panels(comparison: Comparison) -> list[Panel]:
    """What each arm judges right, a panel for each share that was measured; none but for ALBERTs."""
    panels = []
    arms = {arm: {q.name: q for q in one.quantities} for arm, one in told.found(comparison).items()}
    for name, title in told.SHARES.items():
        drawn = [replace(own[title], name=arm) for arm, own in arms.items() if title in own]
        rows = [
            [arm, str(own.get(title, NONE)), next((str(own[q]) for q in own if q.startswith(f"{name} −")), NONE)]
            for arm, own in arms.items()
        ]
        if drawn:
            panel = dots(title.capitalize(), drawn, styles(comparison.arms), forest=True, why=JUDGED[name])
            header = ["arm", "right [95 %]", f"minus {comparison.reference} [95 %]"]
            panels.append(replace(panel, table=Listing("", header, rows)))
    return panels


def parameter_panels(comparison: Comparison) -> list[Panel]:
    """Unique parameters of every arm by component, and of ALBERTs the bytes of a training step, as counted."""
    first = {arm: runs[0] for arm in comparison.arms if (runs := comparison.of(arm))}
    if not first:
        return []
    parts = {arm: run.parameters for arm, run in first.items()}
    titles, caption = ("Where the parameters are", "unique parameters"), "A table at both ends is counted once."
    panels = [stacked(parts, *titles, count, caption, first="body", total="total")]
    held = {
        arm: training_bytes(run.total_parameters, run.trainable_parameters, "float32")["adamw"]
        for arm, run in first.items()
        if run.shares and run.trainable_parameters is not None
    }
    names = {"weights": "weights", "gradients": "gradients", "moments": "state"}
    memory = {arm: {name: of[key] for name, key in names.items()} for arm, of in held.items()}
    if memory:
        panels.append(stacked(memory, "Memory of training, as counted", "bytes", size, MEMORY, total="together"))
        panels[-1].figure.update_xaxes(ticksuffix="B")
    return panels


def direct_path_panels(comparison: Comparison) -> list[Panel]:
    """Which next token does the lookup alone, multiplied by the head, already ask for? A heat map for each arm.

    All are on one colour scale, which reaches to the largest value off any diagonal: a tied table's holds squared
    norms that would drown the rest.
    """
    maps = [(p.arm, tuple(p.tokens), interaction(np.array(p.logits))) for p in comparison.direct_path if p.tokens]
    top = max((float(np.abs(x - np.diag(np.diag(x))).max()) for *_, x in maps), default=0.0) or 1.0
    return [
        heat_map(Grid("Direct path", tokens, tokens, tuple(map(tuple, x.tolist())), top, of=arm, why=DIRECT_PATH))
        for arm, tokens, x in maps
    ]


def bigrams(comparison: Comparison) -> Listing:
    """The most asymmetric bigrams with each arm's direct-path logit difference between the two orders."""
    rows = [
        [
            f"{visible(pair['left'])} → {visible(pair['right'])}",
            count(pair["count"]),
            f"{pair['forward']:.3g}",
            f"{pair['backward']:.3g}",
            *(signed(asymmetry(path, pair["left"], pair["right"]), 3) for path in comparison.direct_path),
        ]
        for pair in comparison.bigrams
    ]
    arms = (path.arm for path in comparison.direct_path)
    return Listing("Most asymmetric bigrams", ["bigram", "count", "p(right | left)", "p(left | right)", *arms], rows)


def asymmetry(path: ArmDirectPath, left: str, right: str) -> float | None:
    """logit(right after left) − logit(left after right); None where the map lacks one of the two."""
    if left not in path.tokens or right not in path.tokens:
        return None
    i, j = path.tokens.index(left), path.tokens.index(right)
    return path.logits[i][j] - path.logits[j][i]
