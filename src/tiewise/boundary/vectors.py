"""Pretrained word vectors as rows of a table, from a file whose format is told by its bytes, not by its name.

A safetensors file has one two-dimensional tensor, rows in the order of the vocabulary. The others name their words and
are streamed; only wanted rows are kept. GloVe text, and word2vec's and fastText's, which put `count width` before it:

    a line per word, the word, then its numbers; the word may hold spaces, or be one, and so the numbers are counted
    from the right: as many as most lines have

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

import itertools
import logging
import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tiewise.checkpoint.untrusted import LFS_POINTER
from tiewise.core.errors import DataError, SpecError, printable
from tiewise.core.spec import BoundarySpec

log = logging.getLogger(__name__)
_WIDEST = 1 << 14  # columns; published vectors have at most a few thousand, and a wrong header can say anything
_HEAD = 1 << 20  # bytes by which a format is told
_LONGEST_LINE = 1 << 20
_LONGEST_WORD = 10_000  # bytes; in published files the longest has a few hundred
_WHOLE = "take the file from its source again"


def load_vectors(path: str | Path, tokens: Sequence[str | None]) -> Tensor:
    """Read rows [V, E] for `tokens`, nan (and a warning) where the file has none; DataError where it is of no use."""
    path = Path(path)
    try:
        if not path.is_file():
            raise DataError("no such file", "give a GloVe, word2vec, fastText or safetensors file")
        with path.open("rb") as file:
            head = file.read(len(LFS_POINTER))
        if head == LFS_POINTER:
            raise DataError(*_POINTER)
        # as safetensors begin: the length of a JSON header, and its brace
        begins = head[8:9] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size
        if begins or path.suffix == ".safetensors":
            return _safetensors(path, len(tokens))
        changed = path.stat()
        return _by_word(path.resolve(), path, (changed.st_mtime_ns, changed.st_size), tuple(tokens)).clone()
    except DataError as error:
        raise DataError(f"vectors {path}: {error.what}", error.fix) from None
    except OSError as error:
        raise DataError(f"vectors {path}: cannot be read ({error.strerror or error})", "check the file") from None


def row_tokens(tokenizer: Any, rows: int) -> list[str | None]:
    """Return the token of each of a table's `rows` in a Hugging Face tokenizer; None for rows without a token.

    Ids may have holes, so the number of tokens says nothing about the largest id.
    """
    ids = sorted(number for number in set(tokenizer.get_vocab().values()) if number < rows)
    tokens = dict(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True))
    return [tokens.get(row) for row in range(rows)]


def check_rows(table: Tensor, rows: Tensor, spec: BoundarySpec) -> None:
    """Refuse rows that do not fit `table` [V, E]."""
    if rows.shape != table.shape:
        fix = f"use factored:{rows.shape[1]} or, beyond the model's width, projected:{rows.shape[1]}"
        raise SpecError(f"{spec}: vectors {tuple(rows.shape)} do not fit the table {tuple(table.shape)}", fix)


def start_from_rows(table: Tensor, rows: Tensor, freeze: bool, spec: BoundarySpec) -> None:
    """Give `table` [V, E] pretrained rows; `freeze` stops its gradient.

    Rows of nan keep what was drawn for them, and the padding row of `spec` stays zero. Raises as `check_rows`.
    """
    check_rows(table, rows, spec)
    rows = rows.to(table)
    keeps = rows.isnan()
    if spec.pad is not None:
        keeps[spec.pad] = True
    with torch.no_grad():
        table.copy_(torch.where(keeps, table, rows))
    table.requires_grad_(not freeze)


def _safetensors(path: Path, vocab: int) -> Tensor:
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if len(file.get_slice(name).get_shape()) == 2]  # noqa: SIM118
            if len(names) != 1:
                what = f"{len(names)} two-dimensional tensors ({', '.join(names[:4])})"
                raise DataError(what, "keep the table alone in the file")
            rows: Tensor = file.get_tensor(names[0]).float()
    except SafetensorError as error:
        raise DataError(f"not a safetensors file ({error})", "give the file that was saved") from None
    if len(rows) != vocab:
        fix = "safetensors rows follow the vocabulary; use a text file to match by token"
        raise DataError(f"{len(rows)} rows for a vocabulary of {vocab}", fix)
    if not rows.isfinite().all():
        what = f"{int((~rows.isfinite()).any(1).sum()):,} rows hold values that are no finite numbers"
        raise DataError(what, "leave such rows out: give a text file, which names its words")
    return rows


# files that name their words


class WordRows:
    """Rows [V, E] for `tokens` (None where a row has none), nan until found; a word's first vector counts."""

    def __init__(self, tokens: Sequence[str | None], width: int) -> None:
        named = ((token, row) for row, token in enumerate(tokens) if token is not None)
        self.index = {token.encode("utf-8", "surrogatepass"): row for token, row in named}  # words that are wanted
        self.values = np.full((len(tokens), width), np.nan, np.float32)
        self.found: set[int] = set()
        self.twice = 0
        self.broken: list[int] = []  # numbers, from 1, of the lines or entries that hold no vector
        self.odd = ""  # what is odd about the file

    def put(self, word: bytes, vector: np.ndarray, place: int) -> None:
        """Keep the `vector` [E] of a wanted word; one with a value that is no finite float32 is broken."""
        row = self.index[word]
        with np.errstate(over="ignore", invalid="ignore"):
            vector = vector.astype(np.float32)
        if not np.isfinite(vector).all():
            self.broken.append(place)
        elif row in self.found:
            self.twice += 1
        else:
            self.values[row] = vector
            self.found.add(row)


@lru_cache(maxsize=2)  # a run reads its vectors when it is checked and when each model begins
def _by_word(real: Path, path: Path, changed: tuple[int, int], tokens: tuple[str | None, ...]) -> Tensor:
    """Read a file that names its words, and say what it lacks; `real` and `changed` tell it from every other."""
    with path.open("rb") as file:
        form, rows = _read(file, tokens)
    said = f"{path} ({form})"
    skipped = f"{len(rows.broken):,} broken {'lines' if form.endswith('text') else 'entries'}"
    if not rows.found:
        what = f"none of the vocabulary's tokens in it ({form}, {skipped})"
        raise DataError(what, "check that file and tokenizer write words the same way")
    if rows.odd:
        log.warning(f"{said}: {rows.odd}: is the file whole?")
    if rows.broken:
        log.warning(f"{said}: {skipped} skipped: {_first(rows.broken)}")
    if rows.twice:
        log.warning(f"{said}: a word stands in it again {rows.twice:,} times; its first vector counts")
    missing = [word.decode(errors="replace") for word, row in rows.index.items() if row not in rows.found]
    if missing:
        what = f"{len(missing):,} of {len(rows.index):,} words have no vector and start at random"
        log.warning(f"{said}: {what}: {_first(missing)}")
    return torch.from_numpy(rows.values)


def _first(items: Sequence[object], named: int = 5) -> str:
    return ", ".join(printable(str(item)) for item in items[:named]) + (", …" if len(items) > named else "")


_POINTER = ("a Git LFS pointer, not the file that it names", "run `git lfs pull`, or download the file itself")
_PICKLE = ("a pickle, which is never opened", "save its vectors as text (save_word2vec_format)")
_OTHERS = {  # first bytes of what is often given in place of vectors
    b"\x1f\x8b": ("compressed by gzip", "unpack it first: gunzip"),
    b"PK\x03\x04": ("a zip archive", "unpack it first: unzip"),
    **{bytes([0x80, version]): _PICKLE for version in (2, 3, 4, 5)},
}


def _read(file: BinaryIO, tokens: Sequence[str | None]) -> tuple[str, WordRows]:
    """(Name of the format, the vectors of `tokens`)."""
    head = file.read(_HEAD)
    if not head:
        raise DataError("an empty file", _WHOLE)
    for begins, (what, fix) in _OTHERS.items():
        if head.startswith(begins):
            raise DataError(what, fix)
    if head.startswith(_MAGIC):
        return "fastText binary", _read_fasttext(Cursor(file), tokens)
    header = _HEADER.match(head)
    # how many numbers at least half of the first lines have behind a word
    sample = head[header.end() :] if header else head
    lines = [line for line in sample.split(b"\n", _SAMPLE)[:_SAMPLE] if line.strip()]
    widths = Counter(width for line in lines if (width := _trailing_numbers(line.split()[1:])) > 0)
    ((width, count),) = widths.most_common(1) or [(0, 0)]
    if count and 2 * count >= len(lines):
        return f"{'word2vec' if header else 'GloVe'} text", _read_text(file, tokens, header, width)
    if header is not None:
        return "word2vec binary", _read_word2vec(Cursor(file), tokens, header)
    fix = "give GloVe, word2vec or fastText vectors, text or binary, or safetensors"
    raise DataError("none of the formats that are known", fix)


# text

_HEADER = re.compile(rb"[ \t]*(\d{1,12})[ \t]+(\d{1,12})[ \t]*\r?\n")
_SAMPLE = 20  # lines that tell a text of vectors from anything else
_NUMERIC = b"0123456789.-+eE "


def _read_text(file: BinaryIO, tokens: Sequence[str | None], header: re.Match[bytes] | None, width: int) -> WordRows:
    """Lines of words that nobody wants are held against the alphabet of numbers and counted, not converted."""
    if header is not None and int(header[2]) != width:
        what = f"its first line says {int(header[2]):,} numbers per word, and its lines have {width:,}"
        raise DataError(what, "correct the first line, or take the file from its source again")
    if width > _WIDEST:
        raise DataError(f"{width:,} numbers per word", f"use vectors of {_WIDEST:,} columns at most")
    file.seek(header.end() if header else 0)
    before = number = 1 if header else 0
    rows = WordRows(tokens, width)
    while line := file.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
            raise DataError(f"line {number:,} has more than {_LONGEST_LINE:,} bytes", "check the file")
        word, _, rest = line.rstrip().partition(b" ")
        if word not in rows.index and rest and rest.count(b" ") == width - 1 and not rest.translate(None, _NUMERIC):
            continue
        word, fields = _word_and_fields(line, width)
        vector = _numbers(fields)
        if not word or vector is None:
            rows.broken.append(number)
        elif word in rows.index:
            rows.put(word, np.array(vector), number)
        elif word.strip() in rows.index:  # an indented line
            rows.put(word.strip(), np.array(vector), number)
        elif _numbers(word.split()[1:]) is not None:  # a word of one part, and more numbers than the others have
            rows.broken.append(number)
    if header is not None and number - before != int(header[1]):
        rows.odd = f"its first line says {int(header[1]):,} words, and {number - before:,} lines follow"
    return rows


def _word_and_fields(line: bytes, width: int) -> tuple[bytes, list[bytes]]:
    """Split a line into its word and its last `width` fields; the word is empty where the line has none."""
    fields = line.rstrip().rsplit(None, width)
    if len(fields) > width:
        return fields[0], fields[1:]
    before = line[: len(line) - len(line.lstrip())]
    return (before[:-1], fields) if len(fields) == width else (b"", fields)  # a word of white space


def _trailing_numbers(fields: Sequence[bytes]) -> int:
    """Count the finite numbers at the end of a line's fields."""
    numeric = (_numbers([field]) is not None for field in reversed(fields))
    return sum(1 for _ in itertools.takewhile(bool, numeric))


def _numbers(fields: Sequence[bytes]) -> list[float] | None:
    """Finite numbers, at least one; None where a field is no such number."""
    try:
        values = [float(field) for field in fields]
    except ValueError:
        return None
    return values if values and all(map(math.isfinite, values)) else None


# binary


class Cursor:
    """A binary file, mapped, that is read forward: up to a mark, or a number of bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.at = 0

    def word(self, mark: bytes) -> bytes:
        """Return the bytes before the next `mark`, one byte, and step over it."""
        end = self.bytes.find(mark, self.at, self.at + _LONGEST_WORD + 1)
        if end < 0 and len(self.bytes) - self.at > _LONGEST_WORD:
            what = f"a word of more than {_LONGEST_WORD:,} bytes at byte {self.at:,}"
            raise DataError(f"{what}, so the file is not what its beginning says", _WHOLE)
        return self.take((len(self.bytes) if end < 0 else end) + 1 - self.at)[:-1]

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        if self.at + count > len(self.bytes):
            raise DataError(f"cut short, it ends at byte {len(self.bytes):,} within an entry", _WHOLE)
        self.at += count
        return self.bytes[self.at - count : self.at]

    def unpack(self, form: str) -> tuple[Any, ...]:
        """Return the next numbers, little-endian, as `struct` writes their types."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))


def _read_word2vec(file: Cursor, tokens: Sequence[str | None], header: re.Match[bytes]) -> WordRows:
    count, width, size = int(header[1]), int(header[2]), len(file.bytes)
    if not 0 < width <= _WIDEST:
        raise DataError(f"its first line says {width:,} numbers per word", f"use vectors of 1 to {_WIDEST:,} columns")
    least = header.end() + count * (4 * width + 1)
    if size < least:
        promised = f"{count:,} words of {width:,} numbers, at least {least:,} bytes; it has {size:,}"
        raise DataError(f"cut short, or no word2vec file: its first line promises {promised}", _WHOLE)
    file.at = header.end()
    rows = WordRows(tokens, width)
    for place in range(1, count + 1):
        word = file.word(b" ").removeprefix(b"\n")
        vector = file.take(4 * width)
        if word in rows.index:
            rows.put(word, np.frombuffer(vector, "<f4"), place)
    if file.bytes[file.at : file.at + 2] not in (b"", b"\n"):
        what = f"behind the {count:,} words of {width:,} numbers that its first line promises it goes on"
        raise DataError(f"{what} (byte {file.at:,} of {size:,})", _WHOLE)
    return rows


_MAGIC = struct.pack("<i", 793_712_314)
_AS_TEXT = "save its vectors as text (.vec) and give that file"


def _read_fasttext(file: Cursor, tokens: Sequence[str | None]) -> WordRows:
    def require(holds: bool, what: str) -> None:
        if not holds:
            raise DataError(f"a fastText model that contradicts itself: {what}", _WHOLE)

    _, version = file.unpack("2i")
    if version != 12:
        raise DataError(f"a fastText model of version {version}, not 12", _AS_TEXT)
    width, *_, bucket, shortest, longest, _, _ = file.unpack("12id")
    entries, words, labels, _, pruned = file.unpack("3i2q")
    sound = 0 < width <= _WIDEST and min(words, labels) >= 0 and words + labels == entries
    require(sound, "sizes that no model has")
    require(bucket >= (longest > 0), "n-grams without rows")
    rows = WordRows(tokens, width)
    wanted: dict[bytes, int] = {}  # words → rows of the matrix
    for entry in range(entries):
        word = file.word(b"\0")
        _, kind = file.unpack("qb")
        if kind == 0 and word in rows.index:  # no label
            wanted.setdefault(word, entry)
    require(max(wanted.values(), default=-1) < words, "labels among its words")
    if pruned != -1:
        raise DataError("a pruned fastText model", _AS_TEXT)
    quantised, height, columns = file.unpack("?2q")
    if quantised:
        raise DataError("a quantised fastText model", _AS_TEXT)
    require((height, columns) == (words + bucket, width), f"a matrix of {height:,} x {columns:,}")
    least, size = file.at + 4 * height * width, len(file.bytes)
    if size < least:
        what = f"cut short, its matrix of {height:,} x {width:,} needs {least:,} bytes"
        raise DataError(f"{what} and it has {size:,}", _WHOLE)
    matrix = np.ndarray((height, width), "<f4", file.bytes, file.at)
    for word, row in wanted.items():
        own = [row, *(words + ngram for ngram in _ngrams(word, shortest, longest, bucket))]
        with np.errstate(invalid="ignore"):  # of values that `put` will find to be no finite numbers
            vector = matrix[own].mean(0, dtype=np.float64)
        rows.put(word, vector, row + 1)
    return rows


def _ngrams(word: bytes, shortest: int, longest: int, bucket: int) -> Iterator[int]:
    """Rows of a word's n-grams, behind those of the words; an n-gram that stands twice counts twice."""
    if word == b"</s>":
        return
    characters = re.findall(rb"[^\x80-\xbf][\x80-\xbf]*", b"<" + word + b">")  # in UTF-8
    for start in range(len(characters)):
        value = 2_166_136_261
        for end in range(start, min(start + longest, len(characters))):
            for byte in characters[end]:
                value = (value ^ (byte | 0xFFFFFF00 if byte & 0x80 else byte)) * 16_777_619 & 0xFFFFFFFF
            alone = end == start and (start == 0 or end == len(characters) - 1)  # < or > by itself
            if end - start + 1 >= shortest and not alone:
                yield value % bucket
