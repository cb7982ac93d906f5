"""Tokens in groups: by how often a text has them, and by the script they are written in.

A token's script is that of most of its letters, as the first word of their Unicode names says (so that 'ё' is Cyrillic
and 'の' Kana); without a letter it is digits, white space or punctuation. No language is guessed: a script is what one
token shows, and languages that share a script are not told apart.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.token_texts import open_tokenizer
from tiewise.checkpoint.hf_folder import Folder
from tiewise.data.frequency import bin_of, frequency_bins

SCRIPTS = {
    "LATIN": "Latin",
    "CYRILLIC": "Cyrillic",
    "GREEK": "Greek",
    "CJK": "Han",
    "HIRAGANA": "Kana",
    "KATAKANA": "Kana",
    "HANGUL": "Hangul",
    "ARABIC": "Arabic",
    "HEBREW": "Hebrew",
    "DEVANAGARI": "Devanagari",
}
DIGITS, SPACE, PUNCTUATION = "digits", "white space", "punctuation"
OTHER, PARTIAL, SPECIAL, NONE = "other letters", "parts of characters", "special tokens", "no token"
_WIDTHS = ("FULLWIDTH ", "HALFWIDTH ")
_PARTIAL = "\ufffd"  # what a decoder gives for bytes that are no whole character


@dataclass(frozen=True)
class Groups:
    """Each token in one group.

    Args:
        labels: names of the groups, in the order in which they are shown.
        of: place in `labels` of every token, int64 [V].
    """

    labels: tuple[str, ...]
    of: NDArray[np.int64]


@dataclass(frozen=True)
class Texts:
    """What the rows of a table stand for.

    Args:
        of: text of each row [V]; None for a row without a token.
        special: rows of tokens that are no text, such as an end of a document.
    """

    of: tuple[str | None, ...]
    special: frozenset[int]


def read_texts(folder: Folder, rows: int) -> Texts:
    """Decode every row's token by the folder's tokenizer.json; bytes of a byte-level vocabulary become text.

    Raises:
        DataError: no tokenizer.json in the folder, or one that cannot be read.
    """
    tokenizer = open_tokenizer(folder)
    known = [row for row in range(min(rows, tokenizer.get_vocab_size())) if tokenizer.id_to_token(row) is not None]
    decoded = tokenizer.decode_batch([[row] for row in known], skip_special_tokens=False)
    texts: list[str | None] = [None] * rows
    for row, text in zip(known, decoded, strict=True):
        texts[row] = text
    added = tokenizer.get_added_tokens_decoder().items()
    return Texts(tuple(texts), frozenset(row for row, token in added if token.special and row < rows))


def by_frequency(counts: NDArray[np.int64]) -> Groups:
    """Group tokens by the decades of their counts [V]."""
    return Groups(tuple(found.label for found in frequency_bins(counts)), bin_of(counts))


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
    letters = Counter(_script(character) for character in text if character.isalpha())
    if letters:
        return letters.most_common(1)[0][0]
    if _PARTIAL in text:
        return PARTIAL
    if any(character.isnumeric() for character in text):
        return DIGITS
    return PUNCTUATION if text.strip() else SPACE


def _script(letter: str) -> str:
    name = unicodedata.name(letter, "")
    for width in _WIDTHS:
        name = name.removeprefix(width)
    return SCRIPTS.get(name.partition(" ")[0], OTHER)


def shown(texts: Texts | None, ids: Sequence[int]) -> tuple[str, ...]:
    """Name tokens: their text, or `#id` where it is not known, empty, or no whole character."""
    if texts is None:
        return tuple(f"#{row}" for row in ids)
    found = ((row, texts.of[row]) for row in ids)
    return tuple(text if text and _PARTIAL not in text else f"#{row}" for row, text in found)
