"""Tensor of a base that includes an adapter's changes.

`merge` writes it, and `slim` compares it with a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.adapter import AdapterFacts
from tiewise.checkpoint.rewrite.change import Pieces, Rows, TableRows
from tiewise.checkpoint.rules.adapter import empty_tensors
from tiewise.checkpoint.stored import Reader, Stored, rounded, widened
from tiewise.core.errors import CheckpointError

Factors = Callable[[], tuple[Rows, Rows]]  # reads two factors [rows, r] and s·[r, columns], whose product is added


@dataclass(frozen=True)
class Obstacle:
    """Reason why an adapter cannot be merged or slimmed."""

    problem: str
    remedy: str


@dataclass(frozen=True)
class MergedTensor:
    """A tensor of the result, computed from a stored one.

    The steps are: add a product, scale the rows to new lengths, and replace some rows.
    """

    source: Stored  # the base's tensor, or the adapter's copy of it
    dtype: str  # type of the base's tensor, and of the result
    factors: Factors | None = None  # factors of the added product
    row_lengths: Stored | None = None  # [rows] Euclidean length of each row after the sum (DoRA)
    ids: tuple[int, ...] = ()  # numbers of the replaced rows, one for each row of `rows`
    rows: Stored | None = None  # replacements

    def table(self) -> TableRows:
        """Return the rows of the result; they keep the two factors in memory."""
        return TableRows(self.source.rows, math.prod(self.source.shape[1:]), _MergedRows(self).read)

    def pieces(self) -> Pieces:
        """Yield the bytes of the result."""
        return self.table().pieces()


class _MergedRows:
    """Rows of a merged tensor, computed when they are read."""

    def __init__(self, merged: MergedTensor) -> None:
        self.merged = merged
        self.product: tuple[Rows, Rows] | None = None
        if merged.factors is not None:
            self.product = merged.factors()
        self.row_lengths: Rows | None = None
        if merged.row_lengths is not None:
            self.row_lengths = widened(merged.row_lengths.read())
        self.ids = np.array(merged.ids, np.int64)

    @np.errstate(all="ignore")  # an adapter may contain infinities; the result is then not finite
    def read(self, start: int, stop: int) -> Rows:
        """Return rows [start, stop), computed in fp64 and rounded once."""
        rows = self.merged.source.read(start, stop).astype(np.float64)
        if self.product is not None:
            left, right = self.product
            rows += (left[start:stop].astype(np.float64) @ right).reshape(rows.shape)
        if self.row_lengths is not None:
            rows *= (self.row_lengths[start:stop] / np.linalg.norm(rows, axis=1))[:, None]
        self._replace(rows, start, stop)
        return rounded(rows, self.merged.dtype)

    def _replace(self, rows: NDArray[np.float64], start: int, stop: int) -> None:
        """Write the replacements into a block of rows [start, stop)."""
        if self.merged.rows is None:
            return
        here = np.flatnonzero((self.ids >= start) & (self.ids < stop))
        with Reader(self.merged.rows) as reader:
            rows[self.ids[here] - start] = reader.take(here)


def require_numbers(adapter: AdapterFacts) -> None:
    """Raise if a tensor of an adapter is empty.

    A save under ZeRO-3 without gathering writes empty tensors.
    """
    empty = empty_tensors(adapter)
    if empty is not None:
        raise CheckpointError(f"{adapter.path}: {empty.evidence}", empty.repair)
