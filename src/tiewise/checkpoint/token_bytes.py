"""Bytes of each token of a tokenizer.json, to compare vocabularies with different spellings.

byte-level       Ġthe          one letter for each byte (`byte_letters`)
SentencePiece    ▁the <0xE2>   ▁ for a space, a byte by its number
added            its text; special tokens write no bytes, and are identified by name and role
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tiewise.checkpoint.hf_folder import Folder, json_object
from tiewise.checkpoint.tokenizer_ids import MOST_TOKENS, Tokenizer, is_id, read_tokenizer
from tiewise.checkpoint.untrusted import items_of, object_of, short
from tiewise.core.errors import CheckpointError
from tiewise.core.text import byte_letters

ROLES = ("eos_token", "bos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class TokenBytes:
    """Tokens of a vocabulary and their bytes, in ascending order of ids."""

    pieces: Mapping[int, str]  # {id: token as spelled in the file}, including added tokens
    writes: Mapping[int, bytes]  # {id: bytes of the token}, without special tokens
    roles: Mapping[str, int]  # {"eos_token": id} of the special tokens in the files

    @property
    def rows(self) -> int:
        """Return the number of rows that a table for this vocabulary needs."""
        return max(self.pieces, default=-1) + 1


def read_token_bytes(folder: Folder) -> TokenBytes:
    """Read the tokens, their bytes and the special tokens from a folder's tokenizer.json.

    Raises:
        CheckpointError: the file is absent or unreadable, or its pieces mark words and so have no definite bytes.
    """
    tokenizer = _require_tokenizer(folder)
    record = json_object(folder.source, "tokenizer.json")
    _require_plain_pieces(folder, record)
    step_types = [step.get("type") for step in _steps(record)]
    spelling = _PieceSpelling(is_byte_level="ByteLevel" in step_types)

    pieces = dict(sorted(tokenizer.texts.items()))
    if max(pieces, default=0) >= MOST_TOKENS:
        problem = f"{folder.path}: its tokenizer names token {max(pieces):,}"
        raise CheckpointError(problem, "no vocabulary is that large: take it from its source again")
    roles = _roles(folder, {text: number for number, text in pieces.items()})
    special = {*roles.values(), *_special_ids(record)}
    writes = dict[int, bytes]()
    for number, text in pieces.items():
        if number in special:
            continue
        if number in tokenizer.added:
            writes[number] = _as_utf8(text)
        else:
            writes[number] = spelling.bytes_of(text)
    return TokenBytes(pieces, writes, roles)


def _require_tokenizer(folder: Folder) -> Tokenizer:
    """Return the ids of the folder's tokenizer. Raise a CheckpointError without a readable tokenizer.json."""
    tokenizer = None
    if folder.has("tokenizer.json") and not folder.single:
        tokenizer = read_tokenizer(folder)
    if tokenizer is None:
        remedy = "save it with AutoTokenizer.from_pretrained(…).save_pretrained(…), which writes one"
        raise CheckpointError(f"{folder.path}: no tokenizer.json in it", remedy)
    if tokenizer.faults:
        fault = tokenizer.faults[0]
        raise CheckpointError(fault.problem, fault.remedy)
    return tokenizer


def _require_plain_pieces(folder: Folder, record: Mapping[str, Any]) -> None:
    """Raise a CheckpointError for a vocabulary whose pieces mark words.

    Such a piece does not determine its bytes.
    """
    model = object_of(record.get("model"))
    model_type = model.get("type", "BPE" if "merges" in model else None)
    marks_words = model.get("end_of_word_suffix") or model.get("continuing_subword_prefix")
    if model_type not in ("BPE", "Unigram") or marks_words:
        file = folder.path / "tokenizer.json"
        problem = f"{file}: a {short(model_type)} vocabulary marks words, and not what a piece writes"
        raise CheckpointError(problem, "byte-level BPE, SentencePiece BPE and Unigram are read")


def _steps(record: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the decoder and the pre-tokenizer, each followed by the steps of its sequence.

    An absent one is an empty step.
    """
    for part in ("decoder", "pre_tokenizer"):
        step = object_of(record.get(part))
        yield step
        for key in ("decoders", "pretokenizers"):
            sequence = step.get(key)
            if isinstance(sequence, list):
                yield from map(object_of, sequence)


class _PieceSpelling:
    """Spelling of bytes in a vocabulary: one letter per byte, or SentencePiece."""

    def __init__(self, is_byte_level: bool) -> None:
        self.is_byte_level = is_byte_level
        self.byte_of = byte_letters() if is_byte_level else {}

    def bytes_of(self, piece: str) -> bytes:
        """Return the bytes of a piece that is no added token."""
        if self.is_byte_level:
            if self.byte_of.keys() >= set(piece):
                return bytes(self.byte_of[letter] for letter in piece)
            return _as_utf8(piece)
        byte = BYTE.fullmatch(piece)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return _as_utf8(piece.replace("▁", " "))


def _as_utf8(text: str) -> bytes:
    """Return a text as UTF-8. JSON text may have half a surrogate pair."""
    return text.encode("utf-8", "surrogatepass")


def _roles(folder: Folder, ids: Mapping[str, int]) -> dict[str, int]:
    """Return {role: id} of the special tokens in the tokenizer's configs; `ids` is {text: id}."""
    roles = dict[str, int]()
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if not folder.has(name):
            continue
        record = json_object(folder.source, name)
        for role in ROLES:
            token = record.get(role)
            if isinstance(token, Mapping):
                token = token.get("content")
            if isinstance(token, str) and token in ids:
                roles[role] = ids[token]
    return roles


def _special_ids(record: Mapping[str, Any]) -> Iterator[int]:
    """Yield the ids of the special added tokens."""
    for token in items_of(dict, record.get("added_tokens")):
        if token.get("special") and is_id(token.get("id")):
            yield token["id"]
