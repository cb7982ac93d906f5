"""`tiewise train`: one model, by the same code as `compare`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import typer

from tiewise.cli import options as o


def train(
    boundary: str = typer.Option(
        None, "--boundary", "-b", help="The boundary to train, e.g. factored:64+bias.", show_default="tied"
    ),
    seed: int = typer.Option(1, help="Of data order, body and tables.", min=1),
    text: list[str] = o.TEXT,
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
    """Train one model with a boundary, and write it where `AutoModelForCausalLM.from_pretrained` reads it."""
    o.need_torch()
    given = {
        "arms": (boundary,) if boundary is not None else None,
        "seeds": seed,
        "text": tuple(text) if text else None,
        "tokenizer": tokenizer,
        "model": model,
        "steps": steps,
    }
    out = out or Path("runs/train")
    settings = None
    if not resume:
        given["arms"] = given["arms"] or ("tied",)
        settings = o.settings_from(config, set_, given).checked()
    elif config or set_ or any(value is not None for name, value in given.items() if name != "seeds"):
        raise o.RunError("--resume takes its settings from the run", f"give only --out {out} --resume")
    o.hush_libraries()
    from tiewise.data.blocks import token_counts
    from tiewise.training.compare import Shown, make_jobs, prepare_text, seeded
    from tiewise.training.folder import open_run
    from tiewise.training.run import train as run

    settings = open_run(out, settings, resume=resume, overwrite=overwrite).checked()
    shown = Shown(o.say(quiet), o.bars(quiet))
    prepared = prepare_text(settings, out, shown)
    job = make_jobs(settings, prepared, out, shown)[0]
    job = seeded(job, settings.seeds, f"{job.arm} seed {settings.seeds}")
    result = run(job, prepared, token_counts(prepared.split("train"), prepared.vocab), []).result
    if json_:
        json.dump(asdict(result), sys.stdout)
        print()
        return
    print(
        f"held-out nll {result.heldout_nll:.4f} (perplexity {result.perplexity:.1f}, "
        f"{result.bits_per_byte:.3f} bits per byte), training nll {result.train_nll:.4f}"
    )
    print(f"model: {job.folder / 'final'}")
