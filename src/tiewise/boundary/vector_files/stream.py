"""A binary file read forward in pieces: up to a mark, or a number of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from tiewise.core.errors import DataError

WHOLE = "take the file from its source again"
_PIECE = 1 << 20
_LONGEST = 10_000  # bytes of a word; in published files the longest has a few hundred


class Stream:
    """Reads `file` from where it stands; errors name `path`."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self._held, self._at = b"", 0
        self._behind = file.tell()  # the position of the first byte that is held

    @property
    def position(self) -> int:
        """Where in the file the next byte stands."""
        return self._behind + self._at

    def word(self, mark: bytes) -> bytes:
        """Return the bytes before the next `mark`, one byte, and step over it.

        Raises:
            DataError: the file ends before, or no word is that long.
        """
        while (end := self._held.find(mark, self._at)) < 0 and len(self._held) - self._at <= _LONGEST:
            self._more(1)
        if not 0 <= end - self._at <= _LONGEST:
            what = f"a word of more than {_LONGEST:,} bytes at byte {self.position:,}"
            raise DataError(f"vectors {self.path}: {what}, so the file is not what its beginning says", WHOLE)
        found = self._held[self._at : end]
        self._at = end + 1
        return found

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes.

        Raises:
            DataError: the file ends before.
        """
        missing = self._at + count - len(self._held)
        if missing > 0:
            self._more(missing)
        self._at += count
        return self._held[self._at - count : self._at]

    def rest(self) -> bytes:
        """Return what is left, of a long rest only the beginning."""
        return self._held[self._at :] + self.file.read(_PIECE)

    def _more(self, least: int) -> None:
        got = self.file.read(max(_PIECE, least))
        if len(got) < least:
            end = self._behind + len(self._held) + len(got)
            raise DataError(f"vectors {self.path}: cut short, it ends at byte {end:,} within an entry", WHOLE)
        self._behind += self._at
        self._held, self._at = self._held[self._at :] + got, 0
