"""Counts of consecutive tokens, and the loss on them that every direct path pays.

With Q[i, j] the share of pairs (i, then j) and π its row sums, the best nll of p(j|i) ∝ exp(S_ij + b_j) is

    any S          entropy            H = −Σ Q log(Q / π_i)
    symmetric S    H + irreversibility   I = Σ Q log(2Q / (Q + Qᵀ)),   0 ≤ I ≤ ln 2

for every width of S. The nll is convex in (S, b), and at p(j|i) = (Q_ij + Q_ji) / 2π_i, whose logits are symmetric up
to a shift of rows, its gradient is zero if rows and columns of Q have equal sums. `Chain.of` closes a text into a ring,
so that they are equal.

I is also ln 2 minus the remaining uncertainty about a pair's direction if its two tokens are known. A guess from the
same counts is too easy (a pair that occurs once never occurs in the other order), so I from counts is biased upward; a
guess of parts of the text from the other parts is biased downward. `irreversibility` returns both, and the result of
counts of this size if directions are tossed by a coin. `contexts` divides it between tokens: for one with predecessors
p and successors s, both of n occurrences,

    JS_t = ½ KL(p ‖ (p+s)/2) + ½ KL(s ‖ (p+s)/2),      0 (the same) ≤ JS_t ≤ ln 2 (no neighbour on both sides)

is the information of a neighbour about its side (Lin 1991). Weighted by occurrences, its mean over tokens is I: with
Q[t, b] = π_t s_b and Q[b, t] = π_t p_b the two sums are one. The coin's is an exact expectation here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.core.errors import DataError
from tiewise.core.estimates import Estimate, mean_interval
from tiewise.inspection.tables.model_tables import Array, Ids, Mask

TOSSES = 10  # draws of the coin
PARTS = 10  # parts of a text, each guessed from the others
EXACT_UP_TO = 1000  # occurrences of a pair whose tosses are summed exactly; above, the χ² limit


@dataclass(frozen=True)
class Chain:
    """Sparse counts of consecutive pairs of tokens."""

    keys: Ids  # before · vocabulary + after of every pair of the text, ascending [n]
    counts: Ids  # occurrences of each pair [n]
    vocabulary: int  # V

    @classmethod
    def of(cls, ids: ArrayLike, vocabulary: int) -> Chain:
        """Count a text [N] closed into a ring: its first token follows its last."""
        text = np.asarray(ids).astype(np.int64)
        is_outside = (text < 0) | (text >= vocabulary)
        outside = text[is_outside]
        if len(outside):
            problem = f"token {int(outside[0])} is outside a vocabulary of {vocabulary:,}"
            raise DataError(problem, "use the tokenizer that belongs to the table")
        if len(text) < 2:
            raise DataError(f"a text of {len(text)} tokens has no pairs", "give a longer text")
        return cls.along(np.append(text, text[0]), vocabulary)

    @classmethod
    def along(cls, tokens: Ids, vocabulary: int) -> Chain:
        """Count the pairs of a piece of text, which is not closed."""
        pairs = tokens[:-1] * vocabulary + tokens[1:]
        keys, counts = np.unique(pairs, return_counts=True)
        return cls(keys, counts, vocabulary)

    @property
    def pairs(self) -> int:
        """Return the number of counted pairs: N for N tokens."""
        return int(self.counts.sum())

    @property
    def before(self) -> Ids:
        """Return the first token of each pair [n]."""
        return self.keys // self.vocabulary

    @property
    def after(self) -> Ids:
        """Return the second token of each pair [n]."""
        return self.keys % self.vocabulary

    @property
    def tokens(self) -> Ids:
        """Return how often each token is first in a pair [V]."""
        return np.bincount(self.before, self.counts, self.vocabulary).astype(np.int64)

    @property
    def reversed_keys(self) -> Ids:
        """Return the keys of the same pairs in the other order [n]."""
        return self.after * self.vocabulary + self.before

    def counted(self, keys: Ids) -> Ids:
        """Return the counts of the pairs with these keys."""
        index = np.searchsorted(self.keys, keys) % len(self.keys)
        return np.where(self.keys[index] == keys, self.counts[index], 0)

    @property
    def entropy(self) -> float:
        """Return H in nats per token, from the counts.

        It is too low if pairs are rare.
        """
        share = self.counts / self.tokens[self.before]
        total = -(self.counts * np.log(share)).sum()
        return float(total / self.pairs)

    @property
    def irreversibility(self) -> float:
        """Return I in nats per token, from the counts.

        It is too high if pairs are rare.
        """
        both = self.counts + self.counted(self.reversed_keys)
        total = (self.counts * np.log(2 * self.counts / both)).sum()
        return float(total / self.pairs)

    def is_first_order(self, back: Ids) -> Mask:
        """Mark one order of each pair of different tokens [n].

        `back` are the counts of the other order.
        """
        before, after = self.before, self.after
        is_alone = (before > after) & (back == 0)
        mask: Mask = (before < after) | is_alone
        return mask

    def dense(self) -> Array:
        """Return Q [V, V], for small vocabularies."""
        shares = np.zeros((self.vocabulary, self.vocabulary))
        shares[self.before, self.after] = self.counts / self.pairs
        return shares


def frequent(chain: Chain, most: int, also: Sequence[int] = ()) -> Ids:
    """Return the ids of a text's `most` most frequent tokens, and of `also`.

    Of `also`, only tokens that the text has are included.
    """
    tokens = chain.tokens
    ranked = np.argsort(-tokens, kind="stable")[:most]
    if np.count_nonzero(tokens[ranked]) < 2:
        raise DataError("a text of one token, again and again", "give a text with more")
    numbers = dict.fromkeys([*ranked.tolist(), *also])
    return np.array([number for number in numbers if tokens[number]], np.int64)


@dataclass(frozen=True)
class Irreversibility:
    """I in nats per token, with two estimates that err in opposite directions."""

    plug_in: float  # from the counts; on average too high
    heldout: Estimate  # mean over parts, with directions guessed from the other parts' counts; on average too low
    # mean plug-in estimate of these counts with every pair's directions tossed by a fair coin: the value if there is
    # no irreversibility
    coin: float
    coin_spread: float  # standard deviation of `coin` over the tosses


def irreversibility(ids: ArrayLike, vocabulary: int, parts: int = PARTS, seed: int = 0) -> Irreversibility:
    """Estimate I of the process that a text [N] was drawn from.

    The text is divided into 2 to 10 contiguous parts; `seed` tosses the coins.

    Raises:
        DataError: a text of fewer than 10 tokens per part, or an id outside the vocabulary.
    """
    ring, sliced = ring_and_parts(ids, vocabulary, parts)
    by_part = [guessed(ring, part).sum() / part.pairs for part in sliced]
    back = ring.counted(ring.reversed_keys)
    both = (ring.counts + back)[ring.is_first_order(back)]
    generator = np.random.default_rng(seed)
    coins = []
    for _ in range(TOSSES):
        there = generator.binomial(both, 0.5)
        nats = one_way_nats(there, both - there)
        coins.append(float(nats.sum() / ring.pairs))
    return Irreversibility(
        plug_in=ring.irreversibility,
        heldout=mean_interval(by_part),
        coin=float(np.mean(coins)),
        coin_spread=float(np.std(coins, ddof=1)),
    )


def ring_and_parts(ids: ArrayLike, vocabulary: int, parts: int) -> tuple[Chain, Iterator[Chain]]:
    """Return (counts of the full text, counts of each part).

    A part has its pairs and the one that leads out of it, so that all parts together are the ring.
    """
    text = np.asarray(ids)
    if not 2 <= parts <= 10 or len(text) < 10 * parts:
        raise DataError(f"{len(text):,} tokens in {parts} parts", "give 10 tokens or more for each of 2 to 10 parts")
    return Chain.of(text, vocabulary), _parts_of(text, vocabulary, parts)


def _parts_of(text: NDArray[Any], vocabulary: int, parts: int) -> Iterator[Chain]:
    """Yield the counts of each part of a text [N].

    The pair that leads out of a part counts as well.
    """
    edges = np.linspace(0, len(text), parts + 1).astype(int).tolist()
    for start, stop in pairwise(edges):
        following = text[stop % len(text)]
        piece = np.append(text[start:stop], following).astype(np.int64)
        yield Chain.along(piece, vocabulary)


def guessed(full_text: Chain, part: Chain) -> Array:
    """Return the nats [n] that guessed directions of a part's pairs gain over a coin.

    Directions are guessed from the other parts, with half a pair added in each direction. `part` is a part of the text
    that `full_text` counts; the sum over its pairs is I of the part.
    """
    there = full_text.counted(part.keys) - part.counts
    back = full_text.counted(part.reversed_keys) - part.counted(part.reversed_keys)
    share = (there + 0.5) / (there + back + 1.0)
    share[part.before == part.after] = 0.5
    nats: Array = np.log(2 * share) * part.counts
    return nats


def one_way_nats(there: Ids, back: Ids) -> Array:
    """Return each pair's part of I, multiplied by the number of pairs of the text [n].

    `there` and `back` are the counts of the pair in its two orders.
    """
    both = np.maximum(there + back, 1)
    of_there = there * np.log(2 * np.maximum(there, 1) / both)
    of_back = back * np.log(2 * np.maximum(back, 1) / both)
    nats: Array = of_there + of_back
    return nats


def pair_counts(chain: Chain, pairs: ArrayLike) -> tuple[Ids, Array, Array]:
    """Return (counts, p(b | a), part of I) of pairs (a, b) [n, 2].

    The part of I is that of both orders. p is NaN if the text has no a.
    """
    before, after = np.asarray(pairs, np.int64).reshape(-1, 2).T
    there = chain.counted(before * chain.vocabulary + after)
    back = chain.counted(after * chain.vocabulary + before)
    tokens = chain.tokens[before]
    share = np.divide(there, tokens, out=np.full(len(there), np.nan), where=tokens > 0)
    return there, share, one_way_nats(there, back) / chain.pairs


def one_way_pairs(chain: Chain, top: int = 12) -> Ids:
    """Return the pairs [n, 2] that add most to I, the likelier order first."""
    back = chain.counted(chain.reversed_keys)
    nats = np.where(chain.counts > back, one_way_nats(chain.counts, back), 0.0)  # each pair once, in its likelier order
    best = np.argsort(-nats, kind="stable")[:top]
    best = best[nats[best] > 0]
    return np.column_stack([chain.before[best], chain.after[best]])


@dataclass(frozen=True)
class Contexts:
    """Each token's divergence in nats, [V]; NaN for tokens that the text lacks."""

    counts: Ids  # occurrences
    plug_in: Array  # JS from the counts; on average too high
    coin: Array  # its expectation if directions are tossed
    coin_deviation: Array  # its standard deviation if directions are tossed
    # sides guessed from the other parts of the text; on average too low, and below 0 if guesses mislead
    heldout: Array
    by_part: Array  # mean of `heldout` over the occurrences of each part [parts]

    def weighted(self, values: Array) -> float:
        """Return the mean of values [V] over occurrences."""
        seen = self.counts > 0
        total = (values[seen] * self.counts[seen]).sum()
        return float(total / self.counts.sum())


def contexts(ids: ArrayLike, vocabulary: int, parts: int = PARTS) -> Contexts:
    """Measure every token of a text [N], closed into a ring."""
    chain, sliced = ring_and_parts(ids, vocabulary, parts)
    counts = chain.tokens
    scale = np.divide(0.5, counts, out=np.full(vocabulary, np.nan), where=counts > 0)
    back = chain.counted(chain.reversed_keys)
    plug_in = _spread(chain, chain.counts * np.log(2 * chain.counts / (chain.counts + back)))
    coin, variance = _tossed_by_token(chain, back)
    heldout, by_part = np.zeros(vocabulary), []
    for part in sliced:
        nats = guessed(chain, part)
        heldout += _spread(part, nats)
        by_part.append(nats.sum() / part.pairs)
    return Contexts(
        counts,
        plug_in=plug_in * scale,
        coin=coin * scale,
        coin_deviation=np.sqrt(variance) * scale,
        heldout=heldout * scale,
        by_part=np.array(by_part),
    )


def _tossed_by_token(chain: Chain, back: Ids) -> tuple[Array, Array]:
    """Return mean and variance [V] of each token's nats if pair directions are coin tosses.

    A fair coin tosses the direction of each occurrence of a pair. `back` are counts of the other order of each pair.
    """
    once = chain.is_first_order(back)
    sizes, index = np.unique((chain.counts + back)[once], return_inverse=True)
    by_size = np.array([tossed(int(m)) for m in sizes]).reshape(-1, 2)
    means, variances = np.zeros((2, len(chain.keys)))
    means[once], variances[once] = by_size[index].T
    return _spread(chain, means), _spread(chain, variances)


def _spread(chain: Chain, values: ArrayLike) -> Array:
    """Add the value of each pair to both of its tokens [V]."""
    both = np.concatenate([chain.before, chain.after])
    return np.bincount(both, np.tile(values, 2), chain.vocabulary).astype(np.float64)


def tossed(m: int) -> tuple[float, float]:
    """Return mean and variance of x log(2x/m) + (m−x) log(2(m−x)/m).

    x is binomial with m tosses of a fair coin. Twice this is the likelihood-ratio statistic of a fair coin, χ² with one
    degree of freedom for large m.
    """
    if m > EXACT_UP_TO:
        return 0.5 + 1 / (4 * m), 0.5 + 1 / (2 * m)
    x = np.arange(m + 1)
    ratios = (m - x[:-1]) / (x[:-1] + 1.0)  # of each binomial coefficient to the previous one
    logs = np.concatenate([[0.0], np.cumsum(np.log(ratios))]) - m * math.log(2)
    share = np.exp(logs)
    one_side = x * np.log(2 * np.maximum(x, 1) / m)
    value = one_side + one_side[::-1]
    mean = float(share @ value)
    variance = float(share @ np.square(value - mean))
    return mean, max(0.0, variance)
