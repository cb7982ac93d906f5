"""Words and tables of any `Measurement`, and how a terminal shows an inspection.

    verdict, deciding, evidence    tie or not? in a sentence; a row for each question that can decide; all behind it
    sentence, summary              of a section: the answer, and a row for each model
    numbers, every, notes          of a section: all numbers, and what to know of them
    inspection_view                all of it in a terminal; `inspection_page` makes the page of the same

In a terminal, `--full` or `--only` prints the numbers; the page has them in any case.
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
from tiewise.inspection.inspection import Inspection, SectionMeasurement, TieOrNot, measure
from tiewise.inspection.inspection import inspect as inspect  # `tiewise.inspect` comes from here, with its view
from tiewise.inspection.workspace import SECTIONS, InspectedModel

TITLE = "Tie or not?"
MORE = "--full prints the tables, --out DIR writes them with figures as a page."
WRITTEN = "--full prints the tables; the page has them, with figures."
ABREAST = 3  # models in one table, which fit 80 columns beside a question
# places to break a cell: before an interval, before the side it speaks for, and before how layers are shared
BREAKS = re.compile(rf" (?=\[[^ ]+, |→ (?:{ONE}|{TWO})$)|(?=\+share=)")


def verdict(found: TieOrNot) -> str:
    """Return the verdict as a sentence."""
    return _as_sentence(found.verdict)


def _as_sentence(text: str) -> str:
    """Return a text with a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:]}."


def deciding(found: TieOrNot, models: Sequence[str]) -> Listing:
    """Return a row for each question and a column for each model.

    The difference of two arms is in the first one's column. The side that a value speaks for, if any, is behind it.
    """
    cells: dict[str, dict[str, str]] = {}  # question → model → value
    for _, q in found.rows:
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


def evidence(found: TieOrNot) -> Listing:
    """Return everything behind the verdict, a row for each measurement."""
    header = ["question", "measure", "model", "measured [95 %]", "no effect", "p (Holm)", "speaks for", "because"]
    rows = []
    for _, q in found.rows:
        row = [q.question, measure(q), q.of, str(q), plain(q.chance or 0.0, 3), plain(q.p, 3), q.speaks, q.why]
        rows.append(row)
    return Listing("Every measurement that can decide", header, rows)


def title(name: str) -> str:
    """Return a section's question, or its name if its package is not installed."""
    if name not in SECTIONS:
        return name
    return SECTIONS[name].question


def sentence(found: Mapping[str, Measurement]) -> str:
    """Return the answer, once if all models give the same, else model by model."""
    models_by_answer = _grouped((label, one.answer) for label, one in found.items())
    if len(models_by_answer) == 1:
        (answer,) = models_by_answer
        return _as_sentence(answer)
    answers = [f"{', '.join(models)}: {answer}" for answer, models in models_by_answer.items()]
    return f"{'; '.join(answers)}."


def _quantities(found: Mapping[str, Measurement]) -> list[Quantity]:
    """Return the quantities of all models."""
    return list(chain.from_iterable(one.quantities for one in found.values()))


def summary(found: Mapping[str, Measurement], name: str = "", of: str = "model") -> Listing:
    """Return a row for each model and a column for each main quantity. No rows if there are none."""
    columns = list(dict.fromkeys(q.name for q in _quantities(found) if q.main))
    if not columns:
        return Listing(name, [of], [])
    values = {}
    for label, one in found.items():
        values[label] = {q.name: str(q) for q in reversed(one.quantities)}  # of one name, the first
    return Listing(name, [of, *columns], _rows_of(values, columns))


def numbers(found: Mapping[str, Measurement]) -> Listing:
    """Return a row for each quantity outside of the summary, and a column for each model."""
    values: dict[str, dict[str, str]] = {}
    for label, one in found.items():
        for q in one.quantities:
            if q.main:
                continue
            name = q.name
            if q.of not in ("", label):
                name = f"{name}, {q.of}"
            values.setdefault(name, {})[label] = str(q)
    return Listing("", ["", *found], _rows_of(values, found))


def every(found: Mapping[str, Measurement]) -> Iterator[Listing]:
    """Yield everything that a section measured: each quantity with how it is read, then its listings."""
    quantities = _quantities(found)
    if quantities:
        header = ["measure", "model", "value [95 %]", "unit", "no effect", "how to read it"]
        rows = [[q.name, q.of, str(q), q.unit or NONE, q.no_effect, q.why] for q in quantities]
        yield Listing("Every number", header, rows)
    yield from listings(found)


def listings(found: Mapping[str, Measurement]) -> Iterator[Listing]:
    """Yield the listings of a section, each under a name that names its model."""
    for one in found.values():
        for listing in one.listings:
            yield Listing(f"{listing.name}, {listing.of}", listing.header, listing.rows)


def notes(section: SectionMeasurement) -> list[str]:
    """Return each note of a section once with its models, and the models left out.

    A section without any finding has none: `absent` has its reasons.
    """
    findings = section.measured
    if not findings:
        return []
    pairs: list[tuple[str, str]] = []  # model, note
    for label, one in findings.items():
        pairs += [(label, note) for note in one.notes]
    lines = []
    for note, models in _grouped(pairs).items():
        if len(models) < len(findings):
            note = f"{', '.join(models)}: {note}"
        lines.append(note)
    for reason, models in _grouped(section.left_out.items()).items():
        lines.append(f"left out of {', '.join(models)}: {reason}")
    return lines


def absent(sections: Iterable[SectionMeasurement]) -> list[str]:
    """Return the names of sections without any finding, and why; those of one reason together."""
    pairs: list[tuple[str, str]] = []  # section, reason
    for section in sections:
        if not section.results:
            pairs += [(section.name, reason) for reason in dict.fromkeys(section.left_out.values())]
    return [f"{', '.join(names)}: {reason}" for reason, names in _grouped(pairs).items()]


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return (name, text) pairs as {text: names}, in the order in which the texts first occur."""
    names_by_text: dict[str, list[str]] = {}
    for name, text in pairs:
        names_by_text.setdefault(text, []).append(name)
    return names_by_text


def inspection_view(inspection: Inspection, full: bool = False, written: bool = False) -> RenderableType:
    """Return an inspection as it is printed. Texts of a checkpoint are `Text`, never markup.

    Args:
        inspection: what was measured.
        full: whether every table is printed.
        written: whether its page is written, so that the last line does not say how to write one.
    """
    parts = list(_inspection_parts(inspection, full))
    if full:
        return Group(*parts)
    last_line = WRITTEN if written else MORE
    return Group(*parts, Text(last_line, "dim"))


def inspection_html(inspection: Inspection) -> str:
    """Return the same as HTML, for a notebook, which has no options."""
    console = Console(file=io.StringIO(), record=True, width=120, highlight=False)
    console.print(*_inspection_parts(inspection, full=False), sep="\n")
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


Inspection.html_view = staticmethod(inspection_html)


def _inspection_parts(inspection: Inspection, full: bool) -> Iterator[RenderableType]:
    """Yield the models, the verdict, what can decide, and one sentence for each section. With `full` its tables too."""
    yield from _subject_lines(inspection.models)
    yield from _verdict_parts(inspection.evidence, [subject.label for subject in inspection.models])
    for section in inspection.sections:
        if section.measured:
            yield Text(title(section.name), "bold")
            yield _indented(sentence(section.measured))
            if full:
                yield from _section_details(section)
    yield from _absent_parts(inspection.sections, full)


def _absent_parts(sections: Iterable[SectionMeasurement], full: bool) -> Iterator[RenderableType]:
    """Yield why sections have no finding; with `full` also how to change that."""
    reasons = absent(sections)
    if reasons:
        yield Text("Not measured", "bold")
    for reason in reasons:
        if not full:
            reason, _, _ = reason.partition("; ")
        yield _indented(reason, "dim")


def _verdict_parts(decision: TieOrNot, models: Sequence[str]) -> Iterator[RenderableType]:
    """Yield the verdict, and in tables of `ABREAST` models each what can decide."""
    yield Text(f"\n{TITLE}", "bold")
    yield _indented(verdict(decision))
    for start in range(0, len(models), ABREAST):
        table = deciding(decision, models[start : start + ABREAST])
        if table.rows:
            yield Padding(_plain_table(table), (0, 0, 1, 0))


def _subject_lines(subjects: Sequence[InspectedModel]) -> Iterator[Text]:
    """Yield the models with their folders, or in one line a comparison's arms with its folder."""
    run = subjects[0].run
    if run is not None:
        yield Text.assemble((", ".join(subject.label for subject in subjects), "bold"), (f"  {run}", "dim"))
        return
    for subject in subjects:
        yield Text.assemble((subject.label, "bold"), (f"  {subject.folder.path}", "dim"))


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
        yield _indented(note, "dim")
    yield Text()


def _indented(line: str, style: str = "") -> Padding:
    """Return a line behind two spaces."""
    return Padding(Text(line, style), (0, 0, 0, 2))


def _plain_table(listing: Listing) -> Table:
    """Return a listing as a table without edges."""
    return rich_table([listing.header, *listing.rows], show_edge=False)


def rich_table(rows: Sequence[Sequence[str]], *, justified: bool = False, show_edge: bool = True) -> Table:
    """Return rows under the first one as a table. `justified` puts all columns but the names on the right.

    Cells break at `BREAKS`.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=show_edge)
    header, *body = rows
    for place, cell in enumerate(header):
        justify: JustifyMethod = "left"
        if justified and place > 0:
            justify = "right"
        table.add_column(_cell_text(cell), justify=justify, overflow="fold")
    for row in body:
        table.add_row(*(_cell_text(cell) for cell in row))
    return table


def _cell_text(cell: str) -> Text:
    """Return a cell with a new line at each of `BREAKS`."""
    return Text(BREAKS.sub("\n", cell))
