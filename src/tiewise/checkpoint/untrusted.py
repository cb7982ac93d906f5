"""Untrusted files: only regular ones are read, inside their folder, and in bounded memory."""

from __future__ import annotations

import codecs
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from tiewise.core.errors import CheckpointError, to_printable
from tiewise.core.files import format_bytes

Item = TypeVar("Item")


def open_regular(path: str | os.PathLike[str]) -> int:
    """Return a descriptor for reading; the caller closes it."""
    name = os.fspath(path)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointError(f"{name}: no such file", "check the path") from None
    except PermissionError:
        raise CheckpointError(f"{name}: no permission to read it", f"chmod u+r {name}, or ask its owner") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise CheckpointError(f"{name!r}: cannot be opened ({_reason(error)})", "check the path") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{name}: not a regular file", "give a checkpoint folder or a file of tensors")
    return descriptor


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """Return all bytes of a file of at most `most` bytes."""
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        length = os.fstat(descriptor).st_size
        if length > most:
            remedy = "no file of this kind is that large: take it from its source again"
            raise CheckpointError(f"{os.fspath(path)}: {length:,} bytes", remedy)
        try:
            data = file.read(most)
        except OSError as error:
            raise CheckpointError(f"{os.fspath(path)}: cannot be read ({_reason(error)})", "check the disk") from None
    refuse_pointer(path, data)
    return data


LFS_POINTER = b"version https://git-lfs.github.com/spec/"  # first bytes of a Git LFS pointer, a text of about 130 bytes


def refuse_pointer(path: str | os.PathLike[str], beginning: bytes) -> None:
    """Raise CheckpointError if a file that begins with these bytes is a Git LFS pointer."""
    if beginning.startswith(LFS_POINTER):
        problem = f"{os.fspath(path)}: a Git LFS pointer, not the file that it names"
        raise CheckpointError(problem, "run `git lfs pull` in the repository, or download the file itself")


_PUT_THERE = "nothing outside a checkpoint is read: put the file itself there"
_FOLLOWED: ContextVar[bool] = ContextVar("links out of a folder are followed", default=False)


@contextmanager
def following_links(follow: bool) -> Iterator[None]:
    """Let `path_inside` follow links out of a folder for the length of the block, if `follow`."""
    before = _FOLLOWED.set(follow or _FOLLOWED.get())
    try:
        yield
    finally:
        _FOLLOWED.reset(before)


def path_inside(folder: Path, name: str) -> Path:
    """Return the file `name` of a checkpoint folder, after checking that it is inside.

    Links are followed within the folder, and into the `blobs` next to the `snapshots` of a Hugging Face cache; those
    that lead elsewhere only within `following_links`.
    """
    if _names_no_inner_file(name):
        raise CheckpointError(f"{folder}: it names the file {name[:80]!r}, which lies outside the folder", _PUT_THERE)
    path = folder / name
    is_direct_entry = os.path.basename(name) == name != "."
    if is_direct_entry and not os.path.islink(path):
        return path
    try:
        home, target = folder.resolve(), path.resolve()
    except UnicodeEncodeError:
        problem = f"{folder}: it names the file {name[:80]!r}, a name that no file has"
        raise CheckpointError(problem, _PUT_THERE) from None
    except (OSError, RuntimeError):  # a loop of links
        raise CheckpointError(f"{path}: a link that leads nowhere", _PUT_THERE) from None
    if not _FOLLOWED.get() and not _may_lead_to(home, target):
        remedy = "if you trust it: --follow-links (from Python: follow_links=True); else put the file itself there"
        raise CheckpointError(f"{path}: a link that leads outside the folder", remedy)
    return path


def _names_no_inner_file(name: str) -> bool:
    """Return whether a name is none of a file in or below a folder."""
    if not name or "\0" in name:
        return True
    return os.path.isabs(name) or ".." in Path(name).parts


def _may_lead_to(home: Path, target: Path) -> bool:
    """Return whether links of the folder `home` may lead to a file.

    They may in the folder, and in the blobs of its cache.
    """
    if target.is_relative_to(home):
        return True
    blobs = home.parent.parent / "blobs"
    if home.parent.name != "snapshots" or not blobs.is_dir():
        return False
    return target.is_relative_to(blobs)


def _reason(error: Exception) -> str:
    """Return the system's words for an error, else its own."""
    return getattr(error, "strerror", None) or str(error)


MOST_BYTES = 256 * 2**20  # the largest tokenizer.json known is 35 MB
MOST_VALUES = 6_000_000  # and holds two million commas, colons and brackets
MOST_MEMORY = 420 * 2**20  # that a file may take as objects, so that the process stays below 512 MB
MEMINFO = "/proc/meminfo"
VALUE_BYTES = 75  # of memory for each comma, colon and bracket: a token with its id has two


def read_json(path: str, *, most: int = MOST_BYTES, unique: bool = False) -> Any:
    """Return what a JSON file of at most `most` bytes holds; `unique` as in `parse_json`."""
    return parse_json(read_bytes(path, most), path, unique=unique)


_BYTE_ORDER_MARKS = {  # UTF-32's first: it begins as UTF-16's does
    codecs.BOM_UTF8: "UTF-8",
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def parse_json(data: bytes, where: str, *, unique: bool = False) -> Any:
    """Return what JSON text in UTF-8 holds; `where` is named in errors.

    `unique` refuses an object that names a key twice; elsewhere the last wins, as in every other reader. `NaN` and
    `Infinity` are taken as transformers writes them (Mamba's configs do).
    """

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        by_key = dict(pairs)
        if len(by_key) < len(pairs):
            raise CheckpointError(f"{where}: names {short(_repeated_key(pairs))} twice", "one of the two must go")
        return by_key

    values = 0
    if len(data) > 2**20:
        values = sum(map(data.count, (b",", b":", b"[", b"{")))
    if values > MOST_VALUES:
        remedy = "no file of this kind is that long: take it from its source again"
        raise CheckpointError(f"{where}: more than {MOST_VALUES:,} values", remedy)
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if data.startswith(mark):
            problem = f"{where}: not readable as JSON: it begins with the byte order mark of {encoding}"
            raise CheckpointError(problem, "save it as UTF-8 without a byte order mark")
    require_bounded(data, values, where)
    try:
        text = data.decode()
        del data  # text and objects take enough
        return json.loads(text, object_pairs_hook=unique_keys if unique else None)
    except CheckpointError:
        raise  # it is a ValueError too
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        remedy = "the file is damaged or is no JSON: take it from its source again"
        raise CheckpointError(f"{where}: not readable as JSON ({short(str(error), 80)})", remedy) from None


def _repeated_key(pairs: list[tuple[str, Any]]) -> str:
    """Return the first key that an object names more than once."""
    counts = Counter(key for key, _ in pairs)
    return next(key for key, count in counts.items() if count > 1)


def items_of(kind: type[Item], value: Any) -> tuple[Item, ...]:
    """Return the items of a list that are of a type. Any other value has none."""
    if not isinstance(value, list):
        return ()
    return tuple(item for item in value if type(item) is kind)


def object_of(value: Any) -> Mapping[str, Any]:
    """Return a JSON object; empty if `value` is none."""
    if isinstance(value, Mapping):
        return value
    return {}


def is_text_map(value: Any) -> TypeGuard[dict[str, str]]:
    """Return whether a JSON value is an object in which every value is text."""
    if not isinstance(value, dict):
        return False
    types = set(map(type, value.values()))
    return types <= {str}


def require_bounded(data: bytes, values: int, where: str) -> None:
    """Raise if text in UTF-8 and its `values` would take more memory than any such file."""
    if len(data) < 2**20:
        return
    width, characters = 1, len(data)  # bytes of a character in Python
    if not data.isascii():
        width = 4 if re.search(rb"[\xf0-\xff]", data) else 2
        # of a character's several bytes all but the first lie in this range
        characters = len(data.translate(None, bytes(range(0x80, 0xC0))))
    if 2 * width * characters + VALUE_BYTES * values > MOST_MEMORY:  # the text, and the same text in pieces
        remedy = "no file of this kind is that large: take it from its source again"
        raise CheckpointError(f"{where}: reading it would take more than {MOST_MEMORY // 2**20} MB of memory", remedy)


def first_fields(data: bytes, at: int, end: int, most: int, where: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each field 1 with bytes, of a protocol buffer's message of `most` fields at most."""
    for _ in range(most):
        if at == end:
            return
        tag, at = _varint(data, at, end, where)
        kind = tag & 7
        if kind in (_VARINT, _BYTES):
            value, start = _varint(data, at, end, where)
            at = start if kind == _VARINT else start + value
        else:
            start = at
            at += _FIXED.get(kind, end)  # any other kind is damage: it ends behind the message
        if at > end:
            raise _damaged(where)
        if tag == 1 << 3 | _BYTES:
            yield start, at
    if at < end:
        raise CheckpointError(f"{where}: more than {most:,} tokens", "take it from its source again")


# kinds of fields of a protocol buffer, and bytes of those of fixed length
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}


def _varint(data: bytes, at: int, end: int, where: str) -> tuple[int, int]:
    """Return the number of variable length at an offset, and the offset behind it."""
    value = 0
    for shift, byte in enumerate(data[at : min(at + 10, end)]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, at + shift + 1
    raise _damaged(where)


def _damaged(where: str) -> CheckpointError:
    """Return the error on a damaged protocol buffer."""
    return CheckpointError(f"{where}: a damaged protocol buffer", "take it from its source again")


def require_memory(needed: int, purpose: str) -> None:
    """Raise a CheckpointError if a purpose needs more bytes than are free without swapping.

    Systems that do not tell their free memory are not checked.
    """
    try:
        with open(MEMINFO, encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return
    if needed > free:
        remedy = "close other programs, or run it on a larger machine"
        raise CheckpointError(
            f"{purpose} needs {format_bytes(needed)} of memory, and {format_bytes(free)} are free", remedy
        )


def short(text: Any, most: int = 60) -> str:
    """Return printable text of bounded length, for names that come from a file."""
    plain = to_printable(str(text)[: most + 1])
    if len(plain) > most:
        return plain[: most - 1] + "…"
    return plain
