"""Views of a plan and of the catalogue for a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tiewise.core import Late
from tiewise.core.measurement import NONE, Listing, plain
from tiewise.planning.catalogue import BETTER, Model
from tiewise.planning.plan_rows import (
    EVIDENCE_HEADER,
    Record,
    atlas_sentences,
    certainty_sentence,
    columns,
    lookup_tables,
    main_rows,
    model_in_words,
    rows,
    short,
)

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

_BOX, _CONSOLE, _TABLE, _TEXT = (Late(f"rich.{name}") for name in ("box", "console", "table", "text"))
MORE = "--full prints every figure, the thresholds, the nearest models, and the assumptions."
WIDEST = 24  # maximum width of a choice's column, in letters
GAP = 2  # letters between two columns of a table
SOURCE = 19  # maximum length of a source, in letters
WIDE = 100  # minimum width of a terminal with sources, in letters
# columns of the catalogue that a narrow terminal leaves out, first to last
LESS_NEEDED = ("status", "V/D", "tables", "tied")
HEADER = ("model", "V", "D", "L", "V/D", "params", "tables", "tied", "status", "source")
TEXT_COLUMNS = ("model", "tied", "status", "source")  # all others are numbers


def plan_view(record: Record, width: int, full: bool = False) -> Group:
    """Return the view of a plan's record for a terminal of `width` columns.

    The recommendation is first, then one table. `full` adds every figure, the other tables, and remarks.
    """
    group: Group = _CONSOLE.Group(*_parts(record, width, full))
    return group


def _parts(record: Record, width: int, full: bool) -> Iterator[RenderableType]:
    """Yield the recommendation, the model, tables of choices, their certainty, and with `full` all else."""
    recommendation, *reasons = record["recommendation"]["sentences"]
    yield _TEXT.Text(recommendation, style="bold")
    for reason in reasons:
        yield _TEXT.Text(reason)
    yield _TEXT.Text(model_in_words(record), style="dim")
    names, figures = columns(record), rows(record) if full else main_rows(record)
    fits = _fitting_choices(names, figures, width)
    for start in range(0, len(names), fits):
        yield _choices_table(names, figures, slice(start, start + fits))
    uncertain = certainty_sentence(record)
    if uncertain:
        yield _TEXT.Text(uncertain)
    if not full:
        yield _TEXT.Text(MORE, style="dim")
        return
    yield from _details(record)


def _details(record: Record) -> Iterator[RenderableType]:
    """Yield the tables below the choices, and the remarks."""
    for listing in lookup_tables(record):
        yield _TEXT.Text(listing.name, style="bold")
        if listing.header is EVIDENCE_HEADER:
            yield _TEXT.Text(atlas_sentences(record))
        yield _lookup_table(listing)
    for remark in (*record["notes"], BETTER):
        yield _TEXT.Text(f"· {remark}", style="dim")


def _fitting_choices(names: Sequence[str], figures: Sequence[Sequence[str]], width: int) -> int:
    """Return how many choices fit side by side into `width` columns, at least one."""
    label_width, texts = 0, []
    for name, *cells in figures:
        indent = 2 if cells else 0
        label_width = max(label_width, len(name) + indent)
        texts += cells
    for name in names:
        texts += name.split("\n")
    column_width = min(WIDEST, max(len(text) for text in texts))
    return max(1, (width - label_width - 1) // (column_width + GAP))


def _choices_table(names: Sequence[str], figures: Sequence[Sequence[str]], chosen: slice) -> Table:
    """Return the figures of the `chosen` choices, one column each.

    A row of `figures` is a name and a cell for each choice, or only a name, which titles the rows below it.
    """
    table: Table = _TABLE.Table(box=_BOX.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in names[chosen]:
        table.add_column(_TEXT.Text(name), justify="right", overflow="fold")
    for name, *cells in figures:
        label = _TEXT.Text(f"  {name}") if cells else _TEXT.Text(name, style="bold")
        table.add_row(label, *map(_TEXT.Text, cells[chosen]), style="bold" if name == "total" else "")
    table.add_row("")
    return table


def _lookup_table(listing: Listing) -> Table:
    """Return an indented table without lines. Columns of numbers are right-aligned."""
    table: Table = _TABLE.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    first, *others = listing.header
    table.add_column(f"  {first}", justify="left")
    for index, name in enumerate(others, 1):
        has_numbers = all(row[index][:1] in "0123456789−–" for row in listing.rows)
        table.add_column(name, justify="right" if has_numbers else "left")
    for name, *cells in listing.rows:
        table.add_row(_TEXT.Text(f"  {name}"), *map(_TEXT.Text, cells))
    table.add_row("")
    return table


def models_table(models: Sequence[Model], width: int) -> Table:
    """Return a table with a row for each model, and a caption about better evidence.

    Columns for which a terminal of `width` has no room are left out.
    """
    cells = [dict(zip(HEADER, _model_cells(model), strict=True)) for model in models]
    fitting = _fitting_columns(cells, width)
    table: Table = _TABLE.Table(box=_BOX.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.caption, table.caption_justify = _TEXT.Text(_caption(len(models), fitting)), "left"
    for name in fitting:
        # a name may wrap, a figure may not
        is_name = name == "model"
        table.add_column(
            name, justify="left" if name in TEXT_COLUMNS else "right", no_wrap=not is_name, overflow="fold"
        )
    for row in cells:
        table.add_row(*(_TEXT.Text(row[name]) for name in fitting))
    return table


def _fitting_columns(cells: Sequence[dict[str, str]], width: int) -> list[str]:
    """Return the columns that fit into a terminal. Only a wide one has sources."""
    fitting = list(HEADER if width >= WIDE else HEADER[:-1])
    widths = {}
    for name in HEADER:
        texts = [name, *(row[name] for row in cells)]
        widths[name] = max(len(text) for text in texts) + GAP
    for name in LESS_NEEDED:
        needed = sum(widths[column] for column in fitting) - GAP
        if needed > width:
            fitting.remove(name)
    return fitting


def _caption(models: int, columns: Sequence[str]) -> str:
    """Return the lines below the catalogue, which name the columns that were left out."""
    counted = "1 model" if models == 1 else f"{models} models"
    caption = f"\n{counted}; tables: their share of all parameters; ≈: what the name says.\n{BETTER}"
    left_out = [name for name in reversed(LESS_NEEDED) if name not in columns]
    if left_out:
        caption = f"\nA wider terminal, and --json, also show: {', '.join(left_out)}.{caption}"
    return caption


def _model_cells(model: Model) -> list[str]:
    """Return the cells of a model, under `HEADER`."""
    vocab, share, size = NONE, NONE, short(model.size)
    if model.vocab:
        vocab = f"{model.vocab:,}"
    if model.table_share:
        share = f"{100 * model.table_share:.1f} %"
    if model.parameters is None and model.size is not None:
        size = f"≈ {size}"
    return [
        model.name,
        vocab,
        f"{model.width:,}",
        str(model.layers),
        plain(model.ratio, 1),
        size,
        share,
        {True: "yes", False: "no", None: "?"}[model.tied],
        model.checked,
        _short_source(model.source),
    ]


def _short_source(source: str) -> str:
    """Return a source without its details, in at most `SOURCE` letters."""
    name = re.sub("[;,].*| config class default| configs/models", "", source)
    if len(name) > SOURCE:
        return name[: SOURCE - 1].rstrip() + "…"
    return name
