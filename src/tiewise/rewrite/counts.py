"""How often each token occurs, from whatever file a tokenizer's user has it in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.stored import NUMPY, Reader, read_header
from tiewise.checkpoint.untrusted import open_regular, read_json, read_whole, short
from tiewise.core.errors import CheckpointError

MOST_BYTES = 64 * 2**20
_FIX = "give a JSON list, or a map from token id to count; a .npy or .safetensors vector; or one number per line"


def read_counts(path: str | os.PathLike[str], rows: int) -> NDArray[np.float64]:
    """Return the count of each of `rows` tokens, fp64 [V]; tokens beyond the end of the file have 0.

    Args:
        path: .json (a list by id, or a map from id to count), .npy, .safetensors (its only tensor), else text with one
            number per line.
        rows: V.

    Raises:
        CheckpointError: the file cannot be read, holds other than counts, or counts a token that the table lacks.
    """
    name = os.fspath(path)
    readers = {".json": _from_json, ".npy": _from_npy, ".safetensors": _from_safetensors}
    try:
        found = np.asarray(readers.get(Path(name).suffix, _from_text)(name), np.float64)
    except (ValueError, TypeError, OverflowError, EOFError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{name}: no token counts ({short(error)})", _FIX) from None
    return checked_counts(found, rows, name)


def checked_counts(counts: Any, rows: int, name: str = "counts") -> NDArray[np.float64]:
    """Return counts of at most `rows` tokens as fp64 [V].

    Raises:
        CheckpointError: not one number, zero or more, for each token.
    """
    found = np.asarray(counts)
    if found.ndim != 1 or found.dtype.kind not in "iuf" or not np.isfinite(found).all() or (found < 0).any():
        raise CheckpointError(f"{name}: its values are no token counts", _FIX)
    if len(found) > rows:
        fix = "were they made with this model's tokenizer?"
        raise CheckpointError(f"{name}: it counts token {len(found) - 1:,}, and the table has {rows:,} rows", fix)
    return np.pad(found.astype(np.float64), (0, rows - len(found)))


def _from_json(name: str) -> Any:
    record = read_json(name, most=MOST_BYTES, unique=True)
    if not isinstance(record, dict):
        return record
    ids = [int(key) for key in record]
    if ids and not 0 <= min(ids) <= max(ids) < MOST_BYTES:
        raise ValueError("its keys are no token ids")
    made = np.zeros(max(ids, default=-1) + 1)
    made[ids] = list(record.values())
    return made


def _from_npy(name: str) -> Any:
    with os.fdopen(open_regular(name), "rb") as file:
        return np.load(file, allow_pickle=False)


def _from_safetensors(name: str) -> Any:
    tensors = list(read_header(name).tensors.values())
    if len(tensors) != 1 or len(tensors[0].shape) != 1 or tensors[0].dtype not in NUMPY:
        raise ValueError("it holds other than one vector")
    with Reader(tensors[0]) as reader:
        return reader.rows()


def _from_text(name: str) -> Any:
    return [float(line) for line in read_whole(name, MOST_BYTES).split()]


def decades(counts: NDArray[np.float64]) -> list[tuple[str, NDArray[np.bool_]]]:
    """Sort tokens by how often they occur: (label, which tokens, bool [V]) for 0, 1–9, 10–99, …; none is empty."""
    digits = np.floor(np.log10(np.maximum(counts, 1.0))).astype(np.int64) + (counts > 0)
    labels = {0: "0"} | {n: f"{10 ** (n - 1):,}–{10**n - 1:,}" for n in range(1, int(digits.max(initial=0)) + 1)}
    return [(label, digits == n) for n, label in labels.items() if (digits == n).any()]
