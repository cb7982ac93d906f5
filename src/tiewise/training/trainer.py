"""`transformers.Trainer` with the norms of both gradient paths, measured where they are still what they are.

The gradient of a step is whole after its last micro-batch and is scaled by the clipping that follows, so the paths are
measured between the two, at no matrix product: the lookup path's rows were kept apart by the lookup, and the head path
follows from the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from tiewise.boundary.install import Installed
from tiewise.core.backends import PathNorms
from tiewise.training import ranks
from tiewise.training.callbacks import METRICS, Bar, Clock, Events, Lines, tie_at, untie_at
from tiewise.training.settings import Job


class TiewiseTrainer(Trainer):
    """Logs `path_a`, `path_b` and `cosine` (means over the logging window), and `heldout_nll` from `evaluator`.

    Args:
        installed: the boundary of `model`.
        evaluator: called at every log, in the first of several processes, which alone logs its value as
            `heldout_nll`. None logs none.
        track: whether to measure paths.
        kwargs: as `transformers.Trainer`.
    """

    def __init__(
        self, installed: Installed, *, evaluator: Callable[[], float] | None = None, track: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(model=installed.model, **kwargs)
        self.installed = installed
        self._evaluator = evaluator
        self._track = track
        self._window: list[PathNorms] = []
        self._penalties: list[float] = []

    def load(self, checkpoint: Path) -> None:
        """Take a checkpoint's weights and state, as `train` does that resumes from it, and train no further."""
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        for say in (self.callback_handler.on_train_begin, self.callback_handler.on_train_end):
            say(self.args, self.state, self.control)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log and save as the Trainer does; where one of several processes cannot write, all of them end here."""
        with ranks.agreed() if self.control.should_log or self.control.should_save else nullcontext():
            super()._maybe_log_save_evaluate(*args, **kwargs)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save each process's own, all before the first writes the state that says a checkpoint is whole."""
        with ranks.agreed():
            super()._save_rng_state(output_dir)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Step as the Trainer does, then measure the finished gradient, before it is clipped."""
        table_in, table_out = self.installed.tables()
        if self._track and (self.installed.record is not None) != (table_in is table_out):
            self.installed.track(table_in is table_out)  # two tables hold their paths apart by themselves
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._track and self.accelerator.sync_gradients:
            self._measure(self.installed)
        return loss

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Add the spec's penalty on its projection, where it has one (Press & Wolf 2017, §3), while training."""
        result = super().compute_loss(model, inputs, *args, **kwargs)
        penalty = self.installed.penalty() if model.training else None
        if penalty is None:
            return result
        self._penalties.append(float(penalty.detach()))
        if self.model_accepts_loss_kwargs and kwargs.get("num_items_in_batch") is not None:
            # such a loss is already this micro-batch's share of the step's; every other one is divided afterwards
            penalty = penalty / self.current_gradient_accumulation_steps
        return (result[0] + penalty, *result[1:]) if isinstance(result, tuple) else result + penalty

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what was measured to the training log, and take the penalty out of its loss."""
        if "loss" in logs:
            logs = {**logs, "loss": logs["loss"] - _mean(self._penalties), **self._path_means()}
            self._penalties.clear()
            if self._evaluator is not None and ranks.first():
                logs["heldout_nll"] = self._evaluator()
        super().log(logs, start_time)

    @torch.no_grad()
    def _measure(self, installed: Installed) -> None:
        table_in, table_out = installed.tables()
        scale = self.accelerator.scaler.get_scale() if self.accelerator.scaler is not None else 1.0
        record = installed.record
        if table_in is table_out and (table_in.grad is None or record is None):
            return
        norms = installed.path_norms()
        if record is not None:
            record.clear()
        self._window.append(PathNorms(norms.a / scale, norms.b / scale, norms.total / scale, norms.cosine))

    def _path_means(self) -> dict[str, float]:
        window, self._window = self._window, []
        if not window:
            return {}
        found = {"path_a": _mean([n.a for n in window]), "path_b": _mean([n.b for n in window])}
        cosine = _mean([n.cosine for n in window])
        return found if math.isnan(cosine) else {**found, "cosine": cosine}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def arguments(job: Job, **own: Any) -> TrainingArguments:
    """What every run asks of the Trainer; `own` are the arguments of its kind."""
    s = job.settings
    window = logging_window(s.steps)
    found = TrainingArguments(
        output_dir=str(job.folder),
        max_steps=s.steps,
        gradient_accumulation_steps=s.accumulate,
        learning_rate=s.learning_rate,
        weight_decay=s.weight_decay,
        logging_steps=window,
        logging_nan_inf_filter=False,
        save_steps=4 * window,  # a multiple of the logging window, or a resumed window would average other steps
        save_total_limit=2,
        seed=job.seed,
        data_seed=1000 * job.seed,  # permutations of seeds 1, 2, 3 would overlap from one epoch to the next
        report_to="none",
        log_level_replica="error",  # else every process but the first says what the libraries say
        disable_tqdm=True,
        dataloader_drop_last=True,  # or the last batch of every epoch would be smaller than the others
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        bf16=s.bf16,
        use_cpu=not torch.accelerator.is_available(),  # the Trainer refuses bf16 where it is not told
        activation_checkpointing=s.activation_checkpointing,
        **own,
    )
    found._n_gpu = min(found.n_gpu, 1)  # several devices take several processes; replicas record no paths
    return found


def logging_window(steps: int) -> int:
    """Steps from one point of a run's curve to the next, so that there are 20 of them or somewhat more."""
    return max(1, steps // 20)


def callbacks(job: Job, clock: Clock, *more: str) -> list[TrainerCallback]:
    """Time, curves, TensorBoard, the bar where it is wanted, and the boundary's schedule.

    `more` are names that a kind of run logs beside those of all.
    """
    lines = Lines(job.folder / METRICS, more)
    found: list[TrainerCallback] = [clock, lines, Events(job.folder / "tensorboard")]
    found += [Bar(job.bar, job.title)] if job.bar is not None else []
    found += [untie_at(job.spec.untie_at)] if job.spec.untie_at is not None else []
    found += [tie_at(job.spec.tie_at)] if job.spec.tie_at is not None else []
    return found
