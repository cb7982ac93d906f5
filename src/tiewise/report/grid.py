"""A table of text: the same rows in the terminal and in the page."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of text under a header; the first column names the row."""

    header: list[str]
    rows: list[list[str]]
