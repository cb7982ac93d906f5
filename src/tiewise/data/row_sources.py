"""Texts that come in rows, one row at a time: JSON lines, Parquet, and datasets of the Hugging Face Hub.

    hf:owner/name            hf:owner/name/config            hf:owner/name:validation            hf:./folder:test

A row is a document: its author drew that line, so it is never cut or joined here. A dataset's text column is `text`,
or else its only column of strings. Its rows are streamed; where the Hub cannot be reached, a dataset that the local
cache holds is read from there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pyarrow
import pyarrow.parquet

from tiewise.core.errors import DataError
from tiewise.data.plain_text import Document, one_line, opened

FIELD = "text"
_FORM = "write hf:owner/name[/config][:split], or hf:./folder[:split]"
_ROWS = 1024  # of a Parquet row group, held at once


def jsonl_documents(path: Path, field: str | None) -> Iterator[Document]:
    """Yield `field` (default "text") of every line; blank lines and null values are passed over.

    Raises:
        DataError: with the line's number, where a line is not a JSON object or lacks the field.
    """
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                row, name = _json_row(line, where), field or FIELD
                if name not in row:
                    known = ", ".join(map(str, row)) or "none"
                    raise DataError(f"{where}: no field {name!r}", f"name one with FILE:FIELD; fields seen: {known}")
                value = row[name]
                if isinstance(value, str):
                    yield Document(where, value)
                elif value is not None:
                    kind = type(value).__name__
                    raise DataError(f"{where}: field {name!r} is a {kind}, not a string", "name a field of text")


def _json_row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:  # bad UTF-8 is one too
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
        raise DataError(f"{where}: not JSON ({reason})", "write one JSON object per line") from None
    except RecursionError:
        raise DataError(f"{where}: nested too deeply", "write one flat JSON object per line") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object", 'write one object per line, {"text": "..."}')
    return row


def parquet_documents(path: Path, column: str | None) -> Iterator[Document]:
    """Yield `column` (default "text") of every row, a part of a row group at a time; nulls are passed over.

    Raises:
        DataError: where the file is not Parquet, or has no such column of strings.
    """
    column, row = column or FIELD, 0
    with opened(path) as file:
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
                for value in batch.column(0).to_pylist():
                    if value is not None:
                        yield Document(f"{path}, row {row}", value)
                    row += 1
        except pyarrow.ArrowException as error:
            raise DataError(f"{path} cannot be read as Parquet: {one_line(error)}", "write it again") from None


class HubName(NamedTuple):
    """What stands behind `hf:`, taken apart; `folder` is set where it is a folder of this machine."""

    path: str
    config: str | None
    split: str
    folder: Path | None


def parse_hub_name(name: str) -> HubName:
    """Take `id[/config][:split]` apart; the split is "train" unless given.

    Raises:
        DataError: where no dataset can have this name.
    """
    path, _, split = name.partition(":")
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        return HubName(str(folder), None, split or "train", folder)
    parts = path.split("/")
    if path.startswith(("/", ".", "~")):
        raise DataError(f"hf:{name}: no folder {path!r}", _FORM)
    if not all(parts) or len(parts) > 3:
        raise DataError(f"hf:{name} does not name a dataset", _FORM)
    return HubName("/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split or "train", None)


def hub_documents(name: str) -> Iterator[Document]:
    """Yield the rows of the dataset behind `hf:`, given without that prefix.

    Raises:
        DataError: where the dataset, configuration or split is not to be had, or no column holds text.
    """
    column = None
    for number, row in enumerate(_hub_rows(name)):
        if column is None:
            strings = [column for column, value in row.items() if isinstance(value, str)]
            column = FIELD if FIELD in strings else strings[0] if len(strings) == 1 else None
        if column is None:
            fix = f"save the wanted one as Parquet and give FILE.parquet:COLUMN; columns: {', '.join(row)}"
            raise DataError(f"hf:{name}: no column {FIELD!r}, and {len(strings)} others hold text", fix)
        if row[column]:
            yield Document(f"hf:{name}, row {number}", row[column])


def _hub_rows(name: str) -> Iterator[dict[str, Any]]:
    parsed = parse_hub_name(name)
    try:
        yield from _load(parsed)
    except Exception as error:  # a dozen kinds come out of there: hub, network, formats, the file system
        if parsed.folder is None:
            fix = f"check the name and the network; offline, run `hf download --repo-type dataset {parsed.path}` first"
        else:
            fix = "check the split and the files in the folder"
        raise DataError(f"hf:{name} cannot be read: {one_line(error)}", fix) from None


def _load(parsed: HubName) -> Any:
    if parsed.folder is not None and (parsed.folder / "state.json").exists():
        return datasets.load_from_disk(parsed.path)
    if parsed.folder is not None and (parsed.folder / "dataset_dict.json").exists():
        return datasets.load_from_disk(str(parsed.folder / parsed.split))
    if not set(parsed.split) & set("[+"):  # slices and sums of splits cannot be streamed
        try:
            return datasets.load_dataset(parsed.path, parsed.config, split=parsed.split, streaming=True)
        except (OSError, datasets.exceptions.DatasetsError):
            if parsed.folder is not None:
                raise
    return datasets.load_dataset(parsed.path, parsed.config, split=parsed.split)
