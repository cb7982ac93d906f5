"""One process at a time works in an output folder: a lock on `OUT/.lock`, which a crash releases by itself."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tiewise.errors import RunError
from tiewise.training import ranks
from tiewise.training.folder import LOCK


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Hold `out` for as long as the context lasts; of several processes of one run the first holds it for all.

    A folder that was made for the lock alone is gone afterwards, and so is the lock's file.

    Raises:
        RunError: another run works in `out`, or it cannot be written.
    """
    with ExitStack() as stack:
        ranks.first_does(lambda: stack.enter_context(_held(out)))
        yield


@contextmanager
def _held(out: Path) -> Iterator[None]:
    if out.exists() and not out.is_dir():
        raise RunError(f"{out} is a file", "choose another --out")
    absent = [folder for folder in (out, *out.parents) if not folder.exists()]
    path = out / LOCK
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = _opened(path)
    except OSError as error:
        raise RunError(f"cannot write to {out}: {error.strerror}", "choose another --out") from None
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # before it is released: whoever opened it meanwhile sees that it is gone
        os.close(handle)
        with suppress(OSError):
            for folder in absent:
                folder.rmdir()


def _opened(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise RunError(f"another run is at work in {path.parent}", "wait for it, or choose another --out") from None
        except OSError:
            return handle  # a file system without locks: nothing can be known there
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        os.close(handle)  # its holder removed it between the two calls
