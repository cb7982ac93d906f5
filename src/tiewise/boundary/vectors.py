"""Pretrained word vectors as rows of a table: GloVe, word2vec and fastText text files, and safetensors.

A text file has one token per line followed by its numbers; word2vec and fastText put `count width` on the first line.
A safetensors file has one two-dimensional tensor, rows in the order of the vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tiewise.errors import DataError, SpecError
from tiewise.spec import BoundarySpec

log = logging.getLogger(__name__)

_NAMED = 5  # broken lines and missing words that are named


@dataclass(frozen=True)
class Vectors:
    """Rows [V, E] for a vocabulary (nan where the file has none), tokens found, numbers of broken lines."""

    rows: Tensor
    found: int
    broken_lines: tuple[int, ...] = ()


def load_vectors(path: str | Path, tokens: Sequence[str | None]) -> Vectors:
    """Read vectors for `tokens`, None where a row has none; the file is streamed, and only their rows are kept.

    Raises:
        DataError: no such file, no vector in it, no token found, or a tensor of another number of rows.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"vectors {path}: no such file", "give a GloVe, word2vec, fastText text or safetensors file")
    if path.suffix == ".safetensors":
        return _safetensors(path, len(tokens))
    return _text(path, tokens)


def row_tokens(tokenizer: Any, rows: int) -> list[str | None]:
    """Return the token of each of a table's `rows` in a Hugging Face tokenizer; None for rows beyond its vocabulary."""
    known = min(rows, len(tokenizer))
    return [*tokenizer.convert_ids_to_tokens(list(range(known))), *[None] * (rows - known)]


def check_rows(table: Tensor, rows: Tensor, spec: BoundarySpec) -> None:
    """Refuse rows that do not fit `table` [V, E].

    Raises:
        SpecError: rows of another shape; `spec` names whose.
    """
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
    return Vectors(rows, vocab)


def _text(path: Path, tokens: Sequence[str | None]) -> Vectors:
    index = {token: row for row, token in enumerate(tokens) if token is not None}
    rows: np.ndarray | None = None
    broken: list[int] = []
    found: set[int] = set()
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            token, *numbers = line.rstrip("\n").rstrip(" ").split(" ")
            if number == 1 and len(numbers) == 1:
                continue  # the `count width` line of word2vec and fastText
            vector = _numbers(numbers)
            if rows is None and vector is not None:
                rows = np.full((len(tokens), len(vector)), np.nan, dtype=np.float32)
            if vector is None or rows is None or len(vector) != rows.shape[1]:
                broken.append(number)
            elif (row := index.get(token)) is not None:
                rows[row] = vector
                found.add(row)
    if rows is None or not found:
        what = "no vector" if rows is None else "none of the vocabulary's tokens"
        raise DataError(f"vectors {path}: {what} in it", "check that file and tokenizer write words the same way")
    missing = [token for token, row in index.items() if row not in found]
    changed = path.stat().st_mtime_ns
    if broken:
        _say_once(path.resolve(), changed, f"{path}: {len(broken):,} broken lines skipped: {_first(broken)}")
    if missing:
        what = f"{path}: {len(missing):,} of {len(index):,} words have no vector and start at random: {_first(missing)}"
        _say_once(path.resolve(), changed, what)
    return Vectors(torch.from_numpy(rows), len(found), tuple(broken))


def _first(items: Sequence[object]) -> str:
    return ", ".join(map(str, items[:_NAMED])) + (", …" if len(items) > _NAMED else "")


@cache
def _say_once(file: Path, changed: int, what: str) -> None:
    """A run reads its vectors when it is checked and when it begins; what is wrong with them is said once."""
    log.warning(what)


def _numbers(words: Sequence[str]) -> list[float] | None:
    try:
        values = [float(word) for word in words]
    except ValueError:
        return None
    return values if values and all(map(math.isfinite, values)) else None
