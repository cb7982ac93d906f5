"""One run, by the same code as a comparison's: what `tiewise train` does after `tiewise.training.start.start`."""

from __future__ import annotations

from pathlib import Path

from tiewise.core.errors import RunError
from tiewise.data.frequency import token_counts
from tiewise.training.folder import FINAL
from tiewise.training.results import RunResult
from tiewise.training.run import train
from tiewise.training.shown import Shown
from tiewise.training.start import make_jobs, open_run, open_text, seeded


def train_one(out: Path, shown: Shown) -> tuple[RunResult, Path]:
    """Train or finish the run in `out`; return what was measured and the folder of the model.

    Raises:
        RunError: `out` holds no run, or a comparison.
        Interrupted: after Ctrl-C, with a checkpoint written.
    """
    settings = open_run(out)
    if settings.seed is None:
        raise RunError(f"{out} holds a comparison", f"use tiewise compare --out {out} --resume")
    text = open_text(out)
    with shown.whole(settings.steps) as bar:
        job = make_jobs(settings, text, out, bar)[0]
        job = seeded(job, settings.seed, f"{job.arm} seed {settings.seed}")
        result = train(job, text, token_counts(text.split("train"), text.vocab), []).result
    return result, job.folder / FINAL
