"""A folder beside the destination that becomes the result, or goes away whatever happens.

Its name is `.<destination>.tiewise-<process>-<random>`, and its process locks a file of that name and `.lock`. A
failure, Ctrl-C, SIGTERM or SIGHUP removes both. A process that is killed leaves them; the next run for the same
destination finds nobody holding the lock, and removes them.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from tiewise.core import ctrl_c
from tiewise.core.errors import CheckpointError
from tiewise.core.files import sync
from tiewise.rewrite.place import cannot_write

LOCK = ".lock"


@contextmanager
def temporary(real: Path) -> Iterator[Path]:
    """Make an empty folder beside `real`; removed at the end unless it has been renamed.

    Raises:
        CheckpointError: it cannot be made.
    """
    sweep(real)
    path = real.parent / f".{real.name}.tiewise-{os.getpid()}-{secrets.token_hex(4)}"
    lock = _lock(path)
    with ctrl_c.ending() as ending:
        try:
            try:
                _taken(lock)
                try:
                    path.mkdir()
                except OSError as error:
                    raise cannot_write(real, error) from None
                yield path
            finally:
                ending.hold()
        finally:  # also where a signal raised just before it was held
            shutil.rmtree(path, ignore_errors=True)
            _released(lock)


def become(path: Path, real: Path) -> None:
    """Rename the finished folder to its destination, in one step.

    Raises:
        CheckpointError: something has come to lie there meanwhile.
    """
    with ctrl_c.ending() as ending:
        ending.hold()  # the result is complete, and stays
        try:
            if os.name == "nt" and real.is_dir():
                real.rmdir()  # Windows puts no folder in the place of an empty one
            os.replace(path, real)
        except OSError as error:
            what = f"{real}: the finished result cannot get its name ({error.strerror})"
            raise CheckpointError(what, "something else was put there meanwhile: give another place") from None
        with suppress(OSError):  # a parent that may be written but not read; the result is complete all the same
            sync(real.parent)


def sweep(real: Path) -> None:
    """Remove what killed runs for this destination have left beside it."""
    ours = re.compile(rf"(\.{re.escape(real.name)}\.tiewise-(\d+)-[0-9a-f]{{8}})(?:{re.escape(LOCK)})?")
    try:
        names = os.listdir(real.parent)
    except OSError:  # a folder that may be written but not listed
        return
    found = {match[1]: int(match[2]) for match in map(ours.fullmatch, names) if match}
    for name, process in found.items():
        if not _alive(process):
            lock = _lock(real.parent / name)
            if _taken(lock):  # else held on another machine, or on a file system that cannot tell
                shutil.rmtree(real.parent / name, ignore_errors=True)
                _released(lock)


def _lock(path: Path) -> FileLock:
    return FileLock(path.with_name(path.name + LOCK), timeout=0.2)  # a moment, for a file that just vanishes


def _taken(lock: FileLock) -> bool:
    try:
        lock.acquire()
    except (Timeout, OSError, NotImplementedError):
        return False
    return True


def _released(lock: FileLock) -> None:
    """Release a lock, and remove its file first: whoever opened that meanwhile sees that it is gone."""
    with suppress(OSError):
        os.unlink(lock.lock_file)
    lock.release()


def _alive(process: int) -> bool:
    if os.name == "nt":  # where asking would press Ctrl-C; the lock tells
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # somebody else's
        return True
    return True
