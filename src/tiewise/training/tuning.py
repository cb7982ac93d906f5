"""The same small tuning budget for every arm: starting scale × learning rate, short runs, one seed of its own.

Initialisation and learning rate move a result more than tying does, so a comparison that fixes one of them for all arms
compares that choice. Every arm gets the same nine runs of a quarter of the steps; the lowest nll on the `tune` split,
which neither trains nor reports, wins.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tiewise.data.prepared import PreparedText
from tiewise.training import ranks
from tiewise.training.display import Say
from tiewise.training.folder import folder_name, read_json, write_json
from tiewise.training.kind import kind_of
from tiewise.training.run import Train, train
from tiewise.training.settings import Job, Settings

INIT_FACTORS = (0.5, 1.0, 2.0)
RATE_FACTORS = (0.5, 1.0, 2.0)
SEED = 0  # of tuning; compared runs count from 1
MEASURED = 32_768  # tokens of the tuning split that choose, at most


@dataclass(frozen=True)
class Choice:
    """An arm's starting scale and learning rate."""

    init: float
    learning_rate: float

    def of(self, job: Job) -> Job:
        """Return the job with these of its own."""
        settings = replace(job.settings, learning_rate=self.learning_rate)
        return replace(job, spec=replace(job.spec, init=self.init), settings=settings)


def tune(
    jobs: list[Job], out: Path, text: PreparedText, counts: np.ndarray, say: Say, train: Train = train
) -> tuple[dict[str, Choice], list[Any]]:
    """Choose for each job's arm, taking up what `tuning.json` already holds; `train` is what trains one job.

    Returns:
        the choice per arm, and every trial (arm, init, learning_rate, nll, chosen) for the report.
    """
    path = out / "tuning.json"
    trials: list[dict[str, Any]] = ranks.first_does(lambda: read_json(path) or [])
    known = {(t["arm"], t["init"], t["learning_rate"]) for t in trials}
    for job in jobs:
        for choice in grid(job, text.vocab):
            folder = out / "tuning" / folder_name(job.arm) / f"init-{choice.init:.4g}-lr-{choice.learning_rate:.4g}"
            trial = choice.of(short(job, folder))
            if (job.arm, choice.init, choice.learning_rate) not in known:
                found = train(trial, text, counts, []).result.heldout_nll
                nll = found if math.isfinite(found) else None
                ended = "diverged" if nll is None else f"{nll:.3f}"
                say(f"tune {job.arm}: init {choice.init:.4g}, lr {choice.learning_rate:.4g} → {ended}")
                trials.append({"arm": job.arm, "init": choice.init, "learning_rate": choice.learning_rate, "nll": nll})
                ranks.first_does(partial(write_json, path, trials))
                ranks.first_does(partial(shutil.rmtree, folder))  # nine models for each arm need not stay
            if job.bar is not None:
                job.bar.ended(trial.settings.steps)
    chosen: dict[str, Choice] = {}
    for job in jobs:
        best = min((t for t in trials if t["arm"] == job.arm), key=lambda t: math.inf if t["nll"] is None else t["nll"])
        chosen[job.arm] = Choice(best["init"], best["learning_rate"])
    marked = [{**t, "chosen": chosen[t["arm"]] == Choice(t["init"], t["learning_rate"])} for t in trials]
    return chosen, marked


def grid(job: Job, vocab: int) -> list[Choice]:
    """Nine choices around the arm's own defaults."""
    std = kind_of(job.settings).table_std(job, vocab)
    return [Choice(std * i, job.settings.learning_rate * r) for i in INIT_FACTORS for r in RATE_FACTORS]


def per_arm() -> int:
    """Trials that each arm gets."""
    return len(INIT_FACTORS) * len(RATE_FACTORS)


def short_steps(settings: Settings) -> int:
    """Steps of a trial."""
    return max(1, settings.steps // 4)


def short(job: Job, folder: Path) -> Job:
    """Return the trial of a job: a quarter of its steps, judged by a part of the tuning split alone."""
    steps = short_steps(job.settings)
    spec = job.spec if (job.spec.tie_at or job.spec.untie_at or 0) < steps else job.spec.plainly()
    settings = replace(job.settings, steps=steps, measured=min(MEASURED, job.settings.measured))
    return replace(
        job,
        spec=spec,
        seed=SEED,
        settings=settings,
        folder=folder,
        title=f"tune {job.arm}",
        split="tune",
        trial=True,
    )
