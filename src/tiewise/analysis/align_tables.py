"""Align any two tables, each measure with its interval and with what chance would give.

    with map       identity, orthogonal, linear, reduced rank: mean cosine of mapped rows with their partners, on rows
                   that the map was fitted on and on rows held out, beside the analytic chance level and a null of
                   permuted rows to which the maps are fitted again
    without map    nearest neighbours, CKA, norms, shared subspaces, spectra

Tables are read in pieces; memory holds a few d×d matrices and one piece, or the sampled rows of one table.

`closer` asks whether one table is more like the first or the second of two others, paired over the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.analysis.model_tables import AnyTable, as_table
from tiewise.analysis.paired_rows import CURVE, LINE, Matrix, Paired, Pairs, Products, directions, nearest, shared
from tiewise.analysis.table_maps import (
    CENTRED,
    IDENTITY,
    LINEAR,
    ORTHOGONAL,
    RAW,
    AlignSettings,
    Fitter,
    fitted_chance,
)
from tiewise.core.errors import DataError
from tiewise.core.estimates import Estimate, correlation_interval, mean_interval, paired_bootstrap
from tiewise.core.found import NEITHER, ONE, TWO, Quantity, plain

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
        for found in self.scores:
            if found.measure == measure and found.rows in ("", rows) and found.view == view:
                return found
        raise KeyError((measure, rows, view))

    def quantities(self, of: str = "", decides: bool = False) -> Iterator[Quantity]:
        """Every measure as a section says it: maps on rows that they have not seen first.

        Args:
            of: whose two tables they are, where the section's model does not say it.
            decides: whether the two could as well have been one table.
        """
        title = f"The two tables of {of}" if of else "Input against output"
        unseen = HELD_OUT if self.fitted_rows < self.pairs else FITTED
        for score in sorted(self.scores, key=lambda score: (score.rows, score.view) != (unseen, CENTRED)):
            name, unit, why, main, asks = score.measure, "CKA", "", score.measure != NORMS, False
            if score.rows:  # a map
                main, seen = (score.rows, score.view) == (unseen, CENTRED), score.rows == FITTED
                asks = decides and main and name == IDENTITY and not seen
                name, unit = spelled(name) + (", not centred" if score.view == RAW else ""), "cosine"
                name += "" if main else f", on rows {'it was fitted on' if seen else 'held out'}"
                why = f"tokens that the map {'was fitted on' if seen else 'has not seen'}; by chance "
                why += f"{plain(score.chance, 3)} ± {plain(1.96 * score.deviation, 3)}"
            elif name == NEIGHBOURS:
                name, unit, why = f"nearest {self.k} in common", "%", "tokens that are nearest in both tables"
            elif name in (NORMS, NORMS_BY_RANK):
                unit, why = "correlation", f"0 ± {plain(1.96 * score.deviation, 3)} by chance"
            if asks:
                why = "above chance the two stored tables point the same way row by row, whether trained or started so"
            yield Quantity.of_estimate(
                name, score.estimate, chance=score.chance, null=score.null, unit=unit, of=of, main=main and not of,
                figure=title if main else "", why=why, question="Are input and output table alike?" if asks else "",
                below=TWO if score.rows else NEITHER, above=ONE if score.rows else NEITHER,
            )  # fmt: skip
        small: dict[str, Any] = {"of": of, "main": False}
        for space in self.subspaces:
            over = "tokens" if space.side == "left" else "coordinates"
            name = f"{space.k} leading directions over {over}"
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
    """Align table A [V, d1] with table B [V', d2]; maps go from A to B.

    Args:
        a: a table, a stored tensor, or an array.
        b: the other.
        pairs: rows that belong together (`by_text`, `one_vocabulary`).
        settings: what to measure.
        counts: how often each pair's token occurs, [pairs]; with it, CKA is also given with frequency taken out.

    Raises:
        CheckpointError: fewer than 16 pairs, no map that applies, rows that are not finite, or no tables of floats.
        DataError: counts of other tokens, or that are none.
    """
    settings = settings or AlignSettings()
    table_a, table_b = as_table(a), as_table(b)
    dtype = settings.dtype(len(pairs), (table_a.width, table_b.width))
    if counts is not None and np.shape(counts) != (len(pairs),):
        shape = list(np.shape(counts))
        raise DataError(f"counts of shape {shape} for {len(pairs):,} pairs", "give one count for each pair")
    beside = np.zeros((len(pairs), 0)) if counts is None else directions(counts)
    paired = Paired(table_a, table_b, pairs, dtype, beside)
    fitter = Fitter(paired, settings)
    products, norms, _ = paired.sums(fitter.held)
    products += fitter.products
    scores = _map_scores(fitter, settings)
    which, k = settings.sample(len(pairs))
    if settings.neighbours:
        ids_a, ids_b = nearest(table_a, pairs.a[which], k, dtype), nearest(table_b, pairs.b[which], k, dtype)
        generator, null = np.random.default_rng(settings.seed), []
        for _ in range(max(1, settings.permutations)):
            order = generator.permutation(len(which))
            null.append(float(shared(ids_a, np.argsort(order)[ids_b[order]]).mean()))
        # rows share neighbours, so that the interval is a little narrow
        common = mean_interval(shared(ids_a, ids_b))
        scores.append(Score(NEIGHBOURS, common, k / (len(which) - 1), null=tuple(null)))
    whole = products.without()
    taken_out = {}
    for powers in sorted({0, *(min(powers, products.along_a.shape[1]) for powers in (LINE, CURVE))}):
        rest = products.without(powers) if powers else whole
        measure = CKA_CURVE if powers > LINE else CKA_LINE if powers else CKA
        value, chance = cka(rest, powers)
        if powers:
            grams = (rest.gram_a, whole.gram_a), (rest.gram_b, whole.gram_b)
            gone = [1 - float(np.trace(one)) / float(np.trace(all_)) if np.trace(all_) else 0.0 for one, all_ in grams]
            taken_out[measure] = gone[0], gone[1]
            value, chance = (0.0, 0.0) if max(gone) > 1 - _NOTHING_LEFT else (value, chance)
        scores.append(Score(measure, Estimate(value, math.nan, math.nan, len(pairs)), chance))
    norms_a, norms_b = (np.concatenate(both) for both in zip(fitter.norms, norms, strict=True))
    by_value, by_rank = norm_correlations(norms_a, norms_b)
    both_spectra, subspaces = spectra(products, whole, settings.subspaces)
    return Alignment(
        pairs=len(pairs),
        matched=pairs.how,
        fitted_rows=len(fitter.rows),
        zero_rows=int(((norms_a == 0) | (norms_b == 0)).sum()),
        precision="fp64" if dtype == np.float64 else "fp32",
        error=fitter.error,
        scores=(*scores, by_rank, by_value),
        k=k,
        taken_out=taken_out,
        left_out=fitter.left_out,
        spectra=both_spectra,
        subspaces=subspaces,
    )


def _map_scores(fitter: Fitter, settings: AlignSettings) -> list[Score]:
    paired, fit, held = fitter.paired, fitter.rows, fitter.held
    generator = np.random.default_rng([settings.seed, 1])
    most = settings.scored if len(held) else len(fit)
    place = np.sort(generator.choice(len(fit), min(most, len(fit)), replace=False))
    scored = {FITTED: fit[place]} | ({HELD_OUT: held} if len(held) else {})
    maps = fitter.fit(fitter.products.cross)
    seen = {rows: fitter.cosines(maps, which, which) for rows, which in scored.items()}
    nulls: dict[str, list[list[float]]] = {rows: [] for rows in scored}
    for _ in range(settings.permutations):
        order = generator.permutation(fit)
        partners = {FITTED: order[place], HELD_OUT: generator.permutation(held)}
        again = fitter.fit(fitter.products.cross if fitter.names == [IDENTITY] else paired.cross(fit, order))
        for rows, which in scored.items():
            cosines = fitter.cosines(again, which, partners[rows])
            nulls[rows].append([float(values.mean()) for values in cosines])
    made = []
    for rows, values in seen.items():
        for at, fitted in enumerate(maps):
            chance = fitted_chance(fitted.name, len(fit), *paired.widths) if rows == FITTED else 0.0
            deviation = 1 / math.sqrt(len(values[at]) * paired.widths[1])
            null = tuple(found[at] for found in nulls[rows])
            made.append(Score(fitted.name, mean_interval(values[at]), chance, deviation, null, rows, fitted.view))
    return made


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

    side: str  # `left` (over tokens, [n, k]; any widths) or `right` (over the d coordinates; one width only)
    k: int  # directions of each
    value: float  # Σ cos² / k, from 0 to 1
    chance: float  # its mean for two random subspaces, k/(n−1) left and k/d right
    cosines: tuple[float, ...]  # of the principal angles, falling


def spectra(
    products: Products, centred: Products, ks: tuple[int, ...]
) -> tuple[tuple[Spectrum, Spectrum], tuple[Subspace, ...]]:
    """(spectra of both tables, their leading subspaces of `ks` directions) from products as they are and centred."""
    found, axes = [], []
    for gram, raw, mean in (
        (centred.gram_a, products.gram_a, products.mean_a),
        (centred.gram_b, products.gram_b, products.mean_b),
    ):
        rising, vectors = np.linalg.eigh(gram)
        values = np.maximum(rising[::-1], 0)
        axes.append((values, vectors[:, ::-1]))
        total, energy = float(values.sum()), float(np.trace(raw))
        participation = total**2 / float(np.square(values).sum()) if total else 0.0
        share = products.rows * float(mean @ mean) / energy if energy else 0.0
        found.append(Spectrum(tuple(map(float, np.sqrt(values))), participation, share))
    (values_a, axes_a), (values_b, axes_b) = axes
    rank = min(int((v > len(v) * np.finfo(np.float64).eps * v[0]).sum()) for v in (values_a, values_b))
    between = axes_a.T @ centred.cross @ axes_b
    spaces = []
    for k in sorted({min(k, rank) for k in ks if min(k, rank) > 0}):
        left = between[:k, :k] / np.sqrt(np.outer(values_a[:k], values_b[:k]))
        spaces.append(_subspace("left", left, k / (products.rows - 1)))
        if axes_a.shape == axes_b.shape:
            spaces.append(_subspace("right", axes_a[:, :k].T @ axes_b[:, :k], k / len(axes_a)))
    return (found[0], found[1]), tuple(spaces)


def _subspace(side: str, between: NDArray, chance: float) -> Subspace:
    cosines = np.minimum(np.linalg.svd(between, compute_uv=False), 1.0)
    k = len(cosines)
    return Subspace(side, k, float(np.square(cosines).mean()), min(1.0, chance), tuple(map(float, cosines)))


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

    @property
    def toward(self) -> str:
        """The side that the difference speaks for."""
        return toward(self.difference)


def toward(difference: Estimate) -> str:
    """Of a difference output − input: the side that its interval speaks for, NEITHER, or NOT_KNOWN without one."""
    if math.isnan(difference.low):
        return NOT_KNOWN
    return "output" if difference.low > 0 else "input" if difference.high < 0 else NEITHER


def closer(
    table: AnyTable, input_other: AnyTable, output_other: AnyTable, pairs: Pairs, settings: AlignSettings | None = None
) -> tuple[Lean, ...]:
    """Compare how well the other model's input and its output table map onto `table`, on the same held-out tokens.

    Differences have the interval of the bootstrap over rows, for the maps as they were fitted. Where
    `settings.held_out` is 0, rows are all tokens, and maps were fitted on them.

    Args:
        table: the tied table, [V, d].
        input_other: the other model's input table, [V', d'].
        output_other: its output table, [V', d'].
        pairs: row of `table` (a) and row of the other's tables (b) of each token in both.
        settings: as for `align`; permutations are not used.

    Returns:
        one entry for each map that applies to both, and for neighbours.

    Raises:
        CheckpointError: as `align` does.
    """
    settings = settings or AlignSettings()
    tied, others, cosines = as_table(table), (as_table(input_other), as_table(output_other)), []
    for other in others:
        dtype = settings.dtype(len(pairs), (other.width, tied.width))
        turned = Pairs(pairs.b, pairs.a, pairs.how)
        fitter = Fitter(Paired(other, tied, turned, dtype, np.zeros((len(pairs), 0))), settings)
        maps, seen = fitter.fit(fitter.products.cross), fitter.held if len(fitter.held) else fitter.rows
        names = ((fitted.name, fitted.view) for fitted in maps)
        cosines.append(dict(zip(names, fitter.cosines(maps, seen, seen), strict=True)))
    chance = 0.0
    which, k = settings.sample(len(pairs))
    if k:
        own, chance = nearest(tied, pairs.a[which], k, np.float32), k / (len(which) - 1)
        for found, other in zip(cosines, others, strict=True):
            found[NEIGHBOURS, CENTRED] = shared(own, nearest(other, pairs.b[which], k, np.float32))
    leans = []
    for (measure, view), second in cosines[1].items():
        if (measure, view) in cosines[0]:
            first = cosines[0][measure, view]
            apart = paired_bootstrap(first, second, settings.seed)
            level = chance if measure == NEIGHBOURS else 0.0
            leans.append(Lean(measure, mean_interval(first), mean_interval(second), apart, level, view))
    return tuple(leans)
