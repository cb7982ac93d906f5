"""What a reader is told of an inspection: the words and tables of any `Found`, and how a terminal shows them.

    verdict, deciding, evidence    tie or not? in a sentence; a row for each question that can decide; all behind it
    sentence, summary              of a section: the answer, and a row for each model
    numbers, every, notes          every number, for whoever asks
    inspection_view                all of it in a terminal; `figures` draws the same, and makes a page of it

A reader of the terminal who wants the numbers says `--full` or `--only`, or opens the page.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tiewise.core.found import NEITHER, NONE, ONE, TWO, Found, Listing, plain
from tiewise.inspection.bench import SECTIONS
from tiewise.inspection.inspection import Inspection, SectionFound, TieOrNot, measure
from tiewise.inspection.inspection import inspect as inspect  # `tiewise.inspect` comes from here, with its view

TITLE = "Tie or not?"
MORE = "--full prints the tables, --out DIR writes them with figures as a page."
WRITTEN = "--full prints the tables; the page has them, with figures."
ABREAST = 3  # models in one table, which fit 80 columns beside a question
# where a reader would break a cell: before an interval, before what it speaks for, and before what layers share
BREAKS = re.compile(rf" (?=\[[^ ]+, |→ (?:{ONE}|{TWO})$)|(?=\+share=)")


def verdict(found: TieOrNot) -> str:
    """The verdict as a sentence."""
    return f"{found.verdict[0].upper()}{found.verdict[1:]}."


def deciding(found: TieOrNot, models: Sequence[str]) -> Listing:
    """A row for each question, a column for each model; the difference of two arms stands in the first one's.

    Behind a value stands what it speaks for, if for anything.
    """
    cells: dict[str, dict[str, str]] = {}
    for _, q in found.rows:
        about, _, other = q.of.partition(" − ")
        question = f"{q.question} ({q.of})" if other else q.question
        value = str(q) if q.speaks == NEITHER else f"{q} → {q.speaks}"
        cells.setdefault(question, {}).update(dict.fromkeys(about.split(", "), value))
    rows = [[question, *(by_model.get(model, NONE) for model in models)] for question, by_model in cells.items()]
    return Listing("What can decide", ["", *models], rows)


def evidence(found: TieOrNot) -> Listing:
    """Everything behind the verdict."""
    header = ["question", "measure", "model", "measured [95 %]", "no effect", "p (Holm)", "speaks for", "because"]
    rows = [
        [q.question, measure(q), q.of, str(q), plain(q.chance or 0.0, 3), plain(q.p, 3), q.speaks, q.why]
        for _, q in found.rows
    ]
    return Listing("Every measurement that can decide", header, rows)


def title(name: str) -> str:
    """Title of a section: the question that it asks; its name where what it needs is not installed."""
    return SECTIONS[name].asks if name in SECTIONS else name


def sentence(found: Mapping[str, Found]) -> str:
    """The answer: once where all models give the same, else model by model."""
    answers = _alike((label, one.answer) for label, one in found.items())
    if len(answers) == 1:
        (said,) = answers
        return f"{said[0].upper()}{said[1:]}."
    return "; ".join(f"{', '.join(labels)}: {answer}" for answer, labels in answers.items()) + "."


def summary(found: Mapping[str, Found], name: str = "", of: str = "model") -> Listing:
    """One row for each model, one column for each main quantity; no rows where there is none."""
    names = list(dict.fromkeys(q.name for one in found.values() for q in one.quantities if q.main))
    values = {label: {q.name: str(q) for q in reversed(one.quantities)} for label, one in found.items()}
    rows = [[label, *(by_name.get(name, NONE) for name in names)] for label, by_name in values.items()]
    return Listing(name, [of, *names], rows if names else [])


def numbers(found: Mapping[str, Found]) -> Listing:
    """One row for each quantity that the summary leaves out, one column for each model."""
    rows: dict[str, dict[str, str]] = {}
    for label, one in found.items():
        for q in one.quantities:
            if not q.main:
                of = "" if q.of in ("", label) else f", {q.of}"
                rows.setdefault(f"{q.name}{of}", {})[label] = str(q)
    made = [[name, *(by_model.get(label, NONE) for label in found)] for name, by_model in rows.items()]
    return Listing("", ["", *found], made)


def every(found: Mapping[str, Found]) -> Iterator[Listing]:
    """Everything that a section measured: each quantity with how it is read, then what it lists."""
    quantities = [q for one in found.values() for q in one.quantities]
    if quantities:
        header = ["measure", "model", "value [95 %]", "unit", "no effect", "how to read it"]
        rows = [[q.name, q.of, str(q), q.unit or NONE, q.no_effect, q.why] for q in quantities]
        yield Listing("Every number", header, rows)
    yield from listings(found)


def listings(found: Mapping[str, Found]) -> Iterator[Listing]:
    """What a section lists, each under a name that says of which model."""
    for one in found.values():
        for listing in one.listings:
            yield Listing(f"{listing.name}, {listing.of}", listing.header, listing.rows)


def notes(section: SectionFound) -> list[str]:
    """What a reader must know of a section, and which models it leaves out; what is said of several models, once."""
    said = _alike((label, note) for label, one in section.found.items() for note in one.notes)
    every = [n if len(labels) == len(section.found) else f"{', '.join(labels)}: {n}" for n, labels in said.items()]
    left_out = _alike(section.left_out.items()) if section.found else {}
    return every + [f"left out of {', '.join(labels)}: {reason}" for reason, labels in left_out.items()]


def absent(sections: Iterable[SectionFound]) -> list[str]:
    """Names of the sections that have nothing at all, and why; those of one reason together."""
    reasons = _alike(
        (section.name, reason)
        for section in sections
        if not section.found
        for reason in dict.fromkeys(section.left_out.values())
    )
    return [f"{', '.join(titles)}: {reason}" for reason, titles in reasons.items()]


def _alike(said: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """{what is said: of whom}, in the order in which it is first said."""
    found: dict[str, list[str]] = {}
    for who, what in said:
        found.setdefault(what, []).append(who)
    return found


def inspection_view(inspection: Inspection, full: bool = False, written: bool = False) -> RenderableType:
    """Return an inspection as it is printed. Whatever comes from a checkpoint is `Text`, never markup.

    Args:
        inspection: what was measured.
        full: whether every table is printed.
        written: whether its page is written, so that the last line does not say how to write one.
    """
    return Group(*_printed(inspection, full, WRITTEN if written else MORE))


def inspection_html(inspection: Inspection) -> str:
    """Return the same as HTML, for a notebook, which has no options."""
    console = Console(file=io.StringIO(), record=True, width=120, highlight=False)
    console.print(*list(_printed(inspection, full=False))[:-1], sep="\n")
    return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")


Inspection.html_view = staticmethod(inspection_html)


def _printed(inspection: Inspection, full: bool, more: str = MORE) -> Iterator[RenderableType]:
    """The models, the verdict, what can decide, and one sentence for each section; with `full` its tables too."""

    def indented(line: str, style: str = "") -> Padding:
        return Padding(Text(line, style), (0, 0, 0, 2))

    def printed(listing: Listing) -> Table:
        return rich_table([listing.header, *listing.rows], show_edge=False)

    models = [subject.label for subject in inspection.subjects]
    run = inspection.subjects[0].run
    if run is not None:
        yield Text.assemble((", ".join(models), "bold"), (f"  {run}", "dim"))
    else:
        yield from (Text.assemble((one.label, "bold"), (f"  {one.folder.path}", "dim")) for one in inspection.subjects)
    first, *sections = inspection.sections
    (found,) = first.found.values()
    yield Text(f"\n{TITLE}", "bold")
    yield indented(verdict(found))
    for start in range(0, len(models), ABREAST):
        if (table := deciding(found, models[start : start + ABREAST])).rows:
            yield Padding(printed(table), (0, 0, 1, 0))
    for section in (section for section in sections if section.found):
        yield Text(title(section.name), "bold")
        yield indented(sentence(section.found))
        if full:
            for made in (summary(section.found), numbers(section.found)):
                if made.rows:
                    yield Padding(printed(made), (1, 0, 0, 0))
            for listing in listings(section.found):
                yield Padding(Text(listing.name, "italic"), (1, 0, 0, 0))
                yield printed(listing)
            yield from (indented(note, "dim") for note in notes(section))
            yield Text()
    if left_out := absent(sections):
        yield Text("Not measured", "bold")
        yield from (indented(line if full else line.partition("; ")[0], "dim") for line in left_out)
    if not full:
        yield Text(more, "dim")


def rich_table(rows: Sequence[Sequence[str]], *, justified: bool = False, show_edge: bool = True) -> Table:
    """Rows under the first, whose cells break where a reader would; `justified` puts all but names on the right."""
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=show_edge)
    texts = [[Text(BREAKS.sub("\n", cell)) for cell in row] for row in rows]
    for place, name in enumerate(texts[0]):
        made.add_column(name, justify="right" if justified and place else "left", overflow="fold")
    for row in texts[1:]:
        made.add_row(*row)
    return made
