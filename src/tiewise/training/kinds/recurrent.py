"""Recurrent language models on words, trained as by Zaremba, Press & Wolf, Inan and Merity.

The hidden state is carried from step to step, detached, starts at zero in every epoch, and is saved in every checkpoint
with the optimizer's state: a resumed run equals the uninterrupted one. The end of an epoch decides how the rate falls,
when averaging starts and which weights are retained:

- `anneal: epochs`: rate · decay^max(0, e − n) in epoch e (from 1), with n = `decay_after` (Zaremba et al. 2014).
- `anneal: plateau`: rate · decay^n after n epochs whose validation nll was not the lowest so far.
- `vary_length`: every step's rate is in proportion to its length (Merity et al. 2018, §4.1).
- `average_patience`: averaging starts when the validation nll is above the lowest of all but the last n epochs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiewise.boundary.installation import Installed
from tiewise.boundary.ops.soft_targets import AugmentedOptions, augmented_cross_entropy
from tiewise.core.errors import RunError, UnsupportedError
from tiewise.core.files import atomic_replacement
from tiewise.core.records import require
from tiewise.core.step_names import LAST
from tiewise.training.built_models import build_with_random_tables, causal_model
from tiewise.training.data.corpus import PreparedText
from tiewise.training.data.documents import RANDOM
from tiewise.training.data.word_corpus import KIND as WORDS
from tiewise.training.data.word_corpus import prepare_words, unknown_share
from tiewise.training.measures import MeasuredSplit
from tiewise.training.models.rnn import RNNConfig, State, detached
from tiewise.training.optimizers import AveragedSGD
from tiewise.training.run import SHAPE, Kind
from tiewise.training.settings import Settings, recipe
from tiewise.training.streams import Steps, measure_streams
from tiewise.training.trainer import CheckpointedCallback, Job, TiewiseTrainer

CELLS = ("lstm", "gru", "tanh", "relu")
BEST, CARRIED = "best.pt", "carried.pt"  # best weights, in a run's folder until it ends; state, in each checkpoint
CURVE_WORDS = 8_000  # validation words per point of a curve
ALL = 1_000_000_000  # `steps` of a run that only its epochs limit
_CHOICES = {
    "bias": ("one", "two"),
    "optimizer": ("sgd", "adamw"),
    "objective": ("mean", "time"),
    "anneal": ("epochs", "plateau"),
    "keep": ("last", "best"),
}
_SHORTER = "leave it out; --set epochs=N makes them shorter"


@dataclass(frozen=True)
class RecurrentOptions:
    """Settings of recurrent models, their training and their objective."""

    embedding: int | None = None  # width E of the lookup's vectors; None: the hidden width, `width`
    inner: int | None = None  # width of all layers but the last, which the head reads; None: `width`
    bias: str = "two"  # biases of each gate: one as in papers, or two as in fused kernels
    dropout_embedding: float = 0.0  # share of words whose whole vector is dropped for a step
    dropout_input: float = 0.0  # dropout of the looked-up vectors
    dropout_between: float = 0.0  # dropout between layers
    dropout_output: float = 0.0  # dropout of the head's input
    dropout_recurrent: float = 0.0  # dropout of h before its matrix, one mask per sequence
    weight_drop: float = 0.0  # dropout of the hidden-to-hidden matrices
    variational: bool = False  # one dropout mask for all positions of a sequence, not one for each
    activation: float = 0.0  # coefficient of AWD-LSTM's activation regularisation (AR), on the mean squared output
    slowness: float = 0.0  # coefficient of its temporal one (TAR), on the mean squared change from step to step
    start: float = 0.1  # initial weights are uniform within ± this
    start_body: float = 0.0  # the same of the recurrent layers alone; 0: as `start`
    output_bias: bool = True  # True for a bias of the output head
    files: tuple[str, ...] = ()  # training, validation and test file; empty: train.txt, valid.txt, test.txt
    epochs: int = 6  # passes over the training file
    vary_length: bool = False  # draw each step's length around `length` (half of it once in twenty), and scale the rate
    optimizer: str = "sgd"  # without momentum, or adamw
    # differentiated and clipped loss: the mean over all words (mean), or the mean over streams of the sum over
    # positions (time), which is `length` times as large
    objective: str = "mean"
    clip: float = 0.25  # largest norm of the gradient; 0: no clipping
    anneal: str = "epochs"  # `decay` after every epoch, or after each that did not lower the validation nll (plateau)
    decay: float = 1.0  # factor on the learning rate
    decay_after: int = 0  # epochs at the full rate, for `anneal: epochs`
    average_patience: int = 0  # n of NT-ASGD; 0 never averages
    keep: str = "last"  # final weights: those of the last epoch, or of the best by validation nll
    augment: float = 0.0  # α of the augmented loss; 0 is plain cross-entropy
    temperature: float = 10.0  # τ of the augmented loss
    parallel: int = 10  # parallel streams of an evaluated split; each word counts once

    @classmethod
    def of(cls, settings: Settings) -> RecurrentOptions:
        """Return the options among the settings of a recurrent model."""
        assert isinstance(settings.kind_options, cls), "settings of a recurrent model have its options"
        return settings.kind_options

    def check(self) -> None:
        """Raise RunError for values out of range."""
        for name, choices in _CHOICES.items():
            require(self, name, choices.__contains__, f"choose {' or '.join(choices)}")
        numbers = [item.name for item in fields(self) if isinstance(item.default, float)]
        require(self, " ".join(numbers), math.isfinite, "use a number")
        dropped = [name for name in numbers if name.startswith("dropout")]
        require(self, " ".join([*dropped, "weight_drop"]), lambda x: 0 <= x < 1, "use zero or more, below 1")
        require(self, "epochs parallel embedding inner", lambda n: n >= 1, "use 1 or more")
        require(self, "start decay temperature", lambda x: x > 0, "use a positive number")
        others = "clip decay_after average_patience augment activation slowness start_body"
        require(self, others, lambda x: x >= 0, "use zero or a positive number")

    def validates_epochs(self) -> bool:
        """Return whether a setting needs the validation nll after each epoch."""
        return self.anneal == "plateau" or self.average_patience > 0 or self.keep == "best"


class Annealing(CheckpointedCallback):
    """Callback that sets the rate of every step and validates after every epoch if needed."""

    checkpointed = ("validations", "cuts")

    def __init__(self, job: Job, installed: Installed, steps: Steps) -> None:
        self.job, self.installed, self.steps = job, installed, steps
        self.options = RecurrentOptions.of(job.settings)
        self.validations: list[float] = []  # nll after each epoch
        self.cuts = 0  # epochs that did not lower the validation nll
        self.rate = job.settings.peak_rate  # rate of the current step, for the log

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Set the rate of this step."""
        self.rate = self._rate_of(state.global_step)
        for group in kw["optimizer"].param_groups:
            group["lr"] = self.rate

    def _rate_of(self, step: int) -> float:
        options, settings = self.options, self.job.settings
        if options.anneal == "plateau":
            power = self.cuts
        else:
            power = max(0, int(self.steps.epochs[step]) + 1 - options.decay_after)
        part = 1.0
        if options.vary_length:
            part = self.steps.lengths[step] / settings.length
        return float(settings.peak_rate * options.decay**power * part)

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Validate at the end of an epoch, and update the rate, the best weights and averaging."""
        if not self.options.validates_epochs() or not self.steps.ends_epoch(state.global_step - 1):
            return
        optimizer = getattr(kw["optimizer"], "optimizer", kw["optimizer"])
        averages = isinstance(optimizer, AveragedSGD) and optimizer.averages
        earlier = self.validations
        with optimizer.averaged() if averages else nullcontext():
            nll = self._validation_nll()
            if nll >= min(earlier, default=math.inf):
                self.cuts += 1
            elif self.options.keep == "best":
                self._save_best()
            self.validations = [*earlier, nll]
        n = self.options.average_patience
        # NT-ASGD: no better than the lowest of all but the last n epochs
        if n and not averages and nll > min(earlier[:-n], default=math.inf):
            optimizer.average()

    def _validation_nll(self) -> float:
        """Return the nll of the validation file; 1e30 if it is not finite, for JSON."""
        text = self.job.text
        nll = measure_streams(self.installed, text.split("tune"), text.counts, self.options.parallel).nll
        return nll if math.isfinite(nll) else 1e30

    def _save_best(self) -> None:
        with atomic_replacement(self.job.folder / BEST) as path:
            torch.save(self.installed.model.state_dict(), path)


class StatefulTrainer(TiewiseTrainer):
    """Trainer on `tiewise.training.streams.Steps` in order.

    The logged loss is the mean nll of the window's words.
    """

    def __init__(self, installed: Installed, annealing: Annealing, **kwargs: Any) -> None:
        super().__init__(installed, data_collator=itemgetter(0), **kwargs)  # a step is a batch already
        self.annealing = annealing
        self.carried: State | None = None

    def loss_of(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of one step from the carried state, and carry the new state."""
        options, labels = self.annealing.options, inputs["labels"]
        state = self.carried
        if bool(inputs["begins"]):
            state = None
        targets = labels.reshape(-1)
        with self.installed.deferred():
            output = model(input_ids=inputs["input_ids"], state=state)
            logits = output.logits.reshape(-1, output.logits.shape[-1])
            with torch.set_grad_enabled(not options.augment):  # with the augmented loss, nll is only logged
                nll = F.cross_entropy(logits, targets)
            loss = nll
            if options.augment:
                loss = self._augmented_loss(logits, targets)
        self.carried = detached(output.state)
        self.note(loss=nll.detach().expand(labels.numel()))  # every word counts once
        if output.regularisation is not None:
            loss = loss + output.regularisation
        if options.objective == "time":
            loss = loss * labels.shape[1]  # the mean over streams of the sum over positions
        return loss

    def _augmented_loss(self, logits: Any, targets: Tensor) -> Tensor:
        """Return the augmented loss of deferred logits [n, V] at targets [n]."""
        scale, bias, softcap = logits.fold  # logits = fold of hidden · tableᵀ
        if softcap is not None:
            raise UnsupportedError("the augmented loss knows no soft-cap", "leave softcap out of the boundary")
        hidden = logits.hidden
        if scale != 1:
            hidden = hidden * scale
        table_in, table_out = self.installed.tables()
        similarities = None if table_in is table_out else table_in
        options = AugmentedOptions(alpha=self.annealing.options.augment, temperature=self.annealing.options.temperature)
        return augmented_cross_entropy(hidden, logits.table, targets, similarities, bias, options)

    def _get_learning_rate(self) -> float:
        return self.annealing.rate

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        torch.save(self.carried, Path(output_dir, CARRIED))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            device = self.installed.tables()[0].device
            self.carried = torch.load(Path(checkpoint, CARRIED), map_location=device, weights_only=True)


class RecurrentModels(Kind):
    """Runs of a recipe on a corpus with a file for each split.

    One process trains, since the state is carried.
    """

    where = "in a recurrent run"
    options = RecurrentOptions
    defaults: Mapping[str, object] = {"steps": ALL, "model": "lstm", "select": LAST}
    lacks: Mapping[str, tuple[object, str]] = {
        "minutes": (None, _SHORTER),
        "match": ("width", _SHORTER),
        "tune": (False, _SHORTER),
        "select": (LAST, "use --set keep=best, which keeps the best epoch by the validation file"),
        "train_tokens": (None, "leave it out, or give a shorter corpus"),
        "split": (RANDOM, "leave it out: the corpus has a file for each"),
        "accumulate": (1, "use --set batch for more streams: they carry their state from step to step"),
    }
    alone = ("recurrent models", "train them on one: a state is carried in order")
    leftovers = ("checkpoint-*", BEST)

    def check(self, settings: Settings) -> RecurrentOptions:
        """Refuse, too, settings that the run of a recipe cannot have."""
        super().check(settings)
        options = RecurrentOptions.of(settings)
        options.check()
        if settings.model not in CELLS:
            raise RunError(f"model = {settings.model!r} {self.where}", f"choose one of {', '.join(CELLS)}")
        if options.average_patience and options.keep != "best":
            raise RunError("average_patience without keep: best", "add keep: best, which keeps the better of both")
        changes = any(spec != spec.plainly() for spec in settings.specs().values())
        if options.keep == "best" and changes:
            raise RunError("keep: best with a boundary that changes", "use keep: last, or a boundary that stays")
        self._check_augmented_loss(settings, options)
        if len(settings.text) != 1:
            raise RunError(f"{len(settings.text)} corpora for a recurrent run", "name one folder")
        return options

    def _check_augmented_loss(self, settings: Settings, options: RecurrentOptions) -> None:
        """Refuse free rows with the augmented loss, which compares rows of one table."""
        for name, spec in settings.specs().items():
            if options.augment and spec.free is not None:
                raise RunError(f"augment with {name}, whose output rows differ", "leave augment or free out")

    def selects_weights(self, settings: Settings) -> bool:
        """Return whether the run keeps the best epoch."""
        return RecurrentOptions.of(settings).keep == "best"

    def prepare(self, settings: Settings, folder: Path) -> PreparedText:
        """Read the words of the corpus."""
        recurrent_config(settings, 1)
        for spec in settings.specs().values():
            spec.maps(settings.width)
        return prepare_words(settings.text[0], folder, RecurrentOptions.of(settings).files)

    def steps(self, settings: Settings, text: PreparedText) -> int:
        """Return the steps of the first seed: its epochs, or `steps` if fewer."""
        return len(run_steps(settings, text, 1))

    def describe(self, settings: Settings, text: PreparedText) -> str:
        """Return one line with the files, their words, and the shares that training lacks."""
        sizes = ", ".join(f"{name} {split['tokens']:,}" for name, split in text.facts["splits"].items())
        shares = ", ".join(f"{unknown_share(text.facts, name):.2%} of {name}" for name in ("tune", "heldout"))
        vocabulary = f"vocabulary {text.vocab:,}; <unk> replaces words outside the training text: {shares}"
        files = ", ".join(text.facts["files"])
        return f"text: {settings.text[0]} ({files}); words: {sizes}; {vocabulary}; {settings.steps:,} steps"

    def build(self, job: Job) -> Installed:
        """Build `RNNLM` with uniform weights, unless the boundary has a scale for its tables."""
        reach = None
        if job.spec.init is None:
            reach = RecurrentOptions.of(job.settings).start
        make = partial(causal_model, job.settings, recurrent_config(job.settings, job.text.vocab))
        return build_with_random_tables(job, make, self.table_std(job), reach)

    def table_std(self, job: Job) -> float:
        """Return the boundary's scale, else that of the uniform distribution."""
        return job.spec.init or float(RecurrentOptions.of(job.settings).start / math.sqrt(3))

    def first_loss(self, job: Job) -> float:
        """Return ln V: the zero state predicts no word."""
        return math.log(job.text.vocab)

    def trainer(self, job: Job, installed: Installed) -> StatefulTrainer:
        """Make the trainer and the callback that sets its rate.

        All weights decay alike, as in the papers' code.
        """
        s, options = job.settings, RecurrentOptions.of(job.settings)
        steps = run_steps(s, job.text, job.seed)
        job = replace(job, settings=replace(s, steps=len(steps)))  # varied lengths: the steps depend on the seed
        weights = [p for p in installed.model.parameters() if p.requires_grad]
        optimizer: torch.optim.Optimizer
        if options.optimizer == "sgd":
            optimizer = AveragedSGD(weights, s.peak_rate, weight_decay=s.weight_decay)
        else:
            optimizer = torch.optim.AdamW(weights, s.peak_rate, weight_decay=s.weight_decay)
        changes: dict[str, Any] = {"per_device_train_batch_size": 1, "train_sampling_strategy": "sequential"}
        changes |= {"lr_scheduler_type": "constant", "warmup_steps": 0, "max_grad_norm": options.clip}
        parts = self.trainer_parts(job, installed, steps, **changes)
        annealing = Annealing(job, installed, steps)
        parts["callbacks"].append(annealing)
        return StatefulTrainer(installed, annealing, optimizers=(optimizer, None), **parts)

    def fit(self, job: Job, installed: Installed, checkpoint: Path | None, step: int) -> tuple[int, float]:
        """Train, and load the weights of the best epoch if they were saved."""
        timed = super().fit(job, installed, checkpoint, step)
        best = job.folder / BEST
        if RecurrentOptions.of(job.settings).keep == "best" and best.is_file():
            device = installed.tables()[0].device
            installed.model.load_state_dict(torch.load(best, map_location=device, weights_only=True))
        return timed

    def measure(self, job: Job, installed: Installed, split: str, *, point: bool = False) -> MeasuredSplit:
        """Evaluate a split from its beginning: all of it, but a part of training text.

        The papers evaluate the full split, too.
        """
        most: int | None = None
        if point:
            most = CURVE_WORDS
        elif split == "train":
            most = job.settings.measured
        parallel = RecurrentOptions.of(job.settings).parallel
        units = self.units(job, split, point=point)
        return measure_streams(installed, job.text.split(split), job.text.counts, parallel, most, units=units)

    def document_end(self, text: PreparedText) -> int | None:
        """Return None for a corpus of words, where `<eos>` ends a line."""
        if text.facts["tokenizer"].get("kind") == WORDS:
            return None
        return super().document_end(text)

    def tokens_seen(self, job: Job) -> np.ndarray:
        """Return the words predicted up to and including each step [steps]."""
        return run_steps(job.settings, job.text, job.seed).words()

    def moments(self, job: Job) -> int:
        """Return Adam's two, or one mean if SGD may average."""
        options = RecurrentOptions.of(job.settings)
        return 2 if options.optimizer == "adamw" else int(options.average_patience > 0)

    def setting(self, settings: Settings, text: PreparedText) -> dict[str, Any]:
        """Return the settings, and which of them differ from the recipe."""
        shape = [name for name in SHAPE if name not in ("heads", "accumulate")]
        record: dict[str, Any] = {name: getattr(settings, name) for name in ("recipe", *shape, "bf16")}
        record |= vars(settings.kind_options)
        steps, differ = run_steps(settings, text, 1), changed_settings(settings)
        if len(steps) < len(run_steps(replace(settings, steps=ALL), text, 1)):
            differ.append(f"steps={settings.steps}")
        words = int(steps.words()[-1])
        return record | {"changed": differ, "vocab": text.vocab, "tokens_per_run": words, "tokenizer": "words"}


def recurrent_config(settings: Settings, vocab: int) -> RNNConfig:
    """Return the configuration of a recurrent run's model."""
    o = RecurrentOptions.of(settings)
    return RNNConfig(
        vocab_size=vocab,
        hidden_size=o.inner or settings.width,
        embedding_size=o.embedding or settings.width,
        last_hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        cell=settings.model,
        lstm_bias=o.bias,
        output_bias=o.output_bias,
        embedding_dropout=o.dropout_embedding,
        input_dropout=o.dropout_input,
        layer_dropout=o.dropout_between,
        recurrent_dropout=o.dropout_recurrent,
        output_dropout=o.dropout_output,
        weight_dropout=o.weight_drop,
        variational=o.variational,
        ar=o.activation,
        tar=o.slowness,
        table_range=o.start,
        body_range=o.start_body or o.start,
    )


def run_steps(settings: Settings, text: PreparedText, seed: int) -> Steps:
    """Return the steps of one run: its epochs, or `settings.steps` if fewer."""
    s, options = settings, RecurrentOptions.of(settings)
    vary = seed if options.vary_length else None
    return Steps(text.split("train"), s.batch, s.length, options.epochs, vary=vary, most=s.steps)


def changed_settings(settings: Settings) -> list[str]:
    """Return settings that differ from those of the recipe, or else of the kind.

    Settings that every run may choose are left out.
    """
    left_open = {
        "arms",
        "seeds",
        "seed",
        "text",
        "tokenizer",
        "steps",
        "measured",
        "kind_options",
        "files",
        "report_to",
    }
    defaults = Settings.of(recipe(settings.recipe) if settings.recipe else {"kind": settings.kind})
    default_values, values = ({**vars(s), **vars(s.kind_options)} for s in (defaults, settings))
    compared = [name for name in values if name not in left_open]
    return [f"{name}={values[name]}" for name in compared if values[name] != default_values[name]]


KIND = RecurrentModels()
