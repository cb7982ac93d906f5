"""What is kept: files that are there whole or not at all, those of the package, sizes; dataclasses as JSON and YAML.

To write a file, a neighbour is written, brought to the disk, and takes the name. JSON has no infinity and no nan: a
diverged run's numbers are written as null, and read back as nan.
"""

from __future__ import annotations

import errno
import json
import math
import os
import pkgutil
import re
import shutil
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from tiewise.core.errors import RunError, TiewiseError, suggest_choices

T = TypeVar("T")
_NAMES = {float: "a number", int: "a whole number", str: "text", bool: "true or false"}


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a neighbour of `path` to write; it gets that name at the block's end, and goes where the block raises."""
    made = path.parent / f".{path.name}.{os.getpid()}.partial"  # another process may be writing the same
    try:
        yield made
        sync(made)
        made.replace(path)
        sync(path.parent)
    finally:
        made.unlink(missing_ok=True)


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a text or bytes so that a kill leaves the old file or the new one; an OSError where it cannot."""
    with written_whole(path) as made:
        made.write_bytes(data.encode() if isinstance(data, str) else data)


def write_result(data: str | bytes, path: str | os.PathLike[str], option: str) -> Path:
    """Write what a user asked for, whole or not at all; a RunError names the `option` that gives another place."""
    target = Path(path)
    try:
        write_whole(target, data)
    except OSError as error:
        raise RunError(f"cannot write {target}: {error.strerror}", f"choose another place with {option}") from None
    return target


def sync(path: Path) -> None:
    """Bring a file, or a folder's entries, to the disk; a folder only where the system can open one."""
    folder = path.is_dir()
    if folder and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not folder or error.errno != errno.EINVAL:  # some network file systems sync no folders
            raise
    finally:
        os.close(descriptor)


def packaged_json(path: str) -> Any:
    """Return what a JSON file of the package holds, by its path below `tiewise/`."""
    # importlib.resources, which this stands for, imports tempfile and shutil, a tenth of a plan's time
    data = pkgutil.get_data("tiewise", path)
    assert data is not None, path  # None only for loaders that keep no data; Python's own all do
    return json.loads(data)


def cache_folder() -> Path:
    """Return tiewise's folder in the user's cache, which need not exist; a RuntimeError where there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "tiewise"


def size(bytes_: float) -> str:
    """12.3 MB, in powers of ten as disks and checkpoints are sold."""
    if bytes_ < 999.5:  # three digits would write a larger number as 1e+03
        return f"{bytes_:.0f} bytes"
    for unit in ("kB", "MB", "GB", "TB"):
        bytes_ /= 1000
        if bytes_ < 999.5:
            return f"{bytes_:.3g} {unit}"
    return f"{bytes_:,.0f} TB"


# dataclasses as plain values and back


def strict(value: Any) -> Any:
    """Return plain values as strict JSON takes them: infinities and nan become None."""
    if isinstance(value, dict):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    is_no_number = isinstance(value, float) and not math.isfinite(value)
    return None if is_no_number else value


def to_record(measured: Any) -> dict[str, Any]:
    """Return any dataclass as strict JSON takes it."""
    record: dict[str, Any] = strict(asdict(measured))
    return record


def from_record(cls: type[T], record: Any, where: str, fix: str = "correct it") -> T:
    """Read what `to_record` returned; a RunError names a missing field, or one of the wrong type."""
    value: T = _read_value(cls, record, where, fix)
    return value


def _read_value(hint: Any, value: Any, where: str, fix: str) -> Any:
    """Return a value of JSON as a type hint asks: dataclass, list, dict, optional or scalar."""
    outer, inner = get_origin(hint), get_args(hint)
    if outer in (Union, types.UnionType) and value is not None:
        return _read_value(inner[0], value, where, fix)
    if outer is list:
        if not isinstance(value, list):
            raise RunError(f"{where} must be a list", fix)
        return [_read_value(inner[0], item, f"{where}[{i}]", fix) for i, item in enumerate(value)]
    if outer is dict:
        items = _object(value, where, fix).items()
        return {key: _read_value(inner[1], item, f"{where}[{key!r}]", fix) for key, item in items}
    if is_dataclass(hint):
        return _read_dataclass(hint, _object(value, where, fix), where, fix)
    if hint is float and value is None:
        return math.nan
    return scalar(hint, value, where, fix)


def _object(value: Any, where: str, fix: str) -> Mapping[str, Any]:
    """Return a value that is a JSON object; raise RunError for any other."""
    if not isinstance(value, Mapping):
        raise RunError(f"{where} must be an object", fix)
    return value


def _read_dataclass(cls: Any, record: Mapping[str, Any], where: str, fix: str) -> Any:
    """Return a dataclass from a JSON object; raise RunError for a missing field without a default."""
    values, hints = {}, get_type_hints(cls)
    for item in fields(cls):
        is_required = item.default is MISSING and item.default_factory is MISSING
        if item.name in record:
            values[item.name] = _read_value(hints[item.name], record[item.name], f"{where}: {item.name}", fix)
        elif is_required:
            raise RunError(f"{where}: {item.name} is missing", fix)
    return cls(**values)


def scalar(hint: Any, value: Any, where: str, fix: str) -> Any:
    """Return a value as a field's hint says (number, text, bool, None where optional, any), or raise RunError."""
    expected = next((kind for kind in get_args(hint) if kind is not types.NoneType), hint)
    is_optional = expected is not hint
    if expected is Any or (value is None and is_optional):
        return value
    accepted = (int, float) if expected is float else expected
    is_mixed_up = isinstance(value, bool) != (expected is bool)  # Python counts a bool as an int
    if not isinstance(value, accepted) or is_mixed_up:
        raise RunError(f"{where} must be {_NAMES[expected]}, not {value!r}", fix)
    if isinstance(value, int) and abs(value) >= 1 << 63:  # beyond what arrays count with, and soon beyond a float
        raise RunError(f"{where} is too large a number", fix)
    return expected(value)


def setting(hint: Any, value: Any, where: str) -> Any:
    """Return a value of YAML as what a field's hint says. Raises as `scalar`."""
    if get_origin(hint) is tuple:
        return _texts(value, where)
    takes_float = hint is float or float in get_args(hint)
    if takes_float and isinstance(value, str):
        with suppress(ValueError):  # YAML 1.1 takes 3e-3, without a point, for text
            value = float(value)
    return scalar(hint, value, where, "correct it")


def _texts(value: Any, where: str) -> tuple[str, ...]:
    """Return a text or a list of texts as a tuple; raise RunError for anything else."""
    items = [value] if isinstance(value, str) else value
    if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
        return tuple(items)
    raise RunError(f"{where} must be a list of text", "write [tied, untied], say")


def require(
    record: Any, names: str, holds: Callable[[Any], bool], fix: str, error: type[TiewiseError] = RunError
) -> None:
    """Raise `error` if a named field of a record is not None and fails the test `holds`.

    `names` are separated by spaces.
    """
    for name in names.split():
        value = getattr(record, name)
        if value is not None and not _passes(holds, value):
            raise error(f"{name} = {repr(value)[:80]}", fix)


def _passes(holds: Callable[[Any], bool], value: Any) -> bool:
    """Return whether a value passes a test. A value of a type that the test cannot read fails it."""
    try:
        return holds(value)
    except TypeError:  # a text instead of a number
        return False


def require_one(record: Any, name: str, known: Collection[str], error: type[TiewiseError] = RunError) -> None:
    """See that a field of a record is None or one of the known names; else raise the `error`, with the nearest."""
    value = getattr(record, name)
    is_known = isinstance(value, str) and value in known
    if value is not None and not is_known:
        raise error(f"{name} = {repr(value)[:80]}", suggest_choices(value, known))


_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
_UNNUMBERED = 0  # a writing error whose number is unknown
_NEARLY_FULL = 1 << 20  # bytes; what did not fit is larger
_RUST = re.compile(r"os error (\d+)")  # how safetensors and tokenizers print the system's error
_TORCH = re.compile(r"PytorchStreamWriter failed|inline_container|iostream error")  # torch.save keeps no error number


def disk_error(error: BaseException, out: Path, fix: str) -> RunError | None:
    """Return what to say where `error`, of any library, means that the disk of `out` took no more, else None."""
    code = _code(error)
    if code is None:
        return None
    path = out.absolute()
    mount = next(folder for folder in (path, *path.parents) if folder.is_mount())
    if code == _UNNUMBERED:
        is_full = shutil.disk_usage(mount).free < _NEARLY_FULL
        code = errno.ENOSPC if is_full else errno.EIO
    return RunError(f"cannot write to {out}: {os.strerror(code)} (file system {mount})", fix)


def _code(error: BaseException | None) -> int | None:
    """Return the number of a writing error, `_UNNUMBERED` if it has none; None if it is no writing error."""
    if isinstance(error, OSError):
        code = error.errno
    elif isinstance(error, Exception) and (match := _RUST.search(str(error))):
        code = int(match[1])
    elif isinstance(error, RuntimeError) and _TORCH.search(str(error)):
        return _UNNUMBERED
    else:
        return None
    return code if code in _CODES else None


@contextmanager
def quiet_threads() -> Iterator[None]:
    """Within this context a thread's writing error prints no traceback: whoever wrote through it gets the error."""
    before = threading.excepthook

    def print_other_errors(thrown: threading.ExceptHookArgs) -> None:
        if _code(thrown.exc_value) is None:
            before(thrown)

    threading.excepthook = print_other_errors
    try:
        yield
    finally:
        threading.excepthook = before
