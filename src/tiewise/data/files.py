"""Which files a path, a folder or a pattern means, in an order that does not depend on the file system.

In a folder and its subfolders: every file that begins as text, and every `.jsonl` and `.parquet`; hidden ones (a
leading dot) and empty ones are passed over.
"""

from __future__ import annotations

import codecs
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from tiewise.core.errors import DataError
from tiewise.data.plain_text import opened, unreadable

TABLES = (".jsonl", ".ndjson", ".parquet")
_SNIFFED = 8192  # bytes that decide whether a file found in a folder is text


def find_files(text: str) -> tuple[Path, ...]:
    """Return the files that `text` means: the file itself, a folder's, or those that match a pattern.

    Raises:
        DataError: where that is none, or one that was named itself is empty.
    """
    path = Path(text).expanduser()
    if not os.path.lexists(path) and glob.has_magic(text):
        matches = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        files = tuple(file for file in matches if file.is_file() and _size(file))
        if not files:
            raise DataError(f"no file with text matches {text!r}", "check the pattern; ** goes into subfolders")
        return files
    if _is_folder(path):
        files = tuple(_text_files(path))
        if not files:
            raise DataError(f"the folder {text!r} holds no text files", "name a folder with .txt, .md or .jsonl files")
        return files
    if path.is_file() and not _size(path):
        raise DataError(f"the file {text!r} is empty", "give a file with text in it")
    return (path,)


def _is_folder(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        raise unreadable(path, error) from None
    return path.is_dir()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from None


def _text_files(folder: Path) -> Iterator[Path]:
    for where, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(where, name)
            if not name.startswith(".") and path.is_file() and _size(path) and _is_text(path):
                yield path


def _refuse(error: OSError) -> None:
    raise unreadable(error.filename, error) from None


def _is_text(path: Path) -> bool:
    if path.suffix in TABLES:
        return True
    with opened(path) as file:
        start = file.read(_SNIFFED)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return b"\0" not in start
