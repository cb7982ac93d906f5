"""`hf:` texts: a dataset of the Hugging Face Hub, or a dataset's folder on this machine.

    hf:owner/name            hf:owner/name/config            hf:owner/name:validation            hf:./folder:test

A row is a document. The text column is `text`, or else the only column of strings. Rows are streamed; where the Hub
cannot be reached, a dataset that the local cache holds is read from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets

from tiewise.core.errors import DataError
from tiewise.data.document import Document
from tiewise.data.tables import FIELD, one_line

_FORM = "write hf:owner/name[/config][:split], or hf:./folder[:split]"


class HubName(NamedTuple):
    """What stands behind `hf:`, taken apart; `folder` is set where it is a folder of this machine."""

    path: str
    config: str | None
    split: str
    folder: Path | None


def parse(name: str) -> HubName:
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
    for number, row in enumerate(_rows(name)):
        column = column or _text_column(row, name)
        if row[column]:
            yield Document(f"hf:{name}, row {number}", row[column])


def _rows(name: str) -> Iterator[dict[str, Any]]:
    parsed = parse(name)
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


def _text_column(row: dict[str, Any], name: str) -> str:
    strings = [column for column, value in row.items() if isinstance(value, str)]
    if FIELD in strings:
        return FIELD
    if len(strings) != 1:
        known = ", ".join(row)
        fix = f"save the wanted one as Parquet and give FILE.parquet:COLUMN; columns: {known}"
        raise DataError(f"hf:{name}: no column {FIELD!r}, and {len(strings)} others hold text", fix)
    return strings[0]
