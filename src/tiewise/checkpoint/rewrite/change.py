"""Change of a checkpoint by a verb, and measurement of its effect on the model.

This module writes no file.

Logits are h·tableᵀ for every row of the vocabulary. h are 64 random hidden vectors of unit root mean square, the same
on every run. The tables are read in pieces. The scale and cap of the family act on the logits later and are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rules.normalised_heads import normalised_heads
from tiewise.checkpoint.stored import BITS, CHUNK_BYTES, Reader, Stored, widened
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import report_progress

RANDOM_VECTORS = 64  # number of random hidden vectors
SEED = 20_250_903  # seed of these vectors
DELETE: Final = object()  # value in `Change.config` that removes the key

Pieces = Iterator[bytes | bytearray | memoryview]
Rows = NDArray[Any]  # rows of a table, in the type in which the file stores them


class NothingToDo(CheckpointError):
    """The source is already as the verb would make it, and no folder was made."""


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write: a new one, or new content for a stored one."""

    name: str
    dtype: str  # name of the type in the safetensors format, such as "BF16"
    shape: tuple[int, ...]
    file: str  # name of the file that will contain it: the file of the tensor that it is computed from
    write: Callable[[], Pieces] = field(repr=False)  # yields its bytes in pieces of a few MB; a dry run never calls it

    @classmethod
    def like(cls, old: Stored, write: Callable[[], Pieces], **other: Any) -> NewTensor:
        """Return a new tensor with the name, type, shape and file of a stored one.

        Args:
            old: the stored tensor.
            write: yields the bytes of the new tensor.
            other: fields of the new tensor that differ from the stored one's.
        """
        return replace(cls(old.name, old.dtype, old.shape, old.path.name, write), **other)

    @classmethod
    def copy(cls, old: Stored, **other: Any) -> NewTensor:
        """Return a new tensor that also has the bytes of a stored one."""
        return cls.like(old, lambda: stored_bytes(old), **other)

    @property
    def nbytes(self) -> int:
        """Size on disk, in bytes."""
        return math.prod(self.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True)
class Movement:
    """Distance by which a change moves the model, measured on its tables."""

    logits: float  # largest absolute change of a logit
    input_rows: float  # largest Euclidean distance by which a row of the input table moves
    how: str  # rows and vectors of the measurement, or the reason why none was needed


UNMOVED = Movement(0.0, 0.0, "nothing: both tables keep their bytes")


@dataclass(frozen=True)
class Change:
    """One rewrite of a checkpoint."""

    movement: Movement = UNMOVED
    drop: frozenset[str] = frozenset()  # names of tensors to drop, from every file that stores them
    put: tuple[NewTensor, ...] = ()  # tensors to write; one with the name of a stored tensor replaces it
    # dotted path in config.json → new value, or `DELETE`; the levels above the last key must exist
    config: Mapping[str, Any] = field(default_factory=dict)
    drop_copies: frozenset[tuple[str, str]] = frozenset()  # (file, name) of second copies to drop
    reindex: bool = False  # True to rewrite the index although no tensor file changes
    texts: Mapping[str, bytes] = field(default_factory=dict)  # {name of a file without tensors: its new content}
    leave: frozenset[str] = frozenset()  # names of files without tensors that the result omits
    notes: tuple[str, ...] = ()  # advice for the user, one sentence each
    summary: str = ""  # the change in one clause, which the receipt prints first
    lost: tuple[str, ...] = ()  # shares of tables that the result lacks, one sentence each
    lost_share: float = 0.0  # the largest of these shares, of the norm of a table
    # checks the finished folder before it gets its final name, and yields one sentence for each fault
    flaws: Callable[[Path], Iterator[str]] | None = None

    @property
    def is_empty(self) -> bool:
        """True if no tensor is dropped or written and config.json stays."""
        return not (self.drop or self.put or self.config)


def refuse(problem: str, remedy: str, force: bool) -> tuple[str, ...]:
    """Raise an error because an operation would change the model's function.

    With `force`, return the problem as a note instead.
    """
    if not force:
        raise CheckpointError(problem, f"{remedy}; --force does it anyway")
    return (f"forced: {problem}",)


def require_plain_head(facts: Facts, verb: str, force: bool) -> tuple[str, ...]:
    """Raise if the head's class divides each row by its length.

    The logits of the stored rows are then not the model's. With `force`, return the problem as a note instead.
    """
    for where, how in normalised_heads(facts):
        problem = f"{facts.path}: {short(where)}: {how}, so {verb} would change its logits"
        return refuse(problem, "write rows of length 1 and a class without the division first", force)
    return ()


def stored_bytes(tensor: Stored) -> Pieces:
    """Yield the bytes of a stored tensor."""
    with Reader(tensor) as reader:
        for start in range(0, tensor.nbytes, CHUNK_BYTES):
            piece = bytearray(min(CHUNK_BYTES, tensor.nbytes - start))
            reader.read_into(memoryview(piece), start)
            yield piece


def same_pieces(a: Pieces, b: Pieces) -> bool:
    """Return True if two tensors have the same bytes; both must be cut into equal pieces."""
    return all(one == other for one, other in zip(a, b, strict=True))


def gather_rows(part: Stored, rows: Sequence[int]) -> Pieces:
    """Yield the bytes of some rows of a tensor, a few MB at a time.

    Args:
        rows: numbers of the rows, in ascending order.
    """
    numbers = np.array(rows, np.int64)
    with Reader(part) as reader:
        for start, stop in reader.spans():
            first, last = np.searchsorted(numbers, (start, stop))
            if first < last:
                yield reader.rows(start, stop)[numbers[first:last] - start].tobytes()


@dataclass(frozen=True)
class TableRows:
    """A table as the model uses it, with its maps applied."""

    rows: int
    width: int
    read: Callable[[int, int], Rows]  # read(start, stop) returns rows [start, stop), as [stop − start, width]

    @classmethod
    def of(cls, tensor: Stored) -> TableRows:
        """Return a stored table [V, D]."""
        return cls(tensor.rows, tensor.shape[1], tensor.read)

    def spans(self, itemsize: int = 8) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of ranges of rows that take a few MB each.

        Args:
            itemsize: bytes of one value.
        """
        step = max(1, CHUNK_BYTES // (itemsize * max(1, self.width)))
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)

    def pieces(self) -> Pieces:
        """Yield the bytes of the table."""
        for start, stop in self.spans():
            yield self.read(start, stop).tobytes()


Pair = tuple[TableRows, TableRows]  # a table before and after the change


def hidden_vectors(width: int) -> NDArray[np.float32]:
    """Return the random hidden vectors [64, width], each of root mean square 1."""
    vectors = np.random.default_rng(SEED).standard_normal((RANDOM_VECTORS, width))
    size = np.sqrt(np.square(vectors).mean(axis=1, keepdims=True))
    return np.asarray(vectors / size, np.float32)


def measure_movement(outputs: Pair | None, inputs: Pair | None) -> Movement:
    """Measure how far both ends move.

    Args:
        outputs: the output table before and after; None if its bytes stay.
        inputs: the input table before and after; None if its bytes stay.
    """
    if outputs is None and inputs is None:
        return UNMOVED
    names = []
    logits = input_rows = 0.0
    at = ""
    if outputs is not None:
        width = outputs[0].width
        vectors = hidden_vectors(width).T
        logits = _largest(outputs, lambda difference: np.abs(difference @ vectors))
        names.append("output")
        at = f", at {RANDOM_VECTORS} random hidden vectors of unit root mean square and width {width}"
    if inputs is not None:
        input_rows = _largest(inputs, lambda difference: np.linalg.norm(difference, axis=1))
        names.append("input")
    return Movement(logits, input_rows, f"every row of the {' and the '.join(names)} table{at}")


def share_lost(pair: Pair) -> float:
    """Return ‖old − new‖ / ‖old‖ of a table, in the Frobenius norm."""
    old, new = pair
    error = norm = 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        for start, stop in old.spans():
            before = widened(old.read(start, stop)).astype(np.float64)
            after = widened(new.read(start, stop)).astype(np.float64)
            error += float(np.square(before - after).sum())
            norm += float(np.square(before).sum())
    return math.sqrt(error / norm) if norm > 0 else 0.0


def _largest(tables: Pair, sizes: Callable[[Rows], Rows]) -> float:
    """Return the largest value of `sizes` over the differences between two tables.

    Return NaN if one of the values is NaN.

    Args:
        sizes: function of a block of differences [., width].
    """
    old, new = tables
    largest = np.float64(0.0)
    with np.errstate(invalid="ignore", over="ignore"):  # a table may contain infinities; the result is then not finite
        for start, stop in old.spans(itemsize=4):
            difference = widened(old.read(start, stop)) - widened(new.read(start, stop))
            largest = np.maximum(largest, sizes(difference).max(initial=0.0))
            report_progress("measuring the change", stop, old.rows)
    return float(largest)
