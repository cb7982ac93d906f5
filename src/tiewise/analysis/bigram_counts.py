"""Counts of consecutive tokens, and what no direct path can avoid paying on them.

With Q[i, j] the share of pairs (i, then j) and π its row sums, the best nll of p(j|i) ∝ exp(S_ij + b_j) is

    any S          entropy            H = −Σ Q log(Q / π_i)
    symmetric S    H + irreversibility   I = Σ Q log(2Q / (Q + Qᵀ)),   0 ≤ I ≤ ln 2

whatever the width of S. The nll is convex in (S, b), and at p(j|i) = (Q_ij + Q_ji) / 2π_i, whose logits are symmetric
up to a shift of rows, its gradient is zero where rows and columns of Q have the same sums. `Chain.of` closes a text
into a ring, so that they have.

I is also ln 2 less what is left to guess of a pair's direction once its two tokens are known. Guessing from the same
counts looks too easy (a pair seen once never comes back the other way), so I from counts is biased upward; guessing
parts of the text from the other parts is biased downward. `irreversibility` gives both, and what counts of this size
show where directions are tossed by a coin.

Pairs of tokens as a text has them, both ways, and the pairs that make it irreversible.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.analysis.estimates import mean_interval
from tiewise.analysis.token_table import Array
from tiewise.core.errors import DataError

Ids = NDArray[np.int64]
MERGED_AT = 2**22  # keys that wait until they are counted


@dataclass(frozen=True)
class Chain:
    """Counts of pairs, sparse."""

    keys: Ids  # before · vocabulary + after of every pair seen, ascending [n]
    counts: Ids  # how often [n]
    vocabulary: int  # V

    @classmethod
    def of(cls, ids: Iterable[ArrayLike], vocabulary: int) -> Chain:
        """Count a text that comes in pieces, closed into a ring: its first token follows its last."""
        held, waiting, total = _Tally(vocabulary), 0, 0
        first = last = None
        for piece in ids:
            tokens = np.asarray(piece).astype(np.int64).ravel()
            if not len(tokens):
                continue
            outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
            if len(outside):
                what = f"token {int(outside[0])} is outside a vocabulary of {vocabulary:,}"
                raise DataError(what, "use the tokenizer that belongs to the table")
            first = tokens[0] if first is None else first
            joined = tokens if last is None else np.concatenate([[last], tokens])
            last = tokens[-1]
            held.add(joined[:-1], joined[1:])
            total, waiting = total + len(tokens), waiting + len(tokens)
            if waiting >= MERGED_AT:
                held.merge()
                waiting = 0
        if first is None or last is None or total < 2:
            raise DataError(f"a text of {total} tokens has no pairs", "give a longer text")
        held.add(np.array([last]), np.array([first]))
        held.merge()
        return cls(held.keys, held.counts, vocabulary)

    @property
    def pairs(self) -> int:
        """Pairs counted: N for N tokens."""
        return int(self.counts.sum())

    @property
    def before(self) -> Ids:
        """First token of each pair [n]."""
        return self.keys // self.vocabulary

    @property
    def after(self) -> Ids:
        """Second token of each pair [n]."""
        return self.keys % self.vocabulary

    @property
    def tokens(self) -> Ids:
        """How often each token stands first [V]."""
        found = np.zeros(self.vocabulary, np.int64)
        np.add.at(found, self.before, self.counts)
        return found

    @property
    def reversed_counts(self) -> Ids:
        """How often each pair was seen the other way round [n]."""
        return counted(self, self.after * self.vocabulary + self.before)

    @property
    def entropy(self) -> float:
        """H in nats per token, of the counts as they are (too low where pairs are rare)."""
        share = self.counts / self.tokens[self.before]
        return float(-(self.counts * np.log(share)).sum() / self.pairs)

    @property
    def irreversibility(self) -> float:
        """I in nats per token, of the counts as they are (too high where pairs are rare)."""
        both = self.counts + self.reversed_counts
        return float((self.counts * np.log(2 * self.counts / both)).sum() / self.pairs)

    def dense(self) -> Array:
        """Return Q [V, V], for small vocabularies."""
        if self.vocabulary > 4096:
            raise DataError(f"Q of {self.vocabulary:,} tokens is not made dense", "keep the most frequent tokens")
        made = np.zeros((self.vocabulary, self.vocabulary))
        made[self.before, self.after] = self.counts / self.pairs
        return made


class _Tally:
    """Counts keys that come in pieces."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.keys, self.counts = np.empty(0, np.int64), np.empty(0, np.int64)
        self.waiting: list[Ids] = []

    def add(self, before: Ids, after: Ids) -> None:
        self.waiting.append(before * self.vocabulary + after)

    def merge(self) -> None:
        fresh, counts = np.unique(np.concatenate(self.waiting), return_counts=True)
        keys, place = np.unique(np.concatenate([self.keys, fresh]), return_inverse=True)
        summed = np.zeros(len(keys), np.int64)
        np.add.at(summed, place, np.concatenate([self.counts, counts]))
        self.keys, self.counts, self.waiting = keys, summed, []


def counted(chain: Chain, keys: Ids) -> Ids:
    """Return how often each of some keys was counted."""
    place = np.searchsorted(chain.keys, keys)
    place[place == len(chain.keys)] = 0
    return np.where(chain.keys[place] == keys, chain.counts[place], 0)


@dataclass(frozen=True)
class Irreversibility:
    """I in nats per token, between two estimates that err in opposite directions."""

    plug_in: float  # from the counts as they are; on average too high
    held_out: float  # each part's directions guessed from the other parts' counts; on average too low
    low: float  # lower end of `held_out`'s 95 % interval over the parts (Student's t)
    high: float  # upper end of the same
    # mean plug-in of these counts with every pair's directions tossed by a fair coin: what no irreversibility at all
    # would look like
    coin: float
    coin_spread: float  # its standard deviation over the tosses
    parts: int  # parts of the text
    tokens: int  # tokens of the text


def irreversibility(
    ids: ArrayLike, vocabulary: int, parts: int = 10, tosses: int = 10, seed: int = 0
) -> Irreversibility:
    """Estimate I of the process that a text was drawn from.

    Args:
        ids: the text [N]; a memory-mapped array of any integers will do.
        vocabulary: V.
        parts: contiguous parts of equal length, from 2 to 10.
        tosses: draws of the coin.
        seed: of the coin.

    Raises:
        DataError: a text of fewer than 10 tokens per part, or an id outside the vocabulary.
    """
    text = np.asarray(ids)
    if not 2 <= parts <= 10 or len(text) < 10 * parts:
        raise DataError(f"{len(text):,} tokens in {parts} parts", "give 10 tokens or more for each of 2 to 10 parts")
    whole = Chain.of([text], vocabulary)
    held_out = mean_interval([guessed(whole, part).sum() / part.pairs for part in parts_of(text, vocabulary, parts)])
    generator = np.random.default_rng(seed)
    coins = np.array([_coin(whole, generator) for _ in range(tosses)])
    spread = float(coins.std(ddof=1)) if tosses > 1 else 0.0
    return Irreversibility(
        whole.irreversibility,
        held_out.value,
        held_out.low,
        held_out.high,
        float(coins.mean()),
        spread,
        parts,
        len(text),
    )


def parts_of(text: NDArray[Any], vocabulary: int, parts: int) -> Iterator[Chain]:
    """Counts of the pairs inside each part and the one that leads out of it: together they are the whole ring."""
    edges = np.linspace(0, len(text), parts + 1).astype(int)
    for start, stop in pairwise(edges.tolist()):
        tokens = np.append(text[start:stop], text[stop % len(text)]).astype(np.int64)
        held = _Tally(vocabulary)
        held.add(tokens[:-1], tokens[1:])
        held.merge()
        yield Chain(held.keys, held.counts, vocabulary)


def guessed(whole: Chain, part: Chain) -> Array:
    """Nats by which the pairs of a part beat a coin [n], directions guessed from the rest with half a pair each way.

    `part` is one of `parts_of` the text that `whole` counts; the sum over its pairs is I of the part.
    """
    there = counted(whole, part.keys) - part.counts
    turned = part.after * part.vocabulary + part.before
    back = counted(whole, turned) - counted(part, turned)
    share = (there + 0.5) / (there + back + 1.0)
    share[part.before == part.after] = 0.5
    nats: Array = np.log(2 * share) * part.counts
    return nats


def _coin(chain: Chain, generator: np.random.Generator) -> float:
    """Plug-in I with the directions of every unordered pair tossed."""
    before, after = chain.before, chain.after
    back = chain.reversed_counts
    once = (before < after) | ((before > after) & (back == 0))
    both = (chain.counts + back)[once]
    there = generator.binomial(both, 0.5)
    total = sum(_directed(way, both) for way in (there, both - there))
    return float(total / chain.pairs)


def _directed(way: Ids, both: Ids) -> float:
    seen = way > 0
    return float((way[seen] * np.log(2 * way[seen] / both[seen])).sum())


@dataclass(frozen=True)
class TextPair:
    """How often a text has two tokens behind each other."""

    first: str  # text of the one
    second: str  # text of the other
    ids: tuple[int, int]  # of both
    there: int  # how often `second` follows `first`
    back: int  # how often `first` follows `second`
    probability_there: float | None  # p(second | first); None where the text lacks `first`
    probability_back: float | None  # p(first | second); None where it lacks `second`
    irreversibility: float  # what both orders together add to the text's I, in nats per token


def text_pairs(chain: Chain, ids: Sequence[tuple[int, int]], texts: Sequence[tuple[str, str]]) -> tuple[TextPair, ...]:
    """Count pairs of tokens both ways; `texts` are what they read as."""
    tokens = chain.tokens
    made = []
    for (a, b), (first, second) in zip(ids, texts, strict=True):
        there, back = counted(chain, np.array([a * chain.vocabulary + b, b * chain.vocabulary + a])).tolist()
        of_a, of_b = (there / int(tokens[a]) if tokens[a] else None), (back / int(tokens[b]) if tokens[b] else None)
        made.append(TextPair(first, second, (a, b), there, back, of_a, of_b, _share(there, back, chain.pairs)))
    return tuple(made)


def one_way_pairs(chain: Chain, top: int = 12) -> tuple[tuple[int, int], ...]:
    """Ids of the pairs that add most to I, the likelier order first."""
    back = chain.reversed_counts
    both = chain.counts + back
    parts = chain.counts * np.log(2 * chain.counts / both)
    parts += np.where(back > 0, back * np.log(2 * np.maximum(back, 1) / both), 0.0)
    parts[chain.counts <= back] = 0.0  # each pair once, by its more frequent order
    best = np.argsort(-parts, kind="stable")[:top]
    chosen = best[parts[best] > 0]
    return tuple(zip(chain.before[chosen].tolist(), chain.after[chosen].tolist(), strict=True))


def _share(there: int, back: int, pairs: int) -> float:
    found = sum(count * np.log(2 * count / (there + back)) for count in (there, back) if count)
    return float(found / pairs)
