"""A folder that appears whole: it is made next to its destination, then renamed, or removed.

Its name is `.<destination>.tiewise-<process>-<random>` at first, and its process locks a file of that name and `.lock`.
A failure, Ctrl-C, SIGTERM or SIGHUP removes both. A process that is killed leaves them; the next run for the same
destination finds nobody holding the lock, and removes them.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from tiewise.checkpoint.hf_folder import Folder
from tiewise.checkpoint.stored import CHUNK_BYTES
from tiewise.checkpoint.untrusted import open_regular
from tiewise.core.errors import CheckpointError
from tiewise.core.files import sync_to_disk
from tiewise.core.interrupts import graceful_signals

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows, which has no reflinks either
    fcntl = None

LOCK = ".lock"
_FICLONE = 0x40049409  # linux/fs.h: share all blocks of one file with another, copied when either is written


def destination(source: Folder, to: Path) -> Path:
    """Return the real path that the result will have.

    Raises:
        CheckpointError: something is there already, or the path is inside the source or around it.
    """
    if "\0" in os.fspath(to):
        raise CheckpointError(f"{os.fspath(to)!r}: no path", "leave out the null byte")
    real, old = Path(os.path.realpath(to)), Path(os.path.realpath(source.path))
    is_nested = real.is_relative_to(old) or old.is_relative_to(real)
    if is_nested and not source.single:
        raise CheckpointError(f"{to}: it and the source {source.path} lie one in the other", "give a place of its own")
    if not real.parent.is_dir():
        raise CheckpointError(f"{to}: {real.parent} is no folder", "make it first, or give another place")
    _require_nothing_there(to, real)
    return real


def _require_nothing_there(to: Path, real: Path) -> None:
    """Raise unless there is nothing, or an empty folder, at `real`.

    `to` is the name for errors.
    """
    try:
        names = os.listdir(real)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise CheckpointError(f"{to}: a file lies there", "give a new folder: nothing is overwritten") from None
    except OSError as error:
        raise cannot_write(to, error) from None
    if names:
        raise CheckpointError(f"{to}: the folder is not empty", "give a new one: nothing is overwritten")


def cannot_write(to: Path, error: OSError) -> CheckpointError:
    """Return the error that says why nothing could be written at `to`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return CheckpointError(f"{to}: no space left while writing ({error.strerror})", "free some, or write elsewhere")
    return CheckpointError(f"{to}: cannot be written ({error.strerror or error})", "give a folder that you may write")


@contextmanager
def temporary_folder(real: Path) -> Iterator[Path]:
    """Make an empty folder next to `real`.

    It is removed at the end unless it was renamed.
    """
    remove_leftovers(real)
    path = real.parent / f".{real.name}.tiewise-{os.getpid()}-{secrets.token_hex(4)}"
    lock = _lock(path)
    with graceful_signals() as signals:
        try:
            try:
                _try_to_lock(lock)
                try:
                    path.mkdir()
                except OSError as error:
                    raise cannot_write(real, error) from None
                yield path
            finally:
                signals.is_deferring = True
        finally:  # also where a signal raised just before it was held
            shutil.rmtree(path, ignore_errors=True)
            _unlock(lock)


def rename_to_destination(path: Path, real: Path) -> None:
    """Rename the finished folder to its destination, in one step.

    Raises:
        CheckpointError: something was put there meanwhile.
    """
    with graceful_signals() as signals:
        signals.is_deferring = True  # the result is complete, and stays
        try:
            if os.name == "nt" and real.is_dir():
                real.rmdir()  # Windows puts no folder in the place of an empty one
            os.replace(path, real)
        except OSError as error:
            problem = f"{real}: the finished result cannot get its name ({error.strerror})"
            raise CheckpointError(problem, "something else was put there meanwhile: give another place") from None
        with suppress(OSError):  # a parent that may be written but not read; the result is complete all the same
            sync_to_disk(real.parent)


def remove_leftovers(real: Path) -> None:
    """Remove the folders and locks that killed runs for this destination left next to it."""
    ours = re.compile(rf"(\.{re.escape(real.name)}\.tiewise-\d+-[0-9a-f]{{8}})(?:{re.escape(LOCK)})?")
    names: list[str] = []
    with suppress(OSError):  # a folder that may be written but not listed
        names = os.listdir(real.parent)
    matches = (ours.fullmatch(name) for name in names)
    for name in {match[1] for match in matches if match}:
        lock = _lock(real.parent / name)
        if _try_to_lock(lock):  # else its process lives, here or on another machine, or the file system cannot tell
            shutil.rmtree(real.parent / name, ignore_errors=True)
            _unlock(lock)


def _lock(path: Path) -> FileLock:
    """Return the lock of the process that makes a folder, not locked yet."""
    return FileLock(path.with_name(path.name + LOCK), timeout=0.2)  # a moment, for a file that just vanishes


def _try_to_lock(lock: FileLock) -> bool:
    """Lock a lock, and return True if this process has it now.

    It lacks it if another process has it, or if the file system has no locks.
    """
    with suppress(Timeout, OSError, NotImplementedError):
        lock.acquire()
    return lock.is_locked


def _unlock(lock: FileLock) -> None:
    """Release a lock, and remove its file first.

    A process that opened the file meanwhile sees that it is gone.
    """
    with suppress(OSError):
        os.unlink(lock.lock_file)
    lock.release()


def link_or_copy(source: Path, target: Path) -> bool:
    """Give `target` the content of `source` by reflink, hard link or copy.

    Return True if the two share bytes on disk.
    """
    if fcntl is not None:
        descriptor = open_regular(source)
        try:
            with open(target, "xb") as new:
                fcntl.ioctl(new.fileno(), _FICLONE, descriptor)
                os.fsync(new.fileno())
            return True
        except OSError:
            target.unlink(missing_ok=True)
        finally:
            os.close(descriptor)
    with suppress(OSError):  # another file system, or one without links, or a file of somebody else
        os.link(os.path.realpath(source), target)
        return True
    copy_file(source, target)
    return False


def copy_file(source: Path, target: Path) -> None:
    """Copy the content of `source` to `target`, and sync it to disk."""
    descriptor = open_regular(source)
    with os.fdopen(descriptor, "rb", buffering=0) as old, open(target, "xb") as new:
        shutil.copyfileobj(old, new, CHUNK_BYTES)
        new.flush()
        os.chmod(target, os.fstat(descriptor).st_mode & 0o777 | stat.S_IWUSR)
        os.fsync(new.fileno())
