"""The terminal's views of a plan and of the catalogue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tiewise.core.found import NONE, Listing, plain
from tiewise.planning import plan_rows
from tiewise.planning.catalogue import BETTER, Model
from tiewise.planning.plan_rows import Record

WIDEST = 24  # letters of a choice's column
SOURCE = 19  # letters of a source
WIDE = 100  # columns of a terminal that has room for sources
HEADER = ("model", "V", "D", "L", "V/D", "params", "tables", "tied", "status", "source")


def plan_view(record: Record, width: int) -> Group:
    """A plan's record for a terminal of `width`: choices side by side, those that do not fit below, then all else."""
    return Group(*_parts(record, width))


def _parts(record: Record, width: int) -> Iterator[RenderableType]:
    yield Text(plan_rows.subject(record), style="bold")
    yield Text(plan_rows.nearest(record))
    names, shown = plan_rows.columns(record), plan_rows.rows(record)
    labels = max(len(name) + 2 * bool(cells) for name, *cells in shown) + 1
    texts = [line for name in names for line in name.split("\n")] + [cell for _, *cells in shown for cell in cells]
    fits = max(1, (width - labels) // (min(WIDEST, max(map(len, texts))) + 2))
    for start in range(0, len(names), fits):
        part = slice(start, start + fits)
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
        table.add_column("", no_wrap=True)
        for name in names[part]:
            table.add_column(Text(name), justify="right", overflow="fold")
        for name, *cells in shown:
            label = Text(f"  {name}") if cells else Text(name, style="bold")
            table.add_row(label, *map(Text, cells[part]), style="bold" if name == "total" else "")
        table.add_row("")
        yield table
    for listing in plan_rows.lookups(record):
        yield Text(listing.name, style="bold")
        if listing.header is plan_rows.EVIDENCE_HEADER:
            yield Text(plan_rows.evidence(record))
        yield _looked_up(listing)
    for remark in (*record["notes"], BETTER):
        yield Text(f"· {remark}", style="dim")


def _looked_up(listing: Listing) -> Table:
    """A table without lines, indented, columns of numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for place, name in enumerate(listing.header):
        number = all(row[place][:1] in "0123456789−–" for row in listing.rows)
        table.add_column(name if place else f"  {name}", justify="right" if number and place else "left")
    for name, *cells in listing.rows:
        table.add_row(Text(f"  {name}"), *map(Text, cells))
    table.add_row("")
    return table


def models_table(found: Sequence[Model], width: int) -> Table:
    """One row per model and under it how to know better; sources are left out below `WIDE` columns."""
    many = f"{len(found)} model{'' if len(found) == 1 else 's'}"
    caption = f"\n{many}; tables: their share of all parameters; ≈: what the name says.\n{BETTER}"
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.caption, table.caption_justify = Text(caption), "left"
    shown = HEADER if width >= WIDE else HEADER[:-1]
    for name in shown:
        left = name in ("model", "tied", "status", "source")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for m in found:
        source = (
            m.source.split(";")[0].split(",")[0].replace(" config class default", "").replace(" configs/models", "")
        )
        cells = [
            m.name,
            f"{m.vocab:,}" if m.vocab else NONE,
            f"{m.width:,}",
            str(m.layers),
            plain(m.ratio, 1),
            short(m.size) if m.parameters or not m.size else f"≈ {short(m.size)}",
            f"{100 * m.table_share:.1f} %" if m.table_share else NONE,
            {True: "yes", False: "no", None: "?"}[m.tied],
            m.checked,
            source if len(source) <= SOURCE else source[: SOURCE - 1].rstrip() + "…",
        ]
        table.add_row(*map(Text, cells[: len(shown)]))
    return table


def short(count: float | None) -> str:
    """7.24 B, 494 M: three digits, B for billions; a dash where it is not known."""
    return NONE if count is None else plan_rows.scaled(count, ("", "k", "M", "B", "T")).rstrip()
