"""A tensor of a base with an adapter's changes in it, as `merge` writes it and `slim` compares it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.adapter import AdapterFacts
from tiewise.checkpoint.rewrite.change import Pieces, TableRows
from tiewise.checkpoint.rules.adapter import empty_tensors
from tiewise.checkpoint.stored import Reader, Stored, rounded, widened
from tiewise.core.errors import CheckpointError


@dataclass(frozen=True)
class Merged:
    """A tensor of the result."""

    old: Stored  # what it starts from: the base's tensor, or the adapter's copy of it
    dtype: str  # of the base's tensor
    factors: Callable[[], tuple[NDArray, NDArray]] | None = None  # [rows, r] and s·[r, columns], whose product is added
    length: Stored | None = None  # [rows]: that of each row once the product is added (DoRA)
    ids: tuple[int, ...] = ()  # rows that are replaced, each by one of
    rows: Stored | None = None

    def table(self) -> TableRows:
        """Its rows, in its type; it holds the two factors."""
        product = None if self.factors is None else self.factors()
        lengths = None if self.length is None else widened(self.length.read())
        ids = np.array(self.ids, np.int64)

        @np.errstate(all="ignore")  # an adapter may hold infinities; the result then says so
        def read(start: int, stop: int) -> NDArray:
            made = self.old.read(start, stop).astype(np.float64)
            if product is not None:
                made += (product[0][start:stop].astype(np.float64) @ product[1]).reshape(made.shape)
            if lengths is not None:
                made *= (lengths[start:stop] / np.linalg.norm(made, axis=1))[:, None]
            if self.rows is not None:
                here = np.flatnonzero((ids >= start) & (ids < stop))
                with Reader(self.rows) as reader:
                    made[ids[here] - start] = reader.take(here)
            return rounded(made, self.dtype)

        return TableRows(self.old.rows, math.prod(self.old.shape[1:]), read)

    def pieces(self) -> Pieces:
        """Yield its bytes."""
        return self.table().pieces()


def require_numbers(given: AdapterFacts) -> None:
    """Raise where a tensor of an adapter holds no numbers, as after a save under ZeRO-3 without gathering."""
    empty = empty_tensors(given)
    if empty is not None:
        raise CheckpointError(f"{given.path}: {empty.evidence}", empty.repair)
