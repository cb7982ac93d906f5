"""Student's t and the power of its test for whole degrees of freedom, with nothing but `math` and one quadrature.

And Holm's correction, for whoever reads several of its tests side by side.

The distribution function is the finite series of Abramowitz & Stegun 26.7.3–4; quantiles come from bisection. The
power is that of the noncentral t: with S² = χ²_ν / ν, a two-sided test with critical value c finds a difference of
λ standard errors with probability  E_S[Φ(λ − cS) + Φ(−λ − cS)].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

CONFIDENCE = 0.95
POWER = 0.80


@lru_cache
def critical(df: int, confidence: float = CONFIDENCE) -> float:
    """Return c with P(|T| ≤ c) = `confidence` for `df` ≥ 1 degrees of freedom."""
    # bisecting the angle keeps every t of (0, ∞) in a bounded interval
    angle = _bisect(lambda theta: _central(theta, df) - confidence, 0.0, math.pi / 2)
    return math.sqrt(df) * math.tan(angle)


def two_sided(t: float, df: int) -> float:
    """Return P(|T| ≥ |t|) for `df` ≥ 1 degrees of freedom, to 1e-12."""
    return max(0.0, 1.0 - _central(math.atan(abs(t) / math.sqrt(df)), df))


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


@lru_cache
def detectable(df: int, confidence: float = CONFIDENCE, power: float = POWER) -> float:
    """Smallest true difference, in standard errors of the mean, that the t test finds with probability `power`.

    It solves power(λ) = `power` for the noncentrality λ of the two-sided test at level 1 − `confidence` (Cohen,
    Statistical Power Analysis for the Behavioral Sciences, 2nd ed. 1988, ch. 2; the noncentral t is that of
    Johnson, Kotz & Balakrishnan, Continuous Univariate Distributions 2, ch. 31).
    """
    c = critical(df, confidence)
    return _bisect(lambda shift: _found(shift, c, df) - power, 0.0, 5 * (c + 3))


def _central(theta: float, df: int) -> float:
    """P(|T| ≤ √df · tan θ): Abramowitz & Stegun 26.7.3 (odd df) and 26.7.4 (even df)."""
    cosine = math.cos(theta)
    odd = df % 2
    term, series = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(1 + odd, df + odd, 2):
        series += term
        term *= k / (k + 1) * cosine**2
    series *= math.sin(theta)
    return 2 / math.pi * (theta + series) if odd else series


def _found(shift: float, c: float, df: int) -> float:
    """Probability that |T'| exceeds `c` where T' has noncentrality `shift`."""
    spread, weight = _spread(df)
    return sum(w * (_normal(shift - c * s) + _normal(-shift - c * s)) for s, w in zip(spread, weight, strict=True))


@lru_cache
def _spread(df: int) -> tuple[list[float], list[float]]:
    """Nodes and weights of the density of S = √(χ²_df / df), which lies within 10 deviations of 1."""
    low, high = max(0.0, 1 - 10 / math.sqrt(2 * df)), 1 + 10 / math.sqrt(2 * df)
    nodes, weights = np.polynomial.legendre.leggauss(200)
    s = low + (high - low) * (nodes + 1) / 2
    log_density = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2) + (df - 1) * np.log(s) - df * s**2 / 2
    return s.tolist(), (weights * (high - low) / 2 * np.exp(log_density)).tolist()


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def _bisect(rising: Callable[[float], float], low: float, high: float) -> float:
    while True:
        middle = (low + high) / 2
        if middle in (low, high):  # no float lies between them
            return middle
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
