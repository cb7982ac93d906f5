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
ALPHA = 0.05  # level of a test, and of one minus an interval's coverage
POWER = 0.80
FEWEST_UNITS = 5  # of equal size, below which `ratio_interval` has no interval
NODES = 64  # of the mean over standard errors behind `detectable`, which has four digits by them
MANY = 1000  # values from which on the normal quantile stands for Student's, 0.1 % smaller at most


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval [low, high], from `rows` rows."""

    value: float
    low: float
    high: float
    rows: int


def mean_interval(values: ArrayLike) -> Estimate:
    """Return the mean of independent values with Student's interval, mean ± t·s/√n.

    One value has a mean, and an interval of nan. Without a value, or if one is not finite, all three are nan.
    The interval assumes that the mean is nearly normal. Over few, skewed values it covers less than 95 %: 82 % for five
    log-normal ones and 91 % for 64, 87 % over five seeds of which one in five fails (by 5 standard deviations).
    """
    sample = np.asarray(values, np.float64)
    n = len(sample)
    if not n or not np.isfinite(sample).all():
        return Estimate(math.nan, math.nan, math.nan, n)
    mean, half = float(sample.mean()), math.nan
    if n > 1:
        half = _t(n) * float(sample.std(ddof=1)) / math.sqrt(n)
    return Estimate(mean, mean - half, mean + half, n)


def _t(n: int) -> float:
    """97.5 % quantile for the mean of n values."""
    return critical(n - 1) if n < MANY else Z


def p_value(estimate: Estimate, levels: Sequence[float]) -> float:
    """Two-sided p that what `mean_interval` estimated lies within the range of `levels`; nan without an interval."""
    half = (estimate.high - estimate.low) / 2
    distance = max(min(levels) - estimate.value, estimate.value - max(levels), 0.0)
    if not math.isfinite(half + distance):
        return math.nan
    if half <= 0:
        return 0.0 if distance else 1.0
    t = distance / half * _t(estimate.rows)
    if estimate.rows >= MANY:
        return math.erfc(t / math.sqrt(2))
    return two_sided(t, estimate.rows - 1)


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


def ratio_interval(parts: NDArray[np.float64], wholes: NDArray[np.float64]) -> Estimate:
    """Return Σ parts / Σ wholes over independent units of unequal size, with an interval that resamples the units.

    The standard error is that of the delete-one jackknife. Student's t has n* − 1 degrees of freedom, where
    n* = (Σ w)² / Σ w² is how many units of equal size say as much (Kish, Survey Sampling 1965): one unit that holds
    most of the whole adds next to nothing to them. There is no interval if n* is below `FEWEST_UNITS`.
    """
    parts, wholes = np.asarray(parts, np.float64), np.asarray(wholes, np.float64)
    n, whole = len(wholes), float(wholes.sum())
    if not whole:
        return Estimate(math.nan, math.nan, math.nan, n)
    value, equal = float(parts.sum()) / whole, equal_units(wholes)
    if equal < FEWEST_UNITS:
        return Estimate(value, math.nan, math.nan, n)
    without = (parts.sum() - parts) / (whole - wholes)
    half = float(scipy.special.stdtrit(equal - 1, 1 - ALPHA / 2)) * math.sqrt((n - 1) * float(without.var()))
    return Estimate(value, value - half, value + half, n)


def equal_units(wholes: NDArray[np.float64]) -> float:
    """Return (Σ w)² / Σ w²: how many units of equal size say as much as these of sizes w."""
    return float(np.sum(wholes, dtype=np.float64) ** 2 / np.sum(np.square(wholes, dtype=np.float64)))


def paired_bootstrap(
    first: NDArray[np.float64], second: NDArray[np.float64], seed: int = 0, resamples: int = 1000
) -> Estimate:
    """Return the mean of second − first over the same rows, with the interval of the bootstrap-t over rows.

    It resamples the mean in units of its standard error (Efron 1981), and so follows skewed values and has Student's
    width for few rows, where percentiles of the resampled mean are too narrow. Rows count as independent. Fewer than
    three rows have an interval of nan: every draw of two different ones has their mean.
    """
    difference = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    generator, n, mean = np.random.default_rng(seed), len(difference), float(difference.mean())
    if n < 3:
        return Estimate(mean, math.nan, math.nan, n)
    draws = (difference[generator.integers(0, n, n)] for _ in range(resamples))
    moments = np.array([(drawn.mean(), drawn.std(ddof=1)) for drawn in draws])
    spread = moments[:, 1] > 0  # a draw of one row n times says nothing
    # in units of the standard deviation: √n of the standard error cancels when the quantiles are scaled back
    studentised = (moments[spread, 0] - mean) / moments[spread, 1]
    if not len(studentised):
        return Estimate(mean, mean, mean, n)
    below, above = np.quantile(studentised, [ALPHA / 2, 1 - ALPHA / 2]) * difference.std(ddof=1)
    # the upper quantile of (resampled mean − mean) gives the lower limit
    return Estimate(mean, mean - float(above), mean - float(below), n)


def correlation_interval(value: float, rows: int) -> Estimate:
    """Return a correlation of n rows with its interval by Fisher's z, tanh(artanh r ± 1.96/√(n−3)); n > 3.

    It assumes that the rows are independent and both values jointly normal. With heavy tails it is too narrow: for
    elliptical t with 4 degrees of freedom it covers 71 to 84 % (tests/core/test_estimates.py).
    """
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
def critical(df: int, level: float = ALPHA) -> float:
    """Return c with P(|T| > c) = `level` for `df` ≥ 1 degrees of freedom."""
    return float(scipy.special.stdtrit(df, 1 - level / 2))


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


def levels(p: Sequence[float]) -> list[float]:
    """Return the level at which Holm's procedure reads each of m tests while the others are as they are.

    Test i is rejected exactly if its own p is below the i-th of these levels: 0.05 / (m − k), where k is how many of
    the others are rejected before the first one that is not.
    """
    found = []
    for place in range(len(p)):
        others = sorted([*p[:place], *p[place + 1 :]])
        passed = 0
        while passed < len(others) and others[passed] * (len(p) - passed) < ALPHA:
            passed += 1
        found.append(ALPHA / (len(p) - passed))
    return found


def interaction(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A map less m + a_i + b_j, fitted by least squares to what is there off the diagonal."""
    k = len(values)
    off = ~np.isnan(values) & ~np.eye(k, dtype=bool)
    design = np.hstack([np.repeat(np.eye(k), k, axis=0), np.tile(np.eye(k), (k, 1))])  # each entry's row and column
    fitted = np.linalg.lstsq(design[off.ravel()], values[off], rcond=None)[0]
    found: NDArray[np.float64] = values - (design @ fitted).reshape(k, k)
    return found


@lru_cache
def detectable(df: int, level: float = ALPHA) -> float:
    """Return the true difference that a repetition finds with `POWER`, in estimated standard errors of the mean.

    The repetition has as many values as the study that estimated the error, so both estimate the true one with `df`
    degrees of freedom. With S and S′ their independent estimates over the true error, the two-sided t test at `level`
    finds the difference λS with the probability

        E P(|Z + λS| > c S′),   Z ~ N(0, 1),   P(|T| > c) = level

    For a given S this is the noncentral t (Johnson, Kotz & Balakrishnan, Continuous Univariate Distributions 2,
    chapter 31). Its mean over S is a sum over Gauss–Legendre nodes. To take S for 1 would promise too much: with three
    seeds the test would find such a difference in 62 of 100 cases.
    """
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    errors = np.sqrt(scipy.special.chdtri(df, (1 - nodes) / 2) / df)
    c = critical(df, level)

    def power(times: float) -> float:
        above = 1 - scipy.special.nctdtr(df, times * errors, c)
        below = np.nan_to_num(scipy.special.nctdtr(df, times * errors, -c))  # scipy returns nan below 1e-11
        return float(weights @ (above + below)) / 2

    high = c
    while power(high) < POWER:
        high *= 2
    low = 0.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if power(middle) < POWER:
            low = middle
        else:
            high = middle
    return high
