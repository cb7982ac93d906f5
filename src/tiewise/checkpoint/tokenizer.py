"""What a folder's tokenizer files say of ids: which exist, which are added, which are special.

Read in this order, the first that exists: tokenizer.json, vocab.json, vocab.txt, a SentencePiece model. Then, always,
added_tokens.json and tokenizer_config.json. Nothing is executed and no tokenizer is built.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tiewise.checkpoint.folder import Fault, Folder
from tiewise.checkpoint.open_file import inside, read_whole
from tiewise.checkpoint.strict_json import MOST_BYTES, require_bounded
from tiewise.core.errors import CheckpointError

MOST_TOKENS = 1_500_000  # the largest vocabulary known has 900,000
PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", *PIECES)
# Whole names in brackets, as tokenizers write them: "unused", "reserved" and "##pad" are words of BERT's vocabulary.
_NAME = r"▁?(?:unused|reserved|extra|dummy|place▁?holder|pad(?:ding)?)(?:[ _▁-]?(?:special|token|id|no))*[ _▁-]?\d*▁?"
_RESERVED = re.compile(rf"\[{_NAME}\]|<[|｜]?{_NAME}[|｜]?>|madeupword\d+", re.IGNORECASE)


@dataclass(frozen=True)
class Tokenizer:
    """Ids of one tokenizer.

    Args:
        files: those that were read.
        base: {text: id} of the vocabulary proper. A SentencePiece model gives positions in place of texts.
        added: {id: text} of tokens added to it.
        faults: files that could not be read.
    """

    files: tuple[str, ...]
    base: Mapping[str, int]
    added: Mapping[int, str]
    faults: tuple[Fault, ...] = ()

    @cached_property
    def base_max(self) -> int:
        """Largest id of the vocabulary proper; -1 where there is none."""
        return max(self.base.values(), default=-1)

    @cached_property
    def max_id(self) -> int:
        """Largest id of all, added tokens included; -1 where there is none."""
        return max(self.base_max, max(self.added, default=-1))

    @cached_property
    def count(self) -> int:
        """Distinct ids."""
        ids = np.fromiter(itertools.chain(self.base.values(), self.added), np.int64)
        return len(np.unique(ids))

    @cached_property
    def used(self) -> frozenset[int]:
        """Ids that text can produce: all but placeholders, `[unused12]`, `<|reserved_special_token_3|>`, `<pad>`."""
        texts = ((text, number) for text, number in self.base.items() if number not in self.added)
        more = ((text, number) for number, text in self.added.items())
        return frozenset(number for text, number in itertools.chain(texts, more) if not _RESERVED.fullmatch(text))


def read_tokenizer(folder: Folder) -> Tokenizer | None:
    """Read the tokenizer files of a folder; None where it has none. What cannot be read becomes a fault."""
    files: list[str] = []
    faults: list[Fault] = []
    base: dict[str, int] = {}
    added: dict[int, str] = {}
    vocabulary = next((name for name in _VOCABULARIES if folder.has(name)), None)
    beside = [name for name in ("added_tokens.json", "tokenizer_config.json") if folder.has(name)]
    for name in [*([vocabulary] if vocabulary is not None else []), *beside]:
        try:
            found_base, found_added = _read(folder, name)
        except CheckpointError as error:
            faults.append(Fault(name, error.what, error.fix))
            continue
        files.append(name)
        base = {**base, **found_base} if base else found_base
        added |= found_added
    return Tokenizer(tuple(files), base, added, tuple(faults)) if base or added or faults else None


def _read(folder: Folder, name: str) -> tuple[dict[str, int], dict[int, str]]:
    where = f"{folder.path / name}"
    if name == "vocab.txt":
        data = _bytes(folder, name)
        _require_few(data.count(b"\n"), where)
        require_bounded(data, 2 * data.count(b"\n"), where)
        lines = data.decode("utf-8", "replace").removesuffix("\n").split("\n")
        return {text.rstrip("\r"): number for number, text in enumerate(lines)}, {}
    if name in PIECES:
        return {str(number): number for number in range(count_pieces(_bytes(folder, name), where))}, {}
    record = folder.json(name)
    if not isinstance(record, Mapping):
        raise CheckpointError(f"{where}: no JSON object", "take it from its source again")
    if name == "tokenizer.json":
        model = record.get("model")
        entries = record.get("added_tokens")
        return _vocabulary(model.get("vocab") if isinstance(model, Mapping) else None), dict(_entries(entries))
    if name == "tokenizer_config.json":
        return {}, dict(_decoder(record.get("added_tokens_decoder")))
    if name == "added_tokens.json":
        return {}, {number: text for text, number in _vocabulary(record).items()}
    return _vocabulary(record), {}


def _bytes(folder: Folder, name: str) -> bytes:
    return read_whole(os.fspath(inside(folder.path, name)), MOST_BYTES)


def _vocabulary(record: Any) -> dict[str, int]:
    """{text: id} of BPE, WordPiece and WordLevel; of Unigram's list of [text, score] the positions."""
    if isinstance(record, list):
        texts = (entry[0] if isinstance(entry, list) and entry else None for entry in record)
        return {text if isinstance(text, str) else f"#{number}": number for number, text in enumerate(texts)}
    if isinstance(record, dict):  # without a copy where it is as it should be
        whole = all(map(is_id, record.values()))
        return record if whole else {text: number for text, number in record.items() if is_id(number)}
    return {}


def _require_few(count: int, where: str) -> None:
    if count > MOST_TOKENS:
        fix = "no vocabulary is that large: take it from its source again"
        raise CheckpointError(f"{where}: more than {MOST_TOKENS:,} tokens", fix)


def _entries(record: Any) -> Iterator[tuple[int, str]]:
    for entry in record if isinstance(record, list) else ():
        if isinstance(entry, Mapping) and is_id(entry.get("id")):
            yield entry["id"], str(entry.get("content", ""))


def _decoder(record: Any) -> Iterator[tuple[int, str]]:
    for key, entry in record.items() if isinstance(record, Mapping) else ():
        if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 19:
            yield int(key), str(entry.get("content", "")) if isinstance(entry, Mapping) else ""


def is_id(value: Any) -> bool:
    """Whether a JSON value can be a token's id."""
    return type(value) is int and 0 <= value < 2**63


def count_pieces(data: bytes, where: str) -> int:
    """Count the pieces of a SentencePiece model: its protocol buffer repeats field 1 once for each.

    Raises:
        CheckpointError: the bytes are no such message, or one of too many fields; naming `where`.
    """
    pieces = fields = at = 0
    while at < len(data):
        fields += 1
        _require_few(fields, where)
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            _, at = _varint(data, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        elif kind == 2:
            length, at = _varint(data, at)
            at += length
            pieces += tag >> 3 == 1
        else:
            at = len(data) + 1
    if at != len(data):
        raise CheckpointError(f"{where}: the SentencePiece model is damaged", "take it from its source again")
    return pieces


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 64:
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
    return 0, len(data) + 1


def special_ids(records: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every special id in the given (path, level) pairs; lists of ids one by one."""
    for path, record in records:
        for name in ("bos", "eos", "pad", "unk", "decoder_start"):
            key = f"{name}_token_id"
            value = record.get(key)
            for number in value if isinstance(value, list) else [value]:
                if number is not None:
                    yield f"{path}.{key}" if path else key, number
