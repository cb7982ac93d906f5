"""Version of tiewise's losses, by which cached times of another one are not used."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tiewise.core import __version__

SOURCES = Path(__file__).parent


@cache
def kernel_version() -> str:
    """Return tiewise's version and a hash of the sources of its losses, such as "0.2.0 1f0c5a9e2b7d"."""
    return f"{__version__} {hash_sources(kernel_sources(SOURCES))[:12]}"


def kernel_sources(folder: Path) -> list[Path]:
    """Return the Python and C++ files of a folder."""
    return [*folder.glob("*.py"), *folder.glob("*.cpp")]


def hash_sources(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of files with their names, in sorted order."""
    total = hashlib.sha256()
    for path in sorted(paths, key=lambda path: path.parts[-3:]):
        total.update(f"{path.name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\0".encode())
    return total.hexdigest()
