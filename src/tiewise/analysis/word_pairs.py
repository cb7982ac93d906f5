"""Requested pairs of words on a path, both ways: "New" → "York" and "York" → "New"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tiewise.analysis.direct_path import DirectPath
from tiewise.analysis.path_tokens import Transition, both_ways
from tiewise.analysis.token_texts import find_tokens
from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.errors import DataError


@dataclass(frozen=True)
class WordPair:
    """What a path says of two words.

    Args:
        first: as asked for.
        second: the same.
        there: of `second` behind `first`.
        back: of `first` behind `second`.
    """

    first: str
    second: str
    there: Transition
    back: Transition

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return asdict(self)


def find_pairs(folder: Folder, words: Sequence[tuple[str, str]], rows: int) -> tuple[tuple[int, int], ...]:
    """Return the ids of each pair of words.

    Args:
        folder: with the model's tokenizer.json.
        words: pairs; each word must be one token.
        rows: tokens that both tables have.

    Raises:
        DataError: no tokenizer, a word that is not one token, or one whose id a table does not have.
    """
    if not words:
        return ()
    found = find_tokens(folder, [word for pair in words for word in pair])
    for token in found:
        if token.id >= rows:
            what = f"{folder.path}: {token.text!r} is token {token.id}, its tables have {rows:,} rows"
            raise DataError(what, "put the tokenizer that belongs to the model beside it")
    return tuple((a.id, b.id) for a, b in zip(found[::2], found[1::2], strict=True))


def word_pairs(
    path: DirectPath, words: Sequence[tuple[str, str]], ids: Sequence[tuple[int, int]]
) -> tuple[WordPair, ...]:
    """Ask a path of every pair, whose ids are `ids`."""
    asked = both_ways(path, ids)
    return tuple(WordPair(*pair, there, back) for pair, (there, back) in zip(words, asked, strict=True))
