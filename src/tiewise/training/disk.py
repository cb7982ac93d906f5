"""Errors of writing, from whichever library wrote: a disk that is full, gone or read-only, said in one line."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiewise.core.errors import RunError

_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
_NEARLY_FULL = 1 << 20  # bytes; what did not fit is larger
_RUST = re.compile(r"os error (\d+)")  # how safetensors and tokenizers print the system's error
_TORCH = re.compile(r"PytorchStreamWriter failed|inline_container|iostream error")  # torch.save keeps no error number


def disk_error(error: BaseException, out: Path, fix: str) -> RunError | None:
    """Return what to say where `error` means that the disk of `out` did not take what was written to it, else None.

    Args:
        error: from any library: OSError, the error classes of Rust libraries, `torch.save`'s RuntimeError.
        out: the folder that was written to.
        fix: the way out.
    """
    code = _code(error)
    if code is None:
        return None
    mount = _mount(out)
    if code == 0:
        code = errno.ENOSPC if shutil.disk_usage(mount).free < _NEARLY_FULL else errno.EIO
    return RunError(f"cannot write to {out}: {os.strerror(code)} (file system {mount})", fix)


def _code(error: BaseException) -> int | None:
    """Return the system's error number, 0 where it is a writing error of unknown number, None where it is none."""
    if isinstance(error, OSError):
        return error.errno if error.errno in _CODES else None
    if isinstance(error, Exception) and (found := _RUST.search(str(error))):
        return int(found[1]) if int(found[1]) in _CODES else None
    return 0 if isinstance(error, RuntimeError) and _TORCH.search(str(error)) else None


def _mount(path: Path) -> Path:
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_mount())


@contextmanager
def quiet_threads() -> Iterator[None]:
    """Within this context a thread's writing error prints no traceback: whoever wrote through it gets the error."""
    before = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is None or _code(arguments.exc_value) is None:
            before(arguments)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before
