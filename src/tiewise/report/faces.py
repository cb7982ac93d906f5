"""What a reader is told of an inspection, for the terminal, the page and a notebook alike.

    verdict, deciding              tie or not? in a sentence, and a row for each question that can decide
    title, sentence, summary       of a section: its question, the answer, a row for each model
    numbers, every, notes          every number, for whoever asks; `evidence` those behind the verdict

Each is one function over {model: Found}; `figures_of_found` draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tiewise.core.found import NEITHER, Found, Quantity
from tiewise.core.numerals import NONE, plain
from tiewise.inspection.evidence import Evidence, TieOrNot
from tiewise.inspection.section import SECTIONS, SectionFound
from tiewise.report.grid import Table

TITLE = "Tie or not?"
EVIDENCE = "Questions that can decide, and what each model speaks for"


def verdict(found: TieOrNot) -> str:
    """The verdict as a sentence."""
    return f"{found.verdict[0].upper()}{found.verdict[1:]}."


def deciding(found: TieOrNot, models: Sequence[str]) -> Table | None:
    """A row for each question, a column for each model; the difference of two arms stands in the first one's.

    Behind a value stands what it speaks for, if for anything.
    """
    cells: dict[str, dict[str, str]] = {}
    for row in found.rows:
        about, _, other = row.about.partition(" − ")
        question = f"{row.question} ({row.about})" if other else row.question
        value = _measured(row) if row.speaks == NEITHER else f"{_measured(row)} → {row.speaks}"
        cells.setdefault(question, {}).update(dict.fromkeys(about.split(", "), value))
    rows = [[question, *(by_model.get(model, NONE) for model in models)] for question, by_model in cells.items()]
    return Table(["", *models], rows) if rows else None


def evidence(found: TieOrNot) -> Table:
    """Everything behind the verdict."""
    header = ["question", "measure", "model", "measured [95 %]", "no effect", "p (Holm)", "speaks for", "because"]
    rows = [
        [r.question, r.measure, r.about, _measured(r), plain(r.level, 3), plain(r.p, 3), r.speaks, r.why]
        for r in found.rows
    ]
    return Table(header, rows)


def _measured(row: Evidence) -> str:
    low, high = (math.nan if end is None else end for end in (row.low, row.high))
    return str(Quantity("", row.value, low, high, unit="value"))


def title(name: str) -> str:
    """Title of a section: the question that it asks; its name where what it needs is not installed."""
    return SECTIONS[name].asks if name in SECTIONS else name


def sentence(found: Mapping[str, Found]) -> str:
    """The answer: once where all models give the same, else model by model."""
    answers = _alike((label, one.answer) for label, one in found.items())
    if len(answers) == 1:
        (said,) = answers
        return f"{said[0].upper()}{said[1:]}."
    return "; ".join(f"{', '.join(labels)}: {answer}" for answer, labels in answers.items()) + "."


def summary(found: Mapping[str, Found]) -> Table | None:
    """One row for each model, one column for each main quantity; None where there is none."""
    names = list(dict.fromkeys(q.name for one in found.values() for q in one.quantities if q.main))
    values = {label: {q.name: str(q) for q in reversed(one.quantities)} for label, one in found.items()}
    rows = [[label, *(by_name.get(name, NONE) for name in names)] for label, by_name in values.items()]
    return Table(["model", *names], rows) if names else None


def numbers(found: Mapping[str, Found]) -> Table | None:
    """One row for each quantity that the summary leaves out, one column for each model."""
    rows: dict[str, dict[str, str]] = {}
    for label, one in found.items():
        for q in one.quantities:
            if not q.main:
                of = "" if q.of in ("", label) else f", {q.of}"
                rows.setdefault(f"{q.name}{of}", {})[label] = str(q)
    made = [[name, *(by_model.get(label, NONE) for label in found)] for name, by_model in rows.items()]
    return Table(["", *found], made) if made else None


def every(found: Mapping[str, Found]) -> Iterator[tuple[str, Table]]:
    """(caption, table) of everything that a section measured: each quantity with how it is read, then what it lists."""
    quantities = [q for one in found.values() for q in one.quantities]
    if quantities:
        rows = [[q.name, q.of, str(q), q.unit or NONE, no_effect(q), q.why] for q in quantities]
        yield "Every number", Table(["measure", "model", "value [95 %]", "unit", "no effect", "how to read it"], rows)
    yield from listings(found)


def listings(found: Mapping[str, Found]) -> Iterator[tuple[str, Table]]:
    """(caption, table) of what a section lists."""
    for one in found.values():
        for listing in one.listings:
            yield f"{listing.name}, {listing.of}", Table(list(listing.header), [list(row) for row in listing.rows])


def no_effect(q: Quantity) -> str:
    """What no effect gives beside a quantity: its chance, and the most that permuted data gave."""
    digits = 3 if q.unit != "%" else 4
    chance = [] if q.chance is None else [plain(q.chance, digits)]
    return ", ".join(chance + ([f"permuted up to {plain(max(q.null), digits)}"] if q.null else [])) or NONE


def notes(section: SectionFound) -> list[str]:
    """What a reader must know of a section, and which models it leaves out; what is said of several models, once."""
    said = _alike((label, note) for label, one in section.found.items() for note in one.notes)
    every = [n if len(labels) == len(section.found) else f"{', '.join(labels)}: {n}" for n, labels in said.items()]
    left_out = _alike(section.left_out.items()) if section.found else {}
    return every + [f"left out of {', '.join(labels)}: {reason}" for reason, labels in left_out.items()]


def absent(sections: Iterable[SectionFound]) -> list[str]:
    """Names of the sections that have nothing at all, and why; those of one reason together."""
    reasons = _alike(
        (section.name, reason)
        for section in sections
        if not section.found
        for reason in dict.fromkeys(section.left_out.values())
    )
    return [f"{', '.join(titles)}: {reason}" for reason, titles in reasons.items()]


def _alike(said: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """{what is said: of whom}, in the order in which it is first said."""
    found: dict[str, list[str]] = {}
    for who, what in said:
        found.setdefault(what, []).append(who)
    return found
