"""Pairs of words with ratings of their similarity, read from a user's file.

Public lists of this kind are WordSim-353 (Finkelstein et al. 2002), MEN (Bruni et al. 2014) and SimLex-999 (Hill et al.
2015). None is part of this package. Their files differ in the separator, the header and further columns:

    love,sex,6.77                   commas
    old     new     A   1.58  …     tabs; the rating is the first number after the two words
    sun sunlight 50.0               spaces
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiewise.checkpoint.untrusted import read_bytes, short
from tiewise.core.errors import DataError

MOST_BYTES = 64 * 2**20  # the largest published list has less than one MB
COMMENT = "#"
FORMAT = "write lines of: word1 word2 rating, separated by tabs, commas or spaces"


@dataclass(frozen=True)
class RatedPair:
    """Two words and the similarity that people gave them."""

    first: str
    second: str
    rating: float  # in the unit of its file: only the order of ratings is used


@dataclass(frozen=True)
class _Line:
    """One line of a file, as fields."""

    number: int  # from 1
    fields: tuple[str, ...]


def read_pairs(path: str | os.PathLike[str]) -> tuple[RatedPair, ...]:
    """Read the rated pairs of a file, in its order.

    Each line has two words and a rating, separated by tabs, commas or spaces. The rating is in the first column after
    the words that has a number. The first line may be a header. Empty lines and lines that start with # are left out.

    Raises:
        CheckpointError: the file cannot be read, or is too large.
        DataError: it is no UTF-8 text, a line has no rating, or all ratings are equal.

    >>> import pathlib, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> file = pathlib.Path(folder.name, "pairs.csv")
    >>> _ = file.write_text("Word 1,Word 2,Human (mean)\\ntiger,cat,7.35\\nstock,jaguar,0.92\\n")
    >>> read_pairs(file)[0]
    RatedPair(first='tiger', second='cat', rating=7.35)
    """
    where = os.fspath(path)
    lines = _lines(_text(where), where)
    column, has_header = _rating_column(lines, where)
    pairs = tuple(_pair(line, column, where) for line in lines[int(has_header) :])
    if len({pair.rating for pair in pairs}) < 2:
        raise DataError(f"{where}: all {len(pairs):,} ratings are equal", "give pairs with different ratings")
    return pairs


def _text(where: str) -> str:
    """Return the text of a file of limited size."""
    try:
        return read_bytes(where, MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{where}: not UTF-8 text", "convert it first") from None


def _lines(text: str, where: str) -> list[_Line]:
    """Return the lines of a text as fields, without empty lines and comments.

    The separator is that of the first line: a tab, else a comma, else white space.
    """
    separator: str | None = None
    lines: list[_Line] = []
    for number, content in enumerate(text.splitlines(), 1):
        if not content.strip() or content.startswith(COMMENT):
            continue
        if not lines:
            separator = _separator(content)
        lines.append(_Line(number, tuple(_fields(content, separator))))
    if not lines:
        raise DataError(f"{where}: no pairs in it", FORMAT)
    return lines


def _separator(content: str) -> str | None:
    """Return the separator of a line; None for white space."""
    for separator in ("\t", ","):
        if separator in content:
            return separator
    return None


def _fields(content: str, separator: str | None) -> Iterator[str]:
    """Yield the fields of a line; those separated by commas may be quoted."""
    fields: Sequence[str] = content.split(separator)
    if separator == ",":
        fields = next(csv.reader([content]))
    for field in fields:
        yield field.strip()


def _rating_column(lines: Sequence[_Line], where: str) -> tuple[int, bool]:
    """Return (index of the column with the ratings, True if the first line is a header)."""
    for index, line in enumerate(lines[:2]):
        for column, field in enumerate(line.fields[2:], 2):
            if math.isfinite(_number(field)):
                return column, index == 1
    raise DataError(f"{where}, line {lines[0].number}: no rating after two words", FORMAT)


def _pair(line: _Line, column: int, where: str) -> RatedPair:
    """Return the pair of a line whose rating is in a column."""
    fields = line.fields
    if len(fields) <= column:
        raise DataError(f"{where}, line {line.number}: {len(fields)} fields, the rating is field {column + 1}", FORMAT)
    rating = _number(fields[column])
    if not math.isfinite(rating):
        raise DataError(f"{where}, line {line.number}: {short(fields[column])!r} is no rating", FORMAT)
    if not (fields[0] and fields[1]):
        raise DataError(f"{where}, line {line.number}: a word is empty", FORMAT)
    return RatedPair(fields[0], fields[1], rating)


def _number(field: str) -> float:
    """Return a field as a number; NaN if it is none."""
    try:
        return float(field)
    except ValueError:
        return math.nan
