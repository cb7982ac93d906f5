"""Read every row of a table once: values that are no numbers, rows of zeros, rows that occur twice, lengths."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.header import Stored
from tiewise.checkpoint.likeness import same_bytes
from tiewise.checkpoint.reader import Reader

LARGE = 2**20  # smaller tensors are not looked at for duplicates: norms and biases are often equal
_SAMPLE = 2**16


@dataclass(frozen=True)
class RowScan:
    """What was found in a table [V, E].

    Args:
        not_finite: rows that hold NaN or an infinity.
        zero: rows of zeros.
        repeated: groups of rows (finite, not of zeros) that are equal bit for bit, each in ascending order.
        lengths: Euclidean length of each row [V]; NaN or infinite where the row is.
    """

    not_finite: tuple[int, ...]
    zero: tuple[int, ...]
    repeated: tuple[tuple[int, ...], ...]
    lengths: NDArray[np.float32]


def scan_rows(table: Stored, tick: Callable[[int], None] = lambda done: None) -> RowScan:
    """Read every row of a floating table; `tick` hears the bytes read so far."""
    lengths = np.zeros(table.rows, np.float32)
    finite = np.ones(table.rows, bool)
    zero = np.zeros(table.rows, bool)
    first: dict[bytes, int] = {}
    groups: dict[int, list[int]] = {}
    with Reader(table) as reader:
        for start, stop in reader.spans():
            rows = reader.rows(start, stop)
            wide = rows.astype(np.float64 if rows.dtype == np.float64 else np.float32)
            with np.errstate(all="ignore"):
                lengths[start:stop] = _lengths(wide)
                finite[start:stop] = np.isfinite(wide).all(axis=1)
            zero[start:stop] = (wide == 0).all(axis=1)
            for number, row in enumerate(np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1), start):
                home = first.setdefault(hashlib.blake2b(row.data, digest_size=16).digest(), number)
                if home != number:
                    groups.setdefault(home, [home]).append(number)
            tick(stop * reader.row_bytes)
    repeated = [tuple(group) for home, group in groups.items() if finite[home] and not zero[home]]
    return RowScan(_numbers(~finite), _numbers(zero), tuple(repeated), lengths)


def _lengths(rows: NDArray) -> NDArray:
    """Lengths without overflow or underflow: each row is scaled by its largest element."""
    largest = np.abs(rows).max(axis=1, initial=0.0)
    scale = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    return scale * np.sqrt(np.square(rows / scale[:, None]).sum(axis=1))


def _numbers(mask: NDArray[np.bool_]) -> tuple[int, ...]:
    return tuple(int(row) for row in np.nonzero(mask)[0])


def outlying(lengths: NDArray, rows: Iterable[int], factor: float = 10.0) -> tuple[tuple[int, ...], float]:
    """Rows of the given ones whose length is `factor` times the median length or more, and the median."""
    chosen = np.fromiter(rows, np.int64)
    chosen = chosen[(chosen < len(lengths))]
    values = lengths[chosen]
    values, chosen = values[np.isfinite(values)], chosen[np.isfinite(values)]
    if not len(values):
        return (), 0.0
    median = float(np.median(values))
    far = np.sort(chosen[values >= factor * median]) if median > 0 else chosen[:0]
    return tuple(int(row) for row in far), median


def duplicates(tensors: Iterable[Stored], same: Callable[[Stored, Stored], bool] = same_bytes) -> list[list[Stored]]:
    """Group large tensors that hold the same bytes.

    Tensors of one type and shape are compared; a hash of three samples sorts out most pairs before all bytes are read.
    """
    buckets: dict[tuple[str, tuple[int, ...]], list[Stored]] = defaultdict(list)
    for tensor in tensors:
        if tensor.nbytes >= LARGE:
            buckets[tensor.dtype, tensor.shape].append(tensor)
    found = []
    for bucket in buckets.values():
        samples: dict[bytes, list[list[Stored]]] = defaultdict(list)
        for tensor in bucket if len(bucket) > 1 else ():
            groups = samples[_sample(tensor)]
            home = next((group for group in groups if same(group[0], tensor)), None)
            if home is None:
                groups.append([tensor])
            else:
                home.append(tensor)
        found += [group for groups in samples.values() for group in groups if len(group) > 1]
    return found


def _sample(tensor: Stored) -> bytes:
    digest, buffer = hashlib.blake2b(digest_size=16), bytearray(_SAMPLE)
    with Reader(tensor) as reader:
        for start in (0, (tensor.nbytes - _SAMPLE) // 2, tensor.nbytes - _SAMPLE):
            reader.into(memoryview(buffer), start)
            digest.update(buffer)
    return digest.digest()
