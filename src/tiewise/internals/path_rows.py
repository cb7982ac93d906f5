"""Two matrices A and B [V, E] of one kind (gradients, updates), counted row by row in fp64, a few rows at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tiewise.analysis.estimates import ratio

_ROWS = 4096  # taken to fp64 at once
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Split:
    """Norms of two parts and the shares of the second.

    Args:
        a: ‖A‖, Frobenius.
        b: ‖B‖.
        total: ‖A + B‖ of one table; √(‖A‖² + ‖B‖²) of two.
        cosine: between A and B; nan for two tables.
        a_l1: sum of |A|.
        b_l1: sum of |B|.
        share_b: ‖B‖ / (‖A‖ + ‖B‖).
        energy_b: ‖B‖² / (‖A‖² + ‖B‖²).
        share_b_l1: the share of norms by L1.
    """

    a: float
    b: float
    total: float
    cosine: float
    a_l1: float
    b_l1: float
    share_b: float
    energy_b: float
    share_b_l1: float


@dataclass(frozen=True)
class RowSums:
    """Per row: ‖A_r‖² and ‖B_r‖², A_r·B_r (nan for two tables), sums of |A_r| and |B_r|; each [V]."""

    a2: Floats
    b2: Floats
    ab: Floats
    a1: Floats
    b1: Floats

    @property
    def share_b(self) -> Floats:
        """‖B_r‖ / (‖A_r‖ + ‖B_r‖) of every row [V]; nan where both are zero."""
        a, b = np.sqrt(self.a2), np.sqrt(self.b2)
        both = a + b
        return np.divide(b, both, out=np.full_like(b, np.nan), where=both > 0)

    def split(self, rows: NDArray | slice = slice(None)) -> Split:
        """Sum over all rows, or over some."""
        a2, b2, ab, a1, b1 = (float(x[rows].sum()) for x in (self.a2, self.b2, self.ab, self.a1, self.b1))
        a, b = math.sqrt(a2), math.sqrt(b2)
        apart = math.isnan(ab)
        total = math.sqrt(a2 + b2 if apart else max(0.0, a2 + b2 + 2 * ab))
        cosine = ab / (a * b) if a and b and not apart else math.nan
        return Split(a, b, total, cosine, a1, b1, ratio(b, a + b), ratio(b2, a2 + b2), ratio(b1, a1 + b1))


def row_sums(a: Tensor, b: Tensor, one_table: bool) -> RowSums:
    """Count A [V, E] and B [V', E'] row by row; a shorter table's missing rows are zero."""
    rows = max(len(a), len(b))
    found = np.zeros((5, rows))
    for start in range(0, rows, _ROWS):
        x, y = (t[start : start + _ROWS].double() for t in (a, b))
        columns = [x.square().sum(1), y.square().sum(1), (x * y).sum(1) if one_table else None, _l1(x), _l1(y)]
        for place, column in enumerate(columns):
            if column is not None:
                found[place, start : start + len(column)] = column.numpy()
    if not one_table:
        found[2] = np.nan
    return RowSums(*found)


def cosine_null(a: Tensor, b: Tensor, rows: Tensor, seed: int, permutations: int) -> tuple[float, float]:
    """(lowest, highest) cosine of A and B where the rows of A among `rows` [U] are permuted: other tokens' A.

    A's rows outside of `rows` must be zero.
    """
    source = torch.Generator().manual_seed(seed)
    own, other = F.embedding(rows, a), F.embedding(rows, b)
    norms = float(torch.linalg.vector_norm(own)) * float(torch.linalg.vector_norm(b))
    if not norms:
        return math.nan, math.nan
    found = []
    for _ in range(permutations):
        order = torch.randperm(len(rows), generator=source)
        pieces = zip(order.split(_ROWS), other.split(_ROWS), strict=True)
        found.append(sum(float((own[piece] * against).sum()) for piece, against in pieces) / norms)
    return min(found), max(found)


def _l1(rows: Tensor) -> Tensor:
    return rows.abs().sum(1)
