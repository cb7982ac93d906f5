"""Texts in pieces for a tokenizer, byte letters, and statistics of tokens.

A text of any size is cut into pieces, and these are gathered in batches, which use several threads of the tokenizer.
The statistics are the count of each token, the decade of that count, and pairs of tokens that follow each other in one
order only. Counts come from the training split, because they describe how often the model saw a token.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiewise.core.errors import DataError

_BATCH = 1 << 19  # characters per call of the tokenizer, which uses about 100 bytes per token
PIECE = 1 << 14  # characters; longer documents are cut, so that a batch occupies several threads
# Tokenizers start a word at a single space between letters: a cut there leaves the tokens of the text unchanged.
_SAFE = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")


def cut_pieces(texts: Iterable[tuple[str, bool]], size: int = PIECE) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether a document ends there) of documents, cut where tokens do not change.

    `texts` are parts of documents in the same form. A piece has `size` characters or a few more. If there is no single
    space between letters for 3 · `size` more characters, the cut is at a line end, or at any character.
    """
    text, start = "", 0
    for part, ends in texts:
        text, start = text[start:] + part, 0
        while len(text) - start > size:
            stop = start + 4 * size
            if safe := _SAFE.search(text, start + size, stop):
                end = safe.start()
            elif len(text) > stop:
                end = text.rfind("\n", start + size, stop) + 1 or stop
            else:  # the next part of the text may contain a safe cut
                break
            yield text[start:end], False
            start = end
        if ends:
            yield text[start:], True
            text, start = "", 0


def batch_pieces(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Yield lists of pieces, each large enough for one call of the tokenizer."""
    batch, size = list[tuple[str, bool]](), 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def prepends_space(engine: Any) -> bool:
    """Return whether a tokenizer adds a space before every text, as SentencePiece does.

    A continuation of a text must then not start with a space.
    """

    def ids(text: str) -> list[int]:
        """Return the token ids of a text."""
        tokens: list[int] = engine.encode(text, add_special_tokens=False).ids
        return tokens

    word, spaced_word, second_word = ids("a"), ids(" a"), ids("b a")
    ends_with_spaced = second_word[-len(spaced_word) :] == spaced_word
    return not ends_with_spaced and second_word[-len(word) :] == word


def byte_letters() -> dict[str, int]:
    """Return {letter: byte} for the letters by which byte-level tokenizers write bytes.

    A printable byte is its own letter; the others have letters from code point 256 on.
    """
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in prints]
    return {chr(byte if byte in prints else 256 + others.index(byte)): byte for byte in range(256)}


# statistics of tokens

BINS = ("0", "1–9", "10–99", "100–999", "1000–9999", "≥10000")  # decades of training counts
_EDGES = (1, 10, 100, 1000, 10_000)  # smallest count of each bin but the first
CHUNK = 1 << 22  # tokens counted at once


def token_counts(tokens: np.ndarray, vocab: int, chunk: int = CHUNK) -> np.ndarray:
    """Return how often each token occurs, int64 [V].

    Raises:
        DataError: a token is outside of the vocabulary.
    """
    counts = np.zeros(vocab, np.int64)
    for start in range(0, len(tokens), chunk):
        chunk_counts = np.bincount(tokens[start : start + chunk], minlength=vocab)
        if len(chunk_counts) > vocab:
            raise DataError(f"token {len(chunk_counts) - 1} in a vocabulary of {vocab}", "prepare the text again")
        counts += chunk_counts
    return counts


def frequency_bins(counts: np.ndarray) -> np.ndarray:
    """Return the index in `BINS` of every token, int64 [V], from its count."""
    return np.searchsorted(_EDGES, counts, side="right").astype(np.int64)


@dataclass(frozen=True)
class Bigram:
    """Two tokens that follow each other more often in one order than in the other.

    A symmetric direct path cannot represent the difference.
    """

    left: int
    right: int
    forward: int  # occurrences of left, right
    backward: int  # occurrences of right, left
    p_forward: float  # p(next is right | left)
    p_backward: float  # p(next is left | right)


def asymmetric_bigrams(
    tokens: np.ndarray,
    vocab: int,
    top: int = 12,
    minimum: int | None = None,
    eos_id: int | None = None,
    paired: int = 2000,
    chunk: int = CHUNK,
) -> list[Bigram]:
    """Return the `top` adjacent pairs with the largest p_forward − p_backward, largest first.

    Only the `paired` most frequent tokens are paired (2,000² counts take 32 MB). A pair must occur `minimum` times; by
    default that is once in 5,000 tokens, and at least 5 times. No token is paired with itself or with `eos_id`, which
    separates documents.
    """
    minimum = max(5, len(tokens) // 5000) if minimum is None else minimum
    counts = token_counts(tokens, vocab, chunk)
    ranked = np.argsort(-counts, kind="stable")
    frequent = ranked[(ranked != (-1 if eos_id is None else eos_id)) & (counts[ranked] > 0)][:paired]
    # how often frequent[i] is followed by frequent[j], int64[K, K]
    size = len(frequent)
    index_of = np.full(vocab, -1, np.int64)  # token → index in `frequent`, or -1
    index_of[frequent] = np.arange(size)
    flat = np.zeros(size * size, np.int64)
    for start in range(0, len(tokens) - 1, chunk):
        indices = index_of[tokens[start : start + chunk + 1]]
        left, right = indices[:-1], indices[1:]
        are_frequent = (left >= 0) & (right >= 0)
        flat += np.bincount(left[are_frequent] * size + right[are_frequent], minlength=size * size)
    pairs = flat.reshape(size, size)
    rates = pairs / counts[frequent][:, None]
    gain = np.where(pairs >= minimum, rates - rates.T, 0.0)
    best = np.argsort(-gain, axis=None, kind="stable")[:top]
    i, j = (axis[gain.flat[best] > 0] for axis in np.unravel_index(best, gain.shape))
    columns = (frequent[i], frequent[j], pairs[i, j], pairs[j, i], rates[i, j], rates[j, i])
    return [Bigram(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
