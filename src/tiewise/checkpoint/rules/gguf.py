"""What a GGUF file says of itself, read without its tensors and without trust, and what it keeps of the boundary.

    "GGUF" │ version u32 │ tensors u64 │ keys u64 │ keys: name, type, value │ tensors: name, axes, type, offset │ data

B070 and B071. Versions 2 and 3, little endian. Arrays (a vocabulary of 128k tokens, its merges) are passed over: their
length is kept, their elements are not. Every length is held against the bytes that are left before it is believed.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import struct
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BufferedReader, FileIO
from pathlib import Path
from typing import NamedTuple

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rules.rule import Said, Told, describe, difference, rule
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.table_scans import same_bytes
from tiewise.checkpoint.untrusted import LFS_POINTER, inside, open_regular, refuse_pointer, short
from tiewise.core.errors import CheckpointError, doing
from tiewise.core.files import packaged_json, size

DAMAGED = "the file is damaged or was cut short: download or convert it again"


class GgmlType(NamedTuple):
    """One type: `block` values of a row are kept in `nbytes` bytes."""

    name: str
    block: int = 0  # 0 of a type that ggml has removed
    nbytes: int = 0

    @property
    def bits(self) -> float:
        """Bits of one value, its share of the block's scales included."""
        return 8 * self.nbytes / self.block


BY_NUMBER = {int(n): GgmlType(*entry) for n, entry in packaged_json("checkpoint/data/ggml_types.json")["types"].items()}
BY_NAME = {kind.name: kind for kind in BY_NUMBER.values()}

MOST_KEYS, MOST_TENSORS, MOST_TEXTS = 10_000, 50_000, 2**22  # far above every file known; MOST_TEXTS in all arrays
MOST_NAME, MOST_AXES, KEPT_TEXT, MOST_PARTS = 1024, 4, 4096, 1000
TOKENS = "tokenizer.ggml.tokens"
TABLE, HEAD = "token_embd.weight", "output.weight"

Value = int | float | bool | str


@dataclass(frozen=True)
class GgufFacts:
    """One GGUF file, or all parts of a split one, and the checkpoint that it was made from."""

    path: Path  # the file (of a split: the one that was given)
    metadata: dict[str, Value] = field(default_factory=dict)  # text is cut after 4096 bytes, arrays are left out
    arrays: dict[str, int] = field(default_factory=dict)  # length of each array by key
    # by name; `dtype` is ggml's name for the type, `shape` is in numpy's order, [rows, width] for a table
    tensors: dict[str, Stored] = field(default_factory=dict)
    size: int = 0  # bytes of the file (of a split: of all parts)
    parts: int = 1  # number of files that the model is split over, by `split.count`
    source: Facts | None = None  # the Hugging Face checkpoint; None where none was given
    scan: bool = True  # tables may be read (False: headers only)

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

    @property
    def partial(self) -> bool:
        """Whether the file is no model of its own: an adapter, a projector, or a vocabulary without tensors."""
        kind, architecture = (self.metadata.get(f"general.{key}") for key in ("type", "architecture"))
        return kind in ("adapter", "mmproj", "imatrix") or not self.tensors or architecture == "clip"

    @property
    def heads(self) -> tuple[Stored, ...]:
        """The output head, where it is stored."""
        return () if self.head is None else (self.head,)

    @property
    def copies(self) -> tuple[Stored, ...]:
        """The output head, where it repeats the table."""
        return self.heads if self.equal else ()

    @cached_property
    def equal(self) -> bool | None:
        """Whether `token_embd` and `output` hold the same bytes; None unless both are stored and may be read."""
        if self.table is None or self.head is None or not self.scan:
            return None
        with doing("comparing the two tables", self.table.nbytes):
            return same_bytes(self.table, self.head)


def open_gguf(path: str | os.PathLike[str]) -> GgufFacts:
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


def read_gguf(path: str | os.PathLike[str]) -> GgufFacts:
    """Read and check the header of one GGUF file."""
    with BufferedReader(FileIO(open_regular(path)), WINDOW_BYTES) as file:
        header = _Header(Path(path), file)
        try:
            refuse_pointer(path, os.pread(file.fileno(), len(LFS_POINTER), 0))
            return header.read()
        except OSError as error:
            what = f"{path}: cannot be read at byte {header.at:,} ({error.strerror})"
            raise CheckpointError(what, "check the disk") from None


WINDOW_BYTES = 2**18  # of a header that are in memory
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_TEXT, _ARRAY = 8, 9


class _Header:
    """The header of an open file, and the place reached in it."""

    def __init__(self, path: Path, file: BufferedReader[FileIO]) -> None:
        self.path, self.file, self.size = path, file, os.fstat(file.fileno()).st_size
        self.at = self.texts = 0  # bytes read; texts passed so far, in all arrays

    def read(self) -> GgufFacts:
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

        metadata, arrays = dict[str, Value](), dict[str, int]()
        for _ in range(keys):
            key = self.name("a key")
            if key in metadata or key in arrays:
                raise self.wrong(f"it names the key {short(key)} twice")
            kind = self.number("<I", f"the type of {short(key)}")
            if kind == _ARRAY:
                arrays[key] = self.pass_array(f"array {short(key)}")
            elif kind == _TEXT:
                what = f"text {short(key)}"
                length = self.number("<Q", what)
                self.need(length, what)
                metadata[key] = self.take(min(length, KEPT_TEXT), what).decode("utf-8", "replace")
                self.skip(max(0, length - KEPT_TEXT), what)
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
        return GgufFacts(self.path, metadata, arrays, tensors, self.size, max(1, parts))

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
            held, width = BY_NUMBER.get(kind), shape[-1] if shape else 1
            if held is None or not held.block:
                how = f"of the unknown type {kind:,}" if held is None else f"{held.name}, which ggml has removed"
                fix = "convert it again; types of forks of llama.cpp are not known here"
                raise CheckpointError(f"{self.path}: {what} is {how}", fix)
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
            window, begin = self.file.peek(), 0  # what is in memory already: most texts cost no call
            while left and begin <= len(window) - 8:
                begin += 8 + unpack(window, begin)[0]
                left -= 1
            if begin:
                self.skip(begin, what)
            else:  # the window ends within a length
                self.skip(self.number("<Q", what), what)
                left -= 1
        return count

    def name(self, what: str) -> str:
        length = self.number("<Q", what)
        if length > MOST_NAME:
            raise self.wrong(f"{what} at byte {self.at:,} claims {length:,} bytes")
        return self.take(length, what).decode("utf-8", "replace")

    def number(self, form: str, what: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def take(self, count: int, what: str) -> bytes:
        """Return the next `count` bytes, a few thousand at most."""
        self.need(count, what)
        data = self.file.read(count)
        if len(data) < count:
            raise CheckpointError(f"{self.path}: it became shorter while {what} was read", "nothing else may write it")
        self.at += count
        return data

    def skip(self, count: int, what: str) -> None:
        self.need(count, what)
        self.file.seek(count, os.SEEK_CUR)
        self.at += count

    def need(self, count: int, what: str) -> None:
        if count > self.size - self.at:
            raise CheckpointError(f"{self.path}: {what} at byte {self.at:,} goes beyond the file's end", DAMAGED)

    def wrong(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}", DAMAGED)


CONVERT = "convert the checkpoint again with convert_hf_to_gguf.py"


@rule("B070", "error", "a GGUF file keeps its source's two ends", kind="gguf")
def gguf_ends(facts: GgufFacts) -> Told:
    """llama.cpp looks for output.weight, and takes token_embd.weight in its place where the file has none: right for a
    tied model, silently wrong for one whose head was trained on its own. Whether a converter writes the head depends on
    the architecture: Gemma 2's skips lm_head by name even where it differs, Gemma 3's keeps it since 2025. The other
    way round, an architecture whose loader never learned to do without output.weight refuses a tied file (EXAONE,
    ChatGLM, Qwen 3 MoE and GPT-2 did until each was fixed), so older files of these hold a copy. The rows of both
    tables must equal the length of tokenizer.ggml.tokens, or the loader refuses their shape.
    What to do: set the flag of the source by its tensors (B012, B021), then convert again with a converter of today.
    Sources: llama.cpp#9065; llama.cpp#12506; llama.cpp#12483; llama.cpp#12567; llama.cpp#11345; llama.cpp#13768;
    llama.cpp#13328; llama.cpp#12456
    """
    table, head, tokens, source = facts.table, facts.head, facts.tokens, facts.source
    if facts.partial:
        return
    if table is None:
        if tokens is not None:
            what = f"it carries {tokens:,} tokens and no {TABLE}"
            yield Said(short(facts.path.name), what, CONVERT, severity="fatal")
        return
    for end in (table, head):
        if end is not None and tokens is not None and end.rows != tokens:
            what = f"{describe(end)} has {end.rows:,} rows, and {TOKENS} has {tokens:,} entries"
            yield end.name, what, f"give the tokenizer as many entries as rows, and {CONVERT}"
    if source is None or source.quantised or source.roles.input is None:
        return
    stored, own = source.roles.input, source.roles.output
    if len(stored.shape) == 2 and table.shape != stored.shape:
        what = f"it stores {describe(table)}, and its source {describe(stored)}"
        padded = table.shape[1:] == stored.shape[1:] and table.rows < stored.rows
        fix = "nothing, where the rows beyond the tokens are padding" if padded else CONVERT
        yield Said(TABLE, what, fix, severity="warning" if padded else "error")
    if head is not None or own is None or source.claims.t5_like or (source.ends is not None and source.ends.equal):
        return
    if source.ends is None and stored.shape == own.shape:
        what = f"it stores no {HEAD}; its source stores {describe(own)}, which was not compared with the table"
        yield Said(HEAD, what, "check with the tables read", severity="warning")
        return
    how = difference(source.ends) if source.ends is not None else f"of another shape than {describe(stored)}"
    what = f"it stores no {HEAD}, so that {TABLE} answers for it; its source stores {describe(own)}: {how}"
    untie = "set tie_word_embeddings to false in the source's config.json"
    yield HEAD, what, f"{untie}, and {CONVERT} of today: older ones skip the head by name"


@rule("B071", "warning", "a GGUF file stores a shared table once, and finely enough", kind="gguf")
def gguf_types(facts: GgufFacts) -> Told:
    """Converters used to write a tied table twice, once as output.weight; loaders need only token_embd.weight. A table
    that serves both ends is the head too, which suffers more from rounding than other tensors: llama-quantize gives it
    at least Q6_K of its own accord. For Gemma 2B in Q4_K_M a perplexity of 9.68 was measured with the table in Q6_K,
    and of 9.48 in Q8_0 (llama.cpp#5650). A shared table below Q6_K was asked for by hand, or comes from an old tool.
    What to do: quantise again with --token-embedding-type; drop the head of the source where it equals the table.
    Sources: llama.cpp#5650; llama.cpp#12451; llama.cpp#12456
    """
    table, head = facts.table, facts.head
    if facts.partial or table is None:
        return
    if head is not None:
        if facts.equal:
            what = f"{HEAD} repeats {TABLE} byte for byte: {size(head.nbytes)} of {size(facts.size)}"
            fix = f"convert again from a source without a head (tiewise dedupe); loaders then take {TABLE}"
            yield Said(HEAD, what, fix, severity="info")
        return
    kind, least = BY_NAME[table.dtype], BY_NAME["Q6_K"]
    if facts.tokens is not None and kind.bits < least.bits:
        what = f"{TABLE} serves both ends as {kind.name}, {kind.bits:.2f} bits a value; a head asks for {least.name}"
        yield TABLE, what, f"quantise again with --token-embedding-type {least.name.lower()} (or q8_0)"
