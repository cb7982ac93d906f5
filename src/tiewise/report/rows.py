"""The results table, once: the terminal and the page show these same rows.

A loss is the mean over seeds ± their standard deviation; the perplexity is exp of the mean held-out nll.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable

from tiewise.core.numerals import NONE, count, plain, signed, size
from tiewise.report import shares
from tiewise.training.results import Comparison, RunResult
from tiewise.training.statistics import interval


def header(comparison: Comparison) -> list[str]:
    """Column names, the arm first."""
    return ["arm", *_columns(comparison)]


def rows(comparison: Comparison) -> list[list[str]]:
    """One row of text per arm that has a finished run, as `header` names its columns."""
    columns = _columns(comparison).values()
    found = {arm: runs for arm in comparison.arms if (runs := comparison.of(arm))}
    return [[arm, *(column(arm, runs) for column in columns)] for arm, runs in found.items()]


def spread(values: Iterable[float], said: Callable[[float], str] = plain) -> str:
    """5.2851 ± 0.0042 over seeds; one seed has no ±, and a seed that is not finite leaves the word `diverged`."""
    numbers = list(values)
    if not all(map(math.isfinite, numbers)):
        return "diverged"
    mean = said(statistics.fmean(numbers))
    return mean if len(numbers) < 2 else f"{mean} ± {said(statistics.stdev(numbers))}"


SHORT = 16  # characters of a name within a heading
Column = Callable[[str, list[RunResult]], str]  # of an arm and its runs


def _columns(comparison: Comparison) -> dict[str, Column]:
    def difference(arm: str, runs: list[RunResult]) -> str:
        found = comparison.difference(arm, "heldout_nll")
        return signed(found.mean) if found else "reference" if arm == comparison.reference else NONE

    def evidence(arm: str, runs: list[RunResult]) -> str:
        found = comparison.difference(arm, "heldout_nll")
        return interval(found) if found else NONE

    def speed(arm: str, runs: list[RunResult]) -> str:
        measured = [run.tokens_per_second for run in runs]
        return spread(measured, count) if all(map(math.isfinite, measured)) else NONE

    judged = _shares(comparison)
    reference = _reference(comparison)
    text: dict[str, Column] = {
        "perplexity": lambda arm, runs: plain(_exp(statistics.fmean(run.heldout_nll for run in runs)), 2),
        "bits per byte": lambda arm, runs: plain(statistics.fmean(run.bits_per_byte for run in runs)),
    }
    return {
        "parameters": lambda arm, runs: count(runs[0].total_parameters),
        "held-out nll": lambda arm, runs: spread(run.heldout_nll for run in runs),
        f"held-out − {reference}": difference,
        "95 % interval": evidence,
        "training nll": lambda arm, runs: spread(run.train_nll for run in runs),
        **(judged or text),
        "training memory": lambda arm, runs: NONE if (held := runs[0].training_bytes) is None else size(held),
        # the speed of one run says as much of the machine as of the arm
        **({"tokens/s": speed} if len(comparison.seeds) > 1 else {}),
    }


def _shares(comparison: Comparison) -> dict[str, Column]:
    """Each measured share, and its difference to the reference in points; in place of figures of a whole text."""

    def column(name: str) -> Column:
        return lambda arm, runs: shares.percent(shares.over_seeds(runs, name))

    def minus_reference(name: str) -> Column:
        return lambda arm, runs: shares.points(comparison.difference(arm, f"share:{name}"))

    found: dict[str, Column] = {}
    for name in shares.measured(comparison):
        found[shares.NAMES[name]] = column(name)
        if len(comparison.arms) > 1:
            found[f"{name} − {_reference(comparison)}"] = minus_reference(name)
    return found


def _reference(comparison: Comparison) -> str:
    """The reference's name where it is short enough for a heading."""
    return comparison.reference if len(comparison.reference) <= SHORT else "reference"


def _exp(nll: float) -> float:
    return math.inf if nll > 700 else math.exp(nll)
