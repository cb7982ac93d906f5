"""What alignment scores are by chance: for two independent Gaussian tables, n rows, d1 and d2 columns, centred.

A fitted map follows noise. On the rows that it was fitted on, the mean cosine is then not 0 but, for n ≫ d,

    linear         √(d1/n): a least-squares fit of noise returns H b with the projection H of rank d1; a row's own
                   share of it is h, that of all others h(1−h), so that its cosine is h/√h = √h with h = d1/n
    reduced rank   √(E Σ_{j≤r} s_j² / (n·d2)): the r largest of the squared singular values of a Gaussian d1 × d2 matrix
    orthogonal     ‖G‖_* / √(n·d2·min(d1, d2)) with the nuclear norm of a Gaussian G [d1, d2], as Σ cosines = ‖AᵀB‖_*
                   over the two norms; for d1 = d2 = d it is (8/3π)·√(d/n)

Singular values are those of the Marchenko-Pastur law. On held-out rows the mean is 0 with deviation 1/√(n·d2).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_STEPS = 20_000


def law(d1: int, d2: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (x, weight): the Marchenko-Pastur law of s²/max(d1, d2), falling, over x = 1 + β + 2√β·cos θ."""
    beta = min(d1, d2) / max(d1, d2)
    theta = (np.arange(_STEPS) + 0.5) * (math.pi / _STEPS)
    x = 1 + beta + 2 * math.sqrt(beta) * np.cos(theta)
    return x, 2 * np.sin(theta) ** 2 / (math.pi * x) * (math.pi / _STEPS)


def nuclear(d1: int, d2: int) -> float:
    """Expected nuclear norm of a Gaussian d1 × d2 matrix; (8/3π)·d^1.5 for a large square one."""
    x, weight = law(d1, d2)
    return min(d1, d2) * math.sqrt(max(d1, d2)) * float((np.sqrt(x) * weight).sum())


def orthogonal_chance(n: int, d1: int, d2: int) -> float:
    """Mean cosine of n rows after the best orthogonal map, fitted on them, by chance."""
    return min(1.0, nuclear(d1, d2) / math.sqrt(n * d2 * min(d1, d2)))


def linear_chance(n: int, d1: int) -> float:
    """Mean cosine of n rows after the best linear map from d1 columns, fitted on them, by chance."""
    return min(1.0, math.sqrt(d1 / n))


def reduced_chance(n: int, d1: int, d2: int, rank: int) -> float:
    """Mean cosine of n rows after the best map of the given rank, fitted on them, by chance."""
    x, weight = law(d1, d2)
    small = min(d1, d2)
    before = np.concatenate([[0.0], np.cumsum(weight)[:-1]])
    taken = np.clip(rank / small - before, 0, weight)
    energy = small * max(d1, d2) * float((x * taken).sum())
    return min(1.0, math.sqrt(energy / (n * d2)))


def held_out_deviation(n: int, d2: int) -> float:
    """Standard deviation of the mean cosine of n rows that no map was fitted on, by chance; the mean is 0."""
    return 1 / math.sqrt(n * d2)


def cka_chance(n: int, gram_a: NDArray, gram_b: NDArray) -> float:
    """Mean of linear CKA over all permutations of the rows, exactly: tr K_A · tr K_B / ((n−1)·‖K_A‖·‖K_B‖).

    K = A Aᵀ of centred rows; its trace and norm are those of the centred AᵀA. For Gaussian tables it is about
    d / (n + d).
    """
    scale = float(np.linalg.norm(gram_a) * np.linalg.norm(gram_b)) * (n - 1)
    return float(np.trace(gram_a) * np.trace(gram_b)) / scale if scale else 0.0
