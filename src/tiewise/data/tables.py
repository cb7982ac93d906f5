"""Rows of JSON-lines and Parquet files as documents, one row at a time.

A row is a document: its author drew that line, so it is never cut or joined here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tiewise.core.errors import DataError
from tiewise.data.document import Document
from tiewise.data.plain_text import opened

FIELD = "text"
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
                value = _value(_row(line, where), field or FIELD, where)
                if value is not None:
                    yield Document(where, value)


def _row(line: bytes, where: str) -> dict[str, Any]:
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


def _value(row: dict[str, Any], field: str, where: str) -> str | None:
    if field not in row:
        known = ", ".join(map(str, row)) or "none"
        raise DataError(f"{where}: no field {field!r}", f"name one with FILE:FIELD; fields seen: {known}")
    value = row[field]
    if value is not None and not isinstance(value, str):
        raise DataError(f"{where}: field {field!r} is a {type(value).__name__}, not a string", "name a field of text")
    return value


def parquet_documents(path: Path, column: str | None) -> Iterator[Document]:
    """Yield `column` (default "text") of every row, a part of a row group at a time; nulls are passed over.

    Raises:
        DataError: where the file is not Parquet, or has no such column of strings.
    """
    column = column or FIELD
    with opened(path) as file:
        try:
            parquet = pyarrow.parquet.ParquetFile(file)
            _check_column(parquet.schema_arrow, column, path)
            row = 0
            for batch in parquet.iter_batches(batch_size=_ROWS, columns=[column]):
                for value in batch.column(0).to_pylist():
                    if value is not None:
                        yield Document(f"{path}, row {row}", value)
                    row += 1
        except pyarrow.ArrowException as error:
            raise DataError(f"{path} cannot be read as Parquet: {one_line(error)}", "write it again") from None


def _check_column(schema: Any, column: str, path: Path) -> None:
    if column not in schema.names:
        known = ", ".join(schema.names)
        raise DataError(f"{path}: no column {column!r}", f"name one with FILE:COLUMN; columns: {known}")
    kind = schema.field(column).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise DataError(f"{path}: column {column!r} holds {kind}, not strings", "name a column of text")


def one_line(error: BaseException, limit: int = 200) -> str:
    """Return another library's message on one line of at most `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 1] + "…"
