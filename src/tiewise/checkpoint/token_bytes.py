"""What each token of a tokenizer.json writes, as bytes: two vocabularies are told alike by it, however they spell.

byte-level       Ġthe          one letter for each byte (`byte_letters`)
SentencePiece    ▁the <0xE2>   ▁ for a space, a byte by its number
added            as it stands; special ones write nothing, and are known by name and role
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tiewise.checkpoint.hf_folder import MOST_TOKENS, Folder, is_id, json_object, read_tokenizer
from tiewise.checkpoint.untrusted import items_of, short
from tiewise.core.errors import CheckpointError
from tiewise.core.text import byte_letters

ROLES = ("eos_token", "bos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class TokenBytes:
    """A vocabulary by what its tokens write; ids ascend."""

    pieces: Mapping[int, str]  # id → as the file spells it, added tokens too
    writes: Mapping[int, bytes]  # id → what it writes; special tokens are left out
    roles: Mapping[str, int]  # {"eos_token": id}, of those that the files name

    @property
    def rows(self) -> int:
        """Rows that a table needs."""
        return max(self.pieces, default=-1) + 1


def read_token_bytes(folder: Folder) -> TokenBytes:
    """Read the tokenizer.json of a folder, and which of its tokens are special; one that marks words is refused."""
    found = None if folder.single or not folder.has("tokenizer.json") else read_tokenizer(folder)
    if found is None:
        fix = "save it with AutoTokenizer.from_pretrained(…).save_pretrained(…), which writes one"
        raise CheckpointError(f"{folder.path}: no tokenizer.json in it", fix)
    for fault in found.faults:
        raise CheckpointError(fault.what, fault.fix)
    record = json_object(folder.path, "tokenizer.json")
    model = record["model"] if isinstance(record.get("model"), Mapping) else {}
    kind = model.get("type", "BPE" if "merges" in model else None)
    if kind not in ("BPE", "Unigram") or model.get("end_of_word_suffix") or model.get("continuing_subword_prefix"):
        what = f"{folder.path / 'tokenizer.json'}: a {short(kind)} vocabulary marks words, and not what a piece writes"
        raise CheckpointError(what, "byte-level BPE, SentencePiece BPE and Unigram are read")
    steps = [step for part in ("decoder", "pre_tokenizer") if isinstance(step := record.get(part), Mapping)]
    within = (step.get(key) for step in steps for key in ("decoders", "pretokenizers"))
    steps += [step for sequence in within if isinstance(sequence, list) for step in sequence]
    byte_level = any(isinstance(step, Mapping) and step.get("type") == "ByteLevel" for step in steps)
    byte_of = byte_letters() if byte_level else {}

    def written(piece: str) -> bytes:
        if byte_level and byte_of.keys() >= set(piece):
            return bytes(byte_of[letter] for letter in piece)
        if not byte_level and (byte := BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return (piece if byte_level else piece.replace("▁", " ")).encode("utf-8", "surrogatepass")

    pieces = dict(sorted({**{number: text for text, number in found.base.items()}, **found.added}.items()))
    if max(pieces, default=0) >= MOST_TOKENS:
        what = f"{folder.path}: its tokenizer names token {max(pieces):,}"
        raise CheckpointError(what, "no vocabulary is that large: take it from its source again")
    ids = {text: number for number, text in pieces.items()}
    roles = dict[str, int]()
    for name in filter(folder.has, ("special_tokens_map.json", "tokenizer_config.json")):
        said = json_object(folder.path, name)
        for role in ROLES:
            text = said.get(role)
            text = text.get("content") if isinstance(text, Mapping) else text
            roles |= {role: ids[text]} if isinstance(text, str) and text in ids else {}
    added = items_of(dict, record.get("added_tokens"))
    special = {*roles.values(), *(one["id"] for one in added if one.get("special") and is_id(one.get("id")))}
    writes = {
        number: text.encode("utf-8", "surrogatepass") if number in found.added else written(text)
        for number, text in pieces.items()
        if number not in special
    }
    return TokenBytes(pieces, writes, roles)
