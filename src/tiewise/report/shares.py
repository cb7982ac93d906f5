"""Shares of masked tokens and pairs that ALBERTs judge right, as text and with intervals over seeds.

54.2 % (53.0 to 55.4)      +1.20 (−0.30 to +2.70)      a difference is in points of a hundred
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from tiewise.analysis.estimates import Estimate, mean_interval
from tiewise.core.numerals import NONE, plain, signed
from tiewise.training.results import MASKED, Comparison, Difference, RunResult, Share

CHANCE = 0.5  # of pairs: half of those that are measured are as in the text
PAIRS = {"sop": "sentence order", "nsp": "next sentence"}
NAMES = {MASKED: "masked tokens right", **{name: f"pairs right ({name})" for name in PAIRS}}
NOTE = (
    "Shares have 95 % intervals over seeds (Student’s t); of one seed, Wilson’s over its tokens or pairs. All arms and "
    "seeds are asked the same held-out rows, so an interval over seeds says nothing of other rows."
)


def measured(comparison: Comparison) -> list[str]:
    """Names of the shares that the comparison's runs have, those of `NAMES` in their order; none but for ALBERTs."""
    return [name for name in NAMES if any(name in run.shares for run in comparison.runs)]


def over_seeds(runs: Sequence[RunResult], name: str) -> Estimate | None:
    """Mean share with Student's interval over seeds, or one seed's with Wilson's; None where none has it."""
    found = [run.shares[name] for run in runs if name in run.shares]
    if len(found) == 1:
        return Estimate(found[0].share, found[0].low, found[0].high, 1)
    return mean_interval([one.share for one in found]) if found else None


def over_rows(runs: Sequence[RunResult], name: str) -> Estimate | None:
    """Mean share with Wilson's interval over the rows that all seeds are asked alike; None where none has it."""
    found = [run.shares[name] for run in runs if name in run.shares]
    if not found:
        return None
    count, mean = found[0].count, statistics.fmean(one.share for one in found)
    interval = Share.of(round(mean * count), count, math.nan)
    return Estimate(mean, interval.low, interval.high, count)


def percent(estimate: Estimate | None) -> str:
    """54.2 % (53.0 to 55.4)."""
    if estimate is None:
        return NONE
    value, low, high = (plain(100 * x, 1) for x in (estimate.value, estimate.low, estimate.high))
    return f"{value} % ({low} to {high})"


def points(difference: Difference | None) -> str:
    """+1.20 (−0.30 to +2.70)."""
    if difference is None:
        return NONE
    if difference.low is None or difference.high is None:
        return signed(100 * difference.mean, 2)
    return (
        f"{signed(100 * difference.mean, 2)} ({signed(100 * difference.low, 2)} to {signed(100 * difference.high, 2)})"
    )
