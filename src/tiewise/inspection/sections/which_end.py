"""Which end of an untied model does a tied table resemble? Of two models, or of a comparison's arms over seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tiewise.analysis.align_tables import NEITHER, Alignment, AlignSettings, Closer, align, closer
from tiewise.analysis.model_ends import Ends, ends_of
from tiewise.analysis.row_pairs import FEWEST, Pairs, by_text
from tiewise.analysis.row_products import CURVE
from tiewise.analysis.table_maps import CENTRED, IDENTITY, ORTHOGONAL
from tiewise.checkpoint.hf_folder import Folder
from tiewise.core.errors import CheckpointError
from tiewise.core.found import Found, Listing, Quantity
from tiewise.core.numerals import count, plain
from tiewise.inspection.request import Subject
from tiewise.inspection.section import Bench, NotHere, section
from tiewise.inspection.sections.alignment import left_out, measures, sized, spelled
from tiewise.inspection.tables_over_seeds import (
    AGAIN,
    CKA,
    CKA_CURVE,
    NEIGHBOURS,
    NOT_KNOWN,
    OTHER_SEED,
    SAME_SEED,
    Leaning,
    OverSeeds,
    over_seeds,
    toward,
)

KIN = 0.05  # a cosine as they stand that two tables of unrelated starts do not reach
SCORES, SHARES = "mean cosine, share, or CKA above chance", "share of what training again gives"


@dataclass(frozen=True)
class EndPair:
    """One end of the first model held beside one end of the second; an end is `input`, `output` or `table` (tied)."""

    first: str
    second: str
    alignment: Alignment


@dataclass(frozen=True)
class AcrossFound:
    """The ends of two models, tokens matched by their text."""

    labels: tuple[str, str]  # what the two models are called
    tied: tuple[bool, bool]
    rows: tuple[int, int]  # of each vocabulary
    shared: int  # tokens in both, before any is left out
    unusable: int  # of these, left out because a row is zero, repeated or not finite
    pairs: tuple[EndPair, ...]  # every end of the first with every end of the second
    one: int | None  # which of the two (0 or 1) has one stored table where the other has two; None otherwise
    closer: Closer | None  # whether that table is more like the other's input or output; None where `one` is
    notes: tuple[str, ...]


@section(asks="Which end does a tied table resemble?", place=50)
def which_end(subject: Subject, bench: Bench) -> Found:
    """Hold a model with one table beside one with two; of a comparison each tied arm, over seeds."""
    request = bench.request
    run = subject.run
    if run is not None:
        settings = AlignSettings(seed=request.seed, sampled=2048)
        of_run = bench.once("which_end", lambda: over_seeds(run, settings, bench.training_counts))
        if subject.label not in of_run.arms:
            raise NotHere(f"{', '.join(of_run.arms)}: held against its two tables", "see there")
        return found_over_seeds(of_run, subject.label)
    if len(bench.subjects) != 2:
        raise NotHere("needs two models", "give a second one, or a comparison")
    first, second = bench.subjects
    found = bench.once(
        "which_end",
        lambda: across(
            first.folder, second.folder, labels=(first.label, second.label), seed=request.seed,
            held_out=request.effort.held_out,
        ),
    )  # fmt: skip
    if subject.label != found.labels[found.one or 0]:
        raise NotHere(f"{found.labels[found.one or 0]} is held against it", "see there")
    return found_of(found)


def across(
    first: Folder,
    second: Folder,
    settings: AlignSettings | None = None,
    labels: tuple[str, str] = ("A", "B"),
    seed: int = 0,
    held_out: float = AlignSettings.held_out,
) -> AcrossFound:
    """Align every end of one model with every end of another, tokens matched by text.

    Where one of the two has one stored table and the other has two, `closer` says which of the two it is more like.

    Args:
        first: an opened checkpoint.
        second: another.
        settings: what to measure; by default `sized`.
        labels: what to call the two.
        seed: of the default settings.
        held_out: of the default settings; 0 fits maps on all rows and scores all.

    Raises:
        CheckpointError: no output head, quantised tables, no tokenizer, too few tokens in both, or as `align`.
    """
    ends = ends_of(first), ends_of(second)
    every = by_text(ends[0].texts(), ends[1].texts())
    pairs = every.without(ends[0].unusable(), ends[1].unusable())
    rows = ends[0].input.rows, ends[1].input.rows
    if len(pairs) < FEWEST:
        what = f"vocabularies of {rows[0]:,} and {rows[1]:,} rows share {len(every):,} tokens, {len(pairs):,} usable"
        raise CheckpointError(what, f"at least {FEWEST} are needed")
    width = max(table.width for end in ends for _, table in end.tables)
    settings = settings or replace(sized(len(pairs), width, seed, held_out), sampled=8192)
    found = tuple(
        EndPair(name_a, name_b, align(a, b, pairs, settings))
        for name_a, a in ends[0].tables
        for name_b, b in ends[1].tables
    )
    one = _one(ends)
    leaning = None
    if one is not None:
        turned = pairs if one == 0 else Pairs(pairs.b, pairs.a, pairs.how)
        table, other = ends[one].shared, ends[1 - one]
        assert table is not None
        leaning = closer(table, other.input, other.output, turned, settings)
    notes = tuple(f"{label}: {note}" for label, end in zip(labels, ends, strict=True) for note in end.notes)
    tied = ends[0].tied, ends[1].tied
    return AcrossFound(labels, tied, rows, len(every), len(every) - len(pairs), found, one, leaning, notes)


def _one(ends: tuple[Ends, Ends]) -> int | None:
    """Which of two models has one stored table where the other has two."""
    first, second = (end.shared is not None for end in ends)
    return None if first == second else 0 if first else 1


def found_of(found: AcrossFound) -> Found:
    """Say which end the one table is closer to by each measure, and how all ends of the two models align."""
    names = {pair: f"{found.labels[0]} {pair.first} – {found.labels[1]} {pair.second}" for pair in found.pairs}
    unmapped = dict.fromkeys(note for pair in found.pairs for note in left_out(pair.alignment))
    small = {
        "tokens in both vocabularies": found.shared,
        "tokens left out": found.unusable,
        **{f"rows of {label}": rows for label, rows in zip(found.labels, found.rows, strict=True)},
    }
    return Found(
        answer=_answer(found),
        quantities=(
            *_leans(found),
            *(q for pair in found.pairs for q in measures(pair.alignment, names[pair])),
            *(Quantity(name, value, main=False) for name, value in small.items()),
        ),
        notes=(*_kin(found, names), *unmapped, *found.notes),
    )


def _answer(found: AcrossFound) -> str:
    if found.closer is None or found.one is None:
        every = "one table" if all(found.tied) else "one stored table" if any(found.tied) else "two tables"
        return f"no question here: both models have {every}"
    other = found.labels[1 - found.one]
    sides = {
        lean.measure: "neither end clearly" if lean.toward == NEITHER else f"the {lean.toward}"
        for lean in found.closer.leans
        if lean.view == CENTRED
    }
    first = ORTHOGONAL if ORTHOGONAL in sides else next(iter(sides))
    rest = [f"{spelled(name)} {side}" for name, side in sides.items() if name != first]
    return f"{sides[first]} of {other} {spelled(first)}" + (f"; {', '.join(rest)}" if rest else "")


def _leans(found: AcrossFound) -> Iterator[Quantity]:
    if found.closer is None or found.one is None:
        return
    table, other = found.labels[found.one], found.labels[1 - found.one]
    both, apart = f"The table of {table} against both of {other}", f"Output less input, for {table}"
    for lean in found.closer.leans:
        centred = lean.view == CENTRED
        near = lean.measure == "neighbours"
        name = spelled(lean.measure) if centred else f"{spelled(lean.measure)}, not centred"
        chance = found.closer.neighbour_chance if near else 0.0
        for end, score in (("input", lean.input), ("output", lean.output)):
            yield Quantity.of_estimate(
                name, score, chance=chance, of=f"{end} of {other}", unit="mean cosine, or share", main=False,
                figure=both if centred else "",
            )  # fmt: skip
        yield Quantity.of_estimate(
            f"output − input, {name}", lean.difference, chance=0.0, unit="mean cosine, or share", main=centred,
            figure=apart if centred else "", why="above zero it is closer to the output; bootstrap over tokens",
        )  # fmt: skip


def _kin(found: AcrossFound, names: dict[EndPair, str]) -> Iterator[str]:
    for pair, name in names.items():
        stored = next((s for s in pair.alignment.scores if (s.map, s.view) == (IDENTITY, CENTRED)), None)
        if stored is not None and stored.estimate.low > KIN:
            yield (
                f"{name}: a cosine of {plain(stored.estimate.value, 3)} as they stand, which unrelated starts do not "
                "give: the two had a start in common or one came from the other, and every score contains that"
            )


def found_over_seeds(found: OverSeeds, arm: str) -> Found:
    """Say which table of the untied arm one tied arm resembles, beside what training again gives."""
    chosen = found.told(arm)
    return Found(
        answer=_answer_over_seeds(found, arm, chosen),
        quantities=(*_corrected(found, arm), *_scores(found, arm, chosen), *_differences(found, arm), *_again(found)),
        listings=(_by_pair(found, arm),),
        notes=tuple(_notes_over_seeds(found, arm)),
    )


def _answer_over_seeds(found: OverSeeds, arm: str, chosen: list[Leaning]) -> str:
    """Neither the lean as it stands nor that with frequency taken out may be told without the other."""
    whole, curve = found.leaning(arm, CKA), found.leaning(arm, CKA_CURVE)
    if whole is None or whole.corrected_difference is None:
        return f"it {_side(found, chosen[0].toward)} {spelled(chosen[0].measure)}" if chosen else "no model to compare"
    if found.counted is None:
        rest = "how much of that is frequency is not known, as the training text is not there"
    elif curve is None or curve.corrected_difference is None:
        rest = "with frequency taken out, training again finds too little of the tables to say"
    else:
        rest = f"with frequency taken out it {_side(found, toward(curve.corrected_difference))}"
    return f"it {_side(found, toward(whole.corrected_difference))}; {rest}"


def _side(found: OverSeeds, side: str) -> str:
    if side == NOT_KNOWN:
        return "cannot be told from one pair of models, nor from two seeds"
    return f"shows no lean to either table of {found.untied}" if side == NEITHER else f"leans to its {side} table"


def _corrected(found: OverSeeds, arm: str) -> Iterator[Quantity]:
    """What it has in common with either table, as a share of what each reaches with itself, trained again."""
    title = f"What {arm} has in common with either table"
    why = "CKA corrected for attenuation: 1 is the same but for noise and a rotation, 0 unrelated"
    for leaning in (x for x in found.leanings if x.arm == arm and x.seeds == OTHER_SEED):
        ends = {"input": leaning.corrected_input, "output": leaning.corrected_output}
        name = spelled(leaning.measure)
        for end, score in ends.items():
            if score is not None:
                yield Quantity.of_estimate(
                    f"corrected, {name}", score, chance=0.0, of=f"{arm} – {found.untied} {end}", unit=SHARES,
                    main=False, figure=title, why=why,
                )  # fmt: skip
        if leaning.corrected_difference is not None:
            yield Quantity.of_estimate(
                f"corrected output − input, {name}", leaning.corrected_difference, chance=0.0, unit=SHARES, why=why
            )


def _scores(found: OverSeeds, arm: str, chosen: list[Leaning]) -> Iterator[Quantity]:
    title = f"Which end does the table of {arm} resemble?"
    for leaning in sorted((x for x in found.leanings if x.arm == arm), key=lambda x: x not in chosen):
        told, chance = leaning in chosen, found.chance[leaning.measure]
        name = spelled(leaning.measure) if told else f"{spelled(leaning.measure)}, models of the {leaning.seeds}"
        for end, score in (("input", leaning.input), ("output", leaning.output)):
            yield Quantity.of_estimate(
                name, score, chance=chance, of=f"{arm} – {found.untied} {end}", unit=SCORES, main=False,
                figure=title if told else "", why=f"models of the {leaning.seeds}",
            )  # fmt: skip
            again = found.score_again(AGAIN.format(found.untied, end), leaning.measure)
            if told and again is not None:
                yield Quantity.of_estimate(
                    name, again, of=f"{found.untied} {end}, trained again", unit=SCORES, main=False, figure=title
                )


def _differences(found: OverSeeds, arm: str) -> Iterator[Quantity]:
    told = found.told(arm)
    corrected = any(x.corrected_difference is not None for x in told)
    for leaning in (x for x in found.leanings if x.arm == arm):
        main = not corrected and leaning in told and leaning.measure in (ORTHOGONAL, NEIGHBOURS, CKA)
        why = "above zero it is closer to the output"
        if leaning.seeds == SAME_SEED:
            why += "; models of one seed start from one input table, so that this says nothing of what they learned"
        yield Quantity.of_estimate(
            f"output − input, {spelled(leaning.measure)}", leaning.difference, chance=0.0, unit=SCORES, main=main,
            of=f"{arm}, models of the {leaning.seeds}", figure=f"Output less input, for {arm}", why=why,
        )  # fmt: skip


def _again(found: OverSeeds) -> Iterator[Quantity]:
    for entry in found.again:
        yield Quantity.of_estimate(spelled(entry.measure), entry.score, of=entry.what, unit=SCORES, main=False)
    for what, share in found.frequency.items():
        yield Quantity.of_estimate(
            "variance that is a curve in log frequency", share, chance=CURVE / max(1, found.tokens - 1), of=what,
            unit="%", main=False,
        )  # fmt: skip


def _by_pair(found: OverSeeds, arm: str) -> Listing:
    rows = tuple(
        (f"{arm} {a}, {found.untied} {b}", leaning.measure, plain(first, 6), plain(second, 6))
        for leaning in found.leanings
        if leaning.arm == arm
        for a, b, first, second in leaning.pairs
    )
    return Listing("Every pair of models", ("seeds", "measure", "with the input", "with the output"), rows)


def _notes_over_seeds(found: OverSeeds, arm: str) -> Iterator[str]:
    seeds = ", ".join(map(str, found.seeds))
    yield f"{count(found.tokens)} tokens, against both tables of {found.untied}, seeds {seeds}"
    if found.counted is not None:
        yield f"frequency: three powers of log(count + 1) in {count(found.counted)} tokens of the training text"
    stored = found.leaning(arm, IDENTITY, SAME_SEED)
    if stored is not None and stored.input.value > KIN:
        yield (
            f"{arm} and {found.untied} of one seed start from the same input table: rows still have a cosine of "
            f"{plain(stored.input.value, 2)}, so that only models of another seed answer"
        )
    yield from (f"left out: {what}" for what in found.left_out)
