"""Comparison of tied tables with the untied models' tables, over the seeds of a comparison.

The question is which untied table a tied one resembles, relative to a second training. Arms of one seed start from the
same input table (`tiewise.training.run`), so a tied table and the input table of its seed are alike before any
training.
The answer is therefore taken from models of different seeds: each tied model is compared with the untied model of every
other seed. Pairs of one seed are reported as well, under their name.

Such pairs share models, and models of one seed share the order of their data: seeds, not pairs, are independent.
Intervals over pairs of seeds are therefore those of `core.estimates.jackknife`, which leaves out one seed at a time
with
all of its pairs.

A table that training hardly moved is mostly its random start, and aligns with nothing. CKA above its chance level is
therefore also reported corrected for attenuation (Spearman 1904): divided by the geometric mean of the scores of both
tables against themselves, trained with another seed. Noise that is independent between seeds cancels. The corrected
score is 1 if two tables differ only by such noise and a rotation. Scores of fitted maps cannot be corrected in this
way:
noise also makes the fit of the map worse.

At the output of any model, tokens of equal frequency are alike. So CKA is also reported for the columns without
functions
of log frequency in the training text (`analysis.table_maps`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, combinations, permutations, product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from tiewise.checkpoint.hf_folder import open_folder
from tiewise.core.errors import DataError, RunError
from tiewise.core.estimates import Estimate, jackknife, mean_interval
from tiewise.core.progress import report_progress
from tiewise.inspection.tables.align_tables import CKA, HELDOUT, NEIGHBOURS, Alignment, Lean, Score, align
from tiewise.inspection.tables.model_tables import Ends, Ids, Pairs, TokenTable, ends_of, one_vocabulary
from tiewise.inspection.tables.table_maps import CENTRED, ORTHOGONAL, AlignSettings
from tiewise.inspection.workspace import comparison_of
from tiewise.training.folder import seed_folder
from tiewise.training.results import FINAL

Models = dict[str, dict[int, Ends]]  # arm → seed → both ends of its final model
Scored = Sequence[tuple[int, int, float]]  # seeds of the two compared models, and their score

OTHER_SEED, SAME_SEED = "other seed", "same seed"
AGAIN, ONE_MODEL = "{} {}, two seeds", "{} input and output, one model"
ENDS = ("input", "output")
SHARED = "table"  # name of the one table of a tied model


class TableOf(NamedTuple):
    """One table of a final model."""

    arm: str
    seed: int
    end: str  # `input` and `output`, or `table` for a tied model


class TablePair(NamedTuple):
    """Two tables to align; maps go from the first to the second."""

    seeds: tuple[int, int]  # of the two models, in the order of the results
    first: TableOf
    second: TableOf


class Against(NamedTuple):
    """Group of pairs: the one table of an arm against one end of the untied models."""

    arm: str
    seeds: str  # OTHER_SEED or SAME_SEED
    end: str  # the end of the untied models


Group = str | Against  # a name of AGAIN or ONE_MODEL: one table trained twice, or the ends of one model


@dataclass(frozen=True)
class Leaning(Lean):
    """A lean of an arm's one table between both tables of the untied arm.

    Its estimates are over pairs of models.
    """

    arm: str = ""  # name of the arm with one table
    seeds: str = OTHER_SEED  # OTHER_SEED or SAME_SEED: the untied models that each tied one is compared with
    pairs: tuple[tuple[int, int, float, float], ...] = ()  # (both models' seeds, input score, output score)
    # `input`, `output` and `difference` corrected for attenuation; only for CKA between different seeds, and only
    # if a second training scores above 0
    corrected: Mapping[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True)
class OverSeeds:
    """Alignment of the tables of a comparison, over its seeds."""

    untied: str  # the arm with two tables that others are compared with
    arms: tuple[str, ...]  # arms with one table
    seeds: tuple[int, ...]  # finished seeds of the untied arm
    tokens: int  # number of compared rows
    # by arm, kind of pair and measure: maps on held-out rows, neighbours, CKA above chance
    leanings: tuple[Leaning, ...]
    # (AGAIN of an arm and its table, or ONE_MODEL of an arm; measure) → scores of its pairs
    again: Mapping[tuple[str, str], Scored]
    left_out: tuple[str, ...]  # models and measures that could not be compared, and why
    counted: int | None  # tokens of the training text from which frequencies were counted; None if it is missing
    frequency: Mapping[str, Estimate]  # arm and end → share of its variance that a curve in log frequency explains

    def leaning(self, arm: str, measure: str, seeds: str = OTHER_SEED) -> Leaning | None:
        """Return one leaning; None if it was not measured."""
        for leaning in self.leanings:
            if (leaning.arm, leaning.measure, leaning.seeds) == (arm, measure, seeds):
                return leaning
        return None

    def main_leanings(self, arm: str) -> list[Leaning]:
        """Return an arm's leanings between different seeds, the rotation first.

        With one seed, they are those of that seed.
        """
        of_arm = [leaning for leaning in self.leanings if leaning.arm == arm]
        of_other_seeds = [leaning for leaning in of_arm if leaning.seeds == OTHER_SEED]
        return sorted(of_other_seeds or of_arm, key=lambda leaning: leaning.measure != ORTHOGONAL)


def over_seeds(
    run: str | os.PathLike[str], settings: AlignSettings, training_counts: Callable[[Path], Ids]
) -> OverSeeds:
    """Compare the tables of all final models of a comparison.

    `settings` are those of `align`, except that there are no permutations. `training_counts` returns how often each
    token
    occurs in a run's training text, or raises DataError if the text is missing.

    Raises:
        RunError: no finished comparison, or none of an arm with one table and an arm with two.
        CheckpointError: a final model that cannot be read.
    """
    run = Path(run)
    models, left_out = _final_models(run)
    untied, arms = _arms_by_tables(run, models)
    rows = min(min(ends.input.rows, ends.output.rows) for ends in _all_ends(models))
    pairs = _usable_pairs(models, rows)
    counts, counted = None, None
    try:
        counts = _padded(training_counts(run), rows)
        counted = int(counts.sum())
    except DataError as error:
        left_out.append(f"CKA without frequency: {error.problem}")

    compared = {arm: models[arm] for arm in (untied, *arms)}
    tables = _tables_by_key(compared)
    groups = _repeats(compared, untied) | _against_untied(compared, untied, arms)
    scores = _align_groups(groups, tables, pairs, settings, counts)
    return OverSeeds(
        untied=untied,
        arms=arms,
        seeds=tuple(models[untied]),
        tokens=len(pairs),
        leanings=tuple(scores.leanings(untied, arms)),
        again=scores.again(),
        left_out=tuple(left_out),
        counted=counted,
        frequency=scores.frequency_shares(tables),
    )


# the models and their pairs of tables


def _final_models(run: Path) -> tuple[Models, list[str]]:
    """Open all finished models; return them, and notes on the unfinished ones."""
    comparison = comparison_of(run)
    models: Models = {}
    left_out = []
    losses = {(result.arm, result.seed): result.heldout_nll for result in comparison.runs}
    for arm, seed in product(comparison.arms, comparison.seeds):
        final = seed_folder(run, arm, seed) / FINAL
        if (arm, seed) not in losses or not final.is_dir():
            left_out.append(f"{arm}, seed {seed}: not finished")
        elif not math.isfinite(losses[arm, seed]):
            left_out.append(f"{arm}, seed {seed}: diverged")
        else:
            models.setdefault(arm, {})[seed] = ends_of(open_folder(final))
    return models, left_out


def _all_ends(models: Models) -> list[Ends]:
    """Return the ends of every model."""
    every: list[Ends] = []
    for of_arm in models.values():
        every += of_arm.values()
    return every


def _arms_by_tables(run: Path, models: Models) -> tuple[str, tuple[str, ...]]:
    """Return the first arm with two tables, and the arms with one.

    An arm has one table if any of its models has.
    """
    with_two: list[str] = []
    with_one: list[str] = []
    for arm, of_arm in models.items():
        sharing = [seed for seed, ends in of_arm.items() if ends.shared is not None]
        (with_one if sharing else with_two).append(arm)
    fix = "compare at least tied and untied"
    if not with_one:
        raise RunError(f"{run} has no finished arm with one table", fix)
    if not with_two:
        raise RunError(f"{run} has no finished arm with two tables", fix)
    return with_two[0], tuple(with_one)


def _usable_pairs(models: Models, rows: int) -> Pairs:
    """Pair the first `rows` rows of all tables.

    A row that is zero, repeated or not finite in any model is left out.
    """
    unusable = [ends.unusable()[:rows] for ends in _all_ends(models)]
    is_unusable = np.any(unusable, axis=0)
    return one_vocabulary(rows, rows).without(is_unusable)


def _padded(counts: Ids, rows: int) -> Ids:
    """Extend counts by zeros to a table's rows; a table may have more rows than tokens."""
    return np.pad(counts, (0, max(0, rows - len(counts))))


def _tables_by_key(models: Models) -> dict[TableOf, TokenTable]:
    """Return every table of the compared models, by arm, seed and end."""
    tables: dict[TableOf, TokenTable] = {}
    for arm, of_arm in models.items():
        for seed, ends in of_arm.items():
            if ends.shared is not None:
                tables[TableOf(arm, seed, SHARED)] = ends.shared
                continue
            for end, table in ends.tables:
                tables[TableOf(arm, seed, end)] = table
    return tables


def _repeats(models: Models, untied: str) -> dict[Group, list[TablePair]]:
    """Pair each table with itself of every other seed.

    The two ends of each untied model are also a pair.
    """
    groups: dict[Group, list[TablePair]] = {}
    for arm, of_arm in models.items():
        if arm != untied:
            groups[AGAIN.format(arm, SHARED)] = _trained_again(arm, SHARED, of_arm)
            continue
        for end in ENDS:
            groups[AGAIN.format(arm, end)] = _trained_again(arm, end, of_arm)
        groups[ONE_MODEL.format(arm)] = [
            TablePair((seed, seed), TableOf(arm, seed, "input"), TableOf(arm, seed, "output")) for seed in of_arm
        ]
    return groups


def _trained_again(arm: str, end: str, seeds: Iterable[int]) -> list[TablePair]:
    """Pair one table of an arm with itself of every other seed."""
    return [TablePair((a, b), TableOf(arm, a, end), TableOf(arm, b, end)) for a, b in combinations(seeds, 2)]


def _against_untied(models: Models, untied: str, arms: Sequence[str]) -> dict[Group, list[TablePair]]:
    """Pair the one table of each arm with both ends of the untied models.

    The untied models are those of other seeds, and separately those of the same seed.
    """
    groups: dict[Group, list[TablePair]] = {}
    for arm, end in product(arms, ENDS):
        common = [seed for seed in models[arm] if seed in models[untied]]
        seed_pairs = {OTHER_SEED: [*permutations(common, 2)], SAME_SEED: [(seed, seed) for seed in common]}
        for kind, both in seed_pairs.items():
            groups[Against(arm, kind, end)] = [
                TablePair((a, b), TableOf(untied, b, end), TableOf(arm, a, SHARED)) for a, b in both
            ]
    return groups


# their scores


@dataclass
class _Scores:
    """Scores of all pairs of tables, by group and measure."""

    by_group: dict[Group, dict[str, list[tuple[int, int, float]]]]
    chance: dict[str, float] = field(default_factory=dict)  # measure → score of unrelated tables
    taken_out: dict[TableOf, float] = field(default_factory=dict)  # table → share of it that frequency explains

    def add(self, group: Group, pair: TablePair, alignment: Alignment) -> None:
        """Add the scores of one alignment."""
        for score in alignment.scores:
            if not _is_reported(score):
                continue
            value = score.estimate.value
            if score.measure.startswith(CKA):
                value -= score.chance
            else:
                self.chance[score.measure] = score.chance
            self.by_group[group].setdefault(score.measure, []).append((*pair.seeds, value))
        for first, second in alignment.taken_out.values():  # the curve comes last, so it overwrites the line
            self.taken_out[pair.first] = first
            self.taken_out[pair.second] = second

    def again(self) -> dict[tuple[str, str], Scored]:
        """Return the scores of repeated trainings and of the two ends of one model.

        The keys are (group, measure).
        """
        again: dict[tuple[str, str], Scored] = {}
        for group, by_measure in self.by_group.items():
            if isinstance(group, Against):
                continue
            for measure, scored in by_measure.items():
                again[group, measure] = scored
        return again

    def leanings(self, untied: str, arms: Sequence[str]) -> Iterator[Leaning]:
        """Yield the leaning of each arm's one table, by every measure."""
        for arm, seeds in product(arms, (OTHER_SEED, SAME_SEED)):
            of_output = self.by_group[Against(arm, seeds, "output")]
            for measure, to_input in self.by_group[Against(arm, seeds, "input")].items():
                to_output = of_output.get(measure) or [(a, b, math.nan) for a, b, _ in to_input]
                yield self._leaning(untied, _BothEnds(arm, seeds, measure, to_input, to_output))

    def _leaning(self, untied: str, scores: _BothEnds) -> Leaning:
        """Return one leaning with its intervals over seeds.

        CKA between different seeds is corrected as well.
        """
        pairs = scores.pairs()
        corrected: dict[str, Estimate] = {}
        if scores.measure.startswith(CKA) and scores.seeds == OTHER_SEED:
            attenuation = _Attenuation(
                table=self._trained_again(scores.arm, SHARED, scores.measure),
                with_input=scores.input,
                with_output=scores.output,
                input=self._trained_again(untied, "input", scores.measure),
                output=self._trained_again(untied, "output", scores.measure),
            )
            corrected = attenuation.corrected()
        differences = [(a, b, to_output - to_input) for a, b, to_input, to_output in pairs]
        return Leaning(
            scores.measure,
            over_pairs(scores.input),
            over_pairs(scores.output),
            over_pairs(differences),
            self.chance.get(scores.measure, 0.0),
            arm=scores.arm,
            seeds=scores.seeds,
            pairs=pairs,
            corrected=corrected,
        )

    def _trained_again(self, arm: str, end: str, measure: str) -> Scored:
        """Return the scores of one table of an arm with itself of other seeds."""
        return self.by_group[AGAIN.format(arm, end)][measure]

    def frequency_shares(self, tables: Iterable[TableOf]) -> dict[str, Estimate]:
        """Return the share of each table that frequency explains, as a mean over its arm's models.

        The keys are arm and end.
        """
        shares: dict[str, list[float]] = {}
        for key in tables:
            if key in self.taken_out:
                shares.setdefault(f"{key.arm} {key.end}", []).append(self.taken_out[key])
        return {name: mean_interval(values) for name, values in shares.items()}


@dataclass(frozen=True)
class _BothEnds:
    """Scores of an arm's one table against both ends of the untied models, by one measure."""

    arm: str
    seeds: str  # OTHER_SEED or SAME_SEED
    measure: str
    input: Scored
    output: Scored  # of the same pairs of models

    def pairs(self) -> tuple[tuple[int, int, float, float], ...]:
        """Join the two scores of each pair of models.

        A result is (seed of the arm, seed of the untied model, score with the input, score with the output).
        """
        both = zip(self.input, self.output, strict=True)
        return tuple((a, b, to_input, to_output) for (a, b, to_input), (_, _, to_output) in both)


def _is_reported(score: Score) -> bool:
    """Return True for CKA, neighbours, and maps on centred held-out rows."""
    if score.measure.startswith(CKA) or score.measure == NEIGHBOURS:
        return True
    return (score.rows, score.view) == (HELDOUT, CENTRED)


def _align_groups(
    groups: Mapping[Group, list[TablePair]],
    tables: Mapping[TableOf, TokenTable],
    pairs: Pairs,
    settings: AlignSettings,
    counts: Ids | None,
) -> _Scores:
    """Align every pair of tables, also without frequency if there are counts.

    `counts` [rows] are those of the training text.
    """
    settings = replace(settings, permutations=0)
    of_pairs = None if counts is None else counts[pairs.a]
    scores = _Scores({group: {} for group in groups})
    total = sum(len(table_pairs) for table_pairs in groups.values())
    done = 0
    for group, table_pairs in groups.items():
        for pair in table_pairs:
            alignment = align(tables[pair.first], tables[pair.second], pairs, settings, of_pairs)
            scores.add(group, pair, alignment)
            done += 1
            report_progress("alignment over seeds", done, total)
    return scores


@dataclass(frozen=True)
class _Attenuation:
    """Scores of a table with both ends, and of all three trained with another seed."""

    table: Scored
    with_input: Scored
    with_output: Scored
    input: Scored
    output: Scored

    def corrected(self) -> dict[str, Estimate]:
        """Correct both scores and their difference for attenuation (Spearman).

        An end is left out if a pair of it, or of the table, with itself from another seed scores 0 or less.
        """
        seeds = list(dict.fromkeys(a for a, _, _ in self.with_input))
        statistics: dict[str, Callable[[Sequence[int]], float]] = {}
        if self._scores_positive(self.input, seeds):
            statistics["input"] = self._input_share
        if self._scores_positive(self.output, seeds):
            statistics["output"] = self._output_share
        if len(statistics) == len(ENDS):
            statistics["difference"] = self._difference
        corrected = {}
        for name, statistic in statistics.items():
            estimate = jackknife(statistic, seeds)
            corrected[name] = replace(estimate, rows=len(self.with_input))
        return corrected

    def _scores_positive(self, end: Scored, seeds: Sequence[int]) -> bool:
        """Return True if table and end score above 0 with themselves."""
        return min(_scores_among((*self.table, *end), seeds)) > 0

    def _input_share(self, seeds: Sequence[int]) -> float:
        """Return the corrected score with the input tables of some seeds."""
        repeated = _mean(self.table, seeds) * _mean(self.input, seeds)
        return _mean(self.with_input, seeds) / math.sqrt(repeated)

    def _output_share(self, seeds: Sequence[int]) -> float:
        """Return the corrected score with the output tables of some seeds."""
        repeated = _mean(self.table, seeds) * _mean(self.output, seeds)
        return _mean(self.with_output, seeds) / math.sqrt(repeated)

    def _difference(self, seeds: Sequence[int]) -> float:
        """Return output − input of the corrected scores of some seeds."""
        return self._output_share(seeds) - self._input_share(seeds)


def _scores_among(scored: Scored, seeds: Sequence[int]) -> list[float]:
    """Return the scores of the pairs whose two models are of these seeds."""
    return [score for a, b, score in scored if {a, b}.issubset(seeds)]


def _mean(scored: Scored, seeds: Sequence[int]) -> float:
    """Return the mean score of the pairs whose two models are of these seeds."""
    return fmean(_scores_among(scored, seeds))


def over_pairs(scored: Scored) -> Estimate:
    """Return the mean over pairs of models, either all of two seeds or all of one."""
    seed_pairs = {(a, b) for a, b, _ in scored}
    if all(a == b for a, b in seed_pairs):
        return mean_interval([score for *_, score in scored])
    seeds = sorted(set(chain.from_iterable(seed_pairs)))
    estimate = jackknife(partial(_mean, scored), seeds)
    return replace(estimate, rows=len(scored))
