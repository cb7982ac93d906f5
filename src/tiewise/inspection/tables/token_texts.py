"""Which token a word is, and what a token reads as, by the folder's own tokenizer.json.

To find a word's token, or to decode every row's, needs the `tokenizers` library, which a light install lacks.

Tokens in groups: by how often a text has them, and by the script they are written in.

A token's script is that of most of its letters, as the first word of their Unicode names says (so that 'ё' is Cyrillic
and 'の' Kana); without a letter it is digits, white space or punctuation. No language is guessed: a script is what one
token shows, and languages that share a script are not told apart.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.hf_folder import Folder, json_object
from tiewise.checkpoint.rewrite.tokenizer_text import loaded
from tiewise.checkpoint.token_bytes import BYTE
from tiewise.checkpoint.tokenizer_ids import read_tokenizer
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import DataError
from tiewise.core.text import byte_letters


def open_tokenizer(folder: Folder) -> Any:
    """Open the folder's tokenizer.json, which cuts off nothing."""
    if not (found := folder.read("tokenizer.json")):
        raise DataError(f"{folder.path}: no tokenizer.json", "put the model's tokenizer beside it, or give ids")
    return loaded(found["tokenizer.json"], str(folder.path / "tokenizer.json"))


def find_tokens(folder: Folder, texts: Iterable[str]) -> list[int]:
    """Find the one token of each text: as a word after a space, else as it stands, else as the vocabulary's piece.

    Raises:
        DataError: the folder has no tokenizer.json, or a text is not one token.
        CheckpointError: one that cannot be read.
    """
    tokenizer, made = open_tokenizer(folder), []
    unknown = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")
    for text in texts:
        spaced, alone = (tokenizer.encode(spelled, add_special_tokens=False) for spelled in (f" {text}", text))
        # some vocabularies drop what they do not know: the one token must stand for all of the text
        whole = (e.ids[0] for e in (spaced, alone) if len(e.ids) == 1 and np.ptp(e.offsets[0]) >= len(text))
        number = next((one for one in whole if one != unknown), tokenizer.token_to_id(text))
        if number is None:
            pieces = " + ".join(map(short, alone.tokens[:6])) or "nothing"
            what = f"{short(text)} is not one token of this vocabulary: {pieces}"
            raise DataError(what, "choose a word that is one token")
        made.append(number)
    return made


def read_as(folder: Folder, ids: Iterable[int]) -> tuple[str, ...]:
    """What each token reads as, with the space before it (" York"); parts of characters as spelled, else "#1234"."""
    if not folder.has("tokenizer.json"):
        return tuple(f"#{number}" for number in ids)
    found = read_tokenizer(folder)
    if found is None or "tokenizer.json" not in found.files:
        raise DataError(f"{folder.path}: tokenizer.json cannot be read", "take it from its source again")
    decoder = json_object(folder.path, "tokenizer.json").get("decoder")
    byte_level = isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"
    byte_of = byte_letters() if byte_level else {}
    pieces = {number: piece for piece, number in found.base.items()}

    def text(number: int) -> str:
        piece = found.added.get(number) or pieces.get(number, f"#{number}")
        with suppress(UnicodeDecodeError):
            if number not in found.added and byte_of.keys() >= set(piece):
                return bytes(byte_of[letter] for letter in piece).decode()
            if not byte_level and (byte := BYTE.fullmatch(piece)):
                return bytes([int(byte[1], 16)]).decode()
        return piece.replace("▁", " ") if piece.startswith("▁") else piece

    return tuple(map(text, ids))


NAMED = ("Latin", "Cyrillic", "Greek", "Hangul", "Arabic", "Hebrew", "Devanagari")
SCRIPTS = {name.upper(): name for name in NAMED} | {"CJK": "Han", "HIRAGANA": "Kana", "KATAKANA": "Kana"}
DIGITS, SPACE, PUNCTUATION = "digits", "white space", "punctuation"
OTHER, PARTIAL, SPECIAL, NONE = "other letters", "parts of characters", "special tokens", "no token"
_PARTIAL = "\ufffd"  # what a decoder gives for bytes that are no whole character


@dataclass(frozen=True)
class Groups:
    """Each token in one group."""

    labels: tuple[str, ...]  # names of the groups, in the order in which they are shown
    of: NDArray[np.int64]  # place in `labels` of every token, int64 [V]

    def __iter__(self) -> Iterator[tuple[int, str, NDArray[np.bool_]]]:
        """(place, label, mask of its tokens [V]) of each group."""
        for place, label in enumerate(self.labels):
            yield place, label, self.of == place


@dataclass(frozen=True)
class Texts:
    """What the rows of a table stand for."""

    of: tuple[str | None, ...]  # text of each row [V]; None for a row without a token
    special: frozenset[int]  # rows of tokens that are no text, such as an end of a document


def read_texts(folder: Folder, rows: int) -> Texts:
    """Decode every row's token by the folder's tokenizer.json; bytes of a byte-level vocabulary become text.

    Ids may have holes, so every row is looked up: the number of tokens says nothing about the largest id.
    """
    tokenizer = open_tokenizer(folder)
    known = [row for row in range(rows) if tokenizer.id_to_token(row) is not None]
    decoded = tokenizer.decode_batch([[row] for row in known], skip_special_tokens=False)
    texts = dict(zip(known, decoded, strict=True))
    added = tokenizer.get_added_tokens_decoder().items()
    return Texts(tuple(map(texts.get, range(rows))), frozenset(n for n, token in added if token.special and n < rows))


def by_script(texts: Texts, unused: Iterable[int] = ()) -> Groups:
    """Group tokens by script, those with most tokens first; tokens of no text, `unused` ones too, are special."""
    special = texts.special | {row for row in unused if texts.of[row] is not None}
    names = [SPECIAL if row in special else script_of(text) for row, text in enumerate(texts.of)]
    labels = tuple(name for name, _ in Counter(names).most_common())
    place = {name: number for number, name in enumerate(labels)}
    return Groups(labels, np.array([place[name] for name in names], np.int64))


def script_of(text: str | None) -> str:
    """Name the script of a token."""
    if text is None:
        return NONE
    names = (unicodedata.name(character, "") for character in text if character.isalpha())
    words = (name.removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ").partition(" ")[0] for name in names)
    letters = Counter(SCRIPTS.get(word, OTHER) for word in words)
    if letters:
        return letters.most_common(1)[0][0]
    if _PARTIAL in text:
        return PARTIAL
    return DIGITS if any(map(str.isnumeric, text)) else PUNCTUATION if text.strip() else SPACE


def token_names(texts: Texts | None, ids: Sequence[int]) -> tuple[str, ...]:
    """Name tokens: their text, or `#id` where it is not known, empty, or no whole character."""
    found = ((row, texts and texts.of[row]) for row in ids)
    return tuple(text if text and _PARTIAL not in text else f"#{row}" for row, text in found)
