"""Documents: text of any size, read in pieces, cut into parts, without repetitions, and split.

Parts are the units of splitting. Documents end with `<eos>`: a long file arrives in parts, and continues from one part
to the next. One long file must also split into training and held-out text, so its consecutive paragraphs are grouped. A
part ends at the first blank line between `size` and 3·`size` characters, else at the first line end there, else at the
first space. The joined parts are the file.

Repeated paragraphs are dropped before the split, so that held-out text was never trained on. Boilerplate repeats across
documents, and on both sides of the split it would measure memory instead of prediction. Paragraphs that differ only in
white space count as equal.

The shares of a split are shares of characters. random: in a seeded random order of the parts, `heldout` takes each part
that brings it nearer to its share, then `tune` does; `train` has the rest, also a huge document. The parts of one long
file fall into all splits. contiguous: training, tuning and held-out text follow each other in the order of the text.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from itertools import chain, pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from tiewise.core.errors import DataError, did_you_mean

SPLITS = ("train", "tune", "heldout")
RANDOM, CONTIGUOUS = "random", "contiguous"
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_BETWEEN = re.compile(f"({_BLANK_LINES.pattern})")
_HASH = 16  # bytes of a digest
_FIX = "give UTF-8 text (iconv -t UTF-8 converts other encodings)"


class Document(NamedTuple):
    """A text, or a part of one."""

    text: str
    begins: bool = True  # True for the first part of a document


def with_document_ends(documents: Iterable[Document]) -> Iterator[tuple[str, bool]]:
    """Yield (text, True if its document ends with it) for each part."""
    for (text, _), (_, begins) in pairwise(chain(documents, [Document("")])):
        yield text, begins


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of `text` in order, with indentation, without trailing white space."""
    for part in _BLANK_LINES.split(text):
        paragraph = part.strip("\n").rstrip()
        if paragraph:
            yield paragraph


@contextmanager
def open_text(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for reading bytes.

    DataError: the system refuses, now or while reading.
    """
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path | str, error: OSError) -> DataError:
    """Return the error that says why `path` cannot be read."""
    if isinstance(error, FileNotFoundError):
        hint = did_you_mean(path, ("builtin", "synthetic"))
        return DataError(f"no file or folder {str(path)!r}", f"{hint}check the path")
    if isinstance(error, PermissionError):
        return DataError(f"no permission to read {str(path)!r}", "change its mode, or name a text that you may read")
    return DataError(f"cannot read {str(path)!r}: {error.strerror or error}", "name a text that can be read")


def decode(file: BinaryIO, name: str, block_bytes: int = 1 << 20) -> Iterator[str]:
    """Yield the text of `file` in pieces, without a byte order mark.

    Every line end is a newline. DataError: the file is not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(decoder, translate=True)
    offset = 0
    while True:
        block = file.read(block_bytes)
        zero = block.find(0)
        if zero >= 0:
            raise DataError(f"{name} is a binary file: byte {offset + zero} is zero", _FIX)
        waiting = len(decoder.getstate()[0])  # first bytes of a character whose rest is in the next block
        try:
            text = newlines.decode(block, final=not block)
        except UnicodeDecodeError as error:
            where = offset - waiting + error.start
            raise DataError(f"{name} is not UTF-8 text: byte {where} cannot be read", _FIX) from None
        yield text.removeprefix("\ufeff") if offset == 0 else text
        if not block:
            return
        offset += len(block)


def cut_parts(pieces: Iterable[str], size: int) -> Iterator[str]:
    """Cut a stream of text into parts of `size` to 3·`size` characters.

    The last part may be shorter.
    """
    text, start = "", 0
    for piece in pieces:
        text, start = text[start:] + piece, 0
        while len(text) - start > 3 * size:
            end = _end(text, start, size)
            yield text[start:end]
            start = end
    while start < len(text):
        end = len(text)
        if len(text) - start > 2 * size:
            end = _end(text, start, size)
        yield text[start:end]
        start = end


def _end(text: str, start: int, size: int) -> int:
    """Return the end of a part that begins at `start`.

    It is a blank line, else a line end, else a space.
    """
    low, high = start + size, min(start + 3 * size, len(text))
    blank = _BLANK_LINES.search(text, low, high)
    if blank:
        return blank.end()
    for mark in "\n ":
        index_of_mark = text.find(mark, low, high)
        if index_of_mark >= 0:
            return index_of_mark + 1
    return high


class HashSet:
    """Set of 16-byte strings that needs less memory than a Python set.

    The newest strings are in a Python set, the others in a sorted array.
    """

    def __init__(self, newest: int = 250_000):
        self._limit = newest  # a Python set takes about 100 bytes per string
        self._newest: set[bytes] = set()
        self._sorted = np.empty(0, f"S{_HASH}")

    def add(self, digest: bytes) -> bool:
        """Add `digest`; return True if it is new."""
        if digest in self._newest or self._is_sorted_in(digest):
            return False
        self._newest.add(digest)
        # merge at least an eighth of the array's size, or the total work would be quadratic
        if len(self._newest) >= max(self._limit, len(self._sorted) // 8):
            newest = np.array(sorted(self._newest), self._sorted.dtype)
            self._sorted = np.sort(np.concatenate([self._sorted, newest]), kind="stable")  # merges sorted runs
            self._newest.clear()
        return True

    def _is_sorted_in(self, digest: bytes) -> bool:
        key = np.array(digest, self._sorted.dtype)
        index_of_mark = int(self._sorted.searchsorted(key))
        return index_of_mark < len(self._sorted) and bool(self._sorted[index_of_mark] == key)


class Deduplicator:
    """Filter of documents that drops paragraphs which came before, and counts them."""

    def __init__(self) -> None:
        self.dropped = 0
        self._seen = HashSet()

    def __call__(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents in order, without repeated paragraphs.

        A document without any new paragraph is left out.
        """
        begins = False
        for document in documents:
            begins |= document.begins  # also if the document's earlier parts were left out
            text = self._without_repetitions(document.text)
            if text.strip() or (text and not begins):
                yield Document(text, begins)
                begins = False

    def _without_repetitions(self, text: str) -> str:
        """Return a text without repeated paragraphs and the blank lines before them."""
        parts = _BETWEEN.split(text)  # paragraph, blank lines, paragraph, …
        new: list[str] = []
        for i in range(0, len(parts), 2):
            if self._is_repeated(parts[i]):
                self.dropped += 1
                continue
            if new:
                new.append(parts[i - 1])
            new.append(parts[i])
        return "".join(new)

    def _is_repeated(self, paragraph: str) -> bool:
        """Return whether a paragraph came before, and remember it.

        White space is ignored, and an empty paragraph is never repeated.
        """
        words = " ".join(paragraph.split())
        if not words:
            return False
        digest = blake2b(words.encode("utf-8", "replace"), digest_size=_HASH).digest()
        return not self._seen.add(digest)


def assign_splits(sizes: np.ndarray, fractions: Sequence[float], seed: int, how: str = RANDOM) -> np.ndarray:
    """Return the index in `SPLITS` of every document or part, int8[n].

    `sizes` are characters, int64[n]. The result is the same on every machine and in every version of numpy, which keeps
    the stream of this generator fixed.
    """
    if len(sizes) < len(SPLITS):
        makes = f"too little text: {len(sizes)} document{'s' * (len(sizes) != 1)} once repetitions are left out"
        raise DataError(f"{makes}, and at least {len(SPLITS)} are needed to hold some out", "give more text")
    if how == CONTIGUOUS:
        return _assign_in_order(sizes, fractions)
    order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed))).permutation(len(sizes))
    where = np.zeros(len(sizes), np.int8)
    for split in (2, 1):
        _fill_split(where, split, fractions[split] * float(sizes.sum()), sizes, order)
    return where


def _assign_in_order(sizes: np.ndarray, fractions: Sequence[float]) -> np.ndarray:
    """Divide documents in their order into training, tuning and held-out text.

    Each split gets one document or more.
    """
    before = np.cumsum(sizes) / sizes.sum()  # share of the text up to the end of each document
    tune = int(np.clip(np.abs(before - fractions[0]).argmin() + 1, 1, len(sizes) - 2))
    heldout = int(np.clip(np.abs(before - sum(fractions[:2])).argmin() + 1, tune + 1, len(sizes) - 1))
    return np.repeat(np.arange(3, dtype=np.int8), np.diff([0, tune, heldout, len(sizes)]))


def _fill_split(where: np.ndarray, split: int, room: float, sizes: np.ndarray, order: np.ndarray) -> None:
    """Move documents from training (0) to a split, in the order given.

    A document is moved if that brings the split nearer to `room` characters.
    """
    free = int((where == 0).sum())
    for index in order:
        if room <= 0 or free == split:  # each split still to be filled needs a document
            break
        if where[index] == 0 and sizes[index] < 2 * room:
            where[index] = split
            room -= float(sizes[index])
            free -= 1
    if not (where == split).any():  # all documents are long; the shortest exceeds the share least
        where[np.where(where == 0, sizes, np.inf).argmin()] = split
