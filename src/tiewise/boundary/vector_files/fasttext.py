"""fastText's own format, `.bin`: a saved model, of which the dictionary and the input matrix are read.

    int32 magic, version    12 × int32 and a double, the arguments
    int32 entries, words, labels    int64 tokens, pruned
    entries × (bytes, NUL, int64 count, int8 type)    int8 quantised    int64 m, n    m × n float32

A word's vector is the mean of its own row and of the rows of its character n-grams (Bojanowski et al. 2017,
arXiv:1607.04606, §3.2): those of `<word>` with minn to maxn characters, at row words + hash mod bucket. The hash is
FNV-1a of 32 bits over UTF-8, with the sign of every byte extended. `</s>` has its own row alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tiewise.boundary.vector_files.rows import WIDEST, Rows
from tiewise.boundary.vector_files.stream import WHOLE, Stream
from tiewise.core.errors import DataError

MAGIC = struct.pack("<i", 793_712_314)
_VERSION = 12
_ARGUMENTS = struct.Struct("<12id")
_SIZES = struct.Struct("<3i2q")
_ENTRY = struct.Struct("<qb")
_MATRIX = struct.Struct("<?2q")
_WORD = 0  # type of an entry that is no label
_NOT_PRUNED = -1
_END = b"</s>"
AS_TEXT = "save its vectors as text (.vec) and give that file"


@dataclass(frozen=True)
class Ngrams:
    """Which character n-grams a model has: their lengths, and the rows that they are hashed to."""

    shortest: int
    longest: int
    bucket: int

    def of(self, word: bytes) -> Iterator[int]:
        """Rows of a word's n-grams, behind those of the words; an n-gram that stands twice counts twice."""
        if word == _END:
            return
        characters = _characters(b"<" + word + b">")
        for start in range(len(characters)):
            value = 2_166_136_261
            for end in range(start, min(start + self.longest, len(characters))):
                value = _hashed(characters[end], value)
                alone = end == start and (start == 0 or end == len(characters) - 1)  # < or > by itself
                if end - start + 1 >= self.shortest and not alone:
                    yield value % self.bucket


def read_fasttext(file: BinaryIO, path: Path, tokens: Sequence[str | None], size: int) -> Rows:
    """Read the vectors of a model of `size` bytes.

    Raises:
        DataError: another version, a quantised model, or a file that is cut short or contradicts itself.
    """
    stream = Stream(file, path)
    _, version = struct.unpack("<2i", stream.take(8))
    if version != _VERSION:
        raise DataError(f"vectors {path}: a fastText model of version {version}, not {_VERSION}", AS_TEXT)
    arguments = _ARGUMENTS.unpack(stream.take(_ARGUMENTS.size))
    width, ngrams = arguments[0], Ngrams(shortest=arguments[9], longest=arguments[10], bucket=arguments[8])
    entries, words, labels, _, pruned = _SIZES.unpack(stream.take(_SIZES.size))
    _hold(
        path, 0 < width <= WIDEST and min(words, labels) >= 0 and words + labels == entries, "sizes that no model has"
    )
    _hold(path, ngrams.bucket >= (ngrams.longest > 0), "n-grams without rows")
    rows = Rows(tokens, width)
    wanted = _dictionary(stream, rows, entries)
    _hold(path, max(wanted.values(), default=-1) < words, "labels among its words")
    if pruned != _NOT_PRUNED:
        raise DataError(f"vectors {path}: a pruned fastText model", AS_TEXT)
    quantised, height, columns = _MATRIX.unpack(stream.take(_MATRIX.size))
    if quantised:
        raise DataError(f"vectors {path}: a quantised fastText model", AS_TEXT)
    _hold(path, (height, columns) == (words + ngrams.bucket, width), f"a matrix of {height:,} x {columns:,}")
    begins = stream.position
    if size < begins + 4 * height * width:
        what = f"cut short, its matrix of {height:,} x {width:,} needs {begins + 4 * height * width:,} bytes"
        raise DataError(f"vectors {path}: {what} and it has {size:,}", WHOLE)
    matrix = np.memmap(file, "<f4", "r", begins, (height, width)) if wanted else np.empty(0)
    for word, row in wanted.items():
        own = [row, *(words + ngram for ngram in ngrams.of(word))]
        with np.errstate(invalid="ignore"):  # of values that `put` will find to be no finite numbers
            vector = matrix[own].mean(0, dtype=np.float64)
        rows.put(word, vector, row + 1)
    return rows


def _dictionary(stream: Stream, rows: Rows, entries: int) -> dict[bytes, int]:
    """Row of every wanted word; labels are no words."""
    found: dict[bytes, int] = {}
    for entry in range(entries):
        word = stream.word(b"\0")
        _, kind = _ENTRY.unpack(stream.take(_ENTRY.size))
        if kind == _WORD and rows.wants(word):
            found.setdefault(word, entry)
    return found


def _hold(path: Path, holds: bool, what: str) -> None:
    if not holds:
        raise DataError(f"vectors {path}: a fastText model that contradicts itself: {what}", WHOLE)


def _characters(text: bytes) -> list[bytes]:
    """Cut UTF-8 before every byte that does not continue a character."""
    starts = [at for at, byte in enumerate(text) if byte & 0xC0 != 0x80]
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def _hashed(character: bytes, value: int) -> int:
    for byte in character:
        value = (value ^ (byte | 0xFFFFFF00 if byte & 0x80 else byte)) * 16_777_619 & 0xFFFFFFFF
    return value
