"""What every command that rewrites a checkpoint has: its options, its progress, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tiewise.cli import options as o
from tiewise.cli.reading import long_reads
from tiewise.core.ctrl_c import ending

if TYPE_CHECKING:
    from tiewise.rewrite.receipt import Receipt

SOURCE = typer.Argument(metavar="PATH", help="Checkpoint folder, or one .safetensors file. It is only read.")
TO = typer.Option(..., "--to", metavar="NEW_DIR", help="Folder to make; it must not exist, or be empty.")
DRY_RUN = typer.Option(False, "--dry-run", help="Say what would be done, and write nothing.")
FORCE = typer.Option(False, "--force", help="Also where it changes the model's function.")
RESULT = "The result is a new folder: source untouched, only changed files written, checked before it appears."


def carry_out(
    verb: Callable[..., Receipt], source: Path, to: Path, *, json_: bool, quiet: bool, **options: Any
) -> None:
    """Run one verb and print its receipt; Ctrl-C, SIGTERM and SIGHUP leave nothing, or all where it was finished."""
    from tiewise.rewrite.plan import PROVENANCE

    made = (to / PROVENANCE).exists()
    try:
        with ending(), long_reads(quiet):
            receipt = verb(source, to, **options)
    except (KeyboardInterrupt, SystemExit) as error:
        done = "is complete" if (to / PROVENANCE).exists() and not made else "was not made"
        o.tell(f"tiewise: interrupted; {source} is as it was and {to} {done}")
        raise typer.Exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 130) from None
    if json_:
        o.print_json(receipt.record())
        return
    from rich.console import Console

    from tiewise.report.receipt import receipt_table

    Console().print(receipt_table(receipt))
