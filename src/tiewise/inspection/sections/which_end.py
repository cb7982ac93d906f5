"""Which end of an untied model does a tied table resemble? Of two models, or of a comparison's arms over seeds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

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
    """Hold a model with one table beside one with two; of a comparison each tied arm, over seeds."""
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
    if subject.label != labels[_one(ends) or 0]:
        raise NotHere(f"{labels[_one(ends) or 0]} is held against it", "see there")
    return across(*ends, labels, seed=request.seed, held_out=request.effort.held_out)


def _one(ends: tuple[Ends, ...]) -> int | None:
    """Which of two models has one stored table where the other has two."""
    first, second = (end.shared is not None for end in ends)
    return None if first == second else 0 if first else 1


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
    ends = tuple(ends_of(one) if isinstance(one, Folder) else one for one in (first, second))
    every = by_text(*(texts_of(end.folder, max(end.input.rows, end.output.rows)) for end in ends))
    pairs = every.without(*(end.unusable() for end in ends))
    if len(pairs) < FEWEST:
        rows = " and ".join(f"{end.input.rows:,}" for end in ends)
        what = f"vocabularies of {rows} rows share {len(pairs):,} usable tokens"
        raise CheckpointError(what, f"at least {FEWEST} are needed")
    width = max(table.width for end in ends for _, table in end.tables)
    settings = settings or replace(AlignSettings.sized(len(pairs), width, seed, held_out), sampled=8192)
    aligned = {
        f"{labels[0]} {name_a} – {labels[1]} {name_b}": align(a, b, pairs, settings)
        for name_a, a in ends[0].tables
        for name_b, b in ends[1].tables
    }
    one, quantities, notes = _one(ends), [], []
    if one is None:
        stored = "one table" if all(end.tied for end in ends) else "one stored table"
        answer = f"no question here: both models have {stored if ends[0].shared else 'two tables'}"
    else:
        table, other = ends[one].shared, ends[1 - one]
        assert table is not None
        turned = pairs if one == 0 else Pairs(pairs.b, pairs.a, pairs.how)
        leans = nearer_end(table, other.input, other.output, turned, settings)
        answer, of = _answer(leans, labels[1 - one]), labels[1 - one]
        for lean in leans:
            centred, unit = lean.view == CENTRED, "mean cosine, or share"
            name = spelled(lean.measure) if centred else f"{spelled(lean.measure)}, not centred"
            against, apart = f"The table of {labels[one]} against both of {of}", f"Output less input, for {labels[one]}"
            for end in ENDS:
                quantities.append(Quantity.of_estimate(
                    name, getattr(lean, end), chance=lean.chance, of=f"{end} of {of}", unit=unit, main=False,
                    figure=against if centred else "",
                ))  # fmt: skip
            quantities.append(Quantity.of_estimate(
                f"output − input, {name}", lean.difference, chance=0.0, unit=unit, main=centred,
                figure=apart if centred else "", why=ABOVE,
            ))  # fmt: skip
    for name, alignment in aligned.items():
        quantities += alignment.quantities(name)
        first_score = alignment.scores[0]  # centred, on rows that its map was fitted on
        if first_score.measure == IDENTITY and first_score.estimate.low > KIN:
            cosine = plain(first_score.estimate.value, 3)
            notes.append(f"{name}: cosine {cosine} as they stand: a common start, in every score")
    small = {
        "tokens in both vocabularies": len(every),
        "tokens left out": len(every) - len(pairs),
        **{f"rows of {label}": end.input.rows for label, end in zip(labels, ends, strict=True)},
    }
    notes += dict.fromkeys(why for alignment in aligned.values() for why in alignment.left_out)
    notes += [f"{label}: {note}" for label, end in zip(labels, ends, strict=True) for note in end.notes]
    quantities += [Quantity(name, value, main=False) for name, value in small.items()]
    return Found(answer, tuple(quantities), notes=tuple(notes))


def _answer(leans: tuple[Lean, ...], other: str) -> str:
    """The end that the rotation is closer to, and by which measures it is another."""
    sides = {
        lean.measure: "neither end clearly" if toward(lean.difference) == NEITHER else f"the {toward(lean.difference)}"
        for lean in leans
        if lean.view == CENTRED
    }
    first = ORTHOGONAL if ORTHOGONAL in sides else next(iter(sides))
    rest: dict[str, list[str]] = {}
    for name, side in sides.items():
        rest.setdefault(side, []).append(spelled(name))
    alike = rest.pop(sides[first])
    said = f"{sides[first]} of {other} {spelled(first)}"
    said += f", and by {len(alike) - 1} more of {len(sides)} measures" if len(alike) > 1 else ""
    return said + "".join(f"; {side} {', '.join(names)}" for side, names in rest.items())


def found_over_seeds(found: OverSeeds, arm: str) -> Found:
    """Say which table of the untied arm one tied arm resembles, beside what training again gives.

    Neither the lean as it stands nor that with frequency taken out may be told without the other.
    """
    told, seeds = found.told(arm), ", ".join(map(str, found.seeds))
    leanings = (found.leaning(arm, measure) for measure in (CKA, CKA_CURVE))
    whole, curve = (lean and lean.corrected.get("difference") for lean in leanings)
    answer = _side(found, whole or told[0].difference) if told else "no model to compare"
    if whole is None:
        answer += f" {spelled(told[0].measure)}" if told and toward(told[0].difference) != NOT_KNOWN else ""
    elif found.counted is None:
        answer += "; to take frequency out needs the training text"
    else:
        rest = _side(found, curve) if curve else "too little is found again to say"
        answer += ", with frequency taken out too" if rest == answer else f"; with frequency taken out {rest}"
    notes = [f"{count(found.tokens)} tokens, seeds {seeds}"]
    if found.counted is not None:
        notes.append(f"frequency: a cubic in log(count + 1) of {count(found.counted)} training tokens")
    stored = found.leaning(arm, IDENTITY, SAME_SEED)
    if stored is not None and stored.input.value > KIN:
        notes.append(f"of one seed, rows share a start: cosine {plain(stored.input.value, 2)}")
    pairs = tuple(
        (f"{arm} {a}, {found.untied} {b}", leaning.measure, plain(first, 6), plain(second, 6))
        for leaning in found.leanings
        if leaning.arm == arm
        for a, b, first, second in leaning.pairs
    )
    return Found(
        answer=answer,
        quantities=tuple(_over_seeds(found, arm, told)),
        listings=(Listing("Every pair of models", ("seeds", "measure", "with the input", "with the output"), pairs),),
        notes=(*notes, *(f"left out: {what}" for what in found.left_out)),
    )


def _side(found: OverSeeds, difference: Estimate) -> str:
    side = toward(difference)
    if side == NOT_KNOWN:
        return "fewer than three seeds cannot tell"
    return f"it shows no lean to either table of {found.untied}" if side == NEITHER else f"it leans to its {side} table"


def _over_seeds(found: OverSeeds, arm: str, told: list[Leaning]) -> Iterator[Quantity]:
    leanings, untied = [x for x in found.leanings if x.arm == arm], found.untied
    # what it has in common with either table, as a share of what each reaches with itself, trained again
    for leaning in leanings:
        for end, score in leaning.corrected.items():
            name, of, figure = "corrected", f"{arm} – {untied} {end}", f"What {arm} has in common with either table"
            if main := end == "difference":
                name, of, figure = "corrected output − input", "", ""
            yield Quantity.of_estimate(
                f"{name}, {spelled(leaning.measure)}", score, chance=0.0, unit=SHARES, of=of, main=main, figure=figure,
                why="1: the same but for noise and rotation",
            )  # fmt: skip
    # every score, those that are told first and beside the same table trained again
    for leaning in sorted(leanings, key=lambda x: x not in told):
        main, models = leaning in told, f"models of the {leaning.seeds}"
        name = spelled(leaning.measure) if main else f"{spelled(leaning.measure)}, {models}"
        figure = f"Which end does the table of {arm} resemble?" if main else ""
        for end in ENDS:
            yield Quantity.of_estimate(
                name, getattr(leaning, end), chance=leaning.chance, of=f"{arm} – {untied} {end}", unit=SCORES,
                main=False, figure=figure, why=models,
            )  # fmt: skip
            again = found.again.get((AGAIN.format(untied, end), leaning.measure))
            if main and again:
                of = f"{untied} {end}, trained again"
                yield Quantity.of_estimate(name, over_pairs(again), of=of, unit=SCORES, main=False, figure=figure)
    # every difference; where it could be corrected, that is the one to read first
    corrected = any("difference" in x.corrected for x in told)
    for leaning in leanings:
        yield Quantity.of_estimate(
            f"output − input, {spelled(leaning.measure)}", leaning.difference, chance=0.0, unit=SCORES,
            why=ABOVE + ("; one seed is one start" if leaning.seeds == SAME_SEED else ""),
            main=not corrected and leaning in told and leaning.measure in (ORTHOGONAL, NEIGHBOURS, CKA),
            of=f"{arm}, models of the {leaning.seeds}", figure=f"Output less input, for {arm}",
        )  # fmt: skip
    for (what, measure), again in found.again.items():
        yield Quantity.of_estimate(spelled(measure), over_pairs(again), of=what, unit=SCORES, main=False)
    name, chance = "variance that is a curve in log frequency", CURVE / max(1, found.tokens - 1)
    for what, share in found.frequency.items():
        yield Quantity.of_estimate(name, share, chance=chance, of=what, unit="%", main=False)
