"""The page of an inspection: the answer, then sentence, table and figures of each section."""

from __future__ import annotations

import os
from pathlib import Path

from tiewise.core.files import write_result
from tiewise.inspection.inspection import Inspection, SectionMeasurement, joint_answer
from tiewise.report import views
from tiewise.report.figures import panels
from tiewise.report.report_page import PageSection, ReportPage


def write_inspection(inspection: Inspection, folder: str | os.PathLike[str], command: str) -> Path:
    """Write `report.html` into `folder`, complete or not at all, and return its path.

    Raises:
        RunError: the file cannot be written.
    """
    return write_result(inspection_page(inspection, command), Path(folder) / "report.html", "out")


def inspection_page(inspection: Inspection, command: str) -> str:
    """Return the page as text: the answer, the deciding table, then every section with results."""
    models = [model.label for model in inspection.models]
    evidence = inspection.evidence
    decisive = views.deciding(evidence, models)
    page_sections = [_page_section(section) for section in inspection.sections if section.measured]
    return ReportPage(
        command_name="inspect",
        title=f"{', '.join(models)}: tiewise inspection",
        subject=", ".join(models),
        heading=_heading(inspection),
        answer=inspection.answer_text().splitlines(),
        results=PageSection("What can decide", tables=[decisive], folded=[views.evidence(evidence)]),
        sections=[*page_sections, PageSection("Not measured", notes=views.absent(inspection.sections))],
        command=command,
        facts=[("Models", [(model.label, str(model.folder.path)) for model in inspection.models])],
        contents=True,
    ).render()


def _heading(inspection: Inspection) -> str:
    """Return the question that the page answers first."""
    if len(inspection.request.only) == 1:
        return views.title(inspection.request.only[0])
    if inspection.request.only:
        return "What the model shows"
    return views.TITLE


def _page_section(section: SectionMeasurement) -> PageSection:
    """Return a section's sentence, summary and first figure; other figures and all numbers are folded."""
    title = views.title(section.name)
    figures = panels(section.measured)
    return PageSection(
        title,
        panels=figures[:1],
        findings=[joint_answer(section.measured)],
        tables=[views.summary(section.measured, title)],
        folded_panels=figures[1:],
        folded=list(views.every_listing(section.measured)),
        notes=views.notes(section),
    )
