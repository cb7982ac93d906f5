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
columns when functions of log frequency in the training text are taken out (`analysis.table_maps`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, permutations, product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.hf_folder import open_folder
from tiewise.core.errors import DataError, RunError, progress
from tiewise.core.estimates import Estimate, jackknife, mean_interval
from tiewise.inspection.bench import comparison_of
from tiewise.inspection.tables.align_tables import CKA, HELD_OUT, NEIGHBOURS, Lean, align
from tiewise.inspection.tables.model_tables import Ends, TokenTable, ends_of, one_vocabulary
from tiewise.inspection.tables.table_maps import CENTRED, ORTHOGONAL, AlignSettings
from tiewise.training.folder import FINAL, seed_folder

Place = tuple[str, int, str]  # arm, seed, and which end: `input` and `output`, or `table` where there is one
Beside = tuple[int, int, Place, Place]  # seeds of two models, and the tables of theirs that are compared
Scored = Sequence[tuple[int, int, float]]  # seeds of the two models that stand side by side, and their score

OTHER_SEED, SAME_SEED = "other seed", "same seed"
AGAIN, ONE_MODEL = "{} {}, two seeds", "{} input and output, one model"
ENDS = ("input", "output")


@dataclass(frozen=True)
class Leaning(Lean):
    """A lean of an arm's one table between both of the untied arm: estimates count pairs of models."""

    arm: str = ""  # with one table
    seeds: str = OTHER_SEED  # or SAME_SEED: which untied model each tied one stands beside
    pairs: tuple[tuple[int, int, float, float], ...] = ()  # (seed of the arm, of the untied one, input, output score)
    # `input`, `output` and `difference` corrected for attenuation; of CKA between different seeds, and only where
    # training again gives more than 0
    corrected: Mapping[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True)
class OverSeeds:
    """What a comparison says of the question."""

    untied: str  # the arm with two tables that others are held against
    arms: tuple[str, ...]  # with one table
    seeds: tuple[int, ...]  # finished ones of the untied arm
    tokens: int  # rows that were compared
    # by arm, kind of pair and measure: maps on held-out rows, neighbours, CKA above chance
    leanings: tuple[Leaning, ...]
    # the same thing trained again: (AGAIN of an arm and its table, or ONE_MODEL of an arm; measure) → its pairs
    again: Mapping[tuple[str, str], Scored]
    left_out: tuple[str, ...]  # what could not be compared, and why
    counted: int | None  # tokens of the training text by which frequency was taken out; None where it is not there
    frequency: Mapping[str, Estimate]  # arm and end → share of its variance that is a curve in log frequency

    def leaning(self, arm: str, measure: str, seeds: str = OTHER_SEED) -> Leaning | None:
        """Return one of them; None where it was not measured."""
        return next((x for x in self.leanings if (x.arm, x.measure, x.seeds) == (arm, measure, seeds)), None)

    def told(self, arm: str) -> list[Leaning]:
        """An arm's measures between different seeds, the rotation first; with one seed, those of that seed."""
        own = [x for x in self.leanings if x.arm == arm]
        chosen = [x for x in own if x.seeds == OTHER_SEED] or own
        return sorted(chosen, key=lambda x: x.measure != ORTHOGONAL)


def over_seeds(
    run: str | os.PathLike[str], settings: AlignSettings, training_counts: Callable[[Path], NDArray]
) -> OverSeeds:
    """Compare the tables of all final models of a comparison, by `settings` of `align` but for permutations.

    `training_counts` says how often each token occurs in its training text; DataError where that is not there.

    Raises:
        RunError: no finished comparison, or none of an arm with one table and an arm with two.
        CheckpointError: a final model that cannot be read.
    """
    run = Path(run)
    models, left_out = _final_models(run)
    two = [arm for arm, found in models.items() if all(ends.shared is None for ends in found.values())]
    one = [arm for arm in models if arm not in two]
    if not two or not one:
        kind = "two tables" if one else "one table"
        raise RunError(f"{run} has no finished arm with {kind}", "compare at least tied and untied")
    untied, every = two[0], [ends for found in models.values() for ends in found.values()]
    rows = min(table.rows for ends in every for _, table in ends.tables)
    # rows that no model has zero, repeated or not finite
    pairs = one_vocabulary(rows, rows).without(np.any([ends.unusable()[:rows] for ends in every], axis=0))
    counts = None
    try:
        known = training_counts(run)
        counts = np.pad(known, (0, max(0, rows - len(known))))  # tables may have more rows than there are tokens
    except DataError as error:
        left_out.append(f"CKA without frequency: {error.what}")

    tables: dict[Place, TokenTable] = {
        (arm, seed, end): table
        for arm in (untied, *one)
        for seed, ends in models[arm].items()
        for end, table in (ends.tables if ends.shared is None else (("table", ends.shared),))
    }
    beside: dict[Any, list[Beside]] = {}  # what is compared: a table trained again, the ends of one model, …
    for arm in (untied, *one):
        for end in ENDS if arm == untied else ("table",):
            twice = combinations(models[arm], 2)
            beside[AGAIN.format(arm, end)] = [(a, b, (arm, a, end), (arm, b, end)) for a, b in twice]
        if arm == untied:
            beside[ONE_MODEL.format(arm)] = [(a, a, (arm, a, "input"), (arm, a, "output")) for a in models[arm]]
    for arm, end in product(one, ENDS):  # … and the one table of an arm with both ends of the untied models
        common = [seed for seed in models[arm] if seed in models[untied]]
        for kind, seeds in {OTHER_SEED: [*permutations(common, 2)], SAME_SEED: [(a, a) for a in common]}.items():
            beside[arm, kind, end] = [(a, b, (untied, b, end), (arm, a, "table")) for a, b in seeds]

    settings, of_pairs = replace(settings, permutations=0), None if counts is None else counts[pairs.a]
    scored: dict[Any, dict[str, list[tuple[int, int, float]]]] = {what: {} for what in beside}
    chance: dict[str, float] = {}  # measure → score of unrelated tables
    shares: dict[Place, float] = {}  # table → share of it that frequency takes out
    work = [(what, tables_of) for what, several in beside.items() for tables_of in several]
    for done, (what, (a, b, first, second)) in enumerate(work, 1):
        found = align(tables[first], tables[second], pairs, settings, of_pairs)
        for score in found.scores:
            value = score.estimate.value
            if score.measure.startswith(CKA):
                value -= score.chance
            elif score.measure == NEIGHBOURS or (score.rows, score.view) == (HELD_OUT, CENTRED):
                chance[score.measure] = score.chance
            else:
                continue
            scored[what].setdefault(score.measure, []).append((a, b, value))
        for share in found.taken_out.values():  # the curve is last
            shares |= {first: share[0], second: share[1]}
        progress("alignment over seeds", done, len(work))

    leanings = []
    for arm, kind in product(one, (OTHER_SEED, SAME_SEED)):
        for measure, to_input in scored[arm, kind, "input"].items():
            to_output = scored[arm, kind, "output"].get(measure) or [(a, b, math.nan) for a, b, _ in to_input]
            corrected = {}
            if measure.startswith(CKA) and kind == OTHER_SEED:
                own, *again = (scored[AGAIN.format(*of)][measure] for of in ((arm, "table"), *product([untied], ENDS)))
                corrected = _corrected((to_input, to_output), own, again)
            both = tuple((a, b, x, y) for (a, b, x), (_, _, y) in zip(to_input, to_output, strict=True))
            difference = over_pairs([(a, b, y - x) for a, b, x, y in both])
            lean = measure, over_pairs(to_input), over_pairs(to_output), difference, chance.get(measure, 0.0)
            leanings.append(Leaning(*lean, arm=arm, seeds=kind, pairs=both, corrected=corrected))
    frequency: dict[str, list[float]] = {}
    for arm, seed, end in (place for place in tables if place in shares):
        frequency.setdefault(f"{arm} {end}", []).append(shares[arm, seed, end])
    return OverSeeds(
        untied=untied,
        arms=tuple(one),
        seeds=tuple(models[untied]),
        tokens=len(pairs),
        leanings=tuple(leanings),
        again={(what, m): found for what in beside if isinstance(what, str) for m, found in scored[what].items()},
        left_out=tuple(left_out),
        counted=None if counts is None else int(counts.sum()),
        frequency={what: mean_interval(values) for what, values in frequency.items()},
    )


def _final_models(run: Path) -> tuple[dict[str, dict[int, Ends]], list[str]]:
    """(arm → seed → ends) of all that is finished, and what is not."""
    comparison = comparison_of(run)
    models: dict[str, dict[int, Ends]] = {}
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


def _corrected(between: Sequence[Scored], table: Scored, ends: Sequence[Scored]) -> dict[str, Estimate]:
    """Spearman's correction of a table's scores `between` it and both ends, and their difference.

    `table` and `ends` are what each scores with itself trained again; an end is left out where that is not above 0.
    """
    seeds = list(dict.fromkeys(a for a, *_ in between[0]))

    def share(end: int, kept: Sequence[int]) -> float:
        return _mean(between[end], kept) / math.sqrt(_mean(table, kept) * _mean(ends[end], kept))

    of_seeds: dict[str, Callable[[Sequence[int]], float]] = {
        name: partial(share, end)
        for end, name in enumerate(ENDS)
        if min(score for a, b, score in (*table, *ends[end]) if a in seeds and b in seeds) > 0
    }
    if len(of_seeds) == 2:
        of_seeds["difference"] = lambda kept: share(1, kept) - share(0, kept)
    return {name: replace(jackknife(of, seeds), rows=len(between[0])) for name, of in of_seeds.items()}


def _mean(scored: Scored, kept: Sequence[int]) -> float:
    return fmean(score for a, b, score in scored if a in kept and b in kept)


def over_pairs(scored: Scored) -> Estimate:
    """Mean over pairs of models, either all of two seeds or all of one."""
    if all(a == b for a, b, _ in scored):
        return mean_interval([score for *_, score in scored])
    seeds = sorted({seed for a, b, _ in scored for seed in (a, b)})
    return replace(jackknife(lambda kept: _mean(scored, kept), seeds), rows=len(scored))
