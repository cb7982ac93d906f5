"""`write_report`: a comparison as one HTML file (see `tiewise.report.sheet`): the verdict, one table, then figures.

Every arm keeps its colour, dash and marker through all figures; thin lines are single seeds, thick ones their mean. A
figure whose data a comparison lacks is left out, so a short run gives a short page.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tiewise.core.files import size
from tiewise.core.found import NONE, Curve, Grid, Listing, Quantity, count, plain, signed, visible
from tiewise.planning.costs import training_bytes
from tiewise.report import sheet
from tiewise.report.comparison_found import (
    DEMO,
    NATS,
    SHARES,
    SHARES_NOTE,
    beside_papers,
    difference,
    found,
    results,
    share,
    verdict,
)
from tiewise.report.figures import dots, heat, lines, stacked, styles
from tiewise.report.sheet import PageSection, Panel, Sheet
from tiewise.training.results import MASKED, ArmDirectPath, Comparison, CurvePoint, gaps

NOTE = (
    "Losses are in nats per token: mean over seeds ± standard deviation. A difference is paired by seed, with its 95 % "
    "interval (Student’s t). Perplexity is exp of the mean held-out nll. Training memory is counted: fp32 weights, "
    "gradients and the optimizer’s moments; activations come on top. Tokens per second hold what else the machine did."
)
BIGRAMS = (
    "Asymmetric bigrams: the last columns are each arm’s direct-path logit of “right after left” minus that of “left "
    "after right”, which is zero for one shared table without a map."
)
DIRECT_PATH = (
    "Logit of the next token (column) by the current token's embedding alone (row), less what its row and its column "
    "have in common; colours saturate on the diagonal."
)
MEMORY = (
    "fp32 weights, gradients, and the two moments of AdamW and LAMB: 16 bytes for each trained parameter. Sharing does "
    "not change what the backward pass keeps on top."
)
JUDGED = {
    MASKED: "Held-out tokens that were masked and whose right token had the largest logit.",
    "sop": "Sentence order: held-out segments that follow each other, half of them swapped; the line is chance.",
    "nsp": "Next sentence: the second held-out segment is from another document in half; the line is chance.",
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


def _head_share(point: CurvePoint) -> float | None:
    """‖B‖ / (‖A‖ + ‖B‖): the head path's share of the two gradient norms."""
    if point.path_a is None or point.path_b is None or point.path_a + point.path_b == 0:
        return None
    return point.path_b / (point.path_a + point.path_b)


HELD_OUT = Measured("Held-out loss", NATS, "Lower is better.", lambda point: point.heldout_nll)
AHEAD = Measured(
    "Held-out loss minus {reference} over training",
    f"difference, {NATS}",
    "Below zero an arm is ahead of {reference}.",
    lambda point: point.heldout_nll,
    paired=True,
    level=0.0,
)
TRAINING = Measured(
    "Training loss", NATS, "The loss of the batches that each step learned from.", lambda point: point.train_nll
)
OUTPUT_SHARE = Measured(
    "Share of the output path in the gradient",
    "‖B‖ / (‖A‖ + ‖B‖)",
    "The gradient through the lookup (A) and through the head (B), of one table or of two; above 50 % the output end "
    "pulls harder than the input end.",
    _head_share,
    level=0.5,
)
COSINE = Measured(
    "Do both paths pull the same way?",
    "cosine of lookup path and head path",
    "Above zero the two paths agree, below zero they work against each other.",
    lambda point: point.cosine,
    level=0.0,
)


def write_report(comparison: Comparison, path: str | os.PathLike[str]) -> Path:
    """Write the page to `path`, whole or not at all, and return it.

    Raises:
        RunError: when the file cannot be written there.
    """
    return sheet.write(render(comparison), path, "--out")


def render(comparison: Comparison) -> str:
    """Return the page as text; sections that have nothing to show are left out of it."""

    def there(*panels: Panel | None) -> list[Panel]:
        return [panel for panel in panels if panel is not None]

    def over_training(*measured: Measured) -> list[Panel]:
        return there(*(line_panel(comparison, one) for one in measured))

    seeds, arms = len(comparison.seeds), ", ".join(comparison.arms)
    unigram = next((run.unigram_nll for run in comparison.runs if run.unigram_nll is not None), None)
    by_frequency = f"The same masked tokens have an nll of {plain(unigram)} by the training text’s frequencies alone."
    shares = share_panels(comparison)
    first = [
        [arm, f"{r.init_std:g}", f"{r.learning_rate:g}", plain(r.predicted_initial_nll), plain(r.initial_nll)]
        for arm in comparison.arms
        for r in comparison.of(arm)[:1]
    ]
    header = ["arm", "init std", "learning rate", "predicted first loss", "measured first loss"]
    trials = [
        [t["arm"], _fact(t["init"]), _fact(t["learning_rate"]), plain(t["nll"]), "chosen" if t["chosen"] else ""]
        for t in comparison.tuning
    ]
    tuned = Listing("All tuning trials", ["arm", "init std", "learning rate", "nll of the tuning split", ""], trials)
    starts = Listing("Initialisation and learning rate by arm", header, first)
    return Sheet(
        command_name="compare",
        title=f"{arms}: tiewise comparison",
        subject=f"{arms} · {seeds} seed{'' if seeds == 1 else 's'}",
        heading="What was found",
        answer=[verdict(comparison)],
        results=PageSection(
            "Results",
            there(paired_differences(comparison)),
            tables=[results(comparison)],
            notes=(*comparison.finding.splitlines(), NOTE),
        ),
        sections=[
            *(PageSection(t, said=said, tables=[table]) for t, (said, table) in beside_papers(comparison).items()),
            PageSection("Loss", [*there(frequency_panel(comparison)), *over_training(AHEAD, HELD_OUT, TRAINING)]),
            PageSection(
                "Masked tokens and pairs",
                shares,
                notes=[SHARES_NOTE, *([] if unigram is None else [by_frequency])] if shares else [],
            ),
            PageSection("Gradient paths", over_training(OUTPUT_SHARE, COSINE)),
            PageSection("Parameters", there(parameter_panel(comparison), memory_panel(comparison))),
            PageSection(
                "Direct path",
                direct_path_panels(comparison),
                folded=[bigrams(comparison)],
                notes=[BIGRAMS] if comparison.bigrams else [],
                kind="panels maps",
            ),
        ],
        command=comparison.command,
        made=[PageSection("Starting point of each arm", folded=[tuned], tables=[starts])],
        facts=[
            ("Setting", list(_flat(comparison.setting))),
            ("Data", list(_flat(comparison.data))),
            ("Versions", list(_flat({"tiewise": comparison.version, **comparison.env}))),
        ],
        banner=DEMO.capitalize() if comparison.demo else "",
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
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_fact, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def line_panel(comparison: Comparison, measured: Measured) -> Panel | None:
    """A number over training, at the steps where every seed of an arm was measured; None where it never was."""

    def of(arm: str) -> dict[int, dict[int, float]]:
        """Seed → step → value."""
        return {
            run.seed: {p.step: v for p in run.curve if (v := measured.value(p)) is not None and math.isfinite(v)}
            for run in comparison.of(arm)
        }

    title, caption = (text.format(reference=comparison.reference) for text in (measured.title, measured.caption))
    caption += " Thick lines are means over seeds, thin lines single seeds."
    base, means, single = of(comparison.reference), [], []
    for arm in comparison.arms:
        own = of(arm)
        if measured.paired:
            own = {
                seed: {step: own[seed][step] - base[seed][step] for step in own[seed].keys() & base[seed].keys()}
                for seed in (own.keys() & base.keys() if arm != comparison.reference else ())
            }
        steps = sorted(set.intersection(*map(set, own.values()))) if own else []
        if steps:
            seeds = [tuple(values[step] for step in steps) for _, values in sorted(own.items())]
            mean = tuple(map(statistics.fmean, zip(*seeds, strict=True)))
            curve = Curve(title, tuple(steps), mean, along="training step", unit=measured.unit, of=arm, why=caption)
            means.append(replace(curve, level=measured.level))
            single += [(curve, values) for values in seeds if len(seeds) > 1]
    if not means:
        return None
    looks = styles(comparison.arms)
    panel = lines(means, looks, digits=4)
    for curve, values in single:
        thin = {"mode": "lines", "line": {"color": looks[curve.of].colour, "width": 1}, "opacity": 0.3}
        panel.figure.add_scatter(x=curve.x, y=values, legendgroup=curve.of, showlegend=False, hoverinfo="skip", **thin)
    if measured is OUTPUT_SHARE:
        panel.figure.update_yaxes(range=[0, 1], tickformat=".0%")
    return panel


def paired_differences(comparison: Comparison) -> Panel | None:
    """Held-out and training nll minus the reference's with 95 % intervals, a row for each arm: a forest plot."""
    if not comparison.differences:
        return None
    every = [q for one in found(comparison).values() for q in one.quantities if not math.isnan(q.value)]
    drawn = [
        replace(q, name=name) for name in ("held-out", "training") for q in every if q.name.startswith(f"{name} −")
    ]
    caption = "Left of zero an arm has the lower loss; the bar is the 95 % interval over paired seeds."
    if (both := gaps(comparison)) is not None:
        # as the figure subtracts: the reference is what is taken away
        names, sign = ("untied − tied", -1) if comparison.reference == "tied" else ("tied − untied", 1)
        tying, generalisation = (signed(sign * gap.mean) for gap in both)
        caption += f" {names}: {tying} in training (the tying gap), {generalisation} held out (the generalisation gap)."
    metrics = {"heldout_nll": "held-out nll", "train_nll": "training nll", "bits_per_byte": "bits per byte"}
    rows = [
        [f"{d.arm} · {name}", str(difference(d)), plain(d.detectable), str(d.n)]
        for metric, name in metrics.items()
        for d in comparison.differences
        if d.metric == metric
    ]
    panel = dots(
        f"Paired differences to {comparison.reference}",
        drawn,
        styles(comparison.arms),
        lambda q: f"{q.of} · {q.name}",
        caption,
    )
    panel.figure.update_xaxes(title=f"difference, {NATS}")
    return replace(
        panel, table=Listing("", ["arm and measure", "difference [95 %]", "smallest detectable", "pairs"], rows)
    )


def frequency_panel(comparison: Comparison) -> Panel | None:
    """Held-out nll minus the reference's, by how often a token occurs in the training text, with 95 % intervals."""
    binned = [d for d in comparison.differences if d.metric.startswith("frequency:")]
    if not binned:
        return None
    reference, bins = comparison.reference, list(dict.fromkeys(d.metric for d in binned))
    curves = []
    for arm in dict.fromkeys(d.arm for d in binned):
        own = [(bins.index(d.metric), difference(d)) for d in binned if d.arm == arm]
        made = Curve(
            f"Difference to {reference} by token frequency",
            x=tuple(place for place, _ in own),
            y=tuple(q.value for _, q in own),
            low=tuple(q.low for _, q in own),
            high=tuple(q.high for _, q in own),
            along="times the token occurs in the training text",
            unit=f"difference, {NATS}",
            of=arm,
            level=0.0,
            ticks=tuple(name.removeprefix("frequency:") for name in bins),
            why=f"Below zero an arm predicts these tokens better than {reference} does; rare tokens are on the left. "
            "Each interval is 95 % on its own: about one of twenty excludes zero by chance.",
        )
        curves.append(made)
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
    return replace(lines(curves, styles(comparison.arms), digits=4), table=Listing("", header, list(rows.values())))


def share_panels(comparison: Comparison) -> list[Panel]:
    """What each arm judges right, a panel for each share that was measured; none but for ALBERTs."""
    panels = []
    for name, title in SHARES.items():
        drawn: list[Quantity] = []
        rows = []
        for arm, one in found(comparison).items():
            q = share(comparison.of(arm), name)
            drawn += [replace(q, of=arm)] if q is not None else []
            minus = next((str(q) for q in one.quantities if q.name.startswith(f"{name} −")), NONE)
            rows.append([arm, str(q or NONE), minus])
        if drawn:
            panel = dots(title.capitalize(), drawn, styles(comparison.arms), lambda q: q.of, JUDGED[name])
            header = ["arm", "right [95 %]", f"minus {comparison.reference} [95 %]"]
            panels.append(replace(panel, table=Listing("", header, rows)))
    return panels


def parameter_panel(comparison: Comparison) -> Panel | None:
    """Unique parameters of every arm by component; None where no run finished."""
    parts = {arm: runs[0].parameters for arm in comparison.arms if (runs := comparison.of(arm))}
    caption = "A table used at both ends is counted once."
    titles = "Where the parameters are", "unique parameters"
    return stacked(parts, *titles, count, caption, first="body", total="total") if parts else None


def memory_panel(comparison: Comparison) -> Panel | None:
    """Bytes of weights, gradients and the optimizer's two moments by arm of ALBERTs, as counted."""
    parts = {}
    for arm in comparison.arms:
        for run in comparison.of(arm)[:1]:
            if run.shares and run.trainable_parameters is not None:
                held = training_bytes(run.total_parameters, run.trainable_parameters, "float32")["adamw"]
                parts[arm] = {"weights": held["weights"], "gradients": held["gradients"], "moments": held["state"]}
    if not parts:
        return None
    panel = stacked(parts, "Memory of training, as counted", "bytes", size, MEMORY, total="together")
    panel.figure.update_xaxes(ticksuffix="B")
    return panel


def direct_path_panels(comparison: Comparison) -> list[Panel]:
    """Which next token does the lookup alone, multiplied by the head, already ask for? A heat map for each arm.

    All are on one colour scale, which reaches to the largest value off any diagonal.
    """
    maps = [(path, centred(path.logits)) for path in comparison.direct_path if path.tokens]
    top = max((float(np.abs(x - np.diag(np.diag(x))).max()) for _, x in maps), default=0.0) or 1.0
    return [
        heat(Grid("Direct path", tokens, tokens, tuple(map(tuple, x.tolist())), top, of=path.arm, why=DIRECT_PATH))
        for path, x in maps
        for tokens in [tuple(path.tokens)]
    ]


def centred(logits: Sequence[Sequence[float]]) -> np.ndarray:
    """Remove from [n, n] logits the least-squares fit m + a_i + b_j of the entries with i ≠ j.

    Softmax ignores a row's constant, and a column's constant is a token that is likely everywhere; a tied table's
    diagonal holds squared norms that would drown the rest. What is symmetric stays so. With r and c the off-diagonal
    means of rows and columns, g the overall one and k = 1/(n−1), the normal equations give
    a = (r − g + k(c − g)) / (1 − k²), and b likewise. Fewer than three tokens leave nothing to fit but g.
    """
    x = np.asarray(logits, dtype=float)
    n = len(x)
    if n < 2:
        return np.zeros_like(x)
    off = ~np.eye(n, dtype=bool)
    overall = x[off].mean()
    if n == 2:
        return x - overall
    k = 1 / (n - 1)
    row = (x * off).sum(1) * k - overall
    column = (x * off).sum(0) * k - overall
    a, b = ((row + k * column) / (1 - k * k), (column + k * row) / (1 - k * k))
    return x - overall - a[:, None] - b[None, :]


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
