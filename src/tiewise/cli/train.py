"""`tiewise train`: one model, by the same code as `compare`."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tiewise.cli import options as o
from tiewise.cli.running import running

if TYPE_CHECKING:
    from tiewise.report.published import Beside
    from tiewise.training.results import RunResult


def train(
    corpus: str = o.CORPUS,
    boundary: str = typer.Option(
        None, "--boundary", "-b", help="The boundary to train, e.g. factored:64+bias.", show_default="tied"
    ),
    share: str = o.SHARE,
    seed: int = typer.Option(None, help="Of data order, body and tables.", show_default="1"),
    recipe: str = o.RECIPE,
    text: list[str] = o.TEXT,
    split: str = o.SPLIT,
    tokenizer: str = o.TOKENIZER,
    model: str = o.MODEL,
    steps: int = o.STEPS,
    set_: list[str] = o.SET,
    config: Path = o.CONFIG,
    out: Path = o.OUT,
    resume: bool = o.RESUME,
    overwrite: bool = o.OVERWRITE,
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Train one model with a boundary, and write it where `AutoModelForCausalLM.from_pretrained` reads it: `final`.

    Where only `tiewise.load` reads that, the same model lies beside it as plain dense tables: `dense`.
    """
    o.need_torch()
    from tiewise.training import ranks

    given = {
        "arms": (boundary,) if boundary is not None else None,
        "share": o.split_specs(share) if share is not None else None,
        "seed": seed,
        "recipe": recipe,
        "text": o.texts(text, recipe, corpus),
        "split": split,
        "tokenizer": tokenizer,
        "model": model,
        "steps": steps,
    }
    out = out or Path("runs/train")
    with running("train", out, begun=resume) as run:
        settings = ranks.first_does(
            lambda: o.asked(out, given, config, set_, resume=resume, overwrite=overwrite, single=True)
        )
        o.hush_libraries()
        from tiewise.training.albert.assemble import FOUND
        from tiewise.training.folder import DENSE, how_it_loads, read_json
        from tiewise.training.lock import locked
        from tiewise.training.results import to_record
        from tiewise.training.single import train_one
        from tiewise.training.start import start

        shown = o.shown(quiet)
        with locked(out):
            if settings is not None:
                start(settings, out, o.command_line(), shown, overwrite=overwrite)
            run.begun = True
            result, folder = train_one(out, shown)
            beside = ranks.first_does(lambda: _beside(out, result))
        speaks = ranks.first()
    if not speaks:
        return
    if json_:
        dense = folder.with_name(DENSE)
        o.print_json(to_record(result) | {"model": str(folder), "dense": str(dense) if dense.is_dir() else None})
        return
    model = "; it ".join(filter(None, [f"model: {folder}", how_it_loads(folder.parent)]))
    if not isfinite(result.heldout_nll):
        print("diverged: the loss is no number any more; try a lower --set learning_rate")
    pretrained = read_json(folder.parent / FOUND)
    if pretrained is not None:
        _pretrained(pretrained, result)
        print(model)
        return
    print(
        f"held-out nll {result.heldout_nll:.4f} (perplexity {result.perplexity:.1f}, "
        f"{result.bits_per_byte:.3f} bits per byte), training nll {result.train_nll:.4f}"
    )
    if beside is not None:
        from rich.console import Console

        from tiewise.report.comparison_view import published_table

        Console().print(published_table(beside))
    print(model)


def _pretrained(found: dict[str, Any], result: RunResult) -> None:
    """Print what an ALBERT was measured by."""
    shares = {"masked tokens": found["tokens"], **{f"pairs ({name})": of for name, of in found["pairs"].items()}}
    print(
        f"held-out nll {result.heldout_nll:.4f} per masked token (by their frequencies: {found['unigram_nll']:.4f}), "
        f"training nll {result.train_nll:.4f}"
    )
    for name, of in shares.items():
        interval = f"95 % interval {of['low']:.1%} to {of['high']:.1%}, n = {of['count']:,}"
        print(f"{name}: {of['share']:.1%} right ({interval}), nll {of['nll']:.4f}")


def _beside(out: Path, result: RunResult) -> Beside | None:
    """Return what a recipe's run is held against."""
    from tiewise.report.published import Beside
    from tiewise.training.compare import changes
    from tiewise.training.folder import saved_run
    from tiewise.training.start import open_text

    settings = saved_run(out)
    if settings.recurrent is None:
        return None
    text = open_text(out)
    return Beside(settings.recipe, changes(settings, text), {result.arm: [result.perplexity]}, text.facts)
