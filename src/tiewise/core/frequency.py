"""What a text's tokens say: how often each occurs, in which decade that lies, and which pairs are one-way.

The counts are of the training split: whether a token is rare is a matter of what the model saw.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tiewise.core.errors import DataError

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
