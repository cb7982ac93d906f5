"""Distance of two tables' column spaces, as Inan, Khosravi and Socher measure it in §6.2.

A table [V, E] has E columns, each a vector over the words; their span contains all logits that a head can give. Two
tables with equal spans differ by a matrix [E, E] that the body can absorb. The paper shows that the augmented loss
leads to equal spans (arXiv:1611.01462, §4).

With orthonormal bases Q_a [V, k_a], Q_b [V, k_b] of the two spans, k = min(k_a, k_b), and θ the principal angles:

    distance = √(1 − ‖Q_aᵀ Q_b‖²_F / k) = √(mean sin² θ)                 0: one contains the other; 1: orthogonal
    residual(a | b) = ‖a − Q_b Q_bᵀ a‖_F / ‖a‖_F                          the part of a outside b's span

The distance gives every direction equal weight, so it is ‖P_a − P_b‖_F / √(2k) for equal ranks. The residual weighs
directions by the table's norm along them. For unrelated tables of V ≫ E rows, both are √(1 − E/V): near 1.
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
        residual_a: the part of a's norm outside b's span.
        residual_b: the part of b's norm outside a's span.
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
        """Return the fields as JSON values."""
        return {**vars(self), "ranks": list(self.ranks)}


def subspace_distance(a: ArrayLike, b: ArrayLike) -> SubspaceDistance:
    """Measure the distance of two tables' column spans.

    Args:
        a: [V, E_a], row = word.
        b: [V, E_b], with the same words.

    Returns:
        Distances of the spans, and the residual of each table.

    Raises:
        DataError: the tables have different V, a value is not finite, or a table is zero.
    """
    tables = [np.asarray(table, np.float64) for table in (a, b)]
    if any(table.ndim != 2 for table in tables) or len(tables[0]) != len(tables[1]):
        shapes = " and ".join(str(table.shape) for table in tables)
        raise DataError(f"tables of shapes {shapes} have no common words", "compare tables [V, E] of one vocabulary")
    if not all(np.isfinite(table).all() for table in tables):
        raise DataError("a table has values that are not finite", "check what was trained")
    basis_a, basis_b = (_basis(table) for table in tables)
    if not basis_a.shape[1] or not basis_b.shape[1]:
        raise DataError("a table is zero and spans nothing", "check what was trained")
    k = min(basis_a.shape[1], basis_b.shape[1])
    # sines of the part outside the other span; from cosines, √(1 − c²) would lose small angles
    narrow, wide = (basis_a, basis_b) if basis_a.shape[1] == k else (basis_b, basis_a)
    sines = np.linalg.svd(narrow - wide @ (wide.T @ narrow), compute_uv=False)
    sines = np.clip(sines, 0.0, 1.0)
    return SubspaceDistance(
        distance=float(np.sqrt(np.mean(np.square(sines)))),
        largest=float(sines.max()),
        residual_a=_residual(tables[0], basis_b),
        residual_b=_residual(tables[1], basis_a),
        chance=math.sqrt(1 - max(basis_a.shape[1], basis_b.shape[1]) / len(basis_a)),
        ranks=(basis_a.shape[1], basis_b.shape[1]),
    )


def _basis(table: Matrix) -> Matrix:
    """Return an orthonormal basis [V, k] of the columns' span, where k is its numerical rank."""
    u, s, _ = np.linalg.svd(table, full_matrices=False)
    return u[:, s > s.max(initial=0.0) * max(table.shape) * np.finfo(np.float64).eps]


def _residual(table: Matrix, basis: Matrix) -> float:
    """Return the part of the table's norm outside the basis."""
    return float(np.linalg.norm(table - basis @ (basis.T @ table)) / np.linalg.norm(table))
