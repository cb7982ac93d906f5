"""Two tables row by row: which rows belong together, their products, what of them is frequency, and each row's nearest.

Rows are paired by the token's text, never by its place: two tokenizers give one text two ids, and one id two texts. By
index only where both tables belong to one vocabulary: the two ends of one model, or the same texts in the same order.

AᵀA, BᵀB and AᵀB, summed over pieces of the rows, are all that maps and spectra need. A piece's product is computed in
fp32 or fp64 and added in fp64, so that in fp32 the error is that of one piece's product.

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
Mask = NDArray[np.bool_]
FEWEST = 16  # paired rows below which nothing is said
LINE, CURVE = 1, 3  # powers of f that are taken out
BLOCK = 2048  # rows of one tile of similarities: two tiles and their sorting stay within 100 MB


@dataclass(frozen=True)
class Pairs:
    """Rows that belong together: row a[i] of one table and row b[i] of the other, int64 [n], sorted by a."""

    a: Order
    b: Order
    how: str  # `one vocabulary` or `by token text`

    def __len__(self) -> int:
        return len(self.a)

    def without(self, mask_a: Mask, mask_b: Mask | None = None) -> Pairs:
        """Leave out pairs whose row is marked in its table's mask [V]: zero, repeated, unused."""
        keep = ~mask_a[self.a] if mask_b is None else ~(mask_a[self.a] | mask_b[self.b])
        return Pairs(self.a[keep], self.b[keep], self.how)


def one_vocabulary(rows_a: int, rows_b: int) -> Pairs:
    """Pair rows by index: two tables of one model. A longer table's further rows (padding) are left out."""
    rows = np.arange(min(rows_a, rows_b), dtype=np.int64)
    return Pairs(rows, rows, "one vocabulary")


def by_text(texts_a: Sequence[str | None], texts_b: Sequence[str | None]) -> Pairs:
    """Pair rows whose tokens have the same text, None for no token; of a text that stands twice, the first row counts.

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

    def join(self, other: Products) -> None:
        """Add the sums over other rows to these."""
        self.rows += other.rows
        for mine, more in list(zip(vars(self).values(), vars(other).values(), strict=True))[1:]:
            mine += more

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


def nearest(table: TokenTable, which: Order, k: int, dtype: type[np.floating]) -> Order:
    """Places [n, k], within `which` [n > k], of each row's k nearest others by cosine of rows less their mean.

    In no order, and among equal cosines any. Rows of zeros have cosine 0 with all. Each pair of blocks is met once.
    """
    rows = table.take(which, dtype)
    rows -= rows.mean(axis=0, dtype=np.float64).astype(dtype)
    n, norms = len(rows), np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(norms > 0, norms, 1)
    best, ids = np.full((n, k), -np.inf, unit.dtype), np.zeros((n, k), np.int64)
    starts = range(0, n, BLOCK)
    done, total = 0, len(starts) * (len(starts) + 1) // 2
    for i in starts:
        for j in range(i, n, BLOCK):
            tile = unit[i : i + BLOCK] @ unit[j : j + BLOCK].T
            if i == j:
                np.fill_diagonal(tile, -np.inf)
            else:
                _keep_best(best, ids, j, tile.T, i)
            _keep_best(best, ids, i, tile, j)
            done += 1
            progress("neighbours", done, total)
    return ids


def _keep_best(best: NDArray, ids: Order, start: int, tile: NDArray, first: int) -> None:
    """Keep the k best of each row's best so far, rows `start` on, and one tile, whose columns are rows `first` on."""
    k, rows = best.shape[1], slice(start, start + len(tile))
    if best[start, 0] == -np.inf:  # nothing is kept yet
        tile = np.ascontiguousarray(tile)
        columns = np.argpartition(tile, -min(k, tile.shape[1]), axis=1)[:, -k:]
        values = np.take_along_axis(tile, columns, axis=1)
    else:  # what exceeds the least that is kept: few, once some tiles have been met; padded with -inf
        at, column = np.nonzero(np.ascontiguousarray(tile > best[rows].min(axis=1)[:, None]))
        counts = np.bincount(at, minlength=len(tile))
        place = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
        values = np.full((len(tile), int(counts.max(initial=0))), -np.inf, tile.dtype)
        columns = np.zeros(values.shape, np.int64)
        values[at, place], columns[at, place] = tile[at, column], column
    values = np.concatenate([best[rows], values], axis=1)
    columns = np.concatenate([ids[rows], columns + first], axis=1)
    kept = np.argpartition(values, -k, axis=1)[:, -k:]
    best[rows] = np.take_along_axis(values, kept, axis=1)
    ids[rows] = np.take_along_axis(columns, kept, axis=1)


def shared(ids_a: Order, ids_b: Order) -> Matrix:
    """Share of each row's neighbours [n, k] that are in both, [n]."""
    return (ids_a[:, :, None] == ids_b[:, None, :]).sum(axis=(1, 2)) / ids_a.shape[1]
