"""`tiewise`: the command line. Each command is one small file; nothing heavy is imported before a command runs."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from tiewise.cli import check, compare, models, plan, rewrite, train
from tiewise.errors import TiewiseError

UsageError: Any = typer.BadParameter.__base__  # which typer keeps under no name of its own

app = typer.Typer(
    name="tiewise",
    help="Tie wisely: compare, train and inspect the two places where a language model touches its vocabulary.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("compare")(compare.compare)
app.command("train")(train.train)
app.command("plan", rich_help_panel="Planning")(plan.plan)
app.command("models", rich_help_panel="Planning")(models.models)
app.command("check", rich_help_panel="Checkpoints")(check.check)
rewrite.add_to(app, "Checkpoints")


def _version(asked: bool) -> None:
    if asked:
        from tiewise import __version__

        typer.echo(f"tiewise {__version__}")
        raise typer.Exit()


@app.callback()
def _root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print it.")) -> None:
    """Answer `--version`; everything else is a command."""


def main() -> None:
    """Run the command line: exit 0 fine, 2 usage or unreadable input, 130 interrupted."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
        sys.exit(code or 0)
    except TiewiseError as error:
        _say(str(error))
        sys.exit(2)
    except UsageError as error:
        if error.format_message():  # empty where no command was given, and the help says it all
            _say(f"{error.format_message()}; see {error.ctx.command_path if error.ctx else 'tiewise'} --help")
        sys.exit(2)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _say(line: str) -> None:
    print("tiewise:", " ".join(line.split()), file=sys.stderr)
