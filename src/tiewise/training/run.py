"""One arm with one seed: build, train with `transformers.Trainer`, measure, keep. Resumable at any moment.

`result.json` is written last and whole, so a run either has its result or continues from its newest whole checkpoint.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers.trainer_callback import PrinterCallback

from tiewise.boundary.install import Installed
from tiewise.boundary.saved import is_family
from tiewise.core.errors import Interrupted, UnsupportedError
from tiewise.core.spec import BoundarySpec
from tiewise.data.prepared import PreparedText
from tiewise.data.training_rows import Blocks
from tiewise.hf import plain_copy
from tiewise.training import ranks
from tiewise.training.albert import assemble as albert
from tiewise.training.albert.model import build_arm, parts
from tiewise.training.arguments import arguments, batch_share, callbacks, logging_window
from tiewise.training.callbacks import MEASURED, Clock, Interrupt, read_lines
from tiewise.training.evaluate import Measured, bits_per_byte, direct_path, measure
from tiewise.training.folder import DENSE, FINAL, newest_checkpoint, read_json, replace_path, write_json
from tiewise.training.job import Job
from tiewise.training.model import build, model_width, parameters, predicted_nll, starting_std
from tiewise.training.recurrent import assemble
from tiewise.training.results import CurvePoint, RunResult, from_record, to_record
from tiewise.training.settings import Settings
from tiewise.training.trainer import TiewiseTrainer

RESULT, METRICS = "result.json", "metrics.jsonl"
CURVE_BLOCKS = 32  # held-out blocks behind each point of a curve; the final figures take the whole split


@dataclass(frozen=True)
class Outcome:
    """A run's result and its direct path on the tokens that were asked for."""

    result: RunResult
    direct_path: list[list[float]]


Train = Callable[[Job, PreparedText, np.ndarray, list[int]], Outcome]


def finished(folder: Path) -> Outcome | None:
    """Return the outcome that a run left, or None where it has not finished."""
    record = read_json(folder / RESULT)
    return None if record is None else from_record(Outcome, record, str(folder / RESULT))


def train(job: Job, text: PreparedText, counts: np.ndarray, probe: list[int]) -> Outcome:
    """Train one job to its end, or take up its finished or interrupted self.

    Args:
        job: what to train.
        text: the prepared text.
        counts: how often each token occurs in its training split, [V].
        probe: tokens whose direct path is wanted.

    Raises:
        Interrupted: after Ctrl-C, with a checkpoint written.
    """
    done, checkpoint, step = ranks.first_does(lambda: _found(job.folder))
    if done is not None:
        return done
    clock = Clock()
    with ranks.agreed():
        installed = built(job, text, job.seed)
        facts = starting_facts(job, installed, text, counts) if ranks.first() else {}
        installed = _as_at(installed, job.spec, step)
        trainer = _trainer(job, installed, text, counts, clock)
    _finish(trainer, checkpoint, job.folder)
    return ranks.first_does(lambda: _concluded(job, trainer, text, counts, clock, facts, probe))


def built(job: Job, text: PreparedText, seed: int) -> Installed:
    """Build the model of a job, of whatever kind."""
    if job.settings.albert is not None:
        return build_arm(job.settings, job.arm, text, seed)
    return build(job.settings, job.spec, text, seed, job.feed_forward)


def _found(folder: Path) -> tuple[Outcome | None, Path | None, int]:
    """(the outcome that is there already, else the checkpoint to go on from, its step) of a run's folder."""
    done = finished(folder)
    if done is not None:
        return done, None, 0
    folder.mkdir(parents=True, exist_ok=True)
    return None, *newest_checkpoint(folder)


def _finish(trainer: TiewiseTrainer, checkpoint: Path | None, folder: Path) -> None:
    """Train from `checkpoint` to the last step; after Ctrl-C, to the next checkpoint."""
    with Interrupt() as interrupt:
        trainer.add_callback(interrupt)
        if checkpoint is not None and checkpoint.name == f"checkpoint-{trainer.args.max_steps}":
            # killed while it was measured; the Trainer would take one step more
            trainer.load(checkpoint)
        else:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if ranks.any_of(interrupt.caught):
        raise ranks.everywhere(Interrupted(str(folder)))


def _as_at(installed: Installed, spec: BoundarySpec, step: int) -> Installed:
    """Return the boundary as it was when a checkpoint of `step` was written."""
    if spec.untie_at is not None and step > spec.untie_at:
        installed.untie()
    elif spec.tie_at is not None and step > spec.tie_at:
        installed.tie()
    return installed


def _trainer(job: Job, installed: Installed, text: PreparedText, counts: np.ndarray, clock: Clock) -> TiewiseTrainer:
    s = job.settings
    made: Any = albert.make_trainer if s.albert else assemble.make_trainer if s.recurrent else _of_blocks
    trainer: TiewiseTrainer = made(job, installed, text, counts, clock)
    trainer.remove_callback(PrinterCallback)  # the Trainer adds it where its own bar is off
    return trainer


def _of_blocks(job: Job, installed: Installed, text: PreparedText, counts: np.ndarray, clock: Clock) -> TiewiseTrainer:
    s, heldout = job.settings, text.split(job.split)
    trainer = TiewiseTrainer(
        installed,
        evaluator=None
        if job.trial
        else lambda: measure(trainer.installed, heldout, s.length, counts, CURVE_BLOCKS).nll,
        args=arguments(
            job,
            per_device_train_batch_size=batch_share(job),
            adam_beta2=0.98,
            optim="adamw_torch_fused",
            lr_scheduler_type="cosine",
            warmup_steps=max(1, s.steps // 10),
            max_grad_norm=1.0,
        ),
        train_dataset=Blocks(text.split("train"), s.length),
        callbacks=callbacks(job, clock),
    )
    return trainer


def starting_facts(job: Job, installed: Installed, text: PreparedText, counts: np.ndarray) -> dict[str, Any]:
    """Return the tables' scale, and the first loss as predicted and as measured."""
    if job.settings.albert is not None:
        return albert.starting_facts(job, installed, text, counts)
    if job.settings.recurrent is not None:
        first = assemble.measured(job, installed, text, counts, assemble.CURVE_WORDS)
        # a state that starts at zero says nothing of any word
        std = job.spec.init or job.settings.recurrent.start / math.sqrt(3)
        return {"init_std": std, "predicted_initial_nll": math.log(text.vocab), "initial_nll": first.nll}
    first = measure(installed, text.split(job.split), job.settings.length, counts, CURVE_BLOCKS)
    return {
        "init_std": starting_std(job.settings, job.spec, model_width(installed.model)),
        "predicted_initial_nll": predicted_nll(job.settings, job.spec, text.vocab, job.feed_forward),
        "initial_nll": first.nll,
    }


def _concluded(
    job: Job,
    trainer: TiewiseTrainer,
    text: PreparedText,
    counts: np.ndarray,
    clock: Clock,
    facts: dict[str, Any],
    probe: list[int],
) -> Outcome:
    if job.settings.recurrent is not None:
        assemble.settle(job, trainer.installed)
    outcome = Outcome(_result(job, trainer, text, counts, clock, facts), direct_path(trainer.installed, probe))
    keep(job, trainer.installed, text, outcome)
    return outcome


def _result(
    job: Job, trainer: TiewiseTrainer, text: PreparedText, counts: np.ndarray, clock: Clock, facts: dict[str, Any]
) -> RunResult:
    s, installed = job.settings, trainer.installed
    heldout, train = final(job, installed, text, counts)
    size = text.facts["splits"][job.split]
    count = parts(installed) if s.albert else parameters(installed)
    seen = _words_seen(job, text)
    weights = list(installed.model.parameters())
    size_of_weights = sum(p.numel() * p.element_size() for p in weights)
    trained = [p for p in weights if p.requires_grad]
    return RunResult(
        arm=job.arm,
        seed=job.seed,
        steps=s.steps,
        train_nll=train.nll,
        heldout_nll=heldout.nll,
        perplexity=math.exp(min(heldout.nll, 700)),
        # masked tokens are not a text
        bits_per_byte=math.nan if s.albert else bits_per_byte(heldout.nll, size["tokens"], size["bytes"]),
        frequency=heldout.bins,
        parameters=count,
        total_parameters=sum(count.values()),
        bytes=size_of_weights,
        tokens_per_second=seen[-1] / len(seen) * clock.steps / clock.seconds if clock.seconds else math.nan,
        seconds=clock.seconds,
        learning_rate=s.learning_rate,
        curve=curve(job, seen),
        trainable_parameters=sum(p.numel() for p in trained),
        training_bytes=size_of_weights + (1 + _moments(s)) * sum(p.numel() * p.element_size() for p in trained),
        shares=heldout.shares,
        unigram_nll=heldout.unigram_nll,
        **facts,
    )


def _moments(settings: Settings) -> int:
    """Numbers kept for each that is trained: Adam's and LAMB's two, and the mean where SGD may come to average."""
    if settings.recurrent is not None and settings.recurrent.optimizer == "sgd":
        return 1 if settings.recurrent.average_patience else 0
    return 2


def curve(job: Job, seen: np.ndarray) -> list[CurvePoint]:
    """Return the points of `metrics.jsonl`; `seen` [steps] counts the training tokens up to and with each step."""
    return [
        CurvePoint(
            step=p["step"], tokens=int(seen[p["step"] - 1]), **{k: p[k] for k in ("train_nll", *MEASURED) if k in p}
        )
        for p in read_lines(job.folder / METRICS)
    ]


def final(job: Job, installed: Installed, text: PreparedText, counts: np.ndarray) -> tuple[Measured, Measured]:
    """(held-out, training) losses of a finished model: of a trial the first, of a recurrent one over all the split."""
    s = job.settings
    if s.albert is not None:
        return albert.final(job, installed, text, counts)
    if s.recurrent is not None:
        whole = assemble.measured(job, installed, text, counts)
        return whole, assemble.measured(job, installed, text, counts, s.measured, "train")
    blocks = max(1, min(len(text.split(job.split)), s.measured) // s.length)
    heldout = measure(installed, text.split(job.split), s.length, counts, blocks)
    return heldout, Measured(math.nan, 0, []) if job.trial else measure(
        installed, text.split("train"), s.length, counts, blocks
    )


def evaluated(job: Job, text: PreparedText) -> int:
    """Tokens that a run of a decoder evaluates: before its first step, at the points of its course, at its end."""
    steps, tokens = job.settings.steps, len(text.split(job.split))
    points = 1 if job.trial else 1 + steps // logging_window(steps)
    course = points * min(tokens, CURVE_BLOCKS * job.settings.length)
    return course + (1 if job.trial else 2) * min(tokens, job.settings.measured)


def _words_seen(job: Job, text: PreparedText) -> np.ndarray:
    """Training tokens seen up to and with each step [steps]."""
    s = job.settings
    if s.recurrent is not None:
        return assemble.run_plan(s, text, job.seed).words(s.batch)
    return np.arange(1, s.steps + 1) * (s.batch * s.accumulate * s.length)


def keep(job: Job, installed: Installed, text: PreparedText, outcome: Outcome) -> None:
    """Write the final model, as any transformers loads it too, and then the result; checkpoints go."""
    dense = None if job.trial else _dense(installed)
    for name, model in (FINAL, installed.model), (DENSE, dense):
        if model is not None:
            made = job.folder / f"{name}.partial"
            shutil.rmtree(made, ignore_errors=True)
            model.save_pretrained(made)
            text.tokenizer().save_pretrained(made)
            replace_path(made, job.folder / name)
    write_json(job.folder / RESULT, to_record(outcome))
    (job.folder / assemble.BEST).unlink(missing_ok=True)
    for path in job.folder.glob("checkpoint-*"):
        shutil.rmtree(path, ignore_errors=True)


def _dense(installed: Installed) -> Any:
    """Return the model in its family's own class where only ours loads it; None where it loads, or has no such form."""
    config = installed.model.config
    if not is_family(config) or not config.plain_class.__module__.startswith("transformers."):
        return None
    try:
        return plain_copy(installed.model)
    except UnsupportedError:
        return None


def tuned(job: Job, init: float, learning_rate: float) -> Job:
    """Return the job with a starting scale and a learning rate of its own."""
    spec = replace(job.spec, init=init)
    return replace(job, spec=spec, settings=replace(job.settings, learning_rate=learning_rate))
