"""Commands that rewrite a checkpoint, built from the registry of verbs."""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

import typer

from tiewise.checkpoint.rewrite.registry import CommandOption, Verb, find
from tiewise.cli import options as o
from tiewise.core.errors import RunError, TiewiseError
from tiewise.core.interrupts import graceful_signals
from tiewise.core.records import to_record

if TYPE_CHECKING:
    from tiewise.checkpoint.rewrite.engine import Receipt
    from tiewise.cli.verify_load import LoadCheck
    from tiewise.inspection.running.passages import CostChange

TO: o.Option = (
    Path,
    typer.Option(..., "--to", metavar="NEW_DIR", help="New folder for the result."),
)
NO_LOAD = (
    "Skip the test that loads source and result with transformers in a child process (up to 2 GB) and compares them."
)
AFTER: o.Options = {
    "dry_run": (bool, typer.Option(False, "--dry-run", help="Report what would change, and write nothing.")),
    "force": (bool, typer.Option(False, "--force", help="Proceed although the change alters the model's function.")),
    "no_verify_load": (bool, typer.Option(False, "--no-verify-load", envvar="TIEWISE_NO_VERIFY_LOAD", help=NO_LOAD)),
    "follow_links": (bool, o.FOLLOW_LINKS),
    "json_": (bool, o.JSON),
    "quiet": (bool, o.QUIET),
}
HELDOUT: o.Option = (
    str,
    typer.Option(
        None,
        "--text",
        metavar="TEXT",
        help="Text on which to measure the cost of the change, in bits per byte.",
        callback=o.require_texts,
    ),
)


@dataclass(frozen=True)
class _Outcome:
    """Result of a verb, with measurements of the new checkpoint."""

    receipt: Receipt
    loss: CostChange | None  # on the held-out text; None without one
    check: LoadCheck | None  # by loading source and result; None if it was left out

    def print(self, json_: bool) -> None:
        """Print the receipt and the measurements."""
        if json_:
            o.print_json(self._record())
        else:
            for sentence in self.receipt.sentences():
                print(sentence)
            _print_lines(self._lines())
            print(f"Next: {self._next_command()}")

    def _next_command(self) -> str:
        """Return the command to type next: heal what was lost, or check the result."""
        receipt = self.receipt
        if receipt.dry_run:
            return "the same command without --dry-run"
        if receipt.next_command is not None:
            return receipt.next_command
        return f"tiewise check {shlex.quote(str(receipt.to))}"

    def _record(self) -> dict[str, Any]:
        """Return everything as JSON."""
        record = self.receipt.record()
        if self.loss is not None:
            record["loss"] = to_record(self.loss)
        if self.check is not None:
            record["loaded"] = self.check.record()
        return record

    def _lines(self) -> list[tuple[str, str]]:
        """Return headings and texts."""
        lines = [*self.receipt.lines()]
        if self.loss is not None:
            lines.append(("loss", self.loss.sentence()))
        if self.check is not None:
            lines.append((f"loading {self.check.outcome}", self.check.sentence))
        return lines


def _print_nothing(verb: str, source: Path, to: Path, reason: TiewiseError, json_: bool) -> None:
    """Print that the verb has nothing to change, which is no failure."""
    if json_:
        o.print_json({"verb": verb, "source": str(source), "nothing_to_do": str(reason)})
    else:
        print(f"{reason.problem}; {to} was not made")


def _print_lines(lines: list[tuple[str, str]]) -> None:
    """Print headings and texts as a table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for heading, text in lines:
        table.add_row(heading, Text(text))  # names are text, never markup
    o.print_view(table)


def command_of(name: str) -> Callable[..., None]:
    """Return the command that carries out a verb and prints its receipt."""
    verb = find(name)

    def command(
        source: Path,
        to: Path,
        *,
        json_: bool,
        quiet: bool,
        no_verify_load: bool,
        follow_links: bool,
        **options: Any,
    ) -> None:
        """Carry out the verb and print its receipt."""
        from tiewise.checkpoint.rewrite.change import NothingToDo
        from tiewise.checkpoint.rewrite.file_plan import PROVENANCE
        from tiewise.checkpoint.untrusted import following_links
        from tiewise.cli.verify_load import verify_load

        existed = (to / PROVENANCE).exists()
        # a text that cannot be read is refused before anything is written
        texts = _heldout_passages(options.pop("heldout", None), options["dry_run"])

        def remains() -> str:
            """Return what is on disk after an interrupt."""
            is_complete = (to / PROVENANCE).exists() and not existed
            return f"; {source} is as it was and {to} {'is complete' if is_complete else 'was not made'}"

        # Ctrl-C, SIGTERM and SIGHUP leave nothing, or a complete result
        with (
            o.interruptible(remains),
            graceful_signals(),
            o.progress_bar(quiet, reads=True),
            following_links(follow_links),
        ):
            measure_change = _cost_meter(source, to, texts)  # before the result exists
            try:
                receipt = verb.run(source, to, **options)
            except NothingToDo as error:
                return _print_nothing(name, source, to, error, json_)
            loss = measure_change()
            check = None
            if not no_verify_load and not receipt.dry_run:
                check = verify_load(receipt)
        _Outcome(receipt, loss, check).print(json_)
        if check is not None and check.outcome == "failed":
            o.print_to_stderr(f"tiewise: do not use {to}: {check.sentence}")
            raise typer.Exit(1)

    command.__doc__ = verb.help
    return o.taking(**_options(verb))(command)


def _heldout_passages(heldout: str | None, dry_run: bool) -> list[str]:
    """Return the passages of `--text`, on which a change is measured; none without it.

    Raises:
        RunError: a dry run writes nothing that could be measured; or the text cannot be read.
    """
    if heldout is None:
        return []
    if dry_run:
        raise RunError("--text with --dry-run", "leave one of them out: what is not written cannot be measured")
    o.need_torch()
    o.hush_libraries()
    from tiewise.core.text import cut_pieces
    from tiewise.inspection.running.passages import passages
    from tiewise.training.data.documents import with_document_ends
    from tiewise.training.data.sources import open_sources

    return passages(text for text, _ in cut_pieces(with_document_ends(open_sources(heldout))))


def _cost_meter(source: Path, to: Path, texts: list[str]) -> Callable[[], CostChange | None]:
    """Measure the source on the texts; return a function that compares the result with it."""
    if not texts:
        return lambda: None
    from tiewise.inspection.running.passages import cost_change, passage_nats

    cost = passage_nats(source, texts)
    return lambda: cost_change(cost, passage_nats(to, texts), texts)


def _options(verb: Verb) -> o.Options:
    """Return all parameters of a verb's command."""
    source = typer.Argument(metavar=verb.source.metavar, help=verb.source.help)
    options: o.Options = {"source": (Path, source), "to": TO}
    options |= {option.name: _option(option) for option in verb.options()}
    if verb.measures_text:
        options["heldout"] = HELDOUT
    return options | AFTER


def _option(option: CommandOption) -> o.Option:
    """Return typer's description of a verb's option."""
    option_type = _type(option.type)
    is_required = option.described.required or option.default is inspect.Parameter.empty
    default = ... if is_required else option.default
    flag = "--" + option.name.replace("_", "-")  # without its counterpart --no-…
    return option_type, typer.Option(default, flag, metavar=option.described.metavar, help=option.described.help)


def _type(annotation: Any) -> type:
    """Return the type of an option's value: a plain type of its annotation, else a path."""
    alternatives = get_args(annotation) or (annotation,)
    if annotation is Any or any(get_origin(one) is os.PathLike for one in alternatives):
        return Path
    for plain_type in (bool, int, float, str):
        if plain_type in alternatives:
            return plain_type
    raise AssertionError(f"an option of type {annotation} has no plain type")
