"""Read rows of a stored tensor: positioned reads into bounded buffers, never a memory map.

A map of a file that another process cuts short kills its reader (SIGBUS); a positioned read comes back short.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.dtypes import NUMPY, widened
from tiewise.checkpoint.header import Stored
from tiewise.checkpoint.open_file import open_regular
from tiewise.core.errors import CheckpointError

CHUNK_BYTES = 4 * 2**20


class Reader:
    """An open tensor, as a context manager. Rows run along the first axis; a vector has rows of one value."""

    def __init__(self, tensor: Stored) -> None:
        self.tensor = tensor
        self._descriptor = open_regular(tensor.path)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._descriptor)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (of the whole tensor where it has no first axis or no rows)."""
        return self.tensor.nbytes // max(1, self.tensor.rows)

    def into(self, buffer: memoryview, offset: int = 0) -> None:
        """Fill `buffer` with the tensor's bytes from `offset` on.

        Raises:
            CheckpointError: the file has become shorter than its header says.
        """
        at = self.tensor.start + offset
        while buffer:
            try:
                count = os.preadv(self._descriptor, [buffer], at)
            except OSError as error:
                what = f"{self.tensor.path}: cannot be read at byte {at:,} ({error.strerror})"
                raise CheckpointError(what, "check the disk") from None
            if count == 0:
                raise CheckpointError(
                    f"{self.tensor.path}: it became shorter while it was read", "nothing else may write it"
                )
            buffer, at = buffer[count:], at + count

    def rows(self, start: int = 0, stop: int | None = None) -> NDArray:
        """Return rows [start, stop) in the tensor's own type; a fresh array.

        Raises:
            CheckpointError: the type is packed below a byte, or the file has become shorter.
        """
        tensor = self.tensor
        if tensor.dtype not in NUMPY:
            raise CheckpointError(f"{tensor.path}: {tensor.name} is packed ({tensor.dtype})", "dequantise it first")
        stop = tensor.rows if stop is None else min(stop, tensor.rows)
        raw = bytearray(max(0, stop - start) * self.row_bytes)
        self.into(memoryview(raw), start * self.row_bytes)
        return np.frombuffer(raw, NUMPY[tensor.dtype]).reshape((max(0, stop - start), *tensor.shape[1:]))

    def wide(self, start: int = 0, stop: int | None = None) -> NDArray:
        """Return rows [start, stop) of a floating tensor in fp32 (fp64 where it is stored so)."""
        return widened(self.rows(start, stop))

    def spans(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
        """Row ranges of about `chunk_bytes` each, in order."""
        step = max(1, chunk_bytes // max(1, self.row_bytes))
        for start in range(0, self.tensor.rows, step):
            yield start, min(start + step, self.tensor.rows)
