"""The terminal's view of an inspection: the evidence as a table, then each section's findings in sentences.

Their tables are in the page and in the JSON: on a terminal they would bury what they say.
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from tiewise.core.numerals import plain
from tiewise.inspection.evidence import NAME as EVIDENCE
from tiewise.inspection.evidence import TieOrNot
from tiewise.inspection.section import Inspection, SectionFound
from tiewise.report import faces
from tiewise.report.grid import Table
from tiewise.report.inspected import evidence
from tiewise.report.inspected.words import absent, left_out, title


def inspection_view(inspection: Inspection) -> RenderableType:
    """Return an inspection as it is printed. Whatever comes from a checkpoint is `Text`, never markup."""
    names = Text()
    for subject in inspection.subjects:
        names.append(subject.label, "bold")
        names.append(f"  {subject.folder.path}\n", "dim")
    found = [section for section in inspection.sections if section.found]
    return Group(names, *(part for section in found for part in _section(section)), *_absent(inspection))


def _section(section: SectionFound) -> Iterator[RenderableType]:
    yield Text(title(section.name), "bold")
    if section.name != EVIDENCE:
        yield Padding(Text(faces.sentence(section.found)), (0, 0, 0, 2))
        yield from _table(faces.summary(section.found))
        for note in faces.notes(section.found):
            yield Padding(Text(note, "dim"), (0, 0, 0, 2))
    else:
        for line in evidence.lines(section.found):
            yield Padding(Text(line), (0, 0, 0, 2))
    if section.name == EVIDENCE:
        yield from (_evidence(found) for found in section.found.values() if found.rows)
    for line in left_out(section):
        yield Padding(Text(line, "dim"), (0, 0, 0, 2))
    yield Text()


def _table(made: Table | None) -> Iterator[RichTable]:
    """A row for each model; long names of columns are broken into lines."""
    if made is not None:
        shown = RichTable(box=SIMPLE_HEAD, pad_edge=False)
        for name in made.header:
            shown.add_column(Text(name), overflow="fold")
        for row in made.rows:
            shown.add_row(*map(Text, row))
        yield shown


def _absent(inspection: Inspection) -> Iterator[RenderableType]:
    lines = list(absent(inspection.sections))
    if lines:
        yield Text("Not measured", "bold")
    for line in lines:
        yield Padding(Text(line, "dim"), (0, 0, 0, 2))


def _evidence(found: TieOrNot) -> RichTable:
    made = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for name, ratio in (("question", 5), ("model", 2), ("measured", 3), ("no effect", 1), ("speaks for", 2)):
        made.add_column(name, ratio=ratio, overflow="fold")
    for row in found.rows:
        asked = Text.assemble(row.question, "\n", (row.measure, "dim"))
        made.add_row(asked, Text(row.about), evidence.measured(row), plain(row.level, 3), row.speaks)
    return made
