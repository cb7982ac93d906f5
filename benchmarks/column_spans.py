"""Distance of two tables' column spaces, as Inan, Khosravi and Socher measure it in §6.2.

A table [V, E] has E columns, each a vector over the words; what logits a head can give at all is their span. Two tables
whose spans agree differ by a matrix [E, E] that the body can absorb, and that is what the augmented loss is shown to
bring about (arXiv:1611.01462, §4).

With orthonormal bases Q_a [V, k_a], Q_b [V, k_b] of the two spans, k = min(k_a, k_b), and θ the principal angles:

    distance = √(1 − ‖Q_aᵀ Q_b‖²_F / k) = √(mean sin² θ)                 0: one contains the other; 1: orthogonal
    residual(a | b) = ‖a − Q_b Q_bᵀ a‖_F / ‖a‖_F                          the part of a that b's span leaves out

The distance counts every direction alike, so it is ‖P_a − P_b‖_F / √(2k) for equal ranks; the residual weighs
directions by what the table holds in them. Unrelated tables of V ≫ E rows are √(1 − E/V) apart by both: near 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.core.errors import DataError

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class SubspaceDistance:
    """Result of `subspace_distance` for tables a and b.

    Attributes:
        distance: root mean squared sine of the principal angles, 0 to 1.
        largest: sine of the largest angle: the gap between the spans.
        residual_a: the part of a's norm that b's span leaves out.
        residual_b: the part of b's that a's leaves out.
        chance: distance expected of unrelated spans, √(1 − max(k_a, k_b)/V).
        ranks: dimensions of the two spans.
    """

    distance: float
    largest: float
    residual_a: float
    residual_b: float
    chance: float
    ranks: tuple[int, int]

    def record(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return {**vars(self), "ranks": list(self.ranks)}


def subspace_distance(a: ArrayLike, b: ArrayLike) -> SubspaceDistance:
    """Measure how far apart the column spans of two tables are.

    Args:
        a: [V, E_a], row = word.
        b: [V, E_b], the same words.

    Raises:
        DataError: tables of other words, or one without a direction.
    """
    tables = [np.asarray(table, np.float64) for table in (a, b)]
    if any(table.ndim != 2 for table in tables) or len(tables[0]) != len(tables[1]):
        shapes = " and ".join(str(table.shape) for table in tables)
        raise DataError(f"tables of shapes {shapes} have no common words", "compare tables [V, E] of one vocabulary")
    if not all(np.isfinite(table).all() for table in tables):
        raise DataError("a table has values that are not finite", "check what was trained")
    first, second = (_basis(table) for table in tables)
    if not first.shape[1] or not second.shape[1]:
        raise DataError("a table is zero and spans nothing", "check what was trained")
    k = min(first.shape[1], second.shape[1])
    # sines from the part that is left out, not from the cosines: √(1 − c²) loses small angles
    narrow, wide = (first, second) if first.shape[1] == k else (second, first)
    sines = np.linalg.svd(narrow - wide @ (wide.T @ narrow), compute_uv=False)
    sines = np.clip(sines, 0.0, 1.0)
    return SubspaceDistance(
        distance=float(np.sqrt(np.mean(np.square(sines)))),
        largest=float(sines.max()),
        residual_a=_residual(tables[0], second),
        residual_b=_residual(tables[1], first),
        chance=math.sqrt(1 - max(first.shape[1], second.shape[1]) / len(first)),
        ranks=(first.shape[1], second.shape[1]),
    )


def _basis(table: Matrix) -> Matrix:
    """Orthonormal basis [V, k] of the columns' span, k its numerical rank."""
    u, s, _ = np.linalg.svd(table, full_matrices=False)
    return u[:, s > s.max(initial=0.0) * max(table.shape) * np.finfo(np.float64).eps]


def _residual(table: Matrix, basis: Matrix) -> float:
    return float(np.linalg.norm(table - basis @ (basis.T @ table)) / np.linalg.norm(table))
