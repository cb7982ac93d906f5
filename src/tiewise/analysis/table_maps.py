"""Maps W [d1, d2] that carry the rows of one table to those of another, from d×d products alone.

orthogonal     argmin ‖A W − B‖ over W with orthonormal rows or columns: U Vᵀ of AᵀB = U S Vᵀ (Schönemann 1966)
linear         least squares: (AᵀA)⁺ AᵀB
reduced rank   least squares over W of rank r: the linear map times V_r V_rᵀ, the leading eigenvectors of
               BᵀA (AᵀA)⁺ AᵀB (Izenman 1975)

What alignment scores are by chance: for two independent Gaussian tables, n rows, d1 and d2 columns, centred.

A fitted map follows noise. On the rows that it was fitted on, the mean cosine is then not 0 but, for n ≫ d,

    linear         √(d1/n): a least-squares fit of noise returns H b with the projection H of rank d1; a row's own
                   share of it is h, that of all others h(1−h), so that its cosine is h/√h = √h with h = d1/n
    reduced rank   √(E Σ_{j≤r} s_j² / (n·d2)): the r largest of the squared singular values of a Gaussian d1 × d2 matrix
    orthogonal     ‖G‖_* / √(n·d2·min(d1, d2)) with the nuclear norm of a Gaussian G [d1, d2], as Σ cosines = ‖AᵀB‖_*
                   over the two norms; for d1 = d2 = d it is (8/3π)·√(d/n)

Singular values are those of the Marchenko-Pastur law. On held-out rows the mean is 0 with deviation 1/√(n·d2).

Fit maps between two tables on some of their paired rows, and score them row by row on any others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.row_pairs import Order, Paired
from tiewise.analysis.row_products import Matrix, Products, measured_error
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import progress

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
    """(maps that apply, (map, why not) of those that do not) for tables of the given widths and rows to fit on."""
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
    """(products, norms of A's rows, of B's, measured relative error) over the given pairs."""
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
