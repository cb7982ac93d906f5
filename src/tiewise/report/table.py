"""The terminal's view of a comparison: the page's results table, turned, and the finding under it."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from tiewise.report import published
from tiewise.report.published import Beside
from tiewise.report.rows import header, rows
from tiewise.training.results import Comparison

DEMO = "demo corpus, not evidence for your model"


def published_table(beside: Beside) -> Group:
    """Return a recipe's figures beside the run's own, what they are of above them."""
    found = published.table(beside)
    said = Text("\n".join(published.lines(beside)))
    if found is None:
        return Group(said)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in found.header:
        table.add_column(Text(name), overflow="fold")
    for row in found.rows:
        table.add_row(*map(Text, row))
    return Group(said, table)


def results_table(comparison: Comparison) -> Table:
    """Return the results as a rich table, one column per arm (which fits 80 columns), its caption the finding.

    Arms and the finding are `Text`, never markup: an arm's name may hold a square bracket.
    """
    finding = f"{comparison.finding}\n({DEMO})" if comparison.demo else comparison.finding
    table = Table(box=SIMPLE_HEAD, caption=Text(finding), caption_justify="left", pad_edge=False)
    first, *measures = zip(header(comparison), *rows(comparison), strict=True)
    for position, name in enumerate(first):
        table.add_column(Text(name), justify="right" if position else "left", overflow="fold")
    for measure in measures:
        table.add_row(*map(Text, measure))
    return table
