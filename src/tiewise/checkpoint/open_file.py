"""Open a file that may be anything: regular files only, never a pipe that blocks, never outside its folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tiewise.core.errors import CheckpointError


def open_regular(path: str | os.PathLike[str]) -> int:
    """Return a descriptor for reading; the caller closes it.

    Raises:
        CheckpointError: missing, not permitted, or no regular file.
    """
    name = os.fspath(path)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointError(f"{name}: no such file", "check the path") from None
    except PermissionError:
        raise CheckpointError(f"{name}: no permission to read it", f"chmod u+r {name}, or ask its owner") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise CheckpointError(f"{name!r}: cannot be opened ({_reason(error)})", "check the path") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{name}: not a regular file", "give a checkpoint folder or a file of tensors")
    return descriptor


def read_whole(path: str | os.PathLike[str], most: int) -> bytes:
    """Return all bytes of a file of at most `most` bytes.

    Raises:
        CheckpointError: as `open_regular`, or the file is larger.
    """
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size > most:
            fix = "no file of this kind is that large: take it from its source again"
            raise CheckpointError(f"{os.fspath(path)}: {size:,} bytes", fix)
        try:
            return file.read(most)
        except OSError as error:
            raise CheckpointError(f"{os.fspath(path)}: cannot be read ({_reason(error)})", "check the disk") from None


def inside(folder: Path, name: str) -> Path:
    """Return the file `name` of a checkpoint folder, after checking that it lies there.

    Links are followed within the folder, and into the `blobs` beside the `snapshots` of a Hugging Face cache.

    Raises:
        CheckpointError: an absolute name, one with `..`, or a link that leads out.
    """
    fix = "nothing outside a checkpoint is read: put the file itself there"
    if not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
        raise CheckpointError(f"{folder}: it names the file {name[:80]!r}, which lies outside the folder", fix)
    path = folder / name
    if os.path.basename(name) == name != "." and not os.path.islink(path):
        return path
    try:
        home, real = folder.resolve(), path.resolve()
    except UnicodeEncodeError:
        raise CheckpointError(f"{folder}: it names the file {name[:80]!r}, a name that no file has", fix) from None
    except (OSError, RuntimeError):  # a loop of links
        raise CheckpointError(f"{path}: a link that leads nowhere", fix) from None
    homes = [home]
    if home.parent.name == "snapshots" and (home.parent.parent / "blobs").is_dir():
        homes.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in homes):
        raise CheckpointError(f"{path}: a link that leads outside the folder", fix)
    return path


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
