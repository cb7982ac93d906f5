"""Maps between two tables, fitted to some of their paired rows, and their chance levels.

    orthogonal     argmin ‖A W − B‖ over W with orthonormal rows or columns: U Vᵀ of AᵀB = U S Vᵀ (Schönemann 1966)
    linear         least squares: (AᵀA)⁺ AᵀB
    reduced rank   least squares over W of rank r: the linear map times V_r V_rᵀ, the leading eigenvectors of
                   BᵀA (AᵀA)⁺ AᵀB (Izenman 1975)

A fitted map follows noise. Take two independent Gaussian tables (n rows, d1 and d2 columns, centred). On the rows that
the map was fitted on, their mean cosine is not 0 but, for n ≫ d,

    linear         √(d1/n): a least-squares fit of noise returns H b with the projection H of rank d1; a row's own
                   share of it is h, that of all others h(1−h), so that its cosine is h/√h = √h with h = d1/n
    reduced rank   √(E Σ_{j≤r} s_j² / (n·d2)): the r largest of the squared singular values of a Gaussian d1 × d2 matrix
    orthogonal     ‖G‖_* / √(n·d2·min(d1, d2)) with the nuclear norm of a Gaussian G [d1, d2], as Σ cosines = ‖AᵀB‖_*
                   over the two norms; for d1 = d2 = d it is (8/3π)·√(d/n)

Singular values are those of the Marchenko-Pastur law. On held-out rows the mean is 0 with deviation 1/√(n·d2).

Maps and spectra need only AᵀA, BᵀB and AᵀB, summed over pieces of the rows. A piece's product is computed in fp32 or
fp64 and added in fp64, so that in fp32 the error is that of one piece's product.

In every language model's tables, rows of equally frequent tokens are alike, whatever the tokens mean. To remove this
effect, each column is regressed on powers of f = log(count + 1) over the paired rows. The regression is a projection
with directions q [n, powers] over tokens, orthonormal and orthogonal to 1. AᵀQ and BᵀQ are summed with the other
products. The products without frequency are then exact corrections of the same sums. One power removes a straight
line only; three follow a curve.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.core.errors import CheckpointError, DataError
from tiewise.core.progress import report_progress
from tiewise.inspection.tables.model_tables import Ids, Pairs, Rows, TokenTable

Matrix = NDArray[np.float64]
FEWEST = 16  # fewest paired rows that are aligned
LINE, CURVE = 1, 3  # powers of f that are removed
IDENTITY, ORTHOGONAL, LINEAR = "identity", "orthogonal", "linear"
RANK = "rank "  # prefix of the name of a reduced-rank map
CENTRED, RAW = "centred", "raw"
FP64_WORK = 2e10  # largest number of multiplications in fp64, which take seconds at most
LARGE = 2e11  # rows × d² from which `AlignSettings.sized` permutes once
SMALL = 512  # width up to which a singular value decomposition is fast enough
WELL = 1e-10  # smallest to largest squared singular value: above it, eigenvalues are accurate enough
CHUNK_BYTES = 40 * 2**20  # bytes of a piece of rows in fp32
_STEPS = 20_000  # steps of the integrals over the law


@dataclass
class Products:
    """Sums over n pairs of rows a_i [d1], b_i [d2] and q_i [powers], in fp64."""

    rows: int  # n, the number of pairs
    sum_a: Matrix  # Σ a_i, [d1]
    sum_b: Matrix  # [d2]
    gram_a: Matrix  # Σ a_i a_iᵀ, [d1, d1]
    gram_b: Matrix  # [d2, d2]
    cross: Matrix  # Σ a_i b_iᵀ, [d1, d2]
    along_a: Matrix  # Σ a_i q_iᵀ, [d1, powers]
    along_b: Matrix  # [d2, powers]

    @classmethod
    def nothing(cls, d1: int, d2: int, powers: int = 0) -> Products:
        """Return sums over no rows."""
        return cls(
            rows=0,
            sum_a=np.zeros(d1),
            sum_b=np.zeros(d2),
            gram_a=np.zeros((d1, d1)),
            gram_b=np.zeros((d2, d2)),
            cross=np.zeros((d1, d2)),
            along_a=np.zeros((d1, powers)),
            along_b=np.zeros((d2, powers)),
        )

    def add(self, a: Rows, b: Rows, q: Rows) -> None:
        """Add n paired rows, multiplied in the type of a and b.

        They are a [n, d1], b [n, d2] and q [n, powers].
        """
        self.rows += len(a)
        self.sum_a += a.sum(axis=0, dtype=np.float64)
        self.sum_b += b.sum(axis=0, dtype=np.float64)
        narrow: Rows = q.astype(a.dtype, copy=False)
        self.gram_a += a.T @ a
        self.gram_b += b.T @ b
        self.cross += a.T @ b
        self.along_a += a.T @ narrow
        self.along_b += b.T @ narrow

    @property
    def means(self) -> tuple[Matrix, Matrix]:
        """Return the mean rows of A [d1] and of B [d2]."""
        return self.sum_a / max(1, self.rows), self.sum_b / max(1, self.rows)

    def without(self, powers: int = 0) -> Products:
        """Return the sums of centred rows without the first `powers` directions: (1 − QQᵀ)A, …

        The directions are removed from every column. All rows over which they are orthonormal, and orthogonal to 1,
        must have been added.
        """
        (a, b), n = self.means, self.rows
        along_a, along_b = self.along_a[:, :powers], self.along_b[:, :powers]
        return Products(
            n,
            np.zeros_like(a),
            np.zeros_like(b),
            self.gram_a - n * np.outer(a, a) - along_a @ along_a.T,
            self.gram_b - n * np.outer(b, b) - along_b @ along_b.T,
            self.cross - n * np.outer(a, b) - along_a @ along_b.T,
            self.along_a[:, powers:],
            self.along_b[:, powers:],
        )


def directions(counts: ArrayLike) -> Matrix:
    """Return orthonormal powers q [n, powers ≤ CURVE] of log frequency for n token counts.

    For any j ≤ powers, the first j columns and 1 span 1, f, …, f^j. There are fewer columns if too few counts differ:
    then a lower power has the same span.
    """
    numbers = np.asarray(counts, np.float64)
    is_count = np.isfinite(numbers) & (numbers >= 0)
    if numbers.ndim != 1 or not is_count.all():
        raise DataError("counts of tokens must be one number of 0 or more for each", "count them in the training text")
    f = np.log1p(numbers)
    spread = float(np.ptp(f))
    x = np.zeros_like(f)
    if spread:
        x = (2 * f - f.max() - f.min()) / spread  # from −1 to 1, which keeps the powers well conditioned
    highest = min(CURVE, len(np.unique(f)) - 1)
    powers = np.vander(x, 1 + highest, increasing=True)
    basis, _ = np.linalg.qr(powers)
    return basis[:, 1:]


def orthogonal(cross: Matrix) -> Matrix:
    """Return the orthogonal (semi-orthogonal where d1 ≠ d2) map nearest to AᵀB [d1, d2].

    Large well-conditioned products use the eigenvectors of CᵀC, eight times faster than singular vectors. One
    Newton-Schulz
    step follows, which reduces the result's distance from orthogonal from at most ε/WELL, 2e-6, to its square.
    """
    if cross.shape[0] < cross.shape[1]:
        return orthogonal(cross.T).T
    if cross.shape[1] > SMALL:
        values, vectors = np.linalg.eigh(cross.T @ cross)
        if values[0] > WELL * values[-1]:
            nearly: Matrix = cross @ ((vectors / np.sqrt(values)) @ vectors.T)
            step: Matrix = 1.5 * nearly - 0.5 * nearly @ (nearly.T @ nearly)
            return step
    left, _, right = np.linalg.svd(cross, full_matrices=False)
    nearest: Matrix = left @ right
    return nearest


def pseudo_inverse(gram: Matrix, error: float = 0.0) -> Matrix:
    """Return (AᵀA)⁺ [d1, d1] of a Gram matrix with rounding errors.

    Its entries have errors of `error` times its trace, for example from fp32 products. Eigenvalues within that error,
    or
    below d1·ε of the largest, count as zero: their directions are noise.
    """
    values, vectors = np.linalg.eigh(gram)
    by_error = error * float(np.trace(gram))
    by_rounding = len(values) * np.finfo(np.float64).eps * values[-1]
    is_filled = values > max(by_error, by_rounding, 0.0)
    filled = vectors[:, is_filled]
    inverse: Matrix = (filled / values[is_filled]) @ filled.T
    return inverse


def best_map(name: str, cross: Matrix, inverse: Matrix | None) -> Matrix:
    """Return the map [d1, d2] of this name from AᵀB.

    Maps of least squares also need `inverse`, (AᵀA)⁺ [d1, d1].
    """
    if inverse is None or name == ORTHOGONAL:
        return orthogonal(cross)
    full = inverse @ cross
    if name == LINEAR:
        return full
    fitted = cross.T @ full
    _, rising = np.linalg.eigh((fitted + fitted.T) / 2)
    leading = rising[:, -rank_of(name) :]
    reduced: Matrix = (full @ leading) @ leading.T
    return reduced


def law(d1: int, d2: int) -> tuple[Matrix, Matrix]:
    """Return (x, weight): the Marchenko-Pastur law of s²/max(d1, d2), falling.

    x = 1 + β + 2√β·cos θ.
    """
    beta = min(d1, d2) / max(d1, d2)
    theta = (np.arange(_STEPS) + 0.5) * (math.pi / _STEPS)
    x = 1 + beta + 2 * math.sqrt(beta) * np.cos(theta)
    return x, 2 * np.sin(theta) ** 2 / (math.pi * x) * (math.pi / _STEPS)


def fitted_chance(name: str, n: int, d1: int, d2: int) -> float:
    """Return the chance level of a map on the n rows that it was fitted on.

    It is a mean cosine.
    """
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
    """Return the rank in a map's name: 8 for "rank 8"."""
    return int(name.removeprefix(RANK))


@dataclass(frozen=True)
class AlignSettings:
    """Settings of an alignment: the measures, and the number of rows."""

    maps: tuple[str, ...] = (IDENTITY, ORTHOGONAL, LINEAR)  # any of identity, orthogonal and linear
    ranks: tuple[int, ...] = ()  # ranks of reduced-rank maps
    raw: bool = False  # True: fit maps to uncentred rows too, not only to centred ones
    # share of the pairs that no map is fitted on, at most half; 0 fits maps on all pairs and scores all of them,
    # as published scores do, and there are no held-out scores
    held_out: float = 0.2
    scored: int = 8192  # most pairs that are held out, and most fitting pairs that are scored
    permutations: int = 3  # number of permutations of the null, each with refitted maps
    neighbours: int = 10  # number of nearest neighbours of each row; 0 leaves them out
    sampled: int = 20_000  # most rows for neighbours
    subspaces: tuple[int, ...] = (16, 64)  # numbers of leading directions to compare
    precision: str = "auto"  # fp32 or fp64 products; auto uses fp64 if it takes only seconds
    seed: int = 0  # of the split, the samples and the permutations

    @classmethod
    def sized(cls, pairs: int, width: int, seed: int = 0, held_out: float = held_out) -> AlignSettings:
        """Return settings for tables of this size: large ones get one permutation instead of three."""
        permutations = cls.permutations
        if pairs * width**2 > LARGE:
            permutations = 1
        return cls(seed=seed, held_out=held_out, permutations=permutations)

    def dtype(self, pairs: int, widths: tuple[int, int]) -> type[np.floating]:
        """Return the type in which rows are multiplied."""
        if self.precision not in ("auto", "fp32", "fp64"):
            raise CheckpointError(f"no precision is called {self.precision}", "choose of auto, fp32 and fp64")
        if self.precision == "auto":
            is_quick = pairs * sum(widths) ** 2 <= FP64_WORK
            return np.float64 if is_quick else np.float32
        return np.float64 if self.precision == "fp64" else np.float32

    def sample(self, pairs: int) -> tuple[Ids, int]:
        """Return (random sample of the pairs, sorted; number of neighbours of each within it).

        The sample has at most `sampled` pairs.
        """
        size = min(self.sampled, pairs)
        generator = np.random.default_rng([self.seed, 2])
        chosen = generator.choice(pairs, size, replace=False)
        return np.sort(chosen), min(self.neighbours, size - 1)


Key = tuple[str, str]  # (name of a map, `centred` or `raw`); centred rows have their mean subtracted


class FittedMap(NamedTuple):
    """One map, and the mean rows that are subtracted from rows before mapping."""

    matrix: Matrix | None  # [d1, d2]; None for identity
    shift_a: Matrix  # [d1]
    shift_b: Matrix  # [d2]


class Sums(NamedTuple):
    """Sums of one pass over pairs of rows."""

    products: Products
    norms: tuple[Matrix, Matrix]  # of the rows of A and of B
    # ‖AᵀB as computed − AᵀB in fp64‖ / (‖A‖·‖B‖) of the first 1,024 rows; 0 if all products are in fp64
    error: float


class Fitter:
    """Two tables, with their pairs split into `rows` to fit maps on and held-out ones.

    Sums that depend on A alone are computed once for all permutations.

    Raises:
        CheckpointError: fewer than 16 pairs, rows that a table lacks or that are not finite, no map that applies, or an
            unknown setting.
    """

    def __init__(
        self, a: TokenTable, b: TokenTable, pairs: Pairs, settings: AlignSettings, frequency: Matrix | None = None
    ) -> None:
        """Split the pairs and sum the products of the fitting rows.

        The columns of `frequency` [pairs, powers] are summed with both tables.
        """
        _require_rows(a, pairs.a)
        _require_rows(b, pairs.b)
        count = len(pairs)
        if count < FEWEST:
            problem = f"{count} paired rows are too few to align"
            raise CheckpointError(problem, f"at least {FEWEST} tokens must be in both")
        if not 0 <= settings.held_out <= 0.5:
            fix = "use a share from 0 (fit and score all rows) to 0.5"
            raise CheckpointError(f"held_out = {settings.held_out}", fix)
        self.a, self.b, self.pairs, self.widths = a, b, pairs, (a.width, b.width)
        self.frequency = np.zeros((count, 0)) if frequency is None else frequency
        self.dtype = settings.dtype(count, self.widths)
        order = np.random.default_rng(settings.seed).permutation(count)
        out = 0
        if settings.held_out:
            out = max(1, min(settings.scored, int(settings.held_out * count), count // 2))
        self.rows, self.heldout = np.sort(order[out:]), np.sort(order[:out])
        self.names, self.left_out = _applying(settings, self.widths, len(self.rows))
        self.products, self.norms, self.error = self.sums(self.rows)
        self.shifts = {CENTRED: self.products.means, RAW: (np.zeros(a.width), np.zeros(b.width))}
        self.views = (CENTRED, RAW) if settings.raw else (CENTRED,)
        self._inverse: dict[str, Matrix] = {}
        if set(self.names) - {IDENTITY, ORTHOGONAL}:  # only maps of least squares need it
            for view in self.views:
                self._inverse[view] = self._inverse_of(view)

    def _inverse_of(self, view: str) -> Matrix:
        """Return (AᵀA)⁺ of the fitting rows, centred or raw."""
        shift, _ = self.shifts[view]
        gram = self.products.gram_a - len(self.rows) * np.outer(shift, shift)
        return pseudo_inverse(gram, self.error)

    def pieces(self, first: Ids, second: Ids, doing: str) -> Iterator[tuple[slice, Rows, Rows]]:
        """Yield (slice, rows of A [n, d1], rows of B [n, d2]) of pairs, in pieces.

        Rows of A are at pairs `first`, rows of B at pairs `second`. A piece has about CHUNK_BYTES.
        """
        step = max(64, CHUNK_BYTES // (4 * max(1, *self.widths)))
        for start in range(0, len(first), step):
            piece = slice(start, min(start + step, len(first)))
            a, b = self.pairs.a[first[piece]], self.pairs.b[second[piece]]
            yield piece, self.a.take(a, self.dtype), self.b.take(b, self.dtype)
            report_progress(doing, piece.stop, len(first))

    def sums(self, indices: Ids, onto: Products | None = None) -> Sums:
        """Sum products and norms over the pairs `indices`.

        If `onto` has the products of other pairs, the new ones are added to it in place.
        """
        products = onto or Products.nothing(*self.widths, self.frequency.shape[1])
        norms = np.zeros(len(indices)), np.zeros(len(indices))
        error = 0.0
        for piece, a, b in self.pieces(indices, indices, "products"):
            norms[0][piece] = _norms(self.a.name, a)
            norms[1][piece] = _norms(self.b.name, b)
            products.add(a, b, self.frequency[indices[piece]])
            if self.dtype != np.float64 and not error:
                error = _product_error(a[:1024], b[:1024])
        return Sums(products, norms, error)

    def fit(self, partners: Ids | None = None) -> dict[Key, FittedMap]:
        """Return every map of the fitting rows of A onto their partners in B.

        By default, partners are the paired rows; otherwise they are the rows of B at pairs `partners`.
        """
        cross = self.products.cross
        if partners is not None and self.names != [IDENTITY]:
            cross = np.zeros(self.widths)
            for _, a, b in self.pieces(self.rows, partners, "permuted products"):
                cross += a.T @ b
        crosses = {CENTRED: cross - len(self.rows) * np.outer(*self.shifts[CENTRED]), RAW: cross}
        keys = [key for key in itertools.product(self.names, crosses) if self._is_fitted(*key)]
        maps: dict[Key, FittedMap] = {}
        for name, view in keys:
            matrix = None
            if name != IDENTITY:
                matrix = best_map(name, crosses[view], self._inverse.get(view))
            maps[name, view] = FittedMap(matrix, *self.shifts[view])
            report_progress("fitting maps", len(maps), len(keys))
        return maps

    def _is_fitted(self, name: str, view: str) -> bool:
        """Return True if a map is fitted in this view.

        The identity is in both views, at no cost.
        """
        return name == IDENTITY or view in self.views

    def cosines(self, maps: dict[Key, FittedMap], first: Ids, second: Ids) -> dict[Key, Matrix]:
        """Return cosines [n] of mapped rows of A with rows of B.

        The rows are those at pairs `first` and `second`. A cosine is 0 if either row is zero.
        """
        cosines = {key: np.zeros(len(first)) for key in maps}
        for piece, a, b in self.pieces(first, second, "scoring"):
            for key, (matrix, shift_a, shift_b) in maps.items():
                x, y = a - shift_a.astype(a.dtype), b - shift_b.astype(b.dtype)
                if matrix is not None:
                    x = x @ matrix.astype(a.dtype)
                cosines[key][piece] = _row_cosines(x, y)
        return cosines


def _require_rows(table: TokenTable, ids: Ids) -> None:
    """Refuse pairs that name rows which a table lacks."""
    if len(ids) and int(ids.max()) >= table.rows:
        problem = f"{table.name} has {table.rows:,} rows and its vocabulary names row {int(ids.max()):,}"
        raise CheckpointError(problem, "give the tokenizer that belongs to the table")


def _norms(name: str, rows: Rows) -> Matrix:
    """Return the norm of each row [n] of a table, summed in fp64.

    Raises:
        CheckpointError: a norm is not finite.
    """
    norms: Matrix = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    if not np.isfinite(norms).all():
        raise CheckpointError(f"{name}: rows with NaN or infinite values", "mask them out")
    return norms


def _product_error(a: Rows, b: Rows) -> float:
    """Return the distance of AᵀB as computed from AᵀB in fp64, relative to both norms."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    scale = float(np.linalg.norm(wide_a) * np.linalg.norm(wide_b))
    distance = float(np.linalg.norm(a.T @ b - wide_a.T @ wide_b))
    if not scale:
        return 0.0
    return distance / scale


def _row_cosines(x: Rows, y: Rows) -> Matrix:
    """Return the cosines [n] of rows of x with rows of y.

    A cosine is 0 if either row is zero.
    """
    dot = _row_dots(x, y)
    scale = np.sqrt(_row_dots(x, x) * _row_dots(y, y))
    cosines: Matrix = np.divide(dot, scale, out=np.zeros_like(dot), where=scale > 0)
    return cosines


def _row_dots(x: Rows, y: Rows) -> Matrix:
    """Return the dot product of each row of x [n, d] with that of y."""
    dots: Matrix = np.einsum("ij,ij->i", x, y).astype(np.float64)
    return dots


def _applying(settings: AlignSettings, widths: tuple[int, int], rows: int) -> tuple[list[str], tuple[str, ...]]:
    """Return (names of maps that apply, reasons why the others do not).

    It depends on the tables' widths and on the number of rows to fit on.
    """
    names = [*settings.maps, *(f"{RANK}{rank}" for rank in settings.ranks)]
    applying: list[str] = []
    left_out: list[str] = []
    for name in dict.fromkeys(names):
        why = _obstacle(name, widths, rows)
        if why:
            left_out.append(f"no {name} map: {why}")
        else:
            applying.append(name)
    if applying:
        return applying, tuple(left_out)
    fix = "give more rows"
    if widths[0] != widths[1] and rows > max(widths):
        fix = "orthogonal, linear and reduced-rank maps apply"
    raise CheckpointError("; ".join(left_out), fix)


def _obstacle(name: str, widths: tuple[int, int], rows: int) -> str:
    """Return why a map does not apply; "" if it does.

    Raises:
        CheckpointError: no map has this name.
    """
    if name == IDENTITY:
        first, second = widths
        return f"widths {first} and {second} differ" if first != second else ""
    is_reduced = name.startswith(RANK)
    if is_reduced and not 0 < rank_of(name) <= min(widths):
        return f"ranks go from 1 to {min(widths)}"
    if not is_reduced and name not in (ORTHOGONAL, LINEAR):
        raise CheckpointError(f"no map is called {name}", "choose of identity, orthogonal and linear")
    # a map of least squares needs more rows than A is wide, a rotation more than either table is wide
    least = max(widths) if name == ORTHOGONAL else widths[0]
    if rows <= least:
        return f"{rows:,} rows to fit on, and more than {least:,} are needed"
    return ""
