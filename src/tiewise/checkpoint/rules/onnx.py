"""What an ONNX file says of itself, read without its tensors and without trust, and what it keeps of the two ends.

B100 and B101. A model is a protocol buffer (onnx/onnx.proto): fields of a number, a kind and a value, messages among
them. Its graph is field 7; in that lie nodes (1), initialisers (5), inputs (11) and outputs (12), and within nodes
graphs. All else is passed over. A tensor's bytes lie in the file or in another one of its folder.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rules.rule import Said, Told, describe, names, rule
from tiewise.checkpoint.stored import BITS, MOST_AXES, Stored
from tiewise.checkpoint.table_scans import same_shared
from tiewise.checkpoint.untrusted import LFS_POINTER, inside, open_regular, refuse_pointer, short
from tiewise.core.errors import CheckpointError, doing
from tiewise.core.files import size

DAMAGED = "the file is damaged or was cut short, or is no ONNX model: export or download it again"
MOST_FIELDS, MOST_NAME, MOST_TEXT = 1_500_000, 4096, 2**27  # far above every model known
WINDOW_BYTES = 2**14  # of the file that are in memory
_TYPES = "F32 U8 I8 U16 I16 I32 I64 - BOOL F16 F64 U32 U64 C64 C128 BF16 F8_E4M3 F8_E4M3FNUZ F8_E5M2 F8_E5M2FNUZ"
TYPES = dict(enumerate([*_TYPES.split(), "U4", "I4", "F4"], 1))
_BITS = BITS | {"U4": 4, "I4": 4, "C128": 128}
LOOKUPS = ("Gather", "GatherBlockQuantized")
PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "MatMulNBits", "MatMulInteger", "DynamicQuantizeMatMul")
PICKS = ("Gather", "GatherElements", "GatherND", "Slice", "Split", "Expand", "Flatten")  # some of the same numbers
SAME_DATA = ("Transpose", "Reshape", "Cast", "CastLike", "Identity", "DequantizeLinear", "Squeeze", "Unsqueeze")
Span = tuple[int, int]


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
    nodes: tuple[OnnxNode, ...]  # of all graphs
    filled: frozenset[str]  # names of inputs, and of initialisers that have data, of all graphs
    inputs: tuple[str, ...]  # what whoever runs the model gives it
    outputs: tuple[str, ...]
    source: Facts | None = None  # the Hugging Face checkpoint; None where none was given
    scan: bool = True  # tables may be read (False: headers only)

    @cached_property
    def makers(self) -> dict[str, OnnxNode]:
        """{name: node that makes it}."""
        return {name: node for node in self.nodes for name in node.outputs}

    def behind(self, name: str, through: tuple[str, ...] = SAME_DATA) -> str:
        """The name whose numbers another stands for, in whatever layout and type, or `through` other operators."""
        for _ in range(MOST_AXES):
            maker = self.makers.get(name)
            if maker is None or maker.operator not in through or not maker.inputs:
                break
            name = maker.inputs[0]
        return name

    def matrices(self, found: list[str]) -> list[Stored]:
        """The initialisers of two axes or more behind some names."""
        stored = (self.tensors.get(self.behind(name)) for name in found)
        return [one for one in stored if one is not None and len(one.shape) > 1]

    @cached_property
    def table(self) -> Stored | None:
        """The table [V, …] of tokens: of all that an input other than positions picks rows of, the largest.

        Ids may be some of the input's: a decoder that runs token by token often picks the last one first.
        """
        lookups = (node.inputs for node in self.nodes if node.operator in LOOKUPS and len(node.inputs) > 1)
        by = ((table, self.behind(ids, SAME_DATA + PICKS)) for table, ids, *_ in lookups)
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
            refuse_pointer(path, os.pread(file.fileno(), len(LFS_POINTER), 0))
            return _Graph(Path(path), file.fileno()).read()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})", "check the disk") from None


class _Graph:
    """An open file, and what was found in it so far."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        self.window, self.begin = b"", 0
        self.fields_left, self.text_left = MOST_FIELDS, MOST_TEXT
        self.tensors, self.filled = dict[str, Stored](), set[str]()

    def read(self) -> OnnxFacts:
        waiting = self.message(0, os.fstat(self.descriptor).st_size)[7]
        if len(waiting) != 1:
            raise self.wrong(f"it has {len(waiting)} graphs")
        nodes: list[OnnxNode] = []
        ends: list[list[str]] = []  # inputs and outputs of the model's own graph, the first
        while waiting:
            parts = self.message(*waiting.pop())
            nodes += [self.node(*at, waiting) for at in parts[1]]
            for at in parts[5]:
                self.initialiser(*at)
            sparse = (value for at in parts[15] for value in self.message(*at)[1])
            self.filled.update(self.text(*at) for value in sparse for at in self.message(*value)[8])
            named = [[self.text(*name) for end in parts[n] for name in self.message(*end)[1]] for n in (11, 12)]
            self.filled.update(named[0])
            ends = ends or named
        inputs, outputs = tuple(name for name in ends[0] if name not in self.tensors), tuple(ends[1])
        return OnnxFacts(self.path, self.tensors, tuple(nodes), frozenset(self.filled), inputs, outputs)

    def node(self, start: int, end: int, waiting: list[Span]) -> OnnxNode:
        parts = self.message(start, end)
        for attribute in parts[5]:
            inner = self.message(*attribute)
            waiting += inner[6] + inner[11]  # its graphs
        takes, makes, operator = (tuple(self.text(*at) for at in parts[n]) for n in (1, 2, 4))
        return OnnxNode("".join(operator), takes, makes)

    def initialiser(self, start: int, end: int) -> None:
        parts = self.message(start, end)
        shape = [length for a, b in parts[1] for length in ([a] if b < 0 else self.packed(a, b))]
        kind, name = next((a for a, _ in parts[2]), 0), "".join(self.text(*at) for at in parts[8])
        pairs = (self.message(*at) for at in parts[13])  # of data that lies elsewhere: location, offset, length
        entries = dict(["".join(self.text(*text) for text in pair[n]) for n in (1, 2)] for pair in pairs)
        data = parts[4] + parts[9] + parts[10]  # numbers as they lie in memory
        filled = data or any(parts[n] for n in (5, 6, 7, 11, 13))
        what, dtype = f"the tensor {short(name)}", TYPES.get(kind, "-")
        if len(shape) > MOST_AXES or any(length >= 2**63 for length in shape):
            raise self.wrong(f"{what} has the shape {short(shape)}")
        needed = -(-math.prod(shape) * _BITS.get(dtype, 0) // 8)
        if filled or not needed:
            self.filled.add(name)
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
                refuse_pointer(path, os.pread(file.fileno(), len(LFS_POINTER), 0))
                if last > (there := os.fstat(file.fileno()).st_size):
                    fix = "the file was cut short, or is of another export: take both again"
                    raise CheckpointError(f"{path}: it ends {last - there:,} bytes before {what} does", fix)
        if last - first != needed:
            raise self.wrong(f"{what} has {last - first:,} bytes, and {dtype} {shape} needs {needed:,}")
        self.tensors[name] = Stored(name, path, dtype, tuple(shape), first, last)

    def message(self, start: int, end: int) -> defaultdict[int, list[Span]]:
        """{number of a field: where each of these begins and ends}; of a number its value, and -1."""
        found: defaultdict[int, list[Span]] = defaultdict(list)
        while start < end:
            self.fields_left -= 1
            if self.fields_left < 0:
                raise self.wrong(f"it has more than {MOST_FIELDS:,} fields")
            tag, start = self.varint(start, end)
            if tag & 7 == 0:
                value, start = self.varint(start, end)
                found[tag >> 3].append((value, -1))
                continue
            length, start = self.varint(start, end) if tag & 7 == 2 else ({1: 8, 5: 4}.get(tag & 7, 2**64), start)
            if length > end - start:
                raise self.wrong(f"its field at byte {start:,} goes beyond its message")
            found[tag >> 3].append((start, start + length))
            start += length
        return found

    def packed(self, start: int, end: int) -> list[int]:
        found: list[int] = []
        while start < end and len(found) <= MOST_AXES:
            value, start = self.varint(start, end)
            found.append(value)
        return found

    def varint(self, start: int, end: int) -> tuple[int, int]:
        """A number of seven bits a byte, and where it ends."""
        at, value = start - self.begin, 0
        if start < end and 0 <= at < len(self.window) and self.window[at] < 128:  # as nearly all are
            return self.window[at], start + 1
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


EXPORT = "export it again with one initialiser for both ends (onnxruntime-genai: shared_embeddings=true)"


@rule(
    "B100",
    "warning",
    "an ONNX file stores a shared table once",
    kind="onnx",
    reads="the table, and tensors of its size",
)
def onnx_shared(facts: OnnxFacts) -> Told:
    """Exporters write a tied model's table for the lookup and once more for the head: the same bytes, their transpose,
    or a quantised copy beside the full one. With one initialiser for both, Phi-4-mini went from 5.15 to 2.69 GB. An
    exporter that is told to share does so for a model of two tables too, and tokens are then looked up in the wrong one
    (onnxruntime-genai#2306). A quantised copy has other bytes: only the source (--beside) says that the two are one.
    What to do: export again, sharing where the model is tied and only there.
    Sources: onnxruntime-genai#1690; onnxruntime-genai#1885; onnxruntime-genai#2306; Olive#2240; mobius#154
    """
    table, heads, source = facts.table, facts.heads, facts.source
    if table is None:
        return
    if table in heads and source is not None and source.truth is False:
        what = f"{describe(table)} serves both ends, and its source has two tables"
        yield Said(short(table.name), what, "export it again without sharing", severity="error")
    if facts.copies:
        spare = size(sum(one.nbytes for one in facts.copies))
        what = f"{names([one.name for one in facts.copies])} repeats {describe(table)}: {spare} stored more than once"
        yield short(facts.copies[0].name), what, EXPORT
    others = [one for one in heads if (one.dtype, one.nbytes) != (table.dtype, table.nbytes)]
    if others and table not in heads and source is not None and source.tied:
        what = f"its source has one table, and the file has {describe(table)} ({size(table.nbytes)}) and"
        yield short(others[0].name), f"{what} {describe(others[0])} ({size(others[0].nbytes)})", EXPORT


@rule("B101", "error", "an exported model has its head", kind="onnx", reads="the graph")
def onnx_head(facts: OnnxFacts) -> Told:
    """A tied checkpoint stores no lm_head, and an exporter that looks for one by name leaves a weight without data, or
    a graph that ends at the hidden states, which is right for an embedding model alone.
    What to do: export again with a version that ties.
    Sources: mobius#295; mobius#671
    """
    fix = "export it again, by an exporter that ties or from a checkpoint that stores its head (tiewise untie)"
    asked = {name for name in facts.inputs if "lm_head" in name}  # of whoever runs the model
    filled = facts.filled.union(facts.makers, [""]) - asked
    lacking = {name: node.operator for node in facts.nodes for name in node.inputs if name not in filled}
    for name, operator in lacking.items():
        yield short(name), f"{short(operator)} takes {short(name)}, of which the file has no data", fix
    if facts.table is not None and not facts.heads and not lacking:
        what = f"{describe(facts.table)} is looked up in, and no product has {facts.table.rows:,} columns"
        promised = any("logits" in name for name in facts.outputs)
        fix = fix if promised else f"none for an embedding model; else {fix}"
        yield Said("graph", f"{what}: it ends at {names(facts.outputs)}", fix, severity=None if promised else "info")
