"""Protocol of all results: text, dict, data frame and figures.

    print(result)             the answer, then a table
    result.to_dict()          everything, as JSON types
    result.to_pandas()        the rows of the result as a data frame
    result.figure("curves")   one figure; `figures()` lists their names

A class of results defines `answer_text` and `rows`. It may define `summary_rows`, the rows that are printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib import import_module
from typing import Any

from tiewise.core.errors import UnsupportedError, suggest_choices

MOST_PRINTED = 20  # rows
MINUS = "−"
Row = Mapping[str, Any]  # column → value
NO_FIGURES: Mapping[str, Any] = {}


class PrintedResult:
    """Base of the results of all calls."""

    def answer_text(self) -> str:
        """Return the answer: one sentence or a few lines."""
        raise NotImplementedError

    def rows(self) -> list[Row]:
        """Return the rows of `to_pandas`, with the same columns in each."""
        raise NotImplementedError

    def record(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        raise NotImplementedError

    def summary_rows(self) -> list[Row]:
        """Return the rows that are printed below the answer."""
        return self.rows()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON types: dicts, lists, strings, finite numbers, booleans and None."""
        return self.record()

    def to_pandas(self) -> Any:
        """Return the rows as a pandas DataFrame.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            pandas: Any = import_module("pandas")
        except ModuleNotFoundError as error:
            message = "to_pandas() needs pandas: pip install pandas. rows() returns the same as a list of dicts"
            raise ImportError(message, name="pandas") from error
        return pandas.DataFrame(self.rows())

    def figures(self) -> list[str]:
        """Return the names of all figures."""
        return list(draw_figures(self))

    def figure(self, name: str) -> Any:
        """Return a figure of plotly, which a notebook shows.

        Args:
            name: one of `figures()`.

        Raises:
            UnsupportedError: there is no figure of this name. The message lists all.
        """
        figures = draw_figures(self)
        if not figures:
            raise UnsupportedError(f"{type(self).__name__} has no figures", "to_pandas() returns its numbers")
        if name not in figures:
            raise UnsupportedError(f"no figure {name!r}", suggest_choices(name, figures))
        return figures[name]

    def __str__(self) -> str:
        table = text_table(self.summary_rows())
        return "\n\n".join(part for part in (self.answer_text(), table) if part)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        answer = escape(self.answer_text()).replace("\n", "<br>")
        return f"<p>{answer}</p>{html_table(self.summary_rows())}"


def draw_figures(result: PrintedResult) -> Mapping[str, Any]:
    """Return all figures of a result by name."""
    return _drawing[0](result)


def register_drawing(draw: Callable[[PrintedResult], Mapping[str, Any]]) -> None:
    """Set the function that draws a result.

    The package root calls it, since drawing is above this package.
    """
    _drawing[0] = draw


_drawing: list[Callable[[PrintedResult], Mapping[str, Any]]] = [lambda result: NO_FIGURES]


def text_table(rows: Sequence[Row]) -> str:
    """Return rows as aligned text: names to the left, numbers to the right."""
    if not rows:
        return ""
    columns = list(rows[0])
    cells = [columns, *([cell_text(row[column]) for column in columns] for row in rows[:MOST_PRINTED])]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    is_number = [isinstance(rows[0][column], int | float) for column in columns]
    lines = []
    for line in cells:
        aligned = map(_aligned, line, widths, is_number)
        lines.append("  ".join(aligned).rstrip())
    if len(rows) > MOST_PRINTED:
        lines.append(f"{_omitted(rows)}: to_pandas()")
    return "\n".join(lines)


def _omitted(rows: Sequence[Row]) -> str:
    """Return the number of rows beyond `MOST_PRINTED` in words."""
    return f"… {len(rows) - MOST_PRINTED} more rows"


def _aligned(cell: str, width: int, is_number: bool) -> str:
    """Return a cell with spaces before a number or behind a text."""
    if is_number:
        return cell.rjust(width)
    return cell.ljust(width)


def html_table(rows: Sequence[Row]) -> str:
    """Return rows as an HTML table; "" for none."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(column)}</th>" for column in rows[0])
    lines = []
    for row in rows[:MOST_PRINTED]:
        lines.append("".join(f"<td>{escape(cell_text(value))}</td>" for value in row.values()))
    if len(rows) > MOST_PRINTED:
        lines.append(f'<td colspan="{len(rows[0])}">{_omitted(rows)}</td>')
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def cell_text(value: Any) -> str:
    """Return one value of a row as text."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return "–" if value != value else f"{value:.4f}".replace("-", MINUS)  # NaN differs from itself
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}".replace("-", MINUS)
    return str(value)
