"""A comparison's tied tables beside its untied ones, over seeds, in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tiewise.analysis.align_tables import NEITHER
from tiewise.analysis.row_products import CURVE
from tiewise.analysis.table_maps import IDENTITY, ORTHOGONAL
from tiewise.core.ledger import Result, results
from tiewise.core.numerals import NONE, count, plain, signed
from tiewise.inspection.run_alignment import (
    AGAIN,
    CKA,
    CKA_CURVE,
    CKA_LINE,
    NEIGHBOURS,
    NOT_KNOWN,
    OTHER_SEED,
    SAME_SEED,
    WITHOUT,
    Leaning,
    OverSeeds,
    RunAlignment,
)
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
        if one.frequency:
            rows = [[x.what, share(x.share)] for x in one.frequency]
            made.append(("Of a table's variance, a curve in log frequency", Table(["table", "share"], rows)))
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
        yield from _in_common(one, arm)
        yield from (_answer(one, leaning) for leaning in told(one, arm) if leaning.measure not in WITHOUT.values())
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


def _in_common(one: RunAlignment, arm: str) -> Iterator[str]:
    """The answer, as it stands and with frequency taken out: neither may be told without the other."""
    whole, curve, line = (one.leaning(arm, measure) for measure in (CKA, CKA_CURVE, CKA_LINE))
    if whole is None or whole.corrected_difference is None:
        return
    yield (
        f"The table of {arm} {_side(one, whole.corrected_difference.toward)}; {_without(one, whole, curve)}. As a "
        "share of what training again gives (CKA corrected for attenuation; 1: the same but for noise and a rotation) "
        f"it has {_both(whole)}; {_shares_without(curve)}."
    )
    yield from _frequency_share(one, arm)
    if curve is not None and curve.corrected_difference is not None:
        own = again(one, arm, "table", CKA_CURVE)
        inputs, outputs = (again(one, one.untied, end, CKA_CURVE) for end in ("input", "output"))
        yield (
            f"With frequency taken out, tables trained again have a CKA above chance of {shown(outputs)} (output of "
            f"{one.untied}), {shown(inputs)} (its input) and {shown(own)} ({arm}): the shares without frequency are "
            "shares of that."
        )
    if line is not None and line.corrected_difference is not None:
        yield (
            f"Taking out only a straight line in log frequency leaves the table of {arm} {_both(line)}: what is curved "
            "in frequency is then still counted as common."
        )


def _frequency_share(one: RunAlignment, arm: str) -> Iterator[str]:
    shares = {x.what: x.share for x in one.frequency}
    names = (f"{one.untied} output", f"{one.untied} input", f"{arm} table")
    if all(name in shares for name in names):
        parts = [f"{share(shares[name])} of the variance of {name}" for name in names]
        yield (
            f"A curve in log frequency is {parts[0]}, {parts[1]} and {parts[2]}; by chance "
            f"{plain(100 * CURVE / max(1, one.tokens - 1), 2)} %."
        )


def share(value: OverSeeds) -> str:
    """48.4 % [45.1, 51.7]."""
    bounds = (
        ""
        if value.low is None or value.high is None
        else f" [{plain(100 * value.low, 1)}, {plain(100 * value.high, 1)}]"
    )
    return f"{plain(100 * value.value, 1)} %{bounds}"


def _without(one: RunAlignment, whole: Leaning, curve: Leaning | None) -> str:
    assert whole.corrected_difference is not None
    if one.counted is None:
        return "how much of that is frequency is not known, as the training text is not there"
    if curve is None or curve.corrected_difference is None:
        return "with frequency taken out, training again finds too little of the tables to say"
    toward = curve.corrected_difference.toward
    same = toward == whole.corrected_difference.toward
    return f"with frequency taken out, it {'still ' if same else ''}{_side(one, toward)}"


def _shares_without(curve: Leaning | None) -> str:
    if curve is None or curve.corrected_difference is None:
        return "with frequency taken out, no share can be given"
    return f"with frequency taken out (three powers of log frequency), {_both(curve)}"


def _both(leaning: Leaning) -> str:
    """Corrected scores with the output and the input table, and their difference."""
    return (
        f"{shown(leaning.corrected_output)} in common with the output table and {shown(leaning.corrected_input)} with "
        f"the input table, difference {shown(leaning.corrected_difference, sign=True)}"
    )


def _side(one: RunAlignment, toward: str) -> str:
    if toward == NOT_KNOWN:
        return "cannot be told from one pair of models, nor from two seeds"
    if toward == NEITHER:
        return f"shows no lean to either table of {one.untied}"
    return f"leans to the {toward} table of {one.untied}"


def _answer(one: RunAlignment, leaning: Leaning) -> str:
    how, n = spelled(leaning.measure), leaning.difference.n
    with_ = "of its own seed" if leaning.seeds == SAME_SEED else "of another seed"
    side = f"the table of {leaning.arm} {_side(one, leaning.toward)}"
    return (
        f"{how[0].upper()}{how[1:]}, {side}: {shown(leaning.output)} with the output and "
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
            shown(x.corrected_input),
            shown(x.corrected_output),
            shown(x.corrected_difference, sign=True),
            plain(one.chance[x.measure], 4),
        ]
        for x in one.leanings
    ]
    header = ["arm · measure · pairs", "with the input", "with the output", "output − input", "leans to"]
    corrected = ["corrected: input", "corrected: output", "corrected: output − input"]
    return Table([*header, *corrected, "by chance"], rows)


def _again(one: RunAlignment) -> Table:
    names = list(dict.fromkeys(x.measure for x in one.again))
    kinds = list(dict.fromkeys(x.what for x in one.again))
    cells = {(x.what, x.measure): shown(x.score) for x in one.again}
    return Table(["tables", *names], [[what, *(cells.get((what, name), NONE) for name in names)] for what in kinds])
