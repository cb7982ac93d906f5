"""Tensors in a safetensors file: types, header, and rows.

    8 bytes: length n, little endian │ n bytes: JSON {name: {dtype, shape, data_offsets}, __metadata__} │ tensors

`read_header` accepts only a header whose tensors fill the file without gaps, from the first byte of data to the last.
So no later read can leave the file. `Reader` uses positioned reads into bounded buffers, never a memory map. If
another process truncates the file, a memory map kills its reader (SIGBUS), and a positioned read returns fewer bytes.
The file is on disk, or in a repository of the Hub.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeGuard

import numpy as np  # before ml_dtypes: its C part imports numpy, and prints the error if Ctrl-C interrupts that

# isort: split
import ml_dtypes
from numpy.typing import NDArray

from tiewise.checkpoint.file_sources import FileSource, LocalFile, OpenFile, read_beginning
from tiewise.checkpoint.untrusted import is_text_map, parse_json, short
from tiewise.core.errors import CheckpointError

# {type of the format: NumPy type}, for types with a NumPy equivalent
_NUMPY_TYPES: dict[str, Any] = {
    **{"I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"},
    **{"U8": "<u1", "U16": "<u2", "U32": "<u4", "U64": "<u8"},
    **{"F16": "<f2", "F32": "<f4", "F64": "<f8"},
    **{"BOOL": np.bool_, "C64": "<c8", "BF16": ml_dtypes.bfloat16, "F8_E8M0": ml_dtypes.float8_e8m0fnu},
    **{"F8_E5M2": ml_dtypes.float8_e5m2, "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz},
    **{"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz},
}
NUMPY: dict[str, np.dtype] = {name: np.dtype(type_code) for name, type_code in _NUMPY_TYPES.items()}
# bits of one element, for every type of the format
BITS = {name: 8 * dtype.itemsize for name, dtype in NUMPY.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
TORCH_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # {dtype in a config: type}
FLOATING = tuple(TORCH_TYPES.values())  # types of an unquantised table


def widened(values: NDArray[Any]) -> NDArray[np.float32] | NDArray[np.float64]:
    """Return floating values as fp32, or fp64 unchanged. No stored type is rounded."""
    return values if values.dtype == np.float64 else values.astype(np.float32, copy=False)


def rounded(values: NDArray[np.float64], dtype: str, lost: NDArray[np.float64] | float = 0.0) -> NDArray[Any]:
    """Return `values + lost` in a stored floating type, rounded once, to nearest even.

    `lost` is the rounding error of an addition in fp64: less than half a unit in the last place of `values`.
    """
    if dtype == "F64":
        return values
    values = _with_sticky_bit(values, lost)
    if dtype == "BF16":  # numpy casts through fp32 and would round twice
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)
        values = _with_sticky_bit(single, values - single)
    return values.astype(NUMPY[dtype])


def _with_sticky_bit(values: NDArray[Any], lost: NDArray[Any] | float) -> NDArray[Any]:
    """Set the last bit where `lost` is not zero. A narrowing cast then rounds correctly."""
    if not np.any(lost):  # nearly always: sums of two values of few bits are exact in fp64, and mostly in fp32
        return values
    even = values.view(f"i{values.itemsize}") & 1 == 0
    return np.where(even & (lost != 0), np.nextafter(values, np.copysign(np.inf, lost).astype(values.dtype)), values)


MOST_HEADER = 100_000_000  # bytes; the limit of the format
MOST_AXES = 64
_AGAIN = "download or write it again: the file is damaged or was cut short"


@dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    name: str
    path: Path  # the file
    dtype: str  # type of the format, such as "BF16"
    shape: tuple[int, ...]
    start: int  # offset of its first byte in the file
    end: int  # offset after its last byte
    source: FileSource | None = field(default=None, compare=False, repr=False)  # of the file; None: it is on disk

    def open(self) -> OpenFile:
        """Open the tensor's file."""
        if self.source is None:
            return LocalFile(self.path)
        return self.source.open(self.path.name)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes in the file."""
        return self.end - self.start

    @property
    def rows(self) -> int:
        """Return the length of the first axis; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        """Return the length of the last axis; 1 for a scalar."""
        return self.shape[-1] if self.shape else 1

    def read(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Return rows [start, stop) in the stored type. Use a `Reader` to read more than once."""
        with Reader(self) as reader:
            return reader.rows(start, stop)


@dataclass(frozen=True)
class Header:
    """Header of one file."""

    path: Path
    tensors: dict[str, Stored]  # by name, in the order of their bytes
    metadata: dict[str, str]  # `__metadata__`; empty if absent
    data_start: int  # offset of the first byte of data
    size: int  # bytes of the file


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointError: the file cannot be read, or its header contradicts the file.
    """
    return _parse_header(LocalFile(Path(path)), None)


def read_header_from(source: FileSource, name: str) -> Header:
    """Read and check the header of one safetensors file of a source. Raises as `read_header` does."""
    return _parse_header(source.open(name), source)


def _parse_header(opened: OpenFile, source: FileSource | None) -> Header:
    """Read and check the header of an open file, and close it."""
    with opened as file:
        path, size, text = file.path, file.size, _header_text(file)
    record = parse_json(text, f"{path}: header", unique=True)
    if not isinstance(record, dict):
        raise CheckpointError(f"{path}: its header is no JSON object", _AGAIN)
    metadata = _metadata(path, record)
    data_start = 8 + len(text)
    tensors = [_parse_entry(path, name, entry, data_start, source) for name, entry in record.items()]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    _require_contiguous(path, tensors, data_start, size)
    return Header(path, {tensor.name: tensor for tensor in tensors}, metadata, data_start, size)


def _header_text(file: OpenFile) -> bytes:
    """Return the JSON text of a file's header."""
    path, size = file.path, file.size
    if size < 8:
        raise CheckpointError(f"{path}: {size} bytes are no safetensors file", _AGAIN)
    length = int.from_bytes(read_beginning(file)[:8], "little")
    if length > MOST_HEADER or length > size - 8:
        problem = f"{path}: its header claims {length:,} bytes, and the file has {size:,}"
        raise CheckpointError(problem, f"if it is a safetensors file, {_AGAIN}")
    text = bytearray(length)
    file.read_into(memoryview(text), 8)
    return bytes(text)


def _metadata(path: Path, record: dict[str, Any]) -> dict[str, str]:
    """Remove `__metadata__` from a header's record and return it; empty if absent."""
    metadata = record.pop("__metadata__", None)
    if metadata is None:
        return {}
    if not is_text_map(metadata):
        raise CheckpointError(f"{path}: __metadata__ is no map from text to text", _AGAIN)
    return metadata


def _require_contiguous(path: Path, tensors: list[Stored], data_start: int, size: int) -> None:
    """Raise a CheckpointError unless sorted tensors fill the file from `data_start` to its end."""
    end = data_start
    for tensor in tensors:
        if tensor.start != end:
            how = "overlaps the tensor before it" if tensor.start < end else f"leaves {tensor.start - end:,} bytes free"
            raise CheckpointError(f"{path}: tensor {short(tensor.name)} {how}", _AGAIN)
        end = tensor.end
    if end > size:
        raise CheckpointError(f"{path}: the file ends {end - size:,} bytes before its tensors do", _AGAIN)
    if end < size:
        raise CheckpointError(f"{path}: the file has {size - end:,} bytes after its tensors", _AGAIN)


def _parse_entry(path: Path, name: str, entry: Any, data_start: int, source: FileSource | None) -> Stored:
    """Return the tensor that an entry of the header describes.

    Offsets in the entry count from `data_start`. `source` has the file; None if it is on disk.

    Raises:
        CheckpointError: a field is malformed, or the offsets do not match the type and shape.
    """
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: tensor {short(name)}: its entry is no JSON object", _AGAIN)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    remedy = _AGAIN
    if not isinstance(dtype, str) or dtype not in BITS:
        wrong, remedy = f"unknown dtype {short(dtype)}", "is it of a newer version of the format?"
    elif not _is_list_of_sizes(shape) or len(shape) > MOST_AXES:
        wrong = f"its shape {short(shape)} is none"
    elif not _is_list_of_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        wrong = f"its data_offsets {short(offsets)} are none"
    elif BITS[dtype] * math.prod(shape) != 8 * (offsets[1] - offsets[0]):
        wrong = f"{offsets[1] - offsets[0]:,} bytes do not hold {short(f'{dtype} {shape}')}"
    else:
        return Stored(name, path, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1], source)
    raise CheckpointError(f"{path}: tensor {short(name)}: {wrong}", remedy)


def _is_list_of_sizes(values: Any) -> TypeGuard[list[int]]:
    """Return whether a JSON value is a list of integers from 0 to 2**63 − 1."""
    if not isinstance(values, list):
        return False
    for value in values:
        if type(value) is not int:  # bool is an int too
            return False
        if not 0 <= value < 2**63:
            return False
    return True


CHUNK_BYTES = 4 * 2**20
DENSE = 3  # `take` reads a contiguous span if it uses at least one row in three of it


class Reader:
    """Open tensor, as a context manager. Rows are along the first axis; a row of a vector is one value."""

    def __init__(self, tensor: Stored) -> None:
        self.tensor = tensor
        self._file = tensor.open()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, error_type: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.__exit__(error_type, error, trace)

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row. A scalar and an empty tensor count as one row."""
        return self.tensor.nbytes // max(1, self.tensor.rows)

    def read_into(self, buffer: memoryview, offset: int = 0) -> None:
        """Fill `buffer` with the tensor's bytes from `offset` on."""
        self._file.read_into(buffer, self.tensor.start + offset)

    def rows(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Return rows [start, stop) in the stored type, as a new array."""
        tensor = self.tensor
        if tensor.dtype not in NUMPY:
            raise CheckpointError(f"{tensor.path}: {tensor.name} is packed ({tensor.dtype})", "dequantise it first")
        end = tensor.rows
        if stop is not None:
            end = min(stop, end)
        count = max(0, end - start)
        raw = bytearray(count * self.row_bytes)
        self.read_into(memoryview(raw), start * self.row_bytes)
        return np.frombuffer(raw, NUMPY[tensor.dtype]).reshape((count, *tensor.shape[1:]))

    def take(self, ids: NDArray[np.int64]) -> NDArray[Any]:
        """Return the rows `ids`, in this order and in the stored type, as a new array."""
        low, high = int(ids.min(initial=self.tensor.rows)), int(ids.max(initial=-1)) + 1
        if high - low <= DENSE * len(ids):
            rows = self.rows(low, high)
            if np.array_equal(ids, np.arange(low, high)):
                return rows
            return rows[ids - low]
        raw = self.raw_rows(ids)
        return np.frombuffer(raw, NUMPY[self.tensor.dtype]).reshape(len(ids), *self.tensor.shape[1:])

    def raw_rows(self, ids: NDArray[np.int64]) -> bytearray:
        """Return the bytes of the rows `ids` in this order, read one by one."""
        row_bytes = self.row_bytes
        raw = bytearray(len(ids) * row_bytes)
        for index in np.argsort(ids, kind="stable"):  # in file order, since a disk reads forward
            start = int(index) * row_bytes
            self.read_into(memoryview(raw)[start : start + row_bytes], int(ids[index]) * row_bytes)
        return raw

    def spans(self, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
        """Yield row ranges of about `chunk_bytes` each, in order."""
        step = max(1, chunk_bytes // max(1, self.row_bytes))
        for start in range(0, self.tensor.rows, step):
            yield start, min(start + step, self.tensor.rows)


def read_float64(tensor: Stored) -> NDArray[np.float64]:
    """Return all rows of a tensor in fp64."""
    return tensor.read().astype(np.float64)
