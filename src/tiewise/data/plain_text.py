"""Plain text of any size, read piece by piece and cut into parts; what a document and a paragraph are.

Parts are what is split and tuned on, documents are what `<eos>` ends: a long file arrives in parts, and reads on from
one to the next. One long file must still split into training and held-out text, so its consecutive paragraphs are
grouped: a part ends at the first blank line between `size` and 3·`size` characters; failing that at the first line end
there; failing that at the first space. Nothing is lost: the parts joined are the file.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tiewise.core.errors import DataError

BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_FIX = "give UTF-8 text (iconv -t UTF-8 converts other encodings)"


@dataclass(frozen=True)
class Document:
    """A text, or a part of one, and where it came from (for messages only); `begins`: it is the first part."""

    name: str
    text: str
    begins: bool = True


def ended(documents: Iterable[Document]) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether its document ends with it)."""
    last: str | None = None
    for document in documents:
        if last is not None:
            yield last, document.begins
        last = document.text
    if last is not None:
        yield last, True


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of `text` in order: indentation kept, trailing white space dropped."""
    for paragraph in BLANK_LINES.split(text):
        kept = paragraph.strip("\n").rstrip()
        if kept:
            yield kept


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for reading bytes.

    Raises:
        DataError: where the system refuses, now or while reading.
    """
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path | str, error: OSError) -> DataError:
    """Return the error that says why `path` cannot be read."""
    if isinstance(error, FileNotFoundError):
        return DataError(f"no file or folder {str(path)!r}", "check the path")
    if isinstance(error, PermissionError):
        return DataError(f"no permission to read {str(path)!r}", "change its mode, or name a text that you may read")
    return DataError(f"cannot read {str(path)!r}: {error.strerror or error}", "name a text that can be read")


def decode(file: BinaryIO, name: str, block_bytes: int = 1 << 20) -> Iterator[str]:
    """Yield the text of `file` in pieces: UTF-8, each line end a newline, no byte order mark.

    Raises:
        DataError: at the first byte that is not text, with its offset.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    newlines = io.IncrementalNewlineDecoder(decoder, translate=True)
    offset = 0
    while True:
        block = file.read(block_bytes)
        if (zero := block.find(0)) >= 0:
            raise DataError(f"{name} is a binary file: byte {offset + zero} is zero", _FIX)
        held = len(decoder.getstate()[0])  # a character's first bytes, waiting for the rest
        try:
            text = newlines.decode(block, final=not block)
        except UnicodeDecodeError as error:
            where = offset - held + error.start
            raise DataError(f"{name} is not UTF-8 text: byte {where} cannot be read", _FIX) from None
        yield text.removeprefix("\ufeff") if offset == 0 else text
        if not block:
            return
        offset += len(block)


def cut(pieces: Iterable[str], size: int) -> Iterator[str]:
    """Cut a stream of text into parts of `size` to 3·`size` characters; the last may be shorter."""
    text, start = "", 0
    for piece in pieces:
        text, start = text[start:] + piece, 0
        while len(text) - start > 3 * size:
            end = _end(text, start, size)
            yield text[start:end]
            start = end
    while start < len(text):
        end = _end(text, start, size) if len(text) - start > 2 * size else len(text)
        yield text[start:end]
        start = end


def _end(text: str, start: int, size: int) -> int:
    low, high = start + size, min(start + 3 * size, len(text))
    if blank := BLANK_LINES.search(text, low, high):
        return blank.end()
    for mark in "\n ":
        if (found := text.find(mark, low, high)) >= 0:
            return found + 1
    return high


def byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte: itself where it prints, else the next from 256 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in prints]
    return [chr(256 + others.index(byte)) if byte in others else chr(byte) for byte in range(256)]


def one_line(error: BaseException, limit: int = 200) -> str:
    """Return another library's message on one line of at most `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
