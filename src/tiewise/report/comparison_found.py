"""What a comparison found, once for the terminal, the page and a notebook: the verdict, and a `Found` of every arm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tiewise.analysis.estimates import mean_interval
from tiewise.core.found import Found, Quantity
from tiewise.core.numerals import plain
from tiewise.report import faces
from tiewise.report.grid import Table
from tiewise.training.results import MASKED, Comparison, Difference, RunResult, Share

DEMO = "demo corpus, not evidence for your model"
NATS = "nats per token"
SHORT = 16  # characters of a name within a heading
CHANCE = 0.5  # of pairs: half of those that are measured are as in the text
PAIRS = {"sop": "sentence order", "nsp": "next sentence"}
SHARES_NOTE = (
    "Shares have 95 % intervals over seeds (Student’s t); of one seed, Wilson’s over its tokens or pairs. All arms and "
    "seeds are asked the same held-out rows, so an interval over seeds says nothing of other rows."
)
SHARES = {MASKED: "masked tokens right", **{name: f"pairs right ({name})" for name in PAIRS}}  # of ALBERTs


def verdict(comparison: Comparison) -> str:
    """The comparison in one sentence: which arms are better or worse than the reference, and of which nothing is known.

    `finding` says the same arm by arm, with every number.
    """
    better: list[str] = []
    worse: list[str] = []
    equal: list[str] = []
    unknown: list[str] = []
    for arm in (arm for arm in comparison.arms if arm != comparison.reference):
        d = comparison.difference(arm, "heldout_nll")
        if d is None or d.low is None:  # no pair of seeds, a diverged one, or one that shows no spread
            unknown.append(arm)
        elif d.detected:
            (better if d.mean < 0 else worse).append(f"{arm} by {plain(abs(d.mean))}")
        else:
            equal.append(arm)
    said = [
        *([f"held-out loss is lower (better) for {', '.join(better)} {NATS}"] if better else []),
        *([f"held-out loss is higher (worse) for {', '.join(worse)} {NATS}"] if worse else []),
        *([f"no difference detected for {', '.join(equal)}"] if equal else []),
        *([f"nothing can be said of {', '.join(unknown)}"] if unknown else []),
    ]
    return f"Against {comparison.reference}: {'; '.join(said)}." if said else comparison.finding


def found(comparison: Comparison) -> dict[str, Found]:
    """Every arm that has a finished run, and what was measured of it, the most important first."""
    arms = {arm: runs for arm in comparison.arms if (runs := comparison.of(arm))}
    return {arm: Found("", tuple(_quantities(comparison, arm, runs))).about(arm) for arm, runs in arms.items()}


def results(comparison: Comparison) -> Table:
    """One row for each arm: the numbers that a reader sees first."""
    made = faces.summary(found(comparison))
    return Table(["arm", *made.header[1:]], made.rows) if made else Table(["arm"], [])


def share(runs: Sequence[RunResult], name: str) -> Quantity | None:
    """What runs judge right on average, with Student's interval over seeds; of one seed Wilson's over its rows."""
    each = [run.shares[name] for run in runs if name in run.shares]
    if not each:
        return None
    if len(each) == 1:
        return Quantity(SHARES[name], each[0].share, each[0].low, each[0].high, 1, unit="%")
    e = mean_interval([one.share for one in each])
    return Quantity(SHARES[name], e.value, e.low, e.high, e.rows, unit="%")


def share_over_rows(runs: Sequence[RunResult], name: str) -> Share | None:
    """Mean share with Wilson's interval over the rows that all seeds are asked alike; None where none has it."""
    each = [run.shares[name] for run in runs if name in run.shares]
    if not each:
        return None
    count = each[0].count
    return Share.of(round(statistics.fmean(one.share for one in each) * count), count, math.nan)


def measured_shares(comparison: Comparison) -> list[str]:
    """Names of the shares that the comparison's runs have, in the order of `SHARES`; none but for ALBERTs."""
    return [name for name in SHARES if any(name in run.shares for run in comparison.runs)]


def difference(d: Difference) -> Quantity:
    """A paired difference; one pair has no interval."""
    low, high = (math.nan if x is None else x for x in (d.low, d.high))
    return Quantity(d.metric, d.mean, low, high, n=d.n, chance=0.0, of=d.arm, unit=NATS, digits=4)


def _quantities(comparison: Comparison, arm: str, runs: Sequence[RunResult]) -> Iterator[Quantity]:
    shares = measured_shares(comparison)
    reference = comparison.reference if len(comparison.reference) <= SHORT else "reference"

    def minus(metric: str, name: str, **more: Any) -> Iterator[Quantity]:
        d = comparison.difference(arm, metric)
        if len(comparison.arms) > 1:
            q = Quantity("", math.nan) if d is None else difference(d)
            yield replace(q, name=f"{name} − {reference}", **more)

    heldout = [run.heldout_nll for run in runs]
    yield Quantity("parameters", runs[0].total_parameters)
    yield _over_seeds("held-out nll", heldout, NATS)
    yield from minus("heldout_nll", "held-out")
    yield _over_seeds("training nll", (run.train_nll for run in runs), NATS)
    yield from minus("train_nll", "training", main=False)
    for name in shares:
        if (q := share(runs, name)) is not None:
            yield q
        yield from minus(f"share:{name}", name, unit="points", digits=2)
    if not shares:  # figures of a whole text, which masked tokens are not
        mean = statistics.fmean(heldout)
        yield Quantity("perplexity", math.exp(mean) if mean <= 700 else math.inf, digits=2)
        yield Quantity("bits per byte", statistics.fmean(run.bits_per_byte for run in runs), digits=4)
    if runs[0].training_bytes is not None:
        yield Quantity("training memory", runs[0].training_bytes, unit="bytes")
    if len(comparison.seeds) > 1:  # the speed of one run says as much of the machine as of the arm
        speeds = [run.tokens_per_second for run in runs]
        yield _over_seeds("tokens/s", speeds if all(map(math.isfinite, speeds)) else [math.nan], "", 0)


def _over_seeds(name: str, values: Iterable[float], unit: str, digits: int = 4) -> Quantity:
    """Mean and standard deviation over seeds; infinite where a loss of one of them is no number any more."""
    numbers = list(values)
    if not all(map(math.isfinite, numbers)):
        return Quantity(name, math.inf if unit else math.nan, unit=unit)
    deviation = statistics.stdev(numbers) if len(numbers) > 1 else math.nan
    return Quantity(name, statistics.fmean(numbers), deviation=deviation, n=len(numbers), unit=unit, digits=digits)
