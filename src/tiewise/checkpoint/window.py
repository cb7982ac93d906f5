"""A file read from its first byte on, through a buffer of bounded size; lengths are checked before they are taken."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from tiewise.core.errors import CheckpointError

WINDOW_BYTES = 2**18
DAMAGED = "the file is damaged or was cut short: download or convert it again"


class Window:
    """The place reached in an open file.

    Args:
        path: named in errors.
        descriptor: the open file; the caller closes it.

    Raises:
        CheckpointError: from every method, where the file ends before what was asked for.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._start, self._data = 0, b""
        self.at = 0

    @property
    def left(self) -> int:
        """Bytes from here to the file's end."""
        return self.size - self.at

    def need(self, count: int, what: str) -> None:
        """Refuse `count` bytes for `what` where fewer are left."""
        if count > self.left:
            raise CheckpointError(f"{self.path}: {what} at byte {self.at:,} goes beyond the file's end", DAMAGED)

    def take(self, count: int, what: str) -> bytes:
        """Return the next `count` bytes, at most WINDOW_BYTES of them."""
        self.need(count, what)
        begin = self.at - self._start
        if begin + count > len(self._data):
            self._fill(count, what)
            begin = 0
        self.at += count
        return self._data[begin : begin + count]

    def skip(self, count: int, what: str) -> None:
        """Pass `count` bytes without reading them."""
        self.need(count, what)
        self.at += count
        if self.at > self._start + len(self._data):
            self._start, self._data = self.at, b""

    def skip_texts(self, count: int, what: str) -> None:
        """Pass `count` texts, each a u64 length and that many bytes."""
        unpack = struct.Struct("<Q").unpack_from
        while count:
            self.need(8, what)
            if self.at + 8 > self._start + len(self._data):
                self._fill(8, what)
            data, begin = self._data, self.at - self._start
            last = len(data) - 8
            while count and begin <= last:
                begin += 8 + unpack(data, begin)[0]
                count -= 1
            self.skip(self._start + begin - self.at, what)

    def _fill(self, count: int, what: str) -> None:
        try:
            self._data = os.pread(self._descriptor, WINDOW_BYTES, self.at)
        except OSError as error:
            what = f"{self.path}: cannot be read at byte {self.at:,} ({error.strerror})"
            raise CheckpointError(what, "check the disk") from None
        self._start = self.at
        if len(self._data) < count:
            raise CheckpointError(f"{self.path}: it became shorter while {what} was read", "nothing else may write it")
