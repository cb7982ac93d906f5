"""Scans of whole tables: likeness of two, contents of the rows of one, tensors that are stored twice.

    identical     every byte equal
    zeros' signs  every number equal, some zeros are negative at one end only
    same values   equal once both are cast to the narrower of their types (one end was saved in another precision)
    some rows     most rows equal, some not (rows trained, added or re-initialised at one end only)
    close         every row differs a little (both ends drifted apart from one table)
    unrelated     two tables of their own

Two tables pass through two buffers that stay in the processor's cache; reading stops at the first difference where only
equality is asked for.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.stored import BITS, CHUNK_BYTES, FLOATING, NUMPY, Reader, Stored, widened
from tiewise.core.progress import advance_progress

IDENTICAL, SIGNS, SAME_VALUES = "identical", "zeros' signs", "same values"
SOME_ROWS, CLOSE, UNRELATED = "some rows", "close", "unrelated"
SCAN_BYTES = 2**20  # large enough for few system calls, small enough for two of them to stay in the cache
FEW = 0.5  # a pair is "some rows" while no more than this share of its rows differs
NEAR = 0.1  # and "close" while ‖a − b‖ is at most this share of ‖a‖
SAMPLED_ROWS = 4096
FIRST_ROWS = 8  # of the differing ones, that are listed


@dataclass(frozen=True)
class TableLikeness:
    """Likeness of two tables [V, E]."""

    kind: str  # one of the words above
    rows: int  # rows compared
    differing: int = 0  # rows that differ after the cast (0 for `identical`, `zeros' signs` and `same values`)
    first: tuple[int, ...] = ()  # the first of them, at most eight
    relative: float = 0.0  # ‖a − b‖ / ‖a‖ over the differing rows (the first 4096 of them); 0 where none differs
    largest: float = 0.0  # largest absolute difference of an element over those rows
    # some value is NaN, which equals nothing, not itself either: to a loader that compares numbers the two differ even
    # where every byte is equal
    nan: bool = False
    length_ratio: float = 1.0  # ‖b‖ / ‖a‖ over the differing rows (the first 4096 of them); 1 where none differs

    @property
    def equal(self) -> bool:
        """Return whether one can replace the other: the same bytes, or the same numbers."""
        return self.kind in (IDENTICAL, SIGNS)


def _spans_of_both(a: Stored, b: Stored) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
    """Yield (first row, rows of one table, the same rows of another), all in order. Advances by the bytes of `a`."""
    with Reader(a) as one, Reader(b) as other:
        for start, stop in one.spans():
            yield start, one.rows(start, stop), other.rows(start, stop)
            advance_progress(stop * one.row_bytes)


def same_numbers(a: Stored, b: Stored) -> bool:
    """Return whether two tensors have the same bytes, but for the signs of zeros."""
    if same_bytes(a, b):
        return True
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.dtype not in FLOATING:
        return False
    return not any(_differing(x, y).size for _, x, y in _spans_of_both(a, b))


def _ignore(block: NDArray[Any]) -> None:
    """Do nothing with a block of bytes."""


def same_bytes(a: Stored, b: Stored, look: Callable[[NDArray[Any]], None] = _ignore) -> bool:
    """Return whether two tensors have the same bytes; `look` gets every equal block. Advances by the bytes of one."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    left, right = np.empty(SCAN_BYTES, np.uint8), np.empty(SCAN_BYTES, np.uint8)
    with Reader(a) as one, Reader(b) as other:
        for start in range(0, a.nbytes, SCAN_BYTES):
            count = min(SCAN_BYTES, a.nbytes - start)
            one.read_into(left.data[:count], start)
            other.read_into(right.data[:count], start)
            words = np.uint64 if count % 8 == 0 else np.uint8  # eight times fewer elements, where that goes up
            if not np.array_equal(left[:count].view(words), right[:count].view(words)):
                return False
            look(left[:count])
            advance_progress(start + count)
    return True


def same_shared(table: Stored, other: Stored) -> bool:
    """Return whether a tensor has a table's bytes, in another shape or transposed too. Advances by these bytes."""
    if (table.dtype, table.nbytes) != (other.dtype, other.nbytes):
        return False
    if same_bytes(table, replace(other, shape=table.shape)):
        return True
    if len(table.shape) != 2 or table.dtype not in NUMPY:
        return False
    return other.shape == table.shape[::-1] and _same_transposed(table, other)


def _same_transposed(table: Stored, other: Stored) -> bool:
    """Return whether a matrix has the bytes of another one transposed. Advances by these bytes."""
    (rows, width), item = table.shape, NUMPY[table.dtype].itemsize
    with Reader(table) as one, Reader(other) as turned:
        step = max(1, 8 * SCAN_BYTES // one.row_bytes)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            left, columns = np.empty(count * one.row_bytes, np.uint8), np.empty((width, count * item), np.uint8)
            one.read_into(left.data, start * one.row_bytes)
            for number, column in enumerate(columns):
                turned.read_into(column.data, number * turned.row_bytes + start * item)
            right = columns.reshape(width, count, item).transpose(1, 0, 2)
            if not np.array_equal(left.reshape(count, width, item), right):
                return False
            advance_progress((start + count) * one.row_bytes)
    return True


class _Differences:
    """Rows of two tables that differ, and sums over the first `SAMPLED_ROWS` of them."""

    def __init__(self) -> None:
        self.count = 0
        self.first = list[int]()  # at most `FIRST_ROWS`
        self.has_nan = False  # some value of the first table is NaN
        self.largest = 0.0  # absolute difference of an element
        self._measured = 0
        self._error = self._norm = self._other_norm = 0.0  # sums of squares

    def add(self, start: int, left: NDArray[Any], right: NDArray[Any]) -> NDArray[np.int64]:
        """Count the differing rows of a span of both tables, and return those to measure.

        The span begins at row `start`. Both are of one type, the narrower of the two.
        """
        rows = _differing(left, right)
        self.has_nan |= _has_nan(left)
        self.count += len(rows)
        self.first += [start + int(row) for row in rows[: FIRST_ROWS - len(self.first)]]
        sampled = rows[: SAMPLED_ROWS - self._measured]
        self._measured += len(sampled)
        return sampled

    def measure(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
        """Add differing rows of both tables to the sums."""
        with np.errstate(invalid="ignore", over="ignore"):
            self._error += float(np.square(x - y).sum())
            self._norm += float(np.square(x).sum())
            self._other_norm += float(np.square(y).sum())
            self.largest = max(self.largest, float(np.abs(x - y).max(initial=0.0)))

    @property
    def relative(self) -> float:
        """Return ‖a − b‖ / ‖a‖."""
        return self._relative_to_norm(self._error)

    @property
    def length_ratio(self) -> float:
        """Return ‖b‖ / ‖a‖."""
        return self._relative_to_norm(self._other_norm)

    def _relative_to_norm(self, square: float) -> float:
        """Return the root of a sum of squares over ‖a‖. It is infinite where ‖a‖ is 0 or NaN."""
        if self._norm > 0:
            return float(np.sqrt(square / self._norm))
        return float("inf")


def likeness(a: Stored, b: Stored) -> TableLikeness | None:
    """Compare two tables of one shape row by row. The result is None if their shapes or types allow no comparison.

    Advances by the bytes of `a`.
    """
    if a.shape != b.shape or len(a.shape) != 2:
        return None
    if a.dtype not in FLOATING or b.dtype not in FLOATING:
        return None
    blocks_with_nan: list[bool] = []

    def look(block: NDArray[Any]) -> None:
        blocks_with_nan.append(_has_nan(block.view(NUMPY[a.dtype])))

    if same_bytes(a, b, look):
        return TableLikeness(IDENTICAL, a.rows, nan=any(blocks_with_nan))
    differences = _differences_of_rows(a, b)
    if not differences.count:
        return TableLikeness(SIGNS if a.dtype == b.dtype else SAME_VALUES, a.rows, nan=differences.has_nan)
    return TableLikeness(
        _kind_of_differing(differences, a.rows),
        a.rows,
        differences.count,
        tuple(differences.first),
        differences.relative,
        differences.largest,
        differences.has_nan,
        differences.length_ratio,
    )


def _differences_of_rows(a: Stored, b: Stored) -> _Differences:
    """Return the differences of two tables once both are cast to the narrower of their types."""
    narrower = min(a.dtype, b.dtype, key=_bits_and_name)
    narrow = NUMPY[narrower]
    differences = _Differences()
    for start, x, y in _spans_of_both(a, b):
        left = np.ascontiguousarray(x.astype(narrow, copy=False))
        right = np.ascontiguousarray(y.astype(narrow, copy=False))
        rows = differences.add(start, left, right)
        # under the same names: with the spans still referenced, reading the next ones takes up to twice as long
        x, y = x[rows].astype(np.float64), y[rows].astype(np.float64)
        differences.measure(x, y)
    return differences


def _bits_and_name(dtype: str) -> tuple[int, str]:
    """Return the key that sorts narrow types first, those of one width by name."""
    return BITS[dtype], dtype


def _kind_of_differing(differences: _Differences, rows: int) -> str:
    """Return how two tables of so many rows differ in numbers."""
    if differences.count <= FEW * rows:
        return SOME_ROWS
    if differences.relative <= NEAR:
        return CLOSE
    return UNRELATED


def _has_nan(block: NDArray[Any]) -> bool:
    """Return whether floating values include NaN, whose bits without the sign are above those of infinity."""
    bits = block.view(f"u{block.itemsize}")
    infinity = np.array(np.inf, block.dtype).view(bits.dtype)
    return bool((bits & np.iinfo(f"i{block.itemsize}").max).max(initial=0) > infinity)


def _differing(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Return the indices of rows that differ in numbers, of two arrays of one type.

    Bytes are compared first. Where they differ, +0 and −0 are still equal, and so are any two NaN.
    """
    rows = np.nonzero((_bytes_of_rows(a) != _bytes_of_rows(b)).any(axis=1))[0]
    x, y = _flat_rows(a)[rows], _flat_rows(b)[rows]
    is_equal = (x == y) | (np.isnan(x) & np.isnan(y))
    differing: NDArray[Any] = rows[~is_equal.all(axis=1)]
    return differing


def _bytes_of_rows(table: NDArray[Any]) -> NDArray[Any]:
    """Return the bytes of each row, in words of eight where that goes up."""
    data = table.view(np.uint8).reshape(len(table), -1)
    if data.shape[1] % 8 == 0:
        return data.view(np.uint64)
    return data


def _flat_rows(table: NDArray[Any]) -> NDArray[Any]:
    """Return a tensor as a matrix: all values of a row in one axis."""
    return table.reshape(len(table), table.size // max(1, len(table)))


def changed_rows(a: Stored, b: Stored) -> NDArray[np.int64]:
    """Return rows of two equally shaped tables that differ in a bit of the wider type. Advances by bytes of `a`."""
    changed = [np.zeros(0, np.int64)]
    for start, *both in _spans_of_both(a, b):
        x, y = map(widened, both)
        wide = np.result_type(x, y)
        bits = [values.astype(wide, copy=False).view(f"u{wide.itemsize}") for values in (x, y)]
        changed.append(start + np.flatnonzero((bits[0] != bits[1]).any(axis=1)))
    return np.concatenate(changed)


LARGE, _SAMPLE = 2**20, 2**16  # smaller tensors are not looked at for duplicates: norms and biases are often equal


@dataclass(frozen=True)
class RowScan:
    """Contents of the rows of a table [V, E]."""

    not_finite: Sequence[int]  # rows that hold NaN or an infinity
    zero: Sequence[int]  # rows of zeros
    # groups of rows (finite, not of zeros) that are equal bit for bit, each in ascending order
    repeated: Sequence[Sequence[int]]
    lengths: NDArray[np.float32]  # Euclidean length of each row [V]; NaN or infinite where the row is


def scan_rows(table: Stored) -> RowScan:
    """Read every row of a floating table. Advances by its bytes."""
    lengths = np.zeros(table.rows, np.float32)
    finite = np.ones(table.rows, bool)
    zero = np.zeros(table.rows, bool)
    first: dict[bytes, int] = {}  # {digest of a row: the first row that has it}
    groups: dict[int, list[int]] = {}  # {first of several equal rows: all of them}
    with Reader(table) as reader:
        for start, stop in reader.spans():
            rows = reader.rows(start, stop)
            wide = widened(rows)
            with np.errstate(all="ignore"):
                lengths[start:stop] = _lengths(wide)
                finite[start:stop] = np.isfinite(wide).all(axis=1)
            zero[start:stop] = (wide == 0).all(axis=1)
            for number, row in enumerate(np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1), start):
                digest = hashlib.blake2b(row.data, digest_size=16).digest()
                earlier = first.setdefault(digest, number)
                if earlier != number:
                    groups.setdefault(earlier, [earlier]).append(number)
            advance_progress(stop * reader.row_bytes)
    repeated = [group for row, group in groups.items() if finite[row] and not zero[row]]
    return RowScan(np.nonzero(~finite)[0].tolist(), np.nonzero(zero)[0].tolist(), repeated, lengths)


def _lengths(rows: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the Euclidean length of each row.

    Each row is scaled by its largest element, so no square over- or underflows.
    The caller silences warnings about numbers that are not finite.
    """
    largest = np.abs(rows).max(axis=1, initial=0.0)
    scale = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    lengths: NDArray[np.floating] = scale * np.sqrt(np.square(rows / scale[:, None]).sum(axis=1))
    return lengths


def row_lengths(table: Stored, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the Euclidean lengths of some rows of a floating table. A row that is not finite has length 0."""
    lengths = np.zeros(len(rows))
    with Reader(table) as reader, np.errstate(all="ignore"):
        step = max(1, CHUNK_BYTES // max(1, reader.row_bytes))
        for start in range(0, len(rows), step):
            lengths[start : start + step] = _lengths(widened(reader.take(rows[start : start + step])))
    return np.where(np.isfinite(lengths), lengths, 0.0)


MEAN_ROWS = 256  # rows, spread over the table, that a root mean square is taken over


def root_mean_square(table: Stored) -> float:
    """Return the root mean square of a floating matrix, by sampled rows. Rows that are not finite count as 0."""
    rows = np.linspace(0, table.shape[0] - 1, min(MEAN_ROWS, table.shape[0])).astype(np.int64)
    if not rows.size:
        return 0.0
    mean_square_length = np.mean(np.square(row_lengths(table, rows)))
    return float(np.sqrt(mean_square_length / table.shape[1]))


def all_zero(table: Stored) -> bool:
    """Return whether a floating table has numbers, and all are zero. Reading stops at the first that is not."""
    with Reader(table) as reader:
        for start, stop in reader.spans():
            if reader.rows(start, stop).any():
                return False
    return table.nbytes > 0


def outlying(lengths: NDArray[Any], rows: Iterable[int], factor: float = 10.0) -> tuple[list[int], float]:
    """Return those of `rows` that are `factor` medians long or more, and the median length."""
    chosen = np.fromiter(rows, np.int64)
    chosen = chosen[chosen < len(lengths)]
    chosen = np.sort(chosen[np.isfinite(lengths[chosen])])
    median = float(np.median(lengths[chosen])) if len(chosen) else 0.0
    if median <= 0:
        return [], median
    return chosen[lengths[chosen] >= factor * median].tolist(), median


def duplicates(tensors: Iterable[Stored], same: Callable[[Stored, Stored], bool] = same_bytes) -> list[list[Stored]]:
    """Group large tensors that hold the same bytes.

    Tensors of one type and shape are compared; a hash of three samples sorts out most pairs before all bytes are read.
    """
    buckets: dict[tuple[str, tuple[int, ...]], list[Stored]] = defaultdict(list)
    for tensor in tensors:
        if tensor.nbytes >= LARGE:
            buckets[tensor.dtype, tensor.shape].append(tensor)
    equal = []
    for bucket in buckets.values():
        if len(bucket) > 1:
            equal += [group for group in _equal_groups(bucket, same) if len(group) > 1]
    return equal


def _equal_groups(tensors: list[Stored], same: Callable[[Stored, Stored], bool]) -> list[list[Stored]]:
    """Return tensors of one type and shape in groups that have the same bytes."""
    by_sample: dict[bytes, list[list[Stored]]] = defaultdict(list)
    for tensor in tensors:
        groups = by_sample[_sample(tensor)]
        for group in groups:
            if same(group[0], tensor):
                group.append(tensor)
                break
        else:
            groups.append([tensor])
    return list(itertools.chain.from_iterable(by_sample.values()))


def _sample(tensor: Stored) -> bytes:
    """Return a hash of three samples of a tensor's bytes: of its start, middle and end."""
    digest, buffer = hashlib.blake2b(digest_size=16), bytearray(_SAMPLE)
    with Reader(tensor) as reader:
        for start in (0, (tensor.nbytes - _SAMPLE) // 2, tensor.nbytes - _SAMPLE):
            reader.read_into(memoryview(buffer), start)
            digest.update(buffer)
    return digest.digest()
