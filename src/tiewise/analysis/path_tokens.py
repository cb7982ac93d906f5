"""Single tokens on the direct path: logits and probabilities of pairs both ways, own tokens, asymmetric pairs.

Logits here are the model's: norm with gain and shift, scales, bias and soft-cap are applied as it applies them. The
softmax runs over every row of the output table, which is read once for all tokens that are asked for.

Requested pairs of words on a path, both ways: "New" → "York" and "York" → "New".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.analysis.model_tables import Array
from tiewise.analysis.path_matrix import DirectPath, Grams, asymmetry
from tiewise.analysis.token_texts import find_tokens
from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.errors import DataError
from tiewise.core.estimates import wilson
from tiewise.core.found import visible
from tiewise.core.long_work import advance

MOST_PAIRS = 4096  # held against one block of output rows
ROUNDING = 1e-12  # one product in two blocks of different shape is rounded differently
BLOCK = 1024


@dataclass(frozen=True)
class Transition:
    """What the direct path says of `after` behind `before`."""

    before: int  # id of the token that is read
    after: int  # id of the token that may follow
    logit: float  # as the model's head gives it, with bias and soft-cap
    probability: float  # softmax over the whole vocabulary
    log_probability: float  # its logarithm, in nats
    rank: int  # tokens with a larger logit; 0 for the likeliest


@dataclass(frozen=True)
class OwnToken:
    """How far the path predicts the token that it has just read."""

    diagonal: float  # mean of M's diagonal, over all tokens (without bias, soft-cap and the norm's shift)
    elsewhere: float  # mean of M off the diagonal, exactly
    excess: float  # diagonal − elsewhere, in standard deviations of M's entries
    sampled: int  # tokens whose whole row of logits was looked at
    first: float  # share of these whose own logit no other exceeds
    low: float  # lower end of its 95 % interval (Wilson)
    high: float  # upper end
    chance: float  # 1 / V'


def logits(path: DirectPath, left: Array, start: int, stop: int) -> Array:
    """Return logits [n, stop − start] of the output rows [start, stop) for rows `left` [n, E] of A."""
    output = path.output.read(start, stop)
    found: Array = left @ output.T + path.constant(output)
    if path.bias is not None:
        found += path.bias[start:stop]
    if path.softcap is not None:
        found = path.softcap * np.tanh(found / path.softcap)
    return found


def transitions(path: DirectPath, pairs: Iterable[tuple[int, int]]) -> tuple[Transition, ...]:
    """Return what the path says of every pair (before, after), in the given order."""
    wanted = np.array(list(pairs), np.int64).reshape(-1, 2)
    found: list[Transition] = []
    for first in range(0, len(wanted), MOST_PAIRS):
        some = wanted[first : first + MOST_PAIRS]
        before, place = np.unique(some[:, 0], return_inverse=True)
        left = path.left(path.input.take(before))
        own = _logits_of(path, left[place], some[:, 1])
        highest, total = np.full(len(before), -np.inf), np.zeros(len(before))
        slack = ROUNDING * np.maximum(1.0, np.abs(own))
        above = np.zeros(len(some), np.int64)
        for start, stop in path.output.spans(beside=len(some)):
            block = logits(path, left, start, stop)
            above += (block[place] > (own + slack)[:, None]).sum(1)
            larger = np.maximum(highest, block.max(1))
            total = total * np.exp(highest - larger) + np.exp(block - larger[:, None]).sum(1)
            highest = larger
            advance(stop)
        logs = own - (highest + np.log(total))[place]
        rows = zip(some.tolist(), own.tolist(), logs.tolist(), above.tolist(), strict=True)
        found += [Transition(i, j, logit, math.exp(log), log, rank) for (i, j), logit, log, rank in rows]
    return tuple(found)


def both_ways(path: DirectPath, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[Transition, Transition], ...]:
    """Return for every pair (a, b) what the path says of a → b and of b → a."""
    asked = [way for a, b in pairs for way in ((a, b), (b, a))]
    found = transitions(path, asked)
    return tuple(zip(found[::2], found[1::2], strict=True))


def _logits_of(path: DirectPath, left: Array, ids: NDArray[np.int64]) -> Array:
    """Logit of one output token each [n] for rows of A [n, E]."""
    output = path.output.take(ids)
    found: Array = np.einsum("ne,ne->n", left, output) + path.constant(output)
    if path.bias is not None:
        found += path.bias[ids]
    return found if path.softcap is None else path.softcap * np.tanh(found / path.softcap)


def own_token(path: DirectPath, g: Grams, sample: int = 2000, seed: int = 0) -> OwnToken:
    """Measure the bias towards the token itself; rows of logits are looked at for `sample` tokens drawn by `seed`.

    `g` are the path's `grams`.
    """
    if path.rows < 2:
        raise DataError(f"a path of {path.rows} token", "its own token needs another to be compared with")
    whole = float(g.left_sum * g.weights @ g.right_sum)
    diagonal, elsewhere = g.diagonal / g.rows, (whole - g.diagonal) / (g.rows * (g.rows - 1))
    spread = math.sqrt(max(0.0, asymmetry(g).energy / g.rows**2 - (whole / g.rows**2) ** 2))
    ids = sampled(path.rows, sample, seed)
    left = path.left(path.input.take(ids))
    own = _logits_of(path, left, ids)
    slack = ROUNDING * np.maximum(1.0, np.abs(own))
    first = np.ones(len(ids), bool)
    for start, stop in path.output.spans(beside=len(ids)):
        block = logits(path, left, start, stop)
        here = np.nonzero((ids >= start) & (ids < stop))[0]
        block[here, ids[here] - start] = -np.inf
        first &= block.max(1) <= own + slack
        advance(stop)
    share = float(first.mean())
    low, high = wilson(share, len(ids))
    excess = (diagonal - elsewhere) / spread if spread > 0 else 0.0
    return OwnToken(diagonal, elsewhere, excess, len(ids), share, low, high, 1 / path.output.rows)


def asymmetric_pairs(
    path: DirectPath, ids: ArrayLike | None = None, top: int = 20
) -> list[tuple[int, int, float, float]]:
    """Pairs (i, j, M[i, j], M[j, i]) with the largest M[i, j] − M[j, i] among `ids` (default: every token).

    The most asymmetric is first. All are searched, block by block; n tokens cost n²·E.
    """
    chosen = np.arange(path.rows) if ids is None else np.unique(np.asarray(ids, np.int64))
    best: list[tuple[int, int, float, float]] = []
    for one in range(0, len(chosen), BLOCK):
        first = chosen[one : one + BLOCK]
        a, b = path.left(path.input.take(first)), path.output.take(first)
        for other in range(one, len(chosen), BLOCK):
            second = chosen[other : other + BLOCK]
            forward = a @ path.output.take(second).T
            backward = b @ path.left(path.input.take(second)).T
            difference = np.where(first[:, None] < second[None, :], np.abs(forward - backward), -1.0).ravel()
            few = 0 < top < len(difference)
            places = np.argpartition(difference, -top)[-top:] if few else np.arange(len(difference))
            for place in places[difference[places] >= 0].tolist():
                row, column = divmod(place, len(second))
                i, j = int(first[row]), int(second[column])
                there, back = float(forward[row, column]), float(backward[row, column])
                best.append((i, j, there, back) if there >= back else (j, i, back, there))
            best = sorted(best, key=lambda pair: (pair[3] - pair[2], pair[:2]))[:top]
    return best


def sampled(rows: int, count: int, seed: int) -> NDArray[np.int64]:
    """Ids of `count` different tokens, ascending; all where there are no more."""
    if count >= rows:
        return np.arange(rows, dtype=np.int64)
    return np.sort(np.random.default_rng(seed).choice(rows, count, replace=False)).astype(np.int64)


def find_pairs(folder: Folder, words: Sequence[tuple[str, str]], rows: int) -> tuple[tuple[int, int], ...]:
    """Return the ids of each pair of words.

    Args:
        folder: with the model's tokenizer.json.
        words: pairs; each word must be one token.
        rows: tokens that both tables have.
    """
    if not words:
        return ()
    found = find_tokens(folder, [word for pair in words for word in pair])
    for token in found:
        if token.id >= rows:
            what = f"{folder.path}: {token.text!r} is token {token.id}, its tables have {rows:,} rows"
            raise DataError(what, "put the tokenizer that belongs to the model beside it")
    return tuple((a.id, b.id) for a, b in zip(found[::2], found[1::2], strict=True))


def word_orders(
    path: DirectPath, words: Sequence[tuple[str, str]], ids: Iterable[tuple[int, int]]
) -> dict[str, Transition]:
    """What a path says of every pair of words, whose ids are `ids`, both ways: {"New → York": …, "York → New": …}."""
    names = [f"{visible(one)} → {visible(other)}" for a, b in words for one, other in ((a, b), (b, a))]
    said = (way for both in both_ways(path, ids) for way in both)
    return dict(zip(names, said, strict=True))
