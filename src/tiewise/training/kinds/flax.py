"""Decoders trained in JAX by `tiewise.flax`; everything else is shared with PyTorch's.

    PyTorch's model of the arm → its weights → Flax decoder → Optax steps → the weights back → the same measures

In both backends an arm of a seed starts from the same numbers, is measured by the same code and leaves the same
results. A checkpoint is `checkpoint-<step>/` with its arrays and, as in PyTorch, `trainer_state.json`. It is written to
a temporary folder, flushed to disk and renamed, so a kill leaves the old one or the new one. The newest two stay.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flax import nnx
from safetensors.numpy import save
from torch import nn

from tiewise.boundary.flax.models import FlaxDecoder
from tiewise.boundary.flax.parameter_files import read
from tiewise.boundary.flax.training import Fitting, OptaxRecipe, TrainingPoint, token_losses
from tiewise.boundary.installation import Installed
from tiewise.core.errors import CheckpointError, Interrupted, RunError
from tiewise.core.files import sync_to_disk, write_atomically
from tiewise.core.spec_options import FLAX_RUN
from tiewise.training.best_step import TUNE, TUNE_NLL, keep_if_best, keeps_best, write_weights
from tiewise.training.folder import METRICS, add_line, keep_lines, read_json, replace_path, write_json
from tiewise.training.kinds.decoder import Decoders
from tiewise.training.settings import DECODER, Settings
from tiewise.training.trainer import Interrupt, Job, logging_window

ARRAYS, STATE = "arrays.safetensors", "trainer_state.json"
MOST_CHECKPOINTS = 2  # checkpoints that stay on disk
_TORCH = "leave it out, or use the torch backend"


class FlaxDecoders(Decoders):
    """Llamas trained by one process, with a boundary that does not change."""

    backend = FLAX_RUN
    where = "with the flax backend"
    lacks: Mapping[str, tuple[object, str]] = {
        "kind": (DECODER, _TORCH),
        "model": ("llama", _TORCH),
        "minutes": (None, _TORCH),
        "accumulate": (1, _TORCH),
        "bf16": (False, _TORCH),
        "activation_checkpointing": (False, _TORCH),
        "report_to": ((), _TORCH),
    }
    alone = ("the flax backend", "start one, or use the torch backend")
    side_by_side = False  # XLA uses all cores, whatever the run's share of threads
    packages = ("jax", "flax", "optax")

    def check(self, settings: Settings) -> None:
        """Refuse, too, boundaries that change, and vectors; this kind has no options."""
        super().check(settings)
        for arm, spec in settings.specs().items():
            if spec != spec.plainly() or spec.vectors is not None:
                raise RunError(f"{arm} with the flax backend", "schedules and vectors need the torch backend")

    def fit(self, job: Job, installed: Installed, checkpoint: Path | None, step: int) -> tuple[int, float]:
        """Train in JAX, and copy the weights to PyTorch's model.

        Checkpoints are as frequent as PyTorch's.
        """
        settings, torch_model, metrics = job.settings, installed.model, job.folder / METRICS
        fitting = make_fitting(job, torch_model)
        if checkpoint is not None:
            resume_from(fitting, checkpoint)
        keep_lines(metrics, fitting.step)
        job.report_progress(fitting.step)
        nll = None
        with Interrupt() as interrupt:
            for point in fitting.steps():
                if point is not None:
                    nll = point.train_nll
                    add_line(metrics, self._line(job, fitting, point))
                    if keeps_best(job):
                        _keep_if_best(job, fitting, torch_model)
                job.report_progress(fitting.step, nll)
                if interrupt.pressed or fitting.step % (4 * logging_window(settings.steps)) == 0:
                    save_checkpoint(fitting, job.folder)
                if interrupt.pressed:
                    raise Interrupted(str(job.folder))
        _copy_weights(fitting, torch_model)
        return fitting.timed, fitting.seconds

    def _line(self, job: Job, fitting: Fitting, point: TrainingPoint) -> dict[str, Any]:
        """Return the line of `metrics.jsonl` for a point of the curve.

        A trial has no tuning loss.
        """
        line: dict[str, Any] = {"step": point.step, "train_nll": point.train_nll}
        if not job.trial:
            losses, _ = token_losses(fitting.model, job.text.split(TUNE), job.settings.length, self.curve_blocks)
            line[TUNE_NLL] = float(losses.mean())
        paths = {"path_a": point.paths.a, "path_b": point.paths.b, "cosine": point.paths.cosine}
        return line | {name: value for name, value in paths.items() if not math.isnan(value)}


def _keep_if_best(job: Job, fitting: Fitting, torch_model: nn.Module) -> None:
    """Keep the weights of this step if it is the best one so far."""

    def write(path: Path) -> None:
        """Write the weights as PyTorch's model has them."""
        _copy_weights(fitting, torch_model)
        write_weights(torch_model.state_dict(), path)

    keep_if_best(job, fitting.step, write)


def _copy_weights(fitting: Fitting, torch_model: nn.Module) -> None:
    """Copy the weights of JAX's model to PyTorch's."""
    state = {name: torch.from_numpy(np.array(value)) for name, value in fitting.model.named().items()}
    torch_model.load_state_dict(state, strict=False)  # lacks a tied head; `load_named` checked the names


def make_fitting(job: Job, torch_model: Any) -> Fitting:
    """Make the Flax decoder of a job with PyTorch's weights, and its trainer."""
    s = job.settings
    sizes = (job.text.vocab, s.width, s.layers, s.heads, torch_model.config.intermediate_size)
    model = FlaxDecoder(job.spec, *sizes, rngs=nnx.Rngs(job.seed))
    model.load_named({name: value.numpy() for name, value in torch_model.state_dict().items()})
    recipe = OptaxRecipe(s.steps, s.batch, s.length, s.peak_rate, s.weight_decay, job.seed)
    return Fitting(model, job.text.split("train"), recipe)


def save_checkpoint(fitting: Fitting, folder: Path) -> None:
    """Write a checkpoint of `fitting` into a run's folder, and remove all but the newest."""
    final = folder / f"checkpoint-{fitting.step}"
    partial = final.with_name(final.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    arrays = {name: np.asarray(value) for name, value in fitting.arrays().items()}
    write_atomically(partial / ARRAYS, save(arrays))
    write_json(partial / STATE, {"global_step": fitting.step, "fitting": fitting.record()})
    replace_path(partial, final)
    sync_to_disk(folder)
    by_step = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    for path in by_step[:-MOST_CHECKPOINTS]:
        shutil.rmtree(path)


def resume_from(fitting: Fitting, checkpoint: Path) -> None:
    """Resume `fitting` from a checkpoint."""
    record = read_json(checkpoint / STATE).get("fitting")
    if record is None:
        raise CheckpointError(f"{checkpoint} is no checkpoint of the flax backend", "remove it to start the run again")
    fitting.resume(read(checkpoint / ARRAYS), record, str(checkpoint))


KIND = FlaxDecoders()
