"""An ALBERT run put together: its rows, its trainer, what it is measured by, and what is written beside its result."""

from __future__ import annotations

from typing import Any

import numpy as np

from tiewise.boundary.install import Installed
from tiewise.core.errors import DataError
from tiewise.core.random_logits import first_step
from tiewise.data.prepared import PreparedText
from tiewise.data.training_rows import PairRows, mark
from tiewise.training.albert.measure import Pretrained, measure_pretrained, measured_rows, rows_of
from tiewise.training.albert.model import arm_config, options
from tiewise.training.albert.trainer import LOGGED, PretrainingTrainer
from tiewise.training.arguments import arguments, batch_share, callbacks
from tiewise.training.callbacks import Clock, Lines
from tiewise.training.evaluate import Measured
from tiewise.training.folder import write_json
from tiewise.training.job import Job
from tiewise.training.settings import Settings

FOUND = "pretraining.json"  # in a run's folder: accuracies on tokens and pairs, with intervals
CURVE_ROWS = 64  # of the held-out split, behind each point of a curve


def check_arms(settings: Settings) -> None:
    """Refuse what needs no text to be seen.

    Raises:
        SpecError: an arm that no model of these sizes can have.
    """
    for arm in settings.specs():
        arm_config(settings, arm, 8, {})


def marked(settings: Settings, text: PreparedText) -> PreparedText:
    """Give a text's tokenizer its marks, and see that every split makes pairs.

    Raises:
        DataError: a split of which no document has two sentences, or fewer rows than a step takes.
    """
    text = mark(text)
    for split in ("heldout", "train"):
        try:
            rows = rows_of(settings, text, split, seed=1)
        except DataError as error:
            raise DataError(f"{split}: {error.what}", error.fix) from None
    needed = settings.batch * settings.accumulate
    if len(rows) < needed:
        what = f"the text makes {len(rows)} training rows of {settings.length} tokens, and one step takes {needed}"
        raise DataError(what, "give more text, or less of length, batch or accumulate (--set batch=1, say)")
    return text


def make_trainer(
    job: Job, installed: Installed, text: PreparedText, counts: np.ndarray, clock: Clock
) -> PretrainingTrainer:
    """Return the trainer of an ALBERT job; `counts` [V] are of the training split."""
    s, o = job.settings, options(job.settings)
    rows = _curve_rows(job, text)
    found = callbacks(job, clock)
    for callback in found:
        if isinstance(callback, Lines):
            callback.more = LOGGED
    trainer: PretrainingTrainer = PretrainingTrainer(
        installed,
        options=o,
        found=lambda: _curve(measure_pretrained(trainer.installed, rows, counts)),
        args=arguments(
            job,
            per_device_train_batch_size=batch_share(job),
            lr_scheduler_type="linear",
            warmup_steps=round(o.warmup * s.steps),
            max_grad_norm=o.clip,
        ),
        train_dataset=rows_of(s, text, "train", seed=job.seed, count=s.steps * s.batch * s.accumulate),
        callbacks=found,
    )
    return trainer


def measured(
    job: Job, installed: Installed, text: PreparedText, counts: np.ndarray, split: str, *, across: bool = False
) -> Pretrained:
    """Evaluate a split as far as a run's settings say: on its own objective, or `across` all of them."""
    s = job.settings
    own = options(s).objective
    objectives = tuple(dict.fromkeys((own, "sop", "nsp"))) if across else (own,)
    return measure_pretrained(
        installed, measured_rows(s, text, split, objectives, max(1, s.measured // s.length)), counts
    )


def _curve_rows(job: Job, text: PreparedText) -> dict[str, PairRows]:
    return measured_rows(job.settings, text, job.split, (options(job.settings).objective,), CURVE_ROWS)


def starting_facts(job: Job, installed: Installed, text: PreparedText, counts: np.ndarray) -> dict[str, Any]:
    """What is known of a model before its first step."""
    first = measure_pretrained(installed, _curve_rows(job, text), counts)
    config, spec = installed.model.config, installed.spec
    std = spec.init or float(config.initializer_range)
    # behind the head's random dense layer no row meets itself
    predicted = first_step(spec, text.vocab, config.embedding_size, std).computed()[0]
    return {"init_std": std, "predicted_initial_nll": predicted, "initial_nll": first.tokens.nll}


def final(job: Job, installed: Installed, text: PreparedText, counts: np.ndarray) -> tuple[Measured, Measured]:
    """(held-out, training) losses of a finished model; writes what else was found into the run's folder."""
    heldout = measured(job, installed, text, counts, job.split, across=True)
    write_json(job.folder / FOUND, heldout.record())
    train = measured(job, installed, text, counts, "train")
    return heldout.measured(), train.measured()


def _curve(found: Pretrained) -> dict[str, float]:
    said = {"heldout_nll": found.tokens.nll, "heldout_accuracy": found.tokens.share}
    for pair in found.pairs.values():
        said |= {"heldout_pair_nll": pair.nll, "heldout_pair_accuracy": pair.share}
    return said
