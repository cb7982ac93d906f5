"""What a GGUF file says of itself, read without its tensors and without trust.

    "GGUF" │ version u32 │ tensors u64 │ keys u64 │ keys: name, type, value │ tensors: name, axes, type, offset │ data

Versions 2 and 3, little endian. Arrays (a vocabulary of 128k tokens, its merges) are passed over: their length is kept,
their elements are not. Every length is held against the bytes that are left before it is believed.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import struct
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import same_bytes
from tiewise.checkpoint.untrusted import inside, open_regular, short
from tiewise.core.errors import CheckpointError
from tiewise.core.long_work import doing

if TYPE_CHECKING:
    from tiewise.checkpoint.facts import Facts

DAMAGED = "the file is damaged or was cut short: download or convert it again"


@dataclass(frozen=True)
class GgmlType:
    """One type: `block` values of a row are kept in `nbytes` bytes."""

    name: str
    block: int
    nbytes: int

    @property
    def bits(self) -> float:
        """Bits of one value, its share of the block's scales included."""
        return 8 * self.nbytes / self.block


_ROWS = (
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (30, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
    (41, "Q1_0", 128, 18),
)
BY_NUMBER = {number: GgmlType(name, block, nbytes) for number, name, block, nbytes in _ROWS}
BY_NAME = {kind.name: kind for kind in BY_NUMBER.values()}
REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
REMOVED |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}


MOST_KEYS, MOST_TENSORS, MOST_TEXTS = 10_000, 50_000, 2**22  # far above every file known; MOST_TEXTS in all arrays
MOST_NAME, MOST_AXES, KEPT_TEXT, MOST_PARTS = 1024, 4, 4096, 1000
TOKENS = "tokenizer.ggml.tokens"
TABLE, HEAD = "token_embd.weight", "output.weight"

Value = int | float | bool | str


@dataclass(frozen=True)
class Gguf:
    """One GGUF file, or all parts of a split one."""

    path: Path  # the file (of a split: the one that was given)
    # values by key; text is cut after 4096 bytes, arrays are left out
    metadata: dict[str, Value] = field(default_factory=dict)
    arrays: dict[str, int] = field(default_factory=dict)  # length of each array by key
    # by name; `dtype` is ggml's name for the type, `shape` is in numpy's order, [rows, width] for a table
    tensors: dict[str, Stored] = field(default_factory=dict)
    size: int = 0  # bytes of the file (of a split: of all parts)
    parts: int = 1  # number of files that the model is split over, by `split.count`

    @property
    def table(self) -> Stored | None:
        """The input table [V, E]."""
        return self.tensors.get(TABLE)

    @property
    def head(self) -> Stored | None:
        """The output head [V, E]; None where the loader takes the table for it."""
        return self.tensors.get(HEAD)

    @property
    def tokens(self) -> int | None:
        """Tokens of the vocabulary that the file carries."""
        return self.arrays.get(TOKENS)


def open_gguf(path: str | os.PathLike[str]) -> Gguf:
    """Read a GGUF file; of one that is split, all parts beside it (`…-00001-of-00003.gguf`)."""
    first = read_gguf(path)
    if first.parts == 1:
        return first
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", first.path.name, re.DOTALL)
    if match is None or int(match[2]) != first.parts:
        what = f"{first.path}: part of a model in {first.parts} files, and its name does not say which"
        raise CheckpointError(what, "give it its own name again: NAME-00001-of-0000N.gguf")
    names = (f"{match[1]}-{number:05d}-of-{match[2]}.gguf" for number in range(1, first.parts + 1))
    parts = [read_gguf(inside(first.path.parent, name)) for name in names]
    tensors: dict[str, Stored] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part.path}: {short(name)} lies in {tensors[name].path.name} too", DAMAGED)
            tensors[name] = tensor
    return replace(parts[0], path=first.path, tensors=tensors, size=sum(part.size for part in parts))


def read_gguf(path: str | os.PathLike[str]) -> Gguf:
    """Read and check the header of one GGUF file."""
    path = Path(path)
    descriptor = open_regular(path)
    try:
        return _Header(path, descriptor).read()
    finally:
        os.close(descriptor)


WINDOW_BYTES = 2**18
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9


class _Header:
    """The place reached in the header of an open file, which passes through a small window."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.size = os.fstat(descriptor).st_size
        self.descriptor = descriptor
        self.at = self.start = 0  # the place, and that of the window's first byte
        self.window = b""
        self.texts = 0  # passed so far, in all arrays

    def read(self) -> Gguf:
        if self.size < 24 or self.take(4, "the magic") != b"GGUF":
            raise CheckpointError(f"{self.path}: it does not begin as a GGUF file does", "give a .gguf file")
        raw = self.take(4, "the version")
        version = int.from_bytes(raw, "little")
        if version not in (2, 3):
            if int.from_bytes(raw, "big") in (2, 3):
                raise CheckpointError(f"{self.path}: a big-endian GGUF file", "convert it for a little-endian machine")
            raise CheckpointError(f"{self.path}: GGUF version {version:,}", "convert it again: 2 and 3 are read")
        count, keys = (self.number("<Q", "a count") for _ in range(2))
        # the least that a tensor and a key can take, so that no count is believed beyond the file
        if count > MOST_TENSORS or keys > MOST_KEYS or 24 * count + 13 * keys > self.size - self.at:
            raise self.wrong(f"it claims {count:,} tensors and {keys:,} keys in {self.size:,} bytes")

        metadata: dict[str, Value] = {}
        arrays: dict[str, int] = {}
        for _ in range(keys):
            key = self.name("a key")
            if key in metadata or key in arrays:
                raise self.wrong(f"it names the key {short(key)} twice")
            kind = self.number("<I", f"the type of {short(key)}")
            if kind == _ARRAY:
                arrays[key] = self.pass_array(f"array {short(key)}")
            elif kind == _TEXT:
                length = self.number("<Q", f"text {short(key)}")
                self.need(length, f"text {short(key)}")
                metadata[key] = self.take(min(length, KEPT_TEXT), f"text {short(key)}").decode("utf-8", "replace")
                self.skip(length - min(length, KEPT_TEXT), f"text {short(key)}")
            elif kind in _SCALARS:
                metadata[key] = self.number(_SCALARS[kind], short(key))
            else:
                raise self.wrong(f"the key {short(key)} has the unknown type {kind:,}")

        infos = []
        for _ in range(count):
            name = self.name("a tensor's name")
            what = f"tensor {short(name)}"
            axes = self.number("<I", what)
            if axes > MOST_AXES:
                raise self.wrong(f"{what} claims {axes:,} axes")
            shape = struct.unpack(f"<{axes}Q", self.take(8 * axes, what))[::-1]
            infos.append((name, shape, self.number("<I", what), self.number("<Q", what)))
        tensors = self.placed(infos, metadata.get("general.alignment", 32))
        parts = metadata.get("split.count", 1)
        if type(parts) is not int or not 0 <= parts <= MOST_PARTS:
            raise self.wrong(f"split.count is {short(parts)}")
        return Gguf(self.path, metadata, arrays, tensors, self.size, max(1, parts))

    def placed(self, infos: list[tuple[str, tuple[int, ...], int, int]], align: Value) -> dict[str, Stored]:
        """The tensors behind the header, each within the file and apart from the others."""
        if type(align) is not int or align <= 0 or align & (align - 1):
            raise self.wrong(f"general.alignment is {short(align)}, which is no power of two")
        data = -(-self.at // align) * align
        tensors: dict[str, Stored] = {}
        for name, shape, kind, offset in infos:
            what = f"tensor {short(name)}"
            if name in tensors:
                raise self.wrong(f"it names the {what} twice")
            if offset % align:
                raise self.wrong(f"{what} begins at {offset:,}, no multiple of {align}")
            if kind not in BY_NUMBER:
                known = (
                    f"{REMOVED[kind]}, which ggml has removed" if kind in REMOVED else f"of the unknown type {kind:,}"
                )
                fix = "convert it again; types of forks of llama.cpp are not known here"
                raise CheckpointError(f"{self.path}: {what} is {known}", fix)
            held, width = BY_NUMBER[kind], shape[-1] if shape else 1
            if width % held.block:
                raise self.wrong(f"{what} has rows of {width:,}, no multiple of {held.name}'s {held.block}")
            end = data + offset + math.prod(shape) // held.block * held.nbytes
            if end > self.size:
                raise self.wrong(f"the file ends {end - self.size:,} bytes before {what} does")
            tensors[name] = Stored(name, self.path, held.name, shape, data + offset, end)
        ordered = sorted((tensor for tensor in tensors.values() if tensor.nbytes), key=lambda tensor: tensor.start)
        for left, right in itertools.pairwise(ordered):
            if right.start < left.end:
                raise self.wrong(f"tensor {short(right.name)} overlaps tensor {short(left.name)}")
        return tensors

    def pass_array(self, what: str) -> int:
        """Pass an array; return its length."""
        kind, count = self.number("<I", what), self.number("<Q", what)
        if kind in _SCALARS:
            self.skip(count * struct.calcsize(_SCALARS[kind]), what)
            return count
        if kind != _TEXT:
            inner = "an array of arrays" if kind == _ARRAY else f"elements of the unknown type {kind:,}"
            raise self.wrong(f"{what} holds {inner}, which no loader takes")
        self.texts += count
        if self.texts > MOST_TEXTS:
            raise self.wrong(f"{what} claims {count:,} texts")
        self.need(8 * count, what)
        unpack, left = struct.Struct("<Q").unpack_from, count  # each a length and that many bytes
        while left:
            self.fill(8, what)
            data, begin = self.window, self.at - self.start
            while left and begin <= len(data) - 8:
                begin += 8 + unpack(data, begin)[0]
                left -= 1
            self.skip(self.start + begin - self.at, what)
        return count

    def name(self, what: str) -> str:
        length = self.number("<Q", what)
        if length > MOST_NAME:
            raise self.wrong(f"{what} at byte {self.at:,} claims {length:,} bytes")
        return self.take(length, what).decode("utf-8", "replace")

    def number(self, form: str, what: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def take(self, count: int, what: str) -> bytes:
        """Return the next `count` bytes, at most WINDOW_BYTES of them."""
        self.fill(count, what)
        self.at += count
        return self.window[self.at - count - self.start : self.at - self.start]

    def skip(self, count: int, what: str) -> None:
        """Pass `count` bytes without reading them."""
        self.need(count, what)
        self.at += count

    def need(self, count: int, what: str) -> None:
        """Refuse `count` bytes for `what` where fewer are left."""
        if count > self.size - self.at:
            raise CheckpointError(f"{self.path}: {what} at byte {self.at:,} goes beyond the file's end", DAMAGED)

    def fill(self, count: int, what: str) -> None:
        """See that the next `count` bytes are in the window."""
        self.need(count, what)
        if self.at + count <= self.start + len(self.window):
            return
        try:
            self.start, self.window = self.at, os.pread(self.descriptor, WINDOW_BYTES, self.at)
        except OSError as error:
            what = f"{self.path}: cannot be read at byte {self.at:,} ({error.strerror})"
            raise CheckpointError(what, "check the disk") from None
        if len(self.window) < count:
            raise CheckpointError(f"{self.path}: it became shorter while {what} was read", "nothing else may write it")

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}", DAMAGED)


@dataclass(frozen=True)
class GgufFacts:
    """One GGUF file."""

    gguf: Gguf  # what it says of itself
    source: Facts | None = None  # the Hugging Face checkpoint that it was made from; None where none was given
    scan: bool = True  # tables may be read (False: headers only)

    @cached_property
    def equal(self) -> bool | None:
        """Whether `token_embd` and `output` hold the same bytes; None unless both are stored and may be read."""
        table, head = self.gguf.table, self.gguf.head
        if table is None or head is None or not self.scan:
            return None
        with doing("comparing the two tables", table.nbytes):
            return same_bytes(table, head)
