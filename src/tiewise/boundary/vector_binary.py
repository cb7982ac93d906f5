"""Readers of binary files of word vectors.

A word2vec file has this layout. The original tool ends every vector with a line feed, other tools do not:

    the line `count width`    count × (word, a space, width × float32)

A fastText `.bin` file is a saved model. The dictionary and the input matrix are read:

    int32 magic, version    12 × int32 and a double, the arguments
    int32 entries, words, labels    int64 tokens, pruned
    entries × (bytes, NUL, int64 count, int8 type)    int8 quantised    int64 m, n    m × n float32

In a fastText model a word's vector is the mean of the word's row and the rows of its character n-grams (Bojanowski et
al. 2017, arXiv:1607.04606, §3.2). These are the n-grams of `<word>` with minn to maxn characters, each at row
words + hash mod bucket. The hash is 32-bit FNV-1a over UTF-8 with sign-extended bytes. `</s>` has no n-grams. All
numbers are little-endian.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from tiewise.boundary.vector_text import VectorHeader
from tiewise.boundary.word_rows import DOWNLOAD_AGAIN, WIDEST, WordRows
from tiewise.core.errors import DataError

FASTTEXT_MAGIC = struct.pack("<i", 793_712_314)
_AS_TEXT = "save its vectors as text (.vec) and give that file"
_LONGEST_WORD = 10_000  # bytes; the longest in published files has a few hundred


class Cursor:
    """Reading position in a memory-mapped binary file."""

    def __init__(self, file: BinaryIO) -> None:
        self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.position = 0

    def read_word(self, mark: bytes) -> bytes:
        """Return the bytes before the next `mark`, and move past this one-byte mark."""
        end = self.bytes.find(mark, self.position, self.position + _LONGEST_WORD + 1)
        if end < 0:
            if len(self.bytes) - self.position > _LONGEST_WORD:
                problem = f"a word of more than {_LONGEST_WORD:,} bytes at byte {self.position:,}"
                raise DataError(f"{problem}, so the file is not what its beginning says", DOWNLOAD_AGAIN)
            end = len(self.bytes)  # `read_bytes` refuses it as cut short
        return self.read_bytes(end + 1 - self.position)[:-1]

    def read_bytes(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        if self.position + count > len(self.bytes):
            raise DataError(f"cut short, it ends at byte {len(self.bytes):,} within an entry", DOWNLOAD_AGAIN)
        self.position += count
        return self.bytes[self.position - count : self.position]

    def read_numbers(self, form: str) -> tuple[Any, ...]:
        """Return the next little-endian numbers. `form` is a format string of `struct`."""
        return struct.unpack(f"<{form}", self.read_bytes(struct.calcsize(f"<{form}")))


# word2vec


def read_word2vec(file: Cursor, tokens: Sequence[str | None], header: VectorHeader) -> WordRows:
    """Read the vectors of `tokens` from a binary word2vec file."""
    count, width, size = header.words, header.width, len(file.bytes)
    if not 0 < width <= WIDEST:
        raise DataError(f"its first line says {width:,} numbers per word", f"use vectors of 1 to {WIDEST:,} columns")
    min_size = header.length + count * (4 * width + 1)
    if size < min_size:
        promised = f"{count:,} words of {width:,} numbers, at least {min_size:,} bytes; it has {size:,}"
        raise DataError(f"cut short, or no word2vec file: its first line promises {promised}", DOWNLOAD_AGAIN)
    file.position = header.length
    rows = WordRows(tokens, width)
    for number in range(1, count + 1):
        word = file.read_word(b" ").removeprefix(b"\n")
        vector = file.read_bytes(4 * width)
        if word in rows.index:
            rows.put(word, np.frombuffer(vector, "<f4"), number)
    if file.bytes[file.position : file.position + 2] not in (b"", b"\n"):
        problem = f"it continues after the {count:,} words of {width:,} numbers that its first line promises"
        raise DataError(f"{problem} (byte {file.position:,} of {size:,})", DOWNLOAD_AGAIN)
    return rows


# fastText


class _FastTextSizes(NamedTuple):
    """Sizes of a fastText model."""

    width: int  # columns of the matrix
    bucket: int  # rows for n-grams
    shortest: int  # characters of an n-gram
    longest: int
    entries: int  # of the dictionary: words and labels
    words: int
    pruned: int  # -1 in a model that is not pruned


def read_fasttext(file: Cursor, tokens: Sequence[str | None]) -> WordRows:
    """Read the vectors of `tokens` from a fastText model."""
    model = _read_sizes(file)
    rows = WordRows(tokens, model.width)
    entries = _find_entries(file, model, rows)
    if model.pruned != -1:
        raise DataError("a pruned fastText model", _AS_TEXT)
    matrix = _map_matrix(file, model)
    for word, entry in entries.items():
        ngrams = [model.words + ngram for ngram in _ngrams(word, model.shortest, model.longest, model.bucket)]
        with np.errstate(invalid="ignore"):  # `put` handles values that are not finite
            vector = matrix[[entry, *ngrams]].mean(0, dtype=np.float64)
        rows.put(word, vector, entry + 1)
    return rows


def _require(is_consistent: bool, contradiction: str) -> None:
    """Refuse a model file whose sizes contradict each other."""
    if not is_consistent:
        raise DataError(f"a fastText model that contradicts itself: {contradiction}", DOWNLOAD_AGAIN)


def _read_sizes(file: Cursor) -> _FastTextSizes:
    """Read the arguments of a fastText model and the sizes of its dictionary."""
    _, version = file.read_numbers("2i")
    if version != 12:
        raise DataError(f"a fastText model of version {version}, not 12", _AS_TEXT)
    width, *_, bucket, shortest, longest, _, _ = file.read_numbers("12id")
    entries, words, labels, _, pruned = file.read_numbers("3i2q")
    has_width = 0 < width <= WIDEST
    has_entries = min(words, labels) >= 0 and words + labels == entries
    _require(has_width and has_entries, "sizes that no model has")
    _require(bucket >= (longest > 0), "n-grams without rows")
    return _FastTextSizes(width, bucket, shortest, longest, entries, words, pruned)


def _find_entries(file: Cursor, model: _FastTextSizes, rows: WordRows) -> dict[bytes, int]:
    """Read the dictionary, and return {word: row of the matrix} for the table's words."""
    entry_of: dict[bytes, int] = {}
    for entry in range(model.entries):
        word = file.read_word(b"\0")
        _, label_flag = file.read_numbers("qb")
        is_label = label_flag != 0
        if word in rows.index and not is_label:
            entry_of.setdefault(word, entry)
    _require(max(entry_of.values(), default=-1) < model.words, "labels among its words")
    return entry_of


def _map_matrix(file: Cursor, model: _FastTextSizes) -> np.ndarray:
    """Return the input matrix [words + bucket, width], mapped from the file."""
    quantised, height, columns = file.read_numbers("?2q")
    if quantised:
        raise DataError("a quantised fastText model", _AS_TEXT)
    _require((height, columns) == (model.words + model.bucket, model.width), f"a matrix of {height:,} x {columns:,}")
    min_size, size = file.position + 4 * height * columns, len(file.bytes)
    if size < min_size:
        problem = f"cut short, its matrix of {height:,} x {columns:,} needs {min_size:,} bytes"
        raise DataError(f"{problem} and it has {size:,}", DOWNLOAD_AGAIN)
    return np.ndarray((height, columns), "<f4", file.bytes, file.position)


# FNV-1a of 32 bits, whose bytes fastText reads as signed
_OFFSET, _PRIME, _32_BITS = 2_166_136_261, 16_777_619, 0xFFFFFFFF
_SIGN_EXTENDED = [*range(0x80), *(byte | 0xFFFFFF00 for byte in range(0x80, 0x100))]
_CHARACTER = re.compile(rb"[^\x80-\xbf][\x80-\xbf]*")  # in UTF-8


def _ngrams(word: bytes, shortest: int, longest: int, bucket: int) -> Iterator[int]:
    """Yield the row of each n-gram of a word, counted from the first n-gram row.

    An n-gram that occurs twice is yielded twice.
    """
    if word == b"</s>":
        return
    characters = _CHARACTER.findall(b"<" + word + b">")
    last = len(characters) - 1
    for start in range(len(characters)):
        value = _OFFSET
        for end in range(start, min(start + longest, len(characters))):
            for byte in characters[end]:
                value = (value ^ _SIGN_EXTENDED[byte]) * _PRIME & _32_BITS
            is_bracket = start == end and start in (0, last)  # < or > alone
            if end - start + 1 >= shortest and not is_bracket:
                yield value % bucket
