"""`write_inspection`: an inspection as one HTML file (see `tiewise.report.sheet`)."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tiewise.inspection.section import Inspection
from tiewise.report import faces, sheet
from tiewise.report.figures_of_found import panels
from tiewise.report.sheet import Section, Sheet

NAME = "report.html"


def write_inspection(inspection: Inspection, folder: str | os.PathLike[str], command: str) -> Path:
    """Write `report.html` into `folder`, whole or not at all, and return its path.

    Raises:
        RunError: when the file cannot be written there.
    """
    return sheet.write(render(inspection, command), Path(folder) / NAME, "--out")


def render(inspection: Inspection, command: str) -> str:
    """Return the page as text: the verdict, what can decide, then an answer, a table and a figure for each section."""
    models = [subject.label for subject in inspection.subjects]
    (evidence,) = inspection.sections[0].found.values()
    decisive = faces.deciding(evidence, models)
    places = "".join(
        f"<div><dt>{html.escape(s.label)}</dt><dd>{html.escape(str(s.folder.path))}</dd></div>"
        for s in inspection.subjects
    )
    return Sheet(
        command_name="inspect",
        title=f"{', '.join(models)}: tiewise inspection",
        subject=", ".join(models),
        heading=html.escape(faces.TITLE),
        lead=sheet.paragraphs(faces.verdict(evidence)),
        results=sheet.table(decisive, faces.EVIDENCE) if decisive else "",
        note=sheet.folded(faces.evidence(evidence), "Every measurement that can decide") if decisive else "",
        sections=list(_sections(inspection)),
        command=command,
        made=f'<div class="facts"><div><h3>Models</h3><dl>{places}</dl></div></div>',
        contents=True,
    ).render()


def _sections(inspection: Inspection) -> Iterator[Section]:
    for part in inspection.sections[1:]:
        if part.found:
            title, first, figures = faces.title(part.name), faces.summary(part.found), panels(part.found)
            every = "".join(sheet.folded(table, caption) for caption, table in faces.every(part.found))
            said = f'<p class="said">{html.escape(faces.sentence(part.found))}</p>'
            yield Section(
                html.escape(title),
                figures[:1],
                more=figures[1:],
                extra=every + _notes(faces.notes(part)),
                lead=said + (sheet.table(first, title) if first else ""),
            )
    yield Section("Not measured", [], _notes(faces.absent(inspection.sections)))


def _notes(lines: Iterable[str]) -> str:
    return "".join(f'<p class="note">{html.escape(line)}</p>' for line in lines)
