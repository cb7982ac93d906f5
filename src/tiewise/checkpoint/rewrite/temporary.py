"""A folder beside the destination that becomes the result, or goes away whatever happens.

Its name is `.<destination>.tiewise-<process>-<random>`, and its process holds a lock on it. A process that is killed
leaves the folder behind; the next run for the same destination finds nobody holding the lock, and removes it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tiewise.checkpoint.rewrite.place import cannot_write, sync_folder
from tiewise.errors import CheckpointError


@contextmanager
def temporary(real: Path) -> Iterator[Path]:
    """Make an empty folder beside `real`; removed at the end unless it has been renamed.

    Raises:
        CheckpointError: it cannot be made.
    """
    sweep(real)
    path = real.parent / f".{real.name}.tiewise-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        path.mkdir()
    except OSError as error:
        raise cannot_write(real, error) from None
    lock = _lock(path)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def become(path: Path, real: Path) -> None:
    """Rename the finished folder to its destination, in one step.

    Raises:
        CheckpointError: something has come to lie there meanwhile.
    """
    try:
        os.rename(path, real)
    except OSError as error:
        what = f"{real}: the finished result cannot get its name ({error.strerror})"
        raise CheckpointError(what, "something else was put there meanwhile: give another place") from None
    with suppress(OSError):  # a parent that may be written but not read; the result is complete all the same
        sync_folder(real.parent)


def sweep(real: Path) -> None:
    """Remove what killed runs for this destination have left beside it."""
    ours = re.compile(rf"\.{re.escape(real.name)}\.tiewise-(\d+)-[0-9a-f]{{8}}")
    try:
        names = os.listdir(real.parent)
    except OSError:  # a folder that may be written but not listed
        return
    for name in names:
        match = ours.fullmatch(name)
        if match and not _alive(int(match.group(1))):
            _remove_unheld(real.parent / name)


def _remove_unheld(path: Path) -> None:
    lock = _lock(path)
    if lock is not None:  # else held on another machine, or on a file system that cannot tell
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _lock(path: Path) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except OSError:
        os.close(descriptor)
        return None


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # somebody else's
        return True
    return True
