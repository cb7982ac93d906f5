"""How alike two stored tables are, decided by their bytes.

    identical     every byte equal
    same values   equal once both are cast to the narrower of their types (one end was saved in another precision)
    some rows     most rows equal, some not (rows trained, added or re-initialised at one end only)
    close         every row differs a little (both ends drifted apart from one table)
    unrelated     two tables of their own

Reading is streamed through two buffers that stay in the processor's cache, and stops at the first difference where only
equality is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.dtypes import BITS, FLOATING, NUMPY
from tiewise.checkpoint.header import Stored
from tiewise.checkpoint.reader import Reader

IDENTICAL, SAME_VALUES, SOME_ROWS, CLOSE, UNRELATED = "identical", "same values", "some rows", "close", "unrelated"
SCAN_BYTES = 2**20  # large enough for few system calls, small enough for two of them to stay in the cache
FEW = 0.5  # a pair is "some rows" while no more than this share of its rows differs
NEAR = 0.1  # and "close" while ‖a − b‖ is at most this share of ‖a‖
SAMPLED_ROWS = 4096

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Likeness:
    """Two tables [V, E] held side by side.

    Args:
        kind: one of the words above.
        rows: rows compared.
        differing: rows that differ after the cast (0 for `identical` and `same values`).
        first: the first of them, at most eight.
        relative: ‖a − b‖ / ‖a‖ over the differing rows (the first 4096 of them); 0 where none differs.
        largest: largest absolute difference of an element over those rows.
    """

    kind: str
    rows: int
    differing: int = 0
    first: tuple[int, ...] = ()
    relative: float = 0.0
    largest: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether one can stand for the other: the same bytes."""
        return self.kind == IDENTICAL


def same_bytes(a: Stored, b: Stored, tick: Progress = lambda done: None) -> bool:
    """Whether two tensors hold the same bytes; `tick` hears the bytes compared so far (of one of them)."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    left, right = np.empty(SCAN_BYTES, np.uint8), np.empty(SCAN_BYTES, np.uint8)
    with Reader(a) as one, Reader(b) as other:
        for start in range(0, a.nbytes, SCAN_BYTES):
            count = min(SCAN_BYTES, a.nbytes - start)
            one.into(left.data[:count], start)
            other.into(right.data[:count], start)
            if not np.array_equal(_words(left[:count]), _words(right[:count])):
                return False
            tick(start + count)
    return True


def likeness(a: Stored, b: Stored, tick: Progress = lambda done: None) -> Likeness | None:
    """Compare two tables of one shape row by row; None where their shapes or types allow no comparison.

    `tick` hears the bytes of `a` read so far.
    """
    if a.shape != b.shape or len(a.shape) != 2 or not {a.dtype, b.dtype} <= set(FLOATING):
        return None
    if same_bytes(a, b):
        tick(a.nbytes)
        return Likeness(IDENTICAL, a.rows)
    narrow = min(a.dtype, b.dtype, key=lambda name: (BITS[name], name))
    kind = NUMPY[narrow]
    tally = _Tally()
    with Reader(a) as one, Reader(b) as other:
        for start, stop in one.spans():
            tally.add(start, one.rows(start, stop), other.rows(start, stop), kind)
            tick(stop * one.row_bytes)
    return tally.verdict(a.rows)


class _Tally:
    def __init__(self) -> None:
        self.differing = 0
        self.measured = 0
        self.first: list[int] = []
        self.error = self.norm = self.largest = 0.0

    def add(self, start: int, a: NDArray, b: NDArray, kind: np.dtype) -> None:
        left, right = (np.ascontiguousarray(x.astype(kind, copy=False)) for x in (a, b))
        rows = np.nonzero((_row_words(left) != _row_words(right)).any(axis=1))[0]
        if not len(rows):
            return
        self.differing += len(rows)
        self.first += [start + int(row) for row in rows[: 8 - len(self.first)]]
        rows = rows[: SAMPLED_ROWS - self.measured]
        self.measured += len(rows)
        x, y = a[rows].astype(np.float64), b[rows].astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            self.error += float(np.square(x - y).sum())
            self.norm += float(np.square(x).sum())
            self.largest = max(self.largest, float(np.abs(x - y).max(initial=0.0)))

    def verdict(self, rows: int) -> Likeness:
        if not self.differing:
            return Likeness(SAME_VALUES, rows)
        relative = float(np.sqrt(self.error / self.norm)) if self.norm > 0 else float("inf")
        kind = SOME_ROWS if self.differing <= FEW * rows else CLOSE if relative <= NEAR else UNRELATED
        return Likeness(kind, rows, self.differing, tuple(self.first), relative, self.largest)


def _words(data: NDArray) -> NDArray:
    """View bytes as 8-byte words where their number allows: comparing is then eight times fewer elements."""
    return data.view(np.uint64) if data.nbytes % 8 == 0 else data


def _row_words(table: NDArray) -> NDArray:
    data = table.view(np.uint8).reshape(len(table), -1)
    return data.view(np.uint64) if data.shape[1] % 8 == 0 else data
