"""A recurrent run put together: its steps, its trainer, what it is measured by, and the weights that it ends with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tiewise.boundary.install import Installed
from tiewise.core.files import written_whole
from tiewise.data.prepared import PreparedText
from tiewise.training.arguments import arguments, callbacks
from tiewise.training.callbacks import Clock
from tiewise.training.evaluate import Measured
from tiewise.training.job import Job
from tiewise.training.recurrent.annealing import Annealing
from tiewise.training.recurrent.measure import measure_streams
from tiewise.training.recurrent.options import Recurrent
from tiewise.training.recurrent.streams import Plan, Steps, cut, plan
from tiewise.training.recurrent.trainer import StatefulTrainer
from tiewise.training.settings import Settings

BEST = "best.pt"  # in a run's folder, while it lasts
CURVE_WORDS = 8_000  # of the held-out split, behind each point of a curve


def run_plan(settings: Settings, text: PreparedText, seed: int) -> Plan:
    """Steps of one run: its epochs, or as many of their steps as `settings.steps`.

    Raises:
        DataError: a text too short for its streams.
    """
    o = options(settings)
    vary = seed if o.vary_length else None
    return cut(plan(len(text.split("train")), settings.batch, settings.length, o.epochs, vary=vary), settings.steps)


def options(settings: Settings) -> Recurrent:
    """Return the recurrent part of a recurrent run's settings."""
    assert settings.recurrent is not None
    return settings.recurrent


def make_trainer(
    job: Job, installed: Installed, text: PreparedText, counts: np.ndarray, clock: Clock
) -> StatefulTrainer:
    """Return the trainer of a recurrent job; `counts` [V] are of the training split."""
    o, steps = options(job.settings), run_plan(job.settings, text, job.seed)
    s = replace(job.settings, steps=len(steps))  # of varied lengths, another seed has more or fewer
    job = replace(job, settings=s)
    annealing = Annealing(
        steps,
        o,
        s.learning_rate,
        s.length,
        validate=lambda: measure_streams(trainer.installed, text.split("tune"), counts, o.parallel).nll,
        keep=lambda: _keep_best(job, trainer),
    )
    trainer: StatefulTrainer = StatefulTrainer(
        installed,
        options=o,
        annealing=annealing,
        evaluator=lambda: measured(job, trainer.installed, text, counts, CURVE_WORDS).nll,
        args=arguments(
            job, per_device_train_batch_size=1, lr_scheduler_type="constant", max_grad_norm=o.clip, warmup_steps=0
        ),
        train_dataset=Steps(text.split("train"), s.batch, steps),
        callbacks=[*callbacks(job, clock), annealing],
    )
    return trainer


def measured(
    job: Job,
    installed: Installed,
    text: PreparedText,
    counts: np.ndarray,
    most: int | None = None,
    split: str | None = None,
) -> Measured:
    """Evaluate a split (the job's, unless named) or its first `most` words, as the papers do."""
    return measure_streams(installed, text.split(split or job.split), counts, options(job.settings).parallel, most)


def settle(job: Job, installed: Installed) -> None:
    """Give a finished run the weights that it ends with: those of its best epoch, where it kept them."""
    path = job.folder / BEST
    if options(job.settings).keep == "best" and path.is_file():
        device = installed.tables()[0].device
        installed.model.load_state_dict(torch.load(path, map_location=device, weights_only=True))


def _keep_best(job: Job, trainer: StatefulTrainer) -> None:
    if options(job.settings).keep == "best":
        with written_whole(job.folder / BEST) as made:
            torch.save(trainer.installed.model.state_dict(), made)
