"""`carry_out`: every measure that a request can have, on every model, and the reason where there is none.

    subjects × measures → found, or why not → sections → evidence

A measure is a function of one subject, or of all together. One that a model does not allow is left out with its
reason. What the user gave and cannot be used (a text too short, a token that is none) has ended the inspection before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from tiewise.core.errors import DataError, RunError, TiewiseError
from tiewise.core.progress import heard
from tiewise.core.records import strict
from tiewise.inspection.request import Request
from tiewise.inspection.subject import Subject

SCHEMA = 1
ALL = ""  # the label of what is said of all subjects together
PARTS = 1000  # that progress counts for each call of a measure of weight 1


class NotHere(TiewiseError):
    """A measure that has no meaning for these subjects: left out, and the reason said."""


@dataclass(frozen=True)
class Measure:
    """One section of an inspection.

    Args:
        name: as `--only` takes it.
        each: the measure of one subject; None where it is of all together.
        together: the measure of all subjects.
        text: whether it needs a text.
        weight: how many times as long a call takes as most others, roughly; for progress.
    """

    name: str
    each: Callable[[Subject, Request], Any] | None = None
    together: Callable[[tuple[Subject, ...], Request], Any] | None = None
    text: bool = False
    weight: int = 1


@dataclass(frozen=True)
class Section:
    """What one measure gave.

    Args:
        name: of the measure.
        found: label of the subject → result, a dataclass with `record()`.
        left_out: label → why there is none.
    """

    name: str
    found: Mapping[str, Any]
    left_out: Mapping[str, str]

    def record(self) -> dict[str, Any]:
        """Everything as strict JSON takes it: what is not a number, as an interval of one value, is None."""
        return {
            "found": {label: strict(found.record()) for label, found in self.found.items()},
            "left_out": dict(self.left_out),
        }


@dataclass(frozen=True, repr=False)
class Inspection:
    """All sections, in the order of the measures; its `repr` is a summary, for a notebook."""

    subjects: tuple[Subject, ...]
    request: Request
    sections: tuple[Section, ...]

    def __repr__(self) -> str:
        lines = [f"Inspection of {', '.join(subject.label for subject in self.subjects)}"]
        for section in self.sections:
            reasons = "; ".join(dict.fromkeys(section.left_out.values()))
            said = ", ".join(filter(None, section.found)) or ("all together" if section.found else f"none: {reasons}")
            lines.append(f"  {section.name}: {getattr(section.found.get(ALL), 'verdict', said)}")
        return "\n".join([*lines, "  .found(name) gives a section's results, .record() everything as JSON takes it"])

    def section(self, name: str) -> Section | None:
        """Return one section, or None where it is not part of this inspection."""
        return next((section for section in self.sections if section.name == name), None)

    def found(self, name: str) -> Mapping[str, Any]:
        """Return what a section found by label; nothing where it is not part of this inspection."""
        section = self.section(name)
        return section.found if section is not None else {}

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return {
            "schema": SCHEMA,
            "subjects": {subject.label: str(subject.folder.path) for subject in self.subjects},
            "request": self.request.record(),
            "sections": {section.name: section.record() for section in self.sections},
        }


def chosen(measures: Sequence[Measure], only: Sequence[str]) -> tuple[Measure, ...]:
    """Return the measures of these names, or all.

    Raises:
        DataError: a name that no measure has.
    """
    names = [measure.name for measure in measures]
    unknown = next((name for name in only if name not in names), None)
    if unknown is not None:
        raise DataError(f"there is no section {unknown!r}", f"sections are {', '.join(names)}")
    return tuple(measure for measure in measures if not only or measure.name in only)


def carry_out(subjects: tuple[Subject, ...], measures: Sequence[Measure], request: Request) -> Inspection:
    """Measure; its progress is (what is done, parts done, parts of the whole inspection).

    Raises:
        TiewiseError: what was given cannot be used, or nothing could be measured.
    """
    sections = []
    faults: list[TiewiseError] = []
    wanted = chosen(measures, request.only)
    weights = [one.weight * PARTS for one in wanted for _ in (subjects if one.each is not None else (ALL,))]
    parts = pairwise(accumulate(weights, initial=0))

    for measure in wanted:
        found: dict[str, Any] = {}
        left_out: dict[str, str] = {}
        for (label, make), place in zip(_calls(measure, subjects, request), parts, strict=False):
            try:
                if measure.text and not request.texts and not any(subject.run for subject in subjects):
                    raise NotHere("needs a text", "give --text")
                with _part(label, *place, sum(weights)):
                    found[label] = make()
            except TiewiseError as error:
                if not isinstance(error, NotHere) or request.only:
                    faults.append(error)
                left_out[label] = str(error)
        sections.append(Section(measure.name, found, left_out))
    if not any(section.found for section in sections):
        raise faults[0] if faults else RunError("nothing to measure", "give --text, or a second model")
    return Inspection(subjects, request, tuple(sections))


def _calls(
    measure: Measure, subjects: tuple[Subject, ...], request: Request
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(label, the call) of everything that one measure does."""
    if measure.each is not None:
        yield from ((one.label, partial(measure.each, one, request)) for one in subjects)
    elif measure.together is not None:
        yield ALL, partial(measure.together, subjects, request)


@contextmanager
def _part(label: str, begun: int, end: int, whole: int) -> Iterator[None]:
    """Have progress inside count as this part of the whole; a call does not know how many things it will do.

    So each is given half of what is left of the part, and the whole only ever grows.
    """
    now, doing = begun, ""

    def listen(what: str, done: float, total: float) -> None:
        nonlocal begun, now, doing
        if what != doing:
            begun, doing = now, what
        now = max(now, int(begun + (end - begun) // 2 * min(done, total) // max(total, 1)))
        outer(f"{label}: {what}" if label else what, now, whole)

    with heard(listen) as outer:
        yield
