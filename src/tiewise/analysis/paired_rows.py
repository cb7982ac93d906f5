"""Two tables row by row: which rows belong together, their products, what of them is frequency, and each row's nearest.

Rows are paired by the token's text, never by its place: two tokenizers give one text two ids, and one id two texts. By
index only where both tables belong to one vocabulary: the two ends of one model, or the same texts in the same order.

AᵀA, BᵀB and AᵀB, summed over pieces of the rows, are all that maps and spectra need. A piece's product is computed in
fp32 or fp64 and added in fp64, so that in fp32 the error is that of one piece's product; it is measured on the first.

Rows of one frequency are alike in any language model's tables, whatever they mean. To take that out, each column is
regressed on powers of f = log(count + 1) over the paired rows: a projection, whose directions q [n, k] over tokens,
orthonormal and orthogonal to 1, are summed beside the rest as AᵀQ and BᵀQ. The products of what is left are then exact
corrections of the same sums. One power takes out a straight line only; three follow a curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.analysis.model_tables import TokenTable
from tiewise.core.errors import CheckpointError, DataError
from tiewise.core.long_work import progress

Matrix = NDArray[np.float64]
Order = NDArray[np.int64]
FEWEST = 16  # paired rows below which nothing is said
CHUNK_BYTES = 40 * 2**20  # of rows held in fp32
LINE, CURVE = 1, 3  # powers of f that are taken out
_NEW = 1e-9  # share of a power's norm below which it is a combination of lower ones
BLOCK = 512  # rows whose similarities with all sampled ones are held at once, with their sorting about 120 MB


@dataclass(frozen=True)
class Pairs:
    """Rows that belong together: row a[i] of one table and row b[i] of the other, int64 [n], sorted by a."""

    a: Order
    b: Order
    how: str  # `one vocabulary` or `by token text`

    def __len__(self) -> int:
        return len(self.a)

    def without(self, mask_a: NDArray[np.bool_] | None = None, mask_b: NDArray[np.bool_] | None = None) -> Pairs:
        """Leave out pairs whose row is marked in either table's mask, bool [V]: zero, repeated, unused."""
        keep = np.ones(len(self), bool)
        for mask, rows in ((mask_a, self.a), (mask_b, self.b)):
            if mask is not None:
                keep &= ~mask[rows]
        return Pairs(self.a[keep], self.b[keep], self.how)


def one_vocabulary(rows_a: int, rows_b: int) -> Pairs:
    """Pair rows by index: two tables of one model. A longer table's further rows (padding) are left out."""
    rows = np.arange(min(rows_a, rows_b), dtype=np.int64)
    return Pairs(rows, rows, "one vocabulary")


def by_text(texts_a: Sequence[str | None], texts_b: Sequence[str | None]) -> Pairs:
    """Pair rows whose tokens have the same text; where a text stands twice in a vocabulary, its first row counts.

    Args:
        texts_a: text of each row of the first table; None for a row without a token.
        texts_b: the same for the second.

    Raises:
        CheckpointError: the two have no token in common.
    """
    first_a, first_b = ({text: row for row, text in reversed(list(enumerate(texts)))} for texts in (texts_a, texts_b))
    common = sorted((row, first_b[text]) for text, row in first_a.items() if text is not None and text in first_b)
    if not common:
        raise CheckpointError(
            f"the two vocabularies ({len(texts_a):,} and {len(texts_b):,} rows) have no token in common",
            "give the tokenizer of each table; byte-level and SentencePiece vocabularies spell tokens differently",
        )
    rows = np.array(common, np.int64)
    return Pairs(rows[:, 0], rows[:, 1], "by token text")


@dataclass(frozen=True)
class Paired:
    """Two tables, the pairs of their rows, and the type in which rows are multiplied."""

    a: TokenTable
    b: TokenTable
    pairs: Pairs
    dtype: type[np.floating]
    beside: Matrix  # directions over the pairs [pairs, k], to be summed with both tables; k is 0 for none

    def __post_init__(self) -> None:
        for table, wanted in ((self.a, self.pairs.a), (self.b, self.pairs.b)):
            if len(wanted) and int(wanted.max()) >= table.rows:
                raise CheckpointError(
                    f"{table.name} has {table.rows:,} rows and its vocabulary names row {int(wanted.max()):,}",
                    "give the tokenizer that belongs to the table",
                )
        if len(self.pairs) < FEWEST:
            raise CheckpointError(
                f"{len(self.pairs)} paired rows are too few to align", f"at least {FEWEST} tokens must be in both"
            )

    @property
    def widths(self) -> tuple[int, int]:
        """(d1, d2)."""
        return self.a.width, self.b.width

    def take(self, first: Order, second: Order) -> tuple[NDArray, NDArray]:
        """Rows of A at pairs `first` and of B at pairs `second`, [n, d1] and [n, d2]."""
        return self.a.take(self.pairs.a[first], self.dtype), self.b.take(self.pairs.b[second], self.dtype)

    def slices(self, count: int) -> list[slice]:
        """Pieces of `count` pairs, about CHUNK_BYTES of fp32 in each table."""
        step = max(64, CHUNK_BYTES // (4 * max(1, *self.widths)))
        return [slice(start, min(start + step, count)) for start in range(0, max(1, count), step)]

    def sums(self, which: Order) -> tuple[Products, tuple[Matrix, Matrix], float]:
        """(products, norms of A's and of B's rows, relative error of a product) over the given pairs.

        The error is ‖AᵀB as computed − AᵀB in fp64‖ / (‖A‖·‖B‖) of the first 1,024 rows; 0 where all is fp64.
        """
        products, norms, error = None, (np.zeros(len(which)), np.zeros(len(which))), 0.0
        for piece in self.slices(len(which)):
            a, b = self.take(which[piece], which[piece])
            for table, sizes, values in zip((self.a, self.b), norms, (a, b), strict=True):
                sizes[piece] = np.sqrt(np.einsum("ij,ij->i", values, values, dtype=np.float64))
                if not np.isfinite(sizes[piece]).all():
                    raise CheckpointError(f"{table.name}: rows with NaN or infinite values", "mask them out")
            more = Products.of(a, b, self.beside[which[piece]])
            products = more if products is None else products + more
            if self.dtype != np.float64 and not error:
                wide_a, wide_b = a[:1024].astype(np.float64), b[:1024].astype(np.float64)
                scale = float(np.linalg.norm(wide_a) * np.linalg.norm(wide_b))
                off = float(np.linalg.norm(a[:1024].T @ b[:1024] - wide_a.T @ wide_b))
                error = off / scale if scale else 0.0
            progress("products", piece.stop, len(which))
        assert products is not None
        return products, norms, error

    def cross(self, first: Order, second: Order) -> Matrix:
        """AᵀB [d1, d2] over rows of A at pairs `first` and of B at pairs `second`."""
        cross = np.zeros(self.widths)
        for piece in self.slices(len(first)):
            a, b = self.take(first[piece], second[piece])
            cross += a.T @ b
            progress("permuted products", piece.stop, len(first))
        return cross


@dataclass(frozen=True)
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
    def of(cls, a: NDArray, b: NDArray, q: NDArray) -> Products:
        """Multiply rows a [n, d1], b [n, d2] and directions beside them q [n, k] in the type of a and b."""
        sums = (rows.sum(axis=0, dtype=np.float64) for rows in (a, b))
        pairs = ((a, a), (b, b), (a, b), (a, q), (b, q))
        return cls(len(a), *sums, *((x.T @ y.astype(x.dtype)).astype(np.float64) for x, y in pairs))

    def __add__(self, other: Products) -> Products:
        return Products(*(mine + more for mine, more in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def mean_a(self) -> Matrix:
        """Mean row of A, [d1]."""
        return self.sum_a / max(1, self.rows)

    @property
    def mean_b(self) -> Matrix:
        """Mean row of B, [d2]."""
        return self.sum_b / max(1, self.rows)

    def without(self, k: int = 0) -> Products:
        """Return the sums of rows less their mean, the first k directions taken out of every column: (1 − QQᵀ)A, …

        All rows over which the directions are orthonormal must have been added.
        """
        a, b, n = self.mean_a, self.mean_b, self.rows
        along_a, along_b = self.along_a[:, :k], self.along_b[:, :k]
        return Products(
            n,
            np.zeros_like(a),
            np.zeros_like(b),
            self.gram_a - n * np.outer(a, a) - along_a @ along_a.T,
            self.gram_b - n * np.outer(b, b) - along_b @ along_b.T,
            self.cross - n * np.outer(a, b) - along_a @ along_b.T,
            self.along_a[:, k:],  # q is orthogonal to 1 over all rows
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
    basis = np.full((len(x), 1), max(1, len(x)) ** -0.5)
    for _ in range(CURVE if spread else 0):
        power = x * basis[:, -1]  # spans the same with the lower ones as x to the next power, and is better conditioned
        scale = float(np.linalg.norm(power))
        for _ in range(2):  # once loses orthogonality where little is left
            power = power - basis @ (basis.T @ power)
        left = float(np.linalg.norm(power))
        if left <= _NEW * scale:
            break
        basis = np.column_stack([basis, power / left])
    return basis[:, 1:]


def nearest(table: TokenTable, which: Order, k: int, dtype: type[np.floating]) -> Order:
    """Places [n, k], within `which` [n > k], of each row's k nearest others by cosine of rows less their mean.

    In no order, and among equal cosines any. Rows of zeros have cosine 0 with all.
    """
    rows = table.take(which, dtype)
    rows -= rows.mean(axis=0, dtype=np.float64).astype(dtype)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit, ids = rows / np.where(norms > 0, norms, 1), np.empty((len(rows), k), np.int64)
    for start in range(0, len(unit), BLOCK):
        similar = unit[start : start + BLOCK] @ unit.T
        own = np.arange(len(similar))
        similar[own, start + own] = -np.inf
        ids[start : start + BLOCK] = np.argpartition(similar, -k, axis=1)[:, -k:]
        progress("neighbours", start + len(similar), len(unit))
    return ids


def shared(ids_a: Order, ids_b: Order) -> Matrix:
    """Share of each row's neighbours [n, k] that are in both, [n]."""
    return (ids_a[:, :, None] == ids_b[:, None, :]).sum(axis=(1, 2)) / ids_a.shape[1]
