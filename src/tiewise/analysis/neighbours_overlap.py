"""Do two tables hold the same tokens close together? Overlap of their k nearest neighbours, over sampled rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.estimates import Estimate, mean_interval

BLOCK = 2048  # rows of one tile of similarities: two tiles and their sorting stay within 100 MB


@dataclass(frozen=True)
class Overlap:
    """Mean share of a row's k nearest neighbours that are so in both tables.

    Args:
        k: neighbours of each row, by cosine of centred rows, among the sampled rows only.
        estimate: the mean over rows with a normal interval. Rows share neighbours, so it is a little narrow.
        chance: k/(n−1), the mean for unrelated tables.
        permuted: the same mean after permuting the second table's rows, once for each permutation.
    """

    k: int
    estimate: Estimate
    chance: float
    permuted: tuple[float, ...]


def nearest(rows: NDArray, k: int, tick: Callable[[int, int], None] = lambda done, total: None) -> NDArray[np.int64]:
    """Return the k nearest other rows of each row by cosine, [n, k] in no order; each pair of blocks is met once.

    Args:
        rows: [n, d], n > k. Rows of zeros have cosine 0 with all.
        k: neighbours. Among equal cosines the choice is arbitrary.
        tick: hears (tiles done, tiles in all).
    """
    n = len(rows)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(norms > 0, norms, 1)
    best = np.full((n, k), -np.inf, unit.dtype)
    ids = np.zeros((n, k), np.int64)
    starts = range(0, n, BLOCK)
    done, total = 0, len(starts) * (len(starts) + 1) // 2
    for i in starts:
        for j in range(i, n, BLOCK):
            tile = unit[i : i + BLOCK] @ unit[j : j + BLOCK].T
            if i == j:
                np.fill_diagonal(tile, -np.inf)
            else:
                _merge(best, ids, j, tile.T, i)
            _merge(best, ids, i, tile, j)
            done += 1
            tick(done, total)
    return ids


def _merge(best: NDArray, ids: NDArray, start: int, tile: NDArray, first: int) -> None:
    """Keep the k best of each row's best so far and one tile, whose columns are rows `first` on."""
    stop, k = start + len(tile), best.shape[1]
    better = np.nonzero((tile > best[start:stop].min(axis=1, keepdims=True)).any(axis=1))[0]
    if not len(better):
        return
    tile = np.ascontiguousarray(tile[better])
    columns = np.argpartition(tile, -min(k, tile.shape[1]), axis=1)[:, -k:]
    values = np.concatenate([best[start + better], np.take_along_axis(tile, columns, axis=1)], axis=1)
    names = np.concatenate([ids[start + better], columns + first], axis=1)
    kept = np.argpartition(values, -k, axis=1)[:, -k:]
    best[start + better] = np.take_along_axis(values, kept, axis=1)
    ids[start + better] = np.take_along_axis(names, kept, axis=1)


def shared(ids_a: NDArray[np.int64], ids_b: NDArray[np.int64]) -> NDArray[np.float64]:
    """Share of each row's neighbours [n, k] that are in both, [n]."""
    k = ids_a.shape[1]
    return (ids_a[:, :, None] == ids_b[:, None, :]).sum(axis=(1, 2)) / k


def overlap(ids_a: NDArray[np.int64], ids_b: NDArray[np.int64], permutations: int, seed: int) -> Overlap:
    """Compare the neighbours [n, k] of the same n rows in two tables."""
    n, k = ids_a.shape
    generator = np.random.default_rng(seed)
    permuted = []
    for _ in range(permutations):
        order = generator.permutation(n)
        place = np.argsort(order)
        permuted.append(float(shared(ids_a, place[ids_b[order]]).mean()))
    return Overlap(k, mean_interval(shared(ids_a, ids_b)), k / (n - 1), tuple(permuted))
