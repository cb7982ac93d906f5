"""Align any two tables, each measure with its interval and with what chance would give.

    with map       identity, orthogonal, linear, reduced rank: mean cosine of mapped rows with their partners, on rows
                   that the map was fitted on and on rows held out, beside the analytic chance level and a null of
                   permuted rows to which the maps are fitted again
    without map    nearest neighbours, CKA, norms, shared subspaces, spectra

Memory holds a few d×d matrices and a piece of the rows, or the sampled rows of one table.

`nearer_end` asks whether one table is more like the first or the second of two others, paired over the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.core.errors import DataError, progress
from tiewise.core.estimates import Estimate, correlation_interval, mean_interval, paired_bootstrap
from tiewise.core.found import NEITHER, ONE, TWO, Quantity, plain
from tiewise.inspection.tables.model_tables import AnyTable, Ids, Pairs, TokenTable, as_table
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
    Matrix,
    Products,
    directions,
    fitted_chance,
)

NEIGHBOURS, CKA, CKA_LINE, CKA_CURVE = "neighbours", "CKA", "CKA, frequency out (line)", "CKA, frequency out"
NORMS, NORMS_BY_RANK = "norms", "norms, by rank"
FITTED, HELD_OUT = "fitted", "held out"
NOT_KNOWN = "not known"
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
_NOTHING_LEFT = 1e-12  # share of a table below which what is left of it is rounding


def spelled(measure: str) -> str:
    """A measure in words: "after the best rotation"."""
    return SPELLED.get(measure, f"after the best map of {measure}")


@dataclass(frozen=True)
class Score:
    """One measure of how alike two tables are."""

    measure: str  # a map: mean cosine of mapped rows with their partners; or one of those that need none
    estimate: Estimate  # over scored rows; a map's interval is over rows, for the map as it was fitted
    chance: float  # the mean for unrelated tables: independent Gaussian ones for a map, all permutations for CKA
    deviation: float = math.nan  # of the chance level over draws of as many rows, where it is known
    null: tuple[float, ...] = ()  # the same with the rows of B permuted and maps fitted again, for each permutation
    rows: str = ""  # of a map: the rows that are scored, `fitted` or `held out`
    view: str = CENTRED  # `centred` (rows less the mean of the fitting rows) or `raw`

    @property
    def p(self) -> float:
        """(1 + permutations that reach the score) / (1 + permutations); small values need many of them."""
        return (1 + sum(value >= self.estimate.value for value in self.null)) / (1 + len(self.null))


@dataclass(frozen=True)
class Alignment:
    """Two tables held side by side."""

    pairs: int  # tokens in both tables; `matched` says how they were matched
    matched: str
    fitted_rows: int  # pairs that maps were fitted on
    zero_rows: int  # pairs whose row is zero in either table; their cosine counts as 0
    precision: str  # fp32 or fp64, in which rows were multiplied; sums are in fp64
    error: float  # relative error of a product of 1024 rows against fp64, measured; 0 in fp64
    scores: tuple[Score, ...]  # maps by rows, map and view; neighbours, CKA, norms
    k: int  # neighbours of each row that were compared
    taken_out: dict[str, tuple[float, float]]  # measure of CKA without frequency → share of A and B that went with it
    left_out: tuple[str, ...]  # maps that do not apply, and why
    spectra: tuple[Spectrum, Spectrum]  # of both tables, over all pairs
    subspaces: tuple[Subspace, ...]  # leading ones that both have, over all pairs

    def score(self, measure: str, rows: str = HELD_OUT, view: str = CENTRED) -> Score:
        """Return one score; `rows` and `view` are a map's. KeyError where there is none."""
        found = {(one.measure, one.rows or rows, one.view): one for one in self.scores}
        return found[measure, rows, view]

    def quantities(self, of: str = "", decides: bool = False) -> Iterator[Quantity]:
        """Every measure as a section says it: maps on rows that they have not seen first.

        `of` says whose two tables they are, where the section's model does not; `decides` whether they could be one
        table.
        """
        title = f"The two tables of {of}" if of else "Input against output"
        unseen = HELD_OUT if self.fitted_rows < self.pairs else FITTED
        for score in sorted(self.scores, key=lambda score: (score.rows, score.view) != (unseen, CENTRED)):
            name, main, why, question = score.measure, score.measure != NORMS, "", ""
            by_chance, unit = f"± {plain(1.96 * score.deviation, 3)}", "cosine" if score.rows else "CKA"
            if score.rows:  # a map
                main, how = (score.rows, score.view) == (unseen, CENTRED), "was fitted on"
                why = f"tokens that the map {how if score.rows == FITTED else 'has not seen'}; by chance "
                why += f"{plain(score.chance, 3)} {by_chance}"
                if decides and main and (name, score.rows) == (IDENTITY, HELD_OUT):
                    question = "Are input and output table alike?"
                    why = "above chance both stored tables point the same way row by row, whether trained or started so"
                name = spelled(name) + (", not centred" if score.view == RAW else "")
                name += "" if main else f", on rows {f'it {how}' if score.rows == FITTED else 'held out'}"
            elif name == NEIGHBOURS:
                name, unit, why = f"nearest {self.k} in common", "%", "tokens that are nearest in both tables"
            elif name in (NORMS, NORMS_BY_RANK):
                unit, why = "correlation", f"0 {by_chance} by chance"
            yield Quantity.of_estimate(
                name, score.estimate, chance=score.chance, null=score.null, unit=unit, of=of, main=main and not of,
                figure=title if main else "", why=why, question=question,
                below=TWO if score.rows else NEITHER, above=ONE if score.rows else NEITHER,
            )  # fmt: skip
        small: dict[str, Any] = {"of": of, "main": False}
        for space in self.subspaces:
            name = f"{space.k} leading directions over {space.over}"
            yield Quantity(name, space.value, chance=space.chance, unit="mean squared cosine", **small)
        for end, spectrum in zip(("first", "second"), self.spectra, strict=True):
            yield Quantity(f"directions that the {end} table fills", spectrum.participation, unit="(Σs²)²/Σs⁴", **small)
            yield Quantity(f"mean row's energy, {end} table", spectrum.mean_share, unit="%", **small)
        yield Quantity("tokens compared", self.pairs, **small, why=self.matched)
        yield Quantity("tokens that maps were fitted on", self.fitted_rows, **small)
        yield Quantity("tokens with a row of zeros", self.zero_rows, **small, why="their cosine counts as 0")
        yield Quantity("error of products", self.error, unit="relative", **small, why=f"in {self.precision}")


def align(
    a: AnyTable, b: AnyTable, pairs: Pairs, settings: AlignSettings | None = None, counts: ArrayLike | None = None
) -> Alignment:
    """Align table A [V, d1] with table B [V', d2], whose rows `pairs` brings together; maps go from A to B.

    With `counts`, how often each pair's token occurs [pairs], CKA is also given with frequency taken out.

    Raises:
        CheckpointError: fewer than 16 pairs, no map that applies, rows that are not finite, or no tables of floats.
        DataError: counts of other tokens, or that are none.
    """
    settings = settings or AlignSettings()
    if counts is not None and np.shape(counts) != (len(pairs),):
        shape = list(np.shape(counts))
        raise DataError(f"counts of shape {shape} for {len(pairs):,} pairs", "give one count for each pair")
    beside = None if counts is None else directions(counts)
    fitter = Fitter(as_table(a), as_table(b), pairs, settings, beside)
    scores = _map_scores(fitter, settings)
    which, k = settings.sample(len(pairs))
    if k:
        sides = (fitter.a, pairs.a), (fitter.b, pairs.b)
        ids_a, ids_b = (nearest(table, rows[which], k, fitter.dtype) for table, rows in sides)
        generator = np.random.default_rng(settings.seed)
        orders = (generator.permutation(len(which)) for _ in range(max(1, settings.permutations)))
        null = tuple(float(shared(ids_a, np.argsort(order)[ids_b[order]]).mean()) for order in orders)
        # rows share neighbours, so that the interval is a little narrow
        scores.append(Score(NEIGHBOURS, mean_interval(shared(ids_a, ids_b)), k / (len(which) - 1), null=null))
    products, norms, _ = fitter.sums(fitter.held, onto=fitter.products)
    centred, taken_out = products.without(), {}
    for powers in sorted({0, *(min(powers, products.along_a.shape[1]) for powers in (LINE, CURVE))}):
        measure = CKA_CURVE if powers > LINE else CKA_LINE if powers else CKA
        rest = products.without(powers)
        value, chance = cka(rest, powers)
        if powers:
            grams = (rest.gram_a, centred.gram_a), (rest.gram_b, centred.gram_b)
            gone = [1 - float(np.trace(one) / np.trace(all_)) if np.trace(all_) else 0.0 for one, all_ in grams]
            taken_out[measure] = gone[0], gone[1]
            value, chance = (0.0, 0.0) if max(gone) > 1 - _NOTHING_LEFT else (value, chance)
        scores.append(Score(measure, Estimate(value, math.nan, math.nan, len(pairs)), chance))
    norms_a, norms_b = (np.concatenate(both) for both in zip(fitter.norms, norms, strict=True))
    by_value, by_rank = norm_correlations(norms_a, norms_b)
    both_spectra, subspaces = spectra(products, settings.subspaces)
    return Alignment(
        pairs=len(pairs),
        matched=pairs.how,
        fitted_rows=len(fitter.rows),
        zero_rows=int(((norms_a == 0) | (norms_b == 0)).sum()),
        precision="fp64" if fitter.dtype == np.float64 else "fp32",
        error=fitter.error,
        scores=(*scores, by_rank, by_value),
        k=k,
        taken_out=taken_out,
        left_out=fitter.left_out,
        spectra=both_spectra,
        subspaces=subspaces,
    )


def _map_scores(fitter: Fitter, settings: AlignSettings) -> list[Score]:
    fit, held = fitter.rows, fitter.held
    generator = np.random.default_rng([settings.seed, 1])
    most = settings.scored if len(held) else len(fit)
    place = np.sort(generator.choice(len(fit), min(most, len(fit)), replace=False))
    scored = {FITTED: fit[place]} | ({HELD_OUT: held} if len(held) else {})
    maps = fitter.fit()
    seen = {rows: fitter.cosines(maps, which, which) for rows, which in scored.items()}
    nulls: dict[str, list[dict[tuple[str, str], Matrix]]] = {rows: [] for rows in scored}
    for _ in range(settings.permutations):
        order = generator.permutation(fit)
        partners = {FITTED: order[place], HELD_OUT: generator.permutation(held)}
        again = fitter.fit(order)
        for rows, which in scored.items():
            nulls[rows].append(fitter.cosines(again, which, partners[rows]))
    return [
        Score(
            measure=name,
            estimate=mean_interval(values),
            chance=fitted_chance(name, len(fit), *fitter.widths) if rows == FITTED else 0.0,
            deviation=1 / math.sqrt(len(values) * fitter.widths[1]),
            null=tuple(float(null[name, view].mean()) for null in nulls[rows]),
            rows=rows,
            view=view,
        )
        for rows, of_rows in seen.items()
        for (name, view), values in of_rows.items()
    ]


def nearest(table: TokenTable, which: Ids, k: int, dtype: type[np.floating]) -> Ids:
    """Places [n, k], within `which` [n > k], of each row's k nearest others by cosine of rows less their mean.

    In no order, and among equal cosines any. Rows of zeros have cosine 0 with all. Each pair of blocks is met once.
    """
    rows = table.take(which, dtype)
    rows -= rows.mean(axis=0, dtype=np.float64).astype(dtype)
    n, norms = len(rows), np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(norms > 0, norms, 1)
    best, ids = np.full((n, k), -np.inf, unit.dtype), np.zeros((n, k), np.int64)
    starts = range(0, n, BLOCK)
    done, total = 0, len(starts) * (len(starts) + 1) // 2
    for i in starts:
        for j in range(i, n, BLOCK):
            tile = unit[i : i + BLOCK] @ unit[j : j + BLOCK].T
            if i == j:
                np.fill_diagonal(tile, -np.inf)
            else:
                _keep_best(best, ids, j, tile.T, i)
            _keep_best(best, ids, i, tile, j)
            done += 1
            progress("neighbours", done, total)
    return ids


def _keep_best(best: NDArray, ids: Ids, start: int, tile: NDArray, first: int) -> None:
    """Keep the k best of each row's best so far, rows `start` on, and one tile, whose columns are rows `first` on."""
    k, rows = best.shape[1], slice(start, start + len(tile))
    if best[start, 0] == -np.inf:  # nothing is kept yet
        tile = np.ascontiguousarray(tile)
        columns = np.argpartition(tile, -min(k, tile.shape[1]), axis=1)[:, -k:]
        values = np.take_along_axis(tile, columns, axis=1)
    else:  # what exceeds the least that is kept: few, once some tiles have been met; padded with -inf
        at, column = np.nonzero(np.ascontiguousarray(tile > best[rows].min(axis=1)[:, None]))
        counts = np.bincount(at, minlength=len(tile))
        place = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
        values = np.full((len(tile), int(counts.max(initial=0))), -np.inf, tile.dtype)
        columns = np.zeros(values.shape, np.int64)
        values[at, place], columns[at, place] = tile[at, column], column
    values = np.concatenate([best[rows], values], axis=1)
    columns = np.concatenate([ids[rows], columns + first], axis=1)
    kept = np.argpartition(values, -k, axis=1)[:, -k:]
    best[rows] = np.take_along_axis(values, kept, axis=1)
    ids[rows] = np.take_along_axis(columns, kept, axis=1)


def shared(ids_a: Ids, ids_b: Ids) -> Matrix:
    """Share of each row's neighbours [n, k] that are in both, [n]."""
    return (ids_a[:, :, None] == ids_b[:, None, :]).sum(axis=(1, 2)) / ids_a.shape[1]


def cka(centred: Products, taken_out: int = 0) -> tuple[float, float]:
    """(linear CKA ‖AᵀB‖² / (‖AᵀA‖·‖BᵀB‖) of centred rows, Kornblith et al. 2019; its mean over all permutations).

    That mean is tr K_A · tr K_B / ((n−1)·‖K_A‖·‖K_B‖) exactly, with K = A Aᵀ, whose trace and norm are those of AᵀA;
    for Gaussian tables about d / (n + d). Of what is left when some directions were taken out, n − 1 loses as many.
    """
    scale = float(np.linalg.norm(centred.gram_a) * np.linalg.norm(centred.gram_b))
    if not scale:
        return 0.0, 0.0
    traces = float(np.trace(centred.gram_a) * np.trace(centred.gram_b))
    return float(np.square(centred.cross).sum()) / scale, traces / (scale * (centred.rows - taken_out - 1))


@dataclass(frozen=True)
class Spectrum:
    """Singular values of a table's centred paired rows, falling."""

    values: tuple[float, ...]  # s_1 ≥ s_2 ≥ …, from the Gram matrix: accurate to about √ε·s_1 in absolute terms
    participation: float  # (Σ s²)² / Σ s⁴, the number of directions that the table fills evenly
    mean_share: float  # share of Σ‖row‖² that is the mean row's: 0 centred, 1 all rows alike


@dataclass(frozen=True)
class Subspace:
    """How far two leading subspaces of k directions agree: the mean squared cosine of their principal angles."""

    over: str  # `tokens` ([n, k]; any widths) or `coordinates` (of d; one width only)
    k: int  # directions of each
    value: float  # Σ cos² / k, from 0 to 1
    chance: float  # its mean for two random subspaces, k/(n−1) over tokens and k/d over coordinates
    cosines: tuple[float, ...]  # of the principal angles, falling


def spectra(products: Products, ks: tuple[int, ...]) -> tuple[tuple[Spectrum, Spectrum], tuple[Subspace, ...]]:
    """(spectra of both tables, their leading subspaces of `ks` directions), of rows less their mean."""
    (mean_a, mean_b), centred, found, axes = products.means, products.without(), [], []
    sides = (centred.gram_a, products.gram_a, mean_a), (centred.gram_b, products.gram_b, mean_b)
    for gram, raw, mean in sides:
        rising, vectors = np.linalg.eigh(gram)
        values = np.maximum(rising[::-1], 0)
        axes.append((values, vectors[:, ::-1]))
        participation = float(values.sum() ** 2 / (values @ values)) if values.any() else 0.0
        share = products.rows * float(mean @ mean / np.trace(raw)) if raw.any() else 0.0
        found.append(Spectrum(tuple(np.sqrt(values).tolist()), participation, share))
    (values_a, axes_a), (values_b, axes_b) = axes
    rank = min(int((v > len(v) * np.finfo(np.float64).eps * v[0]).sum()) for v in (values_a, values_b))
    between, spaces = axes_a.T @ centred.cross @ axes_b, []
    for k in sorted({min(k, rank) for k in ks if min(k, rank) > 0}):
        over_tokens = between[:k, :k] / np.sqrt(np.outer(values_a[:k], values_b[:k]))
        views = [("tokens", over_tokens, k / (products.rows - 1))]
        if axes_a.shape == axes_b.shape:
            views.append(("coordinates", axes_a[:, :k].T @ axes_b[:, :k], k / len(axes_a)))
        for over, product, chance in views:
            cosines = np.minimum(np.linalg.svd(product, compute_uv=False), 1.0)
            spaces.append(Subspace(over, k, float(cosines @ cosines) / k, min(1.0, chance), tuple(cosines.tolist())))
    return (found[0], found[1]), tuple(spaces)


def norm_correlations(norms_a: NDArray, norms_b: NDArray) -> tuple[Score, Score]:
    """Correlation of the norms of paired rows by value (Pearson) and by rank (Spearman, ties by their mean rank)."""
    n, found = len(norms_a), []
    for measure, pair in ((NORMS, (norms_a, norms_b)), (NORMS_BY_RANK, (_ranks(norms_a), _ranks(norms_b)))):
        x, y = (values - values.mean() for values in pair)
        scale = float(np.sqrt((x @ x) * (y @ y)))
        value = float(x @ y) / scale if scale else 0.0
        found.append(Score(measure, correlation_interval(value, n), 0.0, (n - 1) ** -0.5))
    return found[0], found[1]


def _ranks(values: NDArray) -> Matrix:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Matrix = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return ranks


@dataclass(frozen=True)
class Lean:
    """One measure of a table against both of two others: the input and the output table of another model."""

    measure: str  # as of `Score`
    input: Estimate  # score against the input table
    output: Estimate  # against the output table, on the same rows
    difference: Estimate  # output − input, paired
    chance: float = 0.0  # of either score
    view: str = CENTRED  # `centred` or `raw`


def toward(difference: Estimate) -> str:
    """Of a difference output − input: the side that its interval speaks for, NEITHER, or NOT_KNOWN without one."""
    if math.isnan(difference.low):
        return NOT_KNOWN
    return "output" if difference.low > 0 else "input" if difference.high < 0 else NEITHER


def nearer_end(
    table: AnyTable, input_other: AnyTable, output_other: AnyTable, pairs: Pairs, settings: AlignSettings | None = None
) -> tuple[Lean, ...]:
    """Compare how well the other model's input and its output table map onto `table`, on the same held-out tokens.

    `pairs` are rows of `table` (a) and of the other's tables (b). Each map that applies to both, and neighbours, has
    one entry, its difference with the interval of the bootstrap over rows, for the maps as they were fitted. Where
    `settings.held_out` is 0, rows are all tokens, and maps were fitted on them; permutations are not used.

    Raises:
        CheckpointError: as `align` does.
    """
    settings = settings or AlignSettings()
    tied, cosines, turned = as_table(table), [], Pairs(pairs.b, pairs.a, pairs.how)
    which, k = settings.sample(len(pairs))
    own = nearest(tied, pairs.a[which], k, np.float32) if k else None
    for other in (as_table(input_other), as_table(output_other)):
        fitter = Fitter(other, tied, turned, settings)
        seen = fitter.held if len(fitter.held) else fitter.rows
        cosines.append(fitter.cosines(fitter.fit(), seen, seen))
        if own is not None:
            cosines[-1][NEIGHBOURS, CENTRED] = shared(own, nearest(other, pairs.b[which], k, np.float32))
    return tuple(
        Lean(
            measure=measure,
            input=mean_interval(cosines[0][measure, view]),
            output=mean_interval(second),
            difference=paired_bootstrap(cosines[0][measure, view], second, settings.seed),
            chance=k / (len(which) - 1) if measure == NEIGHBOURS else 0.0,
            view=view,
        )
        for (measure, view), second in cosines[1].items()
        if (measure, view) in cosines[0]
    )
