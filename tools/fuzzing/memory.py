"""Files of a checkpoint in memory, which the readers open as they open a repository of the Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tiewise.checkpoint.hf_folder import Folder, HubReading, read_repository
from tiewise.core.errors import CheckpointError

PATH = Path("/memory")  # in messages; nothing is read there
ALL_HEADERS = HubReading(all_headers=True, all_rows=True)


class MemoryFile:
    """Open file in memory."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data, self.size = path, data, len(data)

    def __enter__(self) -> MemoryFile:
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def read_into(self, buffer: memoryview, position: int) -> None:
        """Fill `buffer` with the file's bytes from `position` on."""
        part = self.data[position : position + len(buffer)]
        if len(part) < len(buffer):
            raise AssertionError(f"a reader left the file: {len(buffer)} bytes at {position} of {self.size}")
        buffer[:] = part


@dataclass(frozen=True)
class MemorySource:
    """Source of files in memory, with everything that a `HubSource` has."""

    files: Mapping[str, bytes]
    path: Path = PATH
    commit: str = "0" * 40
    file: str | None = None  # it is a folder
    requests: int = 0
    bytes_read: int = 0
    most_compared: int | None = None

    def list(self) -> tuple[str, ...]:
        """Return the sorted names of all files."""
        return tuple(sorted(self.files))

    def size_of(self, name: str) -> int:
        """Return the bytes of a file; 0 if it is absent."""
        return len(self.files.get(name, b""))

    def read_bytes(self, name: str, most: int) -> bytes:
        """Return the content of a file of at most `most` bytes."""
        data = self._content(name)
        if len(data) > most:
            raise CheckpointError(f"{self.path / name}: {len(data):,} bytes", "take it from its source again")
        return data

    def prefetch(self, names: Sequence[str]) -> None:
        """Do nothing."""

    def open(self, name: str) -> MemoryFile:
        """Open a file to read parts of it."""
        return MemoryFile(self.path / name, self._content(name))

    def _content(self, name: str) -> bytes:
        """Return the content of a file."""
        if name not in self.files:
            raise CheckpointError(f"{self.path / name!s}: no such file", "check the path")
        return self.files[name]


def folder_of(files: Mapping[str, bytes], reading: HubReading = ALL_HEADERS) -> Folder:
    """Return files in memory as an opened folder."""
    return read_repository(MemorySource(files), reading)
