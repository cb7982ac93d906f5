"""Texts by name (`--text`), as a stream of documents.

    builtin                  the prose in this Python's library and reference
    synthetic:irreversibility=0.3,scripts=2      an artificial language (`tiewise.training.data.synthetic`)
    FILE  FOLDER  'GLOB'     plain text, cut into parts; .jsonl and .parquet among them by their rows
    FILE.jsonl:FIELD         one field of every line (.ndjson too); "text" unless named
    FILE.parquet:COLUMN      one column; "text" unless named
    hf:ID[/CONFIG][:SPLIT]   a Hugging Face dataset, or a dataset's folder (hf:./folder:test); "train" unless named
    -                        standard input, as plain text

A file of any size is read in parts. A plain file is one document, character for character. Its parts have about a
hundredth of all plain text, between 200 and 10,000 characters: small texts still split, and a folder of articles has
each article in one part. A row is a document as its author wrote it, so rows are never cut or joined here.

The order never depends on the file system. A folder means every file in it and its subfolders that begins as text,
and every `.jsonl` and `.parquet`. Hidden files (a leading dot) and empty ones are left out.
"""

from __future__ import annotations

import ast
import fnmatch
import glob
import importlib
import json
import os
import stat
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import datasets
import pyarrow
import pyarrow.parquet

from tiewise.core.errors import DataError, one_line_message
from tiewise.training.data.documents import Document, cut_parts, decode, open_text, paragraphs, unreadable
from tiewise.training.data.synthetic import Language
from tiewise.training.data.text_names import BUILTIN, FIELD, HUB, STDIN, SYNTHETIC, TABLES, require_state, split_field

Text = str | os.PathLike[str]
_SMALLEST, _LARGEST = 200, 10_000  # characters of a part cut from plain text
_SNIFFED = 8192  # first bytes of a file in a folder that are tested for text
_ROWS = 1024  # rows of a Parquet row group in memory at once


@dataclass(frozen=True)
class Source:
    """One text as typed, and its files.

    There are no files for generated texts, for the Hub, and for `-` until it is saved.
    """

    text: str
    files: tuple[Path, ...] = ()
    field: str = FIELD  # field of the rows, if files are tables

    @property
    def size(self) -> int:
        """Total bytes of its files."""
        return sum(file.stat().st_size for file in self.files)


def resolve(text: str) -> Source:
    """Return the source that `text` names, without reading it.

    DataError: there is none of that name.
    """
    if text.startswith(SYNTHETIC):
        Language.parse(text)  # raises for a mistake before anything is read
        return Source(text)
    if text in (BUILTIN, STDIN):
        return Source(text)
    if text.startswith(HUB):
        folder = parse_hub_name(text.removeprefix(HUB)).folder
        if folder is None:
            return Source(text)
        return Source(text, tuple(sorted(path for path in folder.rglob("*") if path.is_file())))
    path, field = split_field(text)
    return Source(text, find_files(path), field)


def open_sources(texts: Text | Sequence[Text]) -> Iterator[Document]:
    """Stream the documents of all `texts` in the given order, plain files in parts.

    Raises:
        DataError: at once if a text does not exist; while iterating if one cannot be read or has no text.
    """
    if isinstance(texts, str | os.PathLike):
        texts = [texts]
    return read_sources([resolve(os.fspath(text)) for text in texts])


def read_sources(sources: Sequence[Source]) -> Iterator[Document]:
    """Stream the documents of `sources`; errors while iterating as in `open_sources`."""
    size = _part_size(sources)
    for source in sources:
        has_text = False
        for document in _documents(source, size):
            if not document.begins or document.text.strip():
                has_text = True
                yield document
        if not has_text:
            raise DataError(f"{source.text!r} holds no text", "give a text that is not empty")


def _part_size(sources: Sequence[Source]) -> int:
    """Return the characters of a part of plain text.

    It is about a hundredth of all plain files together.
    """
    plain = 0
    for source in sources:
        if source.text.startswith(HUB):
            continue
        plain += sum(file.stat().st_size for file in source.files if file.suffix not in TABLES)
    return max(_SMALLEST, min(_LARGEST, plain // 100)) if plain else _LARGEST


def _documents(source: Source, size: int) -> Iterator[Document]:
    """Stream the documents of a text; `size` is the size of parts of plain files."""
    text = source.text
    if text == BUILTIN:
        for _, prose in builtin_texts():
            yield Document("\n\n".join(paragraphs(prose)))
    elif text.startswith(SYNTHETIC):
        yield from map(Document, Language.parse(text).documents())
    elif text == STDIN and not source.files:
        yield from _parts(sys.stdin.buffer, "standard input", size)
    elif text.startswith(HUB):
        yield from map(Document, _hub_rows(text.removeprefix(HUB)))
    else:
        for path in source.files:
            yield from _documents_of_file(path, source.field, size)


def _documents_of_file(path: Path, field: str, size: int) -> Iterator[Document]:
    """Stream the rows of a table, or the parts of a plain file."""
    with open_text(path) as file:
        if path.suffix == ".parquet":
            yield from map(Document, _parquet_rows(file, path, field))
        elif path.suffix in TABLES:
            yield from map(Document, _json_lines(file, path, field))
        else:
            yield from _parts(file, str(path), size)


def _parts(file: BinaryIO, name: str, size: int) -> Iterator[Document]:
    """Stream the parts of a plain file, which is one document."""
    text, begins = "", True
    for part in cut_parts(decode(file, name), size):
        text += part
        if begins and text.isspace():
            continue  # blank lines at the beginning belong to the next part
        yield Document(text, begins)
        text, begins = "", False


# files


def find_files(text: str) -> tuple[Path, ...]:
    """Return the files of a name: one file, or those of a folder or a pattern.

    DataError: there are none.
    """
    path = Path(text).expanduser()
    if not os.path.lexists(path) and glob.has_magic(text):
        files = _matching_files(path)
        none, remedy = f"no file with text matches {repr(text)[:200]}", "check the pattern; ** goes into subfolders"
    elif stat.S_ISDIR(require_state(path).st_mode):
        files = tuple(_text_files(path))
        none, remedy = f"the folder {text!r} holds no text files", "name a folder with .txt, .md or .jsonl files"
    else:
        is_empty = not require_state(path).st_size and path.is_file()  # a pipe also has size 0
        files = () if is_empty else (path,)
        none, remedy = f"the file {text!r} is empty", "give a file with text in it"
    if not files:
        raise DataError(none, remedy)
    return files


def _matching_files(pattern: Path) -> tuple[Path, ...]:
    """Return the non-empty files that match a pattern, in order."""
    matches = [Path(name) for name in sorted(glob.glob(str(pattern), recursive=True))]
    return tuple(path for path in matches if _is_filled_file(path))


def _is_filled_file(path: Path) -> bool:
    return path.is_file() and require_state(path).st_size > 0


def _text_files(folder: Path) -> Iterator[Path]:
    """Yield the tables and text files in a folder and its subfolders, without hidden ones."""

    def refuse(error: OSError) -> None:
        """Raise the error for a folder that cannot be read."""
        raise unreadable(error.filename, error) from None

    for where, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(where, name)
            if name.startswith(".") or not _is_filled_file(path):
                continue
            if path.suffix in TABLES or _begins_as_text(path):
                yield path


def _begins_as_text(path: Path) -> bool:
    """Return whether the first bytes of a file are text."""
    with open_text(path) as file:
        try:
            next(decode(file, str(path), _SNIFFED))
        except DataError:
            return False
    return True


# rows


def _json_lines(file: BinaryIO, path: Path, field: str) -> Iterator[str]:
    """Yield `field` of every line, without blank lines and null values.

    DataError: a line cannot be read; the message names it.
    """
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        row = _read_object(line, where)
        if field not in row:
            names = ", ".join(map(str, row)) or "none"
            raise DataError(f"{where}: no field {field!r}", f"name one with FILE:FIELD; fields seen: {names}")
        value = row[field]
        if isinstance(value, str):
            yield value
        elif value is not None:
            type_name = type(value).__name__
            raise DataError(f"{where}: field {field!r} is a {type_name}, not a string", "name a field of text")


def _read_object(line: bytes, where: str) -> dict[str, Any]:
    """Read a JSON object from a line. Raises DataError."""
    remedy = "write one JSON object per line"
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except RecursionError:
        raise DataError(f"{where}: nested too deeply", remedy) from None
    except UnicodeDecodeError:
        raise DataError(f"{where}: not JSON (not UTF-8)", remedy) from None
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error})", remedy) from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object", 'write one object per line, {"text": "..."}')
    return row


def _parquet_rows(file: BinaryIO, path: Path, column: str) -> Iterator[str]:
    """Yield `column` of every row without nulls, in parts of a row group."""
    try:
        parquet = pyarrow.parquet.ParquetFile(file)
        _require_text_column(parquet.schema_arrow, path, column)
        for batch in parquet.iter_batches(batch_size=_ROWS, columns=[column]):
            yield from (value for value in batch.column(0).to_pylist() if value is not None)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} cannot be read as Parquet: {one_line_message(error)}", "write it again") from None


def _require_text_column(schema: Any, path: Path, column: str) -> None:
    """Raise DataError if a Parquet schema lacks a column, or if it has no strings."""
    if column not in schema.names:
        remedy = f"name one with FILE:COLUMN; columns: {', '.join(schema.names)}"
        raise DataError(f"{path}: no column {column!r}", remedy)
    column_type = schema.field(column).type
    if not (pyarrow.types.is_string(column_type) or pyarrow.types.is_large_string(column_type)):
        raise DataError(f"{path}: column {column!r} holds {column_type}, not strings", "name a column of text")


class HubName(NamedTuple):
    """Parts of a dataset's name."""

    path: str  # the id, or the folder
    config: str | None
    split: str
    folder: Path | None  # folder of a dataset on this machine


def parse_hub_name(name: str) -> HubName:
    """Divide `id[/config][:split]` into its parts.

    DataError: no dataset can have this name.
    """
    path, _, split = name.partition(":")
    folder, form = Path(path).expanduser(), "write hf:owner/name[/config][:split], or hf:./folder[:split]"
    if path and folder.is_dir():
        return HubName(str(folder), None, split or "train", folder)
    if path.startswith(("/", ".", "~")):
        raise DataError(f"hf:{name}: no folder {path!r}", form)
    parts = path.split("/")
    if "" in parts or len(parts) > 3:
        raise DataError(f"hf:{name} does not name a dataset", form)
    config = parts[2] if len(parts) == 3 else None
    return HubName("/".join(parts[:2]), config, split or "train", None)


def _hub_rows(name: str) -> Iterator[str]:
    """Yield the rows of an `hf:` dataset: its column `text`, or else its only text column."""
    source = parse_hub_name(name)
    column = None
    try:
        for row in _open_dataset(source):
            if column is None:
                column = _text_column(row, name)
            if row[column]:
                yield row[column]
    except DataError:
        raise
    except Exception as error:  # hub, network, formats and file system raise many types
        remedy = "check the split and the files in the folder"
        if source.folder is None:
            remedy = (
                f"check the name and the network; offline, run `hf download --repo-type dataset {source.path}` first"
            )
        raise DataError(f"hf:{name} cannot be read: {one_line_message(error)}", remedy) from None


def _open_dataset(source: HubName) -> Iterable[dict[str, Any]]:
    """Open a saved dataset, one of several saved together, or any that `datasets` can load."""
    path, config, split, folder = source
    rows: Iterable[dict[str, Any]]
    if folder is not None and (folder / "state.json").exists():
        rows = datasets.load_from_disk(path)
        return rows
    if folder is not None and (folder / "dataset_dict.json").exists():
        rows = datasets.load_from_disk(str(folder / split))
        return rows
    can_stream = not set(split) & set("[+")  # slices and sums of splits cannot be streamed
    try:
        rows = datasets.load_dataset(path, config, split=split, streaming=can_stream)
    except (OSError, datasets.exceptions.DatasetsError):
        if folder is not None or not can_stream:
            raise
        rows = datasets.load_dataset(
            path, config, split=split
        )  # without streaming, `datasets` also finds the local cache
    return rows


def _text_column(row: Mapping[str, Any], name: str) -> str:
    """Return the column `text` of a dataset's first row, or else its only text column.

    Raises DataError.
    """
    strings = [column for column, value in row.items() if isinstance(value, str)]
    if FIELD in strings:
        return FIELD
    if len(strings) != 1:
        remedy = f"save the wanted one as Parquet and give FILE.parquet:COLUMN; columns: {', '.join(row)}"
        raise DataError(f"hf:{name}: no column {FIELD!r}, and {len(strings)} others hold text", remedy)
    return strings[0]


# the built-in text

# Third-party packages, tests (with deliberately strange text) and a parser of Python 2's grammar.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "__pycache__"}
_BODIES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")  # fields with statements, in the order of the source


def builtin_texts() -> Iterator[tuple[str, str]]:
    """Yield (name, prose) of every reference topic and library module of this Python.

    `pydoc_data.topics` has the reference texts of `help("if")`. Docstrings are read from the source files by `ast`, so
    no module is imported and nothing runs. The same Python gives the same text, in sorted order. A stripped or zipped
    Python has neither.

    DataError: this Python has no documentation.
    """
    has_prose = False
    for name, prose in chain(_topics(), _library_docstrings()):
        if prose:
            has_prose = True
            yield name, prose
    if not has_prose:
        remedy = "name a text of your own with --text FILE, or use a complete CPython"
        raise DataError(f"builtin: the Python at {sys.executable} carries no documentation", remedy)


def _topics() -> Iterator[tuple[str, str]]:
    """Yield the reference topics of `help("if")`, by name."""
    topics: dict[str, str] = {}
    with suppress(ImportError):  # some distributions package it separately; the docstrings suffice
        topics = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield f"topic {name}", topics[name]


def _library_docstrings() -> Iterator[tuple[str, str]]:
    """Yield the docstrings of every standard library module, by its path; "" if it has none."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in _library_files(library):
        prose = ""
        with suppress(OSError, SyntaxError, ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old modules have invalid escapes
            prose = "\n\n".join(_docstrings(ast.parse(path.read_bytes())))
        yield f"module {path.relative_to(library).as_posix()}", prose


def _library_files(library: Path) -> list[Path]:
    """Return the source files of the standard library in order, without the folders in `_SKIPPED`."""
    files: list[Path] = []
    for where, folders, names in os.walk(library):
        folders[:] = set(folders) - _SKIPPED  # site-packages may be large
        files += map(Path(where).joinpath, fnmatch.filter(names, "*.py"))
    return sorted(files)


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Yield the docstrings at and below a node, in order."""
    if isinstance(node, _BODIES):
        text = ast.get_docstring(node)
        if text:
            yield text
    # only statements contain definitions, also those of `if` and `try`; expressions are most of a tree
    for block in _BLOCKS:
        for child in getattr(node, block, ()):
            yield from _docstrings(child)
