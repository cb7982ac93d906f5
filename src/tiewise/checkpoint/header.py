"""The header of a safetensors file, read without the file's tensors and without trust.

    8 bytes: length n, little endian │ n bytes: JSON {name: {dtype, shape, data_offsets}, __metadata__} │ tensors

A header that parses here describes tensors that lie one behind the other, from the first byte of data to the last of
the file, so that nothing read later can fall outside.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from tiewise.checkpoint.dtypes import BITS
from tiewise.checkpoint.open_file import open_regular
from tiewise.checkpoint.strict_json import parse_json, short
from tiewise.core.errors import CheckpointError

MOST_HEADER = 100_000_000  # the format's own limit
MOST_AXES = 64
_AGAIN = "the file is damaged or was cut short: download or write it again"


@dataclass(frozen=True)
class Stored:
    """One tensor in a file: `start` and `end` are offsets from the file's first byte."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.end - self.start

    @property
    def rows(self) -> int:
        """Length of the first axis; 1 for a scalar."""
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True)
class Header:
    """What one file says of itself. Tensors in order of their bytes."""

    path: Path
    tensors: dict[str, Stored]
    metadata: dict[str, str]
    data_start: int
    size: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointError: the file cannot be read, or its header breaks a rule of the format.
    """
    path = Path(path)
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise CheckpointError(f"{path}: {size} bytes are no safetensors file", _AGAIN)
        length = int.from_bytes(file.read(8), "little")
        if length > MOST_HEADER or length > size - 8:
            what = f"{path}: its header claims {length:,} bytes, and the file has {size:,}"
            raise CheckpointError(what, f"if it is a safetensors file, it {_AGAIN.removeprefix('the file ')}")
        text = file.read(length)
    if len(text) < length:
        raise CheckpointError(f"{path}: the file ends inside its header", _AGAIN)
    record = parse_json(text, f"{path}: header", unique=True)
    if not isinstance(record, dict):
        raise CheckpointError(f"{path}: its header is no JSON object", _AGAIN)
    metadata = _metadata(record.pop("__metadata__", None), path)
    start = 8 + length
    tensors = sorted((_stored(name, entry, path, start) for name, entry in record.items()), key=_place)
    _check_contiguous(tensors, path, start, size)
    return Header(path, {tensor.name: tensor for tensor in tensors}, metadata, start, size)


def _place(tensor: Stored) -> tuple[int, int]:
    return tensor.start, tensor.end


def _metadata(record: Any, path: Path) -> dict[str, str]:
    if record is None:
        return {}
    if not isinstance(record, dict) or not all(isinstance(value, str) for value in record.values()):
        raise CheckpointError(f"{path}: __metadata__ is no map from text to text", _AGAIN)
    return record


def _stored(name: str, entry: Any, path: Path, data_start: int) -> Stored:
    wrong = _wrong(entry)
    if wrong is not None:
        what, fix = wrong
        raise CheckpointError(f"{path}: tensor {short(name)}: {what}", fix)
    start, end = entry["data_offsets"]
    return Stored(name, path, entry["dtype"], tuple(entry["shape"]), data_start + start, data_start + end)


def _wrong(entry: Any) -> tuple[str, str] | None:
    """Return what is wrong with an entry and the way out; None where nothing is."""
    if not isinstance(entry, dict):
        return "its entry is no JSON object", _AGAIN
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        return f"unknown dtype {short(dtype)}", "is it of a newer version of the format?"
    if not _sizes(shape) or len(shape) > MOST_AXES:
        return f"its shape {short(shape)} is none", _AGAIN
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"its data_offsets {short(offsets)} are none", _AGAIN
    held = offsets[1] - offsets[0]
    if BITS[dtype] * math.prod(shape) != 8 * held:
        return f"{held:,} bytes do not hold {short(f'{dtype} {shape}')}", _AGAIN
    return None


def _sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _check_contiguous(tensors: list[Stored], path: Path, start: int, size: int) -> None:
    end = start
    for tensor in tensors:
        if tensor.start != end:
            how = "overlaps the tensor before it" if tensor.start < end else f"leaves {tensor.start - end:,} bytes free"
            raise CheckpointError(f"{path}: tensor {short(tensor.name)} {how}", _AGAIN)
        end = tensor.end
    if end != size:
        how = f"ends {end - size:,} bytes before its tensors do" if end > size else f"goes on {size - end:,} bytes"
        raise CheckpointError(f"{path}: the file {how}", _AGAIN)
