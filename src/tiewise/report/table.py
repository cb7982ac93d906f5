"""The terminal's view of a comparison: the page's results table, turned, and the finding under it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tiewise.report import albert_paper, published
from tiewise.report.albert_paper import SharingOrder
from tiewise.report.grid import Table as Grid
from tiewise.report.published import Beside
from tiewise.report.rows import header, rows
from tiewise.training.results import Comparison

DEMO = "demo corpus, not evidence for your model"
ABREAST = 4  # arms in one table


def published_table(beside: Beside) -> Group:
    """Return a recipe's figures beside the run's own, what they are of above them."""
    return _said(published.lines(beside), published.table(beside))


def sharing_table(orders: Sequence[SharingOrder]) -> Group:
    """Return what layers share in the comparison's order and in the paper's (`tiewise.report.albert_paper`)."""
    return _said(albert_paper.order_lines(orders), albert_paper.order_table(orders))


def _said(lines: Sequence[str], found: Grid | None) -> Group:
    said = Text("\n".join(lines))
    if found is None:
        return Group(said)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in found.header:
        table.add_column(Text(name), overflow="fold")
    for row in found.rows:
        table.add_row(*map(Text, row))
    return Group(said, table)


def results_table(comparison: Comparison) -> Group:
    """Return the results as rich tables, one column per arm (four of which fit 80 columns), and the finding under them.

    Arms and the finding are `Text`, never markup: an arm's name may hold a square bracket.
    """
    finding = f"{comparison.finding}\n({DEMO})" if comparison.demo else comparison.finding
    found = rows(comparison)
    tables = [_of_arms(header(comparison), found[i : i + ABREAST]) for i in range(0, max(len(found), 1), ABREAST)]
    return Group(*tables, Text(finding))


def _of_arms(names: list[str], arms: list[list[str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    first, *measures = zip(names, *arms, strict=True)
    for position, name in enumerate(first):
        table.add_column(_broken(name), justify="right" if position else "left", overflow="fold")
    for measure in measures:
        table.add_row(*map(_broken, measure))
    return table


def _broken(text: str) -> Text:
    """Break a cell where a reader would: before what layers share, and before an interval."""
    return Text(text.replace("+share=", "\n+share=").replace(" (", "\n("))
