"""Two tables and the pairs of their rows, read in pieces that products run on at full speed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.tables import Table
from tiewise.analysis.token_match import Pairs
from tiewise.core.errors import CheckpointError

CHUNK_BYTES = 40 * 2**20  # of rows held in fp32
FEWEST = 16  # paired rows below which nothing is said
Order = NDArray[np.int64]


@dataclass(frozen=True)
class Paired:
    """Two tables, the pairs of their rows, and the type in which rows are multiplied.

    Args:
        a: table A.
        b: table B.
        pairs: rows that belong together.
        dtype: type of the products.
        beside: directions over the pairs, [pairs, k], whose products with both tables are summed too.

    Raises:
        CheckpointError: a pair names a row that is not there, or there are fewer than 16 pairs.
    """

    a: Table
    b: Table
    pairs: Pairs
    dtype: type[np.floating]
    beside: NDArray[np.float64] | None = None

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
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]
