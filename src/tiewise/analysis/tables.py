"""A table [V, E] that is read a few rows at a time, wherever it lies: in memory, or in a checkpoint's file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.checkpoint.dtypes import FLOATING
from tiewise.checkpoint.header import Stored
from tiewise.checkpoint.reader import Reader
from tiewise.checkpoint.strict_json import short
from tiewise.errors import CheckpointError, DataError

CHUNK_VALUES = 2**20  # 8 MB in fp64
Array = NDArray[np.float64]


class Table(ABC):
    """Rows of a table in fp64, whatever they are stored in."""

    rows: int
    width: int

    @abstractmethod
    def read(self, start: int, stop: int) -> Array:
        """Return rows [start, stop)."""

    def spans(self, rows: int | None = None, beside: int = 0) -> Iterator[tuple[int, int]]:
        """Row ranges of a few MB each, in order; of the first `rows` rows only, where given.

        `beside`: values that the caller holds for every row read, where they are more than the row's own.
        """
        end = self.rows if rows is None else min(rows, self.rows)
        step = max(1, CHUNK_VALUES // max(1, self.width, beside))
        for start in range(0, end, step):
            yield start, min(start + step, end)

    def take(self, ids: ArrayLike) -> Array:
        """Return the rows of some tokens [n, E].

        Raises:
            DataError: an id outside the table.
        """
        chosen = np.atleast_1d(np.asarray(ids, np.int64))
        outside = chosen[(chosen < 0) | (chosen >= self.rows)]
        if len(outside):
            raise DataError(f"token {int(outside[0])} is outside the table's {self.rows:,} rows", "check the tokens")
        return self._take(chosen)

    def _take(self, ids: NDArray[np.int64]) -> Array:
        parts = [self.read(int(row), int(row) + 1) for row in ids]
        return np.concatenate(parts) if parts else np.empty((0, self.width))


class HeldTable(Table):
    """A table in memory."""

    def __init__(self, values: ArrayLike) -> None:
        self.values = np.asarray(values)
        if self.values.ndim != 2:
            raise DataError(f"a table of shape {self.values.shape}", "give one row per token: [V, E]")
        self.rows, self.width = self.values.shape

    def read(self, start: int, stop: int) -> Array:
        """Return rows [start, stop)."""
        return self.values[start:stop].astype(np.float64)

    def _take(self, ids: NDArray[np.int64]) -> Array:
        return self.values[ids].astype(np.float64)


class StoredTable(Table):
    """A table in a checkpoint's file, read by positioned reads.

    Raises:
        CheckpointError: it is no matrix of floating numbers.
    """

    def __init__(self, tensor: Stored) -> None:
        if len(tensor.shape) != 2 or tensor.dtype not in FLOATING:
            what = f"{tensor.path}: {short(tensor.name)} is {tensor.dtype} of shape {list(tensor.shape)}"
            raise CheckpointError(what, "give a checkpoint whose tables are stored as plain floating numbers")
        self.tensor = tensor
        self.rows, self.width = tensor.shape

    def read(self, start: int, stop: int) -> Array:
        """Return rows [start, stop).

        Raises:
            CheckpointError: the file has become shorter.
        """
        with Reader(self.tensor) as reader:
            return reader.wide(start, stop).astype(np.float64)
