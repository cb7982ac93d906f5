"""Masked tokens: whole words in runs of up to three, replaced in the input, and predicted.

    runs of n words with p(n) ∝ 1/n, n ≤ 3        ALBERT, arXiv:1909.11942 §4.1 (from SpanBERT, arXiv:1907.10529)
    until 15 % of the tokens are chosen; of these  80 % become [MASK], 10 % another token at random, 10 % stay

A run ends early where a segment does, and is shortened where all of it would be more than is left to choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from tiewise.core.errors import DataError

Ints = NDArray[np.int64]
IGNORED = -100


@dataclass(frozen=True)
class Masking:
    """How tokens are masked.

    Raises:
        DataError: a number out of range.
    """

    share: float = 0.15  # of a sequence's tokens that are predicted
    longest: int = 3  # words of the longest run
    masked: float = 0.8  # of the chosen tokens, the share that becomes the mask
    random: float = 0.1  # the share that becomes a token at random; the rest stays
    whole_words: bool = True  # False masks tokens, not words

    def __post_init__(self) -> None:
        for name in ("share", "masked", "random"):
            value = getattr(self, name)
            if not (isfinite(value) and 0 <= value <= 1):
                raise DataError(f"a {name} share of {value}", "use a share from 0 to 1")
        if self.share == 0:
            raise DataError("nothing is masked", "use a share above 0")
        if self.masked + self.random > 1 + 1e-12:
            what = f"{self.masked} masked and {self.random} at random"
            raise DataError(what, "the two shares are of one whole")
        if self.longest < 1:
            raise DataError(f"runs of {self.longest} words", "use 1 or more")

    @property
    def lengths(self) -> NDArray[np.float64]:
        """p(n) of a run of n words, n = 1 … longest."""
        weights = 1 / np.arange(1, self.longest + 1)
        return np.asarray(weights / weights.sum())


def choose(words: Ints, options: Masking, draw: np.random.Generator) -> NDArray[np.bool_]:
    """Choose the tokens of a sequence that are to be predicted, bool [T].

    `words` are the numbers of each token's word [T], not falling; −1 for tokens that are never chosen. A run of words
    goes on only where their numbers do: leave a number out to end it. Chosen are as many tokens as `options.share` of
    those that may be, one or more, less what no whole word fits in; where not one word fits, the beginning of one.
    """
    chosen = np.zeros(len(words), bool)
    numbers, starts = np.unique(words, return_index=True)
    if len(numbers) and numbers[0] < 0:
        numbers, starts = numbers[1:], starts[1:]
    sizes = np.bincount(words[words >= 0])[numbers] if len(numbers) else numbers
    left = max(1, round(options.share * int(sizes.sum()))) if len(numbers) else 0
    order = draw.permutation(len(numbers)).tolist()
    runs = (1 + draw.choice(options.longest, len(numbers), p=options.lengths)).tolist()
    at, counts, begin = numbers.tolist(), sizes.tolist(), starts.tolist()
    taken = [False] * len(at)
    for first, run in zip(order, runs, strict=True):
        for i in range(first, min(first + run, len(at))):
            if taken[i] or counts[i] > left or at[i] != at[first] + i - first:
                break
            taken[i] = True
            left -= counts[i]
            chosen[begin[i] : begin[i] + counts[i]] = True
        if left <= 0:
            break
    if not any(taken) and at:
        chosen[begin[order[0]] : begin[order[0]] + left] = True
    return chosen


def mask(
    ids: Ints,
    chosen: NDArray[np.bool_],
    mask_id: int,
    ordinary: int | Ints,
    options: Masking,
    draw: np.random.Generator,
) -> tuple[Ints, Ints]:
    """Replace the `chosen` of tokens [T], each by a draw of its own; one at random is of `ordinary`, or below it.

    Return inputs [T], and labels [T]: the tokens that were there where they were chosen, −100 elsewhere.
    """
    inputs, count = ids.copy(), int(chosen.sum())
    fate = draw.random(count)
    others = draw.integers(ordinary, size=count) if isinstance(ordinary, int) else draw.choice(ordinary, count)
    kept = np.where(fate < options.masked + options.random, others, ids[chosen])
    inputs[chosen] = np.where(fate < options.masked, mask_id, kept)
    return inputs, np.where(chosen, ids, IGNORED)
