"""Means of independent values (rows, windows, batches, seeds) with their 95 % intervals; and of pairs of such."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.core import student

Z = 1.959963984540054  # 97.5 % quantile of the normal distribution


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval [low, high], from `rows` rows."""

    value: float
    low: float
    high: float
    rows: int


def wilson(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a share seen in `count` independent draws (Wilson's score interval)."""
    z = Z
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(values: ArrayLike) -> Estimate:
    """Mean of independent values with Student's interval, mean ± t·s/√n; nan for what too few values do not give.

    One value has a mean and no interval; no values, or values that are not finite, have neither.
    """
    found = np.asarray(values, np.float64)
    n = len(found)
    if not n or not np.isfinite(found).all():
        return Estimate(math.nan, math.nan, math.nan, n)
    mean = float(found.mean())
    half = _t(n) * float(found.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Estimate(mean, mean - half, mean + half, n)


def p_value(estimate: Estimate, levels: Sequence[float]) -> float:
    """Two-sided p, from the distribution of its interval, that what was estimated lies within the range of `levels`.

    For symmetric intervals of Student's t with rows − 1 degrees of freedom, as `mean_interval` gives; nan without one.
    """
    half = (estimate.high - estimate.low) / 2
    away = max(min(levels) - estimate.value, estimate.value - max(levels), 0.0)
    if not math.isfinite(half + away):
        return math.nan
    if half <= 0:
        return 0.0 if away else 1.0
    t = away / half * _t(estimate.rows)
    return student.two_sided(t, estimate.rows - 1) if estimate.rows < 1000 else math.erfc(t / math.sqrt(2))


def jackknife(statistic: Callable[[Sequence[int]], float], units: Sequence[int]) -> Estimate:
    """A statistic of n independent units with its delete-one interval; for means over *pairs*, which share units.

    With θ the statistic of all units and θ₋ᵢ that without unit i,

        θ ± t·√((n−1)/n · Σ (θ₋ᵢ − mean θ₋)²),   t of n − 1 degrees of freedom

    (Arvesen, Annals of Mathematical Statistics 1969, of U-statistics). For a mean over all pairs whose values are
    μ + aᵢ + aⱼ this is Student's interval of the aᵢ, and exact if these are normal. Noise that each pair has of its own
    makes it too wide and never too short (Efron & Stein, Annals of Statistics 1981): where there is nothing else, the
    variance comes out 2(n−1)/(n−2) times too large. Three units do not tell the two apart.

    Fewer than three units have no interval, and values that are not finite nothing at all.
    """
    n, whole = len(units), statistic(units)
    if n < 3:
        return Estimate(whole, math.nan, math.nan, n)
    without = np.array([statistic([*units[:i], *units[i + 1 :]]) for i in range(n)])
    if not (math.isfinite(whole) and np.isfinite(without).all()):
        return Estimate(math.nan, math.nan, math.nan, n)
    half = _t(n) * math.sqrt((n - 1) * float(without.var()))
    return Estimate(whole, whole - half, whole + half, n)


def _t(n: int) -> float:
    """97.5 % quantile for the mean of n values; from 1,000 on the normal one, which is 0.1 % smaller at most."""
    return student.critical(n - 1) if n < 1000 else Z


def paired_bootstrap(first: NDArray, second: NDArray, seed: int = 0, resamples: int = 1000) -> Estimate:
    """Mean of second − first over the same rows; interval: percentiles of the bootstrap over rows (Efron 1979)."""
    difference = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    generator, n = np.random.default_rng(seed), len(difference)
    means = [float(difference[generator.integers(0, n, n)].mean()) for _ in range(resamples)]
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(difference.mean()), float(low), float(high), n)


def correlation_interval(value: float, rows: int) -> Estimate:
    """A correlation of n rows with its interval by Fisher's z, tanh(artanh r ± 1.96/√(n−3)); n > 3."""
    if not -1 < value < 1:
        return Estimate(value, value, value, rows)
    half = Z / math.sqrt(rows - 3)
    return Estimate(value, math.tanh(math.atanh(value) - half), math.tanh(math.atanh(value) + half), rows)


def ratio(part: float, whole: float) -> float:
    """part / whole; nan where the whole is zero."""
    return part / whole if whole else math.nan
