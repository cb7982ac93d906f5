"""What a verb wants done to a checkpoint, before anything is written."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tiewise.checkpoint.stored import BITS, CHUNK_BYTES, Reader, Stored


class _Delete:
    """The one value of `Change.config` that stands for no value."""

    def __repr__(self) -> str:
        return "DELETE"


DELETE: Final = _Delete()


@dataclass(frozen=True)
class NewTensor:
    """A tensor to be written: a new one, or new content under the name of a stored one.

    Args:
        name: in the checkpoint.
        dtype: of the safetensors format ("BF16").
        shape: of the tensor.
        file: name of the file that shall hold it: that of the tensor that it comes from.
        write: yields its bytes in order, in pieces of a few MB; called at most once, never for a dry run.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    write: Callable[[], Iterator[bytes | memoryview]] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return math.prod(self.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True)
class Measured:
    """How far a change moves the model, as measured on its tables.

    Args:
        logits: largest absolute change of a logit, before the family's own scale and cap.
        input_rows: largest Euclidean length by which a row of the input table moves.
        how: what was measured, or why nothing needed to be.
    """

    logits: float
    input_rows: float
    how: str


@dataclass(frozen=True)
class Change:
    """One rewrite of a checkpoint.

    Args:
        measured: its effect on the model.
        drop: names of tensors that go, from whatever file holds them.
        put: tensors that come; one whose name is stored replaces that tensor at its place.
        config: dotted path in config.json → new value, or `DELETE`. The levels above the last key must exist.
        drop_copies: (file, name) of second copies that go while the tensor stays in its own file.
        reindex: the index is written anew although no shard changes.
        notes: what the user should know, one sentence each.
    """

    measured: Measured
    drop: frozenset[str] = frozenset()
    put: tuple[NewTensor, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    drop_copies: frozenset[tuple[str, str]] = frozenset()
    reindex: bool = False
    notes: tuple[str, ...] = ()


def copy_of(tensor: Stored, name: str) -> NewTensor:
    """Return a tensor `name` with the bytes of a stored one, in the same file."""
    return NewTensor(name, tensor.dtype, tensor.shape, tensor.path.name, lambda: stored_bytes(tensor))


def stored_bytes(tensor: Stored) -> Iterator[memoryview]:
    """Yield the bytes of a stored tensor in pieces; each is valid until the next is asked for."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, tensor.nbytes)))
    with Reader(tensor) as reader:
        for start in range(0, tensor.nbytes, CHUNK_BYTES):
            piece = buffer[: min(CHUNK_BYTES, tensor.nbytes - start)]
            reader.into(piece, start)
            yield piece
