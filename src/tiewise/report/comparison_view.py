"""The terminal's view of a comparison: the verdict, the page's results table, turned, and the finding under it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from tiewise.report import albert_paper, published
from tiewise.report.albert_paper import SharingOrder
from tiewise.report.comparison_found import DEMO, results, verdict
from tiewise.report.grid import Table
from tiewise.report.published import Beside
from tiewise.training.results import Comparison

ABREAST = 3  # arms in one table, which fit 80 columns


def comparison_view(comparison: Comparison) -> Group:
    """Return the results as rich tables, one column per arm, between the verdict and the finding.

    Arms and the finding are `Text`, never markup: an arm's name may hold a square bracket.
    """
    finding = f"{comparison.finding}\n({DEMO})" if comparison.demo else comparison.finding
    names, arms = (table := results(comparison)).header, table.rows
    groups = [arms[i : i + ABREAST] for i in range(0, max(len(arms), 1), ABREAST)]
    turned = [_rich(list(map(list, zip(names, *group, strict=True))), justified=True) for group in groups]
    return Group(Text(verdict(comparison), "bold"), *turned, Text(finding))


def published_table(beside: Beside) -> Group:
    """Return a recipe's figures beside the run's own, what they are of above them."""
    return _under(published.lines(beside), published.table(beside))


def sharing_table(orders: Sequence[SharingOrder]) -> Group:
    """Return what layers share in the comparison's order and in the paper's (`tiewise.report.albert_paper`)."""
    return _under(albert_paper.order_lines(orders), albert_paper.order_table(orders))


def _under(lines: Sequence[str], found: Table | None) -> Group:
    said = Text("\n".join(lines))
    return Group(said) if found is None else Group(said, _rich([found.header, *found.rows]))


def _rich(rows: Sequence[Sequence[str]], justified: bool = False) -> RichTable:
    """Rows under the first; cells break where a reader would: before what layers share, and before an interval."""
    made = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    texts = [[Text(cell.replace("+share=", "\n+share=").replace(" [", "\n[")) for cell in row] for row in rows]
    for place, name in enumerate(texts[0]):
        made.add_column(name, justify="right" if justified and place else "left", overflow="fold")
    for row in texts[1:]:
        made.add_row(*row)
    return made
