"""What an ONNX file says of itself, read without its tensors and without trust.

A model is a protocol buffer (onnx/onnx.proto): fields of a number, a kind and a value, messages among them. Its graph
is field 7; in that lie nodes (1), initialisers (5), inputs (11) and outputs (12), and within nodes graphs. All else is
passed over. A tensor's bytes lie in the file or in another one of its folder; where is kept, they are not read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
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
MOST_FIELDS, MOST_NAME, MOST_TEXT = 2_000_000, 4096, 2**27  # far above every model known
WINDOW_BYTES = 2**14  # of the file that are in memory
_TYPES = (
    "F32 U8 I8 U16 I16 I32 I64 - BOOL F16 F64 U32 U64 C64 C128 BF16 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ U4 I4 F4"
)
TYPES = dict(enumerate(_TYPES.split(), 1))
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
    tensors: dict[str, Stored]  # initialisers by name, those whose bytes lie in a row
    unfilled: tuple[str, ...]  # initialisers that declare a shape and have no data
    nodes: tuple[OnnxNode, ...]  # of all graphs
    known: frozenset[str]  # names of inputs and initialisers of all graphs
    inputs: tuple[str, ...]  # what whoever runs the model gives it
    outputs: tuple[str, ...]
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

    def matrices(self, names: list[str]) -> list[Stored]:
        """The initialisers of two axes or more behind some names."""
        found = (self.tensors.get(self.behind(name)) for name in names)
        return [one for one in found if one is not None and len(one.shape) > 1]

    @cached_property
    def table(self) -> Stored | None:
        """The table [V, …] of tokens: of all that an input other than positions picks rows of, the largest."""
        lookups = (node.inputs for node in self.nodes if node.operator in LOOKUPS and len(node.inputs) > 1)
        by = ((table, self.behind(ids)) for table, ids, *_ in lookups)
        tables = self.matrices([table for table, ids in by if ids in self.inputs and "position" not in ids])
        return max(tables, key=lambda one: math.prod(one.shape), default=None)

    @cached_property
    def heads(self) -> tuple[Stored, ...]:
        """What a product takes and has a row or a column for every token; the table itself where it is shared."""
        rows = None if self.table is None else self.table.rows
        taken = [name for node in self.nodes if node.operator in PRODUCTS for name in node.inputs[:2]]
        return tuple(dict.fromkeys(one for one in self.matrices(taken) if rows in (one.shape[0], one.shape[-1])))

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
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        try:
            return _Graph(Path(path), file.fileno()).read()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})", "check the disk") from None


class _Graph:
    """An open file, and what was found in it so far."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        self.window, self.begin = b"", 0
        self.fields_left, self.text_left = MOST_FIELDS, MOST_TEXT
        self.tensors: dict[str, Stored] = {}
        self.unfilled: list[str] = []
        self.known: set[str] = set()

    def read(self) -> OnnxFacts:
        size = os.fstat(self.descriptor).st_size
        waiting = [(start, end) for number, start, end in self.fields(0, size) if number == 7 and end >= 0]
        if len(waiting) != 1:
            raise self.wrong(f"it has {len(waiting)} graphs")
        nodes: list[OnnxNode] = []
        ends: dict[int, list[str]] = {11: [], 12: []}
        while waiting:  # the model's own graph is the first
            top = not self.known and not nodes
            for number, start, end in self.fields(*waiting.pop()):
                if number == 1:
                    nodes.append(self.node(start, end, waiting))
                elif number == 5:
                    self.initialiser(start, end)
                elif number in ends:
                    name = next((self.text(*at) for inner, *at in self.fields(start, end) if inner == 1), "")
                    ends[number] += [name] if top else []
                    self.known |= {name} if number == 11 else set()
        inputs = tuple(name for name in ends[11] if name not in self.tensors)
        found = self.tensors, tuple(self.unfilled), tuple(nodes), frozenset(self.known), inputs, tuple(ends[12])
        return OnnxFacts(self.path, *found)

    def node(self, start: int, end: int, waiting: list[tuple[int, int]]) -> OnnxNode:
        names: dict[int, list[str]] = {1: [], 2: [], 4: []}
        for number, a, b in self.fields(start, end):
            if number in names:
                names[number].append(self.text(a, b))
            elif number == 5:  # an attribute, whose fields 6 and 11 are graphs
                waiting += [(c, d) for inner, c, d in self.fields(a, b) if inner in (6, 11) and d >= 0]
        return OnnxNode("".join(names[4]), tuple(names[1]), tuple(names[2]))

    def initialiser(self, start: int, end: int) -> None:
        shape: list[int] = []
        kind, name, filled = 0, "", False
        data: list[tuple[int, int]] = []
        entries: dict[str, str] = {}
        for number, a, b in self.fields(start, end):
            if number == 1:
                shape += [a] if b < 0 else self.packed(a, b)
            elif number == 2:
                kind = a
            elif number == 8:
                name = self.text(a, b)
            elif number == 13:  # of data that lies elsewhere: location, offset, length
                entry = {inner: self.text(c, d) for inner, c, d in self.fields(a, b)}
                entries[entry.get(1, "")] = entry.get(2, "")
            elif number in (4, 9, 10):  # numbers as they lie in memory
                data.append((a, b))
            filled = filled or number in (4, 5, 6, 7, 9, 10, 11, 13)
        what, dtype = f"the tensor {short(name)}", TYPES.get(kind, "-")
        if len(shape) > MOST_AXES or any(length >= 2**63 for length in shape):
            raise self.wrong(f"{what} has the shape {short(shape)}")
        self.known.add(name)
        needed = -(-math.prod(shape) * _BITS.get(dtype, 0) // 8)
        if needed and not filled:
            self.unfilled.append(name)
        if not needed or not (entries or len(data) == 1):
            return  # texts, small integers of any length, and what is in pieces: no table
        path, (first, last) = self.path, data[0] if data else (0, 0)
        if entries:
            told = (entries.get("offset") or "0", entries.get("length") or str(needed))
            if not all(number.isascii() and number.isdigit() and len(number) < 20 for number in told):
                raise self.wrong(f"{what} lies at {short(told)}, which are no numbers of bytes")
            path, first = inside(path.parent, entries.get("location", "")), int(told[0])
            last = first + int(told[1])
            with os.fdopen(open_regular(path), "rb", buffering=0) as file:
                if last > (size := os.fstat(file.fileno()).st_size):
                    fix = "the file was cut short, or is of another export: take both again"
                    raise CheckpointError(f"{path}: it ends {last - size:,} bytes before {what} does", fix)
        if last - first != needed:
            raise self.wrong(f"{what} has {last - first:,} bytes, and {dtype} {shape} needs {needed:,}")
        self.tensors[name] = Stored(name, path, dtype, tuple(shape), first, last)

    def fields(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(number, where it begins, where it ends) of each field of a message; of a number its value, and -1."""
        while start < end:
            self.fields_left -= 1
            if self.fields_left < 0:
                raise self.wrong(f"it has more than {MOST_FIELDS:,} fields")
            tag, start = self.varint(start, end)
            if tag & 7 == 0:
                value, start = self.varint(start, end)
                yield tag >> 3, value, -1
                continue
            length, start = self.varint(start, end) if tag & 7 == 2 else ({1: 8, 5: 4}.get(tag & 7, 2**64), start)
            if length > end - start:
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
