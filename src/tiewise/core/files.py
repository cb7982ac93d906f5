"""Files that are there whole or not at all, those that come with the package, and sizes for a person.

To write one, a neighbour is written, brought to the disk, and takes the name.
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


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a neighbour of `path` to write; it gets that name at the end of the block, and goes where the block raises.

    Raises:
        OSError: it cannot be written there.
    """
    made = path.parent / f".{path.name}.{os.getpid()}.partial"  # another process may be writing the same
    try:
        yield made
        sync(made)
        made.replace(path)
        sync(path.parent)
    finally:
        made.unlink(missing_ok=True)


def write_whole(path: Path, data: str | bytes) -> None:
    """Write a text or bytes so that a kill leaves the old file or the new one; raises as `written_whole`."""
    with written_whole(path) as made:
        made.write_bytes(data.encode() if isinstance(data, str) else data)


def sync(path: Path) -> None:
    """Bring a file, or a folder's entries, to the disk; a folder only where the system can open one.

    Raises:
        OSError: it cannot be opened or brought there.
    """
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
    """Return what a JSON file of the package holds, by its path below `tiewise/`.

    By pkgutil: importlib.resources, which it stands for, imports tempfile and shutil, a tenth of a plan's time.

    Raises:
        FileNotFoundError: there is no such file.
    """
    data = pkgutil.get_data("tiewise", path)
    assert data is not None, path  # None only for loaders that keep no data; Python's own all do
    return json.loads(data)


def size(bytes_: float) -> str:
    """12.3 MB, in powers of ten as disks and checkpoints are sold."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if bytes_ < 999.5:  # which three digits would write as 1e+03
            return f"{bytes_:.0f} {unit}" if unit == "bytes" else f"{bytes_:.3g} {unit}"
        bytes_ /= 1000
    return f"{bytes_:.3g} TB" if bytes_ < 999.5 else f"{bytes_:,.0f} TB"
