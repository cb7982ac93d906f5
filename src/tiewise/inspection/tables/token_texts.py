"""Tokens and their texts, by the folder's own tokenizer.json.

The search for a word's token, and the decoding of all rows, need the `tokenizers` library, which a light install lacks.

Tokens are grouped by their frequency in a text, or by script.

A token's script is that of most of its letters, by the first word of their Unicode names (so that 'ё' is Cyrillic and
'の' Kana); without a letter it is digits, white space or punctuation. Languages are not guessed: a script is visible in
a single token, and languages that share a script are not distinguished.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.hf_folder import Folder, json_object
from tiewise.checkpoint.rewrite.tokenizer_text import load_tokenizer
from tiewise.checkpoint.token_bytes import BYTE
from tiewise.checkpoint.tokenizer_ids import read_tokenizer
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import DataError
from tiewise.core.text import byte_letters


def open_tokenizer(folder: Folder) -> Any:
    """Open the folder's tokenizer.json, without truncation."""
    files = folder.read("tokenizer.json")
    if not files:
        raise DataError(f"{folder.path}: no tokenizer.json", "put the model's tokenizer into its folder, or give ids")
    return load_tokenizer(files["tokenizer.json"], str(folder.path / "tokenizer.json"))


def find_tokens(folder: Folder, texts: Iterable[str]) -> list[int]:
    """Find the one token of each text.

    A text is searched as a word after a space, then as it is spelled, then as a piece of the vocabulary.

    Raises:
        DataError: the folder has no tokenizer.json, or a text is not one token.
        CheckpointError: the tokenizer.json cannot be read.
    """
    tokenizer = open_tokenizer(folder)
    unknown = _unknown_token(tokenizer)
    return [_find_token(tokenizer, text, unknown) for text in texts]


def _unknown_token(tokenizer: Any) -> int | None:
    """Return the token for text that the vocabulary lacks; None if there is none."""
    number: int | None = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")
    return number


def _find_token(tokenizer: Any, text: str, unknown: int | None) -> int:
    """Return the one token of a text.

    `unknown` is the token for text that the vocabulary lacks.
    """
    alone = tokenizer.encode(text, add_special_tokens=False)
    for encoding in (tokenizer.encode(f" {text}", add_special_tokens=False), alone):
        if len(encoding.ids) != 1 or encoding.ids[0] == unknown:
            continue
        # some vocabularies drop characters that they lack: the one token must cover all of the text
        if np.ptp(encoding.offsets[0]) >= len(text):
            return int(encoding.ids[0])
    number = tokenizer.token_to_id(text)
    if number is not None:
        return int(number)
    pieces = " + ".join(short(piece) for piece in alone.tokens[:6])
    problem = f"{short(text)} is not one token of this vocabulary: {pieces or 'nothing'}"
    raise DataError(problem, "choose a word that is one token")


def tokens_of_words(folder: Folder, words: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the tokens of each word, without special tokens.

    It encodes each word after a space and as it is spelled, and takes the encoding of fewer tokens. Of two equally long
    ones, it takes that after a space. A word has no tokens, (), if both have an unknown token or lack a character.

    Raises:
        DataError: the folder has no tokenizer.json.
        CheckpointError: the tokenizer.json cannot be read.
    """
    tokenizer = open_tokenizer(folder)
    unknown = _unknown_token(tokenizer)
    unique = list(dict.fromkeys(words))
    tokens: dict[str, tuple[int, ...]] = dict.fromkeys(unique, ())
    for before in (" ", ""):
        encodings = tokenizer.encode_batch([before + word for word in unique], add_special_tokens=False)
        for word, encoding in zip(unique, encodings, strict=True):
            is_shorter = not tokens[word] or len(encoding.ids) < len(tokens[word])
            if is_shorter and _covers(encoding, before + word, unknown):
                tokens[word] = tuple(encoding.ids)
    return tokens


def _covers(encoding: Any, text: str, unknown: int | None) -> bool:
    """Return True if known tokens cover every character of a text that is not white space.

    Some vocabularies drop characters that they lack.
    """
    if unknown in encoding.ids:
        return False
    needed = {position for position, character in enumerate(text) if not character.isspace()}
    for first, last in encoding.offsets:
        needed.difference_update(range(first, last))
    return not needed


def read_as(folder: Folder, ids: Iterable[int]) -> tuple[str, ...]:
    """Return the text of each token, with the space before it (" York").

    Parts of characters are bytes: "<0xE2>". Without a tokenizer.json, or without a token, the text is "#1234".
    """
    if not folder.has("tokenizer.json"):
        return tuple(f"#{number}" for number in ids)
    tokens = read_tokenizer(folder)
    if tokens is None or "tokenizer.json" not in tokens.files:
        raise DataError(f"{folder.path}: tokenizer.json cannot be read", "take it from its source again")
    pieces = {number: piece for piece, number in tokens.base.items()}
    listed = [(number, tokens.added.get(number) or pieces.get(number, f"#{number}")) for number in ids]
    if not _is_byte_level(folder):
        return tuple(_text_of_piece(piece) for _, piece in listed)
    byte_of = byte_letters()
    texts = []
    for number, piece in listed:
        if number in tokens.added:  # stored as text, not in letters that mean bytes
            texts.append(_spaced(piece))
        else:
            texts.append(_text_of_letters(piece, byte_of))
    return tuple(texts)


def _is_byte_level(folder: Folder) -> bool:
    """Return True if the folder's tokenizer.json spells each byte as one letter."""
    decoder = json_object(folder.source, "tokenizer.json").get("decoder")
    return isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"


def _text_of_letters(piece: str, byte_of: dict[str, int]) -> str:
    """Return a byte-level piece as text; bytes of an incomplete character are <0xE2>."""
    if not byte_of.keys() >= set(piece):
        return _spaced(piece)
    data = bytes(byte_of[letter] for letter in piece)
    return _decoded(data, "".join(f"<0x{byte:02X}>" for byte in data))


def _text_of_piece(piece: str) -> str:
    """Return a SentencePiece or WordPiece as text; <0x41> is a byte."""
    byte = BYTE.fullmatch(piece)
    if byte is None:
        return _spaced(piece)
    return _decoded(bytes([int(byte[1], 16)]), piece)


def _decoded(data: bytes, piece: str) -> str:
    """Return the UTF-8 text of a piece's bytes, else the piece as it is spelled."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _spaced(piece)


def _spaced(piece: str) -> str:
    """Return a piece with SentencePiece's marks as spaces if it starts with one."""
    if not piece.startswith("▁"):
        return piece
    return piece.replace("▁", " ")


NAMED = ("Latin", "Cyrillic", "Greek", "Hangul", "Arabic", "Hebrew", "Devanagari")
SCRIPTS = {name.upper(): name for name in NAMED} | {"CJK": "Han", "HIRAGANA": "Kana", "KATAKANA": "Kana"}
DIGITS, SPACE, PUNCTUATION = "digits", "white space", "punctuation"
OTHER, PARTIAL, SPECIAL, NONE = "other letters", "parts of characters", "special tokens", "no token"
_PARTIAL = "\ufffd"  # a decoder's output for bytes that are an incomplete character


@dataclass(frozen=True)
class Groups:
    """Groups of tokens; each token is in one."""

    labels: tuple[str, ...]  # names of the groups, in display order
    of: NDArray[np.int64]  # index in `labels` of every token, int64 [V]

    def __iter__(self) -> Iterator[tuple[int, str, NDArray[np.bool_]]]:
        """Yield (index, label, mask of its tokens [V]) of each group."""
        for index, label in enumerate(self.labels):
            yield index, label, self.of == index


@dataclass(frozen=True)
class Texts:
    """Texts of the tokens of a table's rows."""

    of: tuple[str | None, ...]  # text of each row [V]; None for a row without a token
    special: frozenset[int]  # rows of tokens that are no text, such as an end of a document


def read_texts(folder: Folder, rows: int) -> Texts:
    """Decode every row's token by the folder's tokenizer.json.

    Bytes of a byte-level vocabulary become text. Ids may have gaps, so every row is looked up: the number of tokens
    does
    not determine the largest id.
    """
    tokenizer = open_tokenizer(folder)
    with_token = [row for row in range(rows) if tokenizer.id_to_token(row) is not None]
    decoded = tokenizer.decode_batch([[row] for row in with_token], skip_special_tokens=False)
    texts = dict(zip(with_token, decoded, strict=True))
    added = tokenizer.get_added_tokens_decoder().items()
    special = frozenset(number for number, token in added if token.special and number < rows)
    return Texts(tuple(texts.get(row) for row in range(rows)), special)


def by_script(texts: Texts, unused: Iterable[int] = ()) -> Groups:
    """Group tokens by script, largest group first.

    Tokens that are no text, `unused` ones included, are special.
    """
    names = [script_of(text) for text in texts.of]
    for row in texts.special:
        names[row] = SPECIAL
    for row in unused:
        if texts.of[row] is not None:
            names[row] = SPECIAL
    labels = tuple(name for name, _ in Counter(names).most_common())
    index = {name: number for number, name in enumerate(labels)}
    return Groups(labels, np.array([index[name] for name in names], np.int64))


def script_of(text: str | None) -> str:
    """Return the script of a token."""
    if text is None:
        return NONE
    scripts = Counter(_script_of_letter(character) for character in text if character.isalpha())
    if scripts:
        [(script, _)] = scripts.most_common(1)
        return script
    if _PARTIAL in text:
        return PARTIAL
    if any(character.isnumeric() for character in text):
        return DIGITS
    if text.strip():
        return PUNCTUATION
    return SPACE


def _script_of_letter(letter: str) -> str:
    """Return the script of a letter, by the first word of its Unicode name."""
    name = unicodedata.name(letter, "").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ")
    return SCRIPTS.get(name.partition(" ")[0], OTHER)


def token_names(texts: Texts | None, ids: Sequence[int]) -> tuple[str, ...]:
    """Return the texts of tokens as names.

    A token has the name `#id` without a tokenizer, without a text, or if its text is an incomplete character.
    """
    if texts is None:
        return tuple(f"#{row}" for row in ids)
    return tuple(_token_name(row, texts.of[row]) for row in ids)


def _token_name(row: int, text: str | None) -> str:
    """Return the text of a row's token, or `#id` if it has no readable text."""
    if text and _PARTIAL not in text:
        return text
    return f"#{row}"
