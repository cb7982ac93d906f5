"""What every run asks of `transformers.Trainer`, and the callbacks that every run has."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback, TrainingArguments

from tiewise.training import ranks
from tiewise.training.callbacks import Bar, Clock, Events, Lines, tie_at, untie_at
from tiewise.training.job import Job


def arguments(job: Job, **own: Any) -> TrainingArguments:
    """Arguments of a job's run; `own` are those of its kind of model."""
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
    """Steps from one point of a run's course to the next, so that there are 20 of them or somewhat more."""
    return max(1, steps // 20)


def batch_share(job: Job) -> int:
    """Rows of a batch that this process takes."""
    return ranks.share(job.settings.batch)


def callbacks(job: Job, clock: Clock) -> list[TrainerCallback]:
    """Time, curves, TensorBoard, the bar where it is wanted, and the boundary's schedule."""
    found: list[TrainerCallback] = [clock, Lines(job.folder / "metrics.jsonl"), Events(job.folder / "tensorboard")]
    found += [Bar(job.bar, job.title)] if job.bar is not None else []
    found += [untie_at(job.spec.untie_at)] if job.spec.untie_at is not None else []
    found += [tie_at(job.spec.tie_at)] if job.spec.tie_at is not None else []
    return found
