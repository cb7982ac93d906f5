"""Vectors as text: a line per word, the word, then its numbers; word2vec and fastText put `count width` before them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tiewise.boundary.vector_files.rows import WIDEST, Rows
from tiewise.core.errors import DataError

_LONGEST_LINE = 1 << 20
_HEADER = re.compile(rb"[ \t]*(\d{1,12})[ \t]+(\d{1,12})[ \t]*\r?\n")
_SAMPLE = 20  # lines that tell a text of vectors from anything else
_NUMERIC = b"0123456789.-+eE "


def header_of(head: bytes) -> tuple[int, int, int] | None:
    """(count, width, length) of the line that word2vec and fastText begin with; None where a file has none."""
    found = _HEADER.match(head)
    return None if found is None else (int(found[1]), int(found[2]), found.end())


def width_of(sample: bytes) -> int | None:
    """Return how many numbers at least half of the first lines have behind a word; None where no half agrees.

    `sample` is the beginning of a file, without its header.
    """
    lines = [line for line in sample.split(b"\n", _SAMPLE)[:_SAMPLE] if line.strip()]
    vectors = (_numbers(line.split()[1:]) for line in lines)
    widths = Counter(len(vector) for vector in vectors if vector is not None)
    width, count = max(widths.items(), key=lambda item: item[1], default=(0, 0))
    return width if count and 2 * count >= len(lines) else None


def read_text(file: BinaryIO, path: Path, tokens: Sequence[str | None], width: int) -> tuple[Rows, int]:
    """Read lines of `width` numbers; return the rows, and how many lines there are behind a header.

    Lines of words that nobody wants are held against the alphabet of numbers and counted, not converted.

    Raises:
        DataError: a header of another width, or a line that never ends.
    """
    header = header_of(file.read(64))
    if header is not None and header[1] != width:
        what = f"its first line says {header[1]:,} numbers per word, and its lines have {width:,}"
        raise DataError(f"vectors {path}: {what}", "correct the first line, or take the file from its source again")
    if width > WIDEST:
        raise DataError(f"vectors {path}: {width:,} numbers per word", f"use vectors of {WIDEST:,} columns at most")
    file.seek(header[2] if header else 0)
    before = 1 if header else 0
    rows, number = Rows(tokens, width), before
    while line := file.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            raise DataError(f"vectors {path}: line {number:,} has more than {_LONGEST_LINE:,} bytes", "check the file")
        word, _, rest = line.strip().partition(b" ")
        if rows.wants(word) or not rest or rest.count(b" ") != width - 1 or rest.translate(None, _NUMERIC):
            _read_line(rows, line, number)
    return rows, number - before


def _read_line(rows: Rows, line: bytes, number: int) -> None:
    word, *fields = line.split() or [b""]
    vector = _numbers(fields)
    if vector is None or len(vector) != rows.values.shape[1]:
        rows.broken.add(number)
    elif rows.wants(word):
        rows.put(word, np.array(vector), number)


def _numbers(fields: Sequence[bytes]) -> list[float] | None:
    """Return finite numbers, at least one; None where a field is no such number."""
    try:
        values = [float(field) for field in fields]
    except ValueError:
        return None
    return values if values and all(map(math.isfinite, values)) else None
