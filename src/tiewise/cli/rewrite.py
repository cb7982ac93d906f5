"""The commands that rewrite a checkpoint, made from the registry of verbs; one function carries them out."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin

import typer

from tiewise.checkpoint.rewrite.registry import CommandOption, Verb, find
from tiewise.cli import options as o
from tiewise.core.errors import RunError, TiewiseError, ending
from tiewise.core.files import to_record

TO: o.Option = (
    Path,
    typer.Option(..., "--to", metavar="NEW_DIR", help="Folder to make; it must not exist, or be empty."),
)
NO_LOAD = (
    "Do not load source and result with transformers and compare them. Otherwise a child process does, up to 2 GB, if "
    "transformers is installed."
)
AFTER: o.Options = {
    "dry_run": (bool, typer.Option(False, "--dry-run", help="Say what would be done, and write nothing.")),
    "force": (bool, typer.Option(False, "--force", help="Also where it changes the model's function.")),
    "no_verify_load": (bool, typer.Option(False, "--no-verify-load", envvar="TIEWISE_NO_VERIFY_LOAD", help=NO_LOAD)),
    "follow_links": (bool, o.FOLLOW_LINKS),
    "json_": (bool, o.JSON),
    "quiet": (bool, o.QUIET),
}
HELDOUT: o.Option = (
    str,
    typer.Option(
        None, "--text", metavar="TEXT", help="A text: what the change costs on it is measured (bits per byte)."
    ),
)


def _print_nothing(verb: str, source: Path, to: Path, reason: TiewiseError, json_: bool) -> None:
    """Say that the source is already what the verb would make of it, which is no failure."""
    if json_:
        o.print_json({"verb": verb, "source": str(source), "nothing_to_do": str(reason)})
    else:
        print(f"{reason.what}: nothing to do, and {to} was not made")


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
        # Ctrl-C, SIGTERM and SIGHUP leave nothing, or all where it was finished
        from tiewise.checkpoint.rewrite.change import NothingToDo
        from tiewise.checkpoint.rewrite.file_plan import PROVENANCE
        from tiewise.checkpoint.untrusted import following_links
        from tiewise.cli.verify_load import verify_load

        made, texts, heldout = (to / PROVENANCE).exists(), list[str](), options.pop("heldout", None)
        if heldout is not None:  # a text that cannot be read is refused before anything is written
            if options["dry_run"]:
                raise RunError("--text with --dry-run", "leave one of them out: what is not written cannot be measured")
            o.need_torch()
            o.hush_libraries()
            from tiewise.core.text import pieces
            from tiewise.inspection.running.passages import cost_change, passage_nats, passages
            from tiewise.training.data.documents import ended
            from tiewise.training.data.sources import open_sources

            texts = passages(text for text, _ in pieces(ended(open_sources(heldout))))

        def left() -> str:
            done = "is complete" if (to / PROVENANCE).exists() and not made else "was not made"
            return f"; {source} is as it was and {to} {done}"

        with o.interruptible(left), ending(), o.progress_bar(quiet, reads=True), following_links(follow_links):
            cost = passage_nats(source, texts) if texts else None  # before a result is there that it might not be for
            try:
                receipt = verb.run(source, to, **options)
            except NothingToDo as error:
                return _print_nothing(name, source, to, error, json_)
            loss = None if cost is None else cost_change(cost, passage_nats(to, texts), texts)
            check = None if no_verify_load or receipt.dry_run else verify_load(receipt)
        if json_:
            more = {} if loss is None else {"loss": to_record(loss)}
            more |= {} if check is None else {"loaded": check.record()}
            o.print_json(receipt.record() | more)
        else:
            lines = [*receipt.lines(), *([] if loss is None else [("loss", loss.said())])]
            lines += [] if check is None else [(f"loading {check.outcome}", check.sentence)]
            _print_lines(lines)
        if check is not None and check.outcome == "failed":
            o.tell(f"tiewise: do not use {to}: {check.sentence}")
            raise typer.Exit(1)

    command.__doc__ = verb.help
    return o.taking(**_options(verb))(command)


def _options(verb: Verb) -> o.Options:
    """Return all parameters of a verb's command."""
    source = typer.Argument(metavar=verb.source.metavar, help=verb.source.help)
    own = {option.name: _option(option) for option in verb.options()}
    heldout = {"heldout": HELDOUT} if verb.measures_text else {}
    return {"source": (Path, source), "to": TO, **own, **heldout, **AFTER}


def _option(option: CommandOption) -> o.Option:
    """Return typer's description of a verb's option."""
    kind = _type(option.type)
    is_required = option.described.required or option.default is inspect.Parameter.empty
    default = ... if is_required else option.default
    flag = "--" + option.name.replace("_", "-")  # without its counterpart --no-…
    return kind, typer.Option(default, flag, metavar=option.described.metavar, help=option.described.help)


def _type(annotation: Any) -> type:
    """Return the type of an option's value: a plain type of its annotation, else a path."""
    alternatives = get_args(annotation) or (annotation,)
    if annotation is Any or any(get_origin(one) is os.PathLike for one in alternatives):
        return Path
    return next(one for one in alternatives if one in (bool, int, float, str))
