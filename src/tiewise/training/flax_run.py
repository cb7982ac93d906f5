"""One arm with one seed, trained in JAX: `tiewise.training.run.train` with the steps taken by `tiewise.flax`.

    PyTorch's model of the arm → its weights → Flax decoder → Optax steps → the weights back → the same measures

Both backends start an arm of a seed from the same numbers, are measured by the same code and leave the same results. A
run that was interrupted goes on from its newest checkpoint. What this backend lacks, `Settings.checked` refuses.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from flax import nnx

from tiewise.boundary.install import Installed
from tiewise.core.errors import Interrupted, RunError
from tiewise.data.prepared import PreparedText
from tiewise.flax.flax_models import FlaxDecoder
from tiewise.flax.flax_training import Fitting, OptaxRecipe, TrainingPoint, token_losses
from tiewise.training import flax_checkpoint, ranks
from tiewise.training.callbacks import Interrupt, add_line, keep_lines
from tiewise.training.evaluate import bits_per_byte, direct_path
from tiewise.training.job import Job
from tiewise.training.model import build, parameters
from tiewise.training.results import RunResult
from tiewise.training.run import CURVE_BLOCKS, METRICS, Outcome, curve, final, finished, keep, starting_facts


def train(job: Job, text: PreparedText, counts: np.ndarray, probe: list[int]) -> Outcome:
    """Train one job to its end, or take up its finished or interrupted self; arguments as `tiewise.training.run.train`.

    Raises:
        RunError: several processes train together.
        Interrupted: after Ctrl-C, with a checkpoint written.
    """
    if ranks.size() > 1:
        raise RunError(f"{ranks.size()} processes with the flax backend", "start one, or use the torch backend")
    done = finished(job.folder)
    if done is not None:
        return done
    job.folder.mkdir(parents=True, exist_ok=True)
    installed = build(job.settings, job.spec, text, job.seed, job.feed_forward)
    facts = starting_facts(job, installed, text, counts)
    fitting = _started(job, installed, text)
    flax_checkpoint.take_up(fitting, job.folder)
    keep_lines(job.folder / METRICS, fitting.step)
    _finish(job, fitting, text)
    state = {name: torch.from_numpy(np.array(value)) for name, value in fitting.model.named().items()}
    installed.model.load_state_dict(state, strict=False)  # a tied head is the table; `load_named` checked the names
    outcome = Outcome(_result(job, installed, text, counts, facts, fitting), direct_path(installed, probe))
    keep(job, installed, text, outcome)
    return outcome


def _started(job: Job, installed: Installed, text: PreparedText) -> Fitting:
    """Return the arm as a Flax decoder of the same numbers, no step taken."""
    s, torch_model = job.settings, installed.model
    sizes = (text.vocab, s.width, s.layers, s.heads, torch_model.config.intermediate_size)
    model = FlaxDecoder(job.spec, *sizes, rngs=nnx.Rngs(job.seed))
    model.load_named({name: value.numpy() for name, value in torch_model.state_dict().items()})
    recipe = OptaxRecipe(s.steps, s.batch, s.length, s.learning_rate, s.weight_decay, job.seed)
    return Fitting(model, text.split("train"), recipe)


def _finish(job: Job, fitting: Fitting, text: PreparedText) -> None:
    """Take the steps that are left; checkpoints as often as PyTorch's runs write them, and at Ctrl-C."""
    steps = job.settings.steps
    every = 4 * max(1, steps // 20)
    if job.bar is not None:
        job.bar.begun(job.title, fitting.step)
    with Interrupt() as interrupt:
        for point in fitting.steps():
            if job.bar is not None:
                job.bar.stepped(fitting.step)
            if point is not None:
                if job.bar is not None:
                    job.bar.learnt(point.train_nll)
                add_line(job.folder / METRICS, _line(job, fitting, point, text))
            if interrupt.caught or fitting.step % every == 0:
                flax_checkpoint.keep(fitting, job.folder)
            if interrupt.caught:
                raise Interrupted(str(job.folder))


def _line(job: Job, fitting: Fitting, point: TrainingPoint, text: PreparedText) -> dict[str, Any]:
    """Return what `metrics.jsonl` says of a point."""
    found = {"step": point.step, "train_nll": point.train_nll}
    if not job.trial:
        losses, _ = token_losses(fitting.model, text.split(job.split), job.settings.length, CURVE_BLOCKS)
        found["heldout_nll"] = float(losses.mean())
    found |= {"path_a": point.paths.a, "path_b": point.paths.b}
    return found if math.isnan(point.paths.cosine) else found | {"cosine": point.paths.cosine}


def _result(
    job: Job, installed: Installed, text: PreparedText, counts: np.ndarray, facts: dict[str, Any], fitting: Fitting
) -> RunResult:
    s, size, count = job.settings, text.facts["splits"][job.split], parameters(installed)
    heldout, training = final(job, installed, text, counts)
    seconds, tokens = fitting.seconds, s.batch * s.length
    return RunResult(
        arm=job.arm,
        seed=job.seed,
        steps=s.steps,
        train_nll=training.nll,
        heldout_nll=heldout.nll,
        perplexity=math.exp(min(heldout.nll, 700)),
        bits_per_byte=bits_per_byte(heldout.nll, size["tokens"], size["bytes"]),
        frequency=heldout.bins,
        parameters=count,
        total_parameters=sum(count.values()),
        trainable_parameters=sum(count.values()),
        training_bytes=4 * 4 * sum(count.values()),  # weights, gradients and Adam's two moments
        bytes=4 * sum(count.values()),
        tokens_per_second=fitting.timed * tokens / seconds if seconds else math.nan,
        seconds=seconds,
        learning_rate=s.learning_rate,
        curve=curve(job, tokens * np.arange(1, s.steps + 1)),
        **facts,
    )
