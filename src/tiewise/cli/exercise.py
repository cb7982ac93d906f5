"""`tiewise exercise`."""

from __future__ import annotations

from pathlib import Path

import typer

from tiewise.cli import options as o


def exercise(
    number: int = typer.Argument(None, metavar="[N]", help="Number of the exercise; without it, all are listed."),
    file: Path = typer.Argument(None, metavar="[FILE]", help="Python file with your answer."),
    hint: bool = typer.Option(False, "--hint", help="Print the hint too."),
    solution: bool = typer.Option(False, "--solution", help="Print a solution too."),
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Read an exercise, or have your answer checked.

    The check runs in a separate process with limits of time and memory.
    """
    from tiewise.lab.exercises.reading import CheckedAnswer
    from tiewise.lab.exercises.reading import exercise as read_or_check

    result = read_or_check(number, file, hint=hint, solution=solution)
    if json_:
        o.print_json(result.record())
    elif isinstance(result, CheckedAnswer) or number is None:
        typer.echo(result.answer_text())
    else:
        _print_markdown(result.answer_text())
    if isinstance(result, CheckedAnswer):
        raise typer.Exit(int(not result.right))
    if number is None and not json_:
        typer.echo("tiewise exercise N prints one; tiewise exercise N FILE.py checks your answer")


def _print_markdown(text: str) -> None:
    """Print text in Markdown as the terminal shows it."""
    from rich.markdown import Markdown

    o.print_view(Markdown(text))
