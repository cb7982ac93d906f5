"""`write_inspection`: an inspection as one HTML file (see `tiewise.report.sheet`)."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Iterator
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
        heading=html.escape(evidence.TITLE),
        lead=sheet.paragraphs("\n".join(evidence.lines(first.found))),
        results="".join(sheet.table(table, caption) for caption, table in evidence.tables(first.found)),
        note=_notes(left_out(first)),
        sections=list(_sections(inspection)),
        command=command,
        made=_places(inspection),
        contents=True,
    ).render()


def _sections(inspection: Inspection) -> Iterator[Section]:
    """All but the first."""
    for part in inspection.sections[1:]:
        if part.found:
            yield _section(part)
    yield Section("Not measured", [], _notes(absent(inspection.sections)))


def _section(part: SectionFound) -> Section:
    """One answer, one table with a row for each model, the figures, then every number for whoever asks."""
    first = faces.summary(part.found)
    lead = f'<p class="said">{html.escape(faces.sentence(part.found))}</p>'
    lead += sheet.table(first, title(part.name)) if first else ""
    every = "".join(sheet.folded(made, caption) for caption, made in faces.tables(part.found))
    extra = every + _notes(faces.notes(part.found)) + _notes(left_out(part))
    return Section(html.escape(title(part.name)), panels(part.found), extra, lead=lead)


def _notes(lines: Iterable[str]) -> str:
    return "".join(f'<p class="note">{html.escape(line)}</p>' for line in lines)


def _places(inspection: Inspection) -> str:
    items = "".join(
        f"<div><dt>{html.escape(s.label)}</dt><dd>{html.escape(str(s.folder.path))}</dd></div>"
        for s in inspection.subjects
    )
    return f'<div class="facts"><div><h3>Models</h3><dl>{items}</dl></div></div>'
