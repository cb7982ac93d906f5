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
    from tiewise.cli.exercises import EXERCISES, check, of_number

    if file is not None:
        wrong = check(number, file)
        if json_:
            o.print_json({"exercise": number, "right": wrong is None, "wrong": wrong})
        else:
            typer.echo("right" if wrong is None else f"wrong: {wrong}")
        raise typer.Exit(int(wrong is not None))
    texts = {n: EXERCISES[n].text() for n in ([of_number(number).number] if number is not None else sorted(EXERCISES))}
    if json_:
        names = ("title", "statement", "hint", "solution")
        records = [{"number": n, **dict(zip(names, text, strict=True))} for n, text in texts.items()]
        return o.print_json({"exercises": records})
    if number is None:
        for n, (title, *_) in texts.items():
            typer.echo(f"{n:2}  {title}")
        return typer.echo("tiewise exercise N prints one; tiewise exercise N FILE.py checks your answer")
    from rich.markdown import Markdown

    title, statement, hint_text, solution_text = texts[number]
    parts = [f"# {title}", statement, *["## Hint", hint_text] * hint, *["## Solution", solution_text] * solution]
    o.print_view(Markdown("\n\n".join(parts)))
