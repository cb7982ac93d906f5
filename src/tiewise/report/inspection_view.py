"""The terminal's view of an inspection: the verdict, what can decide, and one sentence for each section.

A reader who wants the numbers says `--full` or `--only`, or opens the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from tiewise.core.found import ONE, TWO
from tiewise.inspection.evidence import TieOrNot
from tiewise.inspection.section import Inspection, SectionFound
from tiewise.report import faces
from tiewise.report.grid import Table

_BREAKS = re.compile(f" (?=\\[[^ ]+, |→ (?:{ONE}|{TWO})$)")
ABREAST = 3  # models in one table, which fit 80 columns beside a question
MORE = "--full prints the tables, --out DIR writes them with figures as a page."


def inspection_view(inspection: Inspection, full: bool = False) -> RenderableType:
    """Return an inspection as it is printed. Whatever comes from a checkpoint is `Text`, never markup."""
    first, *sections = inspection.sections
    (evidence,) = first.found.values()
    absent = faces.absent(sections)
    return Group(
        _subjects(inspection),
        *_decision(evidence, [subject.label for subject in inspection.subjects]),
        *(part for section in sections if section.found for part in _section(section, full)),
        *([Text("Not measured", "bold")] if absent else []),
        *(_indented(line, "dim") for line in absent),
        *([] if full else [Text(MORE, "dim")]),
    )


def inspection_html(inspection: Inspection) -> str:
    """Return the same as HTML, for a notebook."""
    console = Console(file=io.StringIO(), record=True, width=120, highlight=False)
    console.print(inspection_view(inspection))
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _subjects(inspection: Inspection) -> Text:
    run = inspection.subjects[0].run
    if run is not None:
        labels = ", ".join(subject.label for subject in inspection.subjects)
        return Text.assemble((labels, "bold"), (f"  {run}", "dim"))
    models = [Text.assemble((one.label, "bold"), (f"  {one.folder.path}", "dim")) for one in inspection.subjects]
    return Text("\n").join(models)


def _decision(found: TieOrNot, models: list[str]) -> Iterator[RenderableType]:
    yield Text(f"\n{faces.TITLE}", "bold")
    yield _indented(faces.verdict(found))
    for start in range(0, len(models), ABREAST):
        table = faces.deciding(found, models[start : start + ABREAST])
        if table is not None:
            yield Padding(_table(table), (0, 0, 1, 0))


def _section(section: SectionFound, full: bool) -> Iterator[RenderableType]:
    yield Text(faces.title(section.name), "bold")
    yield _indented(faces.sentence(section.found))
    if full:
        for made in (faces.summary(section.found), faces.numbers(section.found)):
            if made is not None:
                yield Padding(_table(made), (1, 0, 0, 0))
        for caption, table in faces.listings(section.found):
            yield Padding(Text(caption, "italic"), (1, 0, 0, 0))
            yield _table(table)
        yield from (_indented(note, "dim") for note in faces.notes(section))
        yield Text()


def _indented(line: str, style: str = "") -> Padding:
    return Padding(Text(line, style), (0, 0, 0, 2))


def _table(made: Table) -> RichTable:
    """A table whose cells break where a reader would: before an interval, and before what it speaks for."""
    shown = RichTable(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in made.header:
        shown.add_column(Text(name), overflow="fold")
    for row in made.rows:
        shown.add_row(*(Text(_BREAKS.sub(r"\n", cell)) for cell in row))
    return shown
