"""Reading of untrusted files: only regular files, inside their folder, in bounded memory."""

from __future__ import annotations

import codecs
import errno
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
# {number of an error of the system: what to do}; for any other number, the path is wrong
_REMEDIES = {
    errno.EIO: "the disk or the network failed: copy the file elsewhere, or take it from its source again",
    errno.ELOOP: "its symbolic links lead in a circle: store the file itself there",
    errno.EMFILE: "allow more open files: ulimit -n 4096",
    errno.ENFILE: "close other programs, which use all open files of this machine",
}


def open_regular(path: str | os.PathLike[str]) -> int:
    """Return a descriptor for reading a regular file. The caller closes it.

    Raises:
        CheckpointError: the file is absent, may not be read, or is no regular file.
    """
    name = os.fspath(path)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointError(f"{name}: no such file", "check the path") from None
    except PermissionError:
        raise CheckpointError(f"{name}: no permission to read it", f"chmod u+r {name}, or ask its owner") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        code = getattr(error, "errno", 0)
        remedy = _REMEDIES.get(code, "check the path")
        raise CheckpointError(f"{name!r}: cannot be opened ({_reason(error)})", remedy) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{name}: not a regular file", "give a checkpoint folder or a file of tensors")
    return descriptor


def read_bytes(path: str | os.PathLike[str], most: int) -> bytes:
    """Return all bytes of a file.

    Raises:
        CheckpointError: the file has more than `most` bytes, or cannot be read.
    """
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
    """Raise a CheckpointError if a file with this beginning is a Git LFS pointer."""
    if beginning.startswith(LFS_POINTER):
        problem = f"{os.fspath(path)}: a Git LFS pointer, not the file that it names"
        raise CheckpointError(problem, "run `git lfs pull` in the repository, or download the file itself")


_PUT_THERE = "nothing outside a checkpoint is read: put the file itself there"
LEADS_OUTSIDE = "a link to a file outside the folder"  # end of the problem that `following_links` allows
_FOLLOWED: ContextVar[bool] = ContextVar("links out of a folder are followed", default=False)


@contextmanager
def following_links(follow: bool) -> Iterator[None]:
    """Allow `path_inside` to follow links out of a folder within the block, if `follow`."""
    before = _FOLLOWED.set(follow or _FOLLOWED.get())
    try:
        yield
    finally:
        _FOLLOWED.reset(before)


def path_inside(folder: Path, name: str) -> Path:
    """Return the path of a checkpoint folder's file `name`, after a check that it is inside.

    Links may lead to files within the folder, and to the `blobs` of a Hugging Face cache. Links to other places are
    allowed only within `following_links`.

    Raises:
        CheckpointError: the name or a link leads outside the folder.
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
        remedy = "if you trust it, add --follow-links (in Python: follow_links=True); else copy the file there"
        raise CheckpointError(f"{path}: {LEADS_OUTSIDE}", remedy)
    return path


def _names_no_inner_file(name: str) -> bool:
    """Return whether a name cannot be that of a file inside a folder."""
    if not name or "\0" in name:
        return True
    return os.path.isabs(name) or ".." in Path(name).parts


def _may_lead_to(home: Path, target: Path) -> bool:
    """Return whether links of the folder `home` may lead to `target`: inside it or its cache."""
    if target.is_relative_to(home):
        return True
    blobs = home.parent.parent / "blobs"
    if home.parent.name != "snapshots" or not blobs.is_dir():
        return False
    return target.is_relative_to(blobs)


def _reason(error: Exception) -> str:
    """Return the system's message for an error, else the error's text."""
    return getattr(error, "strerror", None) or str(error)


MOST_BYTES = 256 * 2**20  # the largest published tokenizer.json has 35 MB
MOST_VALUES = 6_000_000  # commas, colons and brackets; the largest tokenizer.json has two million
MOST_MEMORY = 420 * 2**20  # bytes of a file's objects, so that the process stays below 512 MB
MEMINFO = "/proc/meminfo"
VALUE_BYTES = 75  # bytes of memory per comma, colon or bracket; a token with its id has two


def read_json(path: str, *, most: int = MOST_BYTES, unique: bool = False) -> Any:
    """Return the content of a JSON file of at most `most` bytes; `unique` as in `parse_json`."""
    return parse_json(read_bytes(path, most), path, unique=unique)


_BYTE_ORDER_MARKS = {  # UTF-32 comes before UTF-16, whose mark is a prefix of it
    codecs.BOM_UTF8: "UTF-8",
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def parse_json(data: bytes, where: str, *, unique: bool = False) -> Any:
    """Return the content of JSON text in UTF-8.

    It accepts `NaN` and `Infinity`, which transformers writes (Mamba's configs).

    Args:
        data: the text.
        where: path or name of the text, for errors.
        unique: refuse an object with a repeated key. Otherwise the last value wins, as in other readers.

    Raises:
        CheckpointError: the text is no JSON, is too large, or has a repeated key.
    """

    def require_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Return an object as a dictionary. Raise a CheckpointError for a repeated key."""
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
        del data  # frees memory for the text and the objects
        return json.loads(text, object_pairs_hook=require_unique_keys if unique else None)
    except CheckpointError:
        raise  # a CheckpointError is a ValueError too
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        remedy = "take the file from its source again: it is damaged or is not JSON"
        raise CheckpointError(f"{where}: not readable as JSON ({short(str(error), 80)})", remedy) from None


def _repeated_key(pairs: list[tuple[str, Any]]) -> str:
    """Return the first repeated key of an object."""
    counts = Counter(key for key, _ in pairs)
    return next(key for key, count in counts.items() if count > 1)


def items_of(item_type: type[Item], value: Any) -> tuple[Item, ...]:
    """Return the items of a list that have this type; empty if `value` is no list."""
    if not isinstance(value, list):
        return ()
    return tuple(item for item in value if type(item) is item_type)


def object_of(value: Any) -> Mapping[str, Any]:
    """Return `value` if it is a JSON object, else an empty one."""
    if isinstance(value, Mapping):
        return value
    return {}


def is_text_map(value: Any) -> TypeGuard[dict[str, str]]:
    """Return whether a JSON value is an object with only text as values."""
    if not isinstance(value, dict):
        return False
    types = set(map(type, value.values()))
    return types <= {str}


def require_bounded(data: bytes, values: int, where: str) -> None:
    """Raise a CheckpointError if text in UTF-8 with `values` values needs too much memory."""
    if len(data) < 2**20:
        return
    width, characters = 1, len(data)  # bytes per character in memory, number of characters
    if not data.isascii():
        width = 4 if re.search(rb"[\xf0-\xff]", data) else 2
        # delete all bytes of a character but the first, which are in this range
        characters = len(data.translate(None, bytes(range(0x80, 0xC0))))
    if 2 * width * characters + VALUE_BYTES * values > MOST_MEMORY:  # the text, and its parts as objects
        remedy = "no file of this kind is that large: take it from its source again"
        raise CheckpointError(f"{where}: reading it would take more than {MOST_MEMORY // 2**20} MB of memory", remedy)


def first_fields(data: bytes, at: int, end: int, most: int, where: str) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each field 1 with bytes in a protocol buffer's message.

    The message is `data[at:end]`.

    Raises:
        CheckpointError: the message is damaged, or has more than `most` fields.
    """
    for _ in range(most):
        if at == end:
            return
        tag, at = _varint(data, at, end, where)
        wire_type = tag & 7
        if wire_type in (_VARINT, _BYTES):
            value, start = _varint(data, at, end, where)
            at = start if wire_type == _VARINT else start + value
        else:
            start = at
            at += _FIXED.get(wire_type, end)  # any other wire type is damage: this moves past the message
        if at > end:
            raise _damaged(where)
        if tag == 1 << 3 | _BYTES:
            yield start, at
    if at < end:
        raise CheckpointError(f"{where}: more than {most:,} tokens", "take it from its source again")


# wire types of a protocol buffer, and {wire type: bytes} of fields with a fixed length
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}


def _varint(data: bytes, at: int, end: int, where: str) -> tuple[int, int]:
    """Return (value, end offset) of the number of variable length at an offset."""
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

    It passes if the system does not report its free memory.
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
    """Return printable text of at most `most` characters, for names from a file."""
    plain = to_printable(str(text)[: most + 1])
    if len(plain) > most:
        return plain[: most - 1] + "…"
    return plain
