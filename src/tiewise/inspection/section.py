"""Sections of an inspection: one file each, which says what is asked, what it needs, and makes a `Found`.

    @section(asks="Would applying the shared block more or less often predict better?", place=120, text=True)
    def applications(subject, bench) -> Found: ...

A new section is a new file in the folder `sections`: `--only` takes its function's name, and words, table, figures and
JSON follow from what it finds. `bench` gives the subject's model and text, read once for all sections. What a model
does not allow raises `NotHere`, with the reason. An `Inspection` is what all of them found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from tiewise.core import Late
from tiewise.core.errors import TiewiseError
from tiewise.core.files import strict
from tiewise.core.found import Found, Quantity
from tiewise.inspection.request import LACKS, Bench, Request, Subject
from tiewise.inspection.request import SECTIONS as NAMES

SCHEMA = 1
ALL = ""  # the label of what is said of all subjects together
_VIEW = Late("tiewise.report.faces")  # needs rich, which an inspection does not


class NotHere(TiewiseError):
    """A section that has no meaning for these subjects: left out, and the reason said."""


Measured = Callable[[Subject, Any], Found]  # of a subject and the bench


@dataclass(frozen=True)
class Section:
    """One section."""

    name: str
    asks: str  # the question that is its title
    place: int  # in the order in which sections are told
    measure: Measured
    text: bool = False  # whether it needs a text
    weight: int = 1  # how many times as long it takes as most others, roughly; for progress


SECTIONS: dict[str, Section] = {}


def section(*, asks: str, place: int, text: bool = False, weight: int = 1) -> Callable[[Measured], Measured]:
    """Register a function of the folder `sections` as a section."""

    def registered(measure: Measured) -> Measured:
        name = measure.__name__
        SECTIONS[name] = Section(name, asks, place, measure, text, weight)
        return measure

    return registered


def sections() -> tuple[Section, ...]:
    """Every section of the folder, in order; last those that a light install cannot run, which say what they lack."""
    lacking = []
    for name in NAMES:
        try:
            import_module(f"tiewise.inspection.sections.{name}")
        except ModuleNotFoundError as error:
            if (error.name or "tiewise").startswith("tiewise"):
                raise
            lacking.append(Section(name, name, 0, _lacks))
    return (*sorted(SECTIONS.values(), key=lambda one: one.place), *lacking)


def _lacks(subject: Subject, bench: Bench) -> Found:
    raise NotHere(LACKS)


@dataclass(frozen=True)
class SectionFound:
    """What one section gave."""

    name: str
    found: Mapping[str, Any]  # label of the subject → `Found`
    left_out: Mapping[str, str]  # label → why there is none

    def record(self) -> dict[str, Any]:
        """Everything as strict JSON takes it: what is not a number, as an interval of one value, is None."""
        return {
            "found": {label: strict(found.record()) for label, found in self.found.items()},
            "left_out": dict(self.left_out),
        }


@dataclass(frozen=True)
class TieOrNot:
    """All evidence of one inspection."""

    rows: tuple[tuple[str, Quantity], ...]  # (section, what it measured of which models), `p` adjusted over all rows
    verdict: str  # what a comparison of losses says, or that there is none

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        rows = [
            {
                "question": q.question,
                "measure": measure(q),
                "about": q.of,
                **{"value": q.value, "low": q.low, "high": q.high, "level": q.chance or 0.0, "p": q.p},
                "speaks": q.speaks,
                "why": q.why,
                "section": section,
            }
            for section, q in self.rows
        ]
        return {"rows": rows, "verdict": self.verdict}


def measure(q: Quantity) -> str:
    """What was measured, with its unit."""
    return q.name if not q.unit or q.unit in q.name else f"{q.name}, {q.unit}"


@dataclass(frozen=True, repr=False)
class Inspection:
    """All sections, in their order. In a notebook it shows what the command prints; its `repr` is the answers alone."""

    subjects: tuple[Subject, ...]
    request: Request
    sections: tuple[SectionFound, ...]

    def __repr__(self) -> str:
        lines = [f"Inspection of {', '.join(subject.label for subject in self.subjects)}"]
        for section in self.sections:
            answers: dict[str, list[str]] = {}
            for label, found in section.found.items():
                answers.setdefault(getattr(found, "verdict", None) or found.answer, []).append(label)
            said = [f"{', '.join(of)}: {answer}".removeprefix(": ") for answer, of in answers.items()]
            none = f"none: {'; '.join(dict.fromkeys(section.left_out.values()))}"
            lines.append(f"  {section.name}: {'; '.join(said) or none}")
        return "\n".join([*lines, "  .found(name) gives a section's results, .record() everything as JSON takes it"])

    def _repr_html_(self) -> str:
        return str(_VIEW.inspection_html(self))

    def section(self, name: str) -> SectionFound | None:
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
            "request": asdict(self.request),
            "sections": {section.name: section.record() for section in self.sections},
        }
