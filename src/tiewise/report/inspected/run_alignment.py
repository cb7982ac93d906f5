"""A comparison's tied tables beside its untied ones, over seeds, in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tiewise.analysis.alignment_maps import IDENTITY, ORTHOGONAL
from tiewise.analysis.closer import NEITHER
from tiewise.analysis.ledger import Result, results
from tiewise.inspection.run_alignment import (
    AGAIN,
    CKA,
    NEIGHBOURS,
    NOT_KNOWN,
    OTHER_SEED,
    SAME_SEED,
    Leaning,
    OverSeeds,
    RunAlignment,
)
from tiewise.numerals import NONE, count, plain, signed
from tiewise.report.grid import Table
from tiewise.report.inspected.alignment import spelled

TITLE = "Which end does a tied table resemble?"
INPUT, OUTPUT = "untied input → tied", "untied output → tied"  # as the ledger calls the published pairs
_SAME_START = 0.05  # a cosine as they stand that tables of unrelated starts do not reach


def lines(found: Mapping[str, RunAlignment]) -> list[str]:
    """Answer for every arm with one table, over seeds, beside what training again gives and what was published."""
    return [line for one in found.values() for line in _lines(one)]


def tables(found: Mapping[str, RunAlignment]) -> list[tuple[str, Table]]:
    """Every measure over seeds, the same thing trained again, and published figures."""
    made = []
    for one in found.values():
        made.append((f"Against both tables of {one.untied}, {count(one.tokens)} tokens", _leanings(one)))
        made.append(("The same thing trained again", _again(one)))
    header, source = ["tied model", "measure", "with the input", "with the output"], "Lopardo et al. (arXiv:2603.26663)"
    rows = [[model, measure, plain(first, 3), plain(second, 3)] for model, measure, first, second in published()]
    return [
        *made,
        (f"Published: {source}, on fitted rows", Table(header, rows)),
    ]


def shown(value: OverSeeds | None, sign: bool = False) -> str:
    """0.192 [0.184, 0.199], without an interval where one pair gives none."""
    if value is None:
        return NONE
    text = signed if sign else plain
    bounds = "" if value.low is None else f" [{text(value.low, 3)}, {text(value.high, 3)}]"
    return text(value.value, 3) + bounds


def told(found: RunAlignment, arm: str) -> list[Leaning]:
    """An arm's measures between different seeds, the rotation first; with one seed, those of that seed."""
    for kind in (OTHER_SEED, SAME_SEED):
        chosen = [x for x in found.leanings if (x.arm, x.seeds) == (arm, kind)]
        if chosen:
            return sorted(chosen, key=lambda x: x.measure != ORTHOGONAL)
    return []


def again(found: RunAlignment, arm: str, end: str, measure: str) -> OverSeeds | None:
    """Score of one table of an arm against itself, trained with another seed."""
    what = AGAIN.format(arm, end)
    return next((x.score for x in found.again if (x.what, x.measure) == (what, measure)), None)


def published() -> list[tuple[str, str, float, float]]:
    """(tied model, measure, score with the untied input, with the untied output), as they were published."""
    made = []
    for measure in (ORTHOGONAL, "linear", NEIGHBOURS):
        rows: tuple[Result, ...] = results(f"alignment: {measure}")
        values = {(row.model, row.choice): row.value for row in rows}
        models = [model for model, choice in values if choice == INPUT]
        made += [(model, measure, values[model, INPUT], values[model, OUTPUT]) for model in models]
    return made


def _lines(one: RunAlignment) -> Iterator[str]:
    for arm in one.arms:
        for leaning in told(one, arm):
            yield _answer(one, leaning)
        rotated = one.leaning(arm, ORTHOGONAL)
        if rotated is not None:
            yield from _ceiling(one, rotated)
        yield from _same_start(one, arm)
    rows = [row for row in published() if row[1] == ORTHOGONAL]
    pairs = ", ".join(f"{plain(second, 3)} against {plain(first, 3)} ({model})" for model, _, first, second in rows)
    yield (
        f"Published after the best rotation, output against input, on fitted rows and without seeds: {pairs} "
        "(Lopardo, Harish, Arnett & Gupta, arXiv:2603.26663, Table 1)."
    )
    yield from (f"Left out: {what}." for what in one.left_out)


def _answer(one: RunAlignment, leaning: Leaning) -> str:
    how, n = spelled(leaning.measure), leaning.difference.n
    if leaning.toward == NOT_KNOWN:
        side = "cannot be told from one pair of models"
    elif leaning.toward == NEITHER:
        side = f"shows no lean to either table of {one.untied}"
    else:
        side = f"leans to the {leaning.toward} table of {one.untied}"
    with_ = "of its own seed" if leaning.seeds == SAME_SEED else "of another seed"
    return (
        f"{how[0].upper()}{how[1:]}, the table of {leaning.arm} {side}: {shown(leaning.output)} with the output and "
        f"{shown(leaning.input)} with the input {with_}, difference {shown(leaning.difference, sign=True)} "
        f"over {n} pair{'s' if n > 1 else ''} of models; by chance {plain(one.chance[leaning.measure], 3)}."
    )


def _ceiling(one: RunAlignment, leaning: Leaning) -> Iterator[str]:
    inputs, outputs = (again(one, one.untied, end, ORTHOGONAL) for end in ("input", "output"))
    own = again(one, leaning.arm, "table", ORTHOGONAL)
    yield (
        f"Trained again with another seed and rotated, an output table of {one.untied} reaches {shown(outputs)} with "
        f"itself, an input table {shown(inputs)}, and a table of {leaning.arm} {shown(own)}."
    )
    like = one.leaning(leaning.arm, CKA)
    if like is not None and like.corrected_input is not None and like.corrected_output is not None:
        yield (
            f"As a share of what training again gives (CKA corrected for attenuation; 1: the same but for noise and a "
            f"rotation), {leaning.arm} has {shown(like.corrected_output)} in common with the output table of "
            f"{one.untied} and {shown(like.corrected_input)} with its input table."
        )


def _same_start(one: RunAlignment, arm: str) -> Iterator[str]:
    stored = one.leaning(arm, IDENTITY, SAME_SEED)
    rotated = one.leaning(arm, ORTHOGONAL, SAME_SEED)
    if stored is not None and rotated is not None and stored.input.value > _SAME_START:
        yield (
            f"Beside the {one.untied} model of its own seed, {arm} scores {shown(rotated.input)} with the input table "
            f"and {shown(rotated.output)} with the output table after the best rotation. Arms of one seed start from "
            f"the same input table (rows still have a cosine of {plain(stored.input.value, 2)} as they stand), so this "
            "says nothing of what they learned."
        )


def _leanings(one: RunAlignment) -> Table:
    rows = [
        [
            f"{x.arm} · {x.measure} · {x.seeds}",
            shown(x.input),
            shown(x.output),
            shown(x.difference, sign=True),
            x.toward,
            f"{shown(x.corrected_input)} / {shown(x.corrected_output)}" if x.corrected_input else NONE,
            plain(one.chance[x.measure], 4),
        ]
        for x in one.leanings
    ]
    header = ["arm · measure · pairs", "with the input", "with the output", "output − input", "leans to"]
    return Table([*header, "corrected: input / output", "by chance"], rows)


def _again(one: RunAlignment) -> Table:
    names = list(dict.fromkeys(x.measure for x in one.again))
    kinds = list(dict.fromkeys(x.what for x in one.again))
    cells = {(x.what, x.measure): shown(x.score) for x in one.again}
    return Table(["tables", *names], [[what, *(cells.get((what, name), NONE) for name in names)] for what in kinds])
