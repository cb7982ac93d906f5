"""The results table, once: the terminal and the page show these same rows.

A loss is the mean over seeds ± their standard deviation; the perplexity is exp of the mean held-out nll.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from tiewise.numerals import NONE, count, plain, signed, size
from tiewise.training.results import Comparison, RunResult
from tiewise.training.wording import interval


def header(comparison: Comparison) -> list[str]:
    """Column names, the arm first."""
    return [
        "arm",
        "parameters",
        "held-out nll",
        f"held-out − {comparison.reference}",
        "95 % interval",
        "training nll",
        "perplexity",
        "bits per byte",
        "tokens/s",
        "peak memory",
    ]


def rows(comparison: Comparison) -> list[list[str]]:
    """One row of text per arm that has a finished run, as `header` names its columns."""
    return [_row(comparison, arm, runs) for arm in comparison.arms if (runs := comparison.of(arm))]


def spread(values: Iterable[float]) -> str:
    """5.2851 ± 0.0042 over seeds; one seed has no ±, and a seed that is not finite leaves the word `diverged`."""
    numbers = list(values)
    if not all(map(math.isfinite, numbers)):
        return "diverged"
    mean = plain(statistics.fmean(numbers))
    return mean if len(numbers) < 2 else f"{mean} ± {plain(statistics.stdev(numbers))}"


def _row(comparison: Comparison, arm: str, runs: list[RunResult]) -> list[str]:
    difference = comparison.difference(arm, "heldout_nll")
    heldout = statistics.fmean(run.heldout_nll for run in runs)
    return [
        arm,
        count(runs[0].total_parameters),
        spread(run.heldout_nll for run in runs),
        signed(difference.mean) if difference else "reference" if arm == comparison.reference else NONE,
        interval(difference) if difference else NONE,
        spread(run.train_nll for run in runs),
        plain(_exp(heldout), 2),
        plain(statistics.fmean(run.bits_per_byte for run in runs)),
        count(statistics.fmean(run.tokens_per_second for run in runs)),
        size(max(run.peak_memory_bytes for run in runs)),
    ]


def _exp(nll: float) -> float:
    return math.inf if nll > 700 else math.exp(nll)
