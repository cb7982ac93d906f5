"""Write a safetensors file from tensors that arrive in pieces, one after the other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tiewise.checkpoint.stored import BITS, Header
from tiewise.rewrite.change import NewTensor, copy_of


def write_tensors(
    path: Path, tensors: Sequence[NewTensor], metadata: Mapping[str, str], tick: Callable[[int], None]
) -> None:
    """Write a new file that holds `tensors` in this order, and see it on the disk.

    `tick` hears the bytes of each piece written.

    Raises:
        OSError: the disk is full, or the file cannot be written.
    """
    with open(path, "xb") as file:
        file.write(_header(tensors, metadata))
        for tensor in tensors:
            count = 0
            for piece in tensor.write():
                file.write(piece)
                count += len(piece)
                tick(len(piece))
            if count != tensor.nbytes:
                raise AssertionError(f"{tensor.name}: {count} bytes came, {tensor.nbytes} were announced")
        file.flush()
        os.fsync(file.fileno())


def arranged(header: Header, gone: Iterable[str], put: Iterable[NewTensor]) -> tuple[NewTensor, ...]:
    """Return what a file holds after a change, in an order that keeps every tensor aligned to its type.

    Stored tensors keep their order. The format's library puts wider types first; a new tensor goes behind the last
    one that is as wide. Where the order was another and a tensor would come to lie across its alignment, all are
    sorted by width: readers view the bytes in place.
    """
    left = {tensor.name: tensor for tensor in put}
    gone = set(gone)
    made = [left.pop(n) if n in left else copy_of(t, n) for n, t in header.tensors.items() if n not in gone]
    for tensor in left.values():
        places = [i + 1 for i, other in enumerate(made) if BITS[other.dtype] >= BITS[tensor.dtype]]
        made.insert(places[-1] if places else 0, tensor)
    if not _aligned(made):
        made.sort(key=lambda tensor: -BITS[tensor.dtype])
    return tuple(made)


def _aligned(tensors: Iterable[NewTensor]) -> bool:
    at = 0
    for tensor in tensors:
        if at % max(1, BITS[tensor.dtype] // 8):
            return False
        at += tensor.nbytes
    return True


def _header(tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> bytes:
    stored = {tensor.name for tensor in tensors}
    # The library's `save_model` notes a shared tensor that it left out under that tensor's name: untrue once stored.
    kept = {key: value for key, value in metadata.items() if key not in stored}
    record: dict[str, object] = {"__metadata__": kept} if kept else {}
    at = 0
    for tensor in tensors:
        offsets = [at, at + tensor.nbytes]
        record[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        at += tensor.nbytes
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
