"""Signatures of the verbs, for type checkers and editors; `tools/make_stubs.py` writes them."""

import os
from typing import Any

from tiewise.checkpoint.rewrite.engine import Receipt as Receipt
from tiewise.checkpoint.rewrite.engine import rewrite as rewrite
from tiewise.checkpoint.rewrite.registry import Option as Option
from tiewise.checkpoint.rewrite.registry import verb as verb

def repair(
    source: str | os.PathLike[str], to: str | os.PathLike[str], *, dry_run: bool = ..., force: bool = ...
) -> Receipt:
    """Apply the safe fixes that `tiewise check` proposes."""

def tie(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    keep: str | None = ...,
    dry_run: bool = ...,
    force: bool = ...,
) -> Receipt:
    """Give both ends of a checkpoint one table."""

def untie(
    source: str | os.PathLike[str], to: str | os.PathLike[str], *, dry_run: bool = ..., force: bool = ...
) -> Receipt:
    """Give each end of a checkpoint a separate table."""

def factor(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    rank: int | None = ...,
    counts: Any = ...,
    text: str | os.PathLike[str] | None = ...,
    undo: bool = ...,
    dry_run: bool = ...,
    force: bool = ...,
) -> Receipt:
    """Replace each table by a narrow table and a map, its best approximation of rank k."""

def resize(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    vocab: int | None = ...,
    multiple_of: int | None = ...,
    tokenizer: str | os.PathLike[str] | None = ...,
    shrink: bool = ...,
    rows: str = ...,
    seed: int = ...,
    dry_run: bool = ...,
    force: bool = ...,
) -> Receipt:
    """Change the number of rows of both ends and of the head's bias. New rows resemble the existing ones."""

def trim(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    text: str | os.PathLike[str] | None = ...,
    keep: str | os.PathLike[str] | None = ...,
    size: int | None = ...,
    dry_run: bool = ...,
    force: bool = ...,
) -> Receipt:
    """Drop the tokens that a text does not need. Both ends lose their rows; tokenizer and configs get new ids."""

def transplant(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str],
    donor: str | os.PathLike[str] | None = ...,
    atoms: int = ...,
    dry_run: bool = ...,
    force: bool = ...,
) -> Receipt:
    """Replace a checkpoint's vocabulary by another tokenizer's. Tokens of both vocabularies keep their rows."""

def slim(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str],
    dry_run: bool = ...,
    force: bool = ...,
) -> Receipt:
    """Reduce an adapter's table copies to the rows that differ from its base."""

def merge(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str] | None = ...,
    *,
    base: str | os.PathLike[str] | None = ...,
    adapter: str | os.PathLike[str] | None = ...,
    dry_run: bool = ...,
    force: bool = ...,
) -> Receipt:
    """Write an adapter's changes into its base. A tied base gets two tables if its ends become different."""
