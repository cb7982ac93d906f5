"""Reader of token counts, from numbers or from a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.stored import read_header
from tiewise.checkpoint.untrusted import open_regular, read_bytes, read_json, short
from tiewise.core.errors import CheckpointError

MOST_BYTES = 64 * 2**20  # largest size of a file of counts, and limit of the token ids in it
FORMATS = "give a JSON list, or a map from token id to count; a .npy or .safetensors vector; or one number per line"


def read_counts(counts: Any, rows: int) -> NDArray[np.float64]:
    """Return how often each token occurs, as [V]; 0 for a token without a count.

    Args:
        counts: numbers, a map from token id to number, or the path of a file that contains them.
        rows: V, the number of tokens.
    """
    name = "counts"
    if isinstance(counts, str | os.PathLike):
        name = os.fspath(counts)
    try:
        vector = _vector(counts)
    except CheckpointError:
        raise  # before ValueError, which is its base class
    except (ValueError, TypeError, OverflowError, EOFError) as error:
        raise CheckpointError(f"{name}: no token counts ({short(error)})", FORMATS) from None
    if vector.ndim != 1 or not _are_counts(vector):
        raise CheckpointError(f"{name}: its values are no token counts", FORMATS)
    if len(vector) > rows:
        problem = f"{name}: it counts token {len(vector) - 1:,}, and the table has {rows:,} rows"
        raise CheckpointError(problem, "were they made with this model's tokenizer?")
    return np.pad(vector, (0, rows - len(vector)))


def _are_counts(values: NDArray[np.float64]) -> bool:
    """Return True if all values are finite and not negative."""
    smallest, largest = values.min(initial=0.0), values.max(initial=0.0)
    return bool(0 <= smallest <= largest < np.inf)  # false for NaN too, since every comparison with NaN is false


def _vector(counts: Any) -> NDArray[np.float64]:
    """Return counts as a vector; a path is read as a file."""
    if isinstance(counts, str | os.PathLike):
        counts = _contents(os.fspath(counts))
    if isinstance(counts, dict):
        counts = _by_token(counts)
    return np.asarray(counts, np.float64)


def _contents(name: str) -> Any:
    """Return the numbers of a file; the ending of its name decides the format."""
    if name.endswith(".npy"):
        with os.fdopen(open_regular(name), "rb") as file:
            return np.load(file, allow_pickle=False)
    if name.endswith(".safetensors"):
        (vector,) = read_header(name).tensors.values()
        return vector.read()
    if name.endswith(".json"):
        return read_json(name, most=MOST_BYTES, unique=True)
    return [float(line) for line in read_bytes(name, MOST_BYTES).split()]


def _by_token(counts: Mapping[Any, Any]) -> NDArray[np.float64]:
    """Return the vector of a map from token id to count."""
    ids, values = [int(key) for key in counts], list(counts.values())
    if ids and not 0 <= min(ids) <= max(ids) < MOST_BYTES:
        raise ValueError("its keys are no token ids")
    vector = np.zeros(max(ids, default=-1) + 1)
    vector[ids] = values
    return vector
