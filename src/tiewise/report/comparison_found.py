"""What a comparison found, once for terminal, page and notebook: verdict, a `Found` of every arm, curves of training.

`comparison_view` is what the terminal shows of it; the page is `comparison_page`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tiewise.core.estimates import mean_interval, ratio
from tiewise.core.found import NATS, Curve, Found, Listing, Quantity, plain, signed
from tiewise.report import papers
from tiewise.report.faces import ABREAST, rich_table, summary
from tiewise.training.results import MASKED, Comparison, CurvePoint, Difference, RunResult, over_seeds

DEMO = "demo corpus, not evidence for your model"
SHORT = 16  # characters of a name within a heading
CHANCE = 0.5  # of pairs: half of those that are measured are as in the text
# of ALBERTs: what is judged right
SHARES = {MASKED: "masked tokens right", "sop": "pairs right (sop)", "nsp": "pairs right (nsp)"}
SHARES_NOTE = (
    "Shares: 95 % intervals over seeds (Student’s t), or one seed’s rows (Wilson’s). All seeds are asked the same."
)


def verdict(comparison: Comparison) -> str:
    """The comparison in one sentence: which arms are better or worse than the reference, and of which nothing is known.

    `finding` says the same arm by arm, with every number.
    """
    lower, higher = (f"validation loss is {how} for {{}} {NATS}" for how in ("lower (better)", "higher (worse)"))
    equal, unknown = "no difference detected for {}", "nothing can be said of {}"
    said: dict[str, list[str]] = {lower: [], higher: [], equal: [], unknown: []}
    for arm in (arm for arm in comparison.arms if arm != comparison.reference):
        d = comparison.difference(arm, "heldout_nll")
        if d is None or d.low is None:  # no pair of seeds, a diverged one, or one that shows no spread
            said[unknown].append(arm)
        elif d.detected:
            said[lower if d.mean < 0 else higher].append(f"{arm} by {plain(abs(d.mean))}")
        else:
            said[equal].append(arm)
    parts = [words.format(", ".join(arms)) for words, arms in said.items() if arms]
    return f"Against {comparison.reference}: {'; '.join(parts)}." if parts else comparison.finding


def surprised(comparison: Comparison) -> str:
    """Say whether the atlas expected the difference of tied and untied; nothing of a run without one."""
    if (e := comparison.expectation) is None:
        return ""
    if e.why:
        return f"The atlas of earlier trainings has {e.verdict}: {e.why}."
    spread = f"tied − untied between {signed(e.low)} and {signed(e.high)} {NATS}, this run found {signed(e.found)}"
    scored = f"Of its {e.settings} settings, {e.held} lie within the interval that the others predict."
    return f"{e.verdict.capitalize()}: the atlas expected {spread}. {scored}"


def found(comparison: Comparison) -> dict[str, Found]:
    """Every arm that has a finished run, and what was measured of it, the most important first."""
    arms = {arm: runs for arm in comparison.arms if (runs := comparison.of(arm))}
    return {arm: Found("", tuple(_quantities(comparison, arm, runs))).about(arm) for arm, runs in arms.items()}


def results(comparison: Comparison) -> Listing:
    """One row for each arm: the numbers that a reader sees first."""
    return summary(found(comparison), "Results by arm, mean ± deviation over seeds", "arm")


def share(runs: Sequence[RunResult], name: str) -> Quantity | None:
    """What runs judge right on average, with Student's interval over seeds; of one seed Wilson's over its rows."""
    each = [run.shares[name] for run in runs if name in run.shares]
    if not each:
        return None
    e = mean_interval([one.share for one in each])
    low, high = (each[0].low, each[0].high) if len(each) == 1 else (e.low, e.high)
    chance = None if name == MASKED else CHANCE
    return Quantity(SHARES[name], e.value, low, high, e.rows, chance, unit="%")


def difference(d: Difference) -> Quantity:
    """A paired difference; one pair has no interval."""
    low, high = (math.nan if x is None else x for x in (d.low, d.high))
    return Quantity(d.metric, d.mean, low, high, n=d.n, chance=0.0, of=d.arm, unit=NATS, digits=4)


def _quantities(comparison: Comparison, arm: str, runs: Sequence[RunResult]) -> Iterator[Quantity]:
    """Yield the columns of the report for one arm."""
    minus = partial(_minus, comparison, arm)
    yield Quantity("parameters", runs[0].total_parameters)
    yield over_seeds("validation nll", [run.heldout_nll for run in runs], NATS)
    yield from minus("heldout_nll", "validation")
    yield over_seeds("training nll", (run.train_nll for run in runs), NATS)
    yield from minus("train_nll", "training", main=False)
    yield from _judged_right(comparison, arm, runs)
    if runs[0].training_bytes is not None:
        yield Quantity("training memory", runs[0].training_bytes, unit="bytes")
    if len(comparison.seeds) > 1:  # the speed of one run says as much of the machine as of the arm
        speeds = [run.tokens_per_second for run in runs]
        yield over_seeds("tokens/s", speeds if all(map(math.isfinite, speeds)) else [math.nan], "", 0)


def _minus(comparison: Comparison, arm: str, metric: str, name: str, **more: Any) -> Iterator[Quantity]:
    """Yield a column with the difference from the reference, if there is anything to compare with."""
    reference = comparison.reference if len(comparison.reference) <= SHORT else "reference"
    d = comparison.difference(arm, metric)
    if len(comparison.arms) > 1:
        q = Quantity("", math.nan) if d is None else difference(d)
        yield replace(q, name=f"{name} − {reference}", **more)


def _judged_right(comparison: Comparison, arm: str, runs: Sequence[RunResult]) -> Iterator[Quantity]:
    """Yield the shares of an ALBERT; of other models the figures of a whole text, which masked tokens are not."""
    shares = [name for name in SHARES if any(name in run.shares for run in comparison.runs)]
    for name in shares:
        if (q := share(runs, name)) is not None:
            yield q
        yield from _minus(comparison, arm, f"share:{name}", name, unit="points", digits=2)
    if not shares:
        mean = statistics.fmean(run.heldout_nll for run in runs)
        yield Quantity("perplexity", math.exp(mean) if mean <= 700 else math.inf, digits=2)
        yield Quantity("bits per byte", statistics.fmean(run.bits_per_byte for run in runs), digits=4)


def beside_papers(comparison: Comparison) -> dict[str, papers.Beside]:
    """What each paper says that has anything like the comparison's arms, under its title; mostly none."""
    found = {}
    if recipe := comparison.setting.get("recipe"):
        own = {arm: [run.perplexity for run in comparison.of(arm)] for arm in comparison.arms}
        beside = papers.beside_figures(recipe, comparison.setting["changed"], own, comparison.data)
        found["Published figures"] = beside
    if any("+share=" in arm for arm in comparison.arms):
        nll, pairs = papers.sharing_orders(comparison)
        if nll:
            found["What layers share"] = papers.beside_table_4(nll, pairs)
    return found


def comparison_view(comparison: Comparison) -> Group:
    """The verdict, the page's results turned, one column per arm, the finding, and what papers say of such arms.

    Arms and the finding are `Text`, never markup: an arm's name may hold a square bracket.
    """
    table = results(comparison)
    groups = [table.rows[i : i + ABREAST] for i in range(0, max(len(table.rows), 1), ABREAST)]
    turned = [rich_table([*zip(table.header, *group, strict=True)], justified=True) for group in groups]
    finding = f"{comparison.finding}\n({DEMO})" if comparison.demo else comparison.finding
    published = (paper_view(*beside) for beside in beside_papers(comparison).values())
    said = [Text(one) for one in (finding, surprised(comparison)) if one]
    return Group(Text(verdict(comparison), "bold"), *turned, *said, *published)


def paper_view(lines: Sequence[str], listing: Listing) -> Group:
    """What a paper says beside a run: lines, and a table under them."""
    table: list[RenderableType] = [rich_table([listing.header, *listing.rows])] if listing.rows else []
    return Group(Text("\n".join(lines)), *table)


# what changes while the arms train


@dataclass(frozen=True)
class OverTraining:
    """A number of every moment of training, and its figure; {reference} stands for the reference's name."""

    title: str
    unit: str
    caption: str
    value: Callable[[CurvePoint], float | None]  # nan and None are not drawn
    paired: bool = False  # whether the reference's value of the same seed is taken away
    level: float | None = None  # a value to compare with


VALIDATION = OverTraining("Validation loss", NATS, "Lower is better.", lambda point: point.heldout_nll)
MINUS, AHEAD_IS = "Validation loss minus {reference} over training", "Below zero: ahead of {reference}."
AHEAD = OverTraining(MINUS, f"difference, {NATS}", AHEAD_IS, VALIDATION.value, paired=True, level=0.0)
TRAINING = OverTraining("Training loss", NATS, "Of each step's batch.", lambda p: p.train_nll)
OUTPUT_SHARE = OverTraining(
    "Head path’s share of the gradient",
    "‖B‖ / (‖A‖ + ‖B‖)",
    "A: lookup path, B: head path. Above 50 %: the head pulls harder.",
    lambda p: None if p.path_a is None or p.path_b is None else ratio(p.path_b, p.path_a + p.path_b),
    level=0.5,
)
COSINE = OverTraining(
    "Do both paths pull the same way?", "cosine of both paths", "Above zero they agree.", lambda p: p.cosine, level=0.0
)


def over_training(
    curves: Mapping[str, Mapping[int, Sequence[CurvePoint]]], reference: str, measured: OverTraining
) -> tuple[list[Curve], list[Curve]]:
    """(mean over seeds of every arm, every seed of arms that have several), at the steps where all of an arm's were.

    Args:
        curves: arm → seed → its moments.
        reference: the arm whose value of the same seed is taken away, where the measure asks for it.
        measured: what is drawn.
    """
    values = {  # arm → seed → step → value
        arm: {
            seed: {p.step: v for p in points if (v := measured.value(p)) is not None and math.isfinite(v)}
            for seed, points in by_seed.items()
        }
        for arm, by_seed in curves.items()
    }
    base = values.pop(reference) if measured.paired else None
    title, caption = (text.format(reference=reference) for text in (measured.title, measured.caption))
    of_all = Curve(
        title, (), (), along="training step", unit=measured.unit, level=measured.level,
        why=f"{caption} Thin lines are single seeds.",
    )  # fmt: skip
    means: list[Curve] = []
    single: list[Curve] = []
    for arm, own in values.items():
        if base is not None:
            pairs = {seed: (own[seed], base[seed]) for seed in own.keys() & base.keys()}
            own = {seed: {step: y[step] - z[step] for step in y.keys() & z.keys()} for seed, (y, z) in pairs.items()}
        if steps := tuple(sorted(set.intersection(*map(set, own.values())))) if own else ():
            seeds = [
                replace(of_all, of=arm, x=steps, y=tuple(own[seed][step] for step in steps)) for seed in sorted(own)
            ]
            means.append(replace(seeds[0], y=tuple(map(statistics.fmean, zip(*(one.y for one in seeds), strict=True)))))
            single += seeds if len(seeds) > 1 else []
    return means, single
