"""Alignment of any two tables; each measure has its interval and its chance level.

    with map       identity, orthogonal, linear, reduced rank: mean cosine of mapped rows with their partners, on rows
                   that the map was fitted on and on held-out rows; compared with the analytic chance level and with a
                   null of permuted rows to which the maps are fitted again
    without map    nearest neighbours, CKA, norms, shared subspaces, spectra

Memory holds a few d×d matrices and a piece of the rows, or the sampled rows of one table.

`nearer_end` compares one table with the input and the output table of another model, over the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from tiewise.core.errors import DataError
from tiewise.core.estimates import Estimate, correlation_interval, mean_interval, mean_ranks, paired_bootstrap
from tiewise.core.measurement import NEITHER, ONE, TWO, Quantity, plain
from tiewise.core.progress import report_progress
from tiewise.inspection.tables.model_tables import AnyTable, Ids, Pairs, Rows, TokenTable, as_table
from tiewise.inspection.tables.table_maps import (
    CENTRED,
    CURVE,
    IDENTITY,
    LINE,
    LINEAR,
    ORTHOGONAL,
    RAW,
    AlignSettings,
    Fitter,
    Key,
    Matrix,
    Products,
    directions,
    fitted_chance,
)

NEIGHBOURS, CKA, CKA_LINE, CKA_CURVE = "neighbours", "CKA", "CKA, frequency out (line)", "CKA, frequency out"
NORMS, NORMS_BY_RANK = "norms", "norms, by rank"
FITTED, HELDOUT = "fitted", "held out"
UNDETERMINED = "not known"
SPELLED = {
    IDENTITY: "as they stand",
    ORTHOGONAL: "after the best rotation",
    LINEAR: "after the best linear map",
    NEIGHBOURS: "by nearest neighbours in common",
    CKA: "by CKA above chance",
    CKA_CURVE: "by CKA above chance, frequency taken out",
    CKA_LINE: "by CKA above chance, a line in log frequency taken out",
}
BLOCK = 2048  # rows of one tile of similarities: two tiles and their sorting stay within 100 MB
_NOTHING_LEFT = 1e-12  # share of a table below which the rest is rounding


def spelled(measure: str) -> str:
    """Return a measure in words: "after the best rotation"."""
    return SPELLED.get(measure, f"after the best map of {measure}")


@dataclass(frozen=True)
class Score:
    """One measure of the similarity of two tables."""

    measure: str  # name of a map (mean cosine of mapped rows with their partners), or of a measure without a map
    estimate: Estimate  # over scored rows; a map's interval is over rows, for the map as it was fitted
    chance: float  # mean for unrelated tables: independent Gaussian ones for a map, all permutations for CKA
    deviation: float = math.nan  # of the chance level over draws of as many rows; NaN if not derived
    null: tuple[float, ...] = ()  # score of each permutation: rows of B permuted and maps fitted again
    rows: str = ""  # of a map: the rows that are scored, `fitted` or `held out`
    view: str = CENTRED  # `centred` (rows less the mean of the fitting rows) or `raw`

    @property
    def p(self) -> float:
        """Return (1 + permutations that reach the score) / (1 + permutations).

        Small values need many permutations.
        """
        reached = [value for value in self.null if value >= self.estimate.value]
        return (1 + len(reached)) / (1 + len(self.null))

    @property
    def by_chance(self) -> str:
        """Return the chance level's 95 % range in words."""
        return f"± {plain(1.96 * self.deviation, 3)}"


@dataclass(frozen=True)
class Alignment:
    """Measures of the similarity of two tables."""

    pairs: int  # number of tokens in both tables; `matched` is the method of matching
    matched: str
    fitted_rows: int  # pairs that maps were fitted on
    zero_rows: int  # pairs whose row is zero in either table; their cosine counts as 0
    precision: str  # fp32 or fp64, the type of row products; sums are in fp64
    error: float  # relative error of a product of 1024 rows against fp64, measured; 0 in fp64
    scores: tuple[Score, ...]  # maps by rows, map and view; neighbours, CKA, norms
    neighbour_count: int  # neighbours of each row that were compared
    taken_out: dict[str, tuple[float, float]]  # measure of CKA without frequency → removed shares of A and B
    left_out: tuple[str, ...]  # reasons why maps do not apply
    spectra: tuple[Spectrum, Spectrum]  # of both tables, over all pairs
    subspaces: tuple[Subspace, ...]  # leading subspaces of both tables, over all pairs

    def score(self, measure: str, rows: str = HELDOUT, view: str = CENTRED) -> Score:
        """Return one score; `rows` and `view` are a map's.

        Raises:
            KeyError: there is no such score.
        """
        scores = {(score.measure, score.rows or rows, score.view): score for score in self.scores}
        return scores[measure, rows, view]

    def quantities(self, of: str = "", decides: bool = False) -> Iterator[Quantity]:
        """Yield every measure as a section reports it, maps on unseen rows first.

        `of` names the model of the two tables, if it is not the section's. `decides` is True if they could be one
        table.
        """
        title = f"The two tables of {of}" if of else "Input against output"
        unseen = HELDOUT if self.fitted_rows < self.pairs else FITTED
        for score in sorted(self.scores, key=lambda score: not _is_main_map(score, unseen)):
            if score.rows:
                wording, below, above = _map_wording(score, unseen, decides), TWO, ONE
            else:
                wording, below, above = _measure_wording(score, self.neighbour_count), NEITHER, NEITHER
            yield Quantity.of_estimate(
                wording.name, score.estimate, chance=score.chance, null=score.null, unit=wording.unit, of=of,
                main=wording.is_main and not of, figure=title if wording.is_main else "", why=wording.why,
                question=wording.question, below=below, above=above,
            )  # fmt: skip
        yield from self._further(of)

    def _further(self, of: str) -> Iterator[Quantity]:
        """Yield subspaces, spectra, and the numbers of rows."""
        for space in self.subspaces:
            name, unit = f"{space.dimension} leading directions over {space.over}", "mean squared cosine"
            yield Quantity(name, space.value, chance=space.chance, unit=unit, of=of, main=False)
        for end, spectrum in zip(("first", "second"), self.spectra, strict=True):
            name, unit = f"directions that the {end} table fills", "(Σs²)²/Σs⁴"
            yield Quantity(name, spectrum.participation, unit=unit, of=of, main=False)
            yield Quantity(f"mean row's energy, {end} table", spectrum.mean_share, unit="%", of=of, main=False)
        yield Quantity("tokens compared", self.pairs, of=of, main=False, why=self.matched)
        yield Quantity("tokens that maps were fitted on", self.fitted_rows, of=of, main=False)
        why = "their cosine counts as 0"
        yield Quantity("tokens with a row of zeros", self.zero_rows, of=of, main=False, why=why)
        error, why = self.error, f"{self.precision} products, compared with fp64"
        if not error:
            error, why = float(np.finfo(np.float64).eps), f"{self.precision} products: the rounding of one number"
        yield Quantity("relative error of a product", error, unit="relative", of=of, main=False, why=why)


class _Wording(NamedTuple):
    """Words of one score in a section."""

    name: str
    unit: str
    why: str
    question: str
    is_main: bool  # True if it is in the table that a reader sees first


def _is_main_map(score: Score, unseen: str) -> bool:
    """Return True for a map's score on centred rows that the map was not fitted on."""
    return (score.rows, score.view) == (unseen, CENTRED)


def _map_wording(score: Score, unseen: str, decides: bool) -> _Wording:
    """Return the words of a map's score.

    `decides` is True if the two tables could be one.
    """
    is_main = _is_main_map(score, unseen)
    relation, on_rows = "has not seen", "held out"
    if score.rows == FITTED:
        relation, on_rows = "was fitted on", "it was fitted on"
    chance = f"{plain(score.chance, 3)} {score.by_chance}"
    question, why = "", f"tokens that the map {relation}; by chance {chance}"
    if decides and is_main and (score.measure, score.rows) == (IDENTITY, HELDOUT):
        question = "Are input and output table alike?"
        why = "above chance both stored tables point the same way row by row, whether trained or started so"
    name = spelled(score.measure)
    if score.view == RAW:
        name += ", not centred"
    if not is_main:
        name += f", on rows {on_rows}"
    return _Wording(name, "cosine", why, question, is_main)


def _measure_wording(score: Score, neighbour_count: int) -> _Wording:
    """Return the words of a score that needs no map, with the number of neighbours."""
    if score.measure == NEIGHBOURS:
        return _Wording(f"nearest {neighbour_count} in common", "%", "tokens that are nearest in both tables", "", True)
    if score.measure in (NORMS, NORMS_BY_RANK):
        why = f"0 {score.by_chance} by chance"
        return _Wording(score.measure, "correlation", why, "", score.measure != NORMS)
    return _Wording(score.measure, "CKA", "", "", True)


def align(
    a: AnyTable, b: AnyTable, pairs: Pairs, settings: AlignSettings | None = None, counts: ArrayLike | None = None
) -> Alignment:
    """Align table A [V, d1] with table B [V', d2] over their paired rows.

    Maps go from A to B. `counts` [pairs] are frequencies of the pairs' tokens; with them, CKA is also reported without
    frequency.

    Raises:
        CheckpointError: fewer than 16 pairs, no map that applies, rows that are not finite, or no tables of floats.
        DataError: `counts` has another length, or values that are no counts.
    """
    settings = settings or AlignSettings()
    if counts is not None and np.shape(counts) != (len(pairs),):
        shape = list(np.shape(counts))
        raise DataError(f"counts of shape {shape} for {len(pairs):,} pairs", "give one count for each pair")
    frequency = None
    if counts is not None:
        frequency = directions(counts)
    fitter = Fitter(as_table(a), as_table(b), pairs, settings, frequency)
    scores = _map_scores(fitter, settings)
    indices, neighbour_count = settings.sample(len(pairs))
    if neighbour_count:
        scores.append(_neighbour_score(fitter, settings, indices, neighbour_count))
    # maps are fitted: from here on the sums are over all pairs
    products, heldout_norms, _ = fitter.sums(fitter.heldout, onto=fitter.products)
    cka_scores, taken_out = _cka_scores(products)
    norms_a = np.concatenate([fitter.norms[0], heldout_norms[0]])
    norms_b = np.concatenate([fitter.norms[1], heldout_norms[1]])
    by_value, by_rank = norm_correlations(norms_a, norms_b)
    both_spectra, subspaces = spectra(products, settings.subspaces)
    is_zero = (norms_a == 0) | (norms_b == 0)
    return Alignment(
        pairs=len(pairs),
        matched=pairs.how,
        fitted_rows=len(fitter.rows),
        zero_rows=int(is_zero.sum()),
        precision="fp64" if fitter.dtype == np.float64 else "fp32",
        error=fitter.error,
        scores=(*scores, *cka_scores, by_rank, by_value),
        neighbour_count=neighbour_count,
        taken_out=taken_out,
        left_out=fitter.left_out,
        spectra=both_spectra,
        subspaces=subspaces,
    )


def _map_scores(fitter: Fitter, settings: AlignSettings) -> list[Score]:
    """Score every map on fitting rows and on held-out ones, and refit it to permuted rows."""
    fit, heldout = fitter.rows, fitter.heldout
    generator = np.random.default_rng([settings.seed, 1])
    most = settings.scored if len(heldout) else len(fit)
    sample = np.sort(generator.choice(len(fit), min(most, len(fit)), replace=False))
    scored = {FITTED: _ScoredRows(FITTED, fit[sample])}
    if len(heldout):
        scored[HELDOUT] = _ScoredRows(HELDOUT, heldout)
    maps = fitter.fit()
    for rows in scored.values():
        rows.cosines = fitter.cosines(maps, rows.indices, rows.indices)
    for _ in range(settings.permutations):
        order = generator.permutation(fit)
        partners = {FITTED: order[sample], HELDOUT: generator.permutation(heldout)}
        refitted = fitter.fit(order)
        for part, rows in scored.items():
            rows.permuted.append(fitter.cosines(refitted, rows.indices, partners[part]))
    scores: list[Score] = []
    for rows in scored.values():
        scores += rows.scores(len(fit), fitter.widths)
    return scores


@dataclass
class _ScoredRows:
    """Pairs that maps are scored on, and their cosines by every map."""

    part: str  # FITTED or HELDOUT
    indices: Ids  # the pairs [n]
    cosines: dict[Key, Matrix] = field(default_factory=dict)  # map → cosines [n]
    permuted: list[dict[Key, Matrix]] = field(default_factory=list)  # the same for each permutation

    def scores(self, fitted: int, widths: tuple[int, int]) -> Iterator[Score]:
        """Yield the score of every map.

        The maps were fitted on `fitted` pairs of rows of these widths.
        """
        for (name, view), values in self.cosines.items():
            chance = 0.0
            if self.part == FITTED:
                chance = fitted_chance(name, fitted, *widths)
            yield Score(
                measure=name,
                estimate=mean_interval(values),
                chance=chance,
                deviation=1 / math.sqrt(len(values) * widths[1]),
                null=tuple(float(cosines[name, view].mean()) for cosines in self.permuted),
                rows=self.part,
                view=view,
            )


def _neighbour_score(fitter: Fitter, settings: AlignSettings, indices: Ids, neighbour_count: int) -> Score:
    """Return the share of each row's nearest neighbours that both tables have in common.

    Neighbours are searched within the pairs `indices`.
    """
    ids_a = nearest(fitter.a, fitter.pairs.a[indices], neighbour_count, fitter.dtype)
    ids_b = nearest(fitter.b, fitter.pairs.b[indices], neighbour_count, fitter.dtype)
    generator = np.random.default_rng(settings.seed)
    null = []
    for _ in range(max(1, settings.permutations)):
        order = generator.permutation(len(indices))
        permuted = np.argsort(order)[ids_b[order]]
        null.append(float(shared(ids_a, permuted).mean()))
    # rows share neighbours, so the interval is slightly too narrow
    estimate = mean_interval(shared(ids_a, ids_b))
    return Score(NEIGHBOURS, estimate, _neighbour_chance(neighbour_count, len(indices)), null=tuple(null))


def _neighbour_chance(neighbour_count: int, rows: int) -> float:
    """Return the expected share of common neighbours of unrelated tables with `rows` rows."""
    return neighbour_count / (rows - 1)


def _cka_scores(products: Products) -> tuple[list[Score], dict[str, tuple[float, float]]]:
    """Return CKA with frequency and without it.

    The second result has, by measure, the shares of A and B that were removed with the frequency.
    """
    centred = products.without()
    highest = products.along_a.shape[1]
    scores: list[Score] = []
    taken_out: dict[str, tuple[float, float]] = {}
    for powers in sorted({0, min(LINE, highest), min(CURVE, highest)}):
        score, shares = _cka_score(products, centred, powers)
        scores.append(score)
        if powers:
            taken_out[score.measure] = shares
    return scores, taken_out


def _cka_score(products: Products, centred: Products, powers: int) -> tuple[Score, tuple[float, float]]:
    """Return CKA without the first `powers` powers of log frequency, and the removed shares.

    The shares are those of A and B.
    """
    rest = products.without(powers)
    shares = _share_taken(rest.gram_a, centred.gram_a), _share_taken(rest.gram_b, centred.gram_b)
    value, chance = cka(rest, powers)
    if powers and max(shares) > 1 - _NOTHING_LEFT:
        value, chance = 0.0, 0.0
    measure = CKA
    if powers:
        measure = CKA_CURVE if powers > LINE else CKA_LINE
    return Score(measure, Estimate(value, math.nan, math.nan, products.rows), chance), shares


def _share_taken(rest: Matrix, gram: Matrix) -> float:
    """Return the share of a table's variance that was removed from it."""
    total = np.trace(gram)
    if not total:
        return 0.0
    return 1 - float(np.trace(rest) / total)


def nearest(table: TokenTable, indices: Ids, neighbour_count: int, dtype: type[np.floating]) -> Ids:
    """Return indices [n, neighbour_count], within `indices` [n > neighbour_count], of each row's nearest neighbours.

    Similarity is the cosine of centred rows. The indices have no order, and equal cosines are chosen arbitrarily. Rows
    of
    zeros have cosine 0 with all. Each pair of blocks is read once.
    """
    rows = table.take(indices, dtype)
    rows -= rows.mean(axis=0, dtype=np.float64).astype(dtype)
    n = len(rows)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(norms > 0, norms, 1)
    best = _Nearest(n, neighbour_count, unit.dtype)
    starts = range(0, n, BLOCK)
    done, total = 0, len(starts) * (len(starts) + 1) // 2
    for i in starts:
        for j in range(i, n, BLOCK):
            tile = unit[i : i + BLOCK] @ unit[j : j + BLOCK].T
            if i == j:
                np.fill_diagonal(tile, -np.inf)
            else:
                best.merge(j, tile.T, i)
            best.merge(i, tile, j)
            done += 1
            report_progress("neighbours", done, total)
    return best.ids


class _Nearest:
    """Each row's nearest neighbours among the tiles of similarities so far."""

    def __init__(self, rows: int, neighbour_count: int, dtype: np.dtype[np.floating]) -> None:
        """Start without neighbours."""
        self.similarity: Rows = np.full((rows, neighbour_count), -np.inf, dtype)
        self.ids = np.zeros((rows, neighbour_count), np.int64)

    def merge(self, start: int, tile: Rows, first: int) -> None:
        """Merge a tile of similarities: rows from `start` on, columns are rows from `first` on."""
        neighbour_count, rows = self.ids.shape[1], slice(start, start + len(tile))
        if self.similarity[start, 0] == -np.inf:  # the first tile of these rows
            tile = np.ascontiguousarray(tile)
            columns = np.argpartition(tile, -min(neighbour_count, tile.shape[1]), axis=1)[:, -neighbour_count:]
            values = np.take_along_axis(tile, columns, axis=1)
        else:
            values, columns = _above(tile, self.similarity[rows].min(axis=1))
        # current neighbours come first, in their columns
        values = np.concatenate([self.similarity[rows], values], axis=1)
        columns = np.concatenate([self.ids[rows], columns + first], axis=1)
        top = np.argpartition(values, -neighbour_count, axis=1)[:, -neighbour_count:]
        self.similarity[rows] = np.take_along_axis(values, top, axis=1)
        self.ids[rows] = np.take_along_axis(columns, top, axis=1)


def _above(tile: Rows, least: Rows) -> tuple[Rows, Ids]:
    """Return (values, columns) of each row of a tile above `least` [n], padded with -inf.

    Few are left once some tiles are merged.
    """
    row_index, column = np.nonzero(np.ascontiguousarray(tile > least[:, None]))
    counts = np.bincount(row_index, minlength=len(tile))
    column_index = np.arange(len(row_index)) - np.repeat(np.cumsum(counts) - counts, counts)  # within the row
    values: Rows = np.full((len(tile), int(counts.max(initial=0))), -np.inf, tile.dtype)
    columns = np.zeros(values.shape, np.int64)
    values[row_index, column_index], columns[row_index, column_index] = tile[row_index, column], column
    return values, columns


def shared(ids_a: Ids, ids_b: Ids) -> Matrix:
    """Return the share [n] of each row's neighbours [n, neighbour_count] that are in both."""
    common = (ids_a[:, :, None] == ids_b[:, None, :]).sum(axis=(1, 2))
    shares: Matrix = common / ids_a.shape[1]
    return shares


def cka(centred: Products, taken_out: int = 0) -> tuple[float, float]:
    """Return (linear CKA of centred rows, its mean over all permutations).

    CKA is ‖AᵀB‖² / (‖AᵀA‖·‖BᵀB‖) (Kornblith et al. 2019). Its mean is tr K_A · tr K_B / ((n−1)·‖K_A‖·‖K_B‖) exactly,
    with
    K = A Aᵀ, whose trace and norm are those of AᵀA; for Gaussian tables about d / (n + d). If `taken_out` directions
    were
    removed from the columns, the mean has n − 1 − taken_out instead of n − 1.
    """
    scale = float(np.linalg.norm(centred.gram_a) * np.linalg.norm(centred.gram_b))
    if not scale:
        return 0.0, 0.0
    traces = float(np.trace(centred.gram_a) * np.trace(centred.gram_b))
    by_chance = traces / (scale * (centred.rows - taken_out - 1))
    return float(np.square(centred.cross).sum()) / scale, by_chance


@dataclass(frozen=True)
class Spectrum:
    """Singular values of a table's centred paired rows, falling."""

    values: tuple[float, ...]  # s_1 ≥ s_2 ≥ …, from the Gram matrix: accurate to about √ε·s_1 in absolute terms
    participation: float  # (Σ s²)² / Σ s⁴, the number of directions that the table fills evenly
    mean_share: float  # share of Σ‖row‖² in the mean row: 0 centred, 1 all rows alike


@dataclass(frozen=True)
class Subspace:
    """Agreement of two leading subspaces of equal dimension.

    It is the mean squared cosine of their principal angles.
    """

    over: str  # `tokens` ([n, dimension]; any widths) or `coordinates` (of d; one width only)
    dimension: int  # number of directions of each subspace
    value: float  # Σ cos² / dimension, from 0 to 1
    chance: float  # its mean for two random subspaces, dimension/(n−1) over tokens and dimension/d over coordinates
    cosines: tuple[float, ...]  # of the principal angles, falling


def spectra(products: Products, counts: tuple[int, ...]) -> tuple[tuple[Spectrum, Spectrum], tuple[Subspace, ...]]:
    """Return (spectra of both tables, their leading subspaces of `counts` directions).

    Both are of centred rows.
    """
    mean_a, mean_b = products.means
    centred = products.without()
    a = _Principal.of(centred.gram_a)
    b = _Principal.of(centred.gram_b)
    both_spectra = (
        a.spectrum(_mean_share(products.gram_a, mean_a, products.rows)),
        b.spectrum(_mean_share(products.gram_b, mean_b, products.rows)),
    )
    # With A = U_a S_a V_aᵀ and B alike: V_aᵀ AᵀB V_b = S_a (U_aᵀ U_b) S_b, so `between` / `scales` is U_aᵀ U_b, the
    # product of both bases over tokens. `values` are the squares of S.
    between = a.axes.T @ centred.cross @ b.axes
    rank = min(a.rank, b.rank)
    spaces = []
    for dimension in sorted({min(dimension, rank) for dimension in counts}):
        if dimension <= 0:
            continue
        scales = np.sqrt(np.outer(a.values[:dimension], b.values[:dimension]))
        spaces.append(
            _subspace("tokens", dimension, between[:dimension, :dimension] / scales, dimension / (products.rows - 1))
        )
        if a.axes.shape == b.axes.shape:  # coordinates of tables of two widths are no common space
            over_coordinates = a.axes[:, :dimension].T @ b.axes[:, :dimension]
            spaces.append(_subspace("coordinates", dimension, over_coordinates, dimension / len(a.axes)))
    return both_spectra, tuple(spaces)


@dataclass(frozen=True)
class _Principal:
    """Eigenvalues of a Gram matrix of centred rows, and their directions."""

    values: Matrix  # falling [d]
    axes: Matrix  # one direction in each column [d, d]

    @classmethod
    def of(cls, gram: Matrix) -> _Principal:
        """Decompose a Gram matrix."""
        rising, vectors = np.linalg.eigh(gram)
        return cls(np.maximum(rising[::-1], 0), vectors[:, ::-1])

    @property
    def rank(self) -> int:
        """Return the number of eigenvalues above rounding."""
        values = self.values
        rounding = len(values) * np.finfo(np.float64).eps * values[0]
        return int((values > rounding).sum())

    def spectrum(self, mean_share: float) -> Spectrum:
        """Return the singular values and the number of directions that they fill.

        `mean_share` is the mean row's share of the energy.
        """
        values, participation = self.values, 0.0
        if values.any():
            participation = float(values.sum() ** 2 / (values @ values))
        singular = tuple(np.sqrt(values).tolist())
        return Spectrum(singular, participation, mean_share)


def _mean_share(gram: Matrix, mean: Matrix, rows: int) -> float:
    """Return the mean row's share of Σ‖row‖²; `gram` is of uncentred rows."""
    if not gram.any():
        return 0.0
    return rows * float(mean @ mean / np.trace(gram))


def _subspace(over: str, dimension: int, product: Matrix, chance: float) -> Subspace:
    """Return the agreement of two subspaces from the product of their orthonormal bases."""
    cosines = np.minimum(np.linalg.svd(product, compute_uv=False), 1.0)
    mean_square = float(cosines @ cosines) / dimension
    return Subspace(over, dimension, mean_square, min(1.0, chance), tuple(cosines.tolist()))


def norm_correlations(norms_a: Matrix, norms_b: Matrix) -> tuple[Score, Score]:
    """Correlate the norms of paired rows by value (Pearson) and by rank (Spearman).

    Ties have their mean rank.
    """
    by_value = _correlation(NORMS, norms_a, norms_b)
    return by_value, _correlation(NORMS_BY_RANK, mean_ranks(norms_a), mean_ranks(norms_b))


def _correlation(measure: str, first: Matrix, second: Matrix) -> Score:
    """Correlate two vectors [n] (Pearson); 0 where one is constant."""
    n = len(first)
    x, y = first - first.mean(), second - second.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    value = 0.0
    if scale:
        value = float(x @ y) / scale
    estimate = correlation_interval(value, n)
    return Score(measure, estimate, chance=0.0, deviation=(n - 1) ** -0.5)


@dataclass(frozen=True)
class Lean:
    """One measure of a table against the input and the output table of another model."""

    measure: str  # as of `Score`
    input: Estimate  # score against the input table
    output: Estimate  # against the output table, on the same rows
    difference: Estimate  # output − input, paired
    chance: float = 0.0  # of either score
    view: str = CENTRED  # `centred` or `raw`


def toward(difference: Estimate) -> str:
    """Return the side that the interval of output − input excludes zero for.

    It is "input", "output", NEITHER, or NOT_KNOWN without an interval.
    """
    if math.isnan(difference.low):
        return UNDETERMINED
    if difference.low > 0:
        return "output"
    if difference.high < 0:
        return "input"
    return NEITHER


def nearer_end(
    table: AnyTable, input_other: AnyTable, output_other: AnyTable, pairs: Pairs, settings: AlignSettings | None = None
) -> tuple[Lean, ...]:
    """Compare how well another model's input and output table map onto `table`.

    Both are scored on the same held-out tokens. `pairs` are rows of `table` (a) and of the other model's tables (b).
    Each
    map that applies to both, and neighbours, has one entry. Its difference has the interval of the bootstrap over rows,
    for
    the maps as they were fitted. If `settings.held_out` is 0, maps are fitted and scored on all tokens. Permutations
    are not
    used.

    Raises:
        CheckpointError: as `align` does.
    """
    settings = settings or AlignSettings()
    nearer = as_table(table)
    indices, neighbour_count = settings.sample(len(pairs))
    of_rows = _RowScores(nearer, pairs, settings, indices, neighbour_count)
    to_input, to_output = of_rows.against(as_table(input_other)), of_rows.against(as_table(output_other))
    chances = {NEIGHBOURS: _neighbour_chance(neighbour_count, len(indices))} if neighbour_count else {}
    leans = []
    for (measure, view), of_output in to_output.items():
        of_input = to_input.get((measure, view))
        if of_input is None:
            continue
        lean = Lean(
            measure=measure,
            input=mean_interval(of_input),
            output=mean_interval(of_output),
            difference=paired_bootstrap(of_input, of_output, settings.seed),
            chance=chances.get(measure, 0.0),
            view=view,
        )
        leans.append(lean)
    return tuple(leans)


class _RowScores:
    """Scores of other tables that are mapped onto one table, row by row."""

    def __init__(
        self, table: TokenTable, pairs: Pairs, settings: AlignSettings, indices: Ids, neighbour_count: int
    ) -> None:
        """Store the table, a of `pairs`, and find the neighbours of each row among pairs `indices`.

        0 leaves neighbours out.
        """
        self.table, self.pairs, self.settings = table, pairs, settings
        self.indices, self.neighbour_count = indices, neighbour_count
        if neighbour_count:
            self.neighbours = nearest(table, pairs.a[indices], neighbour_count, np.float32)

    def against(self, other: TokenTable) -> dict[Key, Matrix]:
        """Return by measure the cosine of each held-out row, or its share of common neighbours.

        If no rows are held out, cosines are of all rows.
        """
        swapped = Pairs(self.pairs.b, self.pairs.a, self.pairs.how)
        fitter = Fitter(other, self.table, swapped, self.settings)
        scored = fitter.heldout if len(fitter.heldout) else fitter.rows
        scores = fitter.cosines(fitter.fit(), scored, scored)
        if self.neighbour_count:
            of_other = nearest(other, self.pairs.b[self.indices], self.neighbour_count, np.float32)
            scores[NEIGHBOURS, CENTRED] = shared(self.neighbours, of_other)
        return scores
