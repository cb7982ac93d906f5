"""How unevenly a table's rows point: mean cosine, the mean row, leading directions, isotropy of the partition function.

One pass sums what spectra need; pieces are multiplied in fp64, for large tables in fp32, and added in fp64.

A table's rows in two dimensions: along the two directions of largest variance, which both ends can be drawn in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.estimates import Estimate, Z
from tiewise.analysis.path_tokens import sampled
from tiewise.analysis.table_maps import law
from tiewise.analysis.token_table import CHUNK_VALUES, Array, TokenTable
from tiewise.core.errors import DataError
from tiewise.core.progress import advance

LEAST_PIECE = 1024  # rows: products of fewer spend their time adding E × E matrices
EXACT_UP_TO = 2e11  # V·E² of products in fp64; a larger table's are in fp32
LEADING = (1, 10, 100)
MOST_ROWS = 20_000  # of which the partition function is summed
DRAWS = 40


@dataclass(frozen=True)
class Moments:
    """Sums over a table's rows w_i [E]."""

    norms: Array  # ‖w_i‖ [V]
    sum: Array  # Σ w_i [E]
    gram: Array  # Σ w_i w_iᵀ [E, E]
    unit_sum: Array  # Σ w_i/‖w_i‖ over rows that are not zero [E]
    unit_squares: float  # Σ (u_i·s)² with u_i the unit rows and s their sum: what the interval of the mean cosine needs

    @property
    def rows(self) -> int:
        """V."""
        return len(self.norms)

    @property
    def covariance(self) -> Array:
        """Σ (w_i − mean)(w_i − mean)ᵀ [E, E]."""
        return self.gram - np.outer(self.sum, self.sum) / self.rows

    @cached_property
    def principal(self) -> tuple[Array, Array]:
        """(eigenvalues of `covariance`, falling [E]; their directions as columns [E, E])."""
        values, vectors = np.linalg.eigh(self.covariance)
        return np.maximum(values[::-1], 0.0), vectors[:, ::-1]


@dataclass(frozen=True)
class Leading:
    """Share of the variance in the k leading directions, and the same of a Gaussian table of this shape."""

    k: int
    share: float
    chance: float


@dataclass(frozen=True)
class Isotropy:
    """min Z(c) / max Z(c) with Z(c) = Σ_i exp(c·w_i) over unit vectors c: 1 where no direction is special.

    Mu & Viswanath 2018 (arXiv:1702.01417) search the eigenvectors of WᵀW; both signs of each are searched here.
    """

    stored: float  # of the rows as they are. It goes to 1 for short rows, whatever their directions
    scaled: float  # of the rows divided by the root mean square of the table's values, so that tables can be compared
    chance: float  # `scaled` of a Gaussian table of this shape, by simulation over the Marchenko-Pastur law
    rows: int  # rows that Z was summed over


@dataclass(frozen=True)
class Anisotropy:
    """How unevenly a table's rows point."""

    mean_cosine: Estimate  # of all pairs of different rows, exactly; the interval takes the tokens for a sample
    cosine_deviation: float  # its standard deviation around 0 for rows of random directions, √(2 / (n(n−1)E))
    mean_share: float  # share of Σ‖row‖² that is the mean row's; 1/V by chance
    leading: tuple[Leading, ...]  # shares of the variance (rows less their mean) of the first directions
    shares: tuple[float, ...]  # share of each direction, falling [E]
    participation: float  # 1 / Σ share²: directions that the table fills evenly
    participation_chance: float  # the same of a Gaussian table, (V−1)E / (V+E)
    isotropy: Isotropy  # of the partition function


def moments(table: TokenTable) -> Moments:
    """Sum them: one pass for the products, a second for the interval of the mean cosine."""
    dtype: type[np.floating] = np.float64 if table.rows * table.width**2 <= EXACT_UP_TO else np.float32
    norms, total, units = np.empty(table.rows), np.zeros(table.width), np.zeros(table.width)
    gram = np.zeros((table.width, table.width))
    for start, stop in _pieces(table):
        rows = table.read(start, stop)
        norms[start:stop] = np.linalg.norm(rows, axis=1)
        total += rows.sum(0)
        units += _unit(rows, norms[start:stop]).sum(0)
        narrow: NDArray = rows.astype(dtype, copy=False)
        gram += narrow.T @ narrow
        advance(stop)
    if not np.isfinite(gram).all():
        raise DataError("a table holds values that are no numbers", "`tiewise check --deep` names the rows")
    if np.count_nonzero(norms) < 3:
        raise DataError(f"a table of {np.count_nonzero(norms)} rows that are not zero", "give one with three or more")
    squares = 0.0
    for start, stop in _pieces(table):
        squares += float(np.square(_unit(table.read(start, stop), norms[start:stop]) @ units).sum())
    return Moments(norms, total, gram, units, squares)


def _pieces(table: TokenTable) -> Iterator[tuple[int, int]]:
    step = max(LEAST_PIECE, CHUNK_VALUES // table.width)
    for start in range(0, table.rows, step):
        yield start, min(start + step, table.rows)


def _unit(rows: Array, norms: Array) -> Array:
    return rows / np.where(norms > 0, norms, 1.0)[:, None]


def anisotropy(table: TokenTable, found: Moments, seed: int = 0) -> Anisotropy:
    """Measure a table whose `moments` are `found`; `seed` draws the rows of the partition function and its chance."""
    values, _ = found.principal
    total, energy = float(values.sum()), float(np.trace(found.gram))
    shares = values / total if total > 0 else values
    expected = gaussian_shares(found.rows, table.width)
    ks = [k for k in LEADING if k < table.width]
    leading = tuple(Leading(k, float(shares[:k].sum()), float(expected[:k].sum())) for k in ks)
    n = int(np.count_nonzero(found.norms))
    return Anisotropy(
        mean_cosine=mean_cosine(found),
        cosine_deviation=math.sqrt(2 / (n * (n - 1) * table.width)),
        mean_share=float(found.sum @ found.sum) / found.rows / energy,
        leading=leading,
        shares=tuple(map(float, shares)),
        participation=1 / float(np.square(shares).sum()) if total > 0 else 0.0,
        participation_chance=(found.rows - 1) * table.width / (found.rows + table.width),
        isotropy=isotropy(table, found, seed),
    )


def mean_cosine(found: Moments) -> Estimate:
    """Mean cosine of all pairs of different rows: (‖s‖² − n) / (n(n−1)) with s the sum of the n unit rows.

    It is a U-statistic: its variance is 4/n times that of a row's own mean cosine with the others (Hoeffding 1948).
    """
    n = int(np.count_nonzero(found.norms))
    square = float(found.unit_sum @ found.unit_sum)
    value = (square - n) / (n * (n - 1))
    variance = max(0.0, found.unit_squares / n - (square / n) ** 2) / (n - 1) ** 2
    half = Z * math.sqrt(4 * variance / n)
    return Estimate(value, value - half, value + half, n)


def gaussian_spectrum(rows: int, width: int) -> Array:
    """Expected variances along the directions of a Gaussian table [rows, width] of unit variance, falling [width].

    Each is the mean of the Marchenko-Pastur law over its share of the law's weight; beyond `rows` they are 0.
    """
    large, small = max(rows, width), min(rows, width)
    x, weight = law(rows, width)
    edges = np.linspace(0.0, 1.0, small + 1)
    mass = np.concatenate([[0.0], np.cumsum(weight)])
    first = np.concatenate([[0.0], np.cumsum(x * weight)])
    means = np.diff(np.interp(edges * mass[-1], mass, first)) * small * large / rows
    return np.concatenate([means, np.zeros(width - small)])


def gaussian_shares(rows: int, width: int) -> Array:
    """Share of the variance in each direction of a Gaussian table, falling [width]."""
    values = gaussian_spectrum(rows, width)
    return values / values.sum()


def isotropy(table: TokenTable, found: Moments, seed: int = 0) -> Isotropy:
    """Isotropy of the partition function, over at most 20,000 rows drawn by `seed`."""
    ids = sampled(table.rows, MOST_ROWS, seed)
    _, axes = np.linalg.eigh(found.gram)
    scale = math.sqrt(table.width * table.rows / float(np.trace(found.gram)))
    step = max(LEAST_PIECE, CHUNK_VALUES // table.width)
    projected = np.empty((len(ids), table.width), np.float32)
    for start in range(0, len(ids), step):
        projected[start : start + step] = table.take(ids[start : start + step]) @ axes
    chance = _isotropy_chance(table.rows, table.width, len(ids), seed)
    return Isotropy(_ratio(projected, 1.0), _ratio(projected, scale), chance, len(ids))


def _ratio(projected: NDArray[np.float32], scale: float) -> float:
    """min / max over ±c of the sum of exp(scale · c·w), computed by logarithms."""
    logs = []
    for direction in range(projected.shape[1]):
        column = scale * projected[:, direction].astype(np.float64)
        for signed in (column, -column):
            top = float(signed.max())
            logs.append(top + math.log(float(np.exp(signed - top).sum())))
    return math.exp(min(logs) - max(logs))


def _isotropy_chance(rows: int, width: int, summed: int, seed: int) -> float:
    """Mean of the ratio for Gaussian tables: means of exp(±g), g of the law's variances, with their sampling error."""
    variance = gaussian_spectrum(rows, width)
    level, spread = np.exp(variance / 2), np.exp(2 * variance) - np.exp(variance)
    between = 1 - np.exp(variance)  # covariance of exp(g) and exp(−g)
    even, odd = np.sqrt((spread + between) / 2 / summed), np.sqrt((spread - between) / 2 / summed)
    generator = np.random.default_rng([seed, width])
    ratios = []
    for _ in range(DRAWS):
        a, b = generator.standard_normal((2, width))
        both = np.concatenate([level + even * a + odd * b, level + even * a - odd * b])
        ratios.append(max(0.0, float(both.min() / both.max())))
    return float(np.mean(ratios))


@dataclass(frozen=True)
class Plane:
    """Sampled rows less the table's mean, along its two leading directions."""

    shares: tuple[float, float]  # of the variance of all rows along each; exact, from the table's covariance
    points: tuple[tuple[float, float], ...]  # coordinates of the sampled rows [n][2], in the table's units
    variance: float  # Σ‖row − mean‖² / V: what the shares are of


def plane(table: TokenTable, found: Moments, ids: NDArray[np.int64], beside: Plane | None = None) -> Plane:
    """Project the rows `ids` of a table whose `moments` are `found`.

    The direction of an axis has no meaning. It is turned so that it runs along with the same axis of `beside`, else so
    that the sampled points' largest coordinate on it is positive.
    """
    values, axes = found.principal
    if table.width == 1:
        values, axes = np.pad(values, (0, 1)), np.pad(axes, ((0, 0), (0, 1)))
    total = float(values.sum())
    shares = values[:2] / total if total > 0 else np.zeros(2)
    points: Array = (table.take(ids) - found.sum / found.rows) @ axes[:, :2]
    points *= _signs(points, beside)
    coordinates = tuple((float(x), float(y)) for x, y in points)
    return Plane((float(shares[0]), float(shares[1])), coordinates, total / found.rows)


def _signs(points: Array, beside: Plane | None) -> Array:
    if beside is None or not len(points):
        chosen = [column[np.abs(column).argmax()] if len(column) else 1.0 for column in points.T]
    else:
        chosen = list((points * np.array(beside.points)).sum(0))
    return np.where(np.array(chosen) < 0, -1.0, 1.0)
