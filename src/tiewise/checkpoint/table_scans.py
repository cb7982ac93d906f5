"""Scans of full tables: likeness of two tables, rows of one table, duplicated tensors.

    identical     every byte equal
    zeros' signs  every number equal, some zeros are negative in one table only
    same values   equal once both are cast to the narrower of their types (one was saved in another precision)
    some rows     most rows equal, some not (rows trained, added or re-initialised at one end only)
    close         every row differs a little (both started as one table and were trained apart)
    unrelated     two different tables

Two tables pass through two buffers that stay in the processor's cache. A test for equality stops at the first
difference.
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
SCAN_BYTES = 2**20  # bytes of one buffer: few system calls, and two buffers fit in the cache
FEW = 0.5  # a pair is "some rows" if at most this share of its rows differs
NEAR = 0.1  # otherwise it is "close" if ‖a − b‖ is at most this share of ‖a‖
SAMPLED_ROWS = 4096  # differing rows that enter the norms
FIRST_ROWS = 8  # differing rows that are listed
# a table of the Hub that is not read whole is compared on this many random rows, or as many as fit into the bytes
MOST_RANDOM, FEWEST_RANDOM, RANDOM_BYTES = 16, 4, 2**16


@dataclass(frozen=True)
class TableLikeness:
    """Likeness of two tables [V, E]."""

    kind: str  # "identical", "zeros' signs", "same values", "some rows", "close" or "unrelated"
    rows: int  # number of compared rows
    differing: int = 0  # number of rows that differ after the cast
    first: tuple[int, ...] = ()  # indices of the first differing rows, at most eight
    relative: float = 0.0  # ‖a − b‖ / ‖a‖ over the first 4096 differing rows; 0 if no row differs
    largest: float = 0.0  # largest absolute difference of an element over those rows
    # some value is NaN: a loader that compares numbers sees two different tables, even if every byte is equal
    nan: bool = False
    length_ratio: float = 1.0  # ‖b‖ / ‖a‖ over the first 4096 differing rows; 1 if no row differs
    of: int | None = None  # rows of each table, if only `rows` random ones were compared; None: all were compared

    @property
    def equal(self) -> bool:
        """Return whether both tables have the same bytes or the same numbers."""
        return self.kind in (IDENTICAL, SIGNS)


def compares_random_rows(*tables: Stored) -> bool:
    """Return whether a comparison reads only random rows: of a large table of the Hub."""
    for table in tables:
        if table.source is None or table.source.most_compared is None:
            continue
        if table.nbytes > table.source.most_compared:
            return True
    return False


def extent_of_comparison(*tables: Stored) -> str:
    """Return a clause on the part of two equal tables that a comparison reads.

    It is "byte for byte" if it reads all.
    """
    if not compares_random_rows(*tables):
        return "byte for byte"
    table = tables[0]
    return f"in {len(_random_ids(table))} random rows, of {table.rows:,}, byte for byte (--full compares all)"


def _random_ids(table: Stored) -> NDArray[np.int64]:
    """Return indices of random rows, in order. They depend on the shape alone: a second run reads the same rows."""
    row_bytes = max(1, table.nbytes // max(1, table.rows))
    count = min(table.rows, MOST_RANDOM, max(FEWEST_RANDOM, RANDOM_BYTES // row_bytes))
    generator = np.random.default_rng([table.rows, table.nbytes])
    return np.sort(generator.choice(table.rows, count, replace=False)).astype(np.int64)


class _RandomRows:
    """Random rows of two tables of one shape."""

    def __init__(self, a: Stored, b: Stored) -> None:
        self.ids = _random_ids(a)
        with Reader(a) as one, Reader(b) as other:
            self.raw, self.other_raw = one.raw_rows(self.ids), other.raw_rows(self.ids)
        self._types = a.dtype, b.dtype

    @property
    def are_same_bytes(self) -> bool:
        """Return whether the rows have the same bytes."""
        return self.raw == self.other_raw

    def values(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the rows of both tables as matrices, each in its table's type."""
        type_of_a, type_of_b = self._types
        x = np.frombuffer(self.raw, NUMPY[type_of_a]).reshape(len(self.ids), -1)
        return x, np.frombuffer(self.other_raw, NUMPY[type_of_b]).reshape(len(self.ids), -1)


def _spans_of_both(a: Stored, b: Stored) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
    """Yield (start, rows of `a`, same rows of `b`) in order.

    Progress counts the bytes of `a`.
    """
    with Reader(a) as one, Reader(b) as other:
        for start, stop in one.spans():
            yield start, one.rows(start, stop), other.rows(start, stop)
            advance_progress(stop * one.row_bytes)


def same_numbers(a: Stored, b: Stored) -> bool:
    """Return whether two tensors have equal numbers of one type; +0 equals −0."""
    if same_bytes(a, b):
        return True
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.dtype not in FLOATING:
        return False
    if compares_random_rows(a, b):
        return not _differing(*_RandomRows(a, b).values()).size
    return not any(_differing(x, y).size for _, x, y in _spans_of_both(a, b))


def equal_in(a: Stored, b: Stored, dtype: str) -> bool:
    """Return whether two tensors have equal numbers in a type, as `torch.equal` compares them.

    Both are cast to it. +0 equals −0, and NaN equals nothing. Progress counts the bytes of `a`.

    Args:
        a, b: tensors of types with a NumPy equivalent.
        dtype: floating type of the format, such as "BF16".
    """
    if a.shape != b.shape:
        return False
    spans = _spans_of_both(a, b)
    if compares_random_rows(a, b):
        spans = iter([(0, *_RandomRows(a, b).values())])
    with np.errstate(over="ignore", invalid="ignore"):
        for _, x, y in spans:
            if not np.array_equal(x.astype(NUMPY[dtype]), y.astype(NUMPY[dtype])):
                return False
    return True


def _ignore_block(block: NDArray[Any]) -> None:
    """Ignore a block of bytes."""


def same_bytes(a: Stored, b: Stored, on_block: Callable[[NDArray[Any]], None] = _ignore_block) -> bool:
    """Return whether two tensors have the same bytes.

    It calls `on_block` with every equal block, an array of bytes. Progress counts the bytes of `a`.
    """
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if compares_random_rows(a, b):
        return _RandomRows(a, b).are_same_bytes
    left, right = np.empty(SCAN_BYTES, np.uint8), np.empty(SCAN_BYTES, np.uint8)
    with Reader(a) as one, Reader(b) as other:
        for start in range(0, a.nbytes, SCAN_BYTES):
            count = min(SCAN_BYTES, a.nbytes - start)
            one.read_into(left.data[:count], start)
            other.read_into(right.data[:count], start)
            words = np.uint64 if count % 8 == 0 else np.uint8  # fewer elements to compare, if the count is divisible
            if not np.array_equal(left[:count].view(words), right[:count].view(words)):
                return False
            on_block(left[:count])
            advance_progress(start + count)
    return True


def same_shared(table: Stored, other: Stored) -> bool:
    """Return whether a tensor has a table's bytes, also in another shape or transposed.

    Progress counts the bytes of `table`.
    """
    if (table.dtype, table.nbytes) != (other.dtype, other.nbytes):
        return False
    if same_bytes(table, replace(other, shape=table.shape)):
        return True
    if len(table.shape) != 2 or table.dtype not in NUMPY:
        return False
    if other.shape != table.shape[::-1]:
        return False
    if compares_random_rows(table, other):
        return _same_random_entries(table, other)
    return _same_transposed(table, other)


def _same_random_entries(table: Stored, transposed: Stored) -> bool:
    """Return whether a few random rows of two tables agree where they cross. The second one is the transpose."""
    ids, columns = _random_ids(table), _random_ids(transposed)[:FEWEST_RANDOM]
    dtype = np.dtype(f"V{NUMPY[table.dtype].itemsize}")
    with Reader(table) as one, Reader(transposed) as other:
        rows = np.frombuffer(one.raw_rows(ids), dtype).reshape(len(ids), table.columns)
        other_rows = np.frombuffer(other.raw_rows(columns), dtype).reshape(len(columns), transposed.columns)
    return rows[:, columns].tobytes() == other_rows[:, ids].T.tobytes()


def _same_transposed(table: Stored, other: Stored) -> bool:
    """Return whether `other` is the transpose of `table`, byte for byte. Progress counts its bytes."""
    (rows, width), item = table.shape, NUMPY[table.dtype].itemsize
    with Reader(table) as one, Reader(other) as transposed:
        step = max(1, 8 * SCAN_BYTES // one.row_bytes)
        for start in range(0, rows, step):
            count = min(step, rows - start)
            left, columns = np.empty(count * one.row_bytes, np.uint8), np.empty((width, count * item), np.uint8)
            one.read_into(left.data, start * one.row_bytes)
            for number, column in enumerate(columns):
                transposed.read_into(column.data, number * transposed.row_bytes + start * item)
            right = columns.reshape(width, count, item).transpose(1, 0, 2)
            if not np.array_equal(left.reshape(count, width, item), right):
                return False
            advance_progress((start + count) * one.row_bytes)
    return True


class _Differences:
    """Differing rows of two tables, and sums over the first `SAMPLED_ROWS` of them."""

    def __init__(self) -> None:
        self.count = 0
        self.first = list[int]()  # at most `FIRST_ROWS`
        self.has_nan = False  # some value of the first table is NaN
        self.largest = 0.0  # largest absolute difference of an element
        self._measured = 0
        self._error = self._norm = self._other_norm = 0.0  # sums of squares: a − b, a, b

    def add(self, start: int, left: NDArray[Any], right: NDArray[Any]) -> NDArray[np.int64]:
        """Count the differing rows of a span, and return the indices of those to measure.

        Args:
            start: index of the span's first row in the tables.
            left: rows of the first table, in the narrower type of both.
            right: the same rows of the second table, in the same type.
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
        """Return the root of a sum of squares over ‖a‖. Infinity if ‖a‖ is 0 or NaN."""
        if self._norm > 0:
            return float(np.sqrt(square / self._norm))
        return float("inf")


def likeness(a: Stored, b: Stored) -> TableLikeness | None:
    """Compare two tables row by row. None unless both are floating matrices of one shape.

    Progress counts the bytes of `a`.
    """
    if a.shape != b.shape or len(a.shape) != 2:
        return None
    if a.dtype not in FLOATING or b.dtype not in FLOATING:
        return None
    if compares_random_rows(a, b):
        return _likeness_of_random_rows(a, b)
    blocks_with_nan: list[bool] = []

    def note_nan(block: NDArray[Any]) -> None:
        """Record whether a block of bytes has NaN."""
        blocks_with_nan.append(_has_nan(block.view(NUMPY[a.dtype])))

    if same_bytes(a, b, note_nan):
        return TableLikeness(IDENTICAL, a.rows, nan=any(blocks_with_nan))
    return _likeness_by(_differences_of_rows(a, b), a, b, a.rows)


def _likeness_by(differences: _Differences, a: Stored, b: Stored, rows: int) -> TableLikeness:
    """Return the likeness of two tables with these differences among `rows` compared rows."""
    if not differences.count:
        return TableLikeness(SIGNS if a.dtype == b.dtype else SAME_VALUES, rows, nan=differences.has_nan)
    return TableLikeness(
        _likeness_of_differing(differences, rows),
        rows,
        differences.count,
        tuple(differences.first),
        differences.relative,
        differences.largest,
        differences.has_nan,
        differences.length_ratio,
    )


def _likeness_of_random_rows(a: Stored, b: Stored) -> TableLikeness:
    """Compare random rows of two tables of one shape. A difference is certain, equality is not."""
    chosen = _RandomRows(a, b)
    x, y = chosen.values()
    count = len(chosen.ids)
    if a.dtype == b.dtype and chosen.are_same_bytes:
        return TableLikeness(IDENTICAL, count, nan=_has_nan(x), of=a.rows)
    differences = _Differences()
    _add_rows(differences, 0, x, y, _narrower(a, b))
    alike = _likeness_by(differences, a, b, count)
    first = tuple(int(chosen.ids[position]) for position in alike.first)
    return replace(alike, first=first, of=a.rows)


def _narrower(a: Stored, b: Stored) -> np.dtype:
    """Return the narrower type of two floating tables."""
    return NUMPY[min(a.dtype, b.dtype, key=_bits_and_name)]


def _add_rows(differences: _Differences, start: int, x: NDArray[Any], y: NDArray[Any], narrow: np.dtype) -> None:
    """Compare the same rows of two tables in the narrower type, and add their differences.

    Args:
        differences: what is added to.
        start: index of the first row.
        x, y: the rows, each in its table's type.
        narrow: the narrower type of both.
    """
    left = np.ascontiguousarray(x.astype(narrow, copy=False))
    right = np.ascontiguousarray(y.astype(narrow, copy=False))
    rows = differences.add(start, left, right)
    differences.measure(x[rows].astype(np.float64), y[rows].astype(np.float64))


def _differences_of_rows(a: Stored, b: Stored) -> _Differences:
    """Return the differences of two tables after a cast to the narrower of their types."""
    narrow = _narrower(a, b)
    differences = _Differences()
    for start, x, y in _spans_of_both(a, b):
        _add_rows(differences, start, x, y, narrow)
        del x, y  # if the spans stay referenced, the next read takes up to twice as long
    return differences


def _bits_and_name(dtype: str) -> tuple[int, str]:
    """Return the key that sorts narrow types first, those of one width by name."""
    return BITS[dtype], dtype


def _likeness_of_differing(differences: _Differences, rows: int) -> str:
    """Return the likeness of two tables that differ: `SOME_ROWS`, `CLOSE` or `UNRELATED`."""
    if differences.count <= FEW * rows:
        return SOME_ROWS
    if differences.relative <= NEAR:
        return CLOSE
    return UNRELATED


def _has_nan(block: NDArray[Any]) -> bool:
    """Return whether floating values include NaN.

    The bits of NaN without the sign are a larger integer than those of infinity.
    """
    bits = block.view(f"u{block.itemsize}")
    infinity = np.array(np.inf, block.dtype).view(bits.dtype)
    return bool((bits & np.iinfo(f"i{block.itemsize}").max).max(initial=0) > infinity)


def _differing(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Return the indices of rows whose numbers differ in two arrays of one type.

    It compares bytes first. In rows with different bytes, +0 equals −0, and NaN equals NaN.
    """
    rows = np.nonzero((_bytes_of_rows(a) != _bytes_of_rows(b)).any(axis=1))[0]
    x, y = _flat_rows(a)[rows], _flat_rows(b)[rows]
    is_equal = (x == y) | (np.isnan(x) & np.isnan(y))
    differing: NDArray[Any] = rows[~is_equal.all(axis=1)]
    return differing


def _bytes_of_rows(table: NDArray[Any]) -> NDArray[Any]:
    """Return the bytes of each row, as 8-byte words if the length is divisible."""
    data = table.view(np.uint8).reshape(len(table), -1)
    if data.shape[1] % 8 == 0:
        return data.view(np.uint64)
    return data


def _flat_rows(table: NDArray[Any]) -> NDArray[Any]:
    """Return a tensor as a matrix with one row per index of the first axis."""
    return table.reshape(len(table), table.size // max(1, len(table)))


def changed_rows(a: Stored, b: Stored) -> NDArray[np.int64]:
    """Return the rows of two equally shaped tables that differ in the wider type's bits.

    Progress counts the bytes of `a`.
    """
    changed = [np.zeros(0, np.int64)]
    for start, *both in _spans_of_both(a, b):
        x, y = map(widened, both)
        wide = np.result_type(x, y)
        bits = [values.astype(wide, copy=False).view(f"u{wide.itemsize}") for values in (x, y)]
        changed.append(start + np.flatnonzero((bits[0] != bits[1]).any(axis=1)))
    return np.concatenate(changed)


# `duplicates` skips tensors below `LARGE` bytes, since norms and biases are often equal; `_SAMPLE` bytes are hashed
LARGE, _SAMPLE = 2**20, 2**16


@dataclass(frozen=True)
class RowScan:
    """Contents of the rows of a table [V, E]."""

    not_finite: Sequence[int]  # rows with NaN or an infinity
    zero: Sequence[int]  # rows of zeros
    # groups of finite, non-zero rows that are equal bit for bit, each in ascending order
    repeated: Sequence[Sequence[int]]
    lengths: NDArray[np.float32]  # Euclidean length of each row [V]; NaN or infinite for a row with such values


def scan_rows(table: Stored) -> RowScan:
    """Scan every row of a floating table. Progress counts its bytes."""
    lengths = np.zeros(table.rows, np.float32)
    finite = np.ones(table.rows, bool)
    zero = np.zeros(table.rows, bool)
    first: dict[bytes, int] = {}  # {digest of a row: first row with it}
    groups: dict[int, list[int]] = {}  # {first of several equal rows: all of these rows}
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

    Each row is divided by its largest element, so that no square overflows or underflows. The caller silences
    warnings about values that are not finite.
    """
    largest = np.abs(rows).max(axis=1, initial=0.0)
    scale = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    lengths: NDArray[np.floating] = scale * np.sqrt(np.square(rows / scale[:, None]).sum(axis=1))
    return lengths


def row_lengths(table: Stored, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the Euclidean lengths of rows of a floating table. Rows that are not finite have 0."""
    lengths = np.zeros(len(rows))
    with Reader(table) as reader, np.errstate(all="ignore"):
        step = max(1, CHUNK_BYTES // max(1, reader.row_bytes))
        for start in range(0, len(rows), step):
            lengths[start : start + step] = _lengths(widened(reader.take(rows[start : start + step])))
    return np.where(np.isfinite(lengths), lengths, 0.0)


MEAN_ROWS = 256  # evenly spaced rows that `root_mean_square` samples


def root_mean_square(table: Stored) -> float:
    """Return the root mean square of sampled rows of a floating matrix.

    Rows that are not finite count as 0.
    """
    most = MEAN_ROWS
    if compares_random_rows(table):
        most = FEWEST_RANDOM
    rows = np.linspace(0, table.shape[0] - 1, min(most, table.shape[0])).astype(np.int64)
    if not rows.size:
        return 0.0
    mean_square_length = np.mean(np.square(row_lengths(table, rows)))
    return float(np.sqrt(mean_square_length / table.shape[1]))


def all_zero(table: Stored) -> bool:
    """Return whether a floating table has only zeros. False for an empty table."""
    with Reader(table) as reader:
        if compares_random_rows(table) and reader.take(_random_ids(table)).any():
            return False
        for start, stop in reader.spans():
            if reader.rows(start, stop).any():
                return False
    return table.nbytes > 0


def outlying(lengths: NDArray[Any], rows: Iterable[int], factor: float = 10.0) -> tuple[list[int], float]:
    """Return (rows at least `factor` times as long as the median row, median length)."""
    chosen = np.fromiter(rows, np.int64)
    chosen = chosen[chosen < len(lengths)]
    chosen = np.sort(chosen[np.isfinite(lengths[chosen])])
    median = float(np.median(lengths[chosen])) if len(chosen) else 0.0
    if median <= 0:
        return [], median
    return chosen[lengths[chosen] >= factor * median].tolist(), median


def duplicates(tensors: Iterable[Stored], same: Callable[[Stored, Stored], bool] = same_bytes) -> list[list[Stored]]:
    """Return groups of two or more large tensors with the same bytes.

    Only tensors of one type and shape are compared. A hash of three samples excludes most pairs before a full read.
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
    """Return tensors of one type and shape, grouped by equal bytes."""
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
    """Return a hash of three samples of a tensor's bytes: start, middle and end."""
    digest, buffer = hashlib.blake2b(digest_size=16), bytearray(_SAMPLE)
    with Reader(tensor) as reader:
        for start in (0, (tensor.nbytes - _SAMPLE) // 2, tensor.nbytes - _SAMPLE):
            reader.read_into(memoryview(buffer), start)
            digest.update(buffer)
    return digest.digest()
