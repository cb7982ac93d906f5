"""The tokens that stay when a vocabulary is trimmed, and what that choice costs on text.

A set of tokens that stay is closed: it contains the ancestors of all its tokens (`tokenizer_file.py`).
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

MEASURED_SHARE = 0.1  # of the text, at its end, is what the measured choice does not see
MOST_MEASURED = 4 << 20  # characters that are measured at most
LIST_FIX = "write a token on each line as tokenizer.json has it (Ġword, ▁word), or on each line an id"


@dataclass(frozen=True)
class TextUse:
    """Use of tokens by a text, and pieces of its end for a measurement."""

    counts: Counter[int] = field(default_factory=Counter)  # in all of the text
    early_counts: Counter[int] = field(default_factory=Counter)  # in all but its last tenth
    last_pieces: list[tuple[str, list[int]]] = field(default_factory=list)  # of its last tenth, with their tokens


def read_use(tokenizer_file: TokenizerFile, text: str | os.PathLike[str]) -> TextUse:
    """Count the tokens of a text file, and return pieces of its end.

    These have `MOST_MEASURED` characters or one piece more.
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

    All of its lines are ids, or all are tokens as the vocabulary has them.
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
            raise CheckpointError(f"{path}: {short(line)!r} is no token of this tokenizer", LIST_FIX)
        ids.add(id_of[line])
    return ids


def _read_lines(path: Path) -> list[str]:
    """Read the lines of a text file that are not empty."""
    try:
        text = read_bytes(path, MOST_BYTES).decode()
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: not UTF-8 text", LIST_FIX) from None
    lines = [line.rstrip("\r") for line in text.split("\n")]
    return [line for line in lines if line]


def choose_tokens(
    tokenizer_file: TokenizerFile, required_ids: set[int], counts: Counter[int], size: int | None
) -> set[int]:
    """Return the closed set of tokens that stay.

    They are those of the text, or as many as `size` says.

    With `size`, the most frequent tokens come first, then those of the smallest ids. A token whose ancestors do not
    fit is skipped.

    Args:
        must: a closed set of tokens that stay in any case.
        counts: how often the text uses each token.
    """
    if size is None:
        return required_ids | tokenizer_file.closed(counts)
    by_use = sorted(tokenizer_file.ids.values())
    by_use.sort(key=counts.__getitem__, reverse=True)  # stable: of equal counts the smallest ids first
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


def cost_on_text(tokenizer_file: TokenizerFile, retained_ids: set[int], pieces: list[tuple[str, list[int]]]) -> str:
    """Return in one sentence how many more tokens text takes.

    Raise if the trimmed tokenizer loses text.

    Args:
        stay: a closed set of tokens that was chosen without these pieces.
        pieces: pieces of text, each with its tokens in the whole vocabulary.
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
    more = f"{tokens_after / tokens_before - 1:.2%} more tokens"
    missed = f"{missed_letters / letters:.2%} of it stood in tokens that are gone"
    return f"the text's last {characters:,} letters, with tokens that only its start chose: {more}; {missed}"


class _TrimmedTokenizer:
    """A tokenizer without the tokens that go."""

    def __init__(self, tokenizer_file: TokenizerFile, retained_ids: set[int]) -> None:
        self.tokenizer_file = tokenizer_file
        self.new_ids = {old: number for number, old in enumerate(sorted(retained_ids))}
        self.engine = load_tokenizer(tokenizer_file.without(self.new_ids), "the trimmed tokenizer")

    def require_same_text(self, old: list[int], new: list[int]) -> None:
        """Raise if a text's tokens before and after show that the trimmed tokenizer loses text."""
        if self._is_cut_otherwise(old, new) or self._is_read_otherwise(old, new):
            problem = f"{self.tokenizer_file.where}: without some tokens a text is cut or read otherwise"
            raise CheckpointError(problem, "it is not trimmed: report this with the tokenizer's name")

    def _is_cut_otherwise(self, old: list[int], new: list[int]) -> bool:
        """Return True if a text all of whose tokens stay now has other ones."""
        if not self.new_ids.keys() >= set(old):
            return False
        return new != [self.new_ids[token] for token in old]

    def _is_read_otherwise(self, old: list[int], new: list[int]) -> bool:
        """Return True if a text's new tokens are read as another text than its old ones."""
        if (
            self.tokenizer_file.kind == WORDPIECE
        ):  # a word that it did not know may be known without a piece that led it astray
            return False
        text_before, text_after = self.tokenizer_file.engine.decode(old), self.engine.decode(new)
        return bool(text_before != text_after)
