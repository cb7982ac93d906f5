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
from pathlib import Path

from tiewise.checkpoint.ggml_types import BY_NUMBER, REMOVED
from tiewise.checkpoint.header import Stored
from tiewise.checkpoint.open_file import inside, open_regular
from tiewise.checkpoint.strict_json import short
from tiewise.checkpoint.window import DAMAGED, Window
from tiewise.core.errors import CheckpointError

MOST_KEYS, MOST_TENSORS, MOST_TEXTS = 10_000, 50_000, 2**22  # far above every file known; MOST_TEXTS in all arrays
MOST_NAME, MOST_AXES, KEPT_TEXT, MOST_PARTS = 1024, 4, 4096, 1000
TOKENS = "tokenizer.ggml.tokens"
TABLE, HEAD = "token_embd.weight", "output.weight"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9

Value = int | float | bool | str


@dataclass(frozen=True)
class Gguf:
    """One GGUF file, or all parts of a split one.

    Args:
        path: the file (of a split: the one that was given).
        version: 2 or 3.
        metadata: values by key; text is cut after 4096 bytes, arrays are left out.
        arrays: length of each array by key.
        tensors: by name; `dtype` is ggml's name for the type, `shape` is in numpy's order, [rows, width] for a table.
        size: bytes of the file (of a split: of all parts).
        parts: number of files that the model is split over, by `split.count`.
    """

    path: Path
    version: int
    metadata: dict[str, Value] = field(default_factory=dict)
    arrays: dict[str, int] = field(default_factory=dict)
    tensors: dict[str, Stored] = field(default_factory=dict)
    size: int = 0
    parts: int = 1

    @property
    def architecture(self) -> str:
        """`general.architecture`; "" where it is absent."""
        return str(self.metadata.get("general.architecture", ""))

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
    """Read a GGUF file; of one that is split, all parts beside it (`…-00001-of-00003.gguf`).

    Raises:
        CheckpointError: as `read_gguf`, a part is missing, or a tensor lies in two parts.
    """
    first = read_gguf(path)
    if first.parts == 1:
        return first
    names = _part_names(first)
    parts = [read_gguf(inside(first.path.parent, name)) for name in names]
    tensors: dict[str, Stored] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise CheckpointError(f"{part.path}: {short(name)} lies in {tensors[name].path.name} too", DAMAGED)
            tensors[name] = tensor
    return replace(parts[0], path=first.path, tensors=tensors, size=sum(part.size for part in parts))


def _part_names(first: Gguf) -> list[str]:
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", first.path.name, re.DOTALL)
    if match is None or int(match[2]) != first.parts:
        what = f"{first.path}: part of a model in {first.parts} files, and its name does not say which"
        raise CheckpointError(what, "give it its own name again: NAME-00001-of-0000N.gguf")
    return [f"{match[1]}-{number:05d}-of-{match[2]}.gguf" for number in range(1, first.parts + 1)]


def read_gguf(path: str | os.PathLike[str]) -> Gguf:
    """Read and check the header of one GGUF file.

    Raises:
        CheckpointError: the file cannot be read, is of another version or byte order, or breaks a rule of the format.
    """
    path = Path(path)
    descriptor = open_regular(path)
    try:
        return _Parser(Window(path, descriptor)).parse()
    finally:
        os.close(descriptor)


class _Parser:
    def __init__(self, window: Window) -> None:
        self.window = window
        self.path = window.path
        self.texts = 0
        self.metadata: dict[str, Value] = {}
        self.arrays: dict[str, int] = {}

    def parse(self) -> Gguf:
        version, tensors, keys = self._opening()
        for _ in range(keys):
            self._key_value()
        infos = [self._tensor_info() for _ in range(tensors)]
        align = self.metadata.get("general.alignment", 32)
        if type(align) is not int or align <= 0 or align & (align - 1):
            raise self._wrong(f"general.alignment is {short(align)}, which is no power of two")
        data = -(-self.window.at // align) * align if tensors else self.window.at
        stored = self._place(infos, data, align)
        parts = self.metadata.get("split.count", 1)
        if type(parts) is not int or not 0 <= parts <= MOST_PARTS:
            raise self._wrong(f"split.count is {short(parts)}")
        return Gguf(self.path, version, self.metadata, self.arrays, stored, self.window.size, max(1, parts))

    def _opening(self) -> tuple[int, int, int]:
        window = self.window
        if window.size < 24 or window.take(4, "the magic") != b"GGUF":
            raise CheckpointError(f"{self.path}: it does not begin as a GGUF file does", "give a .gguf file")
        raw = window.take(4, "the version")
        version = int.from_bytes(raw, "little")
        if version not in (2, 3):
            if int.from_bytes(raw, "big") in (2, 3):
                raise CheckpointError(f"{self.path}: a big-endian GGUF file", "convert it for a little-endian machine")
            raise CheckpointError(f"{self.path}: GGUF version {version:,}", "convert it again: 2 and 3 are read")
        tensors, keys = (self._number("<Q", "a count") for _ in range(2))
        # the least that a tensor and a key can take, so that no count is believed beyond the file
        if tensors > MOST_TENSORS or keys > MOST_KEYS or 24 * tensors + 13 * keys > window.left:
            raise self._wrong(f"it claims {tensors:,} tensors and {keys:,} keys in {window.size:,} bytes")
        return version, tensors, keys

    def _key_value(self) -> None:
        key = self._name("a key")
        if key in self.metadata or key in self.arrays:
            raise self._wrong(f"it names the key {short(key)} twice")
        kind = self._number("<I", f"the type of {short(key)}")
        if kind == _ARRAY:
            self.arrays[key] = self._array(f"array {short(key)}")
        elif kind == _TEXT:
            self.metadata[key] = self._text(f"text {short(key)}")
        elif kind in _SCALARS:
            self.metadata[key] = self._number(_SCALARS[kind], short(key))
        else:
            raise self._wrong(f"the key {short(key)} has the unknown type {kind:,}")

    def _array(self, what: str) -> int:
        """Pass an array; return its length."""
        kind, count = self._number("<I", what), self._number("<Q", what)
        if kind in _SCALARS:
            self.window.skip(count * struct.calcsize(_SCALARS[kind]), what)
        elif kind == _TEXT:
            self.texts += count
            if self.texts > MOST_TEXTS:
                raise self._wrong(f"{what} claims {count:,} texts")
            self.window.need(8 * count, what)
            self.window.skip_texts(count, what)
        else:
            inner = "an array of arrays" if kind == _ARRAY else f"elements of the unknown type {kind:,}"
            raise self._wrong(f"{what} holds {inner}, which no loader takes")
        return count

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._name("a tensor's name")
        what = f"tensor {short(name)}"
        axes = self._number("<I", what)
        if axes > MOST_AXES:
            raise self._wrong(f"{what} claims {axes:,} axes")
        shape = struct.unpack(f"<{axes}Q", self.window.take(8 * axes, what))[::-1]
        return name, shape, self._number("<I", what), self._number("<Q", what)

    def _place(self, infos: list[tuple[str, tuple[int, ...], int, int]], data: int, align: int) -> dict[str, Stored]:
        tensors: dict[str, Stored] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                raise self._wrong(f"it names the tensor {short(name)} twice")
            if offset % align:
                raise self._wrong(f"tensor {short(name)} begins at {offset:,}, no multiple of {align}")
            start = data + offset
            dtype, nbytes = self._size(name, shape, kind)
            if start + nbytes > self.window.size:
                over = start + nbytes - self.window.size
                raise self._wrong(f"the file ends {over:,} bytes before tensor {short(name)} does")
            tensors[name] = Stored(name, self.path, dtype, shape, start, start + nbytes)
        ordered = sorted((tensor for tensor in tensors.values() if tensor.nbytes), key=lambda tensor: tensor.start)
        for left, right in itertools.pairwise(ordered):
            if right.start < left.end:
                raise self._wrong(f"tensor {short(right.name)} overlaps tensor {short(left.name)}")
        return tensors

    def _size(self, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
        if kind not in BY_NUMBER:
            known = f"{REMOVED[kind]}, which ggml has removed" if kind in REMOVED else f"of the unknown type {kind:,}"
            fix = "convert it again; types of forks of llama.cpp are not known here"
            raise CheckpointError(f"{self.path}: tensor {short(name)} is {known}", fix)
        found = BY_NUMBER[kind]
        width = shape[-1] if shape else 1
        if width % found.block:
            raise self._wrong(
                f"tensor {short(name)} has rows of {width:,}, no multiple of {found.name}'s {found.block}"
            )
        return found.name, math.prod(shape) // found.block * found.nbytes

    def _name(self, what: str) -> str:
        length = self._number("<Q", what)
        if length > MOST_NAME:
            raise self._wrong(f"{what} at byte {self.window.at:,} claims {length:,} bytes")
        return self.window.take(length, what).decode("utf-8", "replace")

    def _text(self, what: str) -> str:
        length = self._number("<Q", what)
        self.window.need(length, what)
        kept = self.window.take(min(length, KEPT_TEXT), what)
        self.window.skip(length - len(kept), what)
        return kept.decode("utf-8", "replace")

    def _number(self, form: str, what: str) -> int:
        return struct.unpack(form, self.window.take(struct.calcsize(form), what))[0]

    def _wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}", DAMAGED)
