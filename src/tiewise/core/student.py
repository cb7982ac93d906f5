"""Student's t, the power of its test, and Holm's correction for whoever reads several of its tests side by side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from tiewise.core.late import Late

special = Late("scipy.special")  # slow to import; what is told of one seed needs none of it
CONFIDENCE = 0.95
POWER = 0.80


@lru_cache
def critical(df: int, confidence: float = CONFIDENCE) -> float:
    """Return c with P(|T| ≤ c) = `confidence` for `df` ≥ 1 degrees of freedom."""
    return float(special.stdtrit(df, (1 + confidence) / 2))


def two_sided(t: float, df: int) -> float:
    """Return P(|T| ≥ |t|) for `df` ≥ 1 degrees of freedom."""
    return 2 * float(special.stdtr(df, -abs(t)))


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
def detectable(df: int) -> float:
    """Smallest true difference, in standard errors of the mean, that the t test finds with probability `POWER`.

    It solves power(λ) = `POWER` for the noncentrality λ of the two-sided test at level 1 − `CONFIDENCE` (Cohen,
    Statistical Power Analysis for the Behavioral Sciences, 2nd ed. 1988, ch. 2; the noncentral t is that of
    Johnson, Kotz & Balakrishnan, Continuous Univariate Distributions 2, ch. 31).
    """
    c = critical(df)
    low, high = 0.0, 2 * (c + 3)
    while low < (shift := (low + high) / 2) < high:  # until no float lies between them
        other_side = special.nctdtr(df, shift, -c)  # of which scipy makes nan below 1e-11
        found = 1 - special.nctdtr(df, shift, c) + (0.0 if math.isnan(other_side) else other_side)
        low, high = (shift, high) if found < POWER else (low, shift)
    return shift
