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
    rows = slice(start, start + len(tile))
    values, names = _whole(tile, best.shape[1]) if best[start, 0] == -np.inf else _better(tile, best[rows].min(axis=1))
    values = np.concatenate([best[rows], values], axis=1)
    names = np.concatenate([ids[rows], names + first], axis=1)
    kept = np.argpartition(values, -best.shape[1], axis=1)[:, -best.shape[1] :]
    best[rows] = np.take_along_axis(values, kept, axis=1)
    ids[rows] = np.take_along_axis(names, kept, axis=1)


def _whole(tile: NDArray, k: int) -> tuple[NDArray, NDArray]:
    """(values, columns) of the k largest of each row."""
    tile = np.ascontiguousarray(tile)
    columns = np.argpartition(tile, -min(k, tile.shape[1]), axis=1)[:, -k:]
    return np.take_along_axis(tile, columns, axis=1), columns


def _better(tile: NDArray, least: NDArray) -> tuple[NDArray, NDArray]:
    """(values, columns) of what exceeds `least` in each row, padded with -inf: few, once some tiles have been met."""
    rows, columns = np.nonzero(np.ascontiguousarray(tile > least[:, None]))
    counts = np.bincount(rows, minlength=len(tile))
    at = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    values = np.full((len(tile), int(counts.max(initial=0))), -np.inf, tile.dtype)
    names = np.zeros(values.shape, np.int64)
    values[rows, at], names[rows, at] = tile[rows, columns], columns
    return values, names


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
