"""The terminal's view of a plan: choices side by side, thresholds and neighbours under them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tiewise.planning import plan_rows
from tiewise.planning.catalogue import BETTER
from tiewise.planning.plan_rows import NEIGHBOUR_HEADER, Record

WIDEST = 24  # letters of a choice's column


def plan_view(record: Record, width: int) -> Group:
    """Return a plan's record as rich renderables for a terminal of `width`; choices that do not fit stand below."""
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
    yield Text(f"Thresholds: {plan_rows.scale(record)}", style="bold")
    yield _looked_up(["", "", ""], plan_rows.thresholds(record), right=(1,), dim=(2,))
    yield Text("Nearest in V, D and L", style="bold")
    yield _looked_up(NEIGHBOUR_HEADER, plan_rows.neighbours(record), right=(1, 2, 3, 4))
    for remark in (*record["notes"], BETTER):
        yield Text(f"· {remark}", style="dim")


def _looked_up(header: list[str], rows: list[list[str]], right: Sequence[int], dim: Sequence[int] = ()) -> Table:
    """A table without lines, indented, with some columns right-aligned or dim."""
    table = Table(box=None, show_header=any(header), pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for place, name in enumerate(header):
        style = "dim" if place in dim else ""
        table.add_column(name if place else f"  {name}", justify="right" if place in right else "left", style=style)
    for name, *cells in rows:
        table.add_row(Text(f"  {name}"), *map(Text, cells))
    table.add_row("")
    return table
