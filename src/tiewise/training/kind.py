"""A kind of run: what differs between training a decoder, a recurrent model, an ALBERT, or a decoder in JAX.

    settings → prepare the text → build an arm → its first loss → steps → measure → what is written beside the result

A kind is one file in `tiewise.training.kinds` with an object `KIND`. Everything else, from `run.yaml` to the finding,
is the same for all of them and knows none by name. What a kind cannot do it names in `lacks` and `alone`; it is refused
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers.trainer_callback import PrinterCallback

from tiewise.boundary.install import Installed
from tiewise.core.errors import DataError, Interrupted, RunError, UnsupportedError
from tiewise.data.corpus import PreparedText, prepare
from tiewise.training import ranks
from tiewise.training.callbacks import Clock, Interrupt
from tiewise.training.evaluate import CURVE_BLOCKS, MeasuredSplit, measure
from tiewise.training.model import (
    build,
    make_config,
    matched_feed_forward,
    parameters,
    predicted_nll,
    starting_std,
)
from tiewise.training.settings import Job, Settings, find
from tiewise.training.trainer import TiewiseTrainer, logging_window

# what a comparison says of its models
SHAPE = ("model", "width", "layers", "heads", "length", "batch", "accumulate", "steps", "learning_rate", "weight_decay")


@dataclass(frozen=True)
class Trained:
    """A model after its last step, and how many of how long count for its speed."""

    installed: Installed
    steps: int
    seconds: float


class Kind:
    """What a kind does not say otherwise is done as for a decoder: blocks of text, a model by `transformers`.

    Methods are about one run: its `job`, the prepared `text`, the boundary `installed` in its model, and `counts` [V],
    how often each token occurs in the training split.
    """

    title = "decoders"  # models of this kind
    where = ""  # says of a setting whose run it is: "in a recurrent run"
    options: type | None = None  # dataclass of the settings that it has beyond those of all
    defaults: Mapping[str, Any] = {}  # of settings, where they are others than those of all
    lacks: Mapping[str, tuple[Any, str]] = {}  # setting → (the one value that it can have, the way out)
    alone: tuple[str, str] | None = None  # what several processes cannot train, and the way out
    leftovers: tuple[str, ...] = ("checkpoint-*",)  # in a run's folder, of no use to a finished run
    packages: tuple[str, ...] = ()  # that train beside PyTorch

    def check(self, settings: Settings) -> Any:
        """Return the kind's own options, checked. Raises TiewiseError for settings that it cannot have."""
        for name, (value, fix) in self.lacks.items():
            if getattr(settings, name) != value:
                raise RunError(f"{name} = {getattr(settings, name)!r} {self.where}", fix)
        return settings.own

    def check_processes(self, settings: Settings) -> None:
        """Refuse what as many processes as are here cannot do, before any of them has begun."""
        ranks.share(settings.batch)
        if ranks.size() == 1:
            return
        if self.alone is not None:
            raise UnsupportedError(f"{self.alone[0]} on several processes", self.alone[1])
        for name, spec in settings.specs().items():
            if spec != spec.plainly():
                what = f"{name}: the boundary cannot change while several processes train"
                raise UnsupportedError(what, "train on one process, or leave tie_at and untie_at out")

    def check_sizes(self, settings: Settings) -> None:
        """Refuse arms that a model of these sizes cannot have, before gigabytes of text are read."""
        width = int(make_config(settings, vocab=1).get_text_config().hidden_size)
        for spec in settings.specs().values():
            spec.maps(width)

    def prepare(self, settings: Settings, folder: Path) -> PreparedText:
        """Make the tokens of a run in `folder`. Raises DataError for a text that cannot be used."""
        text = prepare(settings.text, settings.tokenizer, folder, length=settings.length, split=settings.split)
        blocks = len(text.split("train")) // settings.length
        check_rows(settings, blocks, f"has {blocks} training blocks")
        return text

    def steps(self, settings: Settings, text: PreparedText) -> int:
        """Steps that a run takes."""
        return settings.steps

    def described(self, settings: Settings, text: PreparedText) -> str:
        """Say what was prepared, in a line."""
        sizes = ", ".join(f"{name} {split['tokens']:,}" for name, split in text.facts["splits"].items())
        return f"text: {', '.join(settings.text)}; {settings.tokenizer} tokens: {sizes}; vocabulary {text.vocab:,}"

    def feed_forward(self, settings: Settings, vocab: int) -> Mapping[str, int | None]:
        """Width of each arm's feed-forward layers; None where it is that of the settings."""
        return matched_feed_forward(settings, vocab)

    def build(self, job: Job, text: PreparedText, seed: int) -> Installed:
        """Build, seed, install and start the model of an arm."""
        return build(job.settings, job.spec, text, seed, job.feed_forward)

    def table_std(self, job: Job, vocab: int) -> float:
        """Scale that an arm's tables start with."""
        width = int(make_config(job.settings, vocab).get_text_config().hidden_size)
        return starting_std(job.settings, job.spec, width)

    def first_loss(self, job: Job, installed: Installed, vocab: int) -> float:
        """First loss (nats) that is expected of an arm."""
        return predicted_nll(job.settings, job.spec, vocab, job.feed_forward)

    def trainer(
        self, job: Job, installed: Installed, text: PreparedText, counts: np.ndarray, clock: Clock
    ) -> TiewiseTrainer:
        """Make what takes the steps."""
        raise NotImplementedError("a kind has a trainer, or fits by itself")

    def fit(
        self,
        job: Job,
        installed: Installed,
        text: PreparedText,
        counts: np.ndarray,
        checkpoint: tuple[Path | None, int],
    ) -> Trained:
        """Train from a checkpoint (and its step), if there is one, to the end; after Ctrl-C, to the next checkpoint.

        Raises:
            Interrupted: after Ctrl-C.
        """
        folder, step = checkpoint
        clock = Clock()
        with ranks.agreed():
            # the boundary as it was when the checkpoint was written
            if job.spec.untie_at is not None and step > job.spec.untie_at:
                installed.untie()
            if job.spec.tie_at is not None and step > job.spec.tie_at:
                installed.tie()
            trainer = self.trainer(job, installed, text, counts, clock)
            trainer.remove_callback(PrinterCallback)  # the Trainer adds it where its own bar is off
        with Interrupt() as interrupt:
            trainer.add_callback(interrupt)
            if folder is not None and step == trainer.args.max_steps:
                trainer.load(folder)  # killed while it was measured; the Trainer would take one step more
            else:
                trainer.train(resume_from_checkpoint=str(folder) if folder else None)
        if ranks.any_of(interrupt.caught):
            raise ranks.everywhere(Interrupted(str(job.folder)))
        return Trained(trainer.installed, clock.steps, clock.seconds)

    def measure(
        self, job: Job, installed: Installed, text: PreparedText, counts: np.ndarray, split: str, *, point: bool = False
    ) -> MeasuredSplit:
        """Evaluate a split: all of it that a result takes, or the little that a `point` of a curve does."""
        length = job.settings.length
        most = min(len(text.split(job.split)), job.settings.measured)  # of training text as much as is held out
        return measure(installed, text.split(split), length, counts, CURVE_BLOCKS if point else max(1, most // length))

    def evaluated(self, job: Job, text: PreparedText) -> int:
        """Tokens that a run evaluates: before its first step, at the points of its curve, at its end."""
        steps, tokens = job.settings.steps, len(text.split(job.split))
        points = 1 if job.trial else 1 + steps // logging_window(steps)
        curve = points * min(tokens, CURVE_BLOCKS * job.settings.length)
        return curve + (1 if job.trial else 2) * min(tokens, job.settings.measured)

    def tokens_seen(self, job: Job, text: PreparedText) -> np.ndarray:
        """Training tokens seen up to and with each step [steps]."""
        s = job.settings
        return np.arange(1, s.steps + 1) * (s.batch * s.accumulate * s.length)

    def parameters(self, installed: Installed) -> dict[str, int]:
        """Parameters by component, each counted once; the values sum to the model's total."""
        return parameters(installed)

    def moments(self, job: Job) -> int:
        """Numbers that the optimizer keeps for each that is trained: Adam's and LAMB's two."""
        return 2

    def finish(self, job: Job, heldout: MeasuredSplit) -> None:
        """Write what a run of this kind has beside its result."""

    def setting(self, settings: Settings, text: PreparedText) -> dict[str, Any]:
        """Return what results.json says of the models."""
        own = vars(settings.own) if settings.own is not None else {}
        shape = {name: getattr(settings, name) for name in (*SHAPE, "match", "tune", "bf16", "backend")}
        tokens = settings.steps * settings.batch * settings.accumulate * settings.length
        return {**shape, **own, "vocab": text.vocab, "tokens_per_run": tokens, "tokenizer": settings.tokenizer}


def check_rows(settings: Settings, rows: int, has: str) -> None:
    """Refuse a text that does not make as many training rows as one step takes; `has` says how many it makes."""
    needed = settings.batch * settings.accumulate
    if rows < needed:
        what = f"the text {has} of {settings.length} tokens, and one step takes {needed}"
        raise DataError(what, "give more text, or less of length, batch or accumulate (--set batch=1, say)")


def kind_of(settings: Settings) -> Kind:
    """Return the kind of run that settings ask for."""
    found: Kind = find(settings.run_kind)
    return found
