"""Choice of the tokens that `trim` retains, and the cost of that choice on text.

A set of retained tokens is closed: it contains the ancestors of all its tokens (`tokenizer_file.py`).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tiewise.checkpoint.rewrite.tokenizer_file import WORDPIECE, TokenizerFile
from tiewise.checkpoint.rewrite.tokenizer_text import encode_text, load_tokenizer
from tiewise.checkpoint.untrusted import MOST_BYTES, read_bytes, short
from tiewise.core.errors import CheckpointError
from tiewise.core.measurement import percent

MEASURED_SHARE = 0.1  # share of the text, at its end, on which the cost is measured
MOST_MEASURED = 4 << 20  # largest number of characters in that measurement
LIST_FIX = "write a token on each line as tokenizer.json has it (Ġword, ▁word), or on each line an id"


@dataclass(frozen=True)
class TextUse:
    """Token counts of a text, and pieces of its end for the measurement of the cost."""

    counts: Counter[int] = field(default_factory=Counter)  # in the full text
    early_counts: Counter[int] = field(default_factory=Counter)  # in the first nine tenths
    last_pieces: list[tuple[str, list[int]]] = field(default_factory=list)  # (piece, its tokens) of the last tenth


def read_use(tokenizer_file: TokenizerFile, text: str | os.PathLike[str]) -> TextUse:
    """Return the token counts of a text file, and pieces of its end.

    The pieces end with the one that reaches `MOST_MEASURED` characters.
    """
    use = TextUse()
    size = 0
    if os.path.isfile(text):
        size = os.path.getsize(text)
    end = (1 - MEASURED_SHARE) * size
    letters = 0
    for bytes_before, piece, ids in encode_text(tokenizer_file.engine, Path(text), f"counting {short(text)}"):
        use.counts.update(ids)
        if bytes_before < end:
            use.early_counts.update(ids)
        elif ids and letters < MOST_MEASURED:
            use.last_pieces.append((piece, ids))
            letters += len(piece)
    return use


def listed_tokens(path: Path, tokenizer_file: TokenizerFile) -> set[int]:
    """Return the ids of the tokens that a file lists.

    The lines are all ids, or all tokens as tokenizer.json spells them.
    """
    lines = _read_lines(path)
    if not lines:
        raise CheckpointError(f"{path}: empty", LIST_FIX)
    id_of = tokenizer_file.ids
    if all(re.fullmatch("[0-9]+", line) for line in lines):  # `str.isdigit` accepts ², which is a token
        id_of = {str(number): number for number in tokenizer_file.ids.values()}
    ids = set[int]()
    for line in lines:
        if line not in id_of:
            raise CheckpointError(f"{path}: {short(line)!r} is not a token of this tokenizer", LIST_FIX)
        ids.add(id_of[line])
    return ids


def _read_lines(path: Path) -> list[str]:
    """Return the lines of a text file that are not empty."""
    try:
        text = read_bytes(path, MOST_BYTES).decode()
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: not UTF-8 text", LIST_FIX) from None
    lines = [line.rstrip("\r") for line in text.split("\n")]
    return [line for line in lines if line]


def choose_tokens(
    tokenizer_file: TokenizerFile, required_ids: set[int], counts: Counter[int], size: int | None
) -> set[int]:
    """Return the closed set of retained tokens.

    Without `size`, these are the required tokens and those of the text. With `size`, the most frequent tokens are added
    first, then those with the smallest ids. A token is skipped if it and its ancestors do not fit.

    Args:
        required_ids: a closed set of tokens that are always retained.
        counts: number of occurrences of each token in the text.
        size: number of retained tokens.
    """
    if size is None:
        return required_ids | tokenizer_file.closed(counts)
    by_use = sorted(tokenizer_file.ids.values())
    by_use.sort(key=counts.__getitem__, reverse=True)  # stable: equal counts stay in the order of ids
    retained_ids = set(required_ids)
    for token in by_use:
        if len(retained_ids) == size:
            break
        if token in retained_ids:
            continue
        more = tokenizer_file.closed([token]) - retained_ids
        if len(retained_ids) + len(more) <= size:
            retained_ids |= more
    return retained_ids


@dataclass(frozen=True)
class CostOnText:
    """Cost of trimming on unseen text: the end of the text that chose the tokens."""

    characters: int  # length of that end
    more_tokens: float  # additional tokens, as a share of those before
    missed: float  # share of its letters that were in dropped tokens

    def sentence(self) -> str:
        """Return the number of additional tokens as a sentence, without a full stop."""
        return f"On unseen text the smaller vocabulary needs {percent(self.more_tokens, 1)} more tokens"

    def details(self) -> str:
        """Return the text of the measurement, and the share of it that dropped tokens covered."""
        measured = f"unseen text: its last {self.characters:,} letters, with tokens chosen from the text before"
        return f"{measured}; dropped tokens covered {percent(self.missed)} of them"


def cost_on_text(
    tokenizer_file: TokenizerFile, retained_ids: set[int], pieces: list[tuple[str, list[int]]]
) -> CostOnText:
    """Return how many more tokens a text takes after trimming.

    Raise if the trimmed tokenizer loses text.

    Args:
        retained_ids: a closed set of tokens that was chosen without these pieces.
        pieces: pieces of text, each with its tokens in the full vocabulary.
    """
    trimmed = _TrimmedTokenizer(tokenizer_file, retained_ids)
    length = {number: len(token) for token, number in tokenizer_file.ids.items()}
    characters = tokens_before = tokens_after = letters = missed_letters = 0
    for piece, old in pieces:
        new = trimmed.engine.encode(piece, add_special_tokens=False).ids
        trimmed.require_same_text(old, new)
        gone = [token for token in old if token not in retained_ids]
        characters += len(piece)
        tokens_before += len(old)
        tokens_after += len(new)
        letters += sum(length[token] for token in old)
        missed_letters += sum(length[token] for token in gone)
    return CostOnText(characters, tokens_after / tokens_before - 1, missed_letters / letters)


class _TrimmedTokenizer:
    """A tokenizer without the dropped tokens."""

    def __init__(self, tokenizer_file: TokenizerFile, retained_ids: set[int]) -> None:
        self.tokenizer_file = tokenizer_file
        self.new_ids = {old: number for number, old in enumerate(sorted(retained_ids))}
        self.engine = load_tokenizer(tokenizer_file.without(self.new_ids), "the trimmed tokenizer")

    def require_same_text(self, old: list[int], new: list[int]) -> None:
        """Raise if the trimmed tokenizer loses text.

        Args:
            old: ids of the text's tokens in the full vocabulary.
            new: ids of its tokens in the trimmed vocabulary.
        """
        if self._is_cut_otherwise(old, new) or self._is_read_otherwise(old, new):
            problem = f"{self.tokenizer_file.where}: without some tokens a text is cut or read otherwise"
            raise CheckpointError(problem, "it is not trimmed: report this with the tokenizer's name")

    def _is_cut_otherwise(self, old: list[int], new: list[int]) -> bool:
        """Return True if all old tokens are retained and the new tokens differ."""
        if not self.new_ids.keys() >= set(old):
            return False
        return new != [self.new_ids[token] for token in old]

    def _is_read_otherwise(self, old: list[int], new: list[int]) -> bool:
        """Return True if the new tokens decode to another text than the old ones."""
        # WordPiece takes the longest piece first, which may lead to an unknown word; without that piece the same word
        # may become known, so the texts may differ
        if self.tokenizer_file.algorithm == WORDPIECE:
            return False
        text_before, text_after = self.tokenizer_file.engine.decode(old), self.engine.decode(new)
        return bool(text_before != text_after)
