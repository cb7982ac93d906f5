"""Which table of the untied models do a comparison's tied tables resemble? Over seeds, beside training again.

Arms of one seed start from the same input table (`tiewise.training.model`), so a tied table and the input table of its
own seed are alike before any training. The answer is therefore taken from models of different seeds: each tied model
beside the untied model of the next seed, every model once. Pairs of one seed are given as well, under their name.

A table that training hardly moved is mostly its own random start, and aligns with nothing. CKA less its chance level is
therefore also given corrected for attenuation (Spearman 1904): divided by the geometric mean of what the two tables
score against themselves trained again. Noise that is independent of seed to seed cancels in it, and it is 1 where two
tables hold the same and differ by such noise and a rotation only. Scores of fitted maps cannot be corrected so: the map
itself is found less well where there is more noise.

Tokens of one frequency are alike at the output of any model, so that CKA is given once more for what is left of the
columns when functions of log frequency in the training text are taken out (`analysis.frequency_out`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.alignment import HELD_OUT, Alignment, Settings, align
from tiewise.analysis.alignment_maps import CENTRED
from tiewise.analysis.ends import Ends, ends_of
from tiewise.analysis.tables import Table
from tiewise.analysis.token_match import Pairs, one_vocabulary
from tiewise.checkpoint.facts import Progress, silent
from tiewise.checkpoint.folder import open_folder
from tiewise.data.blocks import token_counts
from tiewise.data.prepared import load_prepared
from tiewise.errors import DataError, RunError
from tiewise.inspection.run_alignment import (
    AGAIN,
    CKA,
    NEIGHBOURS,
    ONE_MODEL,
    OTHER_SEED,
    SAME_SEED,
    WITHOUT,
    Again,
    FrequencyShare,
    Leaning,
    OverSeeds,
    RunAlignment,
)
from tiewise.inspection.subject import FINAL, comparison_of
from tiewise.training.folder import DATA, folder_name
from tiewise.training.statistics import paired

Scores = dict[str, float]  # measure → score
Models = dict[int, Ends]  # seed → its final model


def run_alignment(
    run: str | os.PathLike[str], settings: Settings | None = None, progress: Progress = silent
) -> RunAlignment:
    """Compare the tables of all final models of a comparison.

    Args:
        run: a folder of `tiewise compare`.
        settings: as for `align`; permutations are not used. By default 2,048 rows are sampled for neighbours.
        progress: hears (what, comparisons done, in all).

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
    counts, missing = _counts(run, int(pairs.a.max(initial=-1)) + 1)
    settings = replace(settings or Settings(sampled=2048), permutations=0)
    bench = _Bench(pairs, settings, progress, None if counts is None else counts[pairs.a])
    bench.total = sum(4 * len(found.keys() & untied.keys()) + len(found) for found in one.values()) + 3 * len(untied)
    again = [*_again(bench, two[0], untied), *(x for arm, found in one.items() for x in _again(bench, arm, found))]
    leanings = [
        _corrected(leaning, two[0], again)
        for arm, found in one.items()
        for kind in (OTHER_SEED, SAME_SEED)
        for leaning in _leanings(bench, arm, kind, found, untied)
    ]
    return RunAlignment(
        untied=two[0],
        arms=tuple(one),
        seeds=tuple(untied),
        tokens=len(pairs),
        chance=bench.chance,
        leanings=tuple(leanings),
        again=tuple(again),
        left_out=(*left_out, *missing),
        counted=None if counts is None else int(counts.sum()),
        frequency=tuple(x for arm, found in ((two[0], untied), *one.items()) for x in _frequency(bench, arm, found)),
    )


@dataclass
class _Bench:
    """Scores of two tables of the run, over the same rows and with the same split every time."""

    pairs: Pairs
    settings: Settings
    progress: Progress
    counts: NDArray | None
    total: int = 0
    done: int = 0
    chance: Scores = field(default_factory=dict)
    shares: dict[int, float] = field(default_factory=dict)  # id of a table → share of it that frequency takes out

    def scores(self, first: Table, second: Table) -> Scores:
        """Held-out score of each map from `first` to `second`, overlap of neighbours, CKA less its chance."""
        found = align(first, second, self.pairs, self.settings, counts=self.counts)
        self.done += 1
        self.progress("alignment over seeds", self.done, max(self.total, self.done))
        scores = _held_out(found)
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


def _held_out(found: Alignment) -> Scores:
    return {s.map: s.estimate.value for s in found.scores if (s.view, s.rows) == (CENTRED, HELD_OUT)}


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


def _counts(run: Path, rows: int) -> tuple[NDArray | None, list[str]]:
    """(how often each row's token occurs in the training text, why that is not known)."""
    try:
        text = load_prepared(run / DATA)
        counts = token_counts(text.split("train"), text.vocab)
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


def _next(seeds: Sequence[int]) -> list[tuple[int, int]]:
    """Each seed with the one after it, the last with the first; nothing for one seed."""
    return list(zip(seeds, [*seeds[1:], seeds[0]], strict=True)) if len(seeds) > 1 else []


def _leanings(bench: _Bench, arm: str, kind: str, found: Models, untied: Models) -> Iterator[Leaning]:
    common = [seed for seed in found if seed in untied]
    beside = _next(common) if kind == OTHER_SEED else [(seed, seed) for seed in common]
    scored = []
    for seed, other in beside:
        table = found[seed].shared
        assert table is not None
        scored.append((bench.scores(untied[other].input, table), bench.scores(untied[other].output, table)))
    for measure in scored[0][0] if scored else ():
        first, second = ([ends[i].get(measure, math.nan) for ends in scored] for i in (0, 1))
        difference = _over_seeds([b - a for a, b in zip(first, second, strict=True)])
        yield Leaning(
            arm=arm,
            measure=measure,
            seeds=kind,
            input=_over_seeds(first),
            output=_over_seeds(second),
            difference=difference,
            toward=difference.toward,
            corrected_input=None,
            corrected_output=None,
            corrected_difference=None,
            pairs=tuple((*seeds, a, b) for seeds, a, b in zip(beside, first, second, strict=True)),
        )


def _again(bench: _Bench, arm: str, found: Models) -> Iterator[Again]:
    """The same table of two seeds, for each table that is stored; both ends of one model where these are two tables."""
    beside = _next(list(found))
    beside = beside[:1] if len(found) == 2 else beside  # the two ways round are one pair
    tables = {seed: _stored(ends) for seed, ends in found.items()}
    for end in next(iter(tables.values())):
        scored = [bench.scores(tables[a][end], tables[b][end]) for a, b in beside]
        yield from _rows(AGAIN.format(arm, end), scored)
    if all(ends.shared is None for ends in found.values()):
        yield from _rows(ONE_MODEL.format(arm), [bench.scores(ends.input, ends.output) for ends in found.values()])


def _frequency(bench: _Bench, arm: str, found: Models) -> Iterator[FrequencyShare]:
    tables = [_stored(ends) for ends in found.values()]
    for end in tables[0]:
        shares = [bench.shares[id(one[end])] for one in tables if id(one[end]) in bench.shares]
        if shares:
            yield FrequencyShare(f"{arm} {end}", _over_seeds(shares))


def _stored(ends: Ends) -> dict[str, Table]:
    return {"input": ends.input, "output": ends.output} if ends.shared is None else {"table": ends.shared}


def _rows(what: str, scored: list[Scores]) -> Iterator[Again]:
    for measure in scored[0] if scored else ():
        values = tuple(scores[measure] for scores in scored)
        yield Again(what, measure, _over_seeds(values), values)


def _corrected(leaning: Leaning, untied: str, again: Sequence[Again]) -> Leaning:
    if leaning.measure not in (CKA, *WITHOUT.values()) or leaning.seeds != OTHER_SEED:
        return leaning
    values = {entry.what: entry.values for entry in again if entry.measure == leaning.measure}
    own = values.get(AGAIN.format(leaning.arm, "table"), ())
    first, second = (
        _less_attenuated(scores, own, values.get(AGAIN.format(untied, end), ()))
        for end, scores in zip(("input", "output"), list(zip(*leaning.pairs, strict=True))[2:], strict=True)
    )
    apart = [b - a for a, b in zip(first, second, strict=True)] if first and second else None
    on_input, on_output, difference = (
        None if found is None else _over_seeds(found) for found in (first, second, apart)
    )
    return replace(leaning, corrected_input=on_input, corrected_output=on_output, corrected_difference=difference)


def _less_attenuated(scores: Sequence[float], own: Sequence[float], other: Sequence[float]) -> list[float] | None:
    """Each score over the geometric mean of its two tables' scores against themselves, which are of the same seeds."""
    if not own or not other or min(*own, *other) <= 0:
        return None
    at = range(len(scores))
    return [scores[i] / math.sqrt(own[i % len(own)] * other[i % len(other)]) for i in at]


def _over_seeds(values: Sequence[float]) -> OverSeeds:
    found = paired([0.0] * len(values), values)
    return OverSeeds(found.mean, found.low, found.high, found.n)
