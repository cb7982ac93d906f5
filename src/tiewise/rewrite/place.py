"""Where a result may go, and how an unchanged file gets there: sharing its bytes with the source where it can."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Any

from tiewise.checkpoint.hf_folder import Folder
from tiewise.checkpoint.stored import CHUNK_BYTES
from tiewise.checkpoint.untrusted import open_regular
from tiewise.core.errors import CheckpointError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows, which has no reflinks either
    fcntl = None

_FICLONE = 0x40049409  # linux/fs.h: share all blocks of one file with another, copied when either is written
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def destination(folder: Folder, to: Path) -> Path:
    """Return the real path that the result will have.

    Raises:
        CheckpointError: something is there, its parent is no folder, or it and the source lie one in the other.
    """
    if "\0" in os.fspath(to):
        raise CheckpointError(f"{os.fspath(to)!r}: no path", "leave out the null byte")
    real, source = Path(os.path.realpath(to)), Path(os.path.realpath(folder.path))
    if not folder.single and (real.is_relative_to(source) or source.is_relative_to(real)):
        raise CheckpointError(f"{to}: it and the source {folder.path} lie one in the other", "give a place of its own")
    if not real.parent.is_dir():
        raise CheckpointError(f"{to}: {real.parent} is no folder", "make it first, or give another place")
    try:
        filled = bool(os.listdir(real))
    except FileNotFoundError:
        return real
    except NotADirectoryError:
        raise CheckpointError(f"{to}: a file lies there", "give a new folder: nothing is overwritten") from None
    except OSError as error:
        raise cannot_write(to, error) from None
    if filled:
        raise CheckpointError(f"{to}: the folder is not empty", "give a new one: nothing is overwritten")
    return real


def cannot_write(to: Path, error: OSError) -> CheckpointError:
    """Return the error that says why nothing could be written at `to`."""
    if error.errno in _FULL:
        return CheckpointError(f"{to}: no space left while writing ({error.strerror})", "free some, or write elsewhere")
    return CheckpointError(f"{to}: cannot be written ({error.strerror or error})", "give a folder that you may write")


def require_space(to: Path, parent: Path, need: int) -> None:
    """Raise where the file system of `parent` has less than `need` bytes free.

    Raises:
        CheckpointError: with both numbers.
    """
    try:
        free = shutil.disk_usage(parent).free
    except OSError as error:
        raise cannot_write(to, error) from None
    if free < need:
        raise CheckpointError(f"{to}: {need:,} bytes are needed and {free:,} are free", "free some, or write elsewhere")


def share(source: Path, target: Path) -> bool:
    """Give `target` the content of `source` by reflink, hard link or copy; whether the two share bytes on disk.

    Raises:
        OSError: it cannot be written.
    """
    real = os.path.realpath(source)
    if _reflink(source, target):
        return True
    try:
        os.link(real, target)
        return True
    except OSError:  # another file system, or one without links, or a file of somebody else
        copy(source, target)
        return False


def copy(source: Path, target: Path) -> None:
    """Give `target` the content of `source` as bytes of its own, on the disk when this returns.

    Raises:
        CheckpointError: the source cannot be read.
        OSError: the target cannot be written.
    """
    descriptor = open_regular(source)
    with os.fdopen(descriptor, "rb", buffering=0) as old, open(target, "xb") as new:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        while piece := old.read(CHUNK_BYTES):
            new.write(piece)
        new.flush()
        os.chmod(target, mode & 0o777 | stat.S_IWUSR)
        os.fsync(new.fileno())


def _reflink(source: Path, target: Path) -> bool:
    if fcntl is None:
        return False
    descriptor = open_regular(source)
    try:
        with open(target, "xb") as new:
            fcntl.ioctl(new.fileno(), _FICLONE, descriptor)
            os.fsync(new.fileno())
        return True
    except OSError:
        target.unlink(missing_ok=True)
        return False
    finally:
        os.close(descriptor)
