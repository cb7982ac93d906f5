"""What an ONNX file says of itself, read without its tensors and without trust.

A model is a protocol buffer: fields of a number, a kind and a value, messages among them. Of the messages these are
read: the graph (field 7 of the model) and the graphs within its nodes, their nodes (1: inputs 1, outputs 2, operator 4,
attributes 5), initialisers (5), inputs (11) and outputs (12) (onnx/onnx.proto). All else is passed over. A tensor's
bytes lie in the file or in another one of its folder; where is kept, as for every stored tensor, and they are not read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.stored import BITS, MOST_AXES, Stored
from tiewise.checkpoint.table_scans import same_shared
from tiewise.checkpoint.untrusted import inside, open_regular, short
from tiewise.core.errors import CheckpointError
from tiewise.core.long_work import doing

DAMAGED = "the file is damaged or was cut short, or is no ONNX model: export or download it again"
MOST_FIELDS, MOST_NAME, MOST_TEXT = 4_000_000, 4096, 2**27  # far above every model known
_TYPES = (
    "- F32 U8 I8 U16 I16 I32 I64 - BOOL F16 F64 U32 U64 C64 C128 BF16 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ U4 I4 F4"
)
NAMES = dict(enumerate(_TYPES.split()))
_BITS = BITS | {"U4": 4, "I4": 4, "C128": 128}
LOOKUPS = ("Gather", "GatherBlockQuantized")
PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "MatMulInteger", "DynamicQuantizeMatMul")
SAME_DATA = ("Transpose", "Reshape", "Cast", "CastLike", "Identity", "DequantizeLinear", "Squeeze", "Unsqueeze")


class OnnxNode(NamedTuple):
    """One operator, and the names of what it takes and makes."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class OnnxFacts:
    """One ONNX file, and the checkpoint that it was made from."""

    path: Path
    tensors: dict[str, Stored] = field(default_factory=dict)  # initialisers by name, those whose bytes lie in a row
    # initialisers that declare a shape and have no data: {name: what they declare}
    unfilled: dict[str, str] = field(default_factory=dict)
    nodes: tuple[OnnxNode, ...] = ()  # of all graphs
    given: frozenset[str] = frozenset()  # names of inputs and of all initialisers
    inputs: tuple[str, ...] = ()  # that whoever runs the model gives it
    outputs: tuple[str, ...] = ()
    source: Facts | None = None  # the Hugging Face checkpoint; None where none was given
    scan: bool = True  # tables may be read (False: headers only)

    @cached_property
    def makers(self) -> dict[str, OnnxNode]:
        """{name: node that makes it}."""
        return {name: node for node in self.nodes for name in node.outputs}

    def behind(self, name: str) -> str:
        """The name whose numbers another stands for, in whatever layout and type."""
        for _ in range(MOST_AXES):
            maker = self.makers.get(name)
            if maker is None or maker.operator not in SAME_DATA or not maker.inputs:
                break
            name = maker.inputs[0]
        return name

    @cached_property
    def table(self) -> Stored | None:
        """The table [V, …] that ids are looked up in: of all that an input other than positions picks rows of, the
        one of most numbers."""
        tables = [
            one
            for node in self.nodes
            if node.operator in LOOKUPS and len(node.inputs) > 1
            if (ids := self.behind(node.inputs[1])) in self.inputs and "position" not in ids
            if (one := self.tensors.get(self.behind(node.inputs[0]))) is not None and len(one.shape) > 1
        ]
        return max(tables, key=lambda one: math.prod(one.shape), default=None)

    @cached_property
    def heads(self) -> tuple[Stored, ...]:
        """Tensors with a row or a column for every token that a product takes; the table itself where it is shared."""
        rows = None if self.table is None else self.table.rows
        taken = (name for node in self.nodes if node.operator in PRODUCTS for name in node.inputs[:2])
        found = (self.tensors.get(self.behind(name)) for name in taken)
        stored = (one for one in found if one is not None and len(one.shape) > 1)
        return tuple(dict.fromkeys(one for one in stored if rows in (one.shape[0], one.shape[-1])))

    @cached_property
    def copies(self) -> tuple[Stored, ...]:
        """Other initialisers that hold the table's bytes, transposed or not; empty where tables may not be read."""
        table = self.table
        if table is None or not self.scan:
            return ()
        with doing(f"comparing {short(table.name)}", table.nbytes):
            return tuple(one for one in self.tensors.values() if one is not table and same_shared(table, one))


def read_onnx(path: str | os.PathLike[str]) -> OnnxFacts:
    """Read and check the graph of an ONNX file; the files that it names must be there, and long enough."""
    descriptor = open_regular(path)
    try:
        return _Graph(Path(path), descriptor).read()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})", "check the disk") from None
    finally:
        os.close(descriptor)


WINDOW_BYTES = 2**14  # of the file that are in memory


class _Graph:
    """An open file, and what was found in it so far."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        self.size = os.fstat(descriptor).st_size
        self.window, self.begin = b"", 0
        self.fields_left, self.text_left = MOST_FIELDS, MOST_TEXT
        self.sizes: dict[str, tuple[Path, int]] = {}  # of the files that hold data
        self.tensors: dict[str, Stored] = {}
        self.unfilled: dict[str, str] = {}
        self.given: set[str] = set()

    def read(self) -> OnnxFacts:
        waiting = [(start, end) for number, start, end in self.fields(0, self.size) if number == 7 and end >= 0]
        if len(waiting) != 1:
            raise self.wrong(f"it has {len(waiting)} graphs")
        nodes: list[OnnxNode] = []
        ends: dict[int, list[str]] = {11: [], 12: []}
        top = True
        while waiting:
            for number, start, end in self.fields(*waiting.pop()):
                if number == 1 and end >= 0:
                    nodes.append(self.node(start, end, waiting))
                elif number == 5 and end >= 0:
                    self.initialiser(start, end)
                elif number in ends and end >= 0:
                    name = next((self.text(*at) for n, *at in self.fields(start, end) if n == 1), "")
                    self.given |= {name} if number == 11 else set()
                    ends[number] += [name] if top else []
            top = False
        inputs = (name for name in ends[11] if name not in self.tensors)
        tensors, given = self.tensors, frozenset(self.given)
        return OnnxFacts(self.path, tensors, self.unfilled, tuple(nodes), given, tuple(inputs), tuple(ends[12]))

    def node(self, start: int, end: int, waiting: list[tuple[int, int]]) -> OnnxNode:
        names: dict[int, list[str]] = {1: [], 2: [], 4: []}
        for number, a, b in self.fields(start, end):
            if number in names:
                names[number].append(self.text(a, b))
            elif number == 5 and b >= 0:  # an attribute, whose fields 6 and 11 are graphs
                waiting += [(c, d) for inner, c, d in self.fields(a, b) if inner in (6, 11) and d >= 0]
        return OnnxNode("".join(names[4]), tuple(names[1]), tuple(names[2]))

    def initialiser(self, start: int, end: int) -> None:
        shape: list[int] = []
        kind, name, entries, filled = 0, "", {}, False
        data: list[tuple[int, int]] = []
        for number, a, b in self.fields(start, end):
            if number == 1:
                shape += [a] if b < 0 else self.packed(a, b)
            elif number == 2 and b < 0:
                kind = a
            elif number == 8:
                name = self.text(a, b)
            elif number == 13:
                entry = {inner: self.text(c, d) for inner, c, d in self.fields(a, b)}
                entries[entry.get(1, "")] = entry.get(2, "")
            elif number in (4, 9, 10) and b >= 0:  # numbers as they lie in memory
                data.append((a, b))
            filled = filled or number in (4, 5, 6, 7, 9, 10, 11, 13)
        what = f"the tensor {short(name)}"
        if len(shape) > MOST_AXES or any(length >= 2**63 for length in shape):
            raise self.wrong(f"{what} has the shape {short(shape)}")
        self.given.add(name)
        dtype = NAMES.get(kind, "-")
        needed = -(-math.prod(shape) * _BITS.get(dtype, 0) // 8)
        if not filled and needed:
            self.unfilled[name] = f"{dtype} {shape}"
        if not needed or not (entries or len(data) == 1):
            return  # texts, small integers of any length, and what is in pieces: no table
        path, (first, last) = self.path, data[0] if data else (0, 0)
        if entries:
            path, size = self.beside(entries.get("location", ""))
            first, length = (
                self.count(entries.get(key, ""), other) for key, other in (("offset", 0), ("length", needed))
            )
            last = first + length
            if last > size:
                fix = "the file was cut short, or is of another export: download both again"
                raise CheckpointError(f"{path}: it ends {last - size:,} bytes before {what} does", fix)
        if last - first != needed:
            raise self.wrong(f"{what} has {last - first:,} bytes, and {dtype} {shape} needs {needed:,}")
        self.tensors[name] = Stored(name, path, dtype, tuple(shape), first, last)

    def beside(self, name: str) -> tuple[Path, int]:
        """The file of the folder that holds data, and its size."""
        if name not in self.sizes:
            path = inside(self.path.parent, name)
            try:
                descriptor = open_regular(path)
            except CheckpointError as error:
                raise CheckpointError(f"{self.path}: its weights are not there: {error.what}", error.fix) from None
            self.sizes[name] = path, os.fstat(descriptor).st_size
            os.close(descriptor)
        return self.sizes[name]

    def count(self, text: str, absent: int) -> int:
        if text and not (text.isascii() and text.isdigit() and len(text) < 20):
            raise self.wrong(f"{short(text)} is no number of bytes")
        return int(text) if text else absent

    def fields(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(number, where it begins, where it ends) of each field of a message; a number's value, and -1."""
        while start < end:
            self.fields_left -= 1
            if self.fields_left < 0:
                raise self.wrong(f"it has more than {MOST_FIELDS:,} fields")
            tag, start = self.varint(start, end)
            kind = tag & 7
            if kind == 0:
                value, start = self.varint(start, end)
                yield tag >> 3, value, -1
                continue
            length = {1: 8, 5: 4}.get(kind)
            if kind == 2:
                length, start = self.varint(start, end)
            if length is None or length > end - start:
                raise self.wrong(f"its field at byte {start:,} goes beyond its message")
            yield tag >> 3, start, start + length
            start += length

    def packed(self, start: int, end: int) -> list[int]:
        found: list[int] = []
        while start < end and len(found) <= MOST_AXES:
            value, start = self.varint(start, end)
            found.append(value)
        return found

    def varint(self, start: int, end: int) -> tuple[int, int]:
        """A number of seven bits a byte, and where it ends."""
        value = 0
        for place, byte in enumerate(self.take(start, min(10, end - start))):
            value |= (byte & 127) << 7 * place
            if byte < 128:
                return value & (2**64 - 1), start + place + 1
        raise self.wrong(f"its number at byte {start:,} does not end")

    def text(self, start: int, end: int) -> str:
        self.text_left -= end - start
        if not 0 <= end - start <= MOST_NAME or self.text_left < 0:
            raise self.wrong(f"its text at byte {start:,} is none, or too long")
        return self.take(start, end - start).decode("utf-8", "replace")

    def take(self, start: int, count: int) -> bytes:
        """A few bytes, by way of the window."""
        if not self.begin <= start <= start + count <= self.begin + len(self.window):
            self.window, self.begin = os.pread(self.descriptor, max(count, WINDOW_BYTES), start), start
            if len(self.window) < count:
                raise CheckpointError(f"{self.path}: it became shorter while it was read", "nothing else may write it")
        return self.window[start - self.begin : start - self.begin + count]

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}", DAMAGED)
