"""Repository of the Hugging Face Hub as a source of files, read by range requests.

The first request lists the files and pins the commit: every later request names that commit. The answers for one file
must have one size and one ETag. A large file is read in the ranges that are needed, never as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

from tiewise.checkpoint.file_sources import GIVE_FOLDER, MOST_FILES, HubError
from tiewise.checkpoint.hub_client import HubClient, ReadingLimits, Reply
from tiewise.checkpoint.hub_names import HubPath, parse_address, quoted_revision
from tiewise.checkpoint.untrusted import items_of, object_of, parse_json, refuse_pointer, short
from tiewise.core.errors import CheckpointError

FIRST_BYTES = 2**15  # of a file, read at once: the length of a header, and mostly the header
READ_AHEAD = 2**24  # bytes of one request while a table is read from its first byte to its last
LONGEST_WINDOW = 2**22  # bytes of one request while a long header is read
COMPARED_BYTES = 2**17  # tables of up to this many bytes are compared as a whole
CONNECTIONS = 8  # files whose beginnings are read at a time
MOST_LISTING = 2**26  # bytes of the list of files
MOST_SMALL = 2**20  # bytes of a small file that is kept in memory after the first read
MOST_RANGES = 2**23  # bytes of ranges that are kept in memory, since several rules read the same rows
MOST_READ, LONGEST = 2**30, 900.0  # bytes and seconds of one repository, without whole tables
MOST_OF_TABLES = 2**50  # bytes of one repository with whole tables
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHANGED = "run again: the repository changed, or a server between gives another file"
_TAKE_AGAIN = "take it from its source again"


@dataclass
class _FileState:
    """File of the repository, as the answers so far describe it."""

    size: int | None  # bytes; None until an answer states them
    etags: dict[str, str]  # {sender: ETag in its first answer}
    url: str | None = None  # last target of a redirect, which later ranges are read from


class HubRepository:
    """Files of one folder of a repository, at one commit."""

    def __init__(self, path: HubPath, all_rows: bool = False) -> None:
        self.path: Path = path
        self.address = parse_address(path)
        self.most_compared: int | None = COMPARED_BYTES
        limits = ReadingLimits(MOST_READ, LONGEST)
        if all_rows:
            self.most_compared = None
            limits = ReadingLimits(MOST_OF_TABLES, None)
        self.client = HubClient(self.address.repo, limits)
        self.commit = ""  # pinned by the listing
        self.file: str | None = None  # the file that the address names, by the listing
        self._beginnings = dict[str, bytes]()  # of files that were read ahead
        self._files = dict[str, _FileState]()
        self._names: tuple[str, ...] = ()
        self._small_files = dict[str, bytes]()  # content of small files
        self._ranges = dict[tuple[str, int, int], bytes]()  # {(file, start, count): bytes}
        self._range_bytes = 0
        self._read_listing()

    @property
    def requests(self) -> int:
        """Return the number of requests so far."""
        return self.client.requests

    @property
    def bytes_read(self) -> int:
        """Return the bytes of all answers so far."""
        return self.client.bytes_read

    def list(self) -> tuple[str, ...]:
        """Return the sorted names of all files and folders directly inside."""
        return self._names

    def size_of(self, name: str) -> int:
        """Return the bytes of a file by the listing; 0 if it states none."""
        return self._state(name).size or 0

    def read_bytes(self, name: str, most: int) -> bytes:
        """Return the content of a file of at most `most` bytes."""
        where, state = str(self.path / name), self._state(name)
        if state.size is not None and state.size > most:
            remedy = "no file of this kind is that large: take it from its source again"
            raise CheckpointError(f"{where}: {state.size:,} bytes", remedy)
        if state.size is not None:
            most = state.size
        if name in self._small_files:
            return self._small_files[name]
        reply = self.client.get(self._url(name), where, most)
        self._check(name, reply)
        data = reply.body
        if state.size is not None and len(data) != state.size:
            raise HubError(f"{where}: {len(data):,} bytes, and the Hub lists {state.size:,}", _CHANGED)
        refuse_pointer(where, data)
        if len(data) <= MOST_SMALL:
            self._small_files[name] = data
        return data

    def open(self, name: str) -> HubFile:
        """Open a file to read ranges of it."""
        if self._state(name).size is None:
            self._read_span(name, 0, 0)
        return HubFile(self, name, self.size_of(name), self._beginnings.pop(name, b""))

    def prefetch(self, names: Sequence[str]) -> None:
        """Read the beginnings of files, several at a time. The file that is opened next has its beginning."""
        sizes = {name: self._files[name].size for name in names if name in self._files}
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            started = {name: pool.submit(self._beginning, name, size) for name, size in sizes.items() if size}
            try:
                for name, future in started.items():
                    self._beginnings[name] = future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _beginning(self, name: str, size: int) -> bytes:
        """Return the first bytes of a file."""
        return self._read_exactly(name, 0, min(FIRST_BYTES, size))

    def read_range(self, name: str, start: int, count: int) -> bytes:
        """Return `count` bytes of a file from `start` on."""
        if (name, start, count) in self._ranges:
            return self._ranges[name, start, count]
        data = self._read_exactly(name, start, count)
        if self._range_bytes + count <= MOST_RANGES:
            self._range_bytes += count
            self._ranges[name, start, count] = data
        return data

    def _read_exactly(self, name: str, start: int, count: int) -> bytes:
        """Return `count` bytes of a file from `start` on, from the server."""
        data = self._read_span(name, start, start + count - 1)
        if len(data) != count:
            where = self.path / name
            raise HubError(f"{where}: {len(data):,} of {count:,} bytes at byte {start:,}", _CHANGED)
        return data

    def _read_span(self, name: str, first: int, last: int) -> bytes:
        """Return the bytes of a file from `first` to `last`."""
        where, state = str(self.path / name), self._state(name)
        url = state.url or self._url(name)
        try:
            reply = self.client.get(url, where, last - first + 1, (first, last))
        except HubError:
            if state.url is None:
                raise
            state.url = None  # the target of a redirect may have expired
            reply = self.client.get(self._url(name), where, last - first + 1, (first, last))
        if reply.status != 206:
            raise HubError(f"{where}: the server ignores ranges", "download the file, then check the folder")
        self._check_range(name, reply, first, last)
        self._check(name, reply)
        if reply.url != self._url(name):
            state.url = reply.url
        return reply.body

    def _check_range(self, name: str, reply: Reply, first: int, last: int) -> None:
        """Raise a HubError if an answer has another range, or the file another size than before."""
        state = self._state(name)
        span = re.fullmatch(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})", reply.headers.get("content-range", ""))
        if span is None or int(span[1]) != first or int(span[2]) > last:
            problem = f"{self.path / name}: the server answers with another range"
            raise HubError(f"{problem} ({short(reply.headers.get('content-range'))})", _CHANGED)
        size = int(span[3])
        if state.size is None:
            state.size = size
        if state.size != size:
            raise HubError(f"{self.path / name}: {size:,} bytes, and {state.size:,} before", _CHANGED)

    def _check(self, name: str, reply: Reply) -> None:
        """Raise a HubError if an answer is of another commit, or has another ETag than before."""
        where, state = self.path / name, self._state(name)
        commit = reply.first_headers.get("x-repo-commit", self.commit)
        if commit != self.commit:
            raise HubError(f"{where}: commit {short(commit)}, and {self.commit} was listed", _CHANGED)
        # the Hub's own answer names the ETag of a file that another host sends
        etags = {"linked": reply.first_headers.get("x-linked-etag"), _host(reply.url): reply.headers.get("etag")}
        for sender, etag in etags.items():
            if etag is not None and state.etags.setdefault(sender, etag) != etag:
                raise HubError(f"{where}: it changed while it was read (another ETag)", _CHANGED)

    def _state(self, name: str) -> _FileState:
        """Return what is known about a file. Raises CheckpointError if the repository lacks it."""
        if name not in self._files:
            raise CheckpointError(f"{self.path / name}: no such file", "check the address")
        return self._files[name]

    def _url(self, name: str) -> str:
        """Return the address of a file at the pinned commit."""
        inside = "/".join(filter(None, (self.address.folder, name)))
        return f"{self.client.endpoint}/{self.address.repo}/resolve/{self.commit}/{quote(inside)}"

    def _read_listing(self) -> None:
        """Read the commit and the list of files."""
        url = f"{self.client.endpoint}/api/models/{self.address.repo}"
        if self.address.revision is not None:
            url += f"/revision/{quoted_revision(self.address.revision)}"
        where = str(self.path)
        record = object_of(parse_json(self.client.get(f"{url}?blobs=true", where, MOST_LISTING).body, where))
        self.commit = str(record.get("sha"))
        if not _COMMIT.fullmatch(self.commit):
            raise HubError(f"{where}: the server names no commit", "check HF_ENDPOINT")
        files = items_of(dict, record.get("siblings"))
        if len(files) > MOST_FILES:
            raise CheckpointError(f"{where}: {len(files):,} files are no checkpoint", GIVE_FOLDER)
        sizes = _sizes_by_name(files)
        self._find_file(sizes)
        self._list_folder(sizes)

    def _list_folder(self, sizes: Mapping[str, int | None]) -> None:
        """Keep the files of the address's folder, from {path: bytes}."""
        prefix = f"{self.address.folder}/".removeprefix("/")
        names = set[str]()
        for name, size in sizes.items():
            if not name.startswith(prefix):
                continue
            entry, _, below = name.removeprefix(prefix).partition("/")
            names.add(entry)
            if not below:
                self._files[entry] = _FileState(size, {})
        if not names and prefix:
            problem = f"{self.path}: the repository has no folder or file {short(self.address.folder)}"
            raise CheckpointError(problem, "check the address")
        self._names = tuple(sorted(names))

    def _find_file(self, listed: Collection[str]) -> None:
        """Keep the name of a listed file that the address names. Its folder becomes the address."""
        if self.address.folder not in listed:
            return
        folder, _, self.file = self.address.folder.rpartition("/")
        self.address = replace(self.address, folder=folder)
        self.path = self.path.parent


class HubFile:
    """Open file of a repository. It keeps the last range, and reads ahead while reads follow one another."""

    def __init__(self, repository: HubRepository, name: str, size: int, beginning: bytes = b"") -> None:
        self.path, self.size = repository.path / name, size
        self._repository, self._name = repository, name
        self._start, self._window = 0, beginning  # the last range: its position, and its bytes

    def __enter__(self) -> HubFile:
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._window = b""

    def read_into(self, buffer: memoryview, position: int) -> None:
        """Fill `buffer` with the file's bytes from `position` on."""
        if position + len(buffer) > self.size:
            raise CheckpointError(f"{self.path}: it ends before byte {position + len(buffer):,}", _TAKE_AGAIN)
        while buffer:
            offset = position - self._start
            if not 0 <= offset < len(self._window):
                self._fetch(position, len(buffer))
                continue
            piece = self._window[offset : offset + len(buffer)]
            buffer[: len(piece)] = piece
            buffer, position = buffer[len(piece) :], position + len(piece)

    def _fetch(self, position: int, count: int) -> None:
        """Read the range that starts at a position and has `count` bytes or more."""
        if position == 0:
            count = max(count, FIRST_BYTES)
        elif self._window and position == self._start + len(self._window):
            count = max(count, self._read_ahead())
        count = min(count, READ_AHEAD, self.size - position)
        self._window = self._repository.read_range(self._name, position, count)
        self._start = position

    def _read_ahead(self) -> int:
        """Return the bytes of a read that follows the one before.

        They are many of a table, and twice as many as before of a header.
        """
        if self._repository.most_compared is None:
            return READ_AHEAD
        return min(2 * len(self._window), LONGEST_WINDOW)


def _sizes_by_name(files: Iterable[Mapping[str, Any]]) -> dict[str, int | None]:
    """Return {path: bytes} of the entries of a listing; None for a file without a size."""
    sizes = dict[str, int | None]()
    for file in files:
        name = file.get("rfilename")
        if isinstance(name, str):
            sizes[name] = _size(file)
    return sizes


def _size(file: Mapping[str, Any]) -> int | None:
    """Return the bytes of a file by its entry in the listing, else None."""
    size = file.get("size")
    if type(size) is not int or not 0 <= size < 2**62:
        return None
    return size


def _host(url: str) -> str:
    """Return scheme and host of an address."""
    return "/".join(url.split("/")[:3])
