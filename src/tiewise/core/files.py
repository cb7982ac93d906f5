"""Files that are written atomically, files of the package, and sizes in bytes.

A file is written under a neighbouring name, synced to the disk, and then renamed. A reader therefore sees the old file
or the new one, never a part.
"""

from __future__ import annotations

import errno
import json
import os
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiewise.core.errors import RunError
from tiewise.core.writing_faults import writing_fault
from tiewise.core.written_options import written_option


@contextmanager
def atomic_replacement(path: Path) -> Iterator[Path]:
    """Yield a neighbouring path to write, which becomes `path` at the block's end.

    If the block raises, the neighbour is deleted and `path` stays as it was.
    """
    partial = path.parent / f".{path.name}.{os.getpid()}.partial"  # another process may be writing the same file
    try:
        yield partial
        sync_to_disk(partial)
        partial.replace(path)
        sync_to_disk(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_atomically(path: Path, data: str | bytes) -> None:
    """Write text or bytes so that a kill leaves the old file or the new one.

    Raises:
        OSError: the file cannot be written.
    """
    with atomic_replacement(path) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)


def write_result(data: str | bytes, path: str | os.PathLike[str], option: str) -> Path:
    """Write a result that the user requested, atomically, and return its path.

    Raises:
        RunError: the file cannot be written; the message names the `option` that sets another path, such as "out".
    """
    target = Path(path)
    try:
        write_atomically(target, data)
    except OSError as error:
        remedy = writing_fault(error).remedy(f"choose another place with {written_option(option)}")
        raise RunError(f"cannot write {target}: {error.strerror}", remedy) from None
    return target


def sync_to_disk(path: Path) -> None:
    """Sync a file, or a folder's entries, to the disk.

    A folder is synced only on systems that can open one.
    """
    is_folder = path.is_dir()
    if is_folder and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR | getattr(os, "O_BINARY", 0))
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not is_folder or error.errno != errno.EINVAL:  # some network file systems sync no folders
            raise
    finally:
        os.close(descriptor)


def read_packaged_json(path: str) -> Any:
    """Return the content of a JSON file of the package, by its path below `tiewise/`."""
    # instead of importlib.resources, which imports tempfile and shutil: a tenth of the time of `tiewise plan`
    data = pkgutil.get_data("tiewise", path)
    assert data is not None, path  # None only for import loaders that store no data; Python's own loaders all do
    return json.loads(data)


def cache_folder() -> Path:
    """Return tiewise's folder in the user's cache, which may not exist yet.

    Raises:
        RuntimeError: the user has no home folder.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "tiewise"


def format_bytes(bytes_: float) -> str:
    """Return a size in words, such as "12.3 MB", with decimal units.

    >>> format_bytes(12_345_678)
    '12.3 MB'
    """
    if bytes_ < 999.5:  # three digits would write a larger number as 1e+03
        return f"{bytes_:.0f} bytes"
    for unit in ("kB", "MB", "GB", "TB"):
        bytes_ /= 1000
        if bytes_ < 999.5:
            return f"{bytes_:.3g} {unit}"
    return f"{bytes_:,.0f} TB"
