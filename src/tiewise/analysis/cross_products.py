"""AᵀA, BᵀB and AᵀB of two tables' paired rows, summed over pieces of them: all that maps and spectra need.

Each piece's product is computed in fp32 or fp64 and added in fp64. In fp32 the error is that of one piece's product;
`measured_error` gives it for the first piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


@dataclass
class Products:
    """Sums over n pairs of rows (a_i [d1], b_i [d2]), in fp64.

    Args:
        rows: n.
        sum_a: Σ a_i, [d1].
        sum_b: Σ b_i, [d2].
        gram_a: Σ a_i a_iᵀ, [d1, d1].
        gram_b: Σ b_i b_iᵀ, [d2, d2].
        cross: Σ a_i b_iᵀ, [d1, d2].
    """

    rows: int
    sum_a: Matrix
    sum_b: Matrix
    gram_a: Matrix
    gram_b: Matrix
    cross: Matrix

    @classmethod
    def nothing(cls, d1: int, d2: int) -> Products:
        """Sums over no rows."""
        return cls(0, np.zeros(d1), np.zeros(d2), np.zeros((d1, d1)), np.zeros((d2, d2)), np.zeros((d1, d2)))

    def add(self, a: NDArray, b: NDArray) -> None:
        """Add rows a [n, d1] and b [n, d2], multiplied in the type that they have."""
        self.rows += len(a)
        self.sum_a += a.sum(axis=0, dtype=np.float64)
        self.sum_b += b.sum(axis=0, dtype=np.float64)
        self.gram_a += a.T @ a
        self.gram_b += b.T @ b
        self.cross += a.T @ b

    def join(self, other: Products) -> None:
        """Add the sums over other rows to these."""
        self.rows += other.rows
        for name in ("sum_a", "sum_b", "gram_a", "gram_b", "cross"):
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
        )


def measured_error(a: NDArray, b: NDArray) -> float:
    """Relative error ‖AᵀB (as computed) − AᵀB (fp64)‖ / (‖A‖·‖B‖) of one piece; 0 where it is in fp64."""
    if a.dtype == np.float64:
        return 0.0
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    scale = float(np.linalg.norm(wide_a) * np.linalg.norm(wide_b))
    return float(np.linalg.norm(a.T @ b - wide_a.T @ wide_b)) / scale if scale else 0.0
