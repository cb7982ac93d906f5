"""Maps between two tables, fitted to some of their paired rows from d×d products alone, and what they reach by chance.

    orthogonal     argmin ‖A W − B‖ over W with orthonormal rows or columns: U Vᵀ of AᵀB = U S Vᵀ (Schönemann 1966)
    linear         least squares: (AᵀA)⁺ AᵀB
    reduced rank   least squares over W of rank r: the linear map times V_r V_rᵀ, the leading eigenvectors of
                   BᵀA (AᵀA)⁺ AᵀB (Izenman 1975)

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

from tiewise.analysis.paired_rows import Matrix, Order, Paired
from tiewise.core.errors import CheckpointError
from tiewise.core.long_work import progress

IDENTITY, ORTHOGONAL, LINEAR = "identity", "orthogonal", "linear"
CENTRED, RAW = "centred", "raw"
FP64_WORK = 2e10  # multiplications up to which fp64 costs seconds at most
LARGE = 2e11  # rows × d²: from here on `AlignSettings.sized` permutes once
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


def best_map(name: str, cross: Matrix, inverse: Matrix | None) -> Matrix:
    """Return the map [d1, d2] of this name from AᵀB, and from (AᵀA)⁺ [d1, d1] where it is of least squares."""
    if inverse is None or name == ORTHOGONAL:
        return orthogonal(cross)
    full = inverse @ cross
    if name == LINEAR:
        return full
    fitted = cross.T @ full
    leading = np.linalg.eigh((fitted + fitted.T) / 2)[1][:, -rank_of(name) :]
    return (full @ leading) @ leading.T


def law(d1: int, d2: int) -> tuple[Matrix, Matrix]:
    """Return (x, weight): the Marchenko-Pastur law of s²/max(d1, d2), falling, over x = 1 + β + 2√β·cos θ."""
    beta = min(d1, d2) / max(d1, d2)
    theta = (np.arange(_STEPS) + 0.5) * (math.pi / _STEPS)
    x = 1 + beta + 2 * math.sqrt(beta) * np.cos(theta)
    return x, 2 * np.sin(theta) ** 2 / (math.pi * x) * (math.pi / _STEPS)


def fitted_chance(name: str, n: int, d1: int, d2: int) -> float:
    """Mean cosine of n rows after the best map of this name, fitted on them, by chance."""
    small, large = sorted((d1, d2))
    if name == IDENTITY:
        return 0.0
    if name == LINEAR:
        return min(1.0, math.sqrt(d1 / n))
    x, weight = law(d1, d2)
    if name == ORTHOGONAL:
        nuclear = small * math.sqrt(large) * float((np.sqrt(x) * weight).sum())
        return min(1.0, nuclear / math.sqrt(n * d2 * small))
    before = np.concatenate([[0.0], np.cumsum(weight)[:-1]])
    taken = np.clip(rank_of(name) / small - before, 0, weight)
    return min(1.0, math.sqrt(small * large * float((x * taken).sum()) / (n * d2)))


def rank_of(name: str) -> int:
    """The rank of the map "rank 8"."""
    return int(name.removeprefix("rank "))


@dataclass(frozen=True)
class AlignSettings:
    """What to measure, and on how many rows."""

    maps: tuple[str, ...] = (IDENTITY, ORTHOGONAL, LINEAR)  # of identity, orthogonal and linear
    ranks: tuple[int, ...] = ()  # ranks of reduced-rank maps
    raw: bool = False  # fit maps to the rows as they are as well, not only to centred rows
    # share of the pairs that no map is fitted on; at most half. 0 fits maps on all pairs and scores all of them, as
    # published scores do; there are no held-out scores then
    held_out: float = 0.2
    scored: int = 8192  # at most so many pairs are held out, and so many of the fitting ones scored beside them
    permutations: int = 3  # refits of the null
    neighbours: int = 10  # k; 0 leaves neighbours out
    sampled: int = 20_000  # at most so many rows for neighbours
    subspaces: tuple[int, ...] = (16, 64)  # numbers of leading directions to compare
    precision: str = "auto"  # fp32 or fp64 products; auto takes fp64 where it costs seconds
    seed: int = 0  # of the split, the samples and the permutations

    @classmethod
    def sized(cls, pairs: int, width: int, seed: int = 0, held_out: float = held_out) -> AlignSettings:
        """Return settings for tables of this size: one permutation in place of three for large ones."""
        return cls(seed=seed, held_out=held_out, permutations=1 if pairs * width**2 > LARGE else cls.permutations)

    def dtype(self, pairs: int, widths: tuple[int, int]) -> type[np.floating]:
        """Type in which rows are multiplied."""
        if self.precision not in ("auto", "fp32", "fp64"):
            raise CheckpointError(f"no precision is called {self.precision}", "choose of auto, fp32 and fp64")
        few = self.precision == "auto" and pairs * sum(widths) ** 2 <= FP64_WORK
        return np.float64 if few or self.precision == "fp64" else np.float32

    def sample(self, pairs: int) -> tuple[Order, int]:
        """(at most `sampled` of the pairs, at random and sorted; how many neighbours each has among them)."""
        drawn = np.random.default_rng([self.seed, 2]).choice(pairs, min(self.sampled, pairs), replace=False)
        return np.sort(drawn), min(self.neighbours, len(drawn) - 1)


@dataclass(frozen=True)
class Fitted:
    """A map [d1, d2] (None: identity) of rows less `shift_a` [d1] onto rows less `shift_b` [d2]; zeros where raw."""

    name: str
    view: str
    matrix: Matrix | None
    shift_a: Matrix
    shift_b: Matrix

    def cosines(self, a: NDArray, b: NDArray) -> Matrix:
        """Cosine of each mapped row of a [n, d1] with its row of b [n, d2]; 0 where either is zero."""
        x, y = a - self.shift_a.astype(a.dtype), b - self.shift_b.astype(b.dtype)
        x = x if self.matrix is None else x @ self.matrix.astype(a.dtype)
        dot, left, right = (np.einsum("ij,ij->i", *p).astype(np.float64) for p in ((x, y), (x, x), (y, y)))
        scale = np.sqrt(left * right)
        return np.divide(dot, scale, out=np.zeros_like(dot), where=scale > 0)


class Fitter:
    """Fits maps to some of the pairs; what depends on A alone is computed once for all permutations."""

    def __init__(self, paired: Paired, settings: AlignSettings) -> None:
        if not 0 <= settings.held_out <= 0.5:
            fix = "use a share from 0 (fit and score all rows) to 0.5"
            raise CheckpointError(f"held_out = {settings.held_out}", fix)
        count = len(paired.pairs)
        order = np.random.default_rng(settings.seed).permutation(count)
        out = max(1, min(settings.scored, int(settings.held_out * count), count // 2)) if settings.held_out else 0
        self.paired, self.rows, self.held = paired, np.sort(order[out:]), np.sort(order[:out])
        self.names, self.left_out = _applying(settings, paired.widths, len(self.rows))
        self.products, self.norms, self.error = paired.sums(self.rows)
        self.views = (CENTRED, RAW) if settings.raw else (CENTRED,)
        self.means = self.products.mean_a, self.products.mean_b
        self._inverse: dict[str, Matrix] = {}
        if set(self.names) - {IDENTITY, ORTHOGONAL}:
            for view in self.views:
                less = self.products.rows * np.outer(self.means[0], self.means[0]) if view == CENTRED else 0.0
                self._inverse[view] = pseudo_inverse(self.products.gram_a - less, self.error)

    def fit(self, cross: Matrix) -> list[Fitted]:
        """Return every map, fitted to AᵀB [d1, d2] of the fitting rows in some order."""
        shifts = {CENTRED: self.means, RAW: (np.zeros_like(self.means[0]), np.zeros_like(self.means[1]))}
        made = [Fitted(IDENTITY, view, None, *shifts[view]) for view in (CENTRED, RAW)]  # costs nothing: both ways
        made = made if IDENTITY in self.names else []
        fitted = [name for name in self.names if name != IDENTITY]
        total = len(made) + len(fitted) * len(self.views)
        for view in self.views:
            product = cross - self.products.rows * np.outer(*self.means) if view == CENTRED else cross
            for name in fitted:
                made.append(Fitted(name, view, best_map(name, product, self._inverse.get(view)), *shifts[view]))
                progress("fitting maps", len(made), total)
        return made

    def cosines(self, maps: list[Fitted], first: Order, second: Order) -> list[Matrix]:
        """Cosines [n] of each map, over rows of A at pairs `first` and of B at pairs `second`."""
        found = [np.zeros(len(first)) for _ in maps]
        for piece in self.paired.slices(len(first)):
            a, b = self.paired.take(first[piece], second[piece])
            for values, fitted in zip(found, maps, strict=True):
                values[piece] = fitted.cosines(a, b)
            progress("scoring", piece.stop, len(first))
        return found


def _applying(settings: AlignSettings, widths: tuple[int, int], rows: int) -> tuple[list[str], tuple[str, ...]]:
    """(maps that apply to tables of these widths and rows to fit on, why the others do not)."""
    (d1, d2), kept, left = widths, [], []
    for name in [*settings.maps, *(f"rank {rank}" for rank in settings.ranks)]:
        if name not in (IDENTITY, ORTHOGONAL, LINEAR) and not name.startswith("rank "):
            raise CheckpointError(f"no map is called {name}", "choose of identity, orthogonal and linear")
        if name == IDENTITY:
            why = "" if d1 == d2 else f"widths {d1} and {d2} differ"
        elif name.startswith("rank ") and not 0 < rank_of(name) <= min(d1, d2):
            why = f"ranks go from 1 to {min(d1, d2)}"
        else:
            needed = max(d1, d2) if name == ORTHOGONAL else d1
            why = "" if rows > needed else f"{rows:,} rows to fit on, and more than {needed:,} are needed"
        kept += [] if why else [name]
        left += [f"no {name} map: {why}"] if why else []
    if not kept:
        others = "orthogonal, linear and reduced-rank maps apply"
        raise CheckpointError("; ".join(left), others if d1 != d2 and rows > max(d1, d2) else "give more rows")
    return kept, tuple(left)
