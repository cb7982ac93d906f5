"""Folder that appears complete: it is written next to its destination, then renamed or removed.

Its first name is `.<destination>.tiewise-<process>-<random>`. The process locks a file of that name with `.lock`
appended. A failure, Ctrl-C, SIGTERM or SIGHUP removes both. A process that is killed leaves them. The next run for the
same destination can take the lock, and removes them.
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
from tiewise.core.writing_faults import writing_fault

fcntl: Any
try:
    import fcntl
except ImportError:  # on Windows, which also lacks reflinks
    fcntl = None

LOCK = ".lock"
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)  # errors of a rename onto something else
_FICLONE = 0x40049409  # request of linux/fs.h: share all blocks of two files, copy on write


def destination(source: Folder, to: Path) -> Path:
    """Return the destination without symbolic links.

    Raises:
        CheckpointError: the path is taken, or it is inside the source or contains it.
    """
    if "\0" in os.fspath(to):
        raise CheckpointError(f"{os.fspath(to)!r}: no path", "leave out the null byte")
    real, old = Path(os.path.realpath(to)), Path(os.path.realpath(source.path))
    is_nested = real.is_relative_to(old) or old.is_relative_to(real)
    if is_nested and not source.single:
        raise CheckpointError(
            f"{to}: this folder and the source {source.path} contain one another", "choose a separate folder"
        )
    if not real.parent.is_dir():
        raise CheckpointError(f"{to}: {real.parent} is not a folder", "create it first, or choose another path")
    _require_nothing_there(to, real)
    return real


def _require_nothing_there(to: Path, real: Path) -> None:
    """Raise if `real` is a file or a folder that is not empty.

    Args:
        to: the destination as the caller wrote it, for the message.
    """
    try:
        names = os.listdir(real)
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise CheckpointError(f"{to}: a file has this path", "choose a new folder: nothing is overwritten") from None
    except OSError as error:
        raise cannot_write(to, error) from None
    if names:
        raise CheckpointError(f"{to}: the folder is not empty", "choose a new one: nothing is overwritten")


def cannot_write(to: Path, error: OSError) -> CheckpointError:
    """Return an error that says why `to` could not be written."""
    fault = writing_fault(error)
    return CheckpointError(f"{to}: {fault.meaning} ({error.strerror or error})", fault.remedy())


@contextmanager
def temporary_folder(real: Path) -> Iterator[Path]:
    """Create an empty folder next to `real`, and remove it at the end.

    A folder that was renamed meanwhile stays.
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
        finally:  # also if a signal raised an exception just before signals were deferred
            shutil.rmtree(path, ignore_errors=True)
            _unlock(lock)


def rename_to_destination(path: Path, real: Path) -> None:
    """Rename the finished folder to its destination, in one step.

    Raises:
        CheckpointError: the destination was taken meanwhile.
    """
    with graceful_signals() as signals:
        signals.is_deferring = True  # signals wait: the result is complete and must stay
        try:
            if os.name == "nt" and real.is_dir():
                real.rmdir()  # Windows cannot rename onto an empty folder
            os.replace(path, real)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise cannot_write(real, error) from None
            problem = f"{real}: the finished result cannot get its name ({error.strerror})"
            raise CheckpointError(problem, "another program created it meanwhile: choose another path") from None
        with suppress(OSError):  # the parent may be writable and not readable; the result is complete anyway
            sync_to_disk(real.parent)


def remove_leftovers(real: Path) -> None:
    """Remove temporary folders and locks that killed runs left next to a destination."""
    ours = re.compile(rf"(\.{re.escape(real.name)}\.tiewise-\d+-[0-9a-f]{{8}})(?:{re.escape(LOCK)})?")
    names: list[str] = []
    with suppress(OSError):  # the folder may be writable and not readable
        names = os.listdir(real.parent)
    matches = (ours.fullmatch(name) for name in names)
    for name in {match[1] for match in matches if match}:
        lock = _lock(real.parent / name)
        if _try_to_lock(lock):  # fails if its process is alive here or on another machine, or without file locks
            shutil.rmtree(real.parent / name, ignore_errors=True)
            _unlock(lock)


def _lock(path: Path) -> FileLock:
    """Return the lock for a temporary folder, not acquired yet."""
    return FileLock(path.with_name(path.name + LOCK), timeout=0.2)  # in s: the lock's file may vanish at this moment


def _try_to_lock(lock: FileLock) -> bool:
    """Try to acquire a lock, and return True on success.

    It fails if another process has the lock, or if the file system has no locks.
    """
    with suppress(Timeout, OSError, NotImplementedError):
        lock.acquire()
    return lock.is_locked


def _unlock(lock: FileLock) -> None:
    """Remove the file of a lock, then release the lock.

    In this order, a process that opened the file meanwhile sees that it is gone.
    """
    with suppress(OSError):
        os.unlink(lock.lock_file)
    lock.release()


def link_or_copy(source: Path, target: Path) -> bool:
    """Create `target` with the content of `source`, by reflink, hard link or copy.

    Return True if the two files share bytes on disk.
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
    with suppress(OSError):  # fails on another file system, without hard links, or for a file of another user
        os.link(os.path.realpath(source), target)
        return True
    copy_file(source, target)
    return False


def copy_file(source: Path, target: Path) -> None:
    """Copy the content of `source` to a new file `target`, and sync it to disk."""
    descriptor = open_regular(source)
    with os.fdopen(descriptor, "rb", buffering=0) as old, open(target, "xb") as new:
        shutil.copyfileobj(old, new, CHUNK_BYTES)
        new.flush()
        os.chmod(target, os.fstat(descriptor).st_mode & 0o777 | stat.S_IWUSR)
        os.fsync(new.fileno())
