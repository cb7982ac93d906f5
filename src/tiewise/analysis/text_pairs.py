"""Pairs of tokens as a text has them, both ways, and the pairs that make it irreversible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tiewise.analysis.bigrams import Chain, counted


@dataclass(frozen=True)
class TextPair:
    """How often a text has two tokens behind each other.

    Args:
        first: text of the one.
        second: text of the other.
        ids: of both.
        there: how often `second` follows `first`.
        back: how often `first` follows `second`.
        probability_there: p(second | first); None where the text lacks `first`.
        probability_back: p(first | second); None where it lacks `second`.
        irreversibility: what both orders together add to the text's I, in nats per token.
    """

    first: str
    second: str
    ids: tuple[int, int]
    there: int
    back: int
    probability_there: float | None
    probability_back: float | None
    irreversibility: float

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return asdict(self)


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
