"""A text and its tokens: cut where no tokenizer sees it, bytes as letters, and what the tokens of a text say.

A text of any size becomes pieces and these batches, which keep several threads at work. Of tokens it is counted how
often each occurs, in which decade that lies, and which pairs are one-way; the counts are of the training split: whether
a token is rare is a matter of what the model saw.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiewise.core.errors import DataError

_BATCH = 1 << 19  # characters handed to the tokenizer at once; it takes about 100 bytes per token while it works
PIECE = 1 << 14  # characters after which a longer document is cut, so that a batch has work for several threads
# Tokenizers begin a word at a single space between letters: what is cut there has the tokens of the text left whole.
_SAFE = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])")


def pieces(texts: Iterable[tuple[str, bool]], size: int = PIECE) -> Iterator[tuple[str, bool]]:
    """Join the parts of documents and cut these anew, where no tokenizer sees it: (text, whether a document ends).

    Pieces have `size` letters or a few more; where no single space stands between letters for long, the cut is at a
    line end, or anywhere.
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
            else:  # more of the text may bring a safe place
                break
            yield text[start:end], False
            start = end
        if ends:
            yield text[start:], True
            text, start = "", 0


def batches(pieces: Iterable[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    """Gather pieces until they are enough for the tokenizer."""
    batch, size = list[tuple[str, bool]](), 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def begins_spaced(engine: Any) -> bool:
    """Whether a tokenizer begins every text with a space, as SentencePiece does: what goes on must not bring one."""

    def ids(text: str) -> list[int]:
        tokens: list[int] = engine.encode(text, add_special_tokens=False).ids
        return tokens

    word, spaced_word, second_word = ids("a"), ids(" a"), ids("b a")
    ends_with_spaced = second_word[-len(spaced_word) :] == spaced_word
    return not ends_with_spaced and second_word[-len(word) :] == word


def byte_letters() -> dict[str, int]:
    """Return {letter: byte} of all bytes as byte-level tokenizers write them: as they print, others from 256 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in prints]
    return {chr(byte if byte in prints else 256 + others.index(byte)): byte for byte in range(256)}


# what the tokens of a text say

BINS = ("0", "1–9", "10–99", "100–999", "1000–9999", "≥10000")  # decades of training counts
_EDGES = (1, 10, 100, 1000, 10_000)  # where each but the first begins
CHUNK = 1 << 22  # tokens counted at once


def token_counts(tokens: np.ndarray, vocab: int, chunk: int = CHUNK) -> np.ndarray:
    """Return how often each token occurs, int64[V], from `tokens` of any size; a DataError for one outside of V."""
    counts = np.zeros(vocab, np.int64)
    for start in range(0, len(tokens), chunk):
        found = np.bincount(tokens[start : start + chunk], minlength=vocab)
        if len(found) > vocab:
            raise DataError(f"token {len(found) - 1} in a vocabulary of {vocab}", "prepare the text again")
        counts += found
    return counts


def bin_of(counts: np.ndarray) -> np.ndarray:
    """Return the index in `BINS` of every token, int64[V], from its count."""
    return np.searchsorted(_EDGES, counts, side="right").astype(np.int64)


@dataclass(frozen=True)
class Bigram:
    """Two tokens that follow each other one way more than the other, which a symmetric direct path cannot tell."""

    left: int
    right: int
    forward: int  # times that left, right occurs
    backward: int  # times that right, left does
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

    Only the `paired` most frequent tokens are paired (2,000² counts take 32 MB), and only pairs that occur `minimum`
    times (once in 5,000 tokens and 5 times, unless given); a token is not paired with itself, nor with `eos_id`, across
    which nothing follows.
    """
    minimum = max(5, len(tokens) // 5000) if minimum is None else minimum
    counts = token_counts(tokens, vocab, chunk)
    ranked = np.argsort(-counts, kind="stable")
    frequent = ranked[(ranked != (-1 if eos_id is None else eos_id)) & (counts[ranked] > 0)][:paired]
    # how often frequent[i] is followed by frequent[j], int64[K, K]
    size = len(frequent)
    place = np.full(vocab, -1, np.int64)
    place[frequent] = np.arange(size)
    flat = np.zeros(size * size, np.int64)
    for start in range(0, len(tokens) - 1, chunk):
        places = place[tokens[start : start + chunk + 1]]
        left, right = places[:-1], places[1:]
        known = (left >= 0) & (right >= 0)
        flat += np.bincount(left[known] * size + right[known], minlength=size * size)
    pairs = flat.reshape(size, size)
    rates = pairs / counts[frequent][:, None]
    gain = np.where(pairs >= minimum, rates - rates.T, 0.0)
    best = np.argsort(-gain, axis=None, kind="stable")[:top]
    i, j = (axis[gain.flat[best] > 0] for axis in np.unravel_index(best, gain.shape))
    columns = (frequent[i], frequent[j], pairs[i, j], pairs[j, i], rates[i, j], rates[j, i])
    return [Bigram(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
