"""How far a change of the tables moves logits and input rows.

Logits are h·tableᵀ at 64 random hidden vectors h of unit root mean square, the same on every run, for every row of the
vocabulary; the tables are read in pieces. Scale and cap of the family come after and are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.stored import CHUNK_BYTES, Reader, Stored
from tiewise.core.progress import progress
from tiewise.rewrite.change import Measured

PROBES = 64
SEED = 20_250_903
UNCHANGED = Measured(0.0, 0.0, "nothing: the bytes of both tables stay as they were")


@dataclass(frozen=True)
class Rows:
    """A table as the model meets it, maps applied: `read(start, stop)` gives rows [start, stop) in fp32, [., width]."""

    rows: int
    width: int
    read: Callable[[int, int], NDArray]


def rows_of(tensor: Stored) -> Rows:
    """Return a stored table [V, D] as rows."""

    def read(start: int, stop: int) -> NDArray:
        with Reader(tensor) as reader:
            return reader.wide(start, stop)

    return Rows(tensor.rows, tensor.shape[1], read)


def hidden(width: int) -> NDArray[np.float32]:
    """Return the random hidden vectors [64, width], each of root mean square 1."""
    made = np.random.default_rng(SEED).standard_normal((PROBES, width))
    return (made / np.sqrt(np.square(made).mean(axis=1, keepdims=True))).astype(np.float32)


def logit_change(old: Rows, new: Rows) -> float:
    """Return the largest |h·(old − new)ᵀ| over the probes and the rows that both have."""
    probes = hidden(old.width)
    return _largest(old, new, lambda difference: np.abs(difference @ probes.T))


def row_change(old: Rows, new: Rows) -> float:
    """Return the largest Euclidean length of a row of old − new, over the rows that both have."""
    return _largest(old, new, lambda difference: np.linalg.norm(difference, axis=1))


def _largest(old: Rows, new: Rows, size: Callable[[NDArray], NDArray]) -> float:
    count = min(old.rows, new.rows)
    step = max(1, CHUNK_BYTES // (4 * max(1, old.width)))
    largest = np.float64(0.0)
    with np.errstate(invalid="ignore", over="ignore"):  # a table may hold infinities; the result then says so
        for start in range(0, count, step):
            stop = min(start + step, count)
            sizes = size(old.read(start, stop) - new.read(start, stop))
            largest = np.maximum(largest, sizes.max(initial=0.0))
            progress("measuring the change", stop, count)
    return float(largest)


def measured(outputs: tuple[Rows, Rows] | None, inputs: tuple[Rows, Rows] | None) -> Measured:
    """Measure the (old, new) tables of both ends; None for an end whose bytes stay."""
    logits = logit_change(*outputs) if outputs else 0.0
    moved = row_change(*inputs) if inputs else 0.0
    ends = [end for end, pair in (("output", outputs), ("input", inputs)) if pair]
    if not ends:
        return UNCHANGED
    widths = {pair[0].width for pair in (outputs, inputs) if pair}
    how = f"every row of the {' and the '.join(ends)} table"
    if outputs:
        how += f", at {PROBES} random hidden vectors of unit root mean square and width {max(widths)}"
    return Measured(logits, moved, how)
