"""Fit maps between two tables on some of their paired rows, and score them row by row on any others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.cross_products import Matrix, Products, measured_error
from tiewise.analysis.nulls import linear_chance, orthogonal_chance, reduced_chance
from tiewise.analysis.paired_rows import Order, Paired
from tiewise.analysis.procrustes import linear, orthogonal, pseudo_inverse, reduced_rank
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import progress

IDENTITY, ORTHOGONAL, LINEAR = "identity", "orthogonal", "linear"
CENTRED, RAW = "centred", "raw"


@dataclass(frozen=True)
class Fitted:
    """A map [d1, d2] (None: identity) of rows less `shift_a` [d1] onto rows less `shift_b` [d2]; zeros where raw."""

    name: str
    view: str
    matrix: Matrix | None
    shift_a: Matrix
    shift_b: Matrix

    def cosines(self, a: NDArray, b: NDArray) -> NDArray[np.float64]:
        """Cosine of each mapped row of a [n, d1] with its row of b [n, d2]; 0 where either is zero."""
        x, y = a - self.shift_a.astype(a.dtype), b - self.shift_b.astype(b.dtype)
        x = x if self.matrix is None else x @ self.matrix.astype(a.dtype)
        dot, left, right = (np.einsum("ij,ij->i", *p).astype(np.float64) for p in ((x, y), (x, x), (y, y)))
        scale = np.sqrt(left * right)
        return np.divide(dot, scale, out=np.zeros_like(dot), where=scale > 0)


def choose(maps: Sequence[str], ranks: Sequence[int], widths: tuple[int, int], rows: int) -> tuple[list, list]:
    """(maps that apply, (map, why not) of those that do not) for tables of the given widths and rows to fit on.

    Raises:
        CheckpointError: a map that does not exist, or none that applies.
    """
    (d1, d2), kept, left = widths, [], []
    for name in [*maps, *(f"rank {rank}" for rank in ranks)]:
        if name not in (IDENTITY, ORTHOGONAL, LINEAR) and not name.startswith("rank "):
            raise CheckpointError(f"no map is called {name}", "choose of identity, orthogonal and linear")
        if name == IDENTITY:
            why = "" if d1 == d2 else f"widths {d1} and {d2} differ"
        elif name.startswith("rank ") and not 0 < int(name[5:]) <= min(d1, d2):
            why = f"ranks go from 1 to {min(d1, d2)}"
        else:
            needed = max(d1, d2) if name == ORTHOGONAL else d1
            why = "" if rows > needed else f"{rows:,} rows to fit on, and more than {needed:,} are needed"
        kept += [] if why else [name]
        left += [(name, why)] if why else []
    if not kept:
        others = (
            "orthogonal, linear and reduced-rank maps apply" if d1 != d2 and rows > max(d1, d2) else "give more rows"
        )
        raise CheckpointError("; ".join(f"no {name} map: {why}" for name, why in left), others)
    return kept, left


class Fitter:
    """Fits maps to the products of the fitting rows; what depends on A alone is computed once for all permutations.

    Args:
        products: sums over the fitting rows, not centred.
        names: maps that apply, of `choose`.
        raw: also fit without centring. Identity is always given both ways.
        error: relative error of the products, of `sums`.
    """

    def __init__(self, products: Products, names: Sequence[str], raw: bool, error: float) -> None:
        self.names, self.rows = names, products.rows
        self.mean_a, self.mean_b = products.mean_a, products.mean_b
        self.views = (CENTRED, RAW) if raw else (CENTRED,)
        self.cross = products.cross
        self._inverse: dict[str, Matrix] = {}
        if any(name == LINEAR or name.startswith("rank ") for name in names):
            less = products.rows * np.outer(self.mean_a, self.mean_a)
            for view in self.views:
                gram = products.gram_a - less if view == CENTRED else products.gram_a
                self._inverse[view] = pseudo_inverse(gram, error)

    def fit(self, cross: Matrix) -> list[Fitted]:
        """Return every map, fitted to AᵀB [d1, d2] of the fitting rows in some order."""
        zero = np.zeros_like(self.mean_a), np.zeros_like(self.mean_b)
        means = self.mean_a, self.mean_b
        made = [Fitted(IDENTITY, view, None, *(means if view == CENTRED else zero)) for view in (CENTRED, RAW)]
        made = made if IDENTITY in self.names else []
        fitted = [name for name in self.names if name != IDENTITY]
        for view in self.views:
            product = cross - self.rows * np.outer(*means) if view == CENTRED else cross
            for name in fitted:
                matrix = self._matrix(name, view, product)
                made.append(Fitted(name, view, matrix, *(means if view == CENTRED else zero)))
                progress("fitting maps", len(made), len(fitted) * len(self.views) + 2 * (IDENTITY in self.names))
        return made

    def _matrix(self, name: str, view: str, product: Matrix) -> Matrix:
        if name == ORTHOGONAL:
            return orthogonal(product)
        if name == LINEAR:
            return linear(self._inverse[view], product)
        return reduced_rank(self._inverse[view], product, int(name[5:]))


def chance(name: str, rows: int, widths: tuple[int, int]) -> float:
    """Mean cosine by chance on the rows that a map was fitted on (see `nulls`)."""
    if name == IDENTITY:
        return 0.0
    if name == ORTHOGONAL:
        return orthogonal_chance(rows, *widths)
    return linear_chance(rows, widths[0]) if name == LINEAR else reduced_chance(rows, *widths, int(name[5:]))


def split(count: int, held_out: float, most: int, seed: int) -> tuple[Order, Order]:
    """(pairs to fit on, pairs held out), both sorted; held out are none for 0, else one to `most` and half of all.

    Raises:
        CheckpointError: a share below zero or above one half.
    """
    if not 0 <= held_out <= 0.5:
        raise CheckpointError(f"held_out = {held_out}", "use a share from 0 (fit and score all rows) to 0.5")
    order = np.random.default_rng(seed).permutation(count)
    held = max(1, min(most, int(held_out * count), count // 2)) if held_out else 0
    return np.sort(order[held:]), np.sort(order[:held])


def sums(paired: Paired, which: Order) -> tuple[Products, NDArray, NDArray, float]:
    """(products, norms of A's rows, of B's, measured relative error) over the given pairs.

    Raises:
        CheckpointError: a row that is not finite.
    """
    beside = paired.beside
    products = Products.nothing(*paired.widths, 0 if beside is None else beside.shape[1])
    norms_a, norms_b, error = np.zeros(len(which)), np.zeros(len(which)), 0.0
    for piece in paired.slices(len(which)):
        a, b = paired.take(which[piece], which[piece])
        for rows, norms, values in ((paired.a, norms_a, a), (paired.b, norms_b, b)):
            norms[piece] = np.sqrt(np.einsum("ij,ij->i", values, values, dtype=np.float64))
            if not np.isfinite(norms[piece]).all():
                raise CheckpointError(f"{rows.name}: rows with NaN or infinite values", "mask them out")
        products.add(a, b, None if beside is None else beside[which[piece]])
        error = error or measured_error(a[:1024], b[:1024])
        progress("products", piece.stop, len(which))
    return products, norms_a, norms_b, error


def permuted_cross(paired: Paired, first: Order, second: Order) -> Matrix:
    """AᵀB [d1, d2] over rows of A at pairs `first` and of B at pairs `second`."""
    cross = np.zeros(paired.widths)
    for piece in paired.slices(len(first)):
        a, b = paired.take(first[piece], second[piece])
        cross += a.T @ b
        progress("permuted products", piece.stop, len(first))
    return cross


def score(paired: Paired, maps: Sequence[Fitted], first: Order, second: Order) -> list[NDArray]:
    """Cosines [n] of each map, over rows of A at pairs `first` and of B at pairs `second`."""
    found = [np.zeros(len(first)) for _ in maps]
    for piece in paired.slices(len(first)):
        a, b = paired.take(first[piece], second[piece])
        for values, fitted in zip(found, maps, strict=True):
            values[piece] = fitted.cosines(a, b)
        progress("scoring", piece.stop, len(first))
    return found
