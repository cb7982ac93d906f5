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

The order never depends on the file system. In a folder and its subfolders: every file that begins as text, and every
`.jsonl` and `.parquet`; hidden ones (a leading dot) and empty ones are passed over.
"""

from __future__ import annotations

import ast
import codecs
import glob
import importlib
import os
import stat
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

from tiewise.core.errors import DataError
from tiewise.data.plain_text import Document, cut, decode, opened, paragraphs, unreadable
from tiewise.data.row_sources import hub_documents, jsonl_documents, parquet_documents, parse_hub_name

Text = str | os.PathLike[str]
TABLES = (".jsonl", ".ndjson", ".parquet")
_SMALLEST, _LARGEST = 200, 10_000  # characters of a part cut from plain text
_SNIFFED = 8192  # bytes that decide whether a file found in a folder is text


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
        folder = parse_hub_name(text.removeprefix("hf:")).folder
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
            raise DataError(f"{source.text!r} holds no text", "give a text that is not empty")


def _documents(source: Source, size: int) -> Iterator[Document]:
    if source.kind == "builtin":
        yield from builtin_documents()
    elif source.kind == "hub":
        yield from hub_documents(source.text.removeprefix("hf:"))
    elif source.kind == "stdin":
        yield from _parts(sys.stdin.buffer, "standard input", size)
    for path in source.files if source.kind == "files" else ():
        if path.suffix == ".parquet":
            yield from parquet_documents(path, source.field)
        elif path.suffix in TABLES:
            yield from jsonl_documents(path, source.field)
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


def find_files(text: str) -> tuple[Path, ...]:
    """Return the files that `text` means: the file itself, a folder's, or those that match a pattern.

    Raises:
        DataError: where that is none, or one that was named itself is empty.
    """
    path = Path(text).expanduser()
    if not os.path.lexists(path) and glob.has_magic(text):
        matches = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        files = tuple(file for file in matches if file.is_file() and _state(file).st_size)
        if not files:
            raise DataError(f"no file with text matches {text!r}", "check the pattern; ** goes into subfolders")
        return files
    if stat.S_ISDIR(_state(path).st_mode):
        files = tuple(_text_files(path))
        if not files:
            raise DataError(f"the folder {text!r} holds no text files", "name a folder with .txt, .md or .jsonl files")
        return files
    if path.is_file() and not _state(path).st_size:
        raise DataError(f"the file {text!r} is empty", "give a file with text in it")
    return (path,)


def _state(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise unreadable(path, error) from None


def _text_files(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, error) from None

    for where, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(where, name)
            if not name.startswith(".") and path.is_file() and _state(path).st_size and _is_text(path):
                yield path


def _is_text(path: Path) -> bool:
    if path.suffix in TABLES:
        return True
    with opened(path) as file:
        start = file.read(_SNIFFED)
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
    return b"\0" not in start


# Packages of others, tests (they hold text written to be odd) and a parser kept for Python 2's grammar.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "__pycache__"}
_BODIES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def builtin_documents() -> Iterator[Document]:
    """Yield the prose that every CPython carries: every reference topic, then every library module's docstrings.

    `pydoc_data.topics` holds the reference texts behind `help("if")`; docstrings are read from the source files by
    `ast`, so no module is imported and nothing runs. The same Python gives the same text, in sorted order.

    Raises:
        DataError: where this Python carries neither, as stripped and zipped ones do.
    """
    texts: dict[str, Callable[[], str]] = {}
    with suppress(ImportError):  # some distributions pack it apart; the docstrings alone are still a text
        topics = importlib.import_module("pydoc_data.topics").topics
        texts |= {f"topic {name}": partial(topics.get, name) for name in sorted(topics)}
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        inner = path.relative_to(library)
        if _SKIPPED.isdisjoint(inner.parts):
            texts[f"module {inner.as_posix()}"] = partial(_docstrings, path)
    found = False
    for name, read in texts.items():
        if text := read():
            found = True
            yield Document(name, "\n\n".join(paragraphs(text)))
    if not found:
        raise DataError(
            f"builtin: the Python at {sys.executable} carries no documentation",
            "name a text of your own with --text FILE, or use a complete CPython",
        )


def _docstrings(path: Path) -> str:
    """All docstrings of one file in reading order; "" where the file is unreadable or not of this Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in old modules are not the user's concern
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    return "\n\n".join(text for node in _nodes(tree) if (text := ast.get_docstring(node)))


def _nodes(node: ast.AST) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    if isinstance(node, _BODIES):
        yield node
    for child in ast.iter_child_nodes(node):
        # definitions stand in statements only, also in those of `if` and `try`; expressions are most of a tree
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _nodes(child)
