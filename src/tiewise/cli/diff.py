"""`tiewise diff`."""

from __future__ import annotations

from pathlib import Path

import typer

from tiewise.cli import options as o


def diff(
    old: Path = typer.Argument(metavar="OLD", help="Hugging Face folder, or one .safetensors."),
    new: Path = typer.Argument(metavar="NEW", help="The same, later: fine-tuned, merged, resized."),
    top: int = typer.Option(20, min=0, help="Rows to list, those that moved most."),
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Say which rows of the tables moved between two checkpoints, by how much, and how many directions that took.

    Only the tables are read. A fine-tuned model, an adapter that was merged, a resized table: what of it changed?
    """
    from tiewise.analysis.row_changes import diff as compared
    from tiewise.core.files import strict

    with o.interruptible("; nothing was written"), o.progress_bar(quiet, reads=True):
        found = compared(old, new, top=top)
    if json_:
        return o.print_json(strict(found.record()))
    from rich.console import Console

    from tiewise.report.faces import rich_table

    console = Console()
    console.print(f"{found.answer}.", style="bold", highlight=False)
    tables = tuple(dict.fromkeys(quantity.of for quantity in found.quantities))
    said = {(quantity.name, quantity.of): str(quantity) for quantity in found.quantities}
    why = {quantity.name: quantity.why for quantity in found.quantities}
    rows = [(name, *(said.get((name, table), "–") for table in tables), why[name]) for name in why]
    console.print(rich_table([("", *tables, ""), *rows]))
    for listing in found.listings:
        console.print(listing.name, highlight=False)
        console.print(rich_table([tuple(listing.header), *listing.rows], justified=True))
    for note in found.notes:
        console.print(note, style="dim", highlight=False, markup=False)
