"""‖S − Sᵀ‖² / ‖S‖² of several paths on the same sampled tokens, with intervals over tokens.

S = A Uᵀ [n, n] is made block by block and never held. The interval resamples tokens with replacement (the bootstrap,
Efron 1979), the same draws for every path, so that their difference has one too. A token drawn twice is no pair with
itself: entries off the diagonal count by the product of both tokens' draws, those on it by the token's draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from tiewise.analysis.direct_path import Tick, no_numbers, silent
from tiewise.analysis.estimates import Estimate
from tiewise.analysis.tables import Array
from tiewise.core.errors import DataError

BLOCK = 1024
RESAMPLES = 200


@dataclass(frozen=True)
class SampledAsymmetry:
    """Asymmetry of one path on sampled tokens.

    Args:
        ratio: ‖S − Sᵀ‖² / ‖S‖²: 0 symmetric, 2 for unrelated tables, 4 antisymmetric; 95 % interval over tokens.
        centred: the same of S less its row means and column means, which the normaliser and a bias can take up; the
            means are those of the sample in every resample.
    """

    ratio: Estimate
    centred: Estimate

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return asdict(self)


def sampled_asymmetry(
    lefts: Sequence[Array], right: Array, seed: int = 0, resamples: int = RESAMPLES, tick: Tick = silent
) -> tuple[tuple[SampledAsymmetry, ...], SampledAsymmetry]:
    """Measure each path, and how much the last differs from the first.

    Args:
        lefts: each path's A of the sampled tokens [n, E].
        right: output rows of the same tokens [n, E].
        seed: of the resamples.
        resamples: at least 40.
        tick: hears of the rows done, over all paths.

    Returns:
        one result per path; the last less the first, draw by draw.

    Raises:
        DataError: fewer than 8 tokens, fewer than 40 resamples, or values that are no numbers.
    """
    n = len(right)
    if n < 8 or resamples < 40:
        raise DataError(f"{n} tokens, {resamples} resamples", "sample 8 tokens or more, 40 times or more")
    drawn = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), resamples)
    weights = np.concatenate([np.ones((n, 1)), drawn.T], axis=1)  # the sample itself comes first
    ratios = []
    if not all(np.isfinite(rows).all() for rows in (*lefts, right)):
        raise no_numbers()
    for place, left in enumerate(lefts):
        ratios.append(_ratios(left, right, weights, partial(_later, tick, place * n)))
    return tuple(_estimates(found, n) for found in ratios), _estimates(ratios[-1] - ratios[0], n)


def _later(tick: Tick, before: int, done: int) -> None:
    tick(before + done)


def _estimates(found: Array, rows: int) -> SampledAsymmetry:
    """From [2, 1 + resamples]: the value and the percentiles of its resamples, raw and centred."""
    low, high = np.quantile(found[:, 1:], [0.025, 0.975], axis=1)
    raw, centred = (Estimate(float(found[k, 0]), float(low[k]), float(high[k]), rows) for k in (0, 1))
    return SampledAsymmetry(raw, centred)


def _ratios(left: Array, right: Array, weights: Array, tick: Tick) -> Array:
    """Ratios [2, draws] of S and of the centred S, for every column of weights [n, draws]."""
    middle = _Middle(left, right)
    energy, turned = np.zeros((2, 2, weights.shape[1]))
    n = len(right)
    for one in range(0, n, BLOCK):
        first = slice(one, min(one + BLOCK, n))
        for other in range(one, n, BLOCK):
            second = slice(other, min(other + BLOCK, n))
            there, back = left[first] @ right[second].T, (left[second] @ right[first].T).T
            for kind, (s, t) in enumerate(((there, back), middle.centred(there, back, first, second))):
                found = _sums(s, t, weights[first], weights[second], one == other)
                energy[kind] += found[0]
                turned[kind] += found[1]
        tick(first.stop)
    return np.divide(2 * energy - 2 * turned, energy, out=np.zeros_like(energy), where=energy > 0)


def _sums(there: Array, back: Array, first: Array, second: Array, own: bool) -> tuple[Array, Array]:
    """Share of one block and its mirror image in ‖S‖² and in ⟨S, Sᵀ⟩, for every draw."""
    squares, products = there * there, there * back
    if not own:
        squares += back * back
        products *= 2
        return _weighted(squares, first, second), _weighted(products, first, second)
    diagonal = squares.diagonal() @ first
    np.fill_diagonal(squares, 0.0)
    np.fill_diagonal(products, 0.0)
    return _weighted(squares, first, second) + diagonal, _weighted(products, first, second) + diagonal


def _weighted(values: Array, first: Array, second: Array) -> Array:
    found: Array = np.einsum("nb,nb->b", first, values @ second)
    return found


class _Middle:
    """Row means, column means and mean of S = A Uᵀ, from the tables' mean rows."""

    def __init__(self, left: Array, right: Array) -> None:
        self.rows, self.columns = left @ right.mean(0), right @ left.mean(0)
        self.mean = float(left.mean(0) @ right.mean(0))

    def centred(self, there: Array, back: Array, first: slice, second: slice) -> tuple[Array, Array]:
        """S[first, second] and the transpose of S[second, first], both less their means."""
        s = there - self.rows[first, None] - self.columns[None, second] + self.mean
        t = back - self.columns[first, None] - self.rows[None, second] + self.mean
        return s, t
