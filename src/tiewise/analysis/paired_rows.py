"""Rows of a table by index, wherever the table is: in a file, read in pieces, or in memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.dtypes import FLOATING, NUMPY, widened
from tiewise.checkpoint.header import Stored
from tiewise.checkpoint.reader import Reader
from tiewise.checkpoint.strict_json import short
from tiewise.errors import CheckpointError

Table = Stored | NDArray
CHUNK_BYTES = 40 * 2**20  # of rows held in fp32: large enough that products of them run at full speed
_DENSE = 3  # read a whole span of a file where at least one row in three of it is wanted


class Rows:
    """A table [V, d] opened for reading by row index, as a context manager.

    Raises:
        CheckpointError: not a table of floating values.
    """

    def __init__(self, table: Table) -> None:
        self.name = short(table.name) if isinstance(table, Stored) else "table"
        kind = table.dtype if isinstance(table, Stored) else "F32" if np.issubdtype(table.dtype, np.floating) else "?"
        if len(table.shape) != 2 or kind not in FLOATING:
            raise CheckpointError(
                f"{self.name}: {table.dtype} of shape {list(table.shape)} is no table of floating values",
                "dequantise it first, or name the table",
            )
        self.shape = (int(table.shape[0]), int(table.shape[1]))
        self._array = None if isinstance(table, Stored) else table
        self._reader = Reader(table) if isinstance(table, Stored) else None

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._reader is not None:
            self._reader.__exit__(kind, error, trace)

    def take(self, rows: NDArray[np.int64], dtype: type[np.floating] = np.float32) -> NDArray:
        """Return the given rows, in any order, as [n, d] of `dtype`."""
        if self._array is not None:
            return np.asarray(self._array[rows], dtype)
        assert self._reader is not None
        if not len(rows):
            return np.empty((0, self.shape[1]), dtype)
        low, high = int(rows.min()), int(rows.max()) + 1
        if high - low <= _DENSE * len(rows):
            found = self._reader.rows(low, high)
            found = found if high - low == len(rows) and (np.diff(rows) == 1).all() else found[rows - low]
        else:
            found = self._scattered(self._reader, rows)
        return widened(found).astype(dtype, copy=False)

    def _scattered(self, reader: Reader, rows: NDArray[np.int64]) -> NDArray:
        raw = bytearray(len(rows) * reader.row_bytes)
        view = memoryview(raw)
        for place in np.argsort(rows, kind="stable"):  # in the file's order: a disk reads forward
            start = int(place) * reader.row_bytes
            reader.into(view[start : start + reader.row_bytes], int(rows[place]) * reader.row_bytes)
        return np.frombuffer(raw, NUMPY[reader.tensor.dtype]).reshape(len(rows), self.shape[1])


def chunks(count: int, width: int) -> Iterator[slice]:
    """Slices of `count` rows, about CHUNK_BYTES of fp32 each at the given width."""
    step = max(64, CHUNK_BYTES // (4 * max(1, width)))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
