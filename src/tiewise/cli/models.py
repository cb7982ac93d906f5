"""`tiewise models`: who has which vocabulary, width and depth, and who ties."""

from __future__ import annotations

import typer

from tiewise.cli import options as o


def models(
    tied: bool = typer.Option(None, "--tied/--untied", help="Only models that tie, or only those that do not."),
    family: str = typer.Option(None, help="Only names or model types that begin so: qwen, gpt_neox."),
    min_vocab: int = typer.Option(None, help="Only vocabularies of at least this many tokens."),
    min_size: float = typer.Option(None, help="Only models of at least this many billion parameters."),
    max_size: float = typer.Option(None, help="Only models of fewer than this many billion parameters."),
    sort: str = typer.Option(None, help="name, size, vocab, width, layers, ratio (V/D) or share (of the tables)."),
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """List public models: vocabulary V, width D, layers L, what their tables weigh, and whether they tie.

    `tiewise check` on the files themselves is better evidence than this catalogue.
    """
    from tiewise.planning.catalogue import Filter, select
    from tiewise.report.models import BETTER

    sizes = (None if size is None else size * 1e9 for size in (min_size, max_size))
    found = select(Filter(tied, family, min_vocab, *sizes), sort)
    if json_:
        o.print_json({"models": [model.record() for model in found], "note": BETTER})
        return
    from rich.console import Console

    from tiewise.report.models import models_table

    console = Console()
    console.print(models_table(found, console.width))
