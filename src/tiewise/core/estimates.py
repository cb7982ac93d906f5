"""Means of independent values (rows, seeds) with their 95 % intervals, Student's t, its tests; a map's interaction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy  # its `special` comes with the first use: what is told of one seed needs none of it
from numpy.typing import ArrayLike, NDArray

Z = 1.959963984540054  # 97.5 % quantile of the normal distribution
POWER = 0.80
MANY = 1000  # values from which on the normal quantile stands for Student's, 0.1 % smaller at most


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval [low, high], from `rows` rows."""

    value: float
    low: float
    high: float
    rows: int


def mean_interval(values: ArrayLike) -> Estimate:
    """Mean of independent values with Student's interval, mean ± t·s/√n; nan for what too few values do not give."""
    found = np.asarray(values, np.float64)
    n = len(found)
    if not n or not np.isfinite(found).all():
        return Estimate(math.nan, math.nan, math.nan, n)
    mean = float(found.mean())
    half = _t(n) * float(found.std(ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return Estimate(mean, mean - half, mean + half, n)


def _t(n: int) -> float:
    """97.5 % quantile for the mean of n values."""
    return critical(n - 1) if n < MANY else Z


def p_value(estimate: Estimate, levels: Sequence[float]) -> float:
    """Two-sided p that what `mean_interval` estimated lies within the range of `levels`; nan without an interval."""
    half = (estimate.high - estimate.low) / 2
    away = max(min(levels) - estimate.value, estimate.value - max(levels), 0.0)
    if not math.isfinite(half + away):
        return math.nan
    if half <= 0:
        return 0.0 if away else 1.0
    t = away / half * _t(estimate.rows)
    return two_sided(t, estimate.rows - 1) if estimate.rows < MANY else math.erfc(t / math.sqrt(2))


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


def wilson(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a share seen in `count` independent draws (Wilson's score interval)."""
    middle = (share + Z * Z / (2 * count)) / (1 + Z * Z / count)
    half = Z / (1 + Z * Z / count) * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def ratio(part: float, whole: float) -> float:
    """part / whole; nan where the whole is zero."""
    return part / whole if whole else math.nan


@lru_cache
def critical(df: int) -> float:
    """Return c with P(|T| ≤ c) = 0.95 for `df` ≥ 1 degrees of freedom."""
    return float(scipy.special.stdtrit(df, 0.975))


def two_sided(t: float, df: int) -> float:
    """Return P(|T| ≥ |t|) for `df` ≥ 1 degrees of freedom."""
    return 2 * float(scipy.special.stdtr(df, -abs(t)))


def holm(p: Sequence[float]) -> list[float]:
    """Adjust the p of m tests read side by side, so that none is below α by chance with more than probability α.

    The k-th smallest is multiplied by m − k + 1, none becomes smaller than one before it, and 1 is the most (Holm,
    Scandinavian Journal of Statistics 1979). It asks nothing of how the tests depend on each other.
    """
    adjusted, least = [0.0] * len(p), 0.0
    for rank, place in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        least = max(least, min(1.0, (len(p) - rank) * p[place]))
        adjusted[place] = least
    return adjusted


def interaction(values: NDArray) -> NDArray:
    """A map less m + a_i + b_j, fitted by least squares to what is there off the diagonal."""
    k = len(values)
    off = ~np.isnan(values) & ~np.eye(k, dtype=bool)
    design = np.hstack([np.repeat(np.eye(k), k, axis=0), np.tile(np.eye(k), (k, 1))])  # each entry's row and column
    fitted = np.linalg.lstsq(design[off.ravel()], values[off], rcond=None)[0]
    found: NDArray = values - (design @ fitted).reshape(k, k)
    return found


@lru_cache
def detectable(df: int) -> float:
    """Smallest true difference, in standard errors of the mean, that the two-sided 5 % t test finds with `POWER`.

    It solves power(λ) = `POWER` for the noncentrality λ (Cohen, Statistical Power Analysis for the Behavioral Sciences,
    2nd ed. 1988, ch. 2; the noncentral t is that of Johnson, Kotz & Balakrishnan, Continuous Univariate Distributions
    2, ch. 31).
    """
    c = critical(df)
    low, high = 0.0, 2 * (c + 3)
    while low < (shift := (low + high) / 2) < high:  # until no float lies between them
        other_side = scipy.special.nctdtr(df, shift, -c)  # of which scipy makes nan below 1e-11
        found = 1 - scipy.special.nctdtr(df, shift, c) + (0.0 if math.isnan(other_side) else other_side)
        low, high = (shift, high) if found < POWER else (low, shift)
    return shift
