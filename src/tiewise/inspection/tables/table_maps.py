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

AᵀA, BᵀB and AᵀB, summed over pieces of the rows, are all that maps and spectra need. A piece's product is computed in
fp32 or fp64 and added in fp64, so that in fp32 the error is that of one piece's product.

Rows of one frequency are alike in any language model's tables, whatever they mean. To take that out, each column is
regressed on powers of f = log(count + 1) over the paired rows: a projection, whose directions q [n, k] over tokens,
orthonormal and orthogonal to 1, are summed beside the rest as AᵀQ and BᵀQ. The products of what is left are then exact
corrections of the same sums. One power takes out a straight line only; three follow a curve.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.core.errors import CheckpointError, DataError, progress
from tiewise.inspection.tables.model_tables import Ids, Pairs, TokenTable

Matrix = NDArray[np.float64]
FEWEST = 16  # paired rows below which nothing is said
LINE, CURVE = 1, 3  # powers of f that are taken out
IDENTITY, ORTHOGONAL, LINEAR = "identity", "orthogonal", "linear"
CENTRED, RAW = "centred", "raw"
FP64_WORK = 2e10  # multiplications up to which fp64 costs seconds at most
LARGE = 2e11  # rows × d²: from here on `AlignSettings.sized` permutes once
SMALL = 512  # up to here a singular value decomposition takes no time worth saving
WELL = 1e-10  # of squared singular values, smallest to largest, above which their eigenvalues are accurate enough
CHUNK_BYTES = 40 * 2**20  # of a piece of rows in fp32
_STEPS = 20_000  # of the integrals over the law


@dataclass
class Products:
    """Sums over n pairs of rows a_i [d1], b_i [d2] and, beside them, q_i [k], in fp64."""

    rows: int  # n
    sum_a: Matrix  # Σ a_i, [d1]
    sum_b: Matrix  # [d2]
    gram_a: Matrix  # Σ a_i a_iᵀ, [d1, d1]
    gram_b: Matrix  # [d2, d2]
    cross: Matrix  # Σ a_i b_iᵀ, [d1, d2]
    along_a: Matrix  # Σ a_i q_iᵀ, [d1, k]
    along_b: Matrix  # [d2, k]

    @classmethod
    def nothing(cls, d1: int, d2: int, k: int = 0) -> Products:
        """Sums over no rows."""
        shapes = (d1,), (d2,), (d1, d1), (d2, d2), (d1, d2), (d1, k), (d2, k)
        return cls(0, *(np.zeros(shape) for shape in shapes))

    def add(self, a: NDArray, b: NDArray, q: NDArray) -> None:
        """Add rows a [n, d1], b [n, d2] and q [n, k], multiplied in the type of a and b."""
        self.rows += len(a)
        self.sum_a += a.sum(axis=0, dtype=np.float64)
        self.sum_b += b.sum(axis=0, dtype=np.float64)
        totals = self.gram_a, self.gram_b, self.cross, self.along_a, self.along_b
        for total, x, y in zip(totals, (a, b, a, a, b), (a, b, b, q, q), strict=True):
            total += x.T @ y.astype(x.dtype, copy=False)

    @property
    def means(self) -> tuple[Matrix, Matrix]:
        """Mean rows of A [d1] and of B [d2]."""
        return self.sum_a / max(1, self.rows), self.sum_b / max(1, self.rows)

    def without(self, k: int = 0) -> Products:
        """Return the sums of rows less their mean, the first k directions taken out of every column: (1 − QQᵀ)A, …

        All rows over which the directions are orthonormal, and orthogonal to 1, must have been added.
        """
        (a, b), n, along_a, along_b = self.means, self.rows, self.along_a[:, :k], self.along_b[:, :k]
        return Products(
            n,
            np.zeros_like(a),
            np.zeros_like(b),
            self.gram_a - n * np.outer(a, a) - along_a @ along_a.T,
            self.gram_b - n * np.outer(b, b) - along_b @ along_b.T,
            self.cross - n * np.outer(a, b) - along_a @ along_b.T,
            self.along_a[:, k:],
            self.along_b[:, k:],
        )


def directions(counts: ArrayLike) -> Matrix:
    """Return q [n, k ≤ CURVE] of the counts of n tokens: the first j columns span f, …, f^j beside 1, for any j ≤ k.

    k is less where there are too few different counts: then a lower power says all of it.
    """
    given = np.asarray(counts, np.float64)
    if given.ndim != 1 or not np.isfinite(given).all() or (given < 0).any():
        raise DataError("counts of tokens must be one number of 0 or more for each", "count them in the training text")
    f = np.log1p(given)
    spread = float(np.ptp(f))
    x = (2 * f - f.max() - f.min()) / spread if spread else np.zeros_like(f)
    powers = np.vander(x, 1 + min(CURVE, len(np.unique(f)) - 1), increasing=True)
    return np.linalg.qr(powers)[0][:, 1:]


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

    def sample(self, pairs: int) -> tuple[Ids, int]:
        """(at most `sampled` of the pairs, at random and sorted; how many neighbours each has among them)."""
        drawn = np.random.default_rng([self.seed, 2]).choice(pairs, min(self.sampled, pairs), replace=False)
        return np.sort(drawn), min(self.neighbours, len(drawn) - 1)


Key = tuple[str, str]  # a map's name, and `centred` or `raw`: whether rows are taken less their mean
FittedMap = tuple[Matrix | None, Matrix, Matrix]  # [d1, d2], None for identity; what rows of A and B are taken less


class Fitter:
    """Two tables, their pairs split into `rows` that maps are fitted on and `held` ones, and passes over either.

    What depends on A alone is computed once for all permutations.

    Raises:
        CheckpointError: fewer than 16 pairs, rows that a table does not have or that are not finite, no map that
            applies, or a setting that there is not.
    """

    def __init__(
        self, a: TokenTable, b: TokenTable, pairs: Pairs, settings: AlignSettings, beside: Matrix | None = None
    ) -> None:
        for table, wanted in ((a, pairs.a), (b, pairs.b)):
            if len(wanted) and int(wanted.max()) >= table.rows:
                what = f"{table.name} has {table.rows:,} rows and its vocabulary names row {int(wanted.max()):,}"
                raise CheckpointError(what, "give the tokenizer that belongs to the table")
        if (count := len(pairs)) < FEWEST:
            what = f"{count} paired rows are too few to align"
            raise CheckpointError(what, f"at least {FEWEST} tokens must be in both")
        if not 0 <= settings.held_out <= 0.5:
            fix = "use a share from 0 (fit and score all rows) to 0.5"
            raise CheckpointError(f"held_out = {settings.held_out}", fix)
        self.a, self.b, self.pairs, self.widths = a, b, pairs, (a.width, b.width)
        self.beside = np.zeros((count, 0)) if beside is None else beside  # summed with both tables [pairs, k]
        self.dtype = settings.dtype(count, self.widths)
        order = np.random.default_rng(settings.seed).permutation(count)
        out = max(1, min(settings.scored, int(settings.held_out * count), count // 2)) if settings.held_out else 0
        self.rows, self.held = np.sort(order[out:]), np.sort(order[:out])
        self.names, self.left_out = _applying(settings, self.widths, len(self.rows))
        self.products, self.norms, self.error = self.sums(self.rows)
        means = self.products.means
        self.shifts = {CENTRED: means, RAW: (np.zeros(a.width), np.zeros(b.width))}
        self.views = (CENTRED, RAW) if settings.raw else (CENTRED,)
        self._inverse: dict[str, Matrix] = {}
        for view in self.views if set(self.names) - {IDENTITY, ORTHOGONAL} else ():
            shift, _ = self.shifts[view]
            gram = self.products.gram_a - len(self.rows) * np.outer(shift, shift)
            self._inverse[view] = pseudo_inverse(gram, self.error)

    def pieces(self, first: Ids, second: Ids, doing: str) -> Iterator[tuple[slice, NDArray, NDArray]]:
        """(place, rows of A [n, d1] at pairs `first`, rows of B [n, d2] at pairs `second`), about CHUNK_BYTES each."""
        step = max(64, CHUNK_BYTES // (4 * max(1, *self.widths)))
        for start in range(0, len(first), step):
            piece = slice(start, min(start + step, len(first)))
            a, b = self.pairs.a[first[piece]], self.pairs.b[second[piece]]
            yield piece, self.a.take(a, self.dtype), self.b.take(b, self.dtype)
            progress(doing, piece.stop, len(first))

    def sums(self, which: Ids, onto: Products | None = None) -> tuple[Products, tuple[Matrix, Matrix], float]:
        """(products, norms of A's and of B's rows, relative error of a product) over the given pairs.

        `onto`: products of other pairs, to which these are added in place.
        The error is ‖AᵀB as computed − AᵀB in fp64‖ / (‖A‖·‖B‖) of the first 1,024 rows; 0 where all is fp64.
        """
        products = onto or Products.nothing(*self.widths, self.beside.shape[1])
        norms, error = (np.zeros(len(which)), np.zeros(len(which))), 0.0
        for piece, a, b in self.pieces(which, which, "products"):
            for table, sizes, values in zip((self.a, self.b), norms, (a, b), strict=True):
                sizes[piece] = np.sqrt(np.einsum("ij,ij->i", values, values, dtype=np.float64))
                if not np.isfinite(sizes[piece]).all():
                    raise CheckpointError(f"{table.name}: rows with NaN or infinite values", "mask them out")
            products.add(a, b, self.beside[which[piece]])
            if self.dtype != np.float64 and not error:
                wide_a, wide_b = a[:1024].astype(np.float64), b[:1024].astype(np.float64)
                scale = float(np.linalg.norm(wide_a) * np.linalg.norm(wide_b))
                off = float(np.linalg.norm(a[:1024].T @ b[:1024] - wide_a.T @ wide_b))
                error = off / scale if scale else 0.0
        return products, norms, error

    def fit(self, partners: Ids | None = None) -> dict[Key, FittedMap]:
        """Return every map of the fitting rows of A onto their own rows of B, or onto those at pairs `partners`."""
        cross = self.products.cross
        if partners is not None and self.names != [IDENTITY]:
            cross = np.zeros(self.widths)
            for _, a, b in self.pieces(self.rows, partners, "permuted products"):
                cross += a.T @ b
        views = {CENTRED: cross - len(self.rows) * np.outer(*self.shifts[CENTRED]), RAW: cross}
        # identity costs nothing: in both views
        keys = [(name, view) for name in self.names for view in views if name == IDENTITY or view in self.views]
        made: dict[Key, FittedMap] = {}
        for name, view in keys:
            matrix = None if name == IDENTITY else best_map(name, views[view], self._inverse.get(view))
            made[name, view] = matrix, *self.shifts[view]
            progress("fitting maps", len(made), len(keys))
        return made

    def cosines(self, maps: dict[Key, FittedMap], first: Ids, second: Ids) -> dict[Key, Matrix]:
        """Cosines [n] of mapped rows of A at pairs `first` with rows of B at pairs `second`; 0 where either is zero."""
        found = {key: np.zeros(len(first)) for key in maps}
        for piece, a, b in self.pieces(first, second, "scoring"):
            for key, (matrix, shift_a, shift_b) in maps.items():
                x, y = a - shift_a.astype(a.dtype), b - shift_b.astype(b.dtype)
                x = x if matrix is None else x @ matrix.astype(a.dtype)
                dot, left, right = (np.einsum("ij,ij->i", *p).astype(np.float64) for p in ((x, y), (x, x), (y, y)))
                scale = np.sqrt(left * right)
                found[key][piece] = np.divide(dot, scale, out=np.zeros_like(dot), where=scale > 0)
        return found


def _applying(settings: AlignSettings, widths: tuple[int, int], rows: int) -> tuple[list[str], tuple[str, ...]]:
    """(maps that apply to tables of these widths and rows to fit on, why the others do not)."""
    (d1, d2), why = widths, dict[str, str]()
    for name in [*settings.maps, *(f"rank {rank}" for rank in settings.ranks)]:
        needed = max(d1, d2) if name == ORTHOGONAL else d1
        if name == IDENTITY:
            why[name] = "" if d1 == d2 else f"widths {d1} and {d2} differ"
        elif name not in (ORTHOGONAL, LINEAR) and not name.startswith("rank "):
            raise CheckpointError(f"no map is called {name}", "choose of identity, orthogonal and linear")
        elif name.startswith("rank ") and not 0 < rank_of(name) <= min(d1, d2):
            why[name] = f"ranks go from 1 to {min(d1, d2)}"
        else:
            why[name] = "" if rows > needed else f"{rows:,} rows to fit on, and more than {needed:,} are needed"
    left = tuple(f"no {name} map: {reason}" for name, reason in why.items() if reason)
    if len(left) == len(why):
        others = "orthogonal, linear and reduced-rank maps apply"
        raise CheckpointError("; ".join(left), others if d1 != d2 and rows > max(d1, d2) else "give more rows")
    return [name for name, reason in why.items() if not reason], left
