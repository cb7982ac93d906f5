"""Which table of the untied models do a comparison's tied tables resemble? Over seeds, beside training again.

Arms of one seed start from the same input table (`tiewise.training.run`), so a tied table and the input table of its
own seed are alike before any training. The answer is therefore taken from models of different seeds: each tied model
beside the untied model of every other seed. Pairs of one seed are given as well, under their name.

Such pairs share models, and models of one seed share their data's order: seeds, not pairs, are independent. Intervals
over pairs of seeds are therefore those of `core.estimates.jackknife`, which leaves out one seed at a time with all
of its pairs.

A table that training hardly moved is mostly its own random start, and aligns with nothing. CKA less its chance level is
therefore also given corrected for attenuation (Spearman 1904): divided by the geometric mean of what the two tables
score against themselves trained again. Noise that is independent of seed to seed cancels in it, and it is 1 where two
tables hold the same and differ by such noise and a rotation only. Scores of fitted maps cannot be corrected so: the map
itself is found less well where there is more noise.

Tokens of one frequency are alike at the output of any model, so that CKA is given once more for what is left of the
columns when functions of log frequency in the training text are taken out (`analysis.paired_rows`).
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

from tiewise.analysis.align_tables import CKA, HELD_OUT, NEIGHBOURS, Lean, align
from tiewise.analysis.model_tables import Ends, TokenTable, ends_of
from tiewise.analysis.paired_rows import Pairs, one_vocabulary
from tiewise.analysis.table_maps import CENTRED, ORTHOGONAL, AlignSettings
from tiewise.checkpoint.hf_folder import open_folder
from tiewise.core.errors import DataError, RunError
from tiewise.core.estimates import Estimate, jackknife, mean_interval
from tiewise.core.long_work import progress
from tiewise.inspection.request import comparison_of
from tiewise.training.folder import FINAL, folder_name

Scores = dict[str, float]  # measure → score
Models = dict[int, Ends]  # seed → its final model
Beside = list[tuple[int, int]]  # seeds of the two models that stand side by side

OTHER_SEED, SAME_SEED = "other seed", "same seed"
AGAIN, ONE_MODEL = "{} {}, two seeds", "{} input and output, one model"


@dataclass(frozen=True)
class Leaning(Lean):
    """A lean of an arm's one table between both of the untied arm: estimates count pairs of models."""

    arm: str = ""  # with one table
    seeds: str = OTHER_SEED  # or SAME_SEED: which untied model each tied one stands beside
    pairs: tuple[tuple[int, int, float, float], ...] = ()  # (seed of the arm, of the untied one, input, output score)
    # `input`, `output` and `difference` corrected for attenuation; of CKA between different seeds, and only where
    # training again gives more than 0
    corrected: dict[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True)
class Again:
    """How well tables of one arm align: the same table of two seeds, or both ends of one model."""

    what: str  # AGAIN of an arm and its `input`, `output` or `table`; ONE_MODEL of an arm
    measure: str  # as of `Score`
    score: Estimate  # over models, or over all pairs of seeds
    pairs: tuple[tuple[int, int, float], ...]  # (seed, other seed, score); of one model twice the same


@dataclass(frozen=True)
class OverSeeds:
    """What a comparison says of the question."""

    untied: str  # the arm with two tables that others are held against
    arms: tuple[str, ...]  # with one table
    seeds: tuple[int, ...]  # finished ones of the untied arm
    tokens: int  # rows that were compared
    leanings: tuple[
        Leaning, ...
    ]  # by arm, kind of pair and measure: maps on held-out rows, neighbours, CKA above chance
    again: tuple[Again, ...]  # the same thing trained again
    left_out: tuple[str, ...]  # what could not be compared, and why
    counted: int | None  # tokens of the training text by which frequency was taken out; None where it is not there
    frequency: dict[str, Estimate]  # arm and end → share of its variance over tokens that is a curve in log frequency

    def leaning(self, arm: str, measure: str, seeds: str = OTHER_SEED) -> Leaning | None:
        """Return one of them; None where it was not measured."""
        return next((x for x in self.leanings if (x.arm, x.measure, x.seeds) == (arm, measure, seeds)), None)

    def told(self, arm: str) -> list[Leaning]:
        """An arm's measures between different seeds, the rotation first; with one seed, those of that seed."""
        own = [x for x in self.leanings if x.arm == arm]
        chosen = [x for x in own if x.seeds == OTHER_SEED] or own
        return sorted(chosen, key=lambda x: x.measure != ORTHOGONAL)

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
    untied, every = models[two[0]], [ends for found in models.values() for ends in found.values()]
    rows = min(table.rows for ends in every for _, table in ends.tables)
    mask = np.any([ends.unusable()[:rows] for ends in every], axis=0)
    pairs = one_vocabulary(rows, rows).without(mask)  # rows that no model has zero, repeated or not finite
    counts = None
    try:
        known = training_counts(run)
        counts = np.pad(known, (0, max(0, rows - len(known))))  # tables may have more rows than there are tokens
    except DataError as error:
        left_out.append(f"CKA without frequency: {error.what}")
    bench = _Bench(pairs, replace(settings, permutations=0), None if counts is None else counts[pairs.a])
    bench.total = len(untied) ** 2
    bench.total += sum(2 * len(m.keys() & untied.keys()) ** 2 + len(m) * (len(m) - 1) // 2 for m in one.values())
    arms = {two[0]: untied, **one}
    again = [x for arm, found in arms.items() for x in _again(bench, arm, found)]
    leanings = tuple(
        _corrected(leaning, two[0], again)
        for arm, found in one.items()
        for kind in (OTHER_SEED, SAME_SEED)
        for leaning in _leanings(bench, arm, kind, found, untied)
    )
    shares: dict[str, list[float]] = {}
    for arm, found in arms.items():
        for ends in found.values():
            for end, table in _stored(ends).items():
                if id(table) in bench.shares:
                    shares.setdefault(f"{arm} {end}", []).append(bench.shares[id(table)])
    return OverSeeds(
        untied=two[0],
        arms=tuple(one),
        seeds=tuple(untied),
        tokens=len(pairs),
        leanings=leanings,
        again=tuple(again),
        left_out=tuple(left_out),
        counted=None if counts is None else int(counts.sum()),
        frequency={what: mean_interval(values) for what, values in shares.items()},
    )


@dataclass
class _Bench:
    """Scores of two tables of the run, over the same rows and with the same split every time."""

    pairs: Pairs
    settings: AlignSettings
    counts: NDArray | None
    total: int = 0
    done: int = 0
    chance: Scores = field(default_factory=dict)  # measure → score of unrelated tables
    shares: dict[int, float] = field(default_factory=dict)  # id of a table → share of it that frequency takes out

    def scores(self, first: TokenTable, second: TokenTable) -> Scores:
        """Held-out score of each map from `first` to `second`, overlap of neighbours, CKA less its chance."""
        found = align(first, second, self.pairs, self.settings, counts=self.counts)
        self.done += 1
        progress("alignment over seeds", self.done, max(self.total, self.done))
        scores = {}
        for score in found.scores:
            if score.measure == NEIGHBOURS or (score.rows, score.view) == (HELD_OUT, CENTRED):
                scores[score.measure], self.chance[score.measure] = score.estimate.value, score.chance
            elif score.measure.startswith(CKA):
                scores[score.measure] = score.estimate.value - score.chance
        for share in found.taken_out.values():  # the curve is last
            self.shares |= {id(first): share[0], id(second): share[1]}
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


def _stored(ends: Ends) -> dict[str, TokenTable]:
    return {"input": ends.input, "output": ends.output} if ends.shared is None else {"table": ends.shared}


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
            measure=measure,
            input=_over_pairs(beside, first),
            output=_over_pairs(beside, second),
            difference=_over_pairs(beside, [b - a for a, b in zip(first, second, strict=True)]),
            chance=bench.chance.get(measure, 0.0),
            arm=arm,
            seeds=kind,
            pairs=tuple((*seeds, a, b) for seeds, a, b in zip(beside, first, second, strict=True)),
        )


def _again(bench: _Bench, arm: str, found: Models) -> Iterator[Again]:
    """The same table of two seeds, for each table that is stored; both ends of one model where these are two tables."""
    beside = list(combinations(found, 2))
    tables = {seed: _stored(ends) for seed, ends in found.items()}
    kinds = [
        (AGAIN.format(arm, end), beside, [bench.scores(tables[a][end], tables[b][end]) for a, b in beside])
        for end in next(iter(tables.values()))
    ]
    if all(ends.shared is None for ends in found.values()):
        own = [bench.scores(ends.input, ends.output) for ends in found.values()]
        kinds.append((ONE_MODEL.format(arm), [(seed, seed) for seed in found], own))
    for what, seeds, scored in kinds:
        for measure in scored[0] if scored else ():
            values = [scores[measure] for scores in scored]
            pairs = tuple((*pair, value) for pair, value in zip(seeds, values, strict=True))
            yield Again(what, measure, _over_pairs(seeds, values), pairs)


def _corrected(leaning: Leaning, untied: str, again: Sequence[Again]) -> Leaning:
    """Spearman's correction, wherever the tables' scores against themselves trained again are above 0."""
    if not leaning.measure.startswith(CKA) or leaning.seeds != OTHER_SEED:
        return leaning
    same = {entry.what: entry.pairs for entry in again if entry.measure == leaning.measure}
    seeds = list(dict.fromkeys(a for a, *_ in leaning.pairs))

    def corrected(end: str, at: int) -> Callable[[Sequence[int]], float] | None:
        """Mean score over the geometric mean of its two tables' own, all of the seeds asked for."""
        between = [(a, b, score[at]) for a, b, *score in leaning.pairs]
        table, other = (
            [pair for pair in same.get(AGAIN.format(*of), ()) if {*pair[:2]} <= {*seeds}]
            for of in ((leaning.arm, "table"), (untied, end))
        )
        if not table or not other or min(score for *_, score in (*table, *other)) <= 0:
            return None
        return lambda kept: _mean(between, kept) / math.sqrt(_mean(table, kept) * _mean(other, kept))

    ends = {"input": corrected("input", 0), "output": corrected("output", 1)}
    found = {end: of_seeds for end, of_seeds in ends.items() if of_seeds is not None}
    if len(found) == 2:
        found["difference"] = lambda kept: found["output"](kept) - found["input"](kept)
    made = {end: replace(jackknife(of_seeds, seeds), rows=len(leaning.pairs)) for end, of_seeds in found.items()}
    return replace(leaning, corrected=made)


def _mean(scored: Sequence[tuple[int, int, float]], kept: Sequence[int]) -> float:
    return fmean(score for a, b, score in scored if a in kept and b in kept)


def _over_pairs(beside: Beside, values: Sequence[float]) -> Estimate:
    """Mean over pairs of models, either all of two seeds or all of one."""
    if all(a == b for a, b in beside):
        return mean_interval(values)
    scored = [(*pair, value) for pair, value in zip(beside, values, strict=True)]
    seeds = sorted({seed for pair in beside for seed in pair})
    return replace(jackknife(lambda kept: _mean(scored, kept), seeds), rows=len(values))
