"""One process at a time works in an output folder: a lock on `OUT/.lock`, which a crash releases by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from tiewise.core.errors import RunError
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
    lock = FileLock(out / LOCK, timeout=0.2, mode=0o644)  # a moment, for a file that its holder just removes
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise RunError(f"another run is at work in {out}", "wait for it, or choose another --out") from None
    except NotImplementedError:
        pass  # a file system without locks: nothing can be known there
    except OSError as error:
        raise RunError(f"cannot write to {out}: {error.strerror}", "choose another --out") from None
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(lock.lock_file)  # before it is released: whoever opened it meanwhile sees that it is gone
        lock.release()
        with suppress(OSError):
            for folder in absent:
                folder.rmdir()
