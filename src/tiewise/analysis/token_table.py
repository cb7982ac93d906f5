"""A table [V, E] that is read a few rows at a time, wherever it lies: in memory, or in a checkpoint's file."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.checkpoint.stored import FLOATING, NUMPY, Reader, Stored, widened
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError, DataError

CHUNK_VALUES = 2**20  # 8 MB in fp64
_DENSE = 3  # read a whole span of a file where at least one row in three of it is wanted
Array = NDArray[np.float64]
Ids = NDArray[np.int64]


class TokenTable(ABC):
    """Rows of a table as floating numbers, whatever they are stored in; `name` is for messages."""

    name: str = "table"
    rows: int
    width: int

    @abstractmethod
    def read(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) in fp64."""

    def spans(self, rows: int | None = None, beside: int = 0) -> Iterator[tuple[int, int]]:
        """Row ranges of a few MB each, in order; of the first `rows` rows only, where given.

        `beside`: values that the caller holds for every row read, where they are more than the row's own.
        """
        end = self.rows if rows is None else min(rows, self.rows)
        step = max(1, CHUNK_VALUES // max(1, self.width, beside))
        for start in range(0, end, step):
            yield start, min(start + step, end)

    def take(self, ids: ArrayLike, dtype: type[np.floating] = np.float64) -> NDArray:
        """Return the rows of some tokens [n, E], in any order, as a fresh array of `dtype`."""
        chosen = np.atleast_1d(np.asarray(ids, np.int64))
        outside = chosen[(chosen < 0) | (chosen >= self.rows)]
        if len(outside):
            raise DataError(f"token {int(outside[0])} is outside the table's {self.rows:,} rows", "check the tokens")
        return self._take(chosen, dtype) if len(chosen) else np.empty((0, self.width), dtype)

    @abstractmethod
    def _take(self, ids: Ids, dtype: type[np.floating]) -> NDArray:
        """Return at least one row, all of them in the table, as a fresh array of `dtype`."""


class HeldTable(TokenTable):
    """A table in memory."""

    def __init__(self, values: ArrayLike) -> None:
        self.values = np.asarray(values)
        if self.values.ndim != 2:
            raise DataError(f"a table of shape {self.values.shape}", "give one row per token: [V, E]")
        self.rows, self.width = self.values.shape

    def read(self, start: int, stop: int) -> Array:
        """Return rows [start, stop)."""
        return self.values[start:stop].astype(np.float64)

    def _take(self, ids: Ids, dtype: type[np.floating]) -> NDArray:
        return self.values[ids].astype(dtype, copy=False)


class StoredTable(TokenTable):
    """A table in a checkpoint's file, read by positioned reads.

    Raises:
        CheckpointError: it is no matrix of floating numbers.
    """

    def __init__(self, tensor: Stored) -> None:
        if len(tensor.shape) != 2 or tensor.dtype not in FLOATING:
            what = f"{tensor.path}: {short(tensor.name)} is {tensor.dtype} of shape {list(tensor.shape)}"
            raise CheckpointError(what, "give a checkpoint whose tables are stored as plain floating numbers")
        self.tensor = tensor
        self.name = short(tensor.name)
        self.rows, self.width = tensor.shape

    def read(self, start: int, stop: int) -> Array:
        """Return rows [start, stop)."""
        with Reader(self.tensor) as reader:
            return reader.wide(start, stop).astype(np.float64)

    def _take(self, ids: Ids, dtype: type[np.floating]) -> NDArray:
        low, high = int(ids.min()), int(ids.max()) + 1
        with Reader(self.tensor) as reader:
            if high - low <= _DENSE * len(ids):
                found = reader.rows(low, high)
                found = found if high - low == len(ids) and (np.diff(ids) == 1).all() else found[ids - low]
            else:
                found = self._scattered(reader, ids)
        return widened(found).astype(dtype, copy=False)

    def _scattered(self, reader: Reader, ids: Ids) -> NDArray:
        raw = bytearray(len(ids) * reader.row_bytes)
        view = memoryview(raw)
        for place in np.argsort(ids, kind="stable"):  # in the file's order: a disk reads forward
            start = int(place) * reader.row_bytes
            reader.into(view[start : start + reader.row_bytes], int(ids[place]) * reader.row_bytes)
        return np.frombuffer(raw, NUMPY[self.tensor.dtype]).reshape(len(ids), self.width)


class Behind(TokenTable):
    """Rows of another table as a function makes them, a few at a time.

    Args:
        table: its rows [V, k].
        make: rows [n, k] in fp64 → rows [n, D] in fp64, each by itself.
        width: D.
        name: for messages; the other table's where none is given.
    """

    def __init__(self, table: TokenTable, make: Callable[[Array], Array], width: int, name: str = "") -> None:
        self.table, self.make = table, make
        self.name, self.rows, self.width = name or table.name, table.rows, width

    def read(self, start: int, stop: int) -> Array:
        """Return rows [start, stop) in fp64."""
        return self.make(self.table.read(start, stop))

    def _take(self, ids: Ids, dtype: type[np.floating]) -> NDArray:
        made = np.empty((len(ids), self.width), dtype)
        step = max(1, CHUNK_VALUES // max(self.width, self.table.width))
        for start in range(0, len(ids), step):
            made[start : start + step] = self.make(self.table.take(ids[start : start + step]))
        return made


def as_table(given: TokenTable | Stored | NDArray) -> TokenTable:
    """Open a stored tensor, or take an array; a table stays what it is."""
    if isinstance(given, TokenTable):
        return given
    if isinstance(given, Stored):
        return StoredTable(given)
    if len(given.shape) != 2 or not np.issubdtype(given.dtype, np.floating):
        what = f"an array of {given.dtype} and shape {list(given.shape)} is no table of floating values"
        raise CheckpointError(what, "give one row per token: [V, E]")
    return HeldTable(given)
