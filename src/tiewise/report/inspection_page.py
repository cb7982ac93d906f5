"""`write_inspection`: an inspection as one HTML file (see `tiewise.report.sheet`)."""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tiewise.inspection.inspect import Inspection
from tiewise.inspection.inspect import Section as Part
from tiewise.inspection.section import SECTIONS
from tiewise.report import faces, sheet
from tiewise.report.figures_of_found import panels
from tiewise.report.grid import Table
from tiewise.report.inspected.drawn import DRAWN
from tiewise.report.inspected.words import WORDS, absent, left_out, title
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
        heading=html.escape(WORDS[first.name].TITLE),
        lead=sheet.paragraphs("\n".join(_lines(first))),
        results="".join(sheet.table(table, caption) for caption, table in _made(first)),
        note=_notes(left_out(first)),
        sections=list(_sections(inspection)),
        command=command,
        made=_places(inspection),
        contents=True,
    ).render()


def _sections(inspection: Inspection) -> Iterator[Section]:
    """All but the first."""
    for part in inspection.sections[1:]:
        if not part.found:
            continue
        if part.name in SECTIONS:
            yield _section(part)
            continue
        new = DRAWN[part.name].panels(part.found) if part.name in DRAWN else []
        lead = "".join(f'<p class="said">{html.escape(line)}</p>' for line in _lines(part))
        tables = "".join(sheet.folded(table, caption) for caption, table in _made(part))
        yield Section(html.escape(title(part.name)), new, tables + _notes(left_out(part)), lead=lead)
    yield Section("Not measured", [], _notes(absent(inspection.sections)))


def _section(part: Part) -> Section:
    """One answer, one table with a row for each model, the figures, then every number for whoever asks."""
    first = faces.summary(part.found)
    lead = f'<p class="said">{html.escape(faces.sentence(part.found))}</p>'
    lead += sheet.table(first, title(part.name)) if first else ""
    every = "".join(sheet.folded(made, caption) for caption, made in faces.tables(part.found))
    extra = every + _notes(faces.notes(part.found)) + _notes(left_out(part))
    return Section(html.escape(title(part.name)), panels(part.found), extra, lead=lead)


def _notes(lines: Iterable[str]) -> str:
    return "".join(f'<p class="note">{html.escape(line)}</p>' for line in lines)


def _lines(part: Part) -> Iterator[str]:
    if part.found:
        yield from WORDS[part.name].lines(part.found)


def _made(part: Part) -> list[tuple[str, Table]]:
    return WORDS[part.name].tables(part.found) if part.found else []


def _places(inspection: Inspection) -> str:
    items = "".join(
        f"<div><dt>{html.escape(s.label)}</dt><dd>{html.escape(str(s.folder.path))}</dd></div>"
        for s in inspection.subjects
    )
    return f'<div class="facts"><div><h3>Models</h3><dl>{items}</dl></div></div>'
