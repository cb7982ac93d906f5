"""Maps W [d1, d2] that carry the rows of one table to those of another, from d×d products alone.

orthogonal     argmin ‖A W − B‖ over W with orthonormal rows or columns: U Vᵀ of AᵀB = U S Vᵀ (Schönemann 1966)
linear         least squares: (AᵀA)⁺ AᵀB
reduced rank   least squares over W of rank r: the linear map times V_r V_rᵀ, the leading eigenvectors of
               BᵀA (AᵀA)⁺ AᵀB (Izenman 1975)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

SMALL = 512  # up to here a singular value decomposition takes no time worth saving
WELL = 1e-10  # of squared singular values, smallest to largest, above which their eigenvalues are accurate enough


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


def linear(inverse: Matrix, cross: Matrix) -> Matrix:
    """Return the least-squares map from (AᵀA)⁺ [d1, d1] and AᵀB [d1, d2]."""
    return inverse @ cross


def reduced_rank(inverse: Matrix, cross: Matrix, rank: int) -> Matrix:
    """Return the least-squares map of the given rank from (AᵀA)⁺ [d1, d1] and AᵀB [d1, d2]."""
    full = linear(inverse, cross)
    fitted = cross.T @ full
    leading = np.linalg.eigh((fitted + fitted.T) / 2)[1][:, -rank:]
    return (full @ leading) @ leading.T
