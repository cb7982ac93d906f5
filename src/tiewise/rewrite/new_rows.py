"""Rows for new tokens, drawn from the normal distribution that has the mean and covariance of the rows in use.

    x_new = m + 1/√(n−1) · Σᵢ gᵢ (xᵢ − m)        gᵢ ~ N(0, 1), independent; i over the n rows in use, m their mean

Given the table, x_new is a sum of independent normal vectors, hence normal. Its mean is m, since E gᵢ = 0, and its
covariance is Σᵢ E[gᵢ²] (xᵢ − m)(xᵢ − m)ᵀ / (n−1), which is the sample covariance: N(m, Σ̂) exactly, and Σ̂ [D, D] is
never formed.

Take as xᵢ all that the checkpoint holds for token i: its input row, its output row and its bias, one behind the
other. The same gᵢ at every part then draws from their joint distribution, so that the two rows of a new token go
together as those of existing tokens do. Each part can be drawn by itself, since gᵢ depends on nothing but the seed, the
existing row and the new row.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.stored import Reader, Stored

OLD_BLOCK, NEW_BLOCK = 512, 256  # g is drawn in blocks of this shape; a part of the format, since results depend on it
SUM_BYTES = 64 * 2**20  # of sums held during one reading of the table


def new_rows(part: Stored, used: NDArray[np.bool_], count: int, seed: int) -> Iterator[NDArray[np.float64]]:
    """Yield `count` new rows of a table [V, E] or a bias [V], in blocks [≤ 256, E], with few readings.

    A new row depends on the seed and its own number, not on how many are drawn with it.

    Args:
        part: the stored table or bias.
        used: which of its rows to draw from, bool [V]; at least one.
        count: number of new rows.
        seed: the same at every part, so that their new rows belong together.
    """
    blocks = iter(range(-(-count // NEW_BLOCK)))
    width = part.shape[1] if len(part.shape) == 2 else 1
    while group := list(islice(blocks, max(1, SUM_BYTES // (8 * NEW_BLOCK * width)))):
        for block, rows in zip(group, _drawn(part, used, group, seed), strict=True):
            yield rows[: count - block * NEW_BLOCK].reshape(-1, *part.shape[1:])


def _drawn(part: Stored, used: NDArray[np.bool_], group: list[int], seed: int) -> NDArray[np.float64]:
    """New rows of the blocks in `group`, [len(group), 256, E], from one reading of `part`."""
    width = part.shape[1] if len(part.shape) == 2 else 1
    sums = np.zeros((len(group), NEW_BLOCK, width))  # Σ gᵢ xᵢ
    weights = np.zeros((len(group), NEW_BLOCK, 1))  # Σ gᵢ
    total = np.zeros(width)
    with Reader(part) as reader:
        for block, start in enumerate(range(0, part.rows, OLD_BLOCK)):
            inside = used[start : start + OLD_BLOCK]
            if not inside.any():
                continue
            rows = reader.wide(start, start + OLD_BLOCK).reshape(len(inside), width)[inside]
            total += rows.sum(axis=0, dtype=np.float64)
            for at, new in enumerate(group):
                g = np.random.default_rng([seed, new, block]).standard_normal((OLD_BLOCK, NEW_BLOCK), np.float32)
                g = g[: len(inside)][inside]
                sums[at] += g.T @ rows
                weights[at, :, 0] += g.sum(axis=0, dtype=np.float64)
    n = int(used.sum())
    mean = total / n
    sums -= weights * mean
    sums /= max(1, n - 1) ** 0.5
    sums += mean
    return sums
