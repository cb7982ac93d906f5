"""The change that a verb makes to a checkpoint, and how far it moves the model.

Nothing is written here.

Logits are h·tableᵀ at 64 random hidden vectors h of unit root mean square, the same on every run, for every row of the
vocabulary; the tables are read in pieces. Scale and cap of the family come after and are left out.
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

PROBES = 64
SEED = 20_250_903
DELETE: Final = object()  # the one value of `Change.config` that stands for no value

Pieces = Iterator[bytes | bytearray | memoryview]
Rows = NDArray[Any]  # rows of a table in its stored type, which only the file says


class NothingToDo(CheckpointError):
    """The checkpoint is already as the verb would make it. No folder was made."""


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written.

    It is new, or new content under the name of a stored one.
    """

    name: str
    dtype: str  # of the safetensors format ("BF16")
    shape: tuple[int, ...]
    file: str  # name of the file that shall hold it: that of the tensor that it comes from
    write: Callable[[], Pieces] = field(repr=False)  # its bytes in order, a few MB at a time; never for a dry run

    @classmethod
    def like(cls, old: Stored, write: Callable[[], Pieces], **other: Any) -> NewTensor:
        """Return one like a stored tensor.

        It has the same name, type, shape and file, or `other` ones.
        """
        return replace(cls(old.name, old.dtype, old.shape, old.path.name, write), **other)

    @classmethod
    def copy(cls, old: Stored, **other: Any) -> NewTensor:
        """Return one with the bytes of a stored tensor too."""
        return cls.like(old, lambda: stored_bytes(old), **other)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return math.prod(self.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True)
class Movement:
    """How far a change moves the model, as measured on its tables."""

    logits: float  # largest absolute change of a logit
    input_rows: float  # largest Euclidean length by which a row of the input table moves
    how: str  # what was measured, or why nothing needed to be


UNMOVED = Movement(0.0, 0.0, "nothing: the bytes of both tables stay as they were")


@dataclass(frozen=True)
class Change:
    """One rewrite of a checkpoint."""

    movement: Movement = UNMOVED
    drop: frozenset[str] = frozenset()  # names of tensors that go, from whatever file holds them
    put: tuple[NewTensor, ...] = ()  # tensors that come; one whose name is stored replaces that tensor at its place
    # dotted path in config.json → new value, or `DELETE`; the levels above the last key must exist
    config: Mapping[str, Any] = field(default_factory=dict)
    drop_copies: frozenset[tuple[str, str]] = frozenset()  # (file, name) that go while the tensor stays elsewhere
    reindex: bool = False  # the index is written anew although no shard changes
    texts: Mapping[str, bytes] = field(default_factory=dict)  # {file beside the tensors: its new content}
    leave: frozenset[str] = frozenset()  # files beside the tensors that stay behind
    notes: tuple[str, ...] = ()  # what the user should know, one sentence each
    lost: tuple[str, ...] = ()  # shares of tables that the result no longer has, one sentence each
    # looks at the finished result before it gets its name, and yields what is not as it should be
    flaws: Callable[[Path], Iterator[str]] | None = None

    @property
    def is_empty(self) -> bool:
        """No tensor goes or comes, and config.json stays."""
        return not (self.drop or self.put or self.config)


def refuse(problem: str, remedy: str, force: bool) -> tuple[str, ...]:
    """Raise because an operation would change the model's function.

    With `force`, return the reason as a note.
    """
    if not force:
        raise CheckpointError(problem, f"{remedy}; --force does it all the same")
    return (f"forced: {problem}",)


def require_plain_head(facts: Facts, verb: str, force: bool) -> tuple[str, ...]:
    """Refuse a head whose class divides each row by its length.

    With `force`, return the reason as a note.

    Logits that are measured on its stored rows are not the model's.
    """
    for where, how in normalised_heads(facts):
        problem = f"{facts.path}: {short(where)}: {how}, so that {verb} would measure and make logits of other rows"
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
    """Return True if two tensors have the same bytes, both cut into pieces alike."""
    return all(one == other for one, other in zip(a, b, strict=True))


def gather_rows(part: Stored, rows: Sequence[int]) -> Pieces:
    """Yield the bytes of some rows of a tensor, a few MB at a time.

    `rows` ascend.
    """
    numbers = np.array(rows, np.int64)
    with Reader(part) as reader:
        for start, stop in reader.spans():
            first, last = np.searchsorted(numbers, (start, stop))
            if first < last:
                yield reader.rows(start, stop)[numbers[first:last] - start].tobytes()


@dataclass(frozen=True)
class TableRows:
    """A table as the model uses it, maps applied.

    `read(start, stop)` gives rows [start, stop), [., width].
    """

    rows: int
    width: int
    read: Callable[[int, int], Rows]

    @classmethod
    def of(cls, tensor: Stored) -> TableRows:
        """Return a stored table [V, D]."""
        return cls(tensor.rows, tensor.shape[1], tensor.read)

    def spans(self, itemsize: int = 8) -> Iterator[tuple[int, int]]:
        """Yield row ranges whose rows take a few MB, at `itemsize` bytes a value."""
        step = max(1, CHUNK_BYTES // (itemsize * max(1, self.width)))
        for start in range(0, self.rows, step):
            yield start, min(start + step, self.rows)

    def pieces(self) -> Pieces:
        """Yield its bytes."""
        for start, stop in self.spans():
            yield self.read(start, stop).tobytes()


Pair = tuple[TableRows, TableRows]  # old and new


def hidden_vectors(width: int) -> NDArray[np.float32]:
    """Return the random hidden vectors [64, width], each of root mean square 1."""
    vectors = np.random.default_rng(SEED).standard_normal((PROBES, width))
    size = np.sqrt(np.square(vectors).mean(axis=1, keepdims=True))
    return np.asarray(vectors / size, np.float32)


def measure_movement(outputs: Pair | None, inputs: Pair | None) -> Movement:
    """Measure how far both ends move; None for an end whose bytes stay."""
    if outputs is None and inputs is None:
        return UNMOVED
    names = []
    logits = input_rows = 0.0
    at = ""
    if outputs is not None:
        width = outputs[0].width
        probes = hidden_vectors(width).T
        logits = _largest(outputs, lambda difference: np.abs(difference @ probes))
        names.append("output")
        at = f", at {PROBES} random hidden vectors of unit root mean square and width {width}"
    if inputs is not None:
        input_rows = _largest(inputs, lambda difference: np.linalg.norm(difference, axis=1))
        names.append("input")
    return Movement(logits, input_rows, f"every row of the {' and the '.join(names)} table{at}")


def share_lost(pair: Pair) -> float:
    """Return the share of a table that a change takes away.

    It is ‖old − new‖ / ‖old‖ in the Frobenius norm.
    """
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
    """Return the largest of all `sizes` of the differences between two tables.

    NaN if one is NaN.
    """
    old, new = tables
    largest = np.float64(0.0)
    with np.errstate(invalid="ignore", over="ignore"):  # a table may contain infinities; the result then says so
        for start, stop in old.spans(itemsize=4):
            difference = widened(old.read(start, stop)) - widened(new.read(start, stop))
            largest = np.maximum(largest, sizes(difference).max(initial=0.0))
            report_progress("measuring the change", stop, old.rows)
    return float(largest)
