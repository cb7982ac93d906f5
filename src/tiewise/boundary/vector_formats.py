"""Files of word vectors that name their words, each format told by its bytes and streamed: only wanted rows are kept.

GloVe text, and word2vec's and fastText's, which put `count width` before it:

    a line per word, the word, then its numbers

word2vec binary, whose original tool ends every vector with a line feed, as other writers do not:

    the line `count width`    count × (word, a space, width × float32)

fastText's own `.bin`, a saved model, of which the dictionary and the input matrix are read:

    int32 magic, version    12 × int32 and a double, the arguments
    int32 entries, words, labels    int64 tokens, pruned
    entries × (bytes, NUL, int64 count, int8 type)    int8 quantised    int64 m, n    m × n float32

There a word's vector is the mean of its own row and of the rows of its character n-grams (Bojanowski et al. 2017,
arXiv:1607.04606, §3.2): those of `<word>` with minn to maxn characters, at row words + hash mod bucket. The hash is
FNV-1a of 32 bits over UTF-8, with the sign of every byte extended. `</s>` has its own row alone. All numbers are
little-endian.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tiewise.core.errors import DataError

WIDEST = 1 << 14  # columns; published vectors have at most a few thousand, and a wrong header can say anything
NAMED = 5  # places of broken entries that are kept
_PIECE = 1 << 20  # bytes read at a time
_HEAD = 1 << 20  # bytes by which a format is told
_LONGEST_LINE = 1 << 20
_LONGEST_WORD = 10_000  # bytes; in published files the longest has a few hundred
_WHOLE = "take the file from its source again"


class WordRows:
    """Rows [V, E] for the words of a vocabulary, nan where the file has none; a word's first vector counts.

    `tokens` is the word of each row, None where a row has none.
    """

    def __init__(self, tokens: Sequence[str | None], width: int) -> None:
        named = ((token, row) for row, token in enumerate(tokens) if token is not None)
        self.index = {token.encode("utf-8", "surrogatepass"): row for token, row in named}
        self.values = np.full((len(tokens), width), np.nan, np.float32)
        self.found: set[int] = set()
        self.twice = 0
        self.broken = 0  # lines or entries that hold no vector
        self.first_broken: list[int] = []  # their numbers, from 1
        self.form = ""  # the format's name
        self.odd = ""  # what is odd about the file

    def wants(self, word: bytes) -> bool:
        """Whether the vocabulary has this word."""
        return word in self.index

    def put(self, word: bytes, vector: np.ndarray, place: int) -> None:
        """Keep the `vector` [E] of a wanted word; one with a value that is no finite float32 is broken."""
        row = self.index[word]
        with np.errstate(over="ignore", invalid="ignore"):
            vector = vector.astype(np.float32)
        if not np.isfinite(vector).all():
            self.skip(place)
        elif row in self.found:
            self.twice += 1
        else:
            self.values[row] = vector
            self.found.add(row)

    def skip(self, place: int) -> None:
        """Count the line or entry of this number as broken."""
        self.broken += 1
        if len(self.first_broken) < NAMED:
            self.first_broken.append(place)


_OTHERS = {  # first bytes of what is often given in place of vectors
    b"\x1f\x8b": ("compressed by gzip", "unpack it first: gunzip"),
    b"PK\x03\x04": ("a zip archive", "unpack it first: unzip"),
    **{
        bytes([0x80, version]): ("a pickle, which is never opened", "save its vectors as text (save_word2vec_format)")
        for version in (2, 3, 4, 5)
    },
}


def read_words(path: Path, tokens: Sequence[str | None]) -> WordRows:
    """Read the vectors of `tokens`."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HEAD)
        file.seek(0)
        if not head:
            raise DataError(f"vectors {path}: an empty file", _WHOLE)
        for begins, (what, fix) in _OTHERS.items():
            if head.startswith(begins):
                raise DataError(f"vectors {path}: {what}", fix)
        if head.startswith(_MAGIC):
            return _read_fasttext(file, path, tokens, size)
        header = _HEADER.match(head)
        width = _width_of(head[header.end() :] if header else head)
        if width is not None:
            return _read_text(file, path, tokens, width)
        if header is not None:
            return _read_word2vec(file, path, tokens, header, size)
    fix = "give GloVe, word2vec or fastText vectors, text or binary, or safetensors"
    raise DataError(f"vectors {path}: none of the formats that are known", fix)


# text

_HEADER = re.compile(rb"[ \t]*(\d{1,12})[ \t]+(\d{1,12})[ \t]*\r?\n")
_SAMPLE = 20  # lines that tell a text of vectors from anything else
_NUMERIC = b"0123456789.-+eE "


def _width_of(sample: bytes) -> int | None:
    """How many numbers at least half of the first lines have behind a word; None where no half agrees."""
    lines = [line for line in sample.split(b"\n", _SAMPLE)[:_SAMPLE] if line.strip()]
    vectors = (_numbers(line.split()[1:]) for line in lines)
    widths = Counter(len(vector) for vector in vectors if vector is not None)
    width, count = max(widths.items(), key=lambda item: item[1], default=(0, 0))
    return width if count and 2 * count >= len(lines) else None


def _read_text(file: BinaryIO, path: Path, tokens: Sequence[str | None], width: int) -> WordRows:
    """Lines of words that nobody wants are held against the alphabet of numbers and counted, not converted."""
    header = _HEADER.match(file.read(64))
    if header is not None and int(header[2]) != width:
        what = f"its first line says {int(header[2]):,} numbers per word, and its lines have {width:,}"
        raise DataError(f"vectors {path}: {what}", "correct the first line, or take the file from its source again")
    if width > WIDEST:
        raise DataError(f"vectors {path}: {width:,} numbers per word", f"use vectors of {WIDEST:,} columns at most")
    file.seek(header.end() if header else 0)
    before = number = 1 if header else 0
    rows = WordRows(tokens, width)
    while line := file.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            raise DataError(f"vectors {path}: line {number:,} has more than {_LONGEST_LINE:,} bytes", "check the file")
        word, _, rest = line.strip().partition(b" ")
        if not rows.wants(word) and rest and rest.count(b" ") == width - 1 and not rest.translate(None, _NUMERIC):
            continue
        word, *fields = line.split() or [b""]
        vector = _numbers(fields)
        if vector is None or len(vector) != width:
            rows.skip(number)
        elif rows.wants(word):
            rows.put(word, np.array(vector), number)
    rows.form = "GloVe text" if header is None else "word2vec text"
    lines = number - before
    if header is not None and lines != int(header[1]):
        rows.odd = f"its first line says {int(header[1]):,} words, and {lines:,} lines follow"
    return rows


def _numbers(fields: Sequence[bytes]) -> list[float] | None:
    """Finite numbers, at least one; None where a field is no such number."""
    try:
        values = [float(field) for field in fields]
    except ValueError:
        return None
    return values if values and all(map(math.isfinite, values)) else None


# binary


class ByteStream:
    """A binary file read forward in pieces, up to a mark or a number of bytes; errors name `path`."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self._held, self._at = b"", 0
        self._behind = file.tell()  # the position of the first byte that is held

    @property
    def position(self) -> int:
        """Where in the file the next byte stands."""
        return self._behind + self._at

    def word(self, mark: bytes) -> bytes:
        """Return the bytes before the next `mark`, one byte, and step over it."""
        while (end := self._held.find(mark, self._at)) < 0 and len(self._held) - self._at <= _LONGEST_WORD:
            self._more(1)
        if not 0 <= end - self._at <= _LONGEST_WORD:
            what = f"a word of more than {_LONGEST_WORD:,} bytes at byte {self.position:,}"
            raise DataError(f"vectors {self.path}: {what}, so the file is not what its beginning says", _WHOLE)
        found = self._held[self._at : end]
        self._at = end + 1
        return found

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        missing = self._at + count - len(self._held)
        if missing > 0:
            self._more(missing)
        self._at += count
        return self._held[self._at - count : self._at]

    def rest(self) -> bytes:
        """Return what is left, of a long rest only the beginning."""
        return self._held[self._at :] + self.file.read(_PIECE)

    def _more(self, least: int) -> None:
        got = self.file.read(max(_PIECE, least))
        if len(got) < least:
            end = self._behind + len(self._held) + len(got)
            raise DataError(f"vectors {self.path}: cut short, it ends at byte {end:,} within an entry", _WHOLE)
        self._behind += self._at
        self._held, self._at = self._held[self._at :] + got, 0


def _read_word2vec(
    file: BinaryIO, path: Path, tokens: Sequence[str | None], header: re.Match[bytes], size: int
) -> WordRows:
    count, width, begins = int(header[1]), int(header[2]), header.end()
    if not 0 < width <= WIDEST:
        what = f"its first line says {width:,} numbers per word"
        raise DataError(f"vectors {path}: {what}", f"use vectors of 1 to {WIDEST:,} columns")
    least = begins + count * (4 * width + 1)
    if size < least:
        promised = f"{count:,} words of {width:,} numbers, at least {least:,} bytes; it has {size:,}"
        what = f"cut short, or no word2vec file: its first line promises {promised}"
        raise DataError(f"vectors {path}: {what}", _WHOLE)
    file.seek(begins)
    stream, rows = ByteStream(file, path), WordRows(tokens, width)
    for place in range(1, count + 1):
        word = stream.word(b" ").removeprefix(b"\n")
        vector = stream.take(4 * width)
        if rows.wants(word):
            rows.put(word, np.frombuffer(vector, "<f4"), place)
    if stream.rest() not in (b"", b"\n"):
        what = f"behind the {count:,} words of {width:,} numbers that its first line promises it goes on"
        raise DataError(f"vectors {path}: {what} (byte {stream.position:,} of {size:,})", _WHOLE)
    rows.form = "word2vec binary"
    return rows


_MAGIC = struct.pack("<i", 793_712_314)
_VERSION = 12
_ARGUMENTS = struct.Struct("<12id")
_SIZES = struct.Struct("<3i2q")
_ENTRY = struct.Struct("<qb")
_MATRIX = struct.Struct("<?2q")
_WORD = 0  # type of an entry that is no label
_NOT_PRUNED = -1
_AS_TEXT = "save its vectors as text (.vec) and give that file"


def _read_fasttext(file: BinaryIO, path: Path, tokens: Sequence[str | None], size: int) -> WordRows:
    def require(holds: bool, what: str) -> None:
        if not holds:
            raise DataError(f"vectors {path}: a fastText model that contradicts itself: {what}", _WHOLE)

    stream = ByteStream(file, path)
    _, version = struct.unpack("<2i", stream.take(8))
    if version != _VERSION:
        raise DataError(f"vectors {path}: a fastText model of version {version}, not {_VERSION}", _AS_TEXT)
    arguments = _ARGUMENTS.unpack(stream.take(_ARGUMENTS.size))
    width, ngrams = arguments[0], Ngrams(shortest=arguments[9], longest=arguments[10], bucket=arguments[8])
    entries, words, labels, _, pruned = _SIZES.unpack(stream.take(_SIZES.size))
    sound = 0 < width <= WIDEST and min(words, labels) >= 0 and words + labels == entries
    require(sound, "sizes that no model has")
    require(ngrams.bucket >= (ngrams.longest > 0), "n-grams without rows")
    rows = WordRows(tokens, width)
    wanted: dict[bytes, int] = {}  # words → rows of the matrix
    for entry in range(entries):
        word = stream.word(b"\0")
        _, kind = _ENTRY.unpack(stream.take(_ENTRY.size))
        if kind == _WORD and rows.wants(word):
            wanted.setdefault(word, entry)
    require(max(wanted.values(), default=-1) < words, "labels among its words")
    if pruned != _NOT_PRUNED:
        raise DataError(f"vectors {path}: a pruned fastText model", _AS_TEXT)
    quantised, height, columns = _MATRIX.unpack(stream.take(_MATRIX.size))
    if quantised:
        raise DataError(f"vectors {path}: a quantised fastText model", _AS_TEXT)
    require((height, columns) == (words + ngrams.bucket, width), f"a matrix of {height:,} x {columns:,}")
    begins = stream.position
    if size < begins + 4 * height * width:
        what = f"cut short, its matrix of {height:,} x {width:,} needs {begins + 4 * height * width:,} bytes"
        raise DataError(f"vectors {path}: {what} and it has {size:,}", _WHOLE)
    matrix = np.memmap(file, "<f4", "r", begins, (height, width)) if wanted else np.empty(0)
    for word, row in wanted.items():
        own = [row, *(words + ngram for ngram in ngrams.of(word))]
        with np.errstate(invalid="ignore"):  # of values that `put` will find to be no finite numbers
            vector = matrix[own].mean(0, dtype=np.float64)
        rows.put(word, vector, row + 1)
    rows.form = "fastText binary"
    return rows


@dataclass(frozen=True)
class Ngrams:
    """Which character n-grams a fastText model has: their lengths, and the rows that they are hashed to."""

    shortest: int
    longest: int
    bucket: int

    def of(self, word: bytes) -> Iterator[int]:
        """Rows of a word's n-grams, behind those of the words; an n-gram that stands twice counts twice."""
        if word == b"</s>":
            return
        text = b"<" + word + b">"
        starts = [at for at, byte in enumerate(text) if byte & 0xC0 != 0x80]  # of characters, in UTF-8
        characters = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]
        for start in range(len(characters)):
            value = 2_166_136_261
            for end in range(start, min(start + self.longest, len(characters))):
                for byte in characters[end]:
                    value = (value ^ (byte | 0xFFFFFF00 if byte & 0x80 else byte)) * 16_777_619 & 0xFFFFFFFF
                alone = end == start and (start == 0 or end == len(characters) - 1)  # < or > by itself
                if end - start + 1 >= self.shortest and not alone:
                    yield value % self.bucket
