"""`write_inspection`: an inspection as one HTML file (see `tiewise.report.sheet`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tiewise.inspection.section import Inspection, SectionFound
from tiewise.report import faces, sheet
from tiewise.report.figures_of_found import panels
from tiewise.report.inspected import evidence
from tiewise.report.inspected.words import absent, left_out, title
from tiewise.report.sheet import Section, Sheet

NAME = "report.html"


def write_inspection(inspection: Inspection, folder: str | os.PathLike[str], command: str) -> Path:
    """Write `report.html` into `folder`, whole or not at all, and return its path.

    Raises:
        RunError: when the file cannot be written there.
    """
    return sheet.write(render(inspection, command), Path(folder) / NAME, "--out")


def render(inspection: Inspection, command: str) -> str:
    """Return the page as text."""
    names = ", ".join(subject.label for subject in inspection.subjects)
    first = inspection.sections[0]
    return Sheet(
        command_name="inspect",
        title=f"{names}: tiewise inspection",
        subject=names,
        heading=evidence.TITLE,
        answer=evidence.lines(first.found),
        results=Section("Results", tables=evidence.tables(first.found), notes=list(left_out(first))),
        sections=list(_sections(inspection)),
        command=command,
        facts=[("Models", [(s.label, str(s.folder.path)) for s in inspection.subjects])],
        contents=True,
    ).render()


def _sections(inspection: Inspection) -> Iterator[Section]:
    """All but the first."""
    for part in inspection.sections[1:]:
        if part.found:
            yield _section(part)
    yield Section("Not measured", notes=list(absent(inspection.sections)))


def _section(part: SectionFound) -> Section:
    """One answer, one table with a row for each model, the figures, then every number for whoever asks."""
    first = faces.summary(part.found)
    return Section(
        title(part.name),
        panels(part.found),
        said=[faces.sentence(part.found)],
        tables=[(title(part.name), first)] if first else [],
        folded=list(faces.tables(part.found)),
        notes=[*faces.notes(part.found), *left_out(part)],
    )
