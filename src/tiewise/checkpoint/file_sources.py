"""Sources of a checkpoint's files: a folder on disk, or a repository of the Hub.

A `FileSource` lists its files, reads a small file as a whole, and opens a large one to read parts of it. All code above
reads untrusted files through a source, so every rule runs on both kinds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from tiewise.checkpoint.untrusted import LFS_POINTER, open_regular, path_inside, read_bytes, refuse_pointer
from tiewise.core.errors import CheckpointError

MOST_FILES = 100_000  # entries of a folder
GIVE_FOLDER = "give the checkpoint's own folder"


class HubError(CheckpointError):
    """A server that refuses, fails or contradicts itself. It says nothing about the checkpoint, so it is no finding."""


class OpenFile(Protocol):
    """File of which parts are read, as a context manager."""

    path: Path  # for messages
    size: int  # bytes

    def read_into(self, buffer: memoryview, position: int) -> None:
        """Fill `buffer` with the file's bytes from `position` on; raise CheckpointError if they cannot be read."""

    def __enter__(self) -> OpenFile: ...

    def __exit__(self, error_type: type | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


def read_beginning(file: OpenFile) -> bytes:
    """Return the first bytes of an open file.

    They are at most as many as the beginning of a Git LFS pointer has.

    Raises:
        CheckpointError: the file is such a pointer, or cannot be read.
    """
    beginning = bytearray(min(file.size, len(LFS_POINTER)))
    file.read_into(memoryview(beginning), 0)
    refuse_pointer(file.path, bytes(beginning))
    return bytes(beginning)


class FileSource(Protocol):
    """Files of one checkpoint. Each method raises CheckpointError for what cannot be read."""

    path: Path  # the folder or the address, for messages
    # bytes of a table up to which a comparison reads all of it, and else random rows; None: every table is read whole
    most_compared: int | None

    def list(self) -> tuple[str, ...]:
        """Return the sorted names of all entries directly inside."""

    def size_of(self, name: str) -> int:
        """Return the bytes of a file, without opening it; 0 if they are unknown."""

    def read_bytes(self, name: str, most: int) -> bytes:
        """Return the content of a file of at most `most` bytes."""

    def prefetch(self, names: Sequence[str]) -> None:
        """Prepare to open files one after the other, if reading their beginnings together is faster."""

    def open(self, name: str) -> OpenFile:
        """Open a file to read parts of it."""


class HubSource(FileSource, Protocol):
    """Files of a repository, at one commit."""

    commit: str
    file: str | None  # the file that the address names; None: it names a folder

    @property
    def requests(self) -> int:
        """Return the number of requests so far."""

    @property
    def bytes_read(self) -> int:
        """Return the bytes of all answers so far."""


class LocalFile:
    """Open regular file on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = open_regular(path)
        self.size = os.fstat(self._descriptor).st_size

    def __enter__(self) -> LocalFile:
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._descriptor)

    def read_into(self, buffer: memoryview, position: int) -> None:
        """Fill `buffer` with the file's bytes from `position` on."""
        while buffer:
            try:
                count = os.preadv(self._descriptor, [buffer], position)
            except OSError as error:
                problem = f"{self.path}: cannot be read at byte {position:,} ({error.strerror})"
                raise CheckpointError(problem, "check the disk") from None
            if count == 0:
                raise CheckpointError(f"{self.path}: it became shorter while it was read", "nothing else may write it")
            buffer, position = buffer[count:], position + count


class LocalFolder:
    """Folder on disk. It opens only files inside the folder, or that `following_links` allows."""

    most_compared: int | None = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def list(self) -> tuple[str, ...]:
        """Return the sorted names of all entries of the folder."""
        try:
            names = sorted(os.listdir(self.path))
        except PermissionError:
            remedy = f"chmod u+rx {self.path}, or ask its owner"
            raise CheckpointError(f"{self.path}: no permission to list it", remedy) from None
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be listed ({error.strerror})", "check the path") from None
        if len(names) > MOST_FILES:
            raise CheckpointError(f"{self.path}: {len(names):,} entries are no checkpoint", GIVE_FOLDER)
        return tuple(names)

    def size_of(self, name: str) -> int:
        """Return the bytes of a file, without opening it; 0 if they are unknown."""
        try:
            return os.stat(self.path / name).st_size
        except OSError:
            return 0

    def read_bytes(self, name: str, most: int) -> bytes:
        """Return the content of a file of at most `most` bytes."""
        return read_bytes(path_inside(self.path, name), most)

    def prefetch(self, names: Sequence[str]) -> None:
        """Do nothing: a disk needs no preparation."""

    def open(self, name: str) -> LocalFile:
        """Open a file to read parts of it."""
        return LocalFile(path_inside(self.path, name))
