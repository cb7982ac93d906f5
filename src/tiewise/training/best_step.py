"""Best step of a run: the one with the lowest loss on the tuning split.

Every point of a run's curve measures a part of the tuning split, which is neither trained on nor reported. A run with
`select: best` keeps the weights of the best point so far:

    metrics.jsonl    step, tune_nll, …         one line per point of the curve
    best-<step>      weights of that step      until the run ends

The lines alone decide, so a resumed run needs no other state: it drops the lines after its checkpoint. The weights of
the best step up to each checkpoint on disk are therefore kept as well. A boundary that changes during training
(`tie_at`, `untie_at`) is chosen among the steps after its change. A run whose last tuning loss is not finite has
diverged, and keeps its last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from tiewise.boundary.sharded.save_load import load_sharded, save_sharded
from tiewise.core import ranks
from tiewise.core.spec import BoundarySpec
from tiewise.core.step_names import BEST
from tiewise.training.folder import METRICS, read_lines, remove, replace_path
from tiewise.training.trainer import Job

TUNE = "tune"  # split whose loss decides
TUNE_NLL = "tune_nll"  # that loss in `metrics.jsonl`
CHECKPOINT, WEIGHTS = "checkpoint-", "best-"  # beginnings of names in a run's folder; the step follows


def keeps_best(job: Job) -> bool:
    """Return whether a run keeps its best step. A trial has no curve, so it keeps its last one."""
    return job.settings.select == BEST and not job.trial


def tuning_losses(folder: Path) -> dict[int, float]:
    """Return the tuning losses of a run's curve so far, by step."""
    return {line["step"]: line[TUNE_NLL] for line in read_lines(folder / METRICS) if TUNE_NLL in line}


def lowest_step(losses: Mapping[int, float], spec: BoundarySpec) -> int | None:
    """Return the first step with the lowest finite loss; None if there is none.

    Steps before the boundary of `spec` changes do not count.
    """
    change = max(spec.tie_at or 0, spec.untie_at or 0)
    candidates = [step for step, nll in losses.items() if step > change and math.isfinite(nll)]
    return min(candidates, key=lambda step: (losses[step], step), default=None)


def weights_path(folder: Path, step: int) -> Path:
    """Return the file of a step's weights, or the folder of a model in parts."""
    return folder / f"{WEIGHTS}{step}"


def keep_if_best(job: Job, step: int, write: Callable[[Path], None]) -> None:
    """Keep the weights of `step`, the newest point of the curve, if it is the best."""
    if lowest_step(tuning_losses(job.folder), job.spec) == step:
        write(weights_path(job.folder, step))
        _remove_others(job, step)


def _remove_others(job: Job, step: int) -> None:
    """Remove the weights of earlier steps, except those that a resume needs."""
    losses, needed = tuning_losses(job.folder), {step}
    for path in job.folder.glob(f"{CHECKPOINT}*"):
        number = path.name.removeprefix(CHECKPOINT)
        if number.isdecimal():
            until = {each: nll for each, nll in losses.items() if each <= int(number)}
            needed.add(lowest_step(until, job.spec) or 0)
    names = {weights_path(job.folder, each).name for each in needed}
    for path in job.folder.glob(f"{WEIGHTS}*"):
        if path.name not in names:
            remove(path)


def write_weights(state: Mapping[str, Any], path: Path) -> None:
    """Write a state dict to a file, complete or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    torch.save(dict(state), partial)
    replace_path(partial, path)


def load_weights(model: nn.Module, path: Path, device: torch.device) -> None:
    """Load a state dict that `write_weights` wrote."""
    model.load_state_dict(torch.load(path, map_location=device, weights_only=True))


class KeepBest(TrainerCallback):  # type: ignore[misc, unused-ignore]  # no types
    """Callback that keeps the weights of a run's best point so far.

    It must follow the callback that writes `metrics.jsonl`.
    """

    def __init__(self, job: Job, model: nn.Module) -> None:
        self.job, self.model = job, model

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kw: Any) -> None:
        """Keep the weights of this step if it is the best one so far."""
        if "loss" not in (logs or {}):
            return  # the Trainer's summary at the end
        if ranks.sharded() is not None:
            self._keep_parts(state.global_step)
        elif ranks.is_first():
            keep_if_best(self.job, state.global_step, lambda path: write_weights(self.model.state_dict(), path))

    def _keep_parts(self, step: int) -> None:
        """Keep the weights of a model in parts; all processes make this call."""
        job = self.job
        if ranks.on_rank_zero(lambda: lowest_step(tuning_losses(job.folder), job.spec) == step):
            save_sharded(weights_path(job.folder, step), self.model)
            ranks.on_rank_zero(lambda: _remove_others(job, step))


def load_parts(model: nn.Module, path: Path) -> None:
    """Load the weights of a model in parts; all processes make this call."""
    load_sharded(path, model)
