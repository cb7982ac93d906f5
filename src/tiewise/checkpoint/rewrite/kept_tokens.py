"""The tokens that stay when a vocabulary is trimmed, and what that choice costs on text.

A set of tokens that stay is closed: it contains the ancestors of all its tokens (`tokenizer_file.py`).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tiewise.checkpoint.rewrite.tokenizer_file import TokenizerFile
from tiewise.checkpoint.rewrite.tokenizer_text import encoded, loaded
from tiewise.checkpoint.untrusted import MOST_BYTES, read_whole, short
from tiewise.core.errors import CheckpointError

MEASURED_SHARE = 0.1  # of the text, at its end, is what the measured choice does not see
MOST_MEASURED = 4 << 20  # characters that are measured at most


@dataclass(frozen=True)
class TextUse:
    """Use of tokens by a text, and pieces of its end for a measurement."""

    counts: Counter[int] = field(default_factory=Counter)  # in all of the text
    early_counts: Counter[int] = field(default_factory=Counter)  # in all but its last tenth
    last_pieces: list[tuple[str, list[int]]] = field(default_factory=list)  # of its last tenth, with their tokens


def read_use(words: TokenizerFile, text: str | os.PathLike[str]) -> TextUse:
    """Count the tokens of a text file, and return pieces of its end.

    These have `MOST_MEASURED` characters or one piece more.
    """
    use = TextUse()
    size = os.path.getsize(text) if os.path.isfile(text) else 0
    end = (1 - MEASURED_SHARE) * size
    letters = 0
    for bytes_before, piece, ids in encoded(words.engine, Path(text), f"counting {short(text)}"):
        use.counts.update(ids)
        if bytes_before < end:
            use.early_counts.update(ids)
        elif ids and letters < MOST_MEASURED:
            use.last_pieces.append((piece, ids))
            letters += len(piece)
    return use


def listed_tokens(path: Path, words: TokenizerFile) -> set[int]:
    """Return the ids of the tokens that a file lists.

    All of its lines are ids, or all are tokens as the vocabulary has them.
    """
    fix = "write a token on each line as tokenizer.json has it (Ġword, ▁word), or on each line an id"
    try:
        text = read_whole(path, MOST_BYTES).decode()
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: not UTF-8 text", fix) from None
    stripped = (line.rstrip("\r") for line in text.split("\n"))
    lines = [line for line in stripped if line]
    if not lines:
        raise CheckpointError(f"{path}: empty", fix)
    id_of = words.ids
    if all(re.fullmatch("[0-9]+", line) for line in lines):  # `str.isdigit` accepts ², which is a token
        id_of = {str(number): number for number in words.ids.values()}
    for line in lines:
        if line not in id_of:
            raise CheckpointError(f"{path}: {short(line)!r} is no token of this tokenizer", fix)
    return {id_of[line] for line in lines}


def choose_tokens(words: TokenizerFile, must: set[int], counts: Counter[int], size: int | None) -> set[int]:
    """Return the closed set of tokens that stay.

    They are those of the text, or as many as `size` says.

    With `size`, the most frequent tokens come first, then those of the smallest ids. A token whose ancestors do not
    fit is skipped.

    Args:
        must: a closed set of tokens that stay in any case.
        counts: how often the text uses each token.
    """
    if size is None:
        return must | words.closed(counts)
    stay = set(must)
    for token in sorted(words.ids.values(), key=lambda token: (-counts[token], token)):
        if len(stay) == size:
            break
        if token not in stay:
            more = words.closed([token]) - stay
            if len(stay) + len(more) <= size:
                stay |= more
    return stay


def cost_on_text(words: TokenizerFile, stay: set[int], pieces: list[tuple[str, list[int]]]) -> str:
    """Return in one sentence how many more tokens text takes.

    Raise if the trimmed tokenizer loses text.

    Args:
        stay: a closed set of tokens that was chosen without these pieces.
        pieces: pieces of text, each with its tokens in the whole vocabulary.
    """
    new_ids = {old: number for number, old in enumerate(sorted(stay))}
    trial = loaded(words.without(new_ids), "the trimmed tokenizer")
    length = {number: len(token) for token, number in words.ids.items()}
    tokens_before = tokens_after = letters = missed_letters = 0
    for piece, old in pieces:
        new = trial.encode(piece, add_special_tokens=False).ids
        all_stay = all(token in new_ids for token in old)
        is_cut_otherwise = all_stay and new != [new_ids[token] for token in old]
        # a word that WordPiece did not know may be known without a piece that led it astray
        must_read_alike = words.kind != "WordPiece"
        if is_cut_otherwise or (must_read_alike and trial.decode(new) != words.engine.decode(old)):
            what = f"{words.where}: without some tokens a text is cut or read otherwise"
            raise CheckpointError(what, "it is not trimmed: report this with the tokenizer's name")
        tokens_before += len(old)
        tokens_after += len(new)
        letters += sum(length[token] for token in old)
        missed_letters += sum(length[token] for token in old if token not in new_ids)
    characters = sum(len(piece) for piece, _ in pieces)
    more = f"{tokens_after / tokens_before - 1:.2%} more tokens"
    missed = f"{missed_letters / letters:.2%} of it stood in tokens that are gone"
    return f"the text's last {characters:,} letters, with tokens that only its start chose: {more}; {missed}"
