"""Rows of a table: their norms, their directions, and rows that look untrained.

Norms are compared with the counts of tokens in a text. One pass sums the products that spectra need; pieces are
multiplied in fp64, for large tables in fp32, and added in fp64. A plane shows rows along the two directions of largest
variance.

Rows that were never trained, or look so, are zero, repeated, without a token, never in a text, or near unused ones. The
last indicator is that of Land & Bartolo 2024 (arXiv:2405.05417, "Indicators for detecting under-trained tokens").
Training moves all rows whose token no text can produce in one common way. A row that is as close to their mean as these
rows are was probably not trained either. The indicator names candidates only: the paper then prompts the model with
each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from tiewise.checkpoint.table_scans import scan_rows
from tiewise.core.errors import DataError, non_finite_error
from tiewise.core.estimates import Estimate, Z
from tiewise.core.measurement import Quantity, count, plain
from tiewise.core.progress import advance_progress, progress_of
from tiewise.inspection.tables.align_tables import Score, norm_correlations
from tiewise.inspection.tables.model_tables import Array, Ids, Rows, StoredTable, TokenTable
from tiewise.inspection.tables.path_matrix import sampled
from tiewise.inspection.tables.table_maps import law

LEAST_PIECE = 1024  # rows: smaller pieces spend their time adding E × E matrices
EXACT_UP_TO = 2e11  # V·E² of products in fp64; larger tables use fp32
LEADING = (1, 10, 100)  # numbers of directions whose share of the variance is reported
MOST_ROWS = 20_000  # rows that the partition function is summed over
DRAWS = 40  # Gaussian tables whose mean isotropy is the chance level
FEWEST = 4  # rows that Fisher's interval needs
FEWEST_UNUSED = 5  # unused rows whose spread can be measured
MOST_LISTED = 20  # rows, and groups of rows, that are listed


def norms_by_count(norms: Array, counts: Ids) -> tuple[Score, Score] | None:
    """Correlate norms with log counts of a text's tokens, by value and by rank.

    None for fewer than 4 tokens, or if all have one count.
    """
    seen = counts > 0
    counts_of_seen = counts[seen]
    if len(counts_of_seen) < FEWEST or len(np.unique(counts_of_seen)) < 2:
        return None
    return norm_correlations(norms[seen], np.log(counts_of_seen))


@dataclass(frozen=True)
class Moments:
    """Sums over a table's rows w_i [E]."""

    norms: Array  # ‖w_i‖ [V]
    sum: Array  # Σ w_i [E]
    gram: Array  # Σ w_i w_iᵀ [E, E]
    unit_sum: Array  # Σ w_i/‖w_i‖ over rows that are not zero [E]
    unit_squares: float  # Σ (u_i·s)² with unit rows u_i and their sum s, for the interval of the mean cosine

    @property
    def rows(self) -> int:
        """Return V, the number of rows."""
        return len(self.norms)

    @cached_property
    def principal(self) -> tuple[Array, Array]:
        """Return (eigenvalues of Σ (w_i − mean)(w_i − mean)ᵀ, falling [E]; directions [E, E]).

        The directions are columns.
        """
        values, vectors = np.linalg.eigh(self.gram - np.outer(self.sum, self.sum) / self.rows)
        return np.maximum(values[::-1], 0.0), vectors[:, ::-1]

    @property
    def shares(self) -> Array:
        """Return the share of the variance in each direction, falling [E]."""
        values, _ = self.principal
        return values / (values.sum() or 1.0)


def moments(table: TokenTable) -> Moments:
    """Sum the moments of a table's rows.

    One pass is for the products, a second for the interval of the mean cosine.
    """
    dtype: type[np.floating] = np.float64 if table.rows * table.width**2 <= EXACT_UP_TO else np.float32
    norms, total, units = np.empty(table.rows), np.zeros(table.width), np.zeros(table.width)
    gram = np.zeros((table.width, table.width))
    for start, stop in table.spans(least=LEAST_PIECE):
        rows = table.read(start, stop)
        norms[start:stop] = np.linalg.norm(rows, axis=1)
        total += rows.sum(0)
        units += _unit(rows, norms[start:stop]).sum(0)
        narrow: Rows = rows.astype(dtype, copy=False)
        gram += narrow.T @ narrow
        advance_progress(stop)
    if not np.isfinite(gram).all():
        raise non_finite_error("a table")
    filled = np.count_nonzero(norms)
    if filled < 3:
        raise DataError(f"a table of {filled} rows that are not zero", "give one with three or more")
    squares = 0.0
    for start, stop in table.spans(least=LEAST_PIECE):
        along = _unit(table.read(start, stop), norms[start:stop]) @ units
        squares += float(along @ along)
    return Moments(norms, total, gram, units, squares)


def _unit(rows: Array, norms: Array) -> Array:
    """Divide rows [n, E] by their norms [n]; rows of zeros stay."""
    return rows / np.where(norms > 0, norms, 1.0)[:, None]


def directions(name: str, table: TokenTable, sums: Moments, seed: int, main: bool) -> Iterator[Quantity]:
    """Yield measures of the anisotropy of a table's rows.

    `seed` draws the rows of the partition function and its chance level.
    """
    cosine = mean_cosine(sums)
    deviation = math.sqrt(2 / (cosine.rows * (cosine.rows - 1) * table.width))
    why = f"0 ± {plain(1.96 * deviation, 4)} for random directions"
    yield Quantity.of_estimate(f"mean cosine, {name}", cosine, chance=0.0, unit="cosine", main=main, why=why)
    measures = (*_variance_measures(sums, table.width), *_isotropy_measures(table, sums, seed), *_axis_measures(sums))
    for measure in measures:
        yield replace(measure, name=f"{measure.name}, {name}", main=False)


def _variance_measures(sums: Moments, width: int) -> Iterator[Quantity]:
    """Yield the mean row's energy, leading variances, and the directions that rows fill."""
    rows, shares = sums.rows, sums.shares
    energy = float(np.trace(sums.gram))
    yield Quantity("mean row's energy", float(sums.sum @ sums.sum) / rows / energy, chance=1 / rows, unit="%")
    expected = gaussian_shares(rows, width)
    for k in LEADING:
        if k < width:
            directions = "1 direction" if k == 1 else f"{k} directions"
            value, chance = float(shares[:k].sum()), float(expected[:k].sum())
            yield Quantity(f"variance in {directions}", value, chance=chance, unit="%", why="chance: Gaussian table")
    filled = 0.0
    if shares.any():
        filled = 1 / float(np.square(shares).sum())
    filled_by_chance = (rows - 1) * width / (rows + width)
    yield Quantity("directions filled", filled, chance=filled_by_chance, unit="directions", why="1 / Σ share²")


def _isotropy_measures(table: TokenTable, sums: Moments, seed: int) -> Iterator[Quantity]:
    """Yield the isotropy of the partition function, of scaled rows and of rows as stored."""
    stored, scaled, chance, summed = isotropy(table, sums, seed)
    why = f"min Z / max Z over {count(summed)} rows: 1 where no direction is special"
    yield Quantity("isotropy", scaled, chance=chance, unit="min/max", why=why)
    yield Quantity("isotropy as stored", stored, unit="min/max")


def _axis_measures(sums: Moments) -> Iterator[Quantity]:
    """Yield the variance of a row, and its shares along the two axes of a plane."""
    variances, _ = sums.principal
    yield Quantity("variance of a row", float(variances.sum() / sums.rows), unit="squared norm")
    first, second = np.append(sums.shares, 0.0)[:2]  # a table of width 1 has no second axis
    yield Quantity("variance along the first axis", float(first), unit="%")
    yield Quantity("variance along the second axis", float(second), unit="%")


def mean_cosine(sums: Moments) -> Estimate:
    """Return the mean cosine of all pairs of different rows, with its interval.

    It is (‖s‖² − n) / (n(n−1)) with s the sum of the n unit rows, a U-statistic: its variance is 4/n times that of a
    row's
    mean cosine with the others (Hoeffding 1948).
    """
    n = int(np.count_nonzero(sums.norms))
    square = float(sums.unit_sum @ sums.unit_sum)
    value = (square - n) / (n * (n - 1))
    variance = max(0.0, sums.unit_squares / n - (square / n) ** 2) / (n - 1) ** 2
    half = Z * math.sqrt(4 * variance / n)
    return Estimate(value, value - half, value + half, n)


def gaussian_spectrum(rows: int, width: int) -> Array:
    """Return the expected variances of a Gaussian table [rows, width], falling [width].

    Its values have unit variance. Each result is the mean of the Marchenko-Pastur law over its share of the law's
    weight;
    beyond `rows` they are 0.
    """
    large, small = max(rows, width), min(rows, width)
    x, weight = law(rows, width)
    edges = np.linspace(0.0, 1.0, small + 1)
    mass = np.concatenate([[0.0], np.cumsum(weight)])
    first = np.concatenate([[0.0], np.cumsum(x * weight)])
    means = np.diff(np.interp(edges * mass[-1], mass, first)) * small * large / rows
    return np.concatenate([means, np.zeros(width - small)])


def gaussian_shares(rows: int, width: int) -> Array:
    """Return the share of the variance in each direction of a Gaussian table, falling [width]."""
    values = gaussian_spectrum(rows, width)
    shares: Array = values / values.sum()
    return shares


def isotropy(table: TokenTable, sums: Moments, seed: int = 0) -> tuple[float, float, float, int]:
    """Return the isotropy of the partition function, over at most 20,000 rows drawn by `seed`.

    It is min Z(c) / max Z(c) with Z(c) = Σ_i exp(c·w_i) over unit vectors c: 1 if no direction is special. Mu &
    Viswanath
    2018 (arXiv:1702.01417) search the eigenvectors of WᵀW; here both signs of each are searched.

    Returns:
        The isotropy of rows as stored, which approaches 1 for short rows, whatever their directions; that of rows
        divided by the root mean square of the table's values, so that tables can be compared; the latter for a Gaussian
        table of this shape; and the number of rows that Z was summed over.
    """
    ids = sampled(table.rows, MOST_ROWS, seed)
    _, axes = np.linalg.eigh(sums.gram)
    projected = np.empty((len(ids), table.width), np.float32)
    for start, stop in table.spans(len(ids), least=LEAST_PIECE):
        projected[start:stop] = table.take(ids[start:stop]) @ axes
    scale = math.sqrt(table.width * table.rows / float(np.trace(sums.gram)))
    chance = _gaussian_isotropy(table.rows, table.width, len(ids), seed)
    return _partition_ratio(projected, 1.0), _partition_ratio(projected, scale), chance, len(ids)


def _partition_ratio(projected: Rows, scale: float) -> float:
    """Return min Z / max Z over both signs of each axis.

    `projected` are rows [n, E] along the axes; `scale` multiplies them.
    """
    logs = []
    for direction in range(projected.shape[1]):
        column = scale * projected[:, direction].astype(np.float64)
        logs += [_log_sum(column), _log_sum(-column)]
    return math.exp(min(logs) - max(logs))


def _log_sum(exponents: Array) -> float:
    """Return log Σ exp of numbers [n]."""
    largest = exponents.max()
    total: float = largest + math.log(np.exp(exponents - largest).sum())
    return total


def _gaussian_isotropy(rows: int, width: int, summed: int, seed: int) -> float:
    """Return the mean isotropy of Gaussian tables of unit variance.

    Z is drawn as the mean of exp(±g), g of the law's variances, with its sampling error over `summed` rows.
    """
    variance = gaussian_spectrum(rows, width)
    level, spread = np.exp(variance / 2), np.exp(2 * variance) - np.exp(variance)
    between = 1 - np.exp(variance)  # covariance of exp(g) and exp(−g)
    symmetric = np.sqrt((spread + between) / 2 / summed)
    antisymmetric = np.sqrt((spread - between) / 2 / summed)
    generator = np.random.default_rng([seed, width])
    a, b = generator.standard_normal((DRAWS, 2, width)).swapaxes(0, 1)
    both = np.concatenate(
        [level + symmetric * a + antisymmetric * b, level + symmetric * a - antisymmetric * b], axis=1
    )
    return float(np.maximum(0.0, both.min(1) / both.max(1)).mean())


def plane(table: TokenTable, sums: Moments, ids: Ids, reference: Array | None = None) -> Array:
    """Return centred rows `ids` along the table's two leading directions [n, 2].

    They are in the table's units. The sign of an axis has no meaning: it is chosen so that the points correlate with
    those
    of `reference`, else so that the sampled points' largest coordinate on it is positive.
    """
    _, directions = sums.principal
    lacking = max(0, 2 - table.width)
    axes = np.pad(directions, ((0, 0), (0, lacking)))[:, :2]
    points: Array = (table.take(ids) - sums.sum / sums.rows) @ axes
    if not len(points):
        return points
    if reference is None:
        along = points[np.abs(points).argmax(0), (0, 1)]
    else:
        along = (points * reference).sum(0)
    points *= np.where(along < 0, -1.0, 1.0)
    return points


def near_unused(table: TokenTable, unused: Ids) -> tuple[float, Ids, Array]:
    """Compare every row with the mean of the unused ones, in two passes.

    Returns:
        The Euclidean distance within which 95 % of the unused rows are from the mean of the other ones; the rows in use
        within that distance of the mean, nearest first; and the cosine of each with the mean, both after subtraction of
        the table's mean row.
    """
    marked = np.zeros(table.rows, bool)
    marked[unused] = True
    total, centre = np.zeros(table.width), np.zeros(table.width)
    for start, stop in table.spans():
        rows = table.read(start, stop)
        total += rows.sum(0)
        centre += rows[marked[start:stop]].sum(0)
    centre, mean = centre / len(unused), total / table.rows
    distance, cosine, direction = np.empty(table.rows), np.empty(table.rows), centre - mean
    for start, stop in table.spans():
        rows = table.read(start, stop)
        distance[start:stop] = np.linalg.norm(rows - centre, axis=1)
        scale = np.linalg.norm(rows - mean, axis=1) * np.linalg.norm(direction)
        cosine[start:stop] = (rows - mean) @ direction / np.where(scale > 0, scale, 1.0)
    to_others = distance[marked] * len(unused) / (len(unused) - 1)  # distances to the mean of the other ones
    reach = float(np.quantile(to_others, 0.95))
    near = np.flatnonzero(~marked & (distance <= reach))
    near = near[np.argsort(distance[near], kind="stable")]
    return reach, near, cosine[near]


def untrained_rows(
    name: str, table: StoredTable, unused: Ids | None, counts: Ids | None
) -> tuple[list[Quantity], list[tuple[str, str, str]]]:
    """Return (numbers of rows of a stored table that look untrained, lists of them).

    A list is (table, kind, rows). `unused` are the rows that no text can produce, ascending; `counts` are a text's [V].
    Either is None if it cannot be determined.
    """
    with progress_of(f"rows of {table.name}", table.tensor.nbytes):
        scan = scan_rows(table.tensor)
    groups = sorted(scan.repeated, key=len, reverse=True)
    repeated = sum(len(group) for group in groups)
    quantities = [
        Quantity(f"rows of zeros, {name}", len(scan.zero), main=False),
        Quantity(f"rows equal to another, {name}", repeated, main=False, why=f"in {len(groups)} groups"),
    ]
    listed = []
    if scan.zero:
        listed.append((name, "zero", _row_numbers(scan.zero)))
    for group in groups[:MOST_LISTED]:
        listed.append((name, "equal", _row_numbers(group)))
    if counts is not None:
        unseen = int((counts == 0).sum())
        quantities.append(Quantity(f"rows whose token the text lacks, {name}", unseen, main=False))
    if unused is not None and len(unused) >= FEWEST_UNUSED:
        reach, near, cosines = near_unused(table, unused)
        why = f"within {plain(reach, 3)} of the mean of {count(len(unused))} unused ones: maybe untrained"
        share = len(near) / max(1, table.rows - len(unused))
        quantities += [
            Quantity(f"rows in use near unused ones, {name}", len(near), main=False, why=why),
            Quantity(f"their share of rows in use, {name}", share, unit="%", main=False),
        ]
        nearest = zip(near[:MOST_LISTED], cosines[:MOST_LISTED], strict=True)
        rows = ", ".join(f"#{row} (cosine {plain(cosine, 3)})" for row, cosine in nearest)
        if rows:
            listed.append((name, "near unused ones", rows))
    return quantities, listed


def _row_numbers(rows: Sequence[int]) -> str:
    """Return the first numbers of some rows as text."""
    return ", ".join(f"#{row}" for row in rows[:MOST_LISTED])
