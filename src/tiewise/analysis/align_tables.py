"""Align any two tables, each measure with its interval and with what chance would give.

    with map       identity, orthogonal, linear, reduced rank: mean cosine of mapped rows with their partners, on rows
                   that the map was fitted on and on rows held out, beside the analytic chance level and a null of
                   permuted rows to which the maps are fitted again
    without map    nearest neighbours, CKA, shared subspaces, spectra, norms

Tables are read in pieces; memory holds a few d×d matrices and one piece, or the sampled rows of one table.

Is this tied table more like the input or the output table of another model? Paired over the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tiewise.analysis.estimates import Estimate, mean_interval, paired_bootstrap
from tiewise.analysis.row_pairs import Order, Paired, Pairs
from tiewise.analysis.row_products import directions
from tiewise.analysis.similarity import (
    NormCorrelation,
    Overlap,
    Similarity,
    nearest,
    norm_correlation,
    overlap,
    shared,
    similarity,
)
from tiewise.analysis.table_maps import (
    CENTRED,
    IDENTITY,
    LINEAR,
    ORTHOGONAL,
    Fitted,
    Fitter,
    chance,
    choose,
    held_out_deviation,
    permuted_cross,
    score,
    split,
    sums,
)
from tiewise.analysis.token_table import TokenTable, as_table
from tiewise.checkpoint.stored import Stored
from tiewise.core.errors import CheckpointError, DataError

FITTED, HELD_OUT = "fitted", "held out"
AnyTable = TokenTable | Stored | NDArray
FP64_WORK = 2e10  # multiplications up to which fp64 costs seconds at most


@dataclass(frozen=True)
class AlignSettings:
    """What to measure, and on how many rows."""

    maps: tuple[str, ...] = (IDENTITY, ORTHOGONAL, LINEAR)  # of identity, orthogonal and linear
    ranks: tuple[int, ...] = ()  # ranks of reduced-rank maps
    raw: bool = False  # fit maps to the rows as they are as well, not only to centred rows
    # share of the pairs that no map is fitted on; at most half. 0 fits maps on all pairs and scores all of them, as
    # published scores do; there are no held-out scores then
    held_out: float = 0.2
    scored: int = 8192  # at most so many pairs are held out, and so many of the fitting ones scored beside them
    permutations: int = 3  # refits of the null
    neighbours: int = 10  # k; 0 leaves neighbours out
    sampled: int = 20_000  # at most so many rows for neighbours
    subspaces: tuple[int, ...] = (16, 64)  # numbers of leading directions to compare
    precision: str = "auto"  # fp32 or fp64 products; auto takes fp64 where it costs seconds
    seed: int = 0  # of the split, the samples and the permutations

    def dtype(self, pairs: int, widths: tuple[int, int]) -> type[np.floating]:
        """Type in which rows are multiplied."""
        if self.precision not in ("auto", "fp32", "fp64"):
            raise CheckpointError(f"no precision is called {self.precision}", "choose of auto, fp32 and fp64")
        d1, d2 = widths
        wide = self.precision == "fp64" or (self.precision == "auto" and pairs * (d1 + d2) ** 2 <= FP64_WORK)
        return np.float64 if wide else np.float32


@dataclass(frozen=True)
class Null:
    """The same score with the rows of B permuted and the maps fitted again."""

    values: tuple[float, ...]  # one for each permutation
    p: float  # (1 + number of them that reach the score) / (1 + their number); small values need many permutations


@dataclass(frozen=True)
class Score:
    """Mean cosine of mapped rows with their partners."""

    map: str  # identity, orthogonal, linear or `rank r`
    view: str  # `centred` (rows less the mean of the fitting rows) or `raw`
    rows: str  # `fitted` or `held out`
    estimate: Estimate  # the mean over scored rows, with a normal interval over rows for the map as it was fitted
    chance: float  # the mean for independent Gaussian tables
    chance_deviation: float  # its deviation over draws of as many scored rows
    null: Null | None  # of the tables themselves, permuted; None where no permutation was asked for


@dataclass(frozen=True)
class Alignment:
    """Two tables held side by side."""

    pairs: int  # tokens in both tables; `matched` says how they were matched
    matched: str
    widths: tuple[int, int]  # (d1, d2)
    fitted_rows: int  # pairs that maps were fitted on
    zero_rows: int  # pairs whose row is zero in either table; their cosine counts as 0
    precision: str  # fp32 or fp64, in which rows were multiplied; sums are in fp64
    error: float  # relative error of a product of 1024 rows against fp64, measured; 0 in fp64
    scores: tuple[Score, ...]  # by map, view and rows
    left_out: tuple[tuple[str, str], ...]  # (map, why) of maps that do not apply
    neighbours: Overlap | None  # None where they were not asked for
    similarity: Similarity  # CKA, subspaces and spectra over all pairs
    norms: NormCorrelation  # correlation of the rows' norms over all pairs
    seed: int  # of the split, samples and permutations

    def score(self, name: str, rows: str = HELD_OUT, view: str = CENTRED) -> Score:
        """Return one score by its map, rows ("held out" or "fitted") and view; KeyError where there is none."""
        for found in self.scores:
            if (found.map, found.rows, found.view) == (name, rows, view):
                return found
        raise KeyError((name, rows, view))


def align(
    a: AnyTable,
    b: AnyTable,
    pairs: Pairs,
    settings: AlignSettings | None = None,
    counts: ArrayLike | None = None,
) -> Alignment:
    """Align table A [V, d1] with table B [V', d2]; maps go from A to B.

    Args:
        a: a table, a stored tensor, or an array.
        b: the other.
        pairs: rows that belong together (`token_match`).
        settings: what to measure.
        counts: how often each pair's token occurs, [pairs]; with it, CKA is also given with frequency taken out.

    Raises:
        CheckpointError: fewer than 16 pairs, no map that applies, rows that are not finite, or no tables of floats.
        DataError: counts of other tokens, or that are none.
    """
    settings = settings or AlignSettings()
    table_a, table_b = as_table(a), as_table(b)
    dtype = settings.dtype(len(pairs), (table_a.width, table_b.width))
    paired = Paired(table_a, table_b, pairs, dtype, _beside(counts, len(pairs)))
    fit, held = split(len(pairs), settings.held_out, settings.scored, settings.seed)
    names, left_out = choose(settings.maps, settings.ranks, paired.widths, len(fit))
    products, *norms, error = sums(paired, fit)
    rest, *rest_norms, _ = sums(paired, held)
    scores = _scores(paired, Fitter(products, names, settings.raw, error), (fit, held), settings)
    rest.join(products)
    norms_a, norms_b = (np.concatenate(both) for both in zip(norms, rest_norms, strict=True))
    return Alignment(
        pairs=len(pairs),
        matched=pairs.how,
        widths=paired.widths,
        fitted_rows=len(fit),
        zero_rows=int(((norms_a == 0) | (norms_b == 0)).sum()),
        precision="fp64" if dtype == np.float64 else "fp32",
        error=error,
        scores=tuple(scores),
        left_out=tuple(left_out),
        similarity=similarity(rest, settings.subspaces),
        norms=norm_correlation(norms_a, norms_b),
        neighbours=_neighbours(paired, settings) if settings.neighbours else None,
        seed=settings.seed,
    )


def _beside(counts: ArrayLike | None, pairs: int) -> NDArray | None:
    if counts is None:
        return None
    given = np.asarray(counts)
    if given.shape != (pairs,):
        raise DataError(f"counts of shape {list(given.shape)} for {pairs:,} pairs", "give one count for each pair")
    return directions(given)


def _scores(paired: Paired, fitter: Fitter, parts: tuple[Order, Order], settings: AlignSettings) -> list[Score]:
    fit, held = parts
    generator = np.random.default_rng([settings.seed, 1])
    most = settings.scored if len(held) else len(fit)
    place = np.sort(generator.choice(len(fit), min(most, len(fit)), replace=False))
    maps = fitter.fit(fitter.cross)
    seen = {FITTED: score(paired, maps, fit[place], fit[place])}
    if len(held):
        seen[HELD_OUT] = score(paired, maps, held, held)
    nulls: dict[str, list[list[float]]] = {FITTED: [], HELD_OUT: []}
    for _ in range(settings.permutations):
        order, held_order = generator.permutation(fit), generator.permutation(held)
        cross = fitter.cross if set(fitter.names) == {IDENTITY} else permuted_cross(paired, fit, order)
        refitted = fitter.fit(cross)
        nulls[FITTED].append(_means(score(paired, refitted, fit[place], order[place])))
        if len(held):
            nulls[HELD_OUT].append(_means(score(paired, refitted, held, held_order)))
    return [
        _score(fitted, rows, values[at], [found[at] for found in nulls[rows]], (len(fit), paired.widths))
        for rows, values in seen.items()
        for at, fitted in enumerate(maps)
    ]


def _means(scores: Sequence[NDArray]) -> list[float]:
    return [float(values.mean()) for values in scores]


def _score(fitted: Fitted, rows: str, cosines: NDArray, null: list[float], size: tuple[int, tuple[int, int]]) -> Score:
    estimate = mean_interval(cosines)
    reached = sum(value >= estimate.value for value in null)
    return Score(
        map=fitted.name,
        view=fitted.view,
        rows=rows,
        estimate=estimate,
        chance=chance(fitted.name, *size) if rows == FITTED else 0.0,
        chance_deviation=held_out_deviation(len(cosines), size[1][1]),
        null=Null(tuple(null), (1 + reached) / (1 + len(null))) if null else None,
    )


def sample(count: int, most: int, seed: int) -> Order:
    """At most `most` of `count` pairs, at random and sorted."""
    return np.sort(np.random.default_rng([seed, 2]).choice(count, min(most, count), replace=False))


def _neighbours(paired: Paired, settings: AlignSettings) -> Overlap:
    which = sample(len(paired.pairs), settings.sampled, settings.seed)
    k = min(settings.neighbours, len(which) - 1)
    ids_a = neighbours_of(paired.a, paired.pairs.a[which], k, paired.dtype)
    ids_b = neighbours_of(paired.b, paired.pairs.b[which], k, paired.dtype)
    return overlap(ids_a, ids_b, max(1, settings.permutations), settings.seed)


def neighbours_of(table: TokenTable, which: Order, k: int, dtype: type[np.floating]) -> NDArray[np.int64]:
    """Places [n, k], within `which`, of each row's k nearest rows by cosine, after centring the given rows [n]."""
    rows = table.take(which, dtype)
    rows -= rows.mean(axis=0, dtype=np.float64).astype(dtype)
    return nearest(rows, k)


NEITHER = "neither"


@dataclass(frozen=True)
class Lean:
    """One measure of the table against the other model's two tables."""

    measure: str  # a map, or `neighbours`
    view: str  # `centred` or `raw`
    input: Estimate  # mean over held-out rows (sampled rows for neighbours) against the input table
    output: Estimate  # the same rows against the output table
    # output − input, with the interval of the bootstrap over rows, for the maps as they were fitted
    difference: Estimate
    toward: str  # `input` or `output` where that interval leaves out 0, else `neither`


@dataclass(frozen=True)
class Closer:
    """The answer, measure by measure."""

    pairs: int  # tokens in both vocabularies
    fitted_rows: int  # pairs that the maps were fitted on
    leans: tuple[Lean, ...]  # one for each map and view, and for neighbours. By chance a mean over held-out rows is 0
    left_out: tuple[tuple[str, str], ...]  # (map, why) of maps that do not apply
    neighbour_chance: float  # k/(n−1)
    seed: int  # of the split, the sample and the bootstrap


def closer(
    table: AnyTable,
    input_other: AnyTable,
    output_other: AnyTable,
    pairs: Pairs,
    settings: AlignSettings | None = None,
) -> Closer:
    """Compare how well the other model's input and its output table map onto `table`, on the same held-out tokens.

    Where `settings.held_out` is 0, they are all tokens, and maps were fitted on them.

    Args:
        table: the tied table, [V, d].
        input_other: the other model's input table, [V', d'].
        output_other: its output table, [V', d'].
        pairs: row of `table` (a) and row of the other's tables (b) of each token in both.
        settings: as for `align`; permutations are not used.

    Raises:
        CheckpointError: as `align` does.
    """
    settings = settings or AlignSettings()
    turned = Pairs(pairs.b, pairs.a, pairs.how)
    tied, first, second = as_table(table), as_table(input_other), as_table(output_other)
    found, left_out, fitted_rows = {}, [], 0
    for end, other in (("input", first), ("output", second)):
        dtype = settings.dtype(len(pairs), (other.width, tied.width))
        paired = Paired(other, tied, turned, dtype)
        found[end], why, fitted_rows = _cosines(paired, settings)
        left_out += [entry for entry in why if entry not in left_out]
    leans = [
        _lean(measure, view, found["input"][measure, view], output, settings.seed)
        for (measure, view), output in found["output"].items()
        if (measure, view) in found["input"]
    ]
    which = sample(len(pairs), settings.sampled, settings.seed)
    k = min(settings.neighbours, len(which) - 1)
    if k:
        ids = neighbours_of(tied, pairs.a[which], k, np.float32)
        with_input, with_output = (
            shared(ids, neighbours_of(other, pairs.b[which], k, np.float32)) for other in (first, second)
        )
        leans.append(_lean("neighbours", CENTRED, with_input, with_output, settings.seed))
    return Closer(len(pairs), fitted_rows, tuple(leans), tuple(left_out), k / (len(which) - 1), settings.seed)


def _cosines(
    paired: Paired, settings: AlignSettings
) -> tuple[dict[tuple[str, str], NDArray], list[tuple[str, str]], int]:
    fit, held = split(len(paired.pairs), settings.held_out, settings.scored, settings.seed)
    names, left_out = choose(settings.maps, settings.ranks, paired.widths, len(fit))
    products, _, _, error = sums(paired, fit)
    fitter = Fitter(products, names, settings.raw, error)
    maps = fitter.fit(fitter.cross)
    seen = held if len(held) else fit
    values = score(paired, maps, seen, seen)
    return {(m.name, m.view): v for m, v in zip(maps, values, strict=True)}, left_out, len(fit)


def _lean(measure: str, view: str, first: NDArray, second: NDArray, seed: int) -> Lean:
    difference = paired_bootstrap(first, second, seed)
    toward = "output" if difference.low > 0 else "input" if difference.high < 0 else NEITHER
    return Lean(measure, view, mean_interval(first), mean_interval(second), difference, toward)
