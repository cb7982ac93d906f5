"""Means of a few independent values with their 95 % interval by Student's t: batches of a text, seeds of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from tiewise.analysis.estimates import Estimate
from tiewise.training import student


def mean_of(values: Sequence[float]) -> Estimate:
    """Mean ± t·s/√n with n − 1 degrees of freedom; one value has no interval (nan), values that are nan no mean."""
    n = len(values)
    if not n or not all(map(math.isfinite, values)):
        return Estimate(math.nan, math.nan, math.nan, n)
    mean = statistics.fmean(values)
    if n == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    half = student.critical(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def ratio(part: float, whole: float) -> float:
    """part / whole; nan where the whole is zero."""
    return part / whole if whole else math.nan
