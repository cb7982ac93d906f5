"""What `--text` takes, as a stream of documents.

    builtin                  the prose that this Python carries
    FILE  FOLDER  'GLOB'     plain text, cut into parts; .jsonl and .parquet among them by their rows
    FILE.jsonl:FIELD         one field of every line (.ndjson too); "text" unless named
    FILE.parquet:COLUMN      one column; "text" unless named
    hf:ID[/CONFIG][:SPLIT]   a Hugging Face dataset, or a dataset's folder
    -                        standard input, as plain text

Nothing is ever read whole: a file of any size passes through in parts. A plain file is one document, character for
character, whose parts are about a hundredth of all plain text given, between 200 and 10,000 characters: small texts
still split, and a folder of articles keeps each article in one part.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from tiewise.core.errors import DataError
from tiewise.data.builtin import builtin_documents
from tiewise.data.document import Document
from tiewise.data.files import TABLES, find_files
from tiewise.data.hub import hub_documents, parse
from tiewise.data.plain_text import cut, decode, opened
from tiewise.data.tables import jsonl_documents, parquet_documents

__all__ = ["Document", "Source", "open_sources", "read_sources", "resolve"]

Text = str | os.PathLike[str]
_SMALLEST, _LARGEST = 200, 10_000  # characters of a part cut from plain text
_EMPTY = "give a text that is not empty"


@dataclass(frozen=True)
class Source:
    """One text as typed, what kind it is, and the files behind it (none for `builtin`, `-` and the Hub)."""

    text: str
    kind: Literal["builtin", "stdin", "hub", "files"]
    files: tuple[Path, ...] = ()
    field: str | None = None

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.stat().st_size for file in self.files)


def resolve(text: str) -> Source:
    """Find what `text` means, without reading it.

    Raises:
        DataError: where there is nothing of that name.
    """
    if text == "builtin":
        return Source(text, "builtin")
    if text == "-":
        return Source(text, "stdin")
    if text.startswith("hf:"):
        folder = parse(text.removeprefix("hf:")).folder
        files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder else ()
        return Source(text, "hub", tuple(files))
    path, _, field = text.rpartition(":")
    if path.endswith(TABLES):
        return Source(text, "files", find_files(path), field or None)
    return Source(text, "files", find_files(text))


def open_sources(texts: Text | Sequence[Text]) -> Iterator[Document]:
    """Stream the documents of all `texts` in the order given, plain files part by part.

    Raises:
        DataError: at once where a text does not exist; while iterating where one cannot be read or holds no text.
    """
    given = [texts] if isinstance(texts, str | os.PathLike) else texts
    return read_sources([resolve(os.fspath(text)) for text in given])


def read_sources(sources: Sequence[Source]) -> Iterator[Document]:
    """Stream the documents of `sources`; errors while iterating as in `open_sources`."""
    files = [file for source in sources if source.kind == "files" for file in source.files]
    plain = sum(file.stat().st_size for file in files if file.suffix not in TABLES)
    size = max(_SMALLEST, min(_LARGEST, plain // 100)) if plain else _LARGEST
    for source in sources:
        found = False
        for document in _documents(source, size):
            if not document.begins or document.text.strip():
                found = True
                yield document
        if not found:
            raise DataError(f"{source.text!r} holds no text", _EMPTY)


def _documents(source: Source, size: int) -> Iterator[Document]:
    if source.kind == "builtin":
        yield from builtin_documents()
    elif source.kind == "hub":
        yield from hub_documents(source.text.removeprefix("hf:"))
    elif source.kind == "stdin":
        yield from _parts(sys.stdin.buffer, "standard input", size)
    else:
        for file in source.files:
            yield from _rows_or_parts(file, source.field, size)


def _rows_or_parts(path: Path, field: str | None, size: int) -> Iterator[Document]:
    if path.suffix == ".parquet":
        yield from parquet_documents(path, field)
    elif path.suffix in TABLES:
        yield from jsonl_documents(path, field)
    else:
        with opened(path) as file:
            yield from _parts(file, str(path), size)


def _parts(file: BinaryIO, name: str, size: int) -> Iterator[Document]:
    held, begins = "", True
    for number, text in enumerate(cut(decode(file, name), size), 1):
        held += text
        if not begins or not held.isspace():  # blank lines that a file begins with go with what follows
            yield Document(f"{name}, part {number}", held, begins)
            held, begins = "", False
