"""What `--text` takes, as a stream of documents.

    builtin                  the prose that this Python carries
    synthetic:irreversibility=0.3,scripts=2      a language made to order (`tiewise.training.data.synthetic`)
    FILE  FOLDER  'GLOB'     plain text, cut into parts; .jsonl and .parquet among them by their rows
    FILE.jsonl:FIELD         one field of every line (.ndjson too); "text" unless named
    FILE.parquet:COLUMN      one column; "text" unless named
    hf:ID[/CONFIG][:SPLIT]   a Hugging Face dataset, or a dataset's folder (hf:./folder:test); "train" unless named
    -                        standard input, as plain text

Nothing is ever read whole: a file of any size passes through in parts. A plain file is one document, character for
character, whose parts are about a hundredth of all plain text given, between 200 and 10,000 characters: small texts
still split, and a folder of articles keeps each article in one part. A row is a document: its author drew that line, so
it is never cut or joined here.

The order never depends on the file system. In a folder and its subfolders: every file that begins as text, and every
`.jsonl` and `.parquet`; hidden ones (a leading dot) and empty ones are passed over.
"""

from __future__ import annotations

import ast
import glob
import importlib
import json
import os
import stat
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import datasets
import pyarrow
import pyarrow.parquet

from tiewise.core.errors import DataError, one_line
from tiewise.training.data.documents import Document, cut, decode, opened, paragraphs, unreadable
from tiewise.training.data.synthetic import NAME, Language

Text = str | os.PathLike[str]
SYNTHETIC = f"{NAME}:"
TABLES = (".jsonl", ".ndjson", ".parquet")
FIELD = "text"  # of a row, unless another is named
_SMALLEST, _LARGEST = 200, 10_000  # characters of a part cut from plain text
_SNIFFED = 8192  # bytes that decide whether a file found in a folder is text
_ROWS = 1024  # of a Parquet row group, held at once


@dataclass(frozen=True)
class Source:
    """One text as typed, and the files behind it (none of what is made or on the Hub, nor of `-` until it is kept)."""

    text: str
    files: tuple[Path, ...] = ()
    field: str = FIELD  # of the rows of tables among them

    @property
    def size(self) -> int:
        """Bytes of its files."""
        return sum(file.stat().st_size for file in self.files)


def resolve(text: str) -> Source:
    """Find what `text` means, without reading it; a DataError where there is nothing of that name."""
    if text.startswith(SYNTHETIC):
        Language.parse(text)  # a mistake in it is said at once
    if text in ("builtin", "-") or text.startswith(SYNTHETIC):
        return Source(text)
    if text.startswith("hf:"):
        *_, folder = parse_hub_name(text.removeprefix("hf:"))
        return Source(text, tuple(sorted(path for path in folder.rglob("*") if path.is_file())) if folder else ())
    path, _, field = text.rpartition(":")
    return Source(text, find_files(path), field or FIELD) if path.endswith(TABLES) else Source(text, find_files(text))


def open_sources(texts: Text | Sequence[Text]) -> Iterator[Document]:
    """Stream the documents of all `texts` in the order given, plain files part by part.

    Raises:
        DataError: at once where a text does not exist; while iterating where one cannot be read or holds no text.
    """
    given = [texts] if isinstance(texts, str | os.PathLike) else texts
    return read_sources([resolve(os.fspath(text)) for text in given])


def read_sources(sources: Sequence[Source]) -> Iterator[Document]:
    """Stream the documents of `sources`; errors while iterating as in `open_sources`."""
    files = [file for source in sources if not source.text.startswith("hf:") for file in source.files]
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
    if source.text == "builtin":
        yield from (Document("\n\n".join(paragraphs(text))) for _, text in builtin_texts())
    elif source.text.startswith(SYNTHETIC):
        yield from map(Document, Language.parse(source.text).documents())
    elif source.text == "-" and not source.files:
        yield from _parts(sys.stdin.buffer, "standard input", size)
    elif source.text.startswith("hf:"):
        yield from map(Document, _hub_rows(source.text.removeprefix("hf:")))
    else:
        for path in source.files:
            with opened(path) as file:
                if path.suffix == ".parquet":
                    yield from map(Document, _parquet_rows(file, path, source.field))
                elif path.suffix in TABLES:
                    yield from map(Document, _json_lines(file, path, source.field))
                else:
                    yield from _parts(file, str(path), size)


def _parts(file: BinaryIO, name: str, size: int) -> Iterator[Document]:
    held, begins = "", True
    for text in cut(decode(file, name), size):
        held += text
        if not begins or not held.isspace():  # blank lines that a file begins with go with what follows
            yield Document(held, begins)
            held, begins = "", False


# files


def find_files(text: str) -> tuple[Path, ...]:
    """Return the files that `text` means: the file itself, a folder's, or those that match a pattern; refuse none."""
    path = Path(text).expanduser()
    if not os.path.lexists(path) and glob.has_magic(text):
        matches = map(Path, sorted(glob.glob(str(path), recursive=True)))
        files = tuple(file for file in matches if file.is_file() and _state(file).st_size)
        none, fix = f"no file with text matches {repr(text)[:200]}", "check the pattern; ** goes into subfolders"
    elif stat.S_ISDIR(_state(path).st_mode):
        files = tuple(_text_files(path))
        none, fix = f"the folder {text!r} holds no text files", "name a folder with .txt, .md or .jsonl files"
    else:
        files = (path,) if _state(path).st_size or not path.is_file() else ()  # a pipe has no size
        none, fix = f"the file {text!r} is empty", "give a file with text in it"
    if not files:
        raise DataError(none, fix)
    return files


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
        for path in (Path(where, name) for name in sorted(names) if not name.startswith(".")):
            if not path.is_file() or not _state(path).st_size:
                continue
            if path.suffix not in TABLES:
                with opened(path) as file:
                    try:
                        next(decode(file, str(path), _SNIFFED))
                    except DataError:
                        continue
            yield path


# rows


def _json_lines(file: BinaryIO, path: Path, field: str) -> Iterator[str]:
    """Yield `field` of every line; blank lines and null values are passed over, errors name the line."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where, fix = f"{path}, line {number}", "write one JSON object per line"
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except RecursionError:
            raise DataError(f"{where}: nested too deeply", fix) from None
        except ValueError as error:  # bad UTF-8 is one too
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error
            raise DataError(f"{where}: not JSON ({reason})", fix) from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: not a JSON object", 'write one object per line, {"text": "..."}')
        if field not in row:
            known = ", ".join(map(str, row)) or "none"
            raise DataError(f"{where}: no field {field!r}", f"name one with FILE:FIELD; fields seen: {known}")
        if isinstance(row[field], str):
            yield row[field]
        elif row[field] is not None:
            kind = type(row[field]).__name__
            raise DataError(f"{where}: field {field!r} is a {kind}, not a string", "name a field of text")


def _parquet_rows(file: BinaryIO, path: Path, column: str) -> Iterator[str]:
    """Yield `column` of every row, a part of a row group at a time; nulls are passed over."""
    try:
        parquet = pyarrow.parquet.ParquetFile(file)
        schema = parquet.schema_arrow
        if column not in schema.names:
            fix = f"name one with FILE:COLUMN; columns: {', '.join(schema.names)}"
            raise DataError(f"{path}: no column {column!r}", fix)
        kind = schema.field(column).type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise DataError(f"{path}: column {column!r} holds {kind}, not strings", "name a column of text")
        for batch in parquet.iter_batches(batch_size=_ROWS, columns=[column]):
            yield from (value for value in batch.column(0).to_pylist() if value is not None)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} cannot be read as Parquet: {one_line(error)}", "write it again") from None


def parse_hub_name(name: str) -> tuple[str, str | None, str, Path | None]:
    """Take `id[/config][:split]` apart; a DataError where no dataset can have this name.

    Returns:
        (id, config, split, the folder where it is one of this machine).
    """
    path, _, split = name.partition(":")
    folder, form = Path(path).expanduser(), "write hf:owner/name[/config][:split], or hf:./folder[:split]"
    if path and folder.is_dir():
        return str(folder), None, split or "train", folder
    parts = path.split("/")
    if path.startswith(("/", ".", "~")):
        raise DataError(f"hf:{name}: no folder {path!r}", form)
    if not all(parts) or len(parts) > 3:
        raise DataError(f"hf:{name} does not name a dataset", form)
    return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split or "train", None


def _hub_rows(name: str) -> Iterator[str]:
    """Yield the rows of the dataset behind `hf:`: its column `text`, or else its only column of strings."""
    path, config, split, folder = parse_hub_name(name)
    column = None
    try:
        if folder is not None and (folder / "state.json").exists():
            rows = datasets.load_from_disk(path)
        elif folder is not None and (folder / "dataset_dict.json").exists():
            rows = datasets.load_from_disk(str(folder / split))
        else:
            streamed = not set(split) & set("[+")  # slices and sums of splits cannot be
            try:
                rows = datasets.load_dataset(path, config, split=split, streaming=streamed)
            except (OSError, datasets.exceptions.DatasetsError):
                if folder is not None or not streamed:
                    raise
                rows = datasets.load_dataset(path, config, split=split)  # as the local cache holds it
        for row in rows:
            if column is None:
                strings = [name for name, value in row.items() if isinstance(value, str)]
                if FIELD not in strings and len(strings) != 1:
                    fix = f"save the wanted one as Parquet and give FILE.parquet:COLUMN; columns: {', '.join(row)}"
                    raise DataError(f"hf:{name}: no column {FIELD!r}, and {len(strings)} others hold text", fix)
                column = FIELD if FIELD in strings else strings[0]
            if row[column]:
                yield row[column]
    except DataError:
        raise
    except Exception as error:  # a dozen kinds come out of there: hub, network, formats, the file system
        fix = f"check the name and the network; offline, run `hf download --repo-type dataset {path}` first"
        fix = "check the split and the files in the folder" if folder is not None else fix
        raise DataError(f"hf:{name} cannot be read: {one_line(error)}", fix) from None


# what Python carries

# Packages of others, tests (they hold text written to be odd) and a parser kept for Python 2's grammar.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "__pycache__"}
_BODIES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def builtin_texts() -> Iterator[tuple[str, str]]:
    """Yield (name, prose) of what every CPython carries: every reference topic, then every library module's docstrings.

    `pydoc_data.topics` holds the reference texts behind `help("if")`; docstrings are read from the source files by
    `ast`, so no module is imported and nothing runs. The same Python gives the same text, in sorted order. Stripped
    and zipped ones carry neither.
    """
    topics: dict[str, str] = {}
    with suppress(ImportError):  # some distributions pack it apart; the docstrings alone are still a text
        topics = importlib.import_module("pydoc_data.topics").topics
    found = any(topics.values())
    yield from ((f"topic {name}", topics[name]) for name in sorted(topics) if topics[name])
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        inner, said = path.relative_to(library), ""
        if _SKIPPED.isdisjoint(inner.parts):
            with suppress(OSError, SyntaxError, ValueError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old escapes in old modules are not the user's concern
                said = "\n\n".join(_docstrings(ast.parse(path.read_bytes())))
        if said:
            found = True
            yield f"module {inner.as_posix()}", said
    if not found:
        fix = "name a text of your own with --text FILE, or use a complete CPython"
        raise DataError(f"builtin: the Python at {sys.executable} carries no documentation", fix)


def _docstrings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, _BODIES) and (text := ast.get_docstring(node)):
        yield text
    for child in ast.iter_child_nodes(node):
        # definitions stand in statements only, also in those of `if` and `try`; expressions are most of a tree
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _docstrings(child)
