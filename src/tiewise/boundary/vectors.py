"""Pretrained word vectors as rows of a table: GloVe, word2vec and fastText, text or binary, and safetensors.

A safetensors file has one two-dimensional tensor, rows in the order of the vocabulary; the others name their words.
Which format a file has is told by its bytes, not by its name.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tiewise.boundary.vector_formats import NAMED, read_words
from tiewise.core.errors import DataError, SpecError, printable
from tiewise.core.spec import BoundarySpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Vectors:
    """Rows [V, E] for a vocabulary (nan where the file has none), tokens found, and how many lines were broken."""

    rows: Tensor
    found: int
    broken: int = 0


def load_vectors(path: str | Path, tokens: Sequence[str | None]) -> Vectors:
    """Read vectors for `tokens`, None where a row has none; the file is streamed, and only their rows are kept.

    What is wrong with the file, and which words it lacks, is logged as a warning.

    Raises:
        DataError: no such file, none of the known formats, one that contradicts itself, no token found, or a tensor of
            another number of rows.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"vectors {path}: no such file", "give a GloVe, word2vec, fastText or safetensors file")
    try:
        with path.open("rb") as file:
            head = file.read(9)
        # as safetensors begin: the length of a JSON header, and its brace
        begins = head[8:] == b"{" and int.from_bytes(head[:8], "little") < path.stat().st_size
        if begins or path.suffix == ".safetensors":
            return _safetensors(path, len(tokens))
        changed = path.stat()
        found = _by_word(path.resolve(), path, (changed.st_mtime_ns, changed.st_size), tuple(tokens))
    except OSError as error:
        raise DataError(f"vectors {path}: cannot be read ({error.strerror or error})", "check the file") from None
    return replace(found, rows=found.rows.clone())


def row_tokens(tokenizer: Any, rows: int) -> list[str | None]:
    """Return the token of each of a table's `rows` in a Hugging Face tokenizer; None for rows beyond its vocabulary."""
    known = min(rows, len(tokenizer))
    return [*tokenizer.convert_ids_to_tokens(list(range(known))), *[None] * (rows - known)]


def check_rows(table: Tensor, rows: Tensor, spec: BoundarySpec) -> None:
    """Refuse rows that do not fit `table` [V, E]."""
    if rows.shape != table.shape:
        fix = f"use factored:{rows.shape[1]} or, beyond the model's width, projected:{rows.shape[1]}"
        raise SpecError(f"{spec}: vectors {tuple(rows.shape)} do not fit the table {tuple(table.shape)}", fix)


def start_from_rows(table: Tensor, rows: Tensor, freeze: bool, spec: BoundarySpec) -> None:
    """Give `table` [V, E] pretrained rows; `freeze` stops its gradient.

    Rows of nan keep what was drawn for them, and the padding row of `spec` stays zero. Raises as `check_rows`.
    """
    check_rows(table, rows, spec)
    rows = rows.to(table)
    keeps = rows.isnan()
    if spec.pad is not None:
        keeps[spec.pad] = True
    with torch.no_grad():
        table.copy_(torch.where(keeps, table, rows))
    table.requires_grad_(not freeze)


def _safetensors(path: Path, vocab: int) -> Vectors:
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if len(file.get_slice(name).get_shape()) == 2]  # noqa: SIM118
            if len(names) != 1:
                fix = "keep the table alone in the file"
                raise DataError(f"vectors {path}: {len(names)} two-dimensional tensors ({', '.join(names[:4])})", fix)
            rows = file.get_tensor(names[0]).float()
    except SafetensorError as error:
        raise DataError(f"vectors {path}: not a safetensors file ({error})", "give the file that was saved") from None
    if len(rows) != vocab:
        fix = "safetensors rows follow the vocabulary; use a text file to match by token"
        raise DataError(f"vectors {path}: {len(rows)} rows for a vocabulary of {vocab}", fix)
    if not rows.isfinite().all():
        what = f"{int((~rows.isfinite()).any(1).sum()):,} rows hold values that are no finite numbers"
        raise DataError(f"vectors {path}: {what}", "leave such rows out: give a text file, which names its words")
    return Vectors(rows, vocab)


@lru_cache(maxsize=2)  # a run reads its vectors when it is checked and when each model begins
def _by_word(real: Path, path: Path, changed: tuple[int, int], tokens: tuple[str | None, ...]) -> Vectors:
    """Read a file that names its words, and say what it lacks; `real` and `changed` tell it from every other."""
    rows = read_words(path, tokens)
    said = f"{path} ({rows.form})"
    skipped = f"{rows.broken:,} broken {'lines' if rows.form.endswith('text') else 'entries'}"
    if not rows.found:
        what = f"none of the vocabulary's tokens in it ({rows.form}, {skipped})"
        raise DataError(f"vectors {path}: {what}", "check that file and tokenizer write words the same way")
    if rows.odd:
        log.warning(f"{said}: {rows.odd}: is the file whole?")
    if rows.broken:
        log.warning(f"{said}: {skipped} skipped: {_first(rows.first_broken, rows.broken)}")
    if rows.twice:
        log.warning(f"{said}: a word stands in it again {rows.twice:,} times; its first vector counts")
    missing = [word.decode(errors="replace") for word, row in rows.index.items() if row not in rows.found]
    if missing:
        what = f"{len(missing):,} of {len(rows.index):,} words have no vector and start at random"
        log.warning(f"{said}: {what}: {_first(missing, len(missing))}")
    return Vectors(torch.from_numpy(rows.values), len(rows.found), rows.broken)


def _first(items: Sequence[object], count: int) -> str:
    return ", ".join(printable(str(item)) for item in items[:NAMED]) + (", …" if count > NAMED else "")
