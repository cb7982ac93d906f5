"""Errors of a full, read-only or broken disk, as any library reports them."""

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
from tiewise.core.writing_faults import writing_fault

_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
_UNNUMBERED = 0  # a writing error whose number is unknown
_NEARLY_FULL = 1 << 20  # bytes that are free; the write that failed was larger
_RUST = re.compile(r"os error (\d+)")  # how safetensors and tokenizers print the system's error
_TORCH = re.compile(r"PytorchStreamWriter failed|inline_container|iostream error")  # torch.save drops the error number


def disk_error(error: BaseException, out: Path, next_step: str) -> RunError | None:
    """Return a RunError if `error` means that the disk of `out` failed; else None.

    Args:
        error: an error that may come from any library.
        out: the folder that is written.
        next_step: what follows the remedy, such as "then COMMAND".
    """
    code = _error_code(error)
    if code is None:
        return None
    path = out.absolute()
    mount = next(folder for folder in (path, *path.parents) if folder.is_mount())
    if code == _UNNUMBERED:
        is_full = shutil.disk_usage(mount).free < _NEARLY_FULL
        code = errno.ENOSPC if is_full else errno.EIO
    reason = os.strerror(code)
    cure = writing_fault(OSError(code, reason)).cure
    return RunError(f"cannot write to {out}: {reason} (file system {mount})", f"{cure}, {next_step}")


def system_error(error: BaseException) -> OSError | None:
    """Return the system's error behind a library's error; None if it is no writing error."""
    if isinstance(error, OSError):
        return error
    code = _error_code(error)
    if code is None:
        return None
    code = code or errno.EIO  # if the library drops the number
    return OSError(code, os.strerror(code))


def _error_code(error: BaseException | None) -> int | None:
    """Return the number of a writing error, `_UNNUMBERED` if it has none; None for other errors."""
    if isinstance(error, OSError):
        code = error.errno
    elif isinstance(error, Exception) and (match := _RUST.search(str(error))):
        code = int(match[1])
    elif isinstance(error, RuntimeError) and _TORCH.search(str(error)):
        return _UNNUMBERED
    else:
        return None
    return code if code in _CODES else None


@contextmanager
def quiet_threads() -> Iterator[None]:
    """Suppress the tracebacks of threads that fail with a writing error.

    The code that wrote through the thread gets the error itself.
    """
    before = threading.excepthook

    def print_other_errors(thrown: threading.ExceptHookArgs) -> None:
        """Print the traceback of all but writing errors."""
        if _error_code(thrown.exc_value) is None:
            before(thrown)

    threading.excepthook = print_other_errors
    try:
        yield
    finally:
        threading.excepthook = before
