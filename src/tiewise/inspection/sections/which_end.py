"""Which end of an untied model does a tied table resemble? Of two models, or of a comparison's arms over seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.errors import CheckpointError
from tiewise.core.estimates import Estimate
from tiewise.core.found import NEITHER, Found, Listing, Quantity, count, plain
from tiewise.inspection.bench import Bench, NotHere, Subject, section
from tiewise.inspection.tables.align_tables import (
    CKA,
    CKA_CURVE,
    NEIGHBOURS,
    NOT_KNOWN,
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

KIN = 0.05  # a cosine as they stand that two tables of unrelated starts do not reach
SCORES, SHARES = "mean cosine, share, or CKA above chance", "share of what training again gives"
ABOVE = "above zero: closer to the output"


@section(asks="Which end does a tied table resemble?", place=50)
def which_end(subject: Subject, bench: Bench) -> Found:
    """Compare a model with one table with a model with two; of a comparison each tied arm, over seeds."""
    request = bench.request
    if subject.run is not None:
        run, settings = subject.run, AlignSettings(seed=request.seed, sampled=2048)
        of_run = bench.once("which_end", lambda: over_seeds(run, settings, bench.training_counts))
        if subject.label not in of_run.arms:
            raise NotHere(f"{', '.join(of_run.arms)}: held against its two tables", "see there")
        return found_over_seeds(of_run, subject.label)
    if len(bench.subjects) != 2:
        raise NotHere("needs two models, or a comparison")
    first, second = bench.subjects
    ends = bench.once("ends", lambda: (ends_of(first.folder), ends_of(second.folder)))
    labels = first.label, second.label
    reporting = labels[_one(ends) or 0]
    if subject.label != reporting:
        raise NotHere(f"{reporting} is held against it", "see there")
    return across(*ends, labels, seed=request.seed, held_out=request.effort.held_out)


# two models


def _one(ends: tuple[Ends, Ends]) -> int | None:
    """Return which of two models has one stored table if the other has two."""
    first, second = (end.shared is not None for end in ends)
    if first == second:
        return None
    return 0 if first else 1


def across(
    first: Folder | Ends,
    second: Folder | Ends,
    labels: tuple[str, str] = ("A", "B"),
    settings: AlignSettings | None = None,
    seed: int = 0,
    held_out: float = AlignSettings.held_out,
) -> Found:
    """Align every end of one model with every end of another, tokens matched by text; `labels` are their names.

    Where one of the two has one stored table and the other has two, say which of the two it is closer to. By default
    `settings` are `AlignSettings.sized`, with this seed and share of rows held out.

    Raises:
        CheckpointError: no output head, quantised tables, no tokenizer, too few tokens in both, or as `align`.
    """
    ends = _opened_ends(first), _opened_ends(second)
    models = _TwoModels(ends, labels, _matched_by_text(ends))
    pairs = models.usable()
    width = max(table.width for end in ends for _, table in end.tables)
    settings = settings or replace(AlignSettings.sized(len(pairs), width, seed, held_out), sampled=8192)
    aligned = {
        f"{labels[0]} {name_a} – {labels[1]} {name_b}": align(a, b, pairs, settings)
        for (name_a, a), (name_b, b) in product(ends[0].tables, ends[1].tables)
    }
    quantities: list[Quantity] = []
    one = _one(ends)
    if one is None:
        answer = f"no question here: both models have {_table_count(ends)}"
    else:
        leans = models.leans(one, pairs, settings)
        answer = _answer(leans, labels[1 - one])
        for lean in leans:
            quantities += _lean_quantities(lean, labels[one], labels[1 - one])
    for name, alignment in aligned.items():
        quantities += alignment.quantities(name)
    quantities += [
        Quantity("tokens in both vocabularies", len(models.every), main=False),
        Quantity("tokens left out", len(models.every) - len(pairs), main=False),
    ]
    rows = {f"rows of {label}": end.input.rows for label, end in zip(labels, ends, strict=True)}
    quantities += [Quantity(name, value, main=False) for name, value in rows.items()]
    return Found(answer, tuple(quantities), notes=tuple(_notes(aligned, models)))


def _opened_ends(model: Folder | Ends) -> Ends:
    """Return the two ends of a model, however it is passed."""
    return ends_of(model) if isinstance(model, Folder) else model


def _matched_by_text(ends: tuple[Ends, Ends]) -> Pairs:
    """Match the tokens of two models by their texts."""
    first, second = (texts_of(end.folder, max(end.input.rows, end.output.rows)) for end in ends)
    return by_text(first, second)


@dataclass(frozen=True)
class _TwoModels:
    """Two models whose tokens are matched."""

    ends: tuple[Ends, Ends]
    labels: tuple[str, str]
    every: Pairs  # tokens that are in both vocabularies

    def usable(self) -> Pairs:
        """Return the pairs without rows that say nothing of their token; CheckpointError if these are too few."""
        first, second = self.ends
        pairs = self.every.without(first.unusable(), second.unusable())
        if len(pairs) < FEWEST:
            what = f"vocabularies of {first.input.rows:,} and {second.input.rows:,} rows share"
            what += f" {len(pairs):,} usable tokens"
            raise CheckpointError(what, f"at least {FEWEST} are needed")
        return pairs

    def leans(self, one: int, pairs: Pairs, settings: AlignSettings) -> tuple[Lean, ...]:
        """Compare the one table of model number `one` with both tables of the other model."""
        table, other = self.ends[one].shared, self.ends[1 - one]
        assert table is not None, "the model has one stored table"
        turned = pairs if one == 0 else Pairs(pairs.b, pairs.a, pairs.how)
        return nearer_end(table, other.input, other.output, turned, settings)


def _table_count(ends: tuple[Ends, Ends]) -> str:
    """Say how many tables each of two models has that have equally many."""
    if ends[0].shared is None:
        return "two tables"
    return "one table" if all(end.tied for end in ends) else "one stored table"


def _lean_quantities(lean: Lean, label: str, other: str) -> list[Quantity]:
    """Report one measure of the table of `label` with both tables of `other`, and their difference."""
    is_centred, unit = lean.view == CENTRED, "mean cosine, or share"
    name, against, apart = f"{spelled(lean.measure)}, not centred", "", ""
    if is_centred:
        name = spelled(lean.measure)
        against, apart = f"The table of {label} against both of {other}", f"Output less input, for {label}"
    scores = [
        Quantity.of_estimate(
            name, score, chance=lean.chance, of=f"{end} of {other}", unit=unit, main=False, figure=against
        )
        for end, score in zip(ENDS, (lean.input, lean.output), strict=True)
    ]
    difference = Quantity.of_estimate(
        f"output − input, {name}", lean.difference, chance=0.0, unit=unit, main=is_centred, figure=apart, why=ABOVE
    )
    return [*scores, difference]


def _notes(aligned: dict[str, Alignment], models: _TwoModels) -> Iterator[str]:
    """Yield common starts, maps that do not apply, and the notes of either model's tables."""
    for name, alignment in aligned.items():
        first_score = alignment.scores[0]  # centred, on rows that its map was fitted on
        if first_score.measure == IDENTITY and first_score.estimate.low > KIN:
            cosine = plain(first_score.estimate.value, 3)
            yield f"{name}: cosine {cosine} as they stand: a common start, in every score"
    yield from dict.fromkeys(why for alignment in aligned.values() for why in alignment.left_out)
    for label, end in zip(models.labels, models.ends, strict=True):
        for note in end.notes:
            yield f"{label}: {note}"


def _answer(leans: tuple[Lean, ...], other: str) -> str:
    """Name the end that the rotation is closer to, and the measures by which it is another."""
    sides: dict[str, str] = {}  # measure → the end that it is closer to
    for lean in leans:
        if lean.view == CENTRED:
            side = toward(lean.difference)
            sides[lean.measure] = "neither end clearly" if side == NEITHER else f"the {side}"
    first = ORTHOGONAL if ORTHOGONAL in sides else next(iter(sides))
    by_side: dict[str, list[str]] = {}
    for name, side in sides.items():
        by_side.setdefault(side, []).append(spelled(name))
    alike = by_side.pop(sides[first])
    answer = f"{sides[first]} of {other} {spelled(first)}"
    if len(alike) > 1:
        answer += f", and by {len(alike) - 1} more of {len(sides)} measures"
    for side, names in by_side.items():
        answer += f"; {side} {', '.join(names)}"
    return answer


# the arms of a comparison


def found_over_seeds(found: OverSeeds, arm: str) -> Found:
    """Say which table of the untied arm one tied arm resembles, and what training again gives.

    The answer has both leans where there are both: as it stands, and with frequency taken out.
    """
    notes = [f"{count(found.tokens)} tokens, seeds {', '.join(map(str, found.seeds))}"]
    if found.counted is not None:
        notes.append(f"frequency: a cubic in log(count + 1) of {count(found.counted)} training tokens")
    stored = found.leaning(arm, IDENTITY, SAME_SEED)
    if stored is not None and stored.input.value > KIN:
        notes.append(f"of one seed, rows share a start: cosine {plain(stored.input.value, 2)}")
    notes += [f"left out: {what}" for what in found.left_out]
    header = ("seeds", "measure", "with the input", "with the output")
    return Found(
        answer=_answer_over_seeds(found, arm),
        quantities=tuple(_over_seeds(found, arm)),
        listings=(Listing("Every pair of models", header, tuple(_model_pairs(found, arm))),),
        notes=tuple(notes),
    )


def _model_pairs(found: OverSeeds, arm: str) -> Iterator[tuple[str, ...]]:
    """Yield the scores of every pair of models, by measure."""
    for leaning in found.leanings:
        if leaning.arm == arm:
            for a, b, to_input, to_output in leaning.pairs:
                models = f"{arm} {a}, {found.untied} {b}"
                yield models, leaning.measure, plain(to_input, 6), plain(to_output, 6)


def _answer_over_seeds(found: OverSeeds, arm: str) -> str:
    """Say to which table an arm leans: by CKA corrected for attenuation, or else by the first measure there is."""
    leanings = found.told(arm)
    if not leanings:
        return "no model to compare"
    difference = _corrected_difference(found, arm, CKA)
    if difference is None:
        first = leanings[0]
        by_measure = "" if toward(first.difference) == NOT_KNOWN else f" {spelled(first.measure)}"
        return _side(found, first.difference) + by_measure
    answer = _side(found, difference)
    if found.counted is None:
        return f"{answer}; to take frequency out needs the training text"
    without_frequency = _corrected_difference(found, arm, CKA_CURVE)
    rest = _side(found, without_frequency) if without_frequency else "too little is found again to say"
    if rest == answer:
        return f"{answer}, with frequency taken out too"
    return f"{answer}; with frequency taken out {rest}"


def _corrected_difference(found: OverSeeds, arm: str, measure: str) -> Estimate | None:
    """Return how much closer to the output than to the input an arm is, corrected for attenuation; None without."""
    leaning = found.leaning(arm, measure)
    return None if leaning is None else leaning.corrected.get("difference")


def _side(found: OverSeeds, difference: Estimate) -> str:
    """Say to which table of the untied arm a difference output − input leans."""
    side = toward(difference)
    if side == NOT_KNOWN:
        return "fewer than three seeds cannot tell"
    return f"it shows no lean to either table of {found.untied}" if side == NEITHER else f"it leans to its {side} table"


def _over_seeds(found: OverSeeds, arm: str) -> Iterator[Quantity]:
    """Yield corrected scores, every score, every difference, scores of training again, and shares of frequency."""
    leanings, first = [x for x in found.leanings if x.arm == arm], found.told(arm)
    for leaning in leanings:
        yield from _corrected_quantities(found, leaning)
    for leaning in sorted(leanings, key=lambda x: x not in first):
        yield from _score_quantities(found, leaning, is_first=leaning in first)
    # where a difference could be corrected, that is the one to read first
    is_corrected = any("difference" in x.corrected for x in first)
    for leaning in leanings:
        is_main = leaning in first and leaning.measure in (ORTHOGONAL, NEIGHBOURS, CKA)
        yield Quantity.of_estimate(
            f"output − input, {spelled(leaning.measure)}", leaning.difference, chance=0.0, unit=SCORES,
            why=ABOVE + ("; one seed is one start" if leaning.seeds == SAME_SEED else ""),
            main=is_main and not is_corrected,
            of=f"{arm}, models of the {leaning.seeds}", figure=f"Output less input, for {arm}",
        )  # fmt: skip
    for (what, measure), again in found.again.items():
        yield Quantity.of_estimate(spelled(measure), over_pairs(again), of=what, unit=SCORES, main=False)
    name, chance = "variance that is a curve in log frequency", CURVE / max(1, found.tokens - 1)
    for what, share in found.frequency.items():
        yield Quantity.of_estimate(name, share, chance=chance, of=what, unit="%", main=False)


def _corrected_quantities(found: OverSeeds, leaning: Leaning) -> Iterator[Quantity]:
    """Yield what an arm has in common with either table, in shares of what each reaches if it is trained again."""
    arm, measure = leaning.arm, spelled(leaning.measure)
    for end, score in leaning.corrected.items():
        is_difference = end == "difference"
        name, of, figure = "corrected", f"{arm} – {found.untied} {end}", f"What {arm} has in common with either table"
        if is_difference:
            name, of, figure = "corrected output − input", "", ""
        yield Quantity.of_estimate(
            f"{name}, {measure}", score, chance=0.0, unit=SHARES, of=of, main=is_difference, figure=figure,
            why="1: the same but for noise and rotation",
        )  # fmt: skip


def _score_quantities(found: OverSeeds, leaning: Leaning, is_first: bool) -> Iterator[Quantity]:
    """Yield the scores with both tables; of leanings that are read first, those of the same table trained again too."""
    arm, untied, models = leaning.arm, found.untied, f"models of the {leaning.seeds}"
    name, figure = f"{spelled(leaning.measure)}, {models}", ""
    if is_first:
        name, figure = spelled(leaning.measure), f"Which end does the table of {arm} resemble?"
    for end, score in zip(ENDS, (leaning.input, leaning.output), strict=True):
        yield Quantity.of_estimate(
            name, score, chance=leaning.chance, of=f"{arm} – {untied} {end}", unit=SCORES,
            main=False, figure=figure, why=models,
        )  # fmt: skip
        again = found.again.get((AGAIN.format(untied, end), leaning.measure))
        if is_first and again:
            of = f"{untied} {end}, trained again"
            yield Quantity.of_estimate(name, over_pairs(again), of=of, unit=SCORES, main=False, figure=figure)
