"""The commands that rewrite a checkpoint: `tie untie dedupe repair densify factor resize`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import typer

from tiewise.cli import options as o
from tiewise.core.errors import CheckpointError
from tiewise.core.long_work import ending

SOURCE = typer.Argument(metavar="PATH", help="Checkpoint folder, or one .safetensors file. It is only read.")
TO = typer.Option(..., "--to", metavar="NEW_DIR", help="Folder to make; it must not exist, or be empty.")
DRY_RUN = typer.Option(False, "--dry-run", help="Say what would be done, and write nothing.")
FORCE = typer.Option(False, "--force", help="Also where it changes the model's function.")
RESULT = "The result is a new folder: source untouched, only changed files written, checked before it appears."
PLAIN = {
    "untie": "Give each end of a checkpoint a table of its own.",
    "dedupe": "Drop an output head that equals the input table byte by byte.",
    "repair": "Apply the safe fixes that `tiewise check` proposes.",
    "densify": "Turn factored or mapped boundaries into plain matrices that every loader reads.",
}


def _plain(name: str) -> Callable[..., None]:
    def command(
        source: Path = SOURCE,
        to: Path = TO,
        dry_run: bool = DRY_RUN,
        force: bool = FORCE,
        json_: bool = o.JSON,
        quiet: bool = o.QUIET,
    ) -> None:
        _carry_out(name, source, to, json_=json_, quiet=quiet, dry_run=dry_run, force=force)

    command.__doc__ = f"{PLAIN[name]}\n\n{RESULT}"
    return command


def tie(
    source: Path = SOURCE,
    to: Path = TO,
    keep: str = typer.Option(
        None, metavar="input|output|mean", help="Whose values the one table gets, where the two differ."
    ),
    dry_run: bool = DRY_RUN,
    force: bool = FORCE,
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Give both ends of a checkpoint one table."""
    _carry_out("tie", source, to, json_=json_, quiet=quiet, keep=keep, dry_run=dry_run, force=force)


def factor(
    source: Path = SOURCE,
    to: Path = TO,
    rank: int = typer.Option(..., help="Width k of the factored tables."),
    counts: Path = typer.Option(
        None, metavar="FILE", help="How often each token occurs (JSON, .npy, .safetensors, or a number a line)."
    ),
    text: Path = typer.Option(
        None, metavar="FILE", help="Or a text, counted with the checkpoint's own tokenizer.json."
    ),
    dry_run: bool = DRY_RUN,
    force: bool = FORCE,
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Replace each table by its best approximation of rank k, as a narrow table and a map.

    With counts or a text, the error is told for frequent and rare tokens apart.
    """
    found: Any = counts
    if text is not None:
        if counts is not None:
            raise typer.BadParameter("give --counts or --text, not both")
        found = _token_counts(source, text)
    _carry_out("factor", source, to, json_=json_, quiet=quiet, dry_run=dry_run, force=force, rank=rank, counts=found)


def resize(
    source: Path = SOURCE,
    to: Path = TO,
    vocab: int = typer.Option(None, help="Rows that both ends shall have."),
    multiple_of: int = typer.Option(None, help="Round the rows up to a multiple of this."),
    tokenizer: Path = typer.Option(None, metavar="DIR", help="Give every token of this tokenizer a row."),
    shrink: bool = typer.Option(False, "--shrink", help="Rows may be dropped from the end."),
    seed: int = typer.Option(0, help="Of the new rows."),
    dry_run: bool = DRY_RUN,
    force: bool = FORCE,
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Give both ends, and the head's bias, another number of rows; new ones are drawn like the existing ones."""
    options = {"vocab": vocab, "multiple_of": multiple_of, "tokenizer": tokenizer, "shrink": shrink, "seed": seed}
    _carry_out("resize", source, to, json_=json_, quiet=quiet, dry_run=dry_run, force=force, **options)


def _token_counts(folder: Path, text: Path) -> list[int]:
    """How often each token id occurs, from 0 up to the largest that does; the text is streamed."""
    from importlib.util import find_spec

    from tiewise.checkpoint.untrusted import inside

    if find_spec("tokenizers") is None:
        raise CheckpointError("--text needs the tokenizers library", "pip install 'tiewise[torch]', or give --counts")
    from tokenizers import Tokenizer

    file = inside(folder, "tokenizer.json")
    if not file.is_file():
        raise CheckpointError(f"{folder}: no tokenizer.json in it", "put the model's tokenizer there, or give --counts")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for every damaged file
        raise CheckpointError(f"{file}: no tokenizer ({error})", "take it from its source again") from None
    counts: Counter[int] = Counter()
    try:
        with text.open(encoding="utf-8") as lines:
            while batch := list(islice(lines, 2048)):
                for encoded in tokenizer.encode_batch(batch, add_special_tokens=False):
                    counts.update(encoded.ids)
    except OSError as error:
        raise CheckpointError(f"{text}: cannot be read ({error.strerror})", "check the path") from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{text}: not UTF-8 text", "convert it first") from None
    if not counts:
        raise CheckpointError(f"{text}: no token in it", "give a text")
    return [counts[token] for token in range(max(counts) + 1)]


untie, dedupe, repair, densify = (_plain(name) for name in PLAIN)


def _carry_out(verb: str, source: Path, to: Path, *, json_: bool, quiet: bool, **options: Any) -> None:
    """Run one verb and print its receipt; Ctrl-C, SIGTERM and SIGHUP leave nothing, or all where it was finished."""
    from tiewise import rewrite
    from tiewise.rewrite.file_plan import PROVENANCE

    made = (to / PROVENANCE).exists()

    def left() -> str:
        done = "is complete" if (to / PROVENANCE).exists() and not made else "was not made"
        return f"; {source} is as it was and {to} {done}"

    with o.interruptible(left), ending(), o.progress_bar(quiet, reads=True):
        receipt = getattr(rewrite, verb)(source, to, **options)
    if json_:
        o.print_json(receipt.record())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for heading, text in receipt.lines():
        table.add_row(heading, Text(text))  # names are text, never markup
    Console().print(table)
