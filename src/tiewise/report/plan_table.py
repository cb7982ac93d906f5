"""The terminal's view of a plan: choices side by side, thresholds and neighbours under them."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tiewise.planning.plan import Plan
from tiewise.report.models import BETTER
from tiewise.report.plan_rows import (
    NEIGHBOUR_HEADER,
    columns,
    near,
    nearest,
    neighbour_cells,
    remarks,
    rows,
    scale,
    subject,
    thresholds,
)

WIDEST = 24  # letters of a choice's column


def plan_view(plan: Plan, width: int) -> Group:
    """Return everything as rich renderables for a terminal of `width`; choices that do not fit stand below."""
    return Group(*_parts(plan, width))


def _parts(plan: Plan, width: int) -> Iterator[RenderableType]:
    yield Text(subject(plan), style="bold")
    yield Text(nearest(plan))
    shown = rows(plan)
    labels = max(len(row.name) + 2 * bool(row.cells) for row in shown) + 1
    names = [line for name in columns(plan) for line in name.split("\n")]
    cells = [cell for row in shown for cell in row.cells]
    fits = max(1, (width - labels) // (min(WIDEST, max(map(len, [*names, *cells]))) + 2))
    for start in range(0, len(plan.choices), fits):
        yield _choices(plan, slice(start, start + fits))
    yield Text(f"Thresholds: {scale(plan)}", style="bold")
    yield _thresholds(plan)
    yield Text("Nearest in V, D and L", style="bold")
    yield _neighbours(plan)
    for remark in remarks(plan):
        yield Padding(Text(f"· {remark}", style="dim"), (0, 0))
    yield Text(f"· {BETTER}", style="dim")


def _choices(plan: Plan, part: slice) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in columns(plan)[part]:
        table.add_column(Text(name), justify="right", overflow="fold")
    for row in rows(plan):
        if row.cells:
            style = "bold" if row.name == "total" else ""
            table.add_row(Text(f"  {row.name}"), *(Text(cell) for cell in row.cells[part]), style=style)
        else:
            table.add_row(Text(row.name, style="bold"))
    table.add_row("")
    return table


def _thresholds(plan: Plan) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, value, formula in thresholds(plan):
        table.add_row(Text(f"  {name}"), Text(value), Text(formula))
    table.add_row("")
    return table


def _neighbours(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in NEIGHBOUR_HEADER:
        table.add_column(
            f"  {name}" if name == "model" else name, justify="right" if name in "VDL" or "/" in name else "left"
        )
    for model in near(plan):
        name, *cells = neighbour_cells(model)
        table.add_row(Text(f"  {name}"), *map(Text, cells))
    table.add_row("")
    return table
