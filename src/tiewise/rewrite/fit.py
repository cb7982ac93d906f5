"""A table as narrow table and map, and how far their product lies from it: token by token, and in logits.

The stored factors are what is measured: rounded to the table's own type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.stored import CHUNK_BYTES, NUMPY, Reader, Stored
from tiewise.rewrite.low_rank import LowRank
from tiewise.rewrite.measure import hidden

Tick = Callable[[int], None]


class Factors:
    """W [V, D] ≈ narrow [V, k] · mapᵀ, with narrow = W Q and map = Q [D, k], both in the type of W."""

    def __init__(self, table: Stored, found: LowRank) -> None:
        self.table, self.found = table, found
        self.kind = NUMPY[table.dtype]
        self.map = found.basis.astype(self.kind)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Row ranges whose products fit in a few MB."""
        step = max(1, CHUNK_BYTES // (8 * self.table.shape[1]))
        for start in range(0, self.table.rows, step):
            yield start, min(start + step, self.table.rows)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the narrow table."""
        with Reader(self.table) as reader:
            for start, stop in self.spans():
                yield self.narrow(reader.rows(start, stop)).tobytes()

    def narrow(self, rows: NDArray) -> NDArray:
        """Rows [., k] of the narrow table for rows [., D] of the table."""
        return (rows.astype(np.float64) @ self.found.basis).astype(self.kind)

    def error(self, rows: NDArray) -> NDArray[np.float64]:
        """What stands for rows [., D], minus them."""
        return self.narrow(rows).astype(np.float64) @ self.map.astype(np.float64).T - rows.astype(np.float64)


@dataclass(frozen=True)
class Fit:
    """How far a product of factors lies from its table.

    Args:
        errors: squared length of each row's error, fp64 [V].
        norms: squared length of each row, fp64 [V].
        logits: largest change of a logit at the probes of `measure`.
    """

    errors: NDArray[np.float64]
    norms: NDArray[np.float64]
    logits: float

    @property
    def longest(self) -> float:
        """Length of the longest error of a row."""
        return float(self.errors.max(initial=0.0) ** 0.5)

    def relative(self, chosen: NDArray[np.bool_] | slice = slice(None)) -> float:
        """Frobenius norm of the error over that of the table, of the chosen rows."""
        norm = float(self.norms[chosen].sum())
        return float(self.errors[chosen].sum() / norm) ** 0.5 if norm else 0.0


def measure_fit(factors: Factors, tick: Tick = lambda done: None) -> Fit:
    """Hold the factors against their table; `tick` hears the bytes read so far."""
    table = factors.table
    errors, norms = np.zeros(table.rows), np.zeros(table.rows)
    probes = hidden(table.shape[1]).T
    logits = 0.0
    with Reader(table) as reader, np.errstate(over="ignore", invalid="ignore"):  # the caller looks at the result
        for start, stop in factors.spans():
            rows = reader.rows(start, stop)
            error = factors.error(rows)
            errors[start:stop] = np.square(error).sum(axis=1)
            norms[start:stop] = np.square(rows.astype(np.float64)).sum(axis=1)
            logits = max(logits, float(np.abs(error @ probes).max(initial=0.0)))
            tick(stop * reader.row_bytes)
    return Fit(errors, norms, logits)
