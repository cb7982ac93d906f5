"""What each token of a tokenizer.json writes, as bytes: two vocabularies are told alike by it, however they spell.

byte-level       Ġthe          one letter for each byte (`byte_letters`)
SentencePiece    ▁the <0xE2>   ▁ for a space, a byte by its number
added            as it stands; special ones write nothing, and are known by name and role
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tiewise.checkpoint.hf_folder import Folder, is_id, json_object, read_tokenizer
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError

ROLES = ("eos_token", "bos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class TokenBytes:
    """A vocabulary by what its tokens write."""

    pieces: Mapping[int, str]  # id → as the file spells it, added tokens too
    writes: Mapping[int, bytes]  # id → what it writes, in ascending order of ids; special tokens are left out
    roles: Mapping[str, int]  # {"eos_token": id}, of those that the files name

    @property
    def special(self) -> frozenset[int]:
        """Ids that write nothing."""
        return frozenset(self.pieces.keys() - self.writes.keys())

    @property
    def rows(self) -> int:
        """Rows that a table needs."""
        return max(self.pieces, default=-1) + 1


def read_token_bytes(folder: Folder) -> TokenBytes:
    """Read the tokenizer.json of a folder, and which of its tokens are special.

    Raises:
        CheckpointError: none, one that is damaged, or a kind whose pieces do not say what they write (WordPiece).
    """
    if folder.single or not folder.has("tokenizer.json"):
        fix = "save it with AutoTokenizer.from_pretrained(…).save_pretrained(…), which writes one"
        raise CheckpointError(f"{folder.path}: no tokenizer.json in it", fix)
    found = read_tokenizer(folder)
    for fault in found.faults if found is not None else ():
        raise CheckpointError(fault.what, fault.fix)
    record = json_object(folder.path, "tokenizer.json")
    model, where = record.get("model"), folder.path / "tokenizer.json"
    model = model if isinstance(model, Mapping) else {}
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind not in ("BPE", "Unigram") or model.get("end_of_word_suffix") or model.get("continuing_subword_prefix"):
        what = f"{where}: a {short(kind)} vocabulary marks words, so its pieces do not say what they write"
        raise CheckpointError(what, "byte-level BPE, SentencePiece BPE and Unigram are read")
    assert found is not None  # the file is there and has no fault
    byte_level = any("ByteLevel" in _types(record.get(part)) for part in ("decoder", "pre_tokenizer"))
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())} if byte_level else {}

    def written(piece: str) -> bytes:
        if byte_level and byte_of.keys() >= set(piece):
            return bytes(byte_of[letter] for letter in piece)
        if not byte_level and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return (piece if byte_level else piece.replace("▁", " ")).encode("utf-8", "surrogatepass")

    pieces = dict(sorted({**{number: text for text, number in found.base.items()}, **found.added}.items()))
    ids = {text: number for number, text in pieces.items()}
    roles = {role: ids[text] for role, text in _named(folder) if text in ids}
    listed = record.get("added_tokens")
    added = [one for one in (listed if isinstance(listed, list) else ()) if isinstance(one, Mapping)]
    special = {*roles.values(), *(one["id"] for one in added if one.get("special") and is_id(one.get("id")))}
    writes = {
        number: text.encode("utf-8", "surrogatepass") if number in found.added else written(text)
        for number, text in pieces.items()
        if number not in special
    }
    return TokenBytes(pieces, writes, {role: roles[role] for role in ROLES if role in roles})


def _types(step: Any) -> set[Any]:
    """Types of a step of a tokenizer.json, and of those within it where it is a sequence."""
    if not isinstance(step, Mapping):
        return set()
    within = (one for key in ("decoders", "pretokenizers") if isinstance(step.get(key), list) for one in step[key])
    return {step.get("type"), *(one.get("type") for one in within if isinstance(one, Mapping))}


def _named(folder: Folder) -> Iterator[tuple[str, str]]:
    """(role, text) of special tokens, as the files beside tokenizer.json name them."""
    for name in filter(folder.has, ("special_tokens_map.json", "tokenizer_config.json")):
        for role, value in json_object(folder.path, name).items():
            text = value.get("content") if isinstance(value, Mapping) else value
            if role in ROLES and isinstance(text, str):
                yield role, text


def byte_letters() -> list[str]:
    """The letter that byte-level tokenizers write for each byte: itself where it prints, else the next from 256 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in prints]
    return [chr(256 + others.index(byte)) if byte in others else chr(byte) for byte in range(256)]
