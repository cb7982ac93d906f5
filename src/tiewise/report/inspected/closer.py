"""The ends of two models side by side, in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tiewise.analysis.align_tables import NEITHER, Closer, Lean, Score
from tiewise.analysis.end_alignment import AcrossFound, EndPair
from tiewise.analysis.estimates import Estimate
from tiewise.analysis.table_maps import CENTRED, IDENTITY, ORTHOGONAL
from tiewise.core.numerals import NONE, count, plain, signed
from tiewise.report.grid import Table
from tiewise.report.inspected.alignment import against_null, held_out, interval, measures, spelled

TITLE = "Which table is it closer to?"
_KIN = 0.05  # a cosine as they stand that two tables of unrelated starts do not reach


def lines(found: Mapping[str, AcrossFound]) -> list[str]:
    """Say which end a shared table resembles, then how all ends of the two models align."""
    return [line for one in found.values() for line in _lines(one)]


def tables(found: Mapping[str, AcrossFound]) -> list[tuple[str, Table]]:
    """The answer by measure, and every measure of every pair of ends."""
    made = []
    for one in found.values():
        if one.closer is not None and one.one is not None:
            table, other = one.labels[one.one], one.labels[1 - one.one]
            made.append((f"The table of {table} beside the two of {other}", leans(one.closer)))
        made += [
            (f"{pair_name(one, pair)}, {count(pair.alignment.pairs)} tokens", measures(pair.alignment))
            for pair in one.pairs
        ]
    return made


def pair_name(found: AcrossFound, pair: EndPair) -> str:
    """Name a pair of ends: "tied table – untied input"."""
    return f"{found.labels[0]} {pair.first} – {found.labels[1]} {pair.second}"


def centred(found: Closer) -> list[Lean]:
    """The measures of centred rows, the rotation first: the order in which they are told."""
    return sorted((x for x in found.leans if x.view == CENTRED), key=lambda x: x.measure != ORTHOGONAL)


def change(value: Estimate) -> str:
    """+0.168 [+0.165, +0.170]."""
    return f"{signed(value.value, 3)} [{signed(value.low, 3)}, {signed(value.high, 3)}]"


def _lines(one: AcrossFound) -> Iterator[str]:
    yield from (line for pair in one.pairs for line in _kin(pair_name(one, pair), held_out(pair.alignment)))
    if one.closer is not None and one.one is not None:
        for lean in centred(one.closer):
            yield _answer(one.labels[one.one], one.labels[1 - one.one], lean)
    elif all(one.tied):
        yield "Both models are tied: there is one table in each, and no question which end it is closer to."
    for pair in one.pairs:
        rotated = next((score for score in held_out(pair.alignment) if score.map == ORTHOGONAL), None)
        if rotated is not None:
            score = f"mean cosine {interval(rotated.estimate)}; {against_null(rotated)}"
            yield f"{pair_name(one, pair)}, {spelled(ORTHOGONAL)}: {score}."
    yield (
        f"{count(one.shared)} tokens are in both vocabularies ({count(one.rows[0])} and {count(one.rows[1])} rows), "
        f"matched by text; {count(one.unusable)} of them are left out: a row is zero, repeated or not finite."
    )
    left_out = dict.fromkeys(entry for pair in one.pairs for entry in pair.alignment.left_out)
    yield from (f"No {name} map: {why}." for name, why in left_out)
    yield from (f"{note}." for note in one.notes)


def _answer(table: str, other: str, lean: Lean) -> str:
    how = spelled(lean.measure)
    if lean.toward == NEITHER:
        side = f"is not shown to be closer to one table of {other} than to the other"
    else:
        side = f"is closer to the {lean.toward} table of {other}"
    return (
        f"{how[0].upper()}{how[1:]}, the table of {table} {side}: {interval(lean.output)} with the output, "
        f"{interval(lean.input)} with the input, difference {change(lean.difference)} "
        f"over {count(lean.difference.rows)} tokens."
    )


def _kin(name: str, scores: list[Score]) -> Iterator[str]:
    """Say so where two tables share axes: they are of one family, and every score contains that."""
    stored = next((score for score in scores if score.map == IDENTITY), None)
    if stored is not None and stored.estimate.low > _KIN:
        yield (
            f"{name}: as they stand, without any map, rows have a cosine of {interval(stored.estimate)}. Models of "
            "unrelated starts share no axes: tables or layers of these two had a start in common, or one came from the "
            "other, and every score of this pair contains that."
        )


def leans(found: Closer) -> Table:
    """The answer by measure, as a table."""
    unseen = "0" if found.fitted_rows < found.pairs else NONE  # on rows that maps were fitted on it depends on the map
    rows = [
        [
            lean.measure if lean.view == CENTRED else f"{lean.measure}, not centred",
            interval(lean.input),
            interval(lean.output),
            change(lean.difference),
            lean.toward,
            plain(found.neighbour_chance, 4) if lean.measure == "neighbours" else unseen,
        ]
        for lean in found.leans
    ]
    return Table(["measure", "with the input", "with the output", "output − input", "closer to", "by chance"], rows)
