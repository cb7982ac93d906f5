"""Resemblance of a tied table to the two tables of an untied model.

The models are two checkpoints, or the arms of a comparison over its seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.errors import CheckpointError
from tiewise.core.estimates import Estimate
from tiewise.core.measurement import NEITHER, Listing, Measurement, Quantity, count, plain
from tiewise.inspection.tables.align_tables import (
    CKA,
    CKA_CURVE,
    NEIGHBOURS,
    UNDETERMINED,
    Alignment,
    Lean,
    align,
    nearer_end,
    spelled,
    toward,
)
from tiewise.inspection.tables.model_tables import Ends, Pairs, by_text, ends_of, texts_of
from tiewise.inspection.tables.table_maps import CENTRED, CURVE, FEWEST, IDENTITY, ORTHOGONAL, AlignSettings
from tiewise.inspection.tables_over_seeds import AGAIN, ENDS, SAME_SEED, Leaning, OverSeeds, over_pairs, over_seeds
from tiewise.inspection.workspace import InspectedModel, NotApplicable, Workspace, section

KIN = 0.05  # cosine of stored rows that tables of unrelated starts do not reach
SCORES, SHARES = "mean cosine, share, or CKA above chance", "share of what training again gives"
ABOVE = "above zero: closer to the output"
READ_FIRST = (ORTHOGONAL, NEIGHBOURS, CKA)  # measures whose difference is reported first


@section(question="Which table of an untied model does the tied one resemble?", order=50)
def which_end(model: InspectedModel, workspace: Workspace) -> Measurement:
    """Compare the one table of a model with the two tables of another model.

    In a comparison, each tied arm is compared over the seeds.
    """
    if model.run is not None:
        return _of_comparison(model, model.run, workspace)
    if len(workspace.models) != 2:
        raise NotApplicable("needs two models, or a comparison")
    request = workspace.request
    first, second = workspace.models
    ends = workspace.once("ends", lambda: (ends_of(first.folder), ends_of(second.folder)))
    labels = first.label, second.label
    reporting = labels[_model_with_one_table(ends) or 0]
    if model.label != reporting:
        raise NotApplicable(f"this model is compared with {reporting}", f"see the answer of {reporting}")
    return across(*ends, labels, seed=request.seed, held_out=request.effort.held_out)


def _of_comparison(model: InspectedModel, run: Path, workspace: Workspace) -> Measurement:
    """Compare this tied arm with the untied arm of its comparison, over seeds."""
    settings = AlignSettings(seed=workspace.request.seed, sampled=2048)
    of_run = workspace.once("which_end", lambda: over_seeds(run, settings, workspace.training_counts))
    if model.label not in of_run.arms:
        arms = ", ".join(of_run.arms)
        problem = f"this arm is compared with {arms}"
        if model.label != of_run.untied:
            problem = f"only arms with one table are compared with {of_run.untied}"
        raise NotApplicable(problem, f"see the answer of {arms}")
    return measurement_over_seeds(of_run, model.label)


# two models


def _model_with_one_table(ends: tuple[Ends, Ends]) -> int | None:
    """Return which of two models has one stored table if the other has two."""
    first, second = ends
    if first.shared is not None and second.shared is None:
        return 0
    if first.shared is None and second.shared is not None:
        return 1
    return None


def across(
    first: Folder | Ends,
    second: Folder | Ends,
    labels: tuple[str, str] = ("A", "B"),
    settings: AlignSettings | None = None,
    seed: int = 0,
    held_out: float = AlignSettings.held_out,
) -> Measurement:
    """Align every table of one model with every table of another, by token text.

    `labels` are the models' names. If one model has one stored table and the other has two, the answer is which of the
    two it is closer to. By default `settings` are `AlignSettings.sized`, with this seed and share of held-out rows.

    Raises:
        CheckpointError: no output head, quantised tables, no tokenizer, too few tokens in both, or as `align`.
    """
    ends = _opened_ends(first), _opened_ends(second)
    models = _TwoModels(ends, labels, _matched_by_text(ends))
    pairs = models.usable()
    if settings is None:
        sized = AlignSettings.sized(len(pairs), models.width, seed, held_out)
        settings = replace(sized, sampled=8192)
    aligned = models.aligned(pairs, settings)
    quantities: list[Quantity] = []
    one = _model_with_one_table(ends)
    if one is None:
        answer = f"nothing to compare: both models have {_table_count(ends)}"
    else:
        other = labels[1 - one]
        leans = models.leans(one, pairs, settings)
        answer = _answer(leans, other)
        for lean in leans:
            quantities += _lean_quantities(lean, labels[one], other)
    for name, alignment in aligned.items():
        quantities += alignment.quantities(name)
    quantities += models.sizes(pairs)
    return Measurement(answer, tuple(quantities), notes=tuple(_notes(aligned, models)))


def _opened_ends(model: Folder | Ends) -> Ends:
    """Return the two ends of a model or of its folder."""
    return ends_of(model) if isinstance(model, Folder) else model


def _matched_by_text(ends: tuple[Ends, Ends]) -> Pairs:
    """Match the tokens of two models by their texts."""
    texts = []
    for end in ends:
        rows = max(end.input.rows, end.output.rows)
        texts.append(texts_of(end.folder, rows))
    return by_text(texts[0], texts[1])


@dataclass(frozen=True)
class _TwoModels:
    """Two models whose tokens are matched."""

    ends: tuple[Ends, Ends]
    labels: tuple[str, str]
    every: Pairs  # tokens that are in both vocabularies

    @property
    def width(self) -> int:
        """Return the width of the widest table."""
        first, second = self.ends
        return max(table.width for _, table in (*first.tables, *second.tables))

    def usable(self) -> Pairs:
        """Return the pairs without rows that are zero, repeated or not finite.

        Raises:
            CheckpointError: too few pairs are left.
        """
        first, second = self.ends
        pairs = self.every.without(first.unusable(), second.unusable())
        if len(pairs) < FEWEST:
            problem = f"vocabularies of {first.input.rows:,} and {second.input.rows:,} rows share"
            problem += f" {len(pairs):,} usable tokens"
            raise CheckpointError(problem, f"at least {FEWEST} are needed")
        return pairs

    def aligned(self, pairs: Pairs, settings: AlignSettings) -> dict[str, Alignment]:
        """Align every table of the first model with every table of the second, by name."""
        first, second = self.ends
        label_a, label_b = self.labels
        aligned: dict[str, Alignment] = {}
        for (name_a, a), (name_b, b) in product(first.tables, second.tables):
            aligned[f"{label_a} {name_a} – {label_b} {name_b}"] = align(a, b, pairs, settings)
        return aligned

    def sizes(self, pairs: Pairs) -> list[Quantity]:
        """Return the numbers of common tokens, of left-out tokens, and of rows of either model."""
        common = len(self.every)
        sizes = {"tokens in both vocabularies": common, "tokens left out": common - len(pairs)}
        for label, end in zip(self.labels, self.ends, strict=True):
            sizes[f"rows of {label}"] = end.input.rows
        return [Quantity(name, value, main=False) for name, value in sizes.items()]

    def leans(self, one: int, pairs: Pairs, settings: AlignSettings) -> tuple[Lean, ...]:
        """Compare the one table of model number `one` with both tables of the other model."""
        table, other = self.ends[one].shared, self.ends[1 - one]
        assert table is not None, "the model has one stored table"
        swapped = pairs if one == 0 else Pairs(pairs.b, pairs.a, pairs.how)
        return nearer_end(table, other.input, other.output, swapped, settings)


def _table_count(ends: tuple[Ends, Ends]) -> str:
    """Return how many tables each of two models has; both have equally many."""
    first, second = ends
    if first.shared is None:
        return "two tables"
    if first.tied and second.tied:
        return "one table"
    return "one stored table"


def _lean_quantities(lean: Lean, label: str, other: str) -> list[Quantity]:
    """Return one measure of the table of `label` with both tables of `other`.

    Their difference is the last quantity.
    """
    is_centred, unit = lean.view == CENTRED, "mean cosine, or share"
    name, score_figure, difference_figure = f"{spelled(lean.measure)}, not centred", "", ""
    if is_centred:
        name = spelled(lean.measure)
        score_figure, difference_figure = (
            f"The table of {label} against both of {other}",
            f"Output less input, for {label}",
        )
    quantities = []
    for end, score in zip(ENDS, (lean.input, lean.output), strict=True):
        of = f"{end} of {other}"
        quantities.append(
            Quantity.of_estimate(name, score, chance=lean.chance, of=of, unit=unit, main=False, figure=score_figure)
        )
    title = f"output − input, {name}"
    quantities.append(
        Quantity.of_estimate(
            title, lean.difference, chance=0.0, unit=unit, main=is_centred, figure=difference_figure, why=ABOVE
        )
    )
    return quantities


def _notes(aligned: dict[str, Alignment], models: _TwoModels) -> Iterator[str]:
    """Yield notes on common starts, on maps that do not apply, and on either model's tables."""
    for name, alignment in aligned.items():
        first_score = alignment.scores[0]  # centred, on the fitting rows
        if first_score.measure == IDENTITY and first_score.estimate.low > KIN:
            cosine = plain(first_score.estimate.value, 3)
            yield f"{name}: cosine {cosine} as they stand: a common start, in every score"
    reasons: dict[str, None] = {}  # each reason why a map does not apply, once
    for alignment in aligned.values():
        reasons |= dict.fromkeys(alignment.left_out)
    yield from reasons
    for label, end in zip(models.labels, models.ends, strict=True):
        for note in end.notes:
            yield f"{label}: {note}"


def _answer(leans: tuple[Lean, ...], other: str) -> str:
    """Return the table that the rotation is closer to, and the measures that differ from it."""
    sides: dict[str, str] = {}  # measure → the closer end
    for lean in leans:
        if lean.view == CENTRED:
            side = toward(lean.difference)
            sides[lean.measure] = side if side in ("input", "output") else NEITHER
    first = ORTHOGONAL if ORTHOGONAL in sides else next(iter(sides))
    by_side: dict[str, list[str]] = {}
    for name, side in sides.items():
        by_side.setdefault(side, []).append(spelled(name))
    alike = by_side.pop(sides[first])
    answer = f"the tied table is closest to the {sides[first]} table of {other} {spelled(first)}"
    if sides[first] == NEITHER:
        answer = f"the tied table is not clearly closer to either table of {other} {spelled(first)}"
    if len(alike) > 1:
        answer += f", and by {len(alike) - 1} of the {len(sides) - 1} other measures"
    for side, names in by_side.items():
        closer = "not clearly closer to either" if side == NEITHER else f"closer to the {side} table"
        answer += f"; {closer} {', '.join(names)}"
    return answer


# the arms of a comparison


def measurement_over_seeds(comparison: OverSeeds, arm: str) -> Measurement:
    """Report which table of the untied arm one tied arm resembles.

    The scores of a second training are the reference. The answer has both leans if there are both: with frequency, and
    without it.
    """
    seeds = ", ".join(str(seed) for seed in comparison.seeds)
    notes = [f"{count(comparison.tokens)} tokens, seeds {seeds}"]
    if comparison.counted is not None:
        notes.append(f"frequency: a cubic in log(count + 1) of {count(comparison.counted)} training tokens")
    stored = comparison.leaning(arm, IDENTITY, SAME_SEED)
    if stored is not None and stored.input.value > KIN:
        notes.append(f"of one seed, rows share a start: cosine {plain(stored.input.value, 2)}")
    notes += [f"left out: {reason}" for reason in comparison.left_out]
    header = ("seeds", "measure", "with the input", "with the output")
    return Measurement(
        answer=_answer_over_seeds(comparison, arm),
        quantities=tuple(_over_seeds(comparison, arm)),
        listings=(Listing("Every pair of models", header, tuple(_model_pairs(comparison, arm))),),
        notes=tuple(notes),
    )


def _model_pairs(comparison: OverSeeds, arm: str) -> Iterator[tuple[str, ...]]:
    """Yield the scores of every pair of models, by measure."""
    for leaning in _leanings_of(comparison, arm):
        for a, b, to_input, to_output in leaning.pairs:
            models = f"{arm} {a}, {comparison.untied} {b}"
            yield models, leaning.measure, plain(to_input, 6), plain(to_output, 6)


def _leanings_of(comparison: OverSeeds, arm: str) -> list[Leaning]:
    """Return every measure of an arm, between different seeds and within one."""
    return [leaning for leaning in comparison.leanings if leaning.arm == arm]


def _answer_over_seeds(comparison: OverSeeds, arm: str) -> str:
    """Return to which table an arm leans.

    It is taken from CKA corrected for attenuation, or else from the first available measure.
    """
    leanings = comparison.main_leanings(arm)
    if not leanings:
        return "there is no model to compare"
    difference = _corrected_difference(comparison, arm, CKA)
    if difference is None:
        first = leanings[0]
        answer = _side(comparison, first.difference)
        if toward(first.difference) == UNDETERMINED:
            return answer
        return f"{answer} {spelled(first.measure)}"
    answer = _side(comparison, difference)
    if comparison.counted is None:
        return f"{answer}; removing word frequency needs the training text"
    rest = "retraining reproduces too little to tell"
    without_frequency = _corrected_difference(comparison, arm, CKA_CURVE)
    if without_frequency is not None:
        rest = _side(comparison, without_frequency)
    if rest == answer:
        return f"{answer}, also without word frequency"
    return f"{answer}; without word frequency {rest}"


def _corrected_difference(comparison: OverSeeds, arm: str, measure: str) -> Estimate | None:
    """Return output − input of an arm, corrected for attenuation; None if it was not measured."""
    leaning = comparison.leaning(arm, measure)
    if leaning is None:
        return None
    return leaning.corrected.get("difference")


def _side(comparison: OverSeeds, difference: Estimate) -> str:
    """Return to which table of the untied arm a difference output − input leans."""
    side = toward(difference)
    if side == UNDETERMINED:
        return "at least three seeds are needed to tell"
    if side == NEITHER:
        return f"no lean to either table of {comparison.untied} was detected"
    return f"the tied table is closer to the {side} table of {comparison.untied}"


def _over_seeds(comparison: OverSeeds, arm: str) -> Iterator[Quantity]:
    """Yield corrected scores, all scores and differences, the reference, and frequency shares.

    The reference are the scores of a second training.
    """
    leanings, first = _leanings_of(comparison, arm), comparison.main_leanings(arm)
    for leaning in leanings:
        yield from _corrected_quantities(comparison, leaning)
    for leaning in sorted(leanings, key=lambda leaning: leaning not in first):
        yield from _score_quantities(comparison, leaning, is_first=leaning in first)
    # a corrected difference is reported first, if there is one
    corrected = [leaning for leaning in first if "difference" in leaning.corrected]
    read_first = [] if corrected else [leaning for leaning in first if leaning.measure in READ_FIRST]
    for leaning in leanings:
        yield _difference_quantity(leaning, is_main=leaning in read_first)
    for (tables, measure), again in comparison.again.items():
        yield Quantity.of_estimate(spelled(measure), over_pairs(again), of=tables, unit=SCORES, main=False)
    name, chance = "variance that is a curve in log frequency", CURVE / max(1, comparison.tokens - 1)
    for tables, share in comparison.frequency.items():
        yield Quantity.of_estimate(name, share, chance=chance, of=tables, unit="%", main=False)


def _difference_quantity(leaning: Leaning, is_main: bool) -> Quantity:
    """Return output − input of the scores of an arm."""
    why = ABOVE
    if leaning.seeds == SAME_SEED:
        why = f"{ABOVE}; one seed is one start"
    return Quantity.of_estimate(
        f"output − input, {spelled(leaning.measure)}", leaning.difference, chance=0.0, unit=SCORES,
        why=why, main=is_main, of=f"{leaning.arm}, models of the {leaning.seeds}",
        figure=f"Output less input, for {leaning.arm}",
    )  # fmt: skip


def _corrected_quantities(comparison: OverSeeds, leaning: Leaning) -> Iterator[Quantity]:
    """Yield an arm's scores with either table, relative to a second training of both."""
    arm, measure = leaning.arm, spelled(leaning.measure)
    for end, score in leaning.corrected.items():
        is_difference = end == "difference"
        name, of = "corrected", f"{arm} – {comparison.untied} {end}"
        figure = f"What {arm} has in common with either table"
        if is_difference:
            name, of, figure = "corrected output − input", "", ""
        title, why = f"{name}, {measure}", "1: the same but for noise and rotation"
        yield Quantity.of_estimate(
            title, score, chance=0.0, unit=SHARES, of=of, main=is_difference, figure=figure, why=why
        )


def _score_quantities(comparison: OverSeeds, leaning: Leaning, is_first: bool) -> Iterator[Quantity]:
    """Yield the scores with both tables.

    For the leanings that are read first, scores of the same table trained twice follow.
    """
    arm, untied, models = leaning.arm, comparison.untied, f"models of the {leaning.seeds}"
    name, figure = f"{spelled(leaning.measure)}, {models}", ""
    if is_first:
        name, figure = spelled(leaning.measure), f"Which end does the table of {arm} resemble?"
    for end, score in zip(ENDS, (leaning.input, leaning.output), strict=True):
        of = f"{arm} – {untied} {end}"
        yield Quantity.of_estimate(
            name, score, chance=leaning.chance, of=of, unit=SCORES, main=False, figure=figure, why=models
        )
        again = comparison.again.get((AGAIN.format(untied, end), leaning.measure))
        if is_first and again:
            of = f"{untied} {end}, trained again"
            yield Quantity.of_estimate(name, over_pairs(again), of=of, unit=SCORES, main=False, figure=figure)
