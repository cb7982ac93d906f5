"""`carry_out`: every measure that a request can have, on every model, and the reason where there is none.

    subjects × measures → found, or why not → sections → evidence

A measure is a function of one subject, or of all together. One that a model does not allow is left out with its
reason. What the user gave and cannot be used (a text too short, a token that is none) has ended the inspection before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiewise.errors import DataError, RunError, TiewiseError
from tiewise.inspection.request import Progress, Request
from tiewise.inspection.subject import Subject
from tiewise.training.results import strict

SCHEMA = 1
ALL = ""  # the label of what is said of all subjects together


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
    """

    name: str
    each: Callable[[Subject, Request, Progress], Any] | None = None
    together: Callable[[tuple[Subject, ...], Request, Progress], Any] | None = None
    text: bool = False


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


@dataclass(frozen=True)
class Inspection:
    """All sections, in the order of the measures."""

    subjects: tuple[Subject, ...]
    request: Request
    sections: tuple[Section, ...]

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


def carry_out(
    subjects: tuple[Subject, ...], measures: Sequence[Measure], request: Request, progress: Progress
) -> Inspection:
    """Measure.

    Raises:
        TiewiseError: what was given cannot be used, or nothing could be measured.
    """
    sections = []
    faults: list[TiewiseError] = []
    for measure in chosen(measures, request.only):
        found: dict[str, Any] = {}
        left_out: dict[str, str] = {}
        for label, make in _calls(measure, subjects, request, progress):
            try:
                if measure.text and not request.texts and not any(subject.run for subject in subjects):
                    raise NotHere("needs a text", "give --text")
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
    measure: Measure, subjects: tuple[Subject, ...], request: Request, progress: Progress
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(label, the call) of everything that one measure does."""
    if measure.each is None:
        together = measure.together
        assert together is not None
        yield ALL, lambda: together(subjects, request, progress)
        return
    each = measure.each
    for subject in subjects:

        def make(subject: Subject = subject) -> Any:
            return each(subject, request, lambda what, done, total: progress(f"{subject.label}: {what}", done, total))

        yield subject.label, make
