"""Ids of the tokens in a folder's tokenizer files.

The module reads the files as data and builds no tokenizer. The vocabulary comes from the first of tokenizer.json,
vocab.json, vocab.txt and a SentencePiece model. added_tokens.json and tokenizer_config.json are always read.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from tiewise.checkpoint.hf_folder import Fault, Folder, json_object, recording_faults
from tiewise.checkpoint.untrusted import (
    MOST_BYTES,
    first_fields,
    items_of,
    object_of,
    require_bounded,
)
from tiewise.core.errors import CheckpointError

MOST_TOKENS = 1_500_000  # the largest published vocabulary has 900,000
PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", *PIECES)
TOKENIZER_FILES = (  # all files of a saved tokenizer
    *_VOCABULARIES,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja"),
)
Ids: TypeAlias = "tuple[dict[str, int], dict[int, str]]"  # {text: id} of the vocabulary, {id: text} of added tokens
# Full names in brackets: plain "unused", "reserved" and "##pad" are words of BERT's vocabulary.
_NAME = r"▁?(?:unused|reserved|extra|dummy|place▁?holder|pad(?:ding)?)(?:[ _▁-]?(?:special|token|id|no))*[ _▁-]?\d*▁?"
_RESERVED = re.compile(rf"\[{_NAME}\]|<[|｜]?{_NAME}[|｜]?>|madeupword\d+", re.IGNORECASE)


@dataclass(frozen=True)
class Tokenizer:
    """Ids of one tokenizer."""

    files: tuple[str, ...]  # names of the files that were read
    # {text: id} of the base vocabulary; the text is "#position" for SentencePiece models other than tokenizer.model
    base: Mapping[str, int]
    added: Mapping[int, str]  # {id: text} of added tokens
    faults: tuple[Fault, ...] = ()  # files that could not be read

    @cached_property
    def base_max(self) -> int:
        """Return the largest id of the base vocabulary; -1 if it is empty."""
        return max(self.base.values(), default=-1)

    @cached_property
    def max_id(self) -> int:
        """Return the largest id, including added tokens; -1 if there is none."""
        return max(self.base_max, max(self.added, default=-1))

    @property
    def lists_positions(self) -> bool:
        """Return whether ids are positions in a SentencePiece model, which may differ from token ids."""
        return not set(self.files).isdisjoint(PIECES[1:])

    @cached_property
    def texts(self) -> dict[int, str]:
        """Return {id: text} of all tokens. An added token may replace one of the base vocabulary."""
        return {number: text for text, number in self.base.items()} | dict(self.added)

    @cached_property
    def fingerprint(self) -> str:
        """Return sixteen hex digits of a SHA-256 over all ids and texts."""
        lines = "".join(f"{number}\0{text}\0" for number, text in sorted(self.texts.items()))
        return hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()[:16]

    @cached_property
    def used(self) -> frozenset[int]:
        """Return the ids that text can produce, without reserved tokens.

        Reserved are tokens such as `[unused12]`, `<|reserved_special_token_3|>` and `<pad>`.
        """
        return frozenset(number for number, text in self.texts.items() if not _RESERVED.fullmatch(text))


def read_tokenizer(folder: Folder) -> Tokenizer | None:
    """Read the tokenizer files of a folder; None if it has none.

    A file that cannot be read becomes a fault.
    """
    files, faults = list[str](), list[Fault]()
    base, added = dict[str, int](), dict[int, str]()
    for name in _files_with_ids(folder):
        with recording_faults(faults, name):
            base_of_file, added_of_file = _read(folder, name)
            files.append(name)
            base = {**base, **base_of_file} if base else base_of_file  # avoids a copy of a large vocabulary
            added |= added_of_file
    if not any((base, added, faults)):
        return None
    return Tokenizer(tuple(files), base, added, tuple(faults))


def _files_with_ids(folder: Folder) -> list[str]:
    """Return the first vocabulary file of a folder, and its files with added tokens."""
    vocabularies = list(filter(folder.has, _VOCABULARIES))
    return [*vocabularies[:1], *filter(folder.has, ("added_tokens.json", "tokenizer_config.json"))]


def _read(folder: Folder, name: str) -> Ids:
    """Read the base vocabulary and the added tokens from one file."""
    if name == "vocab.txt":
        return _lines(folder, name), {}
    if name in PIECES:
        return _pieces(folder, name), {}
    record = json_object(folder.source, name)
    if name == "tokenizer.json":
        return _vocabulary(object_of(record.get("model")).get("vocab")), _added_tokens(record)
    if name == "tokenizer_config.json":
        return {}, _added_by_config(record)
    if name == "added_tokens.json":
        return {}, {number: text for text, number in _vocabulary(record).items()}
    return _vocabulary(record), {}


def _lines(folder: Folder, name: str) -> dict[str, int]:
    """Return {line: its number} of vocab.txt."""
    where = f"{folder.path / name}"
    data = _bytes(folder, name)
    count = data.count(b"\n")
    if count > MOST_TOKENS:
        remedy = "no vocabulary is that large: take it from its source again"
        raise CheckpointError(f"{where}: more than {MOST_TOKENS:,} tokens", remedy)
    require_bounded(data, 2 * count, where)
    if data.startswith(codecs.BOM_UTF8):
        problem = f"{where}: it begins with the byte order mark of UTF-8, which becomes part of the first token"
        raise CheckpointError(problem, "save it as UTF-8 without a byte order mark")
    lines = data.decode("utf-8", "replace").removesuffix("\n").split("\n")
    return {text.rstrip("\r"): number for number, text in enumerate(lines)}


def _pieces(folder: Folder, name: str) -> dict[str, int]:
    """Return {text: id} of tokenizer.model, or {"#position": position} of another SentencePiece model.

    Positions in tokenizer.model are ids. For any other model, a class may insert tokens before them (XLM-R).
    """
    where = f"{folder.path / name}"
    data = _bytes(folder, name)
    pieces = list(first_fields(data, 0, len(data), MOST_TOKENS, where))  # a model repeats field 1 for each piece
    require_bounded(data, 2 * len(pieces), where)
    texts = _texts_of_pieces(data, pieces, where)  # always read, to refuse a damaged file
    if name == PIECES[0]:
        return _positions(text.decode("utf-8", "replace") for text in texts)
    return _positions(None for _ in texts)


def _texts_of_pieces(data: bytes, pieces: list[tuple[int, int]], where: str) -> Iterator[bytes]:
    """Yield the text of each piece of a SentencePiece model: field 1 of the piece.

    `pieces` has the start and end of each piece in `data`.
    """
    for start, end in pieces:
        text_start, text_end = next(first_fields(data, start, end, MOST_TOKENS, where), (0, 0))
        yield data[text_start:text_end]


def _bytes(folder: Folder, name: str) -> bytes:
    """Return the content of a file of the folder."""
    return folder.source.read_bytes(name, MOST_BYTES)


def _added_tokens(record: Mapping[str, Any]) -> dict[int, str]:
    """Return {id: text} of the added tokens of a tokenizer.json."""
    tokens = items_of(dict, record.get("added_tokens"))
    return {token["id"]: str(token.get("content", "")) for token in tokens if is_id(token.get("id"))}


def _added_by_config(record: Mapping[str, Any]) -> dict[int, str]:
    """Return {id: text} of the added tokens of a tokenizer_config.json."""
    added = dict[int, str]()
    for key, token in object_of(record.get("added_tokens_decoder")).items():
        if re.fullmatch(r"[0-9]{1,18}", key):
            added[int(key)] = str(object_of(token).get("content", ""))
    return added


def _vocabulary(record: Any) -> dict[str, int]:
    """Return {text: id} of a vocabulary; Unigram's list of [text, score] gives positions."""
    if isinstance(record, list):
        return _positions(map(_unigram_text, record))
    if not isinstance(record, dict):
        return {}
    for value in record.values():
        if not is_id(value):
            return {text: number for text, number in record.items() if is_id(number)}
    return record  # not copied, since it is large


def _unigram_text(entry: Any) -> Any:
    """Return the text of an entry [text, score] of Unigram's list; None if it has none."""
    if isinstance(entry, list) and entry:
        return entry[0]
    return None


def _positions(texts: Iterable[Any]) -> dict[str, int]:
    """Return {text: position}. An entry without a text or with a repeated one has the text "#position"."""
    positions = dict[str, int]()
    for number, text in enumerate(texts):
        if not isinstance(text, str) or text in positions:
            text = f"#{number}"
        positions[text] = number
    return positions


def is_id(value: Any) -> bool:
    """Return whether a JSON value can be a token's id."""
    return type(value) is int and 0 <= value < 2**63
