"""word2vec's binary format: the line `count width`, then per word its bytes, a space, and `width` float32.

The original tool ends every vector with a line feed, other writers do not. Numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tiewise.boundary.vector_files.rows import WIDEST, Rows
from tiewise.boundary.vector_files.stream import WHOLE, Stream
from tiewise.core.errors import DataError


def read_word2vec(
    file: BinaryIO, path: Path, tokens: Sequence[str | None], header: tuple[int, int, int], size: int
) -> Rows:
    """Read a file of `size` bytes that begins with `header`: count, width and the length of that line.

    Raises:
        DataError: the file is cut short, or its header does not fit its bytes.
    """
    count, width, begins = header
    if not 0 < width <= WIDEST:
        what = f"its first line says {width:,} numbers per word"
        raise DataError(f"vectors {path}: {what}", f"use vectors of 1 to {WIDEST:,} columns")
    least = begins + count * (4 * width + 1)
    if size < least:
        what = (
            f"its first line promises {count:,} words of {width:,} numbers, at least {least:,} bytes; it has {size:,}"
        )
        raise DataError(f"vectors {path}: cut short, or no word2vec file: {what}", WHOLE)
    file.seek(begins)
    stream, rows = Stream(file, path), Rows(tokens, width)
    for place in range(1, count + 1):
        word = stream.word(b" ").removeprefix(b"\n")
        vector = stream.take(4 * width)
        if rows.wants(word):
            rows.put(word, np.frombuffer(vector, "<f4"), place)
    if stream.rest() not in (b"", b"\n"):
        what = f"behind the {count:,} words of {width:,} numbers that its first line promises it goes on"
        raise DataError(f"vectors {path}: {what} (byte {stream.position:,} of {size:,})", WHOLE)
    return rows
