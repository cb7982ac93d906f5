"""Reader of untrusted ONNX files: the graph, and the offsets of its tensors.

A model is a protocol buffer (onnx/onnx.proto): fields of a number, a wire type and a value, messages among them. Its
graph is field 7; it holds nodes (1), initialisers (5), inputs (11) and outputs (12), and nodes hold graphs. The reader
skips all else. The bytes of a tensor are in the file itself or in another one of its folder.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.file_sources import (
    FileSource,
    HubSource,
    LocalFile,
    LocalFolder,
    OpenFile,
    read_beginning,
)
from tiewise.checkpoint.stored import BITS, MOST_AXES, Stored
from tiewise.checkpoint.table_scans import same_shared
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import progress_of

DAMAGED = "export or download it again: the file is damaged, cut short, or not ONNX"
MOST_FIELDS, MOST_NAME, MOST_TEXT = 1_500_000, 4096, 2**27  # far above all real models
_NUMBER = re.compile("[0-9]{1,19}")
WINDOW_BYTES = 2**14  # bytes of the file in memory
_TYPES = "F32 U8 I8 U16 I16 I32 I64 - BOOL F16 F64 U32 U64 C64 C128 BF16 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ"
TYPES = dict(enumerate([*_TYPES.split(), "U4", "I4", "F4"], 1))
_BITS = BITS | {"U4": 4, "I4": 4, "C128": 128}
LOOKUPS = ("Gather", "GatherBlockQuantized")
PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "MatMulInteger", "DynamicQuantizeMatMul")
PICKS = (
    "Gather",
    "GatherElements",
    "GatherND",
    "Slice",
    "Split",
    "Expand",
    "Flatten",
)  # operators whose output has some of the input's numbers
SAME_DATA = ("Transpose", "Reshape", "Cast", "CastLike", "Identity", "DequantizeLinear", "Squeeze", "Unsqueeze")

# numbers of the fields that are read, by message of onnx.proto
MODEL_GRAPH = 7
GRAPH_NODE, GRAPH_INITIALIZER, GRAPH_INPUT, GRAPH_OUTPUT, GRAPH_SPARSE_INITIALIZER = 1, 5, 11, 12, 15
NODE_INPUT, NODE_OUTPUT, NODE_OPERATOR, NODE_ATTRIBUTE = 1, 2, 4, 5
ATTRIBUTE_GRAPH, ATTRIBUTE_GRAPHS = 6, 11
VALUE_NAME = 1  # field of the name of an input or output
SPARSE_VALUES = 1
ENTRY_KEY, ENTRY_VALUE = 1, 2
TENSOR_AXES, TENSOR_TYPE, TENSOR_NAME, TENSOR_EXTERNAL = 1, 2, 8, 13
TENSOR_AS_IN_MEMORY = (4, 9, 10)  # float_data, raw_data, double_data
TENSOR_DATA = (*TENSOR_AS_IN_MEMORY, 5, 6, 7, 11, TENSOR_EXTERNAL)

# wire types of fields, the last three bits of a tag
VARINT, LENGTH_DELIMITED = 0, 2
FIXED_BYTES = {1: 8, 5: 4}

Span = tuple[int, int]  # start and end of a field's value; for a number, its value and -1
Fields = defaultdict[int, list[Span]]  # {number of a field: its spans} in one message


class OnnxNode(NamedTuple):
    """One operator, and the names of its inputs and outputs."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class OnnxFacts:
    """One ONNX file, and the checkpoint that it was made from."""

    path: Path
    tensors: dict[str, Stored]  # initialisers with contiguous bytes, by name
    nodes: tuple[OnnxNode, ...]  # nodes of all graphs
    filled: frozenset[str]  # names of inputs, and of initialisers that have data, of all graphs
    inputs: tuple[str, ...]  # inputs of the main graph that the caller provides, without initialisers
    outputs: tuple[str, ...]
    source: Facts | None = None  # the Hugging Face checkpoint; None if the caller named none
    scan: bool = True  # True if tables may be read, False for headers only
    repository: HubSource | None = None  # repository of the Hub with the file; None for a file on disk

    @cached_property
    def makers(self) -> dict[str, OnnxNode]:
        """{name of an output: the node that computes it}."""
        return {name: node for node in self.nodes for name in node.outputs}

    def source_name(self, name: str, through: tuple[str, ...] = SAME_DATA) -> str:
        """Return the name from which `through` operators compute `name`.

        By default, these operators change only layout or type.
        """
        for _ in range(MOST_AXES):  # bounded, since a damaged graph may have a cycle
            maker = self.makers.get(name)
            if maker is None or maker.operator not in through or not maker.inputs:
                break
            name = maker.inputs[0]
        return name

    def matrices(self, names: Iterable[str]) -> list[Stored]:
        """Return the initialisers with two or more axes from which some names are computed."""
        matrices = list[Stored]()
        for name in names:
            tensor = self.tensors.get(self.source_name(name))
            if tensor is not None and len(tensor.shape) > 1:
                matrices.append(tensor)
        return matrices

    @cached_property
    def table(self) -> Stored | None:
        """Return the table [V, …] of tokens: the largest that an input other than positions indexes.

        Ids may be some of the input's: a decoder that runs token by token often picks the last one first.
        """
        names = list[str]()
        for node in self.nodes:
            if node.operator in LOOKUPS and len(node.inputs) > 1:
                table, ids = node.inputs[:2]
                if self._are_ids(ids):
                    names.append(table)
        return max(self.matrices(names), key=_size, default=None)

    def _are_ids(self, name: str) -> bool:
        """Return whether a name has ids of an input, and no positions."""
        ids = self.source_name(name, SAME_DATA + PICKS)
        return ids in self.inputs and "position" not in ids

    @cached_property
    def heads(self) -> tuple[Stored, ...]:
        """Return the factors of products that have a row or column for every token."""
        if self.table is None:
            return ()
        factors = list[str]()
        for node in self.nodes:
            if node.operator in PRODUCTS:
                factors += node.inputs[:2]
        heads = dict[Stored, None]()  # in order, each once
        for matrix in self.matrices(factors):
            if self.table.rows in (matrix.shape[0], matrix.shape[-1]):
                heads[matrix] = None
        return tuple(heads)

    @cached_property
    def copies(self) -> tuple[Stored, ...]:
        """Other initialisers with the table's bytes, transposed or not.

        Empty if only headers may be read.
        """
        table = self.table
        if table is None or not self.scan:
            return ()
        with progress_of(f"comparing {short(table.name)}", table.nbytes):
            copies = list[Stored]()
            for tensor in self.tensors.values():
                if tensor is not table and same_shared(table, tensor):
                    copies.append(tensor)
            return tuple(copies)


def _size(tensor: Stored) -> int:
    """Return the number of a tensor's entries."""
    return math.prod(tensor.shape)


def read_onnx(path: str | os.PathLike[str]) -> OnnxFacts:
    """Read and check the graph of an ONNX file.

    The data files that it names must exist and be long enough.
    """
    return _parse(LocalFile(Path(path)), None)


def read_onnx_from(source: FileSource, name: str) -> OnnxFacts:
    """Read and check the graph of an ONNX file of a source. Raises as `read_onnx` does."""
    return _parse(source.open(name), source)


def _parse(opened: OpenFile, source: FileSource | None) -> OnnxFacts:
    """Read and check the graph of an open file, and close it. `source` has the file; None if it is on disk."""
    with opened as file:
        read_beginning(file)
        return _Graph(file, source).read()


class _Place(NamedTuple):
    """Location of a tensor's bytes in a file."""

    path: Path
    start: int
    end: int


class _Graph:
    """An open file, and the parts of its graphs that were read so far."""

    def __init__(self, file: OpenFile, source: FileSource | None) -> None:
        self.file, self.path, self.source = file, file.path, source
        self.folder = source or LocalFolder(file.path.parent)  # has the files with the bytes of external tensors
        self.window, self.begin = b"", 0  # some bytes of the file, and their offset
        self.fields_left, self.text_left = MOST_FIELDS, MOST_TEXT
        self.nodes = list[OnnxNode]()
        self.tensors, self.filled = dict[str, Stored](), set[str]()
        self.waiting = list[Span]()  # graphs inside nodes, not read yet

    def read(self) -> OnnxFacts:
        """Read the model's own graph, and then the graphs inside its nodes."""
        graphs = self.message(0, self.file.size)[MODEL_GRAPH]
        if len(graphs) != 1:
            raise self.wrong(f"it has {len(graphs)} graphs")
        names, outputs = self.read_graph(*graphs[0])
        while self.waiting:
            self.read_graph(*self.waiting.pop())
        inputs = tuple(name for name in names if name not in self.tensors)
        return OnnxFacts(self.path, self.tensors, tuple(self.nodes), frozenset(self.filled), inputs, outputs)

    def read_graph(self, start: int, end: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Read one graph, and return the names of its inputs and of its outputs."""
        graph = self.message(start, end)
        for span in graph[GRAPH_NODE]:
            self.nodes.append(self.node(*span))
        for span in graph[GRAPH_INITIALIZER]:
            self.read_initialiser(*span)
        for span in graph[GRAPH_SPARSE_INITIALIZER]:
            for values in self.message(*span)[SPARSE_VALUES]:
                self.filled.update(self.texts(self.message(*values)[TENSOR_NAME]))
        inputs, outputs = self.value_names(graph[GRAPH_INPUT]), self.value_names(graph[GRAPH_OUTPUT])
        self.filled.update(inputs)
        return inputs, outputs

    def value_names(self, spans: list[Span]) -> tuple[str, ...]:
        """Return the names of inputs or outputs of a graph."""
        names = list[str]()
        for span in spans:
            names += self.texts(self.message(*span)[VALUE_NAME])
        return tuple(names)

    def node(self, start: int, end: int) -> OnnxNode:
        """Read one node, and record the graphs of its attributes."""
        fields = self.message(start, end)
        for span in fields[NODE_ATTRIBUTE]:
            attribute = self.message(*span)
            self.waiting += attribute[ATTRIBUTE_GRAPH] + attribute[ATTRIBUTE_GRAPHS]
        inputs, outputs = self.texts(fields[NODE_INPUT]), self.texts(fields[NODE_OUTPUT])
        return OnnxNode(self.joined(fields[NODE_OPERATOR]), inputs, outputs)

    def read_initialiser(self, start: int, end: int) -> None:
        """Record that a name has data, and the location of its bytes if contiguous."""
        fields = self.message(start, end)
        shape = self.shape(fields[TENSOR_AXES])
        dtype = self.dtype(fields[TENSOR_TYPE])
        name = self.joined(fields[TENSOR_NAME])
        entries = self.entries(fields[TENSOR_EXTERNAL])
        label = f"the tensor {short(name)}"
        if len(shape) > MOST_AXES or max(shape, default=0) >= 2**63:
            raise self.wrong(f"{label} has the shape {short(shape)}")

        bits = math.prod(shape) * _BITS.get(dtype, 0)
        needed = -(-bits // 8)  # rounded up
        if needed == 0:
            self.filled.add(name)
            return
        if any(fields[field] for field in TENSOR_DATA):
            self.filled.add(name)
        if entries:
            place: _Place | None = self.external(entries, needed, label)
        else:
            place = self.inline(fields)
        if place is None:
            return
        if place.end - place.start != needed:
            raise self.wrong(f"{label} has {place.end - place.start:,} bytes, and {dtype} {shape} needs {needed:,}")
        self.tensors[name] = Stored(name, place.path, dtype, tuple(shape), place.start, place.end, self.source)

    def inline(self, fields: Fields) -> _Place | None:
        """Return the place of a tensor in the file itself.

        None for texts, small integers of any length, and data in pieces, which are no table.
        """
        spans = list[Span]()
        for field in TENSOR_AS_IN_MEMORY:
            spans += fields[field]
        if len(spans) != 1:
            return None
        return _Place(self.path, *spans[0])

    def dtype(self, spans: list[Span]) -> str:
        """Return the name of a tensor's type; "-" for an unknown one."""
        if not spans:
            return "-"
        number, _ = spans[0]
        return TYPES.get(number, "-")

    def shape(self, spans: list[Span]) -> list[int]:
        """Return the lengths of a tensor's axes, which are single numbers or packed ones."""
        lengths = list[int]()
        for first, second in spans:
            if second < 0:
                lengths.append(first)
            else:
                lengths += self.packed(first, second)
        return lengths

    def entries(self, spans: list[Span]) -> dict[str, str]:
        """Return the keys and values that place a tensor in another file: location, offset, length."""
        entries = dict[str, str]()
        for span in spans:
            entry = self.message(*span)
            key = self.joined(entry[ENTRY_KEY])
            entries[key] = self.joined(entry[ENTRY_VALUE])
        return entries

    def external(self, entries: dict[str, str], needed: int, label: str) -> _Place:
        """Return the place of a tensor in another file, which must contain it whole.

        If `entries` give no length, it is `needed`. `read_initialiser` compares a given length with `needed`.
        """
        offset, length = entries.get("offset") or "0", entries.get("length") or str(needed)
        for number in (offset, length):
            if not _NUMBER.fullmatch(number):
                raise self.wrong(f"{label} lies at {short((offset, length))}, which are no numbers of bytes")
        start = int(offset)
        end = start + int(length)
        with self.folder.open(entries.get("location", "")) as file:
            read_beginning(file)
            path, nbytes = file.path, file.size
        if end > nbytes:
            remedy = "the file was cut short, or is of another export: take both again"
            raise CheckpointError(f"{path}: it ends {end - nbytes:,} bytes before {label} does", remedy)
        return _Place(path, start, end)

    def message(self, start: int, end: int) -> Fields:
        """Return the fields of a message by number."""
        fields: Fields = defaultdict(list)
        while start < end:
            self.fields_left -= 1
            if self.fields_left < 0:
                raise self.wrong(f"it has more than {MOST_FIELDS:,} fields")
            tag, start = self.varint(start, end)
            wire_type = tag & 7
            if wire_type == VARINT:
                value, start = self.varint(start, end)
                fields[tag >> 3].append((value, -1))
                continue
            if wire_type == LENGTH_DELIMITED:
                length, start = self.varint(start, end)
            else:
                length = FIXED_BYTES.get(wire_type, 2**64)  # an unknown wire type exceeds the message
            if length > end - start:
                raise self.wrong(f"its field at byte {start:,} goes beyond its message")
            fields[tag >> 3].append((start, start + length))
            start += length
        return fields

    def packed(self, start: int, end: int) -> list[int]:
        """Return numbers that follow one another, one more than a shape may have at most."""
        values: list[int] = []
        while start < end and len(values) <= MOST_AXES:
            value, start = self.varint(start, end)
            values.append(value)
        return values

    def varint(self, start: int, end: int) -> tuple[int, int]:
        """Return a number of seven bits a byte, and where it ends."""
        at, value = start - self.begin, 0
        if start < end and 0 <= at < len(self.window) and self.window[at] < 128:  # nearly all are one byte
            return self.window[at], start + 1
        for place, byte in enumerate(self.take(start, min(10, end - start))):
            value |= (byte & 127) << 7 * place
            if byte < 128:
                return value & (2**64 - 1), start + place + 1
        raise self.wrong(f"its number at byte {start:,} does not end")

    def texts(self, spans: list[Span]) -> tuple[str, ...]:
        """Return the texts of some fields."""
        return tuple(self.text(*span) for span in spans)

    def joined(self, spans: list[Span]) -> str:
        """Return the text of a field that a message has once at most."""
        return "".join(self.texts(spans))

    def text(self, start: int, end: int) -> str:
        """Return the text of a field; a number in its place is an error."""
        self.text_left -= end - start
        if not 0 <= end - start <= MOST_NAME or self.text_left < 0:
            raise self.wrong(f"its text at byte {start:,} is none, or too long")
        return self.take(start, end - start).decode("utf-8", "replace")

    def take(self, start: int, count: int) -> bytes:
        """Return a few bytes, from the window where it holds them."""
        if not self.begin <= start <= start + count <= self.begin + len(self.window):
            window = bytearray(min(max(count, WINDOW_BYTES), self.file.size - start))
            self.file.read_into(memoryview(window), start)
            self.window, self.begin = bytes(window), start
        return self.window[start - self.begin : start - self.begin + count]

    def wrong(self, problem: str) -> CheckpointError:
        """Return the error of a damaged file."""
        return CheckpointError(f"{self.path}: {problem}", DAMAGED)
