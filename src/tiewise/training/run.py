"""One arm with one seed: build, train, measure, keep. Resumable at any moment, whatever its kind.

`result.json` is written last and whole, so a run either has its result or continues from its newest whole checkpoint.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tiewise.boundary.install import Installed
from tiewise.boundary.saved import is_family
from tiewise.core.errors import UnsupportedError
from tiewise.core.records import from_record, to_record
from tiewise.data.corpus import PreparedText
from tiewise.hf import plain_copy
from tiewise.training import ranks
from tiewise.training.callbacks import MEASURED, METRICS, read_lines
from tiewise.training.evaluate import MeasuredSplit, bits_per_byte, direct_path
from tiewise.training.folder import DENSE, FINAL, newest_checkpoint, read_json, replace_path, write_json
from tiewise.training.kind import Trained, kind_of
from tiewise.training.results import AGAIN, CurvePoint, RunResult
from tiewise.training.settings import Job

RESULT = "result.json"


@dataclass(frozen=True)
class Outcome:
    """A run's result and its direct path on the tokens that were asked for."""

    result: RunResult
    direct_path: list[list[float]]


Train = Callable[[Job, PreparedText, np.ndarray, list[int]], Outcome]


def finished(folder: Path) -> Outcome | None:
    """Return the outcome that a run left, or None where it has not finished."""
    record = read_json(folder / RESULT)
    return None if record is None else from_record(Outcome, record, str(folder / RESULT), AGAIN)


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

    def found() -> tuple[Outcome | None, tuple[Path | None, int]]:
        done = finished(job.folder)
        if done is not None:
            return done, (None, 0)
        job.folder.mkdir(parents=True, exist_ok=True)
        return None, newest_checkpoint(job.folder)

    kind = kind_of(job.settings)
    done, checkpoint = ranks.first_does(found)
    if done is not None:
        return done
    facts: dict[str, float] = {}
    with ranks.agreed():
        installed = kind.build(job, text, job.seed)
        if ranks.first():
            facts = {
                "init_std": kind.table_std(job, text.vocab),
                "predicted_initial_nll": kind.first_loss(job, installed, text.vocab),
                "initial_nll": kind.measure(job, installed, text, counts, job.split, point=True).nll,
            }
    trained = kind.fit(job, installed, text, counts, checkpoint)

    def concluded() -> Outcome:
        result = _result(job, trained, text, counts, facts)
        outcome = Outcome(result, direct_path(trained.installed, probe))
        _keep(job, trained.installed, text, outcome)
        return outcome

    return ranks.first_does(concluded)


def _result(job: Job, trained: Trained, text: PreparedText, counts: np.ndarray, facts: dict[str, float]) -> RunResult:
    kind, installed = kind_of(job.settings), trained.installed
    heldout = kind.measure(job, installed, text, counts, job.split)
    kind.finish(job, heldout)
    training = MeasuredSplit(math.nan, 0, []) if job.trial else kind.measure(job, installed, text, counts, "train")
    size, count, seen = text.facts["splits"][job.split], kind.parameters(installed), kind.tokens_seen(job, text)
    weights = list(installed.model.parameters())
    size_of_weights = sum(p.numel() * p.element_size() for p in weights)
    learned = [p for p in weights if p.requires_grad]
    curve = [
        CurvePoint(
            step=p["step"], tokens=int(seen[p["step"] - 1]), **{k: p[k] for k in ("train_nll", *MEASURED) if k in p}
        )
        for p in read_lines(job.folder / METRICS)
    ]
    return RunResult(
        arm=job.arm,
        seed=job.seed,
        steps=job.settings.steps,
        train_nll=training.nll,
        heldout_nll=heldout.nll,
        perplexity=math.exp(min(heldout.nll, 700)),
        # masked tokens are not a text
        bits_per_byte=math.nan if heldout.shares else bits_per_byte(heldout.nll, size["tokens"], size["bytes"]),
        frequency=heldout.bins,
        parameters=count,
        total_parameters=sum(count.values()),
        bytes=size_of_weights,
        tokens_per_second=seen[-1] / len(seen) * trained.steps / trained.seconds if trained.seconds else math.nan,
        seconds=trained.seconds,
        learning_rate=job.settings.learning_rate,
        curve=curve,
        trainable_parameters=sum(p.numel() for p in learned),
        training_bytes=size_of_weights + (1 + kind.moments(job)) * sum(p.numel() * p.element_size() for p in learned),
        shares=heldout.shares,
        unigram_nll=heldout.unigram_nll,
        **facts,
    )


def _keep(job: Job, installed: Installed, text: PreparedText, outcome: Outcome) -> None:
    """Write the final model, as any transformers loads it too, and then the result; what led to them goes."""
    dense: Any = None
    config = installed.model.config
    if not job.trial and is_family(config) and config.plain_class.__module__.startswith("transformers."):
        with suppress(UnsupportedError):  # it has no such form
            dense = plain_copy(installed.model)  # in its family's own class, where only ours loads it
    for name, model in (FINAL, installed.model), (DENSE, dense):
        if model is not None:
            made = job.folder / f"{name}.partial"
            shutil.rmtree(made, ignore_errors=True)
            model.save_pretrained(made)
            text.tokenizer().save_pretrained(made)
            replace_path(made, job.folder / name)
    write_json(job.folder / RESULT, to_record(outcome))
    for path in (path for pattern in kind_of(job.settings).leftovers for path in job.folder.glob(pattern)):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
