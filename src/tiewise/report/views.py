"""Sentences and tables of any `Measurement`, and an inspection's view in the terminal.

    deciding, evidence             a row for each deciding question; all evidence
    summary                        of a section: a row for each model
    numbers, every_listing, notes  of a section: all numbers, and remarks about them
    inspection_view                everything in a terminal; `inspection_page` is the page with the same parts

In a terminal, `--full` or `--only` prints the numbers; the page always has them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tiewise.core.measurement import NEITHER, NONE, ONE, TWO, Listing, Measurement, Quantity, plain
from tiewise.inspection.inspection import Inspection, SectionMeasurement, TieOrNot, joint_answer, measure
from tiewise.inspection.inspection import inspect as inspect  # `tiewise.inspect` comes from here, with its view
from tiewise.inspection.workspace import SECTIONS, InspectedModel

TITLE = "Tie or not?"
MORE = "--full prints every table; --out DIR writes a page with figures."
WRITTEN = "--full prints every table; the page has them, with figures."
ABREAST = 3  # models in one table; three fit into 80 columns with a question
# cells break before an interval, before the side that the value supports, and before the sharing of layers
BREAKS = re.compile(rf" (?=\[[^ ]+, |→ (?:{ONE}|{TWO})$)|(?=\+share=)")


def deciding(decision: TieOrNot, models: Sequence[str]) -> Listing:
    """Return a row for each question and a column for each model.

    The difference of two arms is in the first arm's column. If a value is evidence for one or two tables, the cell says
    so.
    """
    cells: dict[str, dict[str, str]] = {}  # question → model → value
    for _, q in decision.rows:
        first_models, _, other = q.of.partition(" − ")
        question, value = q.question, str(q)
        if other:
            question = f"{question} ({q.of})"
        if q.speaks != NEITHER:
            value = f"{value} → {q.speaks}"
        cells.setdefault(question, {}).update(dict.fromkeys(first_models.split(", "), value))
    return Listing("What can decide", ["", *models], _rows_of(cells, models))


def _rows_of(cells: Mapping[str, Mapping[str, str]], columns: Iterable[str]) -> list[list[str]]:
    """Return {row: {column: cell}} as rows that begin with their name."""
    names = list(columns)
    rows = []
    for name, by_column in cells.items():
        rows.append([name, *(by_column.get(column, NONE) for column in names)])
    return rows


def evidence(decision: TieOrNot) -> Listing:
    """Return all evidence behind the verdict, a row for each measurement."""
    header = ["question", "measure", "model", "measured [95 %]", "no effect", "p (Holm)", "speaks for", "because"]
    rows = []
    for _, q in decision.rows:
        row = [q.question, measure(q), q.of, str(q), plain(q.chance or 0.0, 3), plain(q.p, 3), q.speaks, q.why]
        rows.append(row)
    return Listing("Every measurement that can decide", header, rows)


def title(name: str) -> str:
    """Return a section's question, or its name if its package is not installed."""
    if name not in SECTIONS:
        return name
    return SECTIONS[name].question


def _quantities(by_model: Mapping[str, Measurement]) -> list[Quantity]:
    """Return the quantities of all models."""
    return list(chain.from_iterable(one.quantities for one in by_model.values()))


def summary(by_model: Mapping[str, Measurement], name: str = "", of: str = "model") -> Listing:
    """Return a row for each model and a column for each main quantity.

    Without any main quantity there are no rows.
    """
    columns = list(dict.fromkeys(q.name for q in _quantities(by_model) if q.main))
    if not columns:
        return Listing(name, [of], [])
    values = {}
    for label, one in by_model.items():
        # reversed, so that of two quantities with one name the first is used
        values[label] = {q.name: str(q) for q in reversed(one.quantities)}
    return Listing(name, [of, *columns], _rows_of(values, columns))


def numbers(by_model: Mapping[str, Measurement]) -> Listing:
    """Return a row for each quantity outside the summary, and a column for each model."""
    values: dict[str, dict[str, str]] = {}
    for label, one in by_model.items():
        for q in one.quantities:
            if q.main:
                continue
            name = q.name
            if q.of not in ("", label):
                name = f"{name}, {q.of}"
            values.setdefault(name, {})[label] = str(q)
    return Listing("", ["", *by_model], _rows_of(values, by_model))


def every_listing(by_model: Mapping[str, Measurement]) -> Iterator[Listing]:
    """Yield all results of a section: each quantity with an explanation, then its listings."""
    quantities = _quantities(by_model)
    if quantities:
        header = ["measure", "model", "value [95 %]", "unit", "no effect", "how to read it"]
        rows = [[q.name, q.of, str(q), q.unit or NONE, q.no_effect, q.why] for q in quantities]
        yield Listing("Every number", header, rows)
    yield from listings(by_model)


def listings(by_model: Mapping[str, Measurement]) -> Iterator[Listing]:
    """Yield the listings of a section, each under a name that contains its model."""
    for one in by_model.values():
        for listing in one.listings:
            yield Listing(f"{listing.name}, {listing.of}", listing.header, listing.rows)


def notes(section: SectionMeasurement) -> list[str]:
    """Return each note of a section once with its models, and the models left out.

    Empty for a section without results: `absent` has its reasons.
    """
    findings = section.measured
    if not findings:
        return []
    pairs: list[tuple[str, str]] = []  # model, note
    for label, one in findings.items():
        pairs += [(label, note) for note in one.notes]
    lines = []
    for note, models in _group_by_text(pairs).items():
        names = ", ".join(models)
        if len(models) < len(findings) and not note.startswith(f"{names}: "):
            note = f"{names}: {note}"
        lines.append(note)
    for reason, models in _group_by_text(section.left_out.items()).items():
        lines.append(f"left out of {', '.join(models)}: {reason}")
    return lines


def absent(sections: Iterable[SectionMeasurement]) -> list[str]:
    """Return the names of sections without results, with reasons, grouped by reason."""
    pairs: list[tuple[str, str]] = []  # section, reason
    for section in sections:
        if not section.results:
            pairs += [(section.name, reason) for reason in dict.fromkeys(section.left_out.values())]
    return [f"{', '.join(names)}: {reason}" for reason, names in _group_by_text(pairs).items()]


def _group_by_text(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return (name, text) pairs as {text: names}, in the order in which the texts first occur."""
    names_by_text: dict[str, list[str]] = {}
    for name, text in pairs:
        names_by_text.setdefault(text, []).append(name)
    return names_by_text


def inspection_view(inspection: Inspection, full: bool = False, written: bool = False) -> RenderableType:
    """Return the terminal's view of an inspection. Texts of a checkpoint are `Text`, never markup.

    Args:
        inspection: the inspection.
        full: print every table.
        written: the page is written, so the last line does not say how to write one.
    """
    parts = list(_inspection_parts(inspection, full))
    if full:
        return Group(*parts)
    last_line = WRITTEN if written else MORE
    return Group(*parts, Text(last_line, "dim"))


def inspection_html(inspection: Inspection) -> str:
    """Return the same view as HTML, for a notebook, which has no options."""
    console = Console(file=io.StringIO(), record=True, width=120, highlight=False)
    labels = [model.label for model in inspection.models]
    answer, *others = _inspection_parts(inspection, full=False)
    console.print(answer, *_deciding_tables(inspection.evidence, labels), *others, sep="\n")
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


Inspection.html_view = staticmethod(inspection_html)


def _inspection_parts(inspection: Inspection, full: bool) -> Iterator[RenderableType]:
    """Yield the answer, the models, and one sentence for each section.

    The answer is the verdict, or the sentences of the sections that were requested by name. With `full`, yield the
    deciding table and the tables of each section too.
    """
    yield Text(inspection.answer_text(), "bold")
    yield from _model_lines(inspection.models)
    if full:
        yield from _deciding_tables(inspection.evidence, [model.label for model in inspection.models])
    for section in inspection.sections:
        if section.measured:
            yield Text(title(section.name), "bold")
            if not inspection.request.only:  # else the answer is the first line
                yield _indent(joint_answer(section.measured))
            if full:
                yield from _section_details(section)
    yield from _absent_parts(inspection.sections, full)


def _absent_parts(sections: Iterable[SectionMeasurement], full: bool) -> Iterator[RenderableType]:
    """Yield the reasons why sections have no results; with `full` also how to change that."""
    reasons = absent(sections)
    if reasons:
        yield Text("Not measured", "bold")
    for reason in reasons:
        if not full:
            reason, _, _ = reason.partition("; ")
        yield _indent(reason, "dim")


def _deciding_tables(decision: TieOrNot, models: Sequence[str]) -> Iterator[RenderableType]:
    """Yield the deciding tables, each of at most `ABREAST` models."""
    for start in range(0, len(models), ABREAST):
        table = deciding(decision, models[start : start + ABREAST])
        if table.rows:
            yield Padding(_plain_table(table), (0, 0, 1, 0))


def _model_lines(models: Sequence[InspectedModel]) -> Iterator[Text]:
    """Yield the models with their folders.

    For a comparison, yield one line with its arms and its folder.
    """
    run = models[0].run
    if run is not None:
        yield Text.assemble((", ".join(model.label for model in models), "bold"), (f"  {run}", "dim"))
        return
    for model in models:
        yield Text.assemble((model.label, "bold"), (f"  {model.folder.path}", "dim"))


def _section_details(section: SectionMeasurement) -> Iterator[RenderableType]:
    """Yield all tables and notes of a section."""
    findings = section.measured
    for table in (summary(findings), numbers(findings)):
        if table.rows:
            yield Padding(_plain_table(table), (1, 0, 0, 0))
    for listing in listings(findings):
        yield Padding(Text(listing.name, "italic"), (1, 0, 0, 0))
        yield _plain_table(listing)
    for note in notes(section):
        yield _indent(note, "dim")
    yield Text()


def _indent(line: str, style: str = "") -> Padding:
    """Return a line indented by two spaces."""
    return Padding(Text(line, style), (0, 0, 0, 2))


def _plain_table(listing: Listing) -> Table:
    """Return a listing as a table without edges."""
    return rich_table([listing.header, *listing.rows], show_edge=False)


def rich_table(rows: Sequence[Sequence[str]], *, justified: bool = False, show_edge: bool = True) -> Table:
    """Return a table of rows, of which the first is the header.

    `justified` aligns all columns except the first to the right. Cells break at `BREAKS`.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=show_edge)
    header, *body = rows
    for index, cell in enumerate(header):
        justify: JustifyMethod = "left"
        if justified and index > 0:
            justify = "right"
        table.add_column(_cell_text(cell), justify=justify, overflow="fold")
    for row in body:
        table.add_row(*(_cell_text(cell) for cell in row))
    return table


def _cell_text(cell: str) -> Text:
    """Return a cell with a new line at each of `BREAKS`."""
    return Text(BREAKS.sub("\n", cell))
