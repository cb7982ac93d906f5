"""Is the difference real? Paired intervals over seeds, and the smallest difference that could have been found.

Arms of one seed share their data order and the initialisation of their body, so seeds are pairs: the interval is that
of the mean of the differences, with Student's t of n − 1 degrees of freedom. Every interval stands on its own (95 %
each); the finding is drawn from as many as there are arms, and from all their bins of frequency, so that a difference
counts as detected only where its p is below 0.05 with Holm's correction over the arms, or over all bins of all arms.

Sign: always arm − reference. For arms `untied` and `tied`, tied − untied in training nll is the *tying gap* and in
held-out nll the *generalisation gap*; see `gaps`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tiewise.core import student
from tiewise.training.results import Comparison, Difference, RunResult
from tiewise.training.wording import finding

__all__ = ["METRICS", "complete", "finding", "gaps", "paired"]

ALPHA = 0.05
METRICS = ("heldout_nll", "train_nll", "bits_per_byte")


def paired(reference: Sequence[float], other: Sequence[float], *, arm: str = "", metric: str = "") -> Difference:
    """Compare two arms over the seeds they share: other − reference.

    With d the n differences, s their standard deviation (n − 1) and t the 97.5 % quantile of Student's t with n − 1
    degrees of freedom: interval = mean(d) ± t·s/√n (Student, Biometrika 1908). `detectable` = λ·s/√n, where λ is the
    noncentrality at which that two-sided 5 % test has 80 % power (see `student.detectable`); it takes s for the true
    spread. One pair has no interval, and a value that is not finite leaves nothing but a mean of nan.

    Raises:
        ValueError: when the lengths differ or there is no pair.
    """
    if len(reference) != len(other) or not reference:
        raise ValueError(f"pairs need equally many values, at least one: got {len(reference)} and {len(other)}")
    d = [b - a for a, b in zip(reference, other, strict=True)]
    n = len(d)
    if not all(map(math.isfinite, d)):
        return Difference(arm, metric, n, math.nan, None, None, None, False)
    mean = statistics.fmean(d)
    if n == 1:
        return Difference(arm, metric, n, mean, None, None, None, False)
    error = statistics.stdev(d) / math.sqrt(n)
    half = student.critical(n - 1) * error
    low, high = mean - half, mean + half
    p = student.two_sided(mean / error, n - 1) if error else float(not mean)
    return Difference(arm, metric, n, mean, low, high, student.detectable(n - 1) * error, low > 0 or high < 0, p)


def complete(comparison: Comparison) -> Comparison:
    """Fill the differences (every arm but the reference, every metric, every frequency bin) and the finding."""
    differences = list(_differences(comparison))
    for family in ("heldout_nll", "frequency:"):  # what the finding says of arms, and of their tokens
        read = {i: d.p for i, d in enumerate(differences) if d.metric.startswith(family) and d.p is not None}
        for i, p in zip(read, student.holm(list(read.values())), strict=True):
            differences[i] = replace(differences[i], p=p, detected=p < ALPHA)
    differenced = replace(comparison, differences=differences)
    return replace(differenced, finding=finding(differenced))


def gaps(comparison: Comparison) -> tuple[Difference, Difference] | None:
    """(tying gap, generalisation gap): tied − untied in training and in held-out nll; None without both arms."""
    if not {"tied", "untied"} <= set(comparison.arms):
        return None
    pairs = list(_pairs(comparison, "untied", "tied"))
    if not pairs:
        return None
    first, second = (
        paired(
            [getattr(u, metric) for u, _ in pairs], [getattr(t, metric) for _, t in pairs], arm="tied", metric=metric
        )
        for metric in ("train_nll", "heldout_nll")
    )
    return first, second


def _differences(comparison: Comparison) -> Iterator[Difference]:
    for arm in comparison.arms:
        if arm == comparison.reference:
            continue
        pairs = list(_pairs(comparison, comparison.reference, arm))
        for metric in METRICS if pairs else ():
            if metric == "bits_per_byte" and pairs[0][0].shares:
                continue  # masked tokens are not a text
            values = [(getattr(a, metric), getattr(b, metric)) for a, b in pairs]
            yield paired(*zip(*values, strict=True), arm=arm, metric=metric)
        yield from _share_differences(arm, pairs)
        yield from _bin_differences(arm, pairs)


def _share_differences(arm: str, pairs: Sequence[tuple[RunResult, RunResult]]) -> Iterator[Difference]:
    runs = [run for pair in pairs for run in pair]
    for name in runs[0].shares if runs else ():
        if all(name in run.shares for run in runs):
            values = [(a.shares[name].share, b.shares[name].share) for a, b in pairs]
            yield paired(*zip(*values, strict=True), arm=arm, metric=f"share:{name}")


def _bin_differences(arm: str, pairs: Sequence[tuple[RunResult, RunResult]]) -> Iterator[Difference]:
    by_label: dict[str, list[tuple[float, float]]] = {}
    for a, b in pairs:
        nll = {bin_.label: bin_.nll for bin_ in b.frequency}
        for bin_ in a.frequency:
            own = nll.get(bin_.label)
            if bin_.nll is not None and own is not None:
                by_label.setdefault(bin_.label, []).append((bin_.nll, own))
    for label, values in by_label.items():
        yield paired(*zip(*values, strict=True), arm=arm, metric=f"frequency:{label}")


def _pairs(comparison: Comparison, first: str, second: str) -> Iterator[tuple[RunResult, RunResult]]:
    """Runs of both arms with the same seed; a seed that only one of them finished is left out."""
    other = {run.seed: run for run in comparison.of(second)}
    return ((run, other[run.seed]) for run in comparison.of(first) if run.seed in other)
