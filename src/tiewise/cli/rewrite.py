"""The commands that rewrite a checkpoint: a table of what each says and takes, and one function that carries it out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from tiewise.cli import options as o
from tiewise.core.errors import RunError, TiewiseError, ending
from tiewise.core.files import to_record

RESULT = "The result is a new folder: source untouched, only changed files written, checked before it appears."
BEFORE: o.Options = {
    "source": (Path, typer.Argument(metavar="PATH", help="Checkpoint folder or .safetensors file. It is only read.")),
    "to": (Path, typer.Option(..., "--to", metavar="NEW_DIR", help="Folder to make; it must not exist, or be empty.")),
}
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
KEEP = typer.Option(None, metavar="input|output|mean", help="Whose values the one table gets, where the two differ.")
COUNTS = "How often each token occurs (JSON, .npy, .safetensors, or a number a line)."
HELDOUT = "A text: what the change costs on it is measured (bits per byte)."
TEXT = "Or a text, counted with the checkpoint's own tokenizer.json."
OF_ADAPTER: o.Options = {
    "source": (Path, typer.Argument(metavar="ADAPTER", help="Folder of a PEFT adapter. It is only read.")),
    "base": (Path, typer.Option(..., metavar="DIR", help="Checkpoint that it was trained on. It is only read.")),
}
VERBS: dict[str, tuple[str, o.Options]] = {
    "tie": ("Give both ends of a checkpoint one table.", {"keep": (str, KEEP)}),
    "untie": (f"Give each end of a checkpoint a table of its own.\n\n{RESULT}", {}),
    "dedupe": (f"Drop an output head that equals the input table byte by byte.\n\n{RESULT}", {}),
    "repair": (f"Apply the safe fixes that `tiewise check` proposes.\n\n{RESULT}", {}),
    "densify": (f"Turn factored or mapped boundaries into plain matrices that every loader reads.\n\n{RESULT}", {}),
    "factor": (
        "Replace each table by its best approximation of rank k, as a narrow table and a map.\n\n"
        "With counts or a text, the error is told for frequent and rare tokens apart.",
        {
            "rank": (int, typer.Option(..., help="Width k of the factored tables.")),
            "counts": (Path, typer.Option(None, metavar="FILE", help=COUNTS)),
            "text": (Path, typer.Option(None, metavar="FILE", help=TEXT)),
        },
    ),
    "slim": (f"Keep of an adapter's copies of tables only the rows that differ from its base.\n\n{RESULT}", OF_ADAPTER),
    "merge": (
        "Write an adapter's changes into its base; where they part the two ends of a tied base, it has two tables.",
        OF_ADAPTER,
    ),
    "resize": (
        "Give both ends, and the head's bias, another number of rows; new ones are drawn like the existing ones.",
        {
            "vocab": (int, typer.Option(None, help="Rows that both ends shall have.")),
            "multiple_of": (int, typer.Option(None, help="Round the rows up to a multiple of this.")),
            "tokenizer": (Path, typer.Option(None, metavar="DIR", help="Give every token of this tokenizer a row.")),
            "shrink": (bool, typer.Option(False, "--shrink", help="Rows may be dropped from the end.")),
            "rows": (str, typer.Option("drawn", metavar="drawn|zero", help="New rows; zeros are padding.")),
            "seed": (int, typer.Option(0, help="Of the new rows.")),
        },
    ),
    "trim": (
        "Drop the tokens that a text does not need: rows at both ends, the tokenizer, and ids in configs.\n\n"
        "Text that is made of the tokens that stay is cut into the same tokens as before.",
        {
            "text": (Path, typer.Option(None, metavar="FILE", help="Tokens that occur in this text stay.")),
            "keep": (Path, typer.Option(None, metavar="FILE", help="These stay too: a token, or an id, on each line.")),
            "size": (int, typer.Option(None, help="So many stay: the text's most frequent, then the smallest ids.")),
        },
    ),
    "transplant": (
        "Give a checkpoint another tokenizer's vocabulary: tokens that both have keep their rows.\n\n"
        "The rows of the others are made of these, without training; `tiewise heal` trains them.",
        {
            "tokenizer": (Path, typer.Option(..., metavar="DIR", help="Folder of the new tokenizer.")),
            "donor": (Path, typer.Option(None, metavar="MODEL", help="A model that has it: rows combine as there.")),
            "atoms": (int, typer.Option(64, help="With --donor: shared tokens in one combination at most.")),
            "heldout": (str, typer.Option(None, "--text", metavar="TEXT", help=HELDOUT)),
        },
    ),
}


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


def _command(verb: str) -> Callable[..., None]:
    """Return the command that carries out a verb and prints its receipt."""

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
        from tiewise.checkpoint import rewrite
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
                receipt = getattr(rewrite, verb)(source, to, **options)
            except NothingToDo as error:
                return _print_nothing(verb, source, to, error, json_)
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

    command.__doc__, own = VERBS[verb]
    return o.taking(**{**BEFORE, **own, **AFTER})(command)


tie, untie, dedupe, repair, densify, factor, slim, merge, resize, trim, transplant = map(_command, VERBS)
