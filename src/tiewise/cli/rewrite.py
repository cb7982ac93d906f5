"""The commands that rewrite a checkpoint: `tie untie dedupe repair densify factor resize`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from tiewise.cli import options as o
from tiewise.cli import rewriting as r

PLAIN = {
    "untie": "Give each end of a checkpoint a table of its own.",
    "dedupe": "Drop an output head that equals the input table byte by byte.",
    "repair": "Apply the safe fixes that `tiewise check` proposes.",
    "densify": "Turn factored or mapped boundaries into plain matrices that every loader reads.",
}


def _plain(name: str) -> Callable[..., None]:
    def command(
        source: Path = r.SOURCE,
        to: Path = r.TO,
        dry_run: bool = r.DRY_RUN,
        force: bool = r.FORCE,
        json_: bool = o.JSON,
        quiet: bool = o.QUIET,
    ) -> None:
        r.carry_out(_verb(name), source, to, json_=json_, quiet=quiet, dry_run=dry_run, force=force)

    command.__doc__ = f"{PLAIN[name]}\n\n{r.RESULT}"
    return command


def tie(
    source: Path = r.SOURCE,
    to: Path = r.TO,
    keep: str = typer.Option(
        None, metavar="input|output|mean", help="Whose values the one table gets, where the two differ."
    ),
    dry_run: bool = r.DRY_RUN,
    force: bool = r.FORCE,
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Give both ends of a checkpoint one table."""
    r.carry_out(_verb("tie"), source, to, json_=json_, quiet=quiet, keep=keep, dry_run=dry_run, force=force)


def factor(
    source: Path = r.SOURCE,
    to: Path = r.TO,
    rank: int = typer.Option(..., help="Width k of the factored tables."),
    counts: Path = typer.Option(
        None, metavar="FILE", help="How often each token occurs (JSON, .npy, .safetensors, or a number a line)."
    ),
    text: Path = typer.Option(
        None, metavar="FILE", help="Or a text, counted with the checkpoint's own tokenizer.json."
    ),
    dry_run: bool = r.DRY_RUN,
    force: bool = r.FORCE,
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Replace each table by its best approximation of rank k, as a narrow table and a map.

    With counts or a text, the error is told for frequent and rare tokens apart.
    """
    options: dict[str, Any] = {"rank": rank, "counts": _counts(source, counts, text)}
    r.carry_out(_verb("factor"), source, to, json_=json_, quiet=quiet, dry_run=dry_run, force=force, **options)


def resize(
    source: Path = r.SOURCE,
    to: Path = r.TO,
    vocab: int = typer.Option(None, help="Rows that both ends shall have."),
    multiple_of: int = typer.Option(None, help="Round the rows up to a multiple of this."),
    tokenizer: Path = typer.Option(None, metavar="DIR", help="Give every token of this tokenizer a row."),
    shrink: bool = typer.Option(False, "--shrink", help="Rows may be dropped from the end."),
    seed: int = typer.Option(0, help="Of the new rows."),
    dry_run: bool = r.DRY_RUN,
    force: bool = r.FORCE,
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Give both ends, and the head's bias, another number of rows; new ones are drawn like the existing ones."""
    options = {"vocab": vocab, "multiple_of": multiple_of, "tokenizer": tokenizer, "shrink": shrink, "seed": seed}
    r.carry_out(_verb("resize"), source, to, json_=json_, quiet=quiet, dry_run=dry_run, force=force, **options)


def _verb(name: str) -> Callable[..., Any]:
    return getattr(import_module("tiewise.rewrite"), name)


def _counts(source: Path, counts: Path | None, text: Path | None) -> Any:
    if counts is not None and text is not None:
        raise typer.BadParameter("give --counts or --text, not both")
    if text is None:
        return counts
    from tiewise.cli.counting import count_tokens

    return count_tokens(source, text)


untie, dedupe, repair, densify = (_plain(name) for name in PLAIN)
