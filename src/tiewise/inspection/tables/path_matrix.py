"""The direct path M = A Bᵀ [V, V]: next-token logits from the tables alone.

A's rows are the input rows as they reach the head (scaled, normalised, times the norm's gain), B's rows the output
rows. M is never built. Every figure here follows from three products of width E, which are summed over the rows once:

    ‖M‖² = tr(AᵀA · BᵀB)        ⟨M, Mᵀ⟩ = tr(BᵀA · BᵀA)        ‖M − Mᵀ‖² = 2‖M‖² − 2⟨M, Mᵀ⟩

The nonzero eigenvalues of (M + Mᵀ)/2 = X J Xᵀ, with X = [A B] and J = ½[[0, I], [I, 0]], are those of R J Rᵀ where
XᵀX = RᵀR: a problem of 2E × 2E.

Probabilities do not depend on all of M. The normaliser removes every part that is constant along a row, and a bias
every part that is constant along a column. So `centred` figures are of M without its row means and column means: A and
B without their mean rows.

Logits and probabilities of single tokens are the model's: norm with gain and shift, scales, bias and soft-cap are
applied as the model applies them. The softmax runs over every output row; the table is read once for all requested
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike

from tiewise.checkpoint.family_record import NONE
from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.errors import DataError, non_finite_error
from tiewise.core.estimates import Estimate, wilson_interval
from tiewise.core.measurement import Quantity, visible
from tiewise.core.progress import advance_progress
from tiewise.inspection.tables.model_tables import Array, Ids, Mask
from tiewise.inspection.tables.open_path import DirectPath
from tiewise.inspection.tables.token_texts import find_tokens

COUNTED = 1e-10  # relative to ‖M‖; smaller eigenvalues count as zeros
BLOCK = 1024  # tokens per side of a block of token pairs
RESAMPLES = 200  # bootstrap draws of the sampled tokens
MOST_PAIRS = 4096  # pairs per pass over the output table
ROUNDING = 1e-12  # relative; one product in blocks of two shapes is rounded differently
AsymmetricPair = tuple[int, int, float, float]  # i, j, M[i, j], M[j, i]
WordOrders = dict[str, tuple[float, float, int]]  # "New → York" → logit, log-probability, rank


@dataclass(frozen=True)
class Grams:
    """Products of width E, summed over the rows of both tables."""

    left: Array  # of base rows, NᵀN [E, E]
    right: Array  # of output rows, UᵀU [E, E]
    cross: Array  # UᵀN [E, E]
    weights: Array  # elementwise between base rows and output rows [E]
    left_sum: Array  # sum of base rows [E]
    right_sum: Array  # sum of output rows [E]
    diagonal: float  # sum of M's diagonal
    rows: int  # V

    @property
    def shared(self) -> bool:
        """Return True if all three products are one: base rows and output rows are the same."""
        return self.left is self.right

    @property
    def centred(self) -> Grams:
        """Return the products of tables without their mean rows, for `asymmetry` and `definiteness`."""

        left = right = cross = self.left - np.outer(self.left_sum, self.left_sum) / self.rows
        if not self.shared:
            right = self.right - np.outer(self.right_sum, self.right_sum) / self.rows
            cross = self.cross - np.outer(self.right_sum, self.left_sum) / self.rows
        zero = np.zeros_like(self.left_sum)
        diagonal = float(np.trace(cross * self.weights))
        return Grams(left, right, cross, self.weights, zero, zero, diagonal, self.rows)


def grams(path: DirectPath) -> Grams:
    """Sum the three products in fp64, a few rows at a time.

    A tied linear path needs only one of them.
    """
    shared = path.tied and path.norm.kind == NONE
    width, weights = path.input.width, path.weights
    left, right, cross = (np.zeros((width, width)) for _ in range(3))
    left_sum, right_sum, diagonal = np.zeros(width), np.zeros(width), 0.0
    for start, stop in path.input.spans(path.rows):
        raw = path.input.read(start, stop)
        base = path.base(raw)
        out = raw if path.tied else path.output.read(start, stop)
        left += base.T @ base
        if not shared:
            right += out.T @ out
            cross += out.T @ base
        left_sum += base.sum(0)
        right_sum += out.sum(0)
        diagonal += float(np.einsum("ne,ne,e->", base, out, weights))
        advance_progress(stop)
    if not path.rows:
        raise DataError("a table without rows", "give a model that has some")
    if not np.isfinite([left, right, cross]).all():
        raise non_finite_error("a table or a norm")
    left = (left + left.T) / 2
    if shared:
        right = cross = left
    return Grams(left, right, cross, weights, left_sum, right_sum, diagonal, path.rows)


def asymmetry(g: Grams) -> tuple[float, float]:
    """Return (‖M‖², ‖M − Mᵀ‖² / ‖M‖²).

    The ratio is 0 for a symmetric M, exactly so for a tied linear path, 2 for no relation, and 4 for an antisymmetric
    M.
    """
    weights = np.outer(g.weights, g.weights)
    direct, transposed = g.left * g.right, g.cross * g.cross.T
    energy = float((weights * direct).sum())
    if energy <= 0:
        return energy, 0.0
    difference = float((weights * (direct - transposed)).sum())
    return energy, 2 * max(0.0, difference) / energy


def eigenvalues(g: Grams) -> Array:
    """Return the nonzero eigenvalues of M's symmetric part, rising.

    For any S = W Wᵀ none is below 0. They are computed from an E × E matrix for a tied linear path, otherwise from one
    of
    2E × 2E.
    """
    if g.shared:
        root = _root(g.left)
        values = np.linalg.eigvalsh(root * g.weights @ root.T)
    else:
        mixed = g.cross * g.weights
        left = g.left * np.outer(g.weights, g.weights)
        root = _root(np.block([[left, mixed.T], [mixed, g.right]]))
        half = len(g.weights)
        product = root[:, :half] @ root[:, half:].T
        values = np.linalg.eigvalsh((product + product.T) / 2)
    energy, _ = asymmetry(g)
    counted: Array = values[np.abs(values) > COUNTED * np.sqrt(energy)]
    return counted


def _root(product: Array) -> Array:
    """Return R [r, n] with RᵀR = product, without directions that are only rounding."""
    values, vectors = np.linalg.eigh(product)
    is_filled = values > values[-1] * len(values) * np.finfo(float).eps
    root: Array = np.sqrt(values[is_filled])[:, None] * vectors[:, is_filled].T
    return root


def sampled_asymmetry(
    lefts: Sequence[Array], right: Array, seed: int = 0, block: int = BLOCK
) -> list[tuple[Estimate, Estimate]]:
    """Measure each path's A of sampled tokens [n, E] against their output rows.

    The last result is the difference of the last path and the first. Each is ‖S − Sᵀ‖² / ‖S‖² (0 symmetric, 2 for
    unrelated
    tables, 4 antisymmetric), and the same of S without the sample's row means and column means (the same in every
    draw),
    which the normaliser and a bias can absorb.

    Intervals are those of the bootstrap over tokens (Efron 1979), with the same draws for every path. A token that is
    drawn
    twice is no pair with itself: entries off the diagonal count by the product of both tokens' draws, those on it by
    the
    token's draws. Entries of S are computed in blocks of `block` · `block`.
    """
    n = len(right)
    if n < 8:
        raise DataError(f"{n} tokens", "sample 8 tokens or more")
    for rows in (*lefts, right):
        if not np.isfinite(rows).all():
            raise non_finite_error("a table or a norm")
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES)
    weights = np.concatenate([np.ones((n, 1)), draws.T], axis=1)  # the sample itself comes first
    ratios = [_Ratios(left, right, weights).measure(index * n, block) for index, left in enumerate(lefts)]
    estimates = []
    for raw, centred in (*ratios, ratios[-1] - ratios[0]):
        estimates.append((_bootstrapped(raw, n), _bootstrapped(centred, n)))
    return estimates


def _bootstrapped(values: Array, rows: int) -> Estimate:
    """Return the sample's value, the first of [1 + draws], with the draws' interval."""
    low, high = np.quantile(values[1:], [0.025, 0.975])
    return Estimate(float(values[0]), float(low), float(high), rows)


class _Ratios:
    """Ratios of S = A Uᵀ and of the centred S, for each draw."""

    def __init__(self, left: Array, right: Array, weights: Array) -> None:
        """Store the rows A and U [n, E] and weights [n, draws]; nothing is summed yet."""
        self.left, self.right, self.weights = left, right, weights
        # means of S along its rows and its columns [n], and over all entries
        self.rows, self.columns = left @ right.mean(0), right @ left.mean(0)
        self.mean = float(left.mean(0) @ right.mean(0))
        # ‖S‖² and ⟨S, Sᵀ⟩ of S and of the centred S [2, draws]
        self.energy, self.transposed = np.zeros((2, 2, weights.shape[1]))

    def measure(self, before: int, block: int) -> Array:
        """Return ‖S − Sᵀ‖² / ‖S‖² of S and of the centred S [2, draws].

        S is computed block by block. For progress, `before` tokens count as done.
        """
        n = len(self.right)
        for start in range(0, n, block):
            first = slice(start, min(start + block, n))
            for other in range(start, n, block):
                second = slice(other, min(other + block, n))
                there = self.left[first] @ self.right[second].T
                back = (self.left[second] @ self.right[first].T).T
                centred_there = there - self.rows[first, None] - self.columns[None, second] + self.mean
                centred_back = back - self.columns[first, None] - self.rows[None, second] + self.mean
                self._add(0, there, back, first, second)
                self._add(1, centred_there, centred_back, first, second)
            advance_progress(before + first.stop)
        difference = 2 * self.energy - 2 * self.transposed
        return np.divide(difference, self.energy, out=np.zeros_like(difference), where=self.energy > 0)

    def _add(self, kind: int, a: Array, b: Array, first: slice, second: slice) -> None:
        """Add a block `a` and its transposed mirror image `b` to the sums of one S."""
        if first == second:
            energy, transposed = a * a, a * b
        else:
            energy, transposed = a * a + b * b, 2 * a * b
        self._add_values(self.energy[kind], energy, first, second)
        self._add_values(self.transposed[kind], transposed, first, second)

    def _add_values(self, total: Array, values: Array, first: slice, second: slice) -> None:
        """Add values of a block to sums [draws].

        A value off the diagonal counts by the draws of both tokens, one on it by those of the token.
        """
        if first == second:
            total += values.diagonal() @ self.weights[first]
            np.fill_diagonal(values, 0.0)
        total += np.einsum("nb,nb->b", self.weights[first], values @ self.weights[second])


def logit_blocks(path: DirectPath, left: Array, caller_width: int = 0) -> Iterator[tuple[int, int, Array]]:
    """Yield (start, stop, logits [n, stop − start]) of rows of A [n, E].

    The blocks have a few MB each and cover the full output table. `caller_width` is the number of values that the
    caller
    stores for each output row.
    """
    for start, stop in path.output.spans(caller_width=max(len(left), caller_width)):
        output = path.output.read(start, stop)
        yield start, stop, path.logits(left @ output.T, output, slice(start, stop))
        advance_progress(stop)


def logits_of(path: DirectPath, left: Array, ids: Ids) -> Array:
    """Return the logit [n] of one output token for each row of A [n, E]."""
    output = path.output.take(ids)
    return path.logits(np.einsum("ne,ne->n", left, output), output, ids)


def transitions(path: DirectPath, pairs: ArrayLike) -> tuple[Array, Array, Ids]:
    """Return (logits, log-probabilities in nats, ranks) of pairs (before, after) [n, 2].

    Logits are the head's, the softmax runs over every output row, and a rank counts the tokens with a larger logit.
    """
    ordered_pairs = np.asarray(pairs, np.int64).reshape(-1, 2)
    logits, logs, ranks = (
        np.empty(len(ordered_pairs)),
        np.empty(len(ordered_pairs)),
        np.zeros(len(ordered_pairs), np.int64),
    )
    for first in range(0, len(ordered_pairs), MOST_PAIRS):
        chunk = slice(first, first + MOST_PAIRS)
        before, index = np.unique(ordered_pairs[chunk, 0], return_inverse=True)
        left = path.left(path.input.take(before))
        of_pairs = logits_of(path, left[index], ordered_pairs[chunk, 1])
        least = beyond(of_pairs)[:, None]
        highest, total = np.full(len(before), -np.inf), np.zeros(len(before))
        for _, _, block in logit_blocks(path, left, caller_width=len(of_pairs)):
            ranks[chunk] += (block[index] > least).sum(1)
            larger = np.maximum(highest, block.max(1))
            total = total * np.exp(highest - larger) + np.exp(block - larger[:, None]).sum(1)
            highest = larger
        normaliser = highest + np.log(total)
        logits[chunk] = of_pairs
        logs[chunk] = of_pairs - normaliser[index]
    return logits, logs, ranks


def beyond(logits: Array) -> Array:
    """Return the value that another logit must exceed to be larger by more than rounding."""
    return logits + ROUNDING * np.maximum(1.0, np.abs(logits))


def self_prediction(path: DirectPath, g: Grams, sample: int = 2000, seed: int = 0) -> list[Quantity]:
    """Measure how strongly the path predicts the token that it just read.

    The figures follow from the path's `grams` and from complete rows of sampled tokens. Exact means of M's diagonal and
    of
    the other entries are without bias, soft-cap and the norm's shift.
    """
    if path.rows < 2:
        raise DataError(f"a path of {path.rows} token", "its own token needs another to be compared with")
    total = float(g.left_sum * g.weights @ g.right_sum)
    diagonal = g.diagonal / g.rows
    elsewhere = (total - g.diagonal) / (g.rows * (g.rows - 1))
    energy, _ = asymmetry(g)
    variance = max(0.0, energy / g.rows**2 - (total / g.rows**2) ** 2)
    excess = 0.0
    if variance > 0:
        excess = (diagonal - elsewhere) / math.sqrt(variance)
    ids = sampled(path.rows, sample, seed)
    share, chance = float(_is_first(path, ids).mean()), 1 / path.output.rows
    low, high = wilson_interval(share, len(ids))
    why = "tokens that have no likelier successor than themselves"
    return [
        Quantity("own token first", share, low, high, len(ids), chance, unit="%", why=why),
        Quantity("mean of the diagonal", diagonal, chance=elsewhere, unit="logits", main=False),
        Quantity("diagonal less the rest", excess, unit="standard deviations of M", main=False),
    ]


def _is_first(path: DirectPath, ids: Ids) -> Mask:
    """Mark the tokens [n] that are their own likeliest successor."""
    left = path.left(path.input.take(ids))
    least = beyond(logits_of(path, left, ids))
    is_first = np.ones(len(ids), bool)
    for start, stop, block in logit_blocks(path, left):
        here = np.flatnonzero((ids >= start) & (ids < stop))
        block[here, ids[here] - start] = -np.inf
        is_first &= block.max(1) <= least
    return is_first


def asymmetric_pairs(path: DirectPath, ids: ArrayLike, top: int = 20, block: int = BLOCK) -> list[AsymmetricPair]:
    """Return the `top` most asymmetric pairs of `ids`: (i, j, M[i, j], M[j, i]).

    They are sorted by falling M[i, j] − M[j, i]. n tokens cost n²·E; `block` · `block` differences are in memory at a
    time.
    """
    chosen = np.unique(np.asarray(ids, np.int64))
    best: list[AsymmetricPair] = []
    for start in range(0, len(chosen), block):
        first = chosen[start : start + block]
        a, b = path.left(path.input.take(first)), path.output.take(first)
        for other in range(start, len(chosen), block):
            second = chosen[other : other + block]
            forward = a @ path.output.take(second).T
            backward = b @ path.left(path.input.take(second)).T
            best += _most_asymmetric(first, second, forward, backward, top)
            best = sorted(best, key=lambda pair: (pair[3] - pair[2], pair[:2]))[:top]
    return best


def _most_asymmetric(first: Ids, second: Ids, forward: Array, backward: Array, top: int) -> Iterator[AsymmetricPair]:
    """Yield the `top` pairs of one block with the largest difference of both logits.

    `forward` and `backward` are these logits [n, m]. The larger logit of each pair comes first.
    """
    is_once = first[:, None] < second[None, :]
    difference = np.where(is_once, np.abs(forward - backward), -1.0).ravel()
    indices = np.argpartition(-difference, min(top, len(difference)) - 1)[:top]
    for index in indices[difference[indices] >= 0].tolist():
        row, column = divmod(index, len(second))
        i, j = int(first[row]), int(second[column])
        there, back = float(forward[row, column]), float(backward[row, column])
        if there >= back:
            yield i, j, there, back
        else:
            yield j, i, back, there


def sampled(rows: int, count: int, seed: int) -> Ids:
    """Return the ids of `count` different random tokens, ascending; at most `rows`."""
    if count >= rows:
        return np.arange(rows, dtype=np.int64)
    return np.sort(np.random.default_rng(seed).choice(rows, count, replace=False)).astype(np.int64)


def find_pairs(folder: Folder, words: Sequence[tuple[str, str]], rows: int) -> list[tuple[int, int]]:
    """Return the ids of each pair of words, by the folder's tokenizer.json.

    Raises:
        DataError: an id is not below `rows`.
    """
    if not words:
        return []
    texts = list(chain.from_iterable(words))
    ids = find_tokens(folder, texts)
    largest = max(ids)
    if largest >= rows:
        text = texts[ids.index(largest)]
        problem = f"{folder.path}: {text!r} is token {largest}, its tables have {rows:,} rows"
        raise DataError(problem, "put the tokenizer that belongs to the model into its folder")
    return list(zip(ids[::2], ids[1::2], strict=True))


def word_orders(path: DirectPath, words: Sequence[tuple[str, str]], ids: Iterable[tuple[int, int]]) -> WordOrders:
    """Return (logit, log-probability, rank) of word pairs in both orders.

    The keys are like "New → York"; `ids` are the pairs' token ids.
    """
    names = []
    for first, second in words:
        a, b = visible(first), visible(second)
        names += [f"{a} → {b}", f"{b} → {a}"]
    ordered_pairs = []
    for a_id, b_id in ids:
        ordered_pairs += [(a_id, b_id), (b_id, a_id)]
    logits, logs, ranks = transitions(path, ordered_pairs)
    values = zip(logits.tolist(), logs.tolist(), ranks.tolist(), strict=True)
    return dict(zip(names, values, strict=True))
