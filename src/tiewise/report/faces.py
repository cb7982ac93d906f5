"""What a reader is told of a section's `Found`: a sentence, a table with a row for each model, every number.

Each is one function over {model: Found}, for the terminal, the page and a notebook alike; `figures_of_found` draws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tiewise.core.found import Found, Quantity
from tiewise.core.numerals import NONE, plain
from tiewise.report.grid import Table


def sentence(found: Mapping[str, Found]) -> str:
    """The answer: once where all models give the same, else model by model."""
    answers: dict[str, list[str]] = {}
    for label, one in found.items():
        answers.setdefault(one.answer, []).append(label)
    if len(answers) == 1:
        (said,) = answers
        return f"{said[0].upper()}{said[1:]}."
    return "; ".join(f"{', '.join(labels)}: {answer}" for answer, labels in answers.items()) + "."


def summary(found: Mapping[str, Found]) -> Table | None:
    """One row for each model, one column for each main quantity; None where there is none."""
    names = list(dict.fromkeys(q.name for one in found.values() for q in one.quantities if q.main))
    rows = [[label, *(_cell(one, name) for name in names)] for label, one in found.items()]
    return Table(["model", *names], rows) if names else None


def _cell(found: Found, name: str) -> str:
    return next((str(q) for q in found.quantities if q.name == name), NONE)


def tables(found: Mapping[str, Found]) -> Iterator[tuple[str, Table]]:
    """(caption, table) of everything that a section measured: its quantities, then what it lists."""
    every = [q for one in found.values() for q in one.quantities]
    if every:
        rows = [[q.name, q.of, str(q), q.unit or NONE, no_effect(q), q.why] for q in every]
        yield "Every number", Table(["measure", "model", "value [95 %]", "unit", "no effect", "how to read it"], rows)
    for one in found.values():
        for listing in one.listings:
            yield f"{listing.name}, {listing.of}", Table(list(listing.header), [list(row) for row in listing.rows])


def no_effect(q: Quantity) -> str:
    """What no effect gives beside a quantity: its chance, and the most that permuted data gave."""
    digits = 3 if q.unit != "%" else 4
    chance = [] if q.chance is None else [plain(q.chance, digits)]
    return ", ".join(chance + ([f"permuted up to {plain(max(q.null), digits)}"] if q.null else [])) or NONE


def notes(found: Mapping[str, Found]) -> list[str]:
    """What was left out and what a reader must know; what is said of several models, once."""
    said: dict[str, list[str]] = {}
    for label, one in found.items():
        for note in one.notes:
            said.setdefault(note, []).append(label)
    return [note if len(labels) == len(found) else f"{', '.join(labels)}: {note}" for note, labels in said.items()]
