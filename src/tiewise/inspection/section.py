"""Sections of an inspection: one file each, which says what is asked, what it needs, and makes a `Found`.

    @section(asks="Would applying the shared block more or less often predict better?", place=120, text=True)
    def applications(subject, bench) -> Found: ...

A new section is a new file in the folder `sections`: `--only` takes its function's name, and words, table, figures and
JSON follow from what it finds. `bench` gives the subject's model and text, read once for all sections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from tiewise.core.found import Found
from tiewise.inspection.request import FILES
from tiewise.inspection.subject import Subject

if TYPE_CHECKING:  # the sections' own files run models, and the names of sections are asked for without torch
    from tiewise.inspection.workbench import Workbench

Measured = Callable[[Subject, "Workbench"], Found]


@dataclass(frozen=True)
class Section:
    """One section."""

    name: str
    asks: str  # the question that is its title
    place: int  # in the order in which sections are told
    text: bool  # whether it needs a text
    weight: int  # how many times as long it takes as most others, roughly; for progress
    measure: Measured


SECTIONS: dict[str, Section] = {}


def section(*, asks: str, place: int, text: bool = False, weight: int = 1) -> Callable[[Measured], Measured]:
    """Register a function of the folder `sections` as a section."""

    def registered(measure: Measured) -> Measured:
        SECTIONS[measure.__name__] = Section(measure.__name__, asks, place, text, weight, measure)
        return measure

    return registered


def sections() -> tuple[Section, ...]:
    """Every section of the folder, in order."""
    for name in FILES:
        import_module(f"tiewise.inspection.sections.{name}")
    return tuple(sorted(SECTIONS.values(), key=lambda one: one.place))
