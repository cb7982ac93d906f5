"""AᵀA, BᵀB and AᵀB of two tables' paired rows, summed over pieces of them: all that maps and spectra need.

Directions q [n, k] over tokens, orthonormal and orthogonal to 1, can be summed beside them, as AᵀQ and BᵀQ: then the
products of what is left of the columns when these are taken out are exact corrections of the same sums.

Each piece's product is computed in fp32 or fp64 and added in fp64. In fp32 the error is that of one piece's product;
`measured_error` gives it for the first piece.

What of two tables is no function of how often each token occurs: directions to take out of their columns.

Rows of one frequency are alike in any language model's tables, whatever they mean. Each column w is regressed on powers
of f = log(count + 1) over the paired rows, and what is left is compared. One power takes out a straight line only;
three follow a curve. That is a projection, and takes a few columns of AᵀQ beside AᵀA, BᵀB and AᵀB.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.core.errors import DataError

Matrix = NDArray[np.float64]


@dataclass
class Products:
    """Sums over n pairs of rows (a_i [d1], b_i [d2]), in fp64."""

    rows: int  # n
    sum_a: Matrix  # Σ a_i, [d1]
    sum_b: Matrix  # Σ b_i, [d2]
    gram_a: Matrix  # Σ a_i a_iᵀ, [d1, d1]
    gram_b: Matrix  # Σ b_i b_iᵀ, [d2, d2]
    cross: Matrix  # Σ a_i b_iᵀ, [d1, d2]
    along_a: Matrix  # Σ a_i q_iᵀ, [d1, k]; k is 0 where nothing is summed beside
    along_b: Matrix  # Σ b_i q_iᵀ, [d2, k]

    @classmethod
    def nothing(cls, d1: int, d2: int, k: int = 0) -> Products:
        """Sums over no rows, with k directions beside."""
        sums, grams = (np.zeros(d1), np.zeros(d2)), (np.zeros((d1, d1)), np.zeros((d2, d2)))
        return cls(0, *sums, *grams, np.zeros((d1, d2)), np.zeros((d1, k)), np.zeros((d2, k)))

    def add(self, a: NDArray, b: NDArray, q: NDArray | None = None) -> None:
        """Add rows a [n, d1], b [n, d2] and, where directions are summed beside, q [n, k], in the type of a and b."""
        self.rows += len(a)
        self.sum_a += a.sum(axis=0, dtype=np.float64)
        self.sum_b += b.sum(axis=0, dtype=np.float64)
        self.gram_a += a.T @ a
        self.gram_b += b.T @ b
        self.cross += a.T @ b
        if q is not None:
            self.along_a += a.T @ q.astype(a.dtype)
            self.along_b += b.T @ q.astype(b.dtype)

    def join(self, other: Products) -> None:
        """Add the sums over other rows to these."""
        self.rows += other.rows
        for name in ("sum_a", "sum_b", "gram_a", "gram_b", "cross", "along_a", "along_b"):
            mine = getattr(self, name)
            mine += getattr(other, name)

    @property
    def mean_a(self) -> Matrix:
        """Mean row of A, [d1]."""
        return self.sum_a / max(1, self.rows)

    @property
    def mean_b(self) -> Matrix:
        """Mean row of B, [d2]."""
        return self.sum_b / max(1, self.rows)

    def centre(self) -> Products:
        """Return the same sums of rows less their mean."""
        a, b, n = self.mean_a, self.mean_b, self.rows
        return Products(
            n,
            np.zeros_like(a),
            np.zeros_like(b),
            self.gram_a - n * np.outer(a, a),
            self.gram_b - n * np.outer(b, b),
            self.cross - n * np.outer(a, b),
            self.along_a,  # q is orthogonal to 1 over all rows
            self.along_b,
        )

    def without(self, k: int) -> Products:
        """Return the sums of centred rows when the first k directions are taken out of every column: (1 − QQᵀ)A, …

        All rows over which the directions are orthonormal must have been added.
        """
        centred, a, b = self.centre(), self.along_a[:, :k], self.along_b[:, :k]
        grams = centred.gram_a - a @ a.T, centred.gram_b - b @ b.T
        rest = self.along_a[:, k:], self.along_b[:, k:]
        return Products(self.rows, centred.sum_a, centred.sum_b, *grams, centred.cross - a @ b.T, *rest)


def measured_error(a: NDArray, b: NDArray) -> float:
    """Relative error ‖AᵀB (as computed) − AᵀB (fp64)‖ / (‖A‖·‖B‖) of one piece; 0 where it is in fp64."""
    if a.dtype == np.float64:
        return 0.0
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    scale = float(np.linalg.norm(wide_a) * np.linalg.norm(wide_b))
    return float(np.linalg.norm(a.T @ b - wide_a.T @ wide_b)) / scale if scale else 0.0


LINE, CURVE = 1, 3  # powers of f that are taken out
_NEW = 1e-9  # share of a power's norm below which it is a combination of lower ones


def directions(counts: ArrayLike, powers: int = CURVE) -> NDArray[np.float64]:
    """Return q [n, k]: orthonormal, orthogonal to 1; the first j columns span f, …, f^j beside 1, for any j ≤ k.

    k is less than `powers` where there are too few different counts: then a lower power says all of it.

    Args:
        counts: how often each of n tokens occurs.
        powers: the highest power of f = log(count + 1).
    """
    given = np.asarray(counts, np.float64)
    if given.ndim != 1 or not np.isfinite(given).all() or (given < 0).any():
        raise DataError("counts of tokens must be one number of 0 or more for each", "count them in the training text")
    f = np.log1p(given)
    spread = float(np.ptp(f))
    x = (2 * f - f.max() - f.min()) / spread if spread else np.zeros_like(f)
    basis = np.full((len(x), 1), max(1, len(x)) ** -0.5)
    for _ in range(powers if spread else 0):
        power = x * basis[:, -1]  # spans the same with the lower ones as x to the next power, and is better conditioned
        scale = float(np.linalg.norm(power))
        for _ in range(2):  # once loses orthogonality where little is left
            power = power - basis @ (basis.T @ power)
        left = float(np.linalg.norm(power))
        if left <= _NEW * scale:
            break
        basis = np.column_stack([basis, power / left])
    return basis[:, 1:]
