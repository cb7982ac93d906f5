"""Do two tables hold the same tokens close together? Overlap of their k nearest neighbours, over sampled rows.

How alike two tables' spaces are without any map: CKA, shared subspaces, spectra, norms; from d×d products.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.estimates import Estimate, correlation_interval, mean_interval
from tiewise.analysis.row_products import CURVE, LINE, Products
from tiewise.analysis.table_maps import cka_chance
from tiewise.core.progress import progress

BLOCK = 2048  # rows of one tile of similarities: two tiles and their sorting stay within 100 MB


@dataclass(frozen=True)
class Overlap:
    """Mean share of a row's k nearest neighbours that are so in both tables."""

    k: int  # neighbours of each row, by cosine of centred rows, among the sampled rows only
    estimate: Estimate  # the mean over rows with a normal interval. Rows share neighbours, so it is a little narrow
    chance: float  # k/(n−1), the mean for unrelated tables
    permuted: tuple[float, ...]  # the same mean after permuting the second table's rows, once for each permutation


def nearest(rows: NDArray, k: int) -> NDArray[np.int64]:
    """Return the k nearest other rows of each row by cosine, [n, k] in no order; each pair of blocks is met once.

    Args:
        rows: [n, d], n > k. Rows of zeros have cosine 0 with all.
        k: neighbours. Among equal cosines the choice is arbitrary.
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
            progress("neighbours", done, total)
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


_NOTHING_LEFT = 1e-12  # share of a table below which what is left of it is rounding


@dataclass(frozen=True)
class Cka:
    """Linear CKA ‖AᵀB‖² / (‖AᵀA‖·‖BᵀB‖) of centred rows (Kornblith et al. 2019); `chance`: its permutations' mean."""

    value: float
    chance: float
    rows: int


@dataclass(frozen=True)
class CkaWithout:
    """CKA of what is left of both tables when functions of frequency are taken out of their columns."""

    powers: int  # of log(count + 1) that were taken out: 1 a straight line, 3 a curve
    cka: Cka  # of the rest. `chance` is its mean for unrelated rests, which have n − 1 − powers degrees of freedom
    share_a: float  # share of Σ‖row − mean‖² of A that was taken out
    share_b: float  # the same of B


@dataclass(frozen=True)
class Subspace:
    """How far two leading subspaces of k directions agree: the mean squared cosine of their principal angles."""

    side: str  # `left` (over tokens, [n, k]; any widths) or `right` (over the d coordinates; one width only)
    k: int  # directions of each
    value: float  # Σ cos² / k, from 0 to 1
    chance: float  # its mean for two random subspaces, k/(n−1) left and k/d right
    cosines: tuple[float, ...]  # of the principal angles, falling


@dataclass(frozen=True)
class Spectrum:
    """Singular values of a table's centred paired rows, falling."""

    values: tuple[float, ...]  # s_1 ≥ s_2 ≥ …, from the Gram matrix: accurate to about √ε·s_1 in absolute terms
    participation: float  # (Σ s²)² / Σ s⁴, the number of directions that the table fills evenly
    mean_share: float  # share of Σ‖row‖² that is the mean row's: 0 centred, 1 all rows alike


@dataclass(frozen=True)
class NormCorrelation:
    """Correlation over tokens of the rows' norms in the two tables; `chance` is one deviation around 0, 1/√(n−1)."""

    pearson: Estimate
    spearman: Estimate
    chance: float


@dataclass(frozen=True)
class Similarity:
    """Everything of this file, of all paired rows."""

    cka: Cka
    subspaces: tuple[Subspace, ...]
    spectrum_a: Spectrum
    spectrum_b: Spectrum
    without: tuple[CkaWithout, ...] = ()  # where the tokens' counts are known


def similarity(products: Products, ks: tuple[int, ...]) -> Similarity:
    """Compare two tables by the products of all their paired rows, as they are stored (not centred)."""
    centred = products.centre()
    values_a, axes_a = _axes(centred.gram_a)
    values_b, axes_b = _axes(centred.gram_b)
    rank = min(_rank(values_a), _rank(values_b))
    between = axes_a.T @ centred.cross @ axes_b
    found = []
    for k in sorted({min(k, rank) for k in ks if min(k, rank) > 0}):
        left = between[:k, :k] / np.sqrt(np.outer(values_a[:k], values_b[:k]))
        found.append(_subspace("left", left, k / (products.rows - 1)))
        if axes_a.shape == axes_b.shape:
            found.append(_subspace("right", axes_a[:, :k].T @ axes_b[:, :k], k / len(axes_a)))
    return Similarity(
        _cka(centred),
        tuple(found),
        _spectrum(values_a, products.gram_a, products.mean_a, products.rows),
        _spectrum(values_b, products.gram_b, products.mean_b, products.rows),
        tuple(_without(products, centred, powers) for powers in _powers(products)),
    )


def norm_correlation(norms_a: NDArray, norms_b: NDArray) -> NormCorrelation:
    """Correlate the norms of paired rows, by value (Pearson) and by rank (Spearman, ties by their mean rank)."""
    n = len(norms_a)
    pearson, spearman = _correlation(norms_a, norms_b), _correlation(_ranks(norms_a), _ranks(norms_b))
    return NormCorrelation(correlation_interval(pearson, n), correlation_interval(spearman, n), (n - 1) ** -0.5)


def _powers(products: Products) -> list[int]:
    there = products.along_a.shape[1]
    return sorted({min(powers, there) for powers in (LINE, CURVE)} - {0})


def _without(products: Products, centred: Products, powers: int) -> CkaWithout:
    rest = products.without(powers)
    shares = []
    for left, whole in ((rest.gram_a, centred.gram_a), (rest.gram_b, centred.gram_b)):
        total = float(np.trace(whole))
        shares.append(1 - float(np.trace(left)) / total if total else 0.0)
    nothing = max(shares) > 1 - _NOTHING_LEFT
    return CkaWithout(powers, Cka(0.0, 0.0, rest.rows) if nothing else _cka(rest, powers), *shares)


def _cka(centred: Products, taken_out: int = 0) -> Cka:
    scale = float(np.linalg.norm(centred.gram_a) * np.linalg.norm(centred.gram_b))
    value = float(np.square(centred.cross).sum()) / scale if scale else 0.0
    return Cka(value, cka_chance(centred.rows - taken_out, centred.gram_a, centred.gram_b), centred.rows)


def _axes(gram: NDArray) -> tuple[NDArray, NDArray]:
    values, vectors = np.linalg.eigh(gram)
    return np.maximum(values[::-1], 0), vectors[:, ::-1]


def _rank(values: NDArray) -> int:
    return int((values > len(values) * np.finfo(np.float64).eps * values[0]).sum())


def _subspace(side: str, between: NDArray, chance: float) -> Subspace:
    cosines = np.minimum(np.linalg.svd(between, compute_uv=False), 1.0)
    k = len(cosines)
    return Subspace(side, k, float(np.square(cosines).mean()), min(1.0, chance), tuple(map(float, cosines)))


def _spectrum(values: NDArray, gram: NDArray, mean: NDArray, rows: int) -> Spectrum:
    total, raw = float(values.sum()), float(np.trace(gram))
    participation = total**2 / float(np.square(values).sum()) if total else 0.0
    share = rows * float(mean @ mean) / raw if raw else 0.0
    return Spectrum(tuple(map(float, np.sqrt(values))), participation, share)


def _correlation(x: NDArray, y: NDArray) -> float:
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale else 0.0


def _ranks(values: NDArray) -> NDArray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]
