"""One run: build an arm with one seed, train it, measure it and save it.

    settings → prepare the text → build an arm → its first loss → steps → measure → files next to the result

A run can be resumed after an interruption at any moment. A decoder, a recurrent model, an ALBERT, an encoder-decoder
and a decoder in JAX differ in their `Kind`: one file each in `tiewise.training.kinds`, with an object `KIND`. All other
code, from `run.yaml` to the finding, is the same for all kinds and knows none by name. A kind names in `lacks` and
`alone` what it cannot do, and this module refuses it.

Losses are nats per predicted token of a split, in all and by token frequency. They differ from the Trainer's
`eval_loss`, which weights batches by rows, and from its `train_loss`, which covers only the resumed steps after a
resume. Every arm is measured on the same rows, also of the training text.

`result.json` is written last and in one step. A run without it continues from its newest complete checkpoint.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from tiewise.boundary.free_rows import free_rows_of
from tiewise.boundary.installation import Installed
from tiewise.boundary.ops.fast_products import fast_products
from tiewise.boundary.plain_classes import plain_copy
from tiewise.boundary.saved import is_family_config
from tiewise.boundary.schedule import tie_at, untie_at
from tiewise.boundary.sharded_tables import fill_from_shards
from tiewise.boundary.undisturbed import preserve_generators
from tiewise.core import ranks
from tiewise.core.errors import DataError, Interrupted, RunError, UnsupportedError
from tiewise.core.records import from_record, to_record
from tiewise.core.spec import BoundarySpec
from tiewise.core.spec_options import RUN, SHARDED
from tiewise.core.written_options import written_option
from tiewise.planning.first_loss import is_head_from_file
from tiewise.training.best_step import (
    TUNE,
    TUNE_NLL,
    KeepBest,
    keeps_best,
    load_parts,
    load_weights,
    lowest_step,
    tuning_losses,
    weights_path,
)
from tiewise.training.built_models import shard_model
from tiewise.training.data.corpus import PreparedText, prepare
from tiewise.training.document_losses import TextUnits, text_units
from tiewise.training.folder import (
    METRICS,
    RESULT,
    locked,
    newest_checkpoint,
    read_json,
    read_lines,
    remove,
    replace_path,
    write_json,
)
from tiewise.training.measures import MeasuredSplit
from tiewise.training.results import DENSE, FINAL, RUN_AGAIN, CurvePoint, LastStep, RunResult
from tiewise.training.settings import DECODER, Settings, find_kind
from tiewise.training.trackers import without_tracker_output, writes_events
from tiewise.training.trainer import (
    Events,
    Interrupt,
    Job,
    RunRecord,
    TiewiseTrainer,
    logging_window,
    training_arguments,
)

CURVE = (
    "train_nll",
    "tune_nll",
    "heldout_nll",
    "path_a",
    "path_b",
    "cosine",
)  # values of a point of a curve, where measured
# settings that results.json records of the models
SHAPE = ("model", "width", "layers", "heads", "length", "batch", "accumulate", "steps", "learning_rate", "weight_decay")


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide the progress bar that transformers draws for each file it writes.

    A run has a bar for itself.
    """
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            logging.enable_progress_bar()


class TrainerParts(TypedDict):
    """Keywords that every `TiewiseTrainer` is made with."""

    args: TrainingArguments
    evaluator: Callable[[], dict[str, float]] | None
    train_dataset: Dataset[dict[str, Tensor]]
    callbacks: list[TrainerCallback]


class Kind(ABC):
    """Base of all kinds of run.

    A kind must define `prepare`, `build`, `table_std`, `first_loss`, `trainer` and `measure`. It may override the
    others. Most methods take the `job` of one run, and the boundary `installed` for it.
    """

    backend = RUN  # name of the kind among the backends in the table of spec options
    where = ""  # end of a message about a setting: "in a recurrent run"
    options: type | None = None  # dataclass of the settings that only this kind has
    defaults: Mapping[str, object] = {}  # defaults of shared settings, where this kind has others
    lacks: Mapping[str, tuple[object, str]] = {}  # setting → (its only possible value, the remedy)
    shards = False  # True if several processes can hold one model in parts
    alone: tuple[str, str] | None = None  # (name of what one process must train, remedy); None: several can
    curve_blocks = 32  # blocks of a split per point of a curve; the final figures use all blocks
    side_by_side = True  # True if several runs at a time, each with a share of the threads, can be faster
    leftovers: tuple[str, ...] = ("checkpoint-*", "best-*")  # patterns of files that a finished run removes
    packages: tuple[str, ...] = ()  # packages besides PyTorch whose versions the results name

    def check(self, settings: Settings) -> object:
        """Return the kind's options, checked.

        TiewiseError: this kind cannot have such settings.
        """
        for name, (value, remedy) in self.lacks.items():
            setting = getattr(settings, name)
            if setting != value:
                raise RunError(f"{_written_setting(name, setting)} {self.where}", remedy)
        return settings.kind_options

    def check_processes(self, settings: Settings) -> None:
        """Raise for settings that these processes cannot train together, before any training."""
        ranks.rows_per_rank(settings.batch)
        if ranks.size() == 1:
            return
        if self.alone is not None:
            raise UnsupportedError(f"{self.alone[0]} on several processes", self.alone[1])
        sizes = ranks.sharded()
        if sizes is not None and not self.shards:
            flag = "--tp" if sizes[2] > 1 else "--fsdp"
            raise UnsupportedError(f"{flag} {self.where or 'with this kind of run'}", "leave it out")
        for name, spec in settings.specs().items():
            if sizes is not None:
                spec.plainly().require(SHARDED)
            if spec != spec.plainly():
                problem = f"{name}: the boundary cannot change while several processes train"
                raise UnsupportedError(problem, "train on one process, or leave tie_at and untie_at out")

    @abstractmethod
    def prepare(self, settings: Settings, folder: Path) -> PreparedText:
        """Write a run's tokens into `folder`.

        SpecError: these sizes cannot have an arm. DataError: the text cannot be used.
        """

    def steps(self, settings: Settings, text: PreparedText) -> int:
        """Return the number of steps that a run takes."""
        return settings.steps

    def describe(self, settings: Settings, text: PreparedText) -> str:
        """Return one line about the prepared text."""
        names = {"train": "training", "tune": "tuning", "heldout": "validation"}
        splits = text.facts["splits"].items()
        sizes = ", ".join(f"{split['tokens']:,} {names.get(name, name)}" for name, split in splits)
        return f"text: {', '.join(settings.text)}; tokens ({settings.tokenizer}, vocabulary {text.vocab:,}): {sizes}"

    def feed_forward(self, settings: Settings, vocab: int) -> Mapping[str, int | None]:
        """Return the width of each arm's feed-forward layers; None for that of the settings."""
        return dict.fromkeys(settings.specs())

    @abstractmethod
    def build(self, job: Job) -> Installed:
        """Build the model of an arm with seeded weights, and install its boundary."""

    @abstractmethod
    def table_std(self, job: Job) -> float:
        """Return the standard deviation that an arm's tables are drawn with."""

    @abstractmethod
    def first_loss(self, job: Job) -> float:
        """Return the expected first loss of an arm, in nats per token."""

    @abstractmethod
    def trainer(self, job: Job, installed: Installed) -> TiewiseTrainer:
        """Make the trainer of a job, with the keywords of `trainer_parts`."""

    def trainer_parts(
        self, job: Job, installed: Installed, rows: Dataset[dict[str, Tensor]], **changes: Any
    ) -> TrainerParts:
        """Return the keywords that every Trainer of a run has.

        `changes` replace values of `training_arguments`. A trial has no curve.
        """
        # the record is first, so it times the steps without the callbacks after it
        callbacks = [RunRecord(job)]
        if keeps_best(job):
            callbacks.append(KeepBest(job, installed.model))
        if writes_events(job.trackers):
            callbacks.append(Events(job))
        if job.spec.untie_at is not None:
            callbacks.append(untie_at(job.spec.untie_at))
        if job.spec.tie_at is not None:
            callbacks.append(tie_at(job.spec.tie_at))
        evaluator = None
        if not job.trial:
            evaluator = partial(self.point, job, installed)
        return {
            "args": training_arguments(job, **changes),
            "evaluator": evaluator,
            "train_dataset": rows,
            "callbacks": callbacks,
        }

    def fit(self, job: Job, installed: Installed, checkpoint: Path | None, step: int) -> tuple[int, float]:
        """Train from a checkpoint at a step, if there is one.

        Return the number of timed steps, and their seconds.
        """
        with ranks.agreed():
            _install_as_at(job.spec, installed, step)
            trainer = self.trainer(job, installed)
            trainer.remove_callback(PrinterCallback)  # the Trainer adds it when its progress bar is off
        with Interrupt() as interrupt, without_tracker_output(job.trackers):
            trainer.add_callback(interrupt)
            if checkpoint is None:
                trainer.train(resume_from_checkpoint=None)
            elif step == trainer.args.max_steps:
                trainer.load(checkpoint)  # killed while measuring: the Trainer would take one step too many
            else:
                trainer.train(resume_from_checkpoint=str(checkpoint))
        if ranks.any_of(interrupt.pressed):
            raise ranks.raised_everywhere(Interrupted(str(job.folder)))
        record = next(one for one in trainer.callback_handler.callbacks if isinstance(one, RunRecord))
        return record.steps, record.seconds

    @abstractmethod
    def measure(self, job: Job, installed: Installed, split: str, *, point: bool = False) -> MeasuredSplit:
        """Evaluate a split: the tokens of a final result, or the few of a curve's `point`."""

    def units(self, job: Job, split: str, *, point: bool) -> TextUnits | None:
        """Return the document of every token of a split.

        None: it is not the validation split of a final result.
        """
        if point or split != job.split:
            return None
        return text_units(job.text.split(split), self.document_end(job.text))

    def document_end(self, text: PreparedText) -> int | None:
        """Return the token that ends every document; None if the text marks no documents."""
        return text.eos_id

    def point(self, job: Job, installed: Installed) -> dict[str, float]:
        """Measure the values of a curve's point that training does not log.

        They are those of the tuning split, which chooses the best step, so the validation split stays unread.
        """
        return {TUNE_NLL: self.measure(job, installed, TUNE, point=True).nll}

    def selects_weights(self, settings: Settings) -> bool:
        """Return whether an option of this kind makes `fit` end with earlier weights."""
        return False

    def evaluated_tokens(self, job: Job) -> int:
        """Return the number of tokens that a run evaluates.

        It evaluates before its first step, at the points of its curve, and at its end. A run that keeps its best step
        evaluates the last one, too; it counts here even if both are the same.
        """
        steps, tokens = job.settings.steps, len(job.text.split(job.split))
        few = self.curve_blocks * job.settings.length
        points, ends = steps // logging_window(steps), 2
        if job.trial:  # a trial has no curve and measures no training text
            points, ends = 0, 1
        if keeps_best(job):
            points, ends = points + 1, 2 * ends
        curve = points * min(len(job.text.split(TUNE)), few)
        return min(tokens, few) + curve + ends * min(tokens, job.settings.measured)

    def tokens_seen(self, job: Job) -> np.ndarray:
        """Return the number of training tokens up to and including each step [steps]."""
        s = job.settings
        return np.arange(1, s.steps + 1) * (s.batch * s.accumulate * s.length)

    def parameters(self, installed: Installed) -> dict[str, int]:
        """Count parameters by component.

        Each parameter counts once, however often it is used. The sum is the model's total.
        """
        model = installed.model
        table_in, table_out = installed.tables()
        head, lookup = model.get_output_embeddings(), model.get_input_embeddings()
        if table_in is table_out:
            counts = {"shared table": table_in.numel()}
        else:
            counts = {"input table": table_in.numel(), "output table": table_out.numel()}
        maps = _maps_of(lookup) | _maps_of(head)
        if maps:
            counts["maps"] = sum(p.numel() for p in maps)
        free = free_rows_of(head)
        if free is not None:
            counts["free rows"] = free.rows.numel()
        if getattr(head, "bias", None) is not None:
            counts["output bias"] = head.bias.numel()
        counts["body"] = sum(p.numel() for p in model.parameters()) - sum(counts.values())
        return counts

    def moments(self, job: Job) -> int:
        """Return the optimizer's numbers per trained parameter: two for Adam and LAMB."""
        return 2

    def extra_files(self, validation: MeasuredSplit) -> dict[str, Any]:
        """Return the JSON files that this kind writes next to the result, by name."""
        return {}

    def setting(self, settings: Settings, text: PreparedText) -> dict[str, Any]:
        """Return the settings of the models as results.json records them."""
        of_decoders = ("table_rate",) if settings.run_kind == DECODER else ()
        recorded = *SHAPE, *of_decoders, "match", "select", "margin", "tune", "bf16", "backend"
        record = {name: getattr(settings, name) for name in recorded}
        if settings.kind_options is not None:
            record |= vars(settings.kind_options)
        tokens = settings.steps * settings.batch * settings.accumulate * settings.length
        return {**record, "vocab": text.vocab, "tokens_per_run": tokens, "tokenizer": settings.tokenizer}


def _written_setting(name: str, value: object) -> str:
    """Return a setting as `run.yaml` has it; names of trackers as the reader writes them."""
    if isinstance(value, tuple):
        return written_option(name, ",".join(value))
    return f"{name} = {value!r}"


def _install_as_at(spec: BoundarySpec, installed: Installed, step: int) -> None:
    """Bring a boundary to its state at a step, as its schedule changed it before."""
    if spec.untie_at is not None and step > spec.untie_at:
        installed.untie()
    if spec.tie_at is not None and step > spec.tie_at:
        installed.tie()


def _maps_of(end: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """Return the parameters of the maps of a lookup or a head, with their names."""
    return {parameter: name for name, parameter in end.named_parameters() if "_map." in name}


def kind_of(settings: Settings) -> Kind:
    """Return the kind of run that the settings name."""
    kind = find_kind(settings.run_kind)
    assert isinstance(kind, Kind), f"{settings.run_kind} is no kind of run"
    return kind


def prepare_blocks(settings: Settings, folder: Path) -> PreparedText:
    """Prepare a text whose blocks of `length` tokens are the training rows."""
    s = settings
    text = prepare(s.text, s.tokenizer, folder, length=s.length, split=s.split, train_tokens=s.train_tokens)
    rows = len(text.split("train")) // s.length
    check_rows(s, rows, f"has {rows} training blocks")
    return text


def check_rows(settings: Settings, rows: int, has: str) -> None:
    """Refuse a text with fewer training rows than one step takes.

    `has` is the part of the message that names the number of rows.
    """
    needed = settings.batch * settings.accumulate
    if rows < needed:
        problem = f"the text {has} of {settings.length} tokens, and one step takes {needed}"
        raise DataError(problem, "give more text, or less of length, batch or accumulate (--set batch=1, say)")


@dataclass(frozen=True)
class InitialFigures:
    """Figures of a model before its first step."""

    init_std: float
    predicted_nll: float  # nan if no formula predicts it
    nll: float


@dataclass(frozen=True)
class TrainedModel:
    """A model after its last step."""

    installed: Installed
    start: InitialFigures | None  # None in processes that write no result
    timed_steps: int
    seconds: float  # duration of the timed steps
    in_parts: torch.nn.Module | None = None  # the same model as several processes trained it in parts


@dataclass(frozen=True)
class MeasuredStep:
    """Losses of a run's model after one step."""

    step: int
    tune_nll: float | None  # on the rows of a curve's point; None if they were not measured
    train_nll: float  # nan in a trial
    validation: MeasuredSplit


@dataclass(frozen=True)
class MeasuredRun:
    """Losses at the step whose model a run keeps, and at its last step."""

    selected: MeasuredStep
    last: MeasuredStep


@dataclass(frozen=True)
class Outcome:
    """A run's result, and its direct path on the tokens `measured_ids`."""

    result: RunResult
    direct_path: list[list[float]]


def read_outcome(folder: Path) -> Outcome | None:
    """Return the outcome stored in a run's folder; None if the run is unfinished."""
    record = read_json(folder / RESULT)
    return None if record is None else from_record(Outcome, record, str(folder / RESULT), RUN_AGAIN)


@preserve_generators()
def train(job: Job) -> Outcome:
    """Train one job to its end, or return the outcome of a finished one.

    An interrupted run resumes. The run's folder is locked meanwhile, also against other machines.

    Raises:
        Interrupted: Ctrl-C was pressed, and a checkpoint was written.
        RunError: another process trains this run.
    """
    kind, folder = kind_of(job.settings), job.folder
    with ranks.hold_on_rank_zero(locked(folder)), without_bars():
        outcome, checkpoint, step = ranks.on_rank_zero(lambda: (read_outcome(folder), *newest_checkpoint(folder)))
        if outcome is not None:
            return outcome
        with fast_products(job.products):
            trained = _train_job(job, kind, checkpoint, step)
            measured = _select_step(job, kind, trained)
            return ranks.on_rank_zero(lambda: _conclude(job, kind, trained, measured))


def _train_job(job: Job, kind: Kind, checkpoint: Path | None, step: int) -> TrainedModel:
    """Build a job's model and train it, from a checkpoint at a step if given.

    Return the full model, also if several processes trained it in parts.
    """
    start: InitialFigures | None = None
    with ranks.agreed():
        installed = kind.build(job)
        if ranks.is_first():
            std, predicted = kind.table_std(job), math.nan
            if not is_head_from_file(job.spec):
                predicted = kind.first_loss(job)
            start = InitialFigures(std, predicted, kind.measure(job, installed, job.split, point=True).nll)
        sizes = ranks.sharded()
        if sizes is not None:
            shard_model(job, installed.model, sizes)
    timed, seconds = kind.fit(job, installed, checkpoint, step)
    in_parts: torch.nn.Module | None = None
    if ranks.sharded():
        in_parts = installed.model
        installed = kind.build(job)
        fill_from_shards(installed.model, in_parts)
    return TrainedModel(installed, start, timed, seconds, in_parts)


def _select_step(job: Job, kind: Kind, trained: TrainedModel) -> MeasuredRun:
    """Measure a run at its last step and at the kept step, whose weights it loads.

    All processes make this call.
    """
    last = ranks.on_rank_zero(lambda: _measure_step(job, kind, trained, job.settings.steps))
    best = ranks.on_rank_zero(lambda: _earlier_best_step(job, last))
    if best is None:
        return MeasuredRun(last, last)
    weights, model = weights_path(job.folder, best), trained.installed.model
    if trained.in_parts is not None:
        load_parts(trained.in_parts, weights)
        fill_from_shards(model, trained.in_parts)
    else:
        device = trained.installed.tables()[0].device
        ranks.on_rank_zero(lambda: load_weights(model, weights, device))
    return MeasuredRun(ranks.on_rank_zero(lambda: _measure_step(job, kind, trained, best)), last)


def _measure_step(job: Job, kind: Kind, trained: TrainedModel, step: int) -> MeasuredStep:
    """Measure a model after a step; a trial measures no training text."""
    installed, train_nll = trained.installed, math.nan
    tune_nll = tuning_losses(job.folder).get(step)
    if tune_nll is None and keeps_best(job):  # the last step need not be a point of the curve
        tune_nll = kind.measure(job, installed, TUNE, point=True).nll
    validation = kind.measure(job, installed, job.split)
    if not job.trial:
        train_nll = kind.measure(job, installed, "train").nll
    return MeasuredStep(step, tune_nll, train_nll, validation)


def _earlier_best_step(job: Job, last: MeasuredStep) -> int | None:
    """Return the best step whose weights a run keeps; None if that is the last one.

    A run that diverged keeps its last step, so that its result shows the divergence.
    """
    if not keeps_best(job) or last.tune_nll is None or not math.isfinite(last.tune_nll):
        return None
    best = _lowest_tuning_step(job, last)
    if best is None or best == last.step or not weights_path(job.folder, best).exists():
        return None
    return best


def _conclude(job: Job, kind: Kind, trained: TrainedModel, measured: MeasuredRun) -> Outcome:
    """Write the files of a measured model, the model and the result, in this order."""
    installed = trained.installed
    for name, record in kind.extra_files(measured.selected.validation).items():
        write_json(job.folder / name, record)
    result = _result(job, kind, trained, measured)
    outcome = Outcome(result, direct_path(installed, list(job.measured_ids)))
    _save_models(job, installed)
    write_json(job.folder / RESULT, to_record(outcome))
    for pattern in kind.leftovers:
        for path in job.folder.glob(pattern):
            with suppress(OSError):  # a leftover that cannot be removed does no harm
                remove(path)
    return outcome


def _result(job: Job, kind: Kind, trained: TrainedModel, measured: MeasuredRun) -> RunResult:
    """Gather the figures of a trained model."""
    start, installed = trained.start, trained.installed
    assert start is not None, "the process that writes the result measured the start"
    seen, count = kind.tokens_seen(job), kind.parameters(installed)
    selected, validation = measured.selected, measured.selected.validation
    curve = _curve(job.folder / METRICS, seen)
    tokens_per_second = math.nan
    if trained.seconds:
        tokens_per_second = seen[-1] / len(seen) * trained.timed_steps / trained.seconds
    weights = {p: p.numel() * p.element_size() for p in installed.model.parameters()}
    learned = [p for p in weights if p.requires_grad]
    return RunResult(
        arm=job.arm,
        seed=job.seed,
        steps=job.settings.steps,
        train_nll=selected.train_nll,
        heldout_nll=validation.nll,
        perplexity=math.exp(min(validation.nll, 700)),
        bits_per_byte=_bits_per_byte(job, validation),
        frequency=validation.bins,
        parameters=count,
        total_parameters=sum(count.values()),
        bytes=sum(weights.values()),
        tokens_per_second=tokens_per_second,
        seconds=trained.seconds,
        learning_rate=job.settings.peak_rate,
        table_rate=job.settings.table_rate,
        curve=curve,
        trainable_parameters=sum(p.numel() for p in learned),
        training_bytes=sum(weights.values()) + (1 + kind.moments(job)) * sum(weights[p] for p in learned),
        shares=validation.shares,
        unigram_nll=validation.unigram_nll,
        documents=validation.documents,
        init_std=start.init_std,
        predicted_initial_nll=start.predicted_nll,
        initial_nll=start.nll,
        **_selection(job, kind, measured),
    )


class Selection(TypedDict):
    """Fields of a result about the step whose model the run keeps."""

    selected_step: int | None
    tune_nll: float | None
    lowest_tuning_step: int | None
    last: LastStep | None


def _selection(job: Job, kind: Kind, measured: MeasuredRun) -> Selection:
    """Return the fields about the selected step.

    All are None if the kind chose the weights itself.
    """
    if kind.selects_weights(job.settings):
        return {"selected_step": None, "tune_nll": None, "lowest_tuning_step": None, "last": None}
    selected, last = measured.selected, measured.last
    return {
        "selected_step": selected.step,
        "tune_nll": selected.tune_nll,
        "lowest_tuning_step": _lowest_tuning_step(job, last),
        "last": _last_step(job, measured),
    }


def _lowest_tuning_step(job: Job, last: MeasuredStep) -> int | None:
    """Return the step of the curve, or the last step, with the lowest tuning loss."""
    losses = tuning_losses(job.folder)
    if last.tune_nll is not None:
        losses[last.step] = last.tune_nll
    return lowest_step(losses, job.spec)


def _last_step(job: Job, measured: MeasuredRun) -> LastStep:
    """Return the losses of a run's last step as its result has them."""
    last, nats = measured.last, None
    if last is not measured.selected and last.validation.documents is not None:
        nats = last.validation.documents.nats
    return LastStep(last.tune_nll, last.train_nll, last.validation.nll, _bits_per_byte(job, last.validation), nats)


def _bits_per_byte(job: Job, validation: MeasuredSplit) -> float:
    """Return a split's loss in bits per byte; nan for masked tokens, which form no text."""
    if validation.shares:
        return math.nan
    size = job.text.facts["splits"][job.split]
    bits: float = validation.nll / math.log(2) * size["tokens"] / size["bytes"]
    return bits


def _curve(metrics: Path, seen: np.ndarray) -> list[CurvePoint]:
    """Read the points of a run's curve.

    `seen` [steps] are the numbers of training tokens up to each step.
    """
    curve = []
    for line in read_lines(metrics):
        values = {name: line[name] for name in CURVE if name in line}
        curve.append(CurvePoint(line["step"], int(seen[line["step"] - 1]), **values))
    return curve


@torch.no_grad()
def direct_path(installed: Installed, tokens: list[int]) -> list[list[float]]:
    """Return the logits of the direct path W_E W_U on K tokens, as lists [K, K].

    The head reads the lookup's vectors at once, without the body. Rows are current tokens, columns are next tokens.
    """
    model = installed.model
    ids = torch.tensor(tokens, dtype=torch.long, device=installed.tables()[0].device)
    embedded = model.get_input_embeddings()(ids)
    logits: Tensor = model.get_output_embeddings()(embedded)[:, ids]
    rows: list[list[float]] = logits.float().tolist()
    return rows


def _save_models(job: Job, installed: Installed) -> None:
    """Write the final model, and also a plain copy that any transformers version loads.

    The copy is written only if the model needs one and has such a form.
    """
    dense = None
    config = installed.model.config
    if not job.trial and is_family_config(config) and config.plain_class.__module__.startswith("transformers."):
        with suppress(UnsupportedError):  # the boundary has no plain form
            dense = plain_copy(installed.model)  # in the family's class, for models that only tiewise loads
    _save_model(job, installed.model, FINAL)
    if dense is not None:
        _save_model(job, dense, DENSE)


def _save_model(job: Job, model: Any, name: str) -> None:
    """Write a model with its tokenizer into a folder of the run.

    A kill leaves the folder complete or absent.
    """
    partial_folder = job.folder / f"{name}.partial"
    remove(partial_folder)
    model.save_pretrained(partial_folder)
    job.text.tokenizer.save_pretrained(partial_folder)
    replace_path(partial_folder, job.folder / name)
