"""What d×d products of paired rows say of two tables: maps between them, what they share without one, and chance.

    orthogonal     argmin ‖A W − B‖ over W with orthonormal rows or columns: U Vᵀ of AᵀB = U S Vᵀ (Schönemann 1966)
    linear         least squares: (AᵀA)⁺ AᵀB
    reduced rank   least squares over W of rank r: the linear map times V_r V_rᵀ, the leading eigenvectors of
                   BᵀA (AᵀA)⁺ AᵀB (Izenman 1975)
    without map    CKA, leading subspaces, spectra

A fitted map follows noise. On the rows that it was fitted on, the mean cosine of two independent Gaussian tables (n
rows, d1 and d2 columns, centred) is then not 0 but, for n ≫ d,

    linear         √(d1/n): a least-squares fit of noise returns H b with the projection H of rank d1; a row's own
                   share of it is h, that of all others h(1−h), so that its cosine is h/√h = √h with h = d1/n
    reduced rank   √(E Σ_{j≤r} s_j² / (n·d2)): the r largest of the squared singular values of a Gaussian d1 × d2 matrix
    orthogonal     ‖G‖_* / √(n·d2·min(d1, d2)) with the nuclear norm of a Gaussian G [d1, d2], as Σ cosines = ‖AᵀB‖_*
                   over the two norms; for d1 = d2 = d it is (8/3π)·√(d/n)

Singular values are those of the Marchenko-Pastur law. On held-out rows the mean is 0 with deviation 1/√(n·d2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.paired_rows import Matrix, Products

SMALL = 512  # up to here a singular value decomposition takes no time worth saving
WELL = 1e-10  # of squared singular values, smallest to largest, above which their eigenvalues are accurate enough
_STEPS = 20_000  # of the integrals over the law


def orthogonal(cross: Matrix) -> Matrix:
    """Return the orthogonal (semi-orthogonal where d1 ≠ d2) map nearest to AᵀB [d1, d2].

    Large well-conditioned products go by the eigenvectors of CᵀC, eight times faster than singular vectors, and one
    Newton-Schulz step, which takes the result's distance from orthogonal from at most ε/WELL, 2e-6, to its square.
    """
    if cross.shape[0] < cross.shape[1]:
        return orthogonal(cross.T).T
    if cross.shape[1] > SMALL:
        values, vectors = np.linalg.eigh(cross.T @ cross)
        if values[0] > WELL * values[-1]:
            made = cross @ ((vectors / np.sqrt(values)) @ vectors.T)
            return 1.5 * made - 0.5 * made @ (made.T @ made)
    left, _, right = np.linalg.svd(cross, full_matrices=False)
    return left @ right


def pseudo_inverse(gram: Matrix, error: float = 0.0) -> Matrix:
    """Return (AᵀA)⁺ [d1, d1] of a Gram matrix whose entries are off by `error` of its trace, as by fp32 products.

    Eigenvalues within that error, or below d1·ε of the largest, are taken as empty: their directions are noise.
    """
    values, vectors = np.linalg.eigh(gram)
    keep = values > max(error * float(np.trace(gram)), len(values) * np.finfo(np.float64).eps * values[-1], 0.0)
    kept = vectors[:, keep]
    return (kept / values[keep]) @ kept.T


def least_squares(inverse: Matrix, cross: Matrix, rank: int | None = None) -> Matrix:
    """Return the least-squares map, of a given rank if any, from (AᵀA)⁺ [d1, d1] and AᵀB [d1, d2]."""
    full = inverse @ cross
    if rank is None:
        return full
    fitted = cross.T @ full
    leading = np.linalg.eigh((fitted + fitted.T) / 2)[1][:, -rank:]
    return (full @ leading) @ leading.T


def law(d1: int, d2: int) -> tuple[Matrix, Matrix]:
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


def cka(centred: Products, taken_out: int = 0) -> tuple[float, float]:
    """(linear CKA ‖AᵀB‖² / (‖AᵀA‖·‖BᵀB‖) of centred rows, Kornblith et al. 2019; its mean over all permutations).

    That mean is tr K_A · tr K_B / ((n−1)·‖K_A‖·‖K_B‖) exactly, with K = A Aᵀ, whose trace and norm are those of AᵀA;
    for Gaussian tables about d / (n + d). Of what is left when some directions were taken out, n − 1 loses as many.
    """
    scale = float(np.linalg.norm(centred.gram_a) * np.linalg.norm(centred.gram_b))
    if not scale:
        return 0.0, 0.0
    traces = float(np.trace(centred.gram_a) * np.trace(centred.gram_b))
    return float(np.square(centred.cross).sum()) / scale, traces / (scale * (centred.rows - taken_out - 1))


@dataclass(frozen=True)
class Spectrum:
    """Singular values of a table's centred paired rows, falling."""

    values: tuple[float, ...]  # s_1 ≥ s_2 ≥ …, from the Gram matrix: accurate to about √ε·s_1 in absolute terms
    participation: float  # (Σ s²)² / Σ s⁴, the number of directions that the table fills evenly
    mean_share: float  # share of Σ‖row‖² that is the mean row's: 0 centred, 1 all rows alike


@dataclass(frozen=True)
class Subspace:
    """How far two leading subspaces of k directions agree: the mean squared cosine of their principal angles."""

    side: str  # `left` (over tokens, [n, k]; any widths) or `right` (over the d coordinates; one width only)
    k: int  # directions of each
    value: float  # Σ cos² / k, from 0 to 1
    chance: float  # its mean for two random subspaces, k/(n−1) left and k/d right
    cosines: tuple[float, ...]  # of the principal angles, falling


def spectra(products: Products, ks: tuple[int, ...]) -> tuple[tuple[Spectrum, Spectrum], tuple[Subspace, ...]]:
    """(spectra of both tables, their leading subspaces of `ks` directions) from products that are not centred."""
    centred, found, axes = products.without(), [], []
    for gram, raw, mean in (
        (centred.gram_a, products.gram_a, products.mean_a),
        (centred.gram_b, products.gram_b, products.mean_b),
    ):
        rising, vectors = np.linalg.eigh(gram)
        values = np.maximum(rising[::-1], 0)
        axes.append((values, vectors[:, ::-1]))
        total, energy = float(values.sum()), float(np.trace(raw))
        participation = total**2 / float(np.square(values).sum()) if total else 0.0
        share = products.rows * float(mean @ mean) / energy if energy else 0.0
        found.append(Spectrum(tuple(map(float, np.sqrt(values))), participation, share))
    (values_a, axes_a), (values_b, axes_b) = axes
    rank = min(int((v > len(v) * np.finfo(np.float64).eps * v[0]).sum()) for v in (values_a, values_b))
    between = axes_a.T @ centred.cross @ axes_b
    spaces = []
    for k in sorted({min(k, rank) for k in ks if min(k, rank) > 0}):
        left = between[:k, :k] / np.sqrt(np.outer(values_a[:k], values_b[:k]))
        spaces.append(_subspace("left", left, k / (products.rows - 1)))
        if axes_a.shape == axes_b.shape:
            spaces.append(_subspace("right", axes_a[:, :k].T @ axes_b[:, :k], k / len(axes_a)))
    return (found[0], found[1]), tuple(spaces)


def _subspace(side: str, between: NDArray, chance: float) -> Subspace:
    cosines = np.minimum(np.linalg.svd(between, compute_uv=False), 1.0)
    k = len(cosines)
    return Subspace(side, k, float(np.square(cosines).mean()), min(1.0, chance), tuple(map(float, cosines)))
