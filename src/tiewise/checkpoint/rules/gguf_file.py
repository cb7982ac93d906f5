"""Reader of the headers of untrusted GGUF files: their metadata and the places of their tensors.

    "GGUF" │ version u32 │ tensors u64 │ keys u64 │ keys: name, type, value │ tensors: name, axes, type, offset │ data

Versions 2 and 3, little endian. The reader skips the elements of arrays (a vocabulary of 128k tokens, its merges) and
keeps their length. It compares every length with the bytes that are left before it believes it.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BufferedReader, RawIOBase
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.file_sources import FileSource, HubSource, LocalFile, OpenFile, read_beginning
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import same_bytes
from tiewise.checkpoint.untrusted import path_inside, short
from tiewise.core.errors import CheckpointError
from tiewise.core.files import read_packaged_json
from tiewise.core.progress import progress_of

DAMAGED = "download or convert it again: the file is damaged or was cut short"


class GgmlType(NamedTuple):
    """One ggml type: it stores `block` values of a row in `nbytes` bytes."""

    name: str
    block: int = 0  # 0 for a type that ggml has removed
    nbytes: int = 0

    @property
    def bits(self) -> float:
        """Return the bits of one value, its share of the block's scales included."""
        return 8 * self.nbytes / self.block


BY_NUMBER = {
    int(n): GgmlType(*entry) for n, entry in read_packaged_json("checkpoint/data/ggml_types.json")["types"].items()
}
BY_NAME = {ggml_type.name: ggml_type for ggml_type in BY_NUMBER.values()}

MOST_KEYS, MOST_TENSORS, MOST_TEXTS = (
    10_000,
    50_000,
    2**22,
)  # far above all real files; MOST_TEXTS limits all arrays together
MOST_NAME, MOST_AXES, TEXT_BYTES, MOST_PARTS = 1024, 4, 4096, 1000
TOKENS = "tokenizer.ggml.tokens"
TABLE, HEAD = "token_embd.weight", "output.weight"

Value = int | float | bool | str


@dataclass(frozen=True)
class GgufFacts:
    """One GGUF file, or all parts of a split one, and its source checkpoint."""

    path: Path  # the file; of a split model, the part that the caller named
    metadata: dict[str, Value] = field(default_factory=dict)  # text is cut after 4096 bytes, arrays are left out
    arrays: dict[str, int] = field(default_factory=dict)  # length of each array by key
    # by name; `dtype` is ggml's name for the type, `shape` is in numpy's order, [rows, width] for a table
    tensors: dict[str, Stored] = field(default_factory=dict)
    size: int = 0  # bytes of the file, or of all parts of a split model
    parts: int = 1  # number of files that the model is split over, by `split.count`
    source: Facts | None = None  # the Hugging Face checkpoint; None if the caller named none
    scan: bool = True  # True if tables may be read, False for headers only
    repository: HubSource | None = None  # repository of the Hub with the file; None for a file on disk

    @property
    def table(self) -> Stored | None:
        """Return the input table [V, E]."""
        return self.tensors.get(TABLE)

    @property
    def head(self) -> Stored | None:
        """Output table [V, E]; None if the loader uses the input table instead."""
        return self.tensors.get(HEAD)

    @property
    def tokens(self) -> int | None:
        """Return the number of tokens of the vocabulary that the file carries."""
        return self.arrays.get(TOKENS)

    @property
    def partial(self) -> bool:
        """Return whether the file is no whole model: an adapter, a projector, or a vocabulary alone."""
        if self.metadata.get("general.type") in ("adapter", "mmproj", "imatrix"):
            return True
        return not self.tensors or self.metadata.get("general.architecture") == "clip"

    @property
    def heads(self) -> tuple[Stored, ...]:
        """Output table, if it is stored."""
        if self.head is None:
            return ()
        return (self.head,)

    @property
    def copies(self) -> tuple[Stored, ...]:
        """Output table, if it repeats the input table."""
        return self.heads if self.equal else ()

    @cached_property
    def equal(self) -> bool | None:
        """Return whether `token_embd` and `output` hold the same bytes. None unless both are stored and may be read."""
        if self.table is None or self.head is None or not self.scan:
            return None
        with progress_of("comparing the two tables", self.table.nbytes):
            return same_bytes(self.table, self.head)


def open_gguf(path: str | os.PathLike[str]) -> GgufFacts:
    """Read a GGUF file, or all parts of a split one (`…-00001-of-00003.gguf`)."""
    folder = Path(path).parent
    return _with_all_parts(read_gguf(path), lambda name: read_gguf(path_inside(folder, name)))


def open_gguf_from(source: FileSource, name: str) -> GgufFacts:
    """Read a GGUF file of a source, or all parts of a split one."""
    return _with_all_parts(read_gguf_from(source, name), lambda part: read_gguf_from(source, part))


def _with_all_parts(first: GgufFacts, read_part: Callable[[str], GgufFacts]) -> GgufFacts:
    """Return a file, or all parts of the split model that it belongs to. `read_part` reads a part by its name."""
    if first.parts == 1:
        return first
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", first.path.name, re.DOTALL)
    if match is None or int(match[2]) != first.parts:
        problem = f"{first.path}: part of a model in {first.parts} files, and its name does not say which"
        raise CheckpointError(problem, "give it its own name again: NAME-00001-of-0000N.gguf")
    parts = []
    for number in range(1, first.parts + 1):
        name = f"{match[1]}-{number:05d}-of-{match[2]}.gguf"
        parts.append(read_part(name))
    nbytes = sum(part.size for part in parts)
    return replace(parts[0], path=first.path, tensors=_tensors_of_all(parts), size=nbytes)


def _tensors_of_all(parts: Iterable[GgufFacts]) -> dict[str, Stored]:
    """Return the tensors of all parts of a split model. No two parts may share a name."""
    tensors: dict[str, Stored] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part.path}: {short(name)} lies in {tensors[name].path.name} too", DAMAGED)
            tensors[name] = tensor
    return tensors


def read_gguf(path: str | os.PathLike[str]) -> GgufFacts:
    """Read and check the header of one GGUF file."""
    return _parse(LocalFile(Path(path)), None)


def read_gguf_from(source: FileSource, name: str) -> GgufFacts:
    """Read and check the header of one GGUF file of a source. Raises as `read_gguf` does."""
    return _parse(source.open(name), source)


def _parse(opened: OpenFile, source: FileSource | None) -> GgufFacts:
    """Read and check the header of an open file, and close it. `source` has the file; None if it is on disk."""
    with opened as file:
        read_beginning(file)
        return _Header(file, source).read()


class _FileStream(RawIOBase):
    """Open file as a stream for a `BufferedReader`."""

    def __init__(self, file: OpenFile) -> None:
        self.file, self.position = file, 0

    def readable(self) -> bool:
        """Return True: the stream can be read."""
        return True

    def seekable(self) -> bool:
        """Return True: every position can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with the next bytes of the file, and return their number."""
        count = max(0, min(len(buffer), self.file.size - self.position))
        self.file.read_into(memoryview(buffer)[:count], self.position)
        self.position += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move by `offset` bytes from `whence`, and return the new position."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.file.size}[whence]
        self.position = start + offset
        return self.position


WINDOW_BYTES = 2**18  # bytes of a header in memory
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9


class _TensorInfo(NamedTuple):
    """The entry of one tensor in a header."""

    name: str
    shape: tuple[int, ...]  # in numpy's order
    type_number: int  # number of its ggml type
    offset: int  # bytes from the start of the data

    @property
    def label(self) -> str:
        """Name of the tensor in error messages."""
        return f"tensor {short(self.name)}"


class _Header:
    """Header of an open file, and the reading position in it."""

    def __init__(self, file: OpenFile, source: FileSource | None) -> None:
        self.path, self.size, self.source = file.path, file.size, source
        self.file = BufferedReader(_FileStream(file), max(1, min(file.size, WINDOW_BYTES)))
        self.at = self.texts = 0  # bytes read; texts passed so far, in all arrays
        self.metadata = dict[str, Value]()
        self.arrays = dict[str, int]()

    def read(self) -> GgufFacts:
        """Read the whole header and place its tensors."""
        self.require_version()
        tensors, keys = self.u64("a count"), self.u64("a count")
        # the least that a tensor and a key can take, so that no count is believed beyond the file
        least = 24 * tensors + 13 * keys
        is_possible = tensors <= MOST_TENSORS and keys <= MOST_KEYS
        if not is_possible or least > self.size - self.at:
            raise self.wrong(f"it claims {tensors:,} tensors and {keys:,} keys in {self.size:,} bytes")
        for _ in range(keys):
            self.read_key()
        infos = [self.tensor_info() for _ in range(tensors)]
        placed = self.placed(infos)
        return GgufFacts(self.path, self.metadata, self.arrays, placed, self.size, self.parts())

    def require_version(self) -> None:
        """Read magic and version, and raise if this reader does not support them."""
        if self.size < 24 or self.take(4, "the magic") != b"GGUF":
            raise CheckpointError(f"{self.path}: it does not begin as a GGUF file does", "give a .gguf file")
        version = self.take(4, "the version")
        number = int.from_bytes(version, "little")
        if number in (2, 3):
            return
        if int.from_bytes(version, "big") in (2, 3):
            raise CheckpointError(f"{self.path}: a big-endian GGUF file", "convert it for a little-endian machine")
        raise CheckpointError(f"{self.path}: GGUF version {number:,}", "convert it again: 2 and 3 are read")

    def read_key(self) -> None:
        """Read one key with its value into `metadata`, or the length of its array into `arrays`."""
        key = self.name("a key")
        if key in self.metadata or key in self.arrays:
            raise self.wrong(f"it names the key {short(key)} twice")
        value_type = self.u32(f"the type of {short(key)}")
        if value_type == _ARRAY:
            self.arrays[key] = self.pass_array(f"array {short(key)}")
        elif value_type == _TEXT:
            self.metadata[key] = self.text(f"text {short(key)}")
        elif value_type in _SCALARS:
            self.metadata[key] = self.scalar(_SCALARS[value_type], short(key))
        else:
            raise self.wrong(f"the key {short(key)} has the unknown type {value_type:,}")

    def tensor_info(self) -> _TensorInfo:
        """Read the entry of one tensor."""
        name = self.name("a tensor's name")
        label = f"tensor {short(name)}"
        axes = self.u32(label)
        if axes > MOST_AXES:
            raise self.wrong(f"{label} claims {axes:,} axes")
        lengths = struct.unpack(f"<{axes}Q", self.take(8 * axes, label))
        return _TensorInfo(name, lengths[::-1], type_number=self.u32(label), offset=self.u64(label))

    def placed(self, infos: list[_TensorInfo]) -> dict[str, Stored]:
        """Return the tensors after the header; raise if one overlaps another or the file's end."""
        alignment = self.alignment()
        data = -(-self.at // alignment) * alignment  # first byte of all tensors
        tensors: dict[str, Stored] = {}
        for info in infos:
            if info.name in tensors:
                raise self.wrong(f"it names the {info.label} twice")
            if info.offset % alignment:
                raise self.wrong(f"{info.label} begins at {info.offset:,}, no multiple of {alignment}")
            tensors[info.name] = self.tensor(info, data + info.offset)
        self.refuse_overlap(tensors.values())
        return tensors

    def alignment(self) -> int:
        """Return the number that divides the offset of every tensor."""
        value = self.metadata.get("general.alignment", 32)
        if type(value) is int and value > 0 and value & (value - 1) == 0:
            return value
        raise self.wrong(f"general.alignment is {short(value)}, which is no power of two")

    def tensor(self, info: _TensorInfo, start: int) -> Stored:
        """Return one tensor; raise if its type is unknown or the file ends before it."""
        ggml_type = self.ggml_type(info)
        width = info.shape[-1] if info.shape else 1
        if width % ggml_type.block:
            raise self.wrong(f"{info.label} has rows of {width:,}, no multiple of {ggml_type.name}'s {ggml_type.block}")
        end = start + math.prod(info.shape) // ggml_type.block * ggml_type.nbytes
        if end > self.size:
            raise self.wrong(f"the file ends {end - self.size:,} bytes before {info.label} does")
        return Stored(info.name, self.path, ggml_type.name, info.shape, start, end, self.source)

    def ggml_type(self, info: _TensorInfo) -> GgmlType:
        """Return the type of a tensor; raise if ggml has no type of that number."""
        ggml_type = BY_NUMBER.get(info.type_number)
        if ggml_type is not None and ggml_type.block:
            return ggml_type
        how = f"of the unknown type {info.type_number:,}"
        if ggml_type is not None:
            how = f"{ggml_type.name}, which ggml has removed"
        remedy = "convert it again; types of forks of llama.cpp are not known here"
        raise CheckpointError(f"{self.path}: {info.label} is {how}", remedy)

    def refuse_overlap(self, tensors: Iterable[Stored]) -> None:
        """Raise if two tensors share a byte."""
        filled = [tensor for tensor in tensors if tensor.nbytes]
        filled.sort(key=attrgetter("start"))
        for left, right in itertools.pairwise(filled):
            if right.start < left.end:
                raise self.wrong(f"tensor {short(right.name)} overlaps tensor {short(left.name)}")

    def parts(self) -> int:
        """Return the number of files that the model is split over."""
        count = self.metadata.get("split.count", 1)
        if type(count) is int and 0 <= count <= MOST_PARTS:
            return max(1, count)
        raise self.wrong(f"split.count is {short(count)}")

    def pass_array(self, label: str) -> int:
        """Skip an array, and return its length."""
        value_type, count = self.u32(label), self.u64(label)
        if value_type in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[value_type]), label)
            return count
        if value_type == _ARRAY:
            raise self.wrong(f"{label} holds an array of arrays, which no loader takes")
        if value_type != _TEXT:
            raise self.wrong(f"{label} holds elements of the unknown type {value_type:,}, which no loader takes")
        self.texts += count
        if self.texts > MOST_TEXTS:
            raise self.wrong(f"{label} claims {count:,} texts")
        self.need(8 * count, label)
        self.pass_texts(count, label)
        return count

    def pass_texts(self, count: int, label: str) -> None:
        """Skip `count` texts; each is a length and that many bytes."""
        unpack, left = struct.Struct("<Q").unpack_from, count
        while left:
            # whole texts of the bytes that are in memory already cost no call of `read`
            window, begin = self.file.peek(), 0
            while left and begin <= len(window) - 8:
                begin += 8 + unpack(window, begin)[0]
                left -= 1
            if begin:
                self.skip(begin, label)
            else:  # the window ends within a length
                self.skip(self.u64(label), label)
                left -= 1

    def name(self, label: str) -> str:
        """Read a name of a key or tensor."""
        length = self.u64(label)
        if length > MOST_NAME:
            raise self.wrong(f"{label} at byte {self.at:,} claims {length:,} bytes")
        return self.take(length, label).decode("utf-8", "replace")

    def text(self, label: str) -> str:
        """Read the first bytes of a text and skip the rest."""
        length = self.u64(label)
        self.need(length, label)
        beginning = self.take(min(length, TEXT_BYTES), label).decode("utf-8", "replace")
        self.skip(max(0, length - TEXT_BYTES), label)
        return beginning

    def scalar(self, form: str, label: str) -> int | float | bool:
        """Read one value of a form of `struct`."""
        value: int | float | bool = struct.unpack(form, self.take(struct.calcsize(form), label))[0]
        return value

    def u32(self, label: str) -> int:
        """Read a whole number of four bytes."""
        return int.from_bytes(self.take(4, label), "little")

    def u64(self, label: str) -> int:
        """Read a whole number of eight bytes."""
        return int.from_bytes(self.take(8, label), "little")

    def take(self, count: int, label: str) -> bytes:
        """Return the next `count` bytes, a few thousand at most."""
        self.need(count, label)
        data = self.file.read(count)
        if len(data) < count:
            raise CheckpointError(f"{self.path}: it became shorter while {label} was read", "nothing else may write it")
        self.at += count
        return data

    def skip(self, count: int, label: str) -> None:
        """Pass over the next `count` bytes."""
        self.need(count, label)
        self.file.seek(count, os.SEEK_CUR)
        self.at += count

    def need(self, count: int, label: str) -> None:
        """Raise if fewer than `count` bytes are left."""
        if count > self.size - self.at:
            raise CheckpointError(f"{self.path}: {label} at byte {self.at:,} goes beyond the file's end", DAMAGED)

    def wrong(self, problem: str) -> CheckpointError:
        """Return the error of a damaged file."""
        return CheckpointError(f"{self.path}: {problem}", DAMAGED)
