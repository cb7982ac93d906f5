"""Tie or not? in words and one table."""

from __future__ import annotations

from collections.abc import Mapping

from tiewise.core.found import NEITHER, ONE, TWO
from tiewise.core.numerals import NONE, plain
from tiewise.inspection.evidence import NO_INTERVAL, NO_VERDICT, Evidence, TieOrNot
from tiewise.report.grid import Table

TITLE = "Tie or not?"


def lines(found: Mapping[str, TieOrNot]) -> list[str]:
    """Say the verdict, if there is one, and how much speaks for what."""
    (one,) = found.values()
    counts = {side: sum(row.speaks == side for row in one.rows) for side in (ONE, TWO, NEITHER)}
    verdict = one.verdict[0].upper() + one.verdict[1:] + "."
    said = f"{counts[ONE]} for one table, {counts[TWO]} for two, {counts[NEITHER]} for neither"
    weights = (
        "rows are not votes" if one.verdict in (NO_VERDICT, NO_INTERVAL) else "rows are not votes, the loss decides"
    )
    number = len(one.rows)
    if not number:
        return [verdict, "Nothing of what was measured here speaks for one table or for two."]
    return [verdict, f"Of {number} measurement{'' if number == 1 else 's'}, {said}; {weights}."]


def tables(found: Mapping[str, TieOrNot]) -> list[tuple[str, Table]]:
    """Return all evidence as one table."""
    (one,) = found.values()
    header = ["question", "measure", "model", "measured [95 %]", "no effect", "p (Holm)", "speaks for", "because"]
    return [("Evidence", Table(header, [_cells(row) for row in one.rows]))] if one.rows else []


def measured(row: Evidence) -> str:
    """Return a value with its interval."""
    interval = "" if row.low is None or row.high is None else f" [{plain(row.low, 3)}, {plain(row.high, 3)}]"
    return f"{plain(row.value, 3)}{interval}"


def _cells(row: Evidence) -> list[str]:
    p = NONE if row.p is None else plain(row.p, 3)
    return [row.question, row.measure, row.about, measured(row), plain(row.level, 3), p, row.speaks, row.why]
