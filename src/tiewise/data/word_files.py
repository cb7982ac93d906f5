"""The three files of a word-level corpus: whole ones, or parts of them by lines, so that two files can make three."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tiewise.core.errors import DataError
from tiewise.data.plain_text import opened

FILES = ("train.txt", "valid.txt", "test.txt")
_PART = re.compile(r"(?P<name>.+?)(?:@(?P<low>\d+)-(?P<high>\d+))?")
_FIX = "write valid.txt@0-90 or valid.txt@90-100, say, in per cent of its lines"


@dataclass(frozen=True)
class WordFile:
    """Lines `first` to `last` (not included; None: to the end) of a file, and how that was written."""

    path: Path
    first: int
    last: int | None
    text: str

    def holds(self, line: int) -> bool:
        """Whether the line of this number, from 0, belongs to it."""
        return self.first <= line and (self.last is None or line < self.last)

    def __str__(self) -> str:
        return self.text


def word_files(corpus: str, files: Sequence[str] = ()) -> tuple[WordFile, WordFile, WordFile]:
    """Find the training, validation and test file of a corpus; `files` as `prepare_words` takes them.

    Raises:
        DataError: no folder, a file that is not there, a part that cannot be read, or not three files.
    """
    folder = Path(corpus).expanduser()
    if not folder.is_dir():
        raise DataError(f"no corpus folder {corpus!r}", f"name a folder with {', '.join(FILES)}")
    names = tuple(files) or FILES
    if len(names) != len(FILES):
        what = f"{len(names)} files ({', '.join(names)}) for training, validation and test"
        raise DataError(what, "name three; parts of one file are valid.txt@0-90 and valid.txt@90-100")
    train, valid, test = (_file(folder, name) for name in names)
    return train, valid, test


def _file(folder: Path, text: str) -> WordFile:
    part = _PART.fullmatch(text)
    if part is None or "@" in part["name"]:
        raise DataError(f"{text!r} names no part of a file", _FIX)
    path = folder / part["name"]
    if not path.is_file():
        there = sorted(file.name for file in folder.glob("*.txt"))
        fix = "other files: --set 'files=[valid.txt@0-90, valid.txt@90-100, test.txt]'"
        raise DataError(f"{str(folder)!r} has no {part['name']} (it has {', '.join(there) or 'no .txt files'})", fix)
    if part["low"] is None:
        return WordFile(path, 0, None, text)
    low, high = int(part["low"]), int(part["high"])
    if not low < high <= 100:
        raise DataError(f"{text!r} is an empty part", _FIX)
    with opened(path) as file:
        count = sum(1 for _ in file)
    return WordFile(path, count * low // 100, None if high == 100 else count * high // 100, text)
