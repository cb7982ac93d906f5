"""`tiewise explore CKPT`: what of a checkpoint the page carries: at most 20 MB; dropping it brings the rest."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tiewise.analysis.token_texts import find_tokens, read_as
from tiewise.checkpoint.claims import in_layer, is_foreign
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import Folder, open_folder
from tiewise.checkpoint.stored import FLOATING, Reader, Stored
from tiewise.core.errors import CheckpointError, DataError
from tiewise.core.files import size
from tiewise.core.found import count

MOST_BYTES = 20_000_000  # of the checkpoint, before they are written as text
MOST_ROWS = 4096


def embedded(path: str | os.PathLike[str], words: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the page needs for its verdict, and rows of both tables in their stored type.

    Args:
        path: a Hugging Face folder, or one `.safetensors`.
        words: tokens whose rows are to be there in any case: words that are one token, or "#1234".

    Raises:
        CheckpointError: nothing there can be read, or it holds no tensors.
        DataError: a word that is no token.
    """
    folder = open_folder(path)
    if not folder.tensors:
        what = f"{path}: pickled weights alone" if folder.pickles else f"{path}: no file of tensors in it"
        raise CheckpointError(what, "give one with safetensors, as save_pretrained writes, or one of `tiewise compare`")
    facts = Facts(folder)
    outer = {name: tensor for name, tensor in folder.tensors.items() if not in_layer(name)}
    tables = _tables(facts)
    width = {side for table in tables for side in table.shape}
    vectors = [
        tensor
        for name, tensor in outer.items()
        if len(tensor.shape) == 1 and tensor.shape[0] in width and tensor.dtype in FLOATING and not is_foreign(name)
    ]
    beside = sum(vector.nbytes for vector in vectors)
    ids = _rows(folder, tables, MOST_BYTES - beside, words)
    data = {vector.name: _text(vector, None) for vector in vectors} | {
        table.name: _text(table, ids) for table in tables
    }
    whole = all(len(ids) == table.rows for table in tables)
    held = beside + sum(len(ids) * table.nbytes // table.rows for table in tables)
    name = Path(os.path.abspath(path)).name
    which = f"{count(len(ids))} of {count(max(table.rows for table in tables))} rows" if tables else "no rows"
    asked = ", and those asked for" if words else ""
    part = (
        f"This page holds {which} of {name} ({size(held)}): the first, which tokenizers mostly give to frequent tokens"
    )
    note = f"{part}{asked}. Ranks and neighbours are among them. Drop the folder for the rest."
    return {
        "name": name,
        "note": "" if whole and tables else note,
        "config": folder.config,
        "count": len(folder.tensors),
        "complete": facts.complete,
        "faults": [f"{fault.what}; {fault.fix}" for fault in folder.faults],
        "tensors": [
            {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape), "bytes": tensor.nbytes}
            | ({"data": data[name]} if name in data else {})
            for name, tensor in outer.items()
        ],
        "alike": None if facts.ends is None else asdict(facts.ends),
        "ids": ids,
        "texts": list(read_as(folder, ids)) if folder.has("tokenizer.json") else [],
    }


def _tables(facts: Facts) -> list[Stored]:
    """The stored tables that can be read row by row, the input's first; one where both ends are equal."""
    roles = facts.roles
    same = facts.ends is not None and facts.ends.equal
    wanted = [roles.input] + ([] if same else [roles.output])
    return [
        table
        for table in wanted
        if table is not None and len(table.shape) == 2 and not roles.packed(table) and table.nbytes
    ]


def _rows(folder: Folder, tables: Sequence[Stored], room: int, words: Iterable[str]) -> list[int]:
    """Numbers of the rows that are embedded, in order: those asked for and the first, as many as there is room for."""
    if not tables:
        return []
    least = min(table.rows for table in tables)
    asked = []
    for word in words:
        digits = word.removeprefix("#")
        token = int(digits) if word.startswith("#") and digits.isascii() and digits.isdigit() else None
        asked.append(find_tokens(folder, [word])[0] if token is None else token)
        if asked[-1] >= least:
            raise DataError(f"{word} is token {asked[-1]}, the tables have {least:,} rows", "choose another")
    most = min(MOST_ROWS, room // sum(table.nbytes // table.rows for table in tables))
    chosen = dict.fromkeys([*asked, *range(min(least, most))])
    return sorted(list(chosen)[: max(most, len(set(asked)))])


def _text(tensor: Stored, ids: Sequence[int] | None) -> str:
    """The bytes of a tensor, or of some of its rows, in base64."""
    if ids is None:
        with Reader(tensor) as reader:
            return b64encode(reader.rows().tobytes()).decode("ascii")
    rows = bytearray()
    with Reader(tensor) as reader:
        buffer = bytearray(reader.row_bytes)
        for row in ids:
            reader.into(memoryview(buffer), row * reader.row_bytes)
            rows += buffer
    return b64encode(rows).decode("ascii")
