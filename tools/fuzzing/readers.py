"""The readers that are fuzzed: how each reads one file, which files it starts from, and how a file is mutated.

A reader gets the content of one file; the other files of its checkpoint stay as they are. Every input is read, and for
one in 64 (`is_drawn`) all rules run on the result as well, since they take far longer than the reading.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

from fuzzing import seeds
from fuzzing.gguf_files import mutate_gguf
from fuzzing.json_files import mutate_json, mutate_safetensors, parts_of
from fuzzing.memory import MemorySource, folder_of
from fuzzing.protocol_buffers import mutate_message
from tiewise.checkpoint.adapter import WEIGHTS, open_adapter
from tiewise.checkpoint.audit import Audit, check_opened
from tiewise.checkpoint.config_parts import quantisation_keys
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.hf_folder import (
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    MOST_CONFIG,
    SINGLE,
    Fault,
    Folder,
    HubReading,
    json_object,
)
from tiewise.checkpoint.rules.gguf_file import read_gguf_from
from tiewise.checkpoint.rules.onnx_file import read_onnx_from
from tiewise.checkpoint.stored import read_header_from
from tiewise.checkpoint.token_bytes import read_token_bytes
from tiewise.checkpoint.tokenizer_ids import PIECES, read_tokenizer
from tiewise.core.errors import CheckpointError, TiewiseError
from tiewise.planning.plan import plan
from tiewise.planning.read_config import read

Mutate = Callable[[bytes, Random, Sequence[str]], "bytes | None"]
BINARY, SLOW = 1_000_000, 100_000  # inputs that the documented runs of a reader must reach
SHARE_OF_RULES = 64  # one input in so many also runs all rules


@dataclass(frozen=True)
class FuzzedReader:
    """One reader and its inputs."""

    name: str
    read: Callable[[bytes], None]  # raises a TiewiseError for a refused input
    seeds: Callable[[], list[bytes]]  # valid files
    mutate: Mutate  # keeps a file structurally valid; None if it cannot be parsed
    words: tuple[str, ...]  # keys and texts that mean something to the reader
    needed: int  # inputs of the documented runs together
    guided: tuple[str, ...]  # modules of the package whose branches guide the fuzzing
    most_bytes: int = 4096


def is_drawn(data: bytes) -> bool:
    """Return whether all rules run on an input. The input alone decides, so that a failure can be repeated."""
    return zlib.crc32(data) % SHARE_OF_RULES == 0


def raise_first(faults: Sequence[Fault]) -> None:
    """Raise the first fault of a folder, as a refusal."""
    for fault in faults:
        raise CheckpointError(fault.problem, fault.remedy)


def require_plain(audit: Audit) -> None:
    """Raise an AssertionError unless the audit is JSON and each of its texts fits on one line."""
    json.dumps(audit.record(), allow_nan=False)
    for finding in audit.findings:
        require_printable((finding.where, finding.evidence, *finding.fixes))


def require_printable(texts: Iterable[str]) -> None:
    """Raise an AssertionError if a text has a line break, a control sequence or half a surrogate pair."""
    for text in texts:
        if not text.isprintable():
            raise AssertionError(f"a text for the terminal is {text!r}")


def texts_of(record: Any) -> list[str]:
    """Return all texts of a JSON value, without the keys."""
    return [holder[key] for holder, key in parts_of(record) if isinstance(holder[key], str)]


@cache
def _empty() -> Folder:
    """Return a folder without files."""
    return folder_of({})


def _with_file(name: str, data: bytes) -> Folder:
    """Return a folder that has one file, without reading it."""
    return replace(_empty(), files=(name,), repository=MemorySource({name: data}))


def _safetensors(data: bytes) -> None:
    read_header_from(MemorySource({SINGLE: data}), SINGLE)
    if is_drawn(data):
        require_plain(check_opened(folder_of({SINGLE: data})))


def _gguf(data: bytes) -> None:
    facts = read_gguf_from(MemorySource({"m.gguf": data}), "m.gguf")
    if is_drawn(data):
        require_plain(check_opened(facts))


def _onnx(data: bytes) -> None:
    source = MemorySource({"m.onnx": data, "m.data": seeds.ONNX_DATA})
    facts = read_onnx_from(source, "m.onnx")
    _ = facts.table, facts.heads
    if is_drawn(data):
        require_plain(check_opened(facts))


def _sentencepiece(data: bytes) -> None:
    for name in PIECES[:2]:  # the first has ids, the second positions
        tokenizer = read_tokenizer(_with_file(name, data))
        if tokenizer is not None:
            raise_first(tokenizer.faults)
            _ = tokenizer.fingerprint, tokenizer.used, tokenizer.max_id


def _index(data: bytes) -> None:
    reading = HubReading(all_headers=zlib.crc32(data) % 2 == 0)
    folder = folder_of({**seeds.shards(), INDEX: data}, reading)
    _ = folder.tensor_names, folder.nbytes, folder.unread_files, folder.opened
    if is_drawn(data):
        require_plain(check_opened(folder))
    raise_first(folder.faults)


def _with_config(folder: Folder, data: bytes) -> Folder:
    """Return a folder of tensors with a config; the tensors are not read again."""
    assert isinstance(folder.repository, MemorySource)
    source = MemorySource({**folder.repository.files, CONFIG: data})
    config = json_object(source, CONFIG, MOST_CONFIG)
    return replace(folder, config=config, files=source.list(), repository=source)


def _config(data: bytes) -> None:
    folder = _with_config(_base().folder, data)
    facts = Facts(folder)
    _ = facts.claims.tied, facts.roles, facts.text_vocabularies, facts.draft, facts.boundary, facts.tied
    _ = facts.matrices_without_role, facts.unequal_on_purpose, facts.extra_rows, quantisation_keys(facts.config)
    if is_drawn(data):
        require_plain(check_opened(folder))
    read(facts.config)
    if is_drawn(data):
        record = plan(facts.config).record()
        json.dumps(record, allow_nan=False)
        require_printable(texts_of(record))


def _tokenizer(data: bytes) -> None:
    files = {"tokenizer.json": data, "special_tokens_map.json": seeds.SPECIAL_TOKENS}
    folder = replace(_empty(), files=tuple(files), repository=MemorySource(files))
    tokenizer = read_tokenizer(folder)
    if tokenizer is not None:
        raise_first(tokenizer.faults)
        _ = tokenizer.fingerprint, tokenizer.used, tokenizer.max_id
    if is_drawn(data):
        model = {CONFIG: seeds.config(), SINGLE: seeds.tensors(), **files}
        require_plain(check_opened(folder_of(model)))
    _ = read_token_bytes(folder).rows


@cache
def _base() -> Facts:
    """Return the checkpoint that adapters change, and for which drafts propose tokens."""
    return Facts(folder_of({CONFIG: seeds.config(), SINGLE: seeds.tensors(), "tokenizer.json": seeds.tokenizers()[0]}))


def _adapter(data: bytes) -> None:
    files = {ADAPTER_CONFIG: data}
    if zlib.crc32(data) % 4:
        files[WEIGHTS] = seeds.adapter_tensors()
    folder = folder_of(files)
    facts = open_adapter(folder, _base() if zlib.crc32(data) % 3 else None)
    _ = facts.parts, facts.input, facts.output, facts.token_rows, facts.base_modules, facts.ensures_tying
    if is_drawn(data):
        require_plain(check_opened(folder, source=_base()))


@cache
def _draft_folder() -> Folder:
    """Return the tensors of a draft."""
    return folder_of({SINGLE: seeds.draft_tensors()})


def _draft(data: bytes) -> None:
    folder = _with_config(_draft_folder(), data)
    facts = Facts(folder, target=_base())
    _ = facts.draft, facts.vocabulary, facts.draft_heads
    if is_drawn(data):
        require_plain(check_opened(folder, target=_base()))


_FOLDER = ("checkpoint.hf_folder", "checkpoint.untrusted")
_CONFIG = ("checkpoint.claims", "checkpoint.composite_ends", "checkpoint.config_parts", "checkpoint.folder_facts")
_PLAN = ("planning.config", "planning.read_config", "planning.model_families", "planning.uncounted")
_PLAN += tuple(f"planning.readers.{name}" for name in ("deepseek", "encoders", "gemma", "glm", "hybrids", "parts"))
_PLAN += tuple(f"planning.readers.{name}" for name in ("mimo", "qwen", "towers"))
_DRAFT = ("checkpoint.draft", "checkpoint.facts", "checkpoint.roles")
_IDS = ("checkpoint.tokenizer_ids", "checkpoint.untrusted")

READERS = {
    reader.name: reader
    for reader in (
        FuzzedReader(
            "safetensors",
            _safetensors,
            seeds.safetensors_files,
            mutate_safetensors,
            seeds.HEADER,
            BINARY,
            ("checkpoint.stored", "checkpoint.untrusted"),
        ),
        FuzzedReader(
            "gguf", _gguf, seeds.gguf_files, mutate_gguf, seeds.GGUF_WORDS, BINARY, ("checkpoint.rules.gguf_file",)
        ),
        FuzzedReader(
            "onnx", _onnx, seeds.onnx_files, mutate_message, seeds.ONNX_WORDS, BINARY, ("checkpoint.rules.onnx_file",)
        ),
        FuzzedReader(
            "sentencepiece", _sentencepiece, seeds.piece_files, mutate_message, seeds.PIECE_WORDS, BINARY, _IDS
        ),
        FuzzedReader(
            "index",
            _index,
            seeds.indexes,
            mutate_json,
            seeds.INDEX_WORDS,
            SLOW,
            (*_FOLDER, "checkpoint.shard_choice"),
        ),
        FuzzedReader(
            "config", _config, seeds.configs, mutate_json, seeds.config_words(), SLOW, (*_FOLDER, *_CONFIG, *_PLAN)
        ),
        FuzzedReader(
            "tokenizer",
            _tokenizer,
            seeds.tokenizers,
            mutate_json,
            seeds.TOKENIZER_WORDS,
            SLOW,
            (*_IDS, "checkpoint.token_bytes"),
        ),
        FuzzedReader(
            "adapter",
            _adapter,
            seeds.adapter_configs,
            mutate_json,
            seeds.ADAPTER_WORDS,
            SLOW,
            ("checkpoint.adapter",),
        ),
        FuzzedReader(
            "draft", _draft, seeds.draft_configs, mutate_json, seeds.config_words(), SLOW, (*_CONFIG, *_DRAFT)
        ),
    )
}


def outcome(reader: FuzzedReader, data: bytes) -> TiewiseError | None:
    """Read an input; return the error of a refused one, None for one that was read.

    Raises:
        AssertionError: the error is not one printable line with a remedy.
        Exception: the reader failed.
    """
    try:
        reader.read(data)
    except TiewiseError as error:
        if not str(error).isprintable() or not error.remedy:
            raise AssertionError(f"no plain error: {error!r}") from error
        return error
    return None
