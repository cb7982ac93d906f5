"""Which table of the untied models do a comparison's tied tables resemble? Over seeds, beside training again.

Arms of one seed start from the same input table (`tiewise.training.model`), so a tied table and the input table of its
own seed are alike before any training. The answer is therefore taken from models of different seeds: each tied model
beside the untied model of every other seed. Pairs of one seed are given as well, under their name.

Such pairs share models, and models of one seed share their data's order: seeds, not pairs, are independent. Intervals
over pairs of seeds are therefore those of `analysis.estimates.jackknife`, which leaves out one seed at a time with all
of its pairs.

A table that training hardly moved is mostly its own random start, and aligns with nothing. CKA less its chance level is
therefore also given corrected for attenuation (Spearman 1904): divided by the geometric mean of what the two tables
score against themselves trained again. Noise that is independent of seed to seed cancels in it, and it is 1 where two
tables hold the same and differ by such noise and a rotation only. Scores of fitted maps cannot be corrected so: the map
itself is found less well where there is more noise.

Tokens of one frequency are alike at the output of any model, so that CKA is given once more for what is left of the
columns when functions of log frequency in the training text are taken out (`analysis.row_products`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, permutations
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.align_tables import HELD_OUT, NEITHER, AlignSettings, align
from tiewise.analysis.estimates import Estimate, jackknife, mean_interval
from tiewise.analysis.model_ends import Ends, ends_of
from tiewise.analysis.row_pairs import Pairs, one_vocabulary
from tiewise.analysis.row_products import CURVE, LINE
from tiewise.analysis.table_maps import CENTRED, ORTHOGONAL
from tiewise.analysis.token_table import TokenTable
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.core.errors import DataError, RunError
from tiewise.core.progress import progress
from tiewise.inspection.request import comparison_of
from tiewise.training.folder import FINAL, folder_name

Scores = dict[str, float]  # measure → score
Models = dict[int, Ends]  # seed → its final model
Beside = list[tuple[int, int]]  # seeds of the two models that stand side by side


CKA_LINE, CKA_CURVE = "CKA, frequency out (line)", "CKA, frequency out"
WITHOUT = {LINE: CKA_LINE, CURVE: CKA_CURVE}  # powers of log frequency taken out → measure
NEIGHBOURS, CKA, NOT_KNOWN = "neighbours", "CKA", "not known"
OTHER_SEED, SAME_SEED = "other seed", "same seed"
AGAIN, ONE_MODEL = "{} {}, two seeds", "{} input and output, one model"


def toward(difference: Estimate) -> str:
    """Of a difference output − input: the side that its interval speaks for, NEITHER, or NOT_KNOWN without one."""
    if math.isnan(difference.low):
        return NOT_KNOWN
    return "output" if difference.low > 0 else "input" if difference.high < 0 else NEITHER


@dataclass(frozen=True)
class Leaning:
    """One measure of an arm's one table against both tables of the untied arm; estimates count pairs of models."""

    arm: str  # with one table
    # a map (centred, held-out rows), `neighbours`, `CKA` (less its chance level), CKA_CURVE or CKA_LINE (the same of
    # what is left when a curve, or a line, in log frequency is taken out of every column)
    measure: str
    seeds: str  # `other seed` or `same seed`: which untied model each tied one stands beside
    input: Estimate  # score against the input table
    output: Estimate  # score against the output table
    difference: Estimate  # output − input, paired
    pairs: tuple[tuple[int, int, float, float], ...]  # (seed of the arm, of the untied model, input, output score)
    # corrected for attenuation; of CKA between different seeds, and only where training again gives more than 0
    corrected_input: Estimate | None = None
    corrected_output: Estimate | None = None
    corrected_difference: Estimate | None = None  # the second less the first, paired

    @property
    def toward(self) -> str:
        """The side that the difference speaks for."""
        return toward(self.difference)


@dataclass(frozen=True)
class Again:
    """How well tables of one arm align: the same table of two seeds, or both ends of one model."""

    what: str  # AGAIN of an arm and its `input`, `output` or `table`; ONE_MODEL of an arm
    measure: str  # as of `Leaning`
    score: Estimate  # over models, or over all pairs of seeds
    pairs: tuple[tuple[int, int, float], ...]  # (seed, other seed, score); of one model twice the same


@dataclass(frozen=True)
class OverSeeds:
    """What a comparison says of the question."""

    untied: str  # the arm with two tables that others are held against
    arms: tuple[str, ...]  # with one table
    seeds: tuple[int, ...]  # finished ones of the untied arm
    tokens: int  # rows that were compared
    chance: dict[str, float]  # measure → score of unrelated tables
    leanings: tuple[Leaning, ...]  # by arm, measure and kind of pair
    again: tuple[Again, ...]  # the same thing trained again
    left_out: tuple[str, ...]  # what could not be compared, and why
    counted: int | None  # tokens of the training text by which frequency was taken out; None where it is not there
    frequency: dict[str, Estimate]  # arm and end → share of its variance over tokens that is a curve in log frequency

    def leaning(self, arm: str, measure: str, seeds: str = OTHER_SEED) -> Leaning | None:
        """Return one of them; None where it was not measured."""
        return next((x for x in self.leanings if (x.arm, x.measure, x.seeds) == (arm, measure, seeds)), None)

    def told(self, arm: str) -> list[Leaning]:
        """An arm's measures between different seeds, the rotation first; with one seed, those of that seed."""
        for kind in (OTHER_SEED, SAME_SEED):
            chosen = [x for x in self.leanings if (x.arm, x.seeds) == (arm, kind)]
            if chosen:
                return sorted(chosen, key=lambda x: x.measure != ORTHOGONAL)
        return []

    def score_again(self, what: str, measure: str) -> Estimate | None:
        """How tables score that are the same thing trained again."""
        return next((x.score for x in self.again if (x.what, x.measure) == (what, measure)), None)


def over_seeds(
    run: str | os.PathLike[str],
    settings: AlignSettings,
    training_counts: Callable[[Path], NDArray],
) -> OverSeeds:
    """Compare the tables of all final models of a comparison.

    Args:
        run: a folder of `tiewise compare`.
        settings: as for `align`; permutations are not used.
        training_counts: how often each token occurs in a comparison's training text; DataError where it is not there.

    Raises:
        RunError: no finished comparison, or none of an arm with one table and an arm with two.
        CheckpointError: a final model that cannot be read.
    """
    run = Path(run)
    models, left_out = _final_models(run)
    two = [arm for arm, found in models.items() if all(ends.shared is None for ends in found.values())]
    one = {arm: found for arm, found in models.items() if arm not in two}
    if not two or not one:
        kind = "two tables" if one else "one table"
        raise RunError(f"{run} has no finished arm with {kind}", "compare at least tied and untied")
    untied = models[two[0]]
    pairs = _usable(models)
    counts, missing = _counts(run, training_counts, int(pairs.a.max(initial=-1)) + 1)
    settings = replace(settings, permutations=0)
    bench = _Bench(pairs, settings, None if counts is None else counts[pairs.a])
    bench.total = len(untied) ** 2
    bench.total += sum(2 * len(m.keys() & untied.keys()) ** 2 + len(m) * (len(m) - 1) // 2 for m in one.values())
    again = [*_again(bench, two[0], untied), *(x for arm, found in one.items() for x in _again(bench, arm, found))]
    leanings = [
        _corrected(leaning, two[0], again)
        for arm, found in one.items()
        for kind in (OTHER_SEED, SAME_SEED)
        for leaning in _leanings(bench, arm, kind, found, untied)
    ]
    return OverSeeds(
        untied=two[0],
        arms=tuple(one),
        seeds=tuple(untied),
        tokens=len(pairs),
        chance=bench.chance,
        leanings=tuple(leanings),
        again=tuple(again),
        left_out=(*left_out, *missing),
        counted=None if counts is None else int(counts.sum()),
        frequency=dict(x for arm, found in ((two[0], untied), *one.items()) for x in _frequency(bench, arm, found)),
    )


@dataclass
class _Bench:
    """Scores of two tables of the run, over the same rows and with the same split every time."""

    pairs: Pairs
    settings: AlignSettings
    counts: NDArray | None
    total: int = 0
    done: int = 0
    chance: Scores = field(default_factory=dict)
    shares: dict[int, float] = field(default_factory=dict)  # id of a table → share of it that frequency takes out

    def scores(self, first: TokenTable, second: TokenTable) -> Scores:
        """Held-out score of each map from `first` to `second`, overlap of neighbours, CKA less its chance."""
        found = align(first, second, self.pairs, self.settings, counts=self.counts)
        self.done += 1
        progress("alignment over seeds", self.done, max(self.total, self.done))
        scores = {s.map: s.estimate.value for s in found.scores if (s.view, s.rows) == (CENTRED, HELD_OUT)}
        self.chance |= dict.fromkeys(scores, 0.0)
        if found.neighbours is not None:
            scores[NEIGHBOURS] = found.neighbours.estimate.value
            self.chance[NEIGHBOURS] = found.neighbours.chance
        ckas = {CKA: found.similarity.cka}
        ckas |= {WITHOUT[x.powers]: x.cka for x in found.similarity.without if x.powers in WITHOUT}
        scores |= {measure: cka.value - cka.chance for measure, cka in ckas.items()}
        self.chance |= dict.fromkeys(ckas, 0.0)
        for without in found.similarity.without:  # the curve is last
            self.shares |= {id(first): without.share_a, id(second): without.share_b}
        return scores


def _final_models(run: Path) -> tuple[dict[str, Models], list[str]]:
    """(arm → seed → ends) of all that is finished, and what is not."""
    comparison = comparison_of(run)
    models: dict[str, Models] = {}
    left_out = []
    for arm in comparison.arms:
        ended = {result.seed: result for result in comparison.of(arm)}
        for seed in comparison.seeds:
            final = run / folder_name(arm) / f"seed-{seed}" / FINAL
            if seed not in ended or not final.is_dir():
                left_out.append(f"{arm}, seed {seed}: not finished")
            elif not math.isfinite(ended[seed].heldout_nll):
                left_out.append(f"{arm}, seed {seed}: diverged")
            else:
                models.setdefault(arm, {})[seed] = ends_of(open_folder(final))
    return models, left_out


def _counts(run: Path, training_counts: Callable[[Path], NDArray], rows: int) -> tuple[NDArray | None, list[str]]:
    """(how often each row's token occurs in the training text, why that is not known)."""
    try:
        counts = training_counts(run)
    except DataError as error:
        return None, [f"CKA without frequency: {error.what}"]
    found = np.zeros(max(rows, len(counts)), np.int64)  # tables may have more rows than there are tokens
    found[: len(counts)] = counts
    return found, []


def _usable(models: dict[str, Models]) -> Pairs:
    """Rows that every model has and none has zero, repeated or not finite."""
    every = [ends for found in models.values() for ends in found.values()]
    rows = min(table.rows for ends in every for _, table in ends.tables)
    mask = np.zeros(rows, bool)
    for ends in every:
        mask |= ends.unusable()[:rows]
    return one_vocabulary(rows, rows).without(mask)


def _leanings(bench: _Bench, arm: str, kind: str, found: Models, untied: Models) -> Iterator[Leaning]:
    common = [seed for seed in found if seed in untied]
    beside = list(permutations(common, 2)) if kind == OTHER_SEED else [(seed, seed) for seed in common]
    scored = []
    for seed, other in beside:
        table = found[seed].shared
        assert table is not None
        scored.append((bench.scores(untied[other].input, table), bench.scores(untied[other].output, table)))
    for measure in scored[0][0] if scored else ():
        first, second = ([ends[i].get(measure, math.nan) for ends in scored] for i in (0, 1))
        yield Leaning(
            arm=arm,
            measure=measure,
            seeds=kind,
            input=_over_pairs(beside, first),
            output=_over_pairs(beside, second),
            difference=_over_pairs(beside, [b - a for a, b in zip(first, second, strict=True)]),
            pairs=tuple((*seeds, a, b) for seeds, a, b in zip(beside, first, second, strict=True)),
        )


def _again(bench: _Bench, arm: str, found: Models) -> Iterator[Again]:
    """The same table of two seeds, for each table that is stored; both ends of one model where these are two tables."""
    beside = list(combinations(found, 2))
    tables = {seed: _stored(ends) for seed, ends in found.items()}
    for end in next(iter(tables.values())):
        scored = [bench.scores(tables[a][end], tables[b][end]) for a, b in beside]
        yield from _rows(AGAIN.format(arm, end), beside, scored)
    if all(ends.shared is None for ends in found.values()):
        scored = [bench.scores(ends.input, ends.output) for ends in found.values()]
        yield from _rows(ONE_MODEL.format(arm), [(seed, seed) for seed in found], scored)


def _frequency(bench: _Bench, arm: str, found: Models) -> Iterator[tuple[str, Estimate]]:
    tables = [_stored(ends) for ends in found.values()]
    for end in tables[0]:
        shares = [bench.shares[id(one[end])] for one in tables if id(one[end]) in bench.shares]
        if shares:
            yield f"{arm} {end}", mean_interval(shares)


def _stored(ends: Ends) -> dict[str, TokenTable]:
    return {"input": ends.input, "output": ends.output} if ends.shared is None else {"table": ends.shared}


def _rows(what: str, beside: Beside, scored: list[Scores]) -> Iterator[Again]:
    for measure in scored[0] if scored else ():
        values = [scores[measure] for scores in scored]
        pairs = tuple((*seeds, value) for seeds, value in zip(beside, values, strict=True))
        yield Again(what, measure, _over_pairs(beside, values), pairs)


def _corrected(leaning: Leaning, untied: str, again: Sequence[Again]) -> Leaning:
    if leaning.measure not in (CKA, *WITHOUT.values()) or leaning.seeds != OTHER_SEED:
        return leaning
    same = {entry.what: entry.pairs for entry in again if entry.measure == leaning.measure}
    seeds = list(dict.fromkeys(a for a, *_ in leaning.pairs))
    on_input, on_output = (
        _less_attenuated(
            [(a, b, score[at]) for a, b, *score in leaning.pairs],
            [pair for pair in same.get(AGAIN.format(leaning.arm, "table"), ()) if {*pair[:2]} <= {*seeds}],
            [pair for pair in same.get(AGAIN.format(untied, end), ()) if {*pair[:2]} <= {*seeds}],
        )
        for at, end in enumerate(("input", "output"))
    )

    apart = (lambda kept: on_output(kept) - on_input(kept)) if on_input and on_output else None
    first, second, difference = (
        None if found is None else replace(jackknife(found, seeds), rows=len(leaning.pairs))
        for found in (on_input, on_output, apart)
    )
    return replace(leaning, corrected_input=first, corrected_output=second, corrected_difference=difference)


Scored = Sequence[tuple[int, int, float]]  # seeds of a pair, and what it scores


def _less_attenuated(between: Scored, own: Scored, other: Scored) -> Callable[[Sequence[int]], float] | None:
    """Mean score over the geometric mean of its two tables' scores against themselves, all of the seeds asked for."""
    if not own or not other or min(score for *_, score in (*own, *other)) <= 0:
        return None
    return lambda kept: _mean(between, kept) / math.sqrt(_mean(own, kept) * _mean(other, kept))


def _mean(scored: Scored, kept: Sequence[int]) -> float:
    return fmean(score for a, b, score in scored if a in kept and b in kept)


def _over_pairs(beside: Beside, values: Sequence[float]) -> Estimate:
    """Mean over pairs of models, either all of two seeds or all of one."""
    if all(a == b for a, b in beside):
        return mean_interval(values)
    scored = [(*pair, value) for pair, value in zip(beside, values, strict=True)]
    seeds = sorted({seed for pair in beside for seed in pair})
    return replace(jackknife(lambda kept: _mean(scored, kept), seeds), rows=len(values))
