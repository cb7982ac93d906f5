"""`write_inspection`: an inspection as one HTML file (see `tiewise.report.sheet`)."""

from __future__ import annotations

import os
from pathlib import Path

from tiewise.inspection.section import Inspection
from tiewise.report import faces, sheet
from tiewise.report.figures import panels
from tiewise.report.sheet import PageSection, Sheet

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
    sections = []
    for part in (part for part in inspection.sections[1:] if part.found):
        title, figures = faces.title(part.name), panels(part.found)
        made = PageSection(
            title,
            figures[:1],
            said=[faces.sentence(part.found)],
            tables=[faces.summary(part.found, title)],
            more=figures[1:],
            folded=list(faces.every(part.found)),
            notes=faces.notes(part),
        )
        sections.append(made)
    return Sheet(
        command_name="inspect",
        title=f"{', '.join(models)}: tiewise inspection",
        subject=", ".join(models),
        heading=faces.TITLE,
        answer=[faces.verdict(evidence)],
        results=PageSection(
            "What can decide", tables=[decisive], folded=[faces.evidence(evidence)] if decisive.rows else []
        ),
        sections=[*sections, PageSection("Not measured", notes=faces.absent(inspection.sections))],
        command=command,
        facts=[("Models", [(subject.label, str(subject.folder.path)) for subject in inspection.subjects])],
        contents=True,
    ).render()
