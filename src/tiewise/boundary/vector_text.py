"""Readers of text files of word vectors: GloVe, word2vec and fastText.

A line has a word and then its numbers. The word may contain spaces, or be a space. So the numbers are counted from the
right, as many as most lines have. word2vec and fastText files start with the header line `count width`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from tiewise.boundary.word_rows import WIDEST, WordRows
from tiewise.core.errors import DataError

_HEADER = re.compile(rb"[ \t]*(\d{1,12})[ \t]+(\d{1,12})[ \t]*\r?\n")
_SAMPLE = 20  # number of first lines by which a text of vectors is recognised
_NUMERIC = b"0123456789.-+eE "
_LONGEST_LINE = 1 << 20


class VectorHeader(NamedTuple):
    """First line of a word2vec or fastText text file."""

    words: int  # number of words
    width: int  # number of columns
    length: int  # of the line, in bytes


def find_header(first_bytes: bytes) -> VectorHeader | None:
    """Return the header at the start of a file, or None."""
    match = _HEADER.match(first_bytes)
    if match is None:
        return None
    words, width = match.groups()
    return VectorHeader(int(words), int(width), match.end())


def find_text_width(first_bytes: bytes, header: VectorHeader | None) -> int:
    """Return the number of columns of a text file of vectors, or 0 for another file.

    At least half of the first lines must have this many numbers after a word.
    """
    sample = first_bytes
    if header is not None:
        sample = first_bytes[header.length :]
    lines = [line for line in sample.split(b"\n", _SAMPLE)[:_SAMPLE] if line.strip()]
    widths = Counter(_trailing_numbers(line.split()[1:]) for line in lines)
    del widths[0]
    if not widths:
        return 0
    ((width, count),) = widths.most_common(1)
    if 2 * count < len(lines):
        return 0
    return width


def read_text(file: BinaryIO, tokens: Sequence[str | None], header: VectorHeader | None, width: int) -> WordRows:
    """Read the vectors of `tokens` from the lines after the header, if there is one."""
    if header is not None and header.width != width:
        problem = f"its first line says {header.width:,} numbers per word, and its lines have {width:,}"
        raise DataError(problem, "correct the first line, or take the file from its source again")
    if width > WIDEST:
        raise DataError(f"{width:,} numbers per word", f"use vectors of {WIDEST:,} columns at most")
    rows = WordRows(tokens, width)
    if header is None:
        file.seek(0)
        _put_lines(rows, file, width, first=1)
        return rows
    file.seek(header.length)
    count = _put_lines(rows, file, width, first=2)
    if count != header.words:
        rows.suspicion = f"its first line says {header.words:,} words, and {count:,} lines follow"
    return rows


def _put_lines(rows: WordRows, file: BinaryIO, width: int, first: int) -> int:
    """Store the vectors of all remaining lines, and return the number of lines.

    The next line has the number `first`. Numbers of other words are not converted, only checked for their characters.
    """
    number = first - 1
    while line := file.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            raise DataError(f"line {number:,} has more than {_LONGEST_LINE:,} bytes", "check the file")
        word, _, rest = line.rstrip().partition(b" ")
        if word in rows.index or not _looks_like_vector(rest, width):
            _put_line(rows, line, width, number)
    return number - first + 1


def _looks_like_vector(fields: bytes, width: int) -> bool:
    """Return whether `fields` are `width` fields in the characters of numbers."""
    if not fields or fields.count(b" ") != width - 1:
        return False
    return not fields.translate(None, _NUMERIC)


def _put_line(rows: WordRows, line: bytes, width: int, number: int) -> None:
    """Store the vector of a line, or count the line as broken."""
    word, fields = _word_and_fields(line, width)
    vector = _numbers(fields)
    if not word or vector is None:
        rows.broken.append(number)
        return
    if word not in rows.index:
        word = word.strip()  # an indented line
    if word in rows.index:
        rows.put(word, np.array(vector), number)
    elif _numbers(word.split()[1:]) is not None:  # more than `width` numbers after the first field
        rows.broken.append(number)


def _word_and_fields(line: bytes, width: int) -> tuple[bytes, list[bytes]]:
    """Split a line into its word and its last `width` fields.

    The word is empty if the line has too few fields. A word of white space is the indent.
    """
    fields = line.rstrip().rsplit(None, width)
    if len(fields) > width:
        return fields[0], fields[1:]
    if len(fields) < width:
        return b"", fields
    indent = line[: len(line) - len(line.lstrip())]
    return indent[:-1], fields


def _trailing_numbers(fields: Sequence[bytes]) -> int:
    """Count the finite numbers at the end of a line's fields."""
    count = 0
    for field in reversed(fields):
        if _numbers([field]) is None:
            break
        count += 1
    return count


def _numbers(fields: Sequence[bytes]) -> list[float] | None:
    """Return fields as finite numbers, or None without fields or with another field."""
    try:
        values = [float(field) for field in fields]
    except ValueError:
        return None
    if not values or not all(map(math.isfinite, values)):
        return None
    return values
