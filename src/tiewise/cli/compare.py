"""`tiewise compare`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tiewise.cli import options as o
from tiewise.cli.running import running

if TYPE_CHECKING:
    from tiewise.training.run import Train


def compare(
    corpus: str = o.CORPUS,
    arms: str = typer.Option(
        None,
        "--arms",
        "--boundary",
        "-b",
        help="Boundaries to compare, separated by commas; the first is the reference. "
        "E.g. tied,untied,factored:64+bias,residual:16.",
        show_default="tied,untied,factored:64",
    ),
    share: str = o.SHARE,
    seeds: int = typer.Option(None, help="Runs of each arm, paired across arms.", show_default="3"),
    recipe: str = o.RECIPE,
    text: list[str] = o.TEXT,
    split: str = o.SPLIT,
    tokenizer: str = o.TOKENIZER,
    model: str = o.MODEL,
    steps: int = o.STEPS,
    minutes: float = typer.Option(None, help="Instead of --steps: the time for all, start and tuning included."),
    match: str = typer.Option(
        None,
        help="width: same body. parameters: what an arm saves at the boundary is spent on its body.",
        show_default="width",
    ),
    tune: bool = typer.Option(None, "--tune/--no-tune", help="Nine short runs per arm over init and learning rate."),
    backend: str = typer.Option(
        None, metavar="torch|flax", help="flax: the steps are taken in JAX.", show_default="torch"
    ),
    set_: list[str] = o.SET,
    config: Path = o.CONFIG,
    out: Path = o.OUT,
    resume: bool = o.RESUME,
    overwrite: bool = o.OVERWRITE,
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Train a model under several tying choices and say which is better here, and whether the difference is real.

    With no option: three choices, three seeds, a small decoder on the built-in demo corpus, a few minutes on two cores.
    """
    o.need_torch()
    from tiewise.training import ranks

    given = {
        "arms": tuple(o.split_specs(arms)) if arms is not None else None,
        "share": o.split_specs(share) if share is not None else None,
        "seeds": seeds,
        "recipe": recipe,
        "text": o.texts(text, recipe, corpus),
        "split": split,
        "tokenizer": tokenizer,
        "model": model,
        "steps": steps,
        "minutes": minutes,
        "match": match,
        "tune": tune,
        "backend": backend,
    }
    out = out or Path("runs/compare")
    with running("compare", out, begun=resume) as run:
        settings = ranks.first_does(lambda: o.asked(out, given, config, set_, resume=resume, overwrite=overwrite))
        o.hush_libraries()
        from rich.console import Console

        from tiewise.report.albert_paper import orders
        from tiewise.report.comparison_page import write_report
        from tiewise.report.comparison_view import comparison_view, published_table, sharing_table
        from tiewise.report.published import of_comparison
        from tiewise.training.compare import compare as finish
        from tiewise.training.folder import FINAL, folder_name, how_it_loads
        from tiewise.training.lock import locked
        from tiewise.training.start import start

        shown = o.shown(quiet)
        with locked(out):
            if settings is not None:
                if settings.backend == "flax":
                    o.need("jax", "flax", "optax", extra="flax")
                start(settings, out, o.command_line(), shown, overwrite=overwrite, gone=run.gone)
            run.begun = True
            comparison = finish(out, shown, _trainer)
            report = ranks.first_does(lambda: write_report(comparison, out / "report.html"))
        speaks = ranks.first()
    if not speaks:
        return
    if json_:
        o.print_json(comparison.to_dict())
        return
    console = Console()
    console.print(comparison_view(comparison))
    beside = of_comparison(comparison)
    if beside is not None:
        console.print(published_table(beside))
    if found := orders(comparison):
        console.print(sharing_table(found))
    plain: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}
    console.print(f"report: {report}", **plain)
    loads = {name: how_it_loads(out / name / "seed-1") for name in map(folder_name, comparison.arms)}
    console.print(
        "; ".join([f"models: {out}/ARM/seed-N/{FINAL}", *(f"{n} {how}" for n, how in loads.items() if how)]), **plain
    )


def _trainer(backend: str) -> Train:
    """Return what trains one job; JAX is imported only where it is asked for."""
    if backend == "flax":
        from tiewise.training.flax_run import train as train_flax

        return train_flax
    from tiewise.training.run import train

    return train
