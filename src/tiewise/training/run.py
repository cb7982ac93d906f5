"""One arm with one seed: build, train, measure, keep. Resumable at any moment, whatever kind of model it is.

    settings → prepare the text → build an arm → its first loss → steps → measure → what is written beside the result

What differs between a decoder, a recurrent model, an ALBERT, an encoder-decoder and a decoder in JAX is a `Kind`: one
file in `tiewise.training.kinds` with an object `KIND`. Everything else, from `run.yaml` to the finding, is the same for
all of them and knows none by name. What a kind cannot do it names in `lacks` and `alone`; it is refused here.

Losses are nats per predicted token of a split, in all and by token frequency: not the Trainer's `eval_loss`, which
weights batches by rows, and not its `train_loss`, which after a resume covers the resumed steps alone. Every arm is
measured on the same rows, training text included.

`result.json` is written last and whole, so a run either has its result or continues from its newest whole checkpoint.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging

from tiewise.boundary.install import Installed, install, tie_at, untie_at
from tiewise.boundary.ops.fast_products import fast_products
from tiewise.boundary.parallel_plan import AXIS, keep_tables, spread_over
from tiewise.boundary.saved import is_family
from tiewise.boundary.sharded_tables import fill, shard
from tiewise.boundary.undisturbed import kept_generators, seed_generators
from tiewise.boundary.vectors import load_vectors, row_tokens, start_from_rows
from tiewise.boundary.verify import plain_copy
from tiewise.core import ranks
from tiewise.core.errors import DataError, Interrupted, RunError, UnsupportedError, one_line
from tiewise.core.files import from_record, to_record
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec_options import RUN
from tiewise.core.text import BINS, bin_of
from tiewise.planning.architecture import budget
from tiewise.planning.costs import FSDP, KEPT, Setting, keeps
from tiewise.planning.costs import ranks as costs_of_ranks
from tiewise.planning.read_config import Sizes, from_sizes
from tiewise.training.data.corpus import PreparedText, prepare
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
from tiewise.training.results import AGAIN, DENSE, FINAL, MASKED, BinNll, CurvePoint, RunResult, Share
from tiewise.training.settings import Settings, find
from tiewise.training.trainer import Events, Interrupt, Job, RunRecord, TiewiseTrainer, arguments, logging_window

CURVE = ("train_nll", "heldout_nll", "path_a", "path_b", "cosine")  # what a point of it has, where it was measured
TABLES = 1_000_003  # between the seed of a body and that of its tables
# what a comparison says of its models
SHAPE = ("model", "width", "layers", "heads", "length", "batch", "accumulate", "steps", "learning_rate", "weight_decay")


@dataclass(frozen=True)
class MeasuredSplit:
    """What a split was found to be."""

    nll: float  # mean, in nats per predicted token
    tokens: int  # that were predicted
    bins: list[BinNll]  # by how often the training text has them
    shares: dict[str, Share] = field(default_factory=dict)  # this and the next as in `RunResult`
    unigram_nll: float | None = None


def measured(pieces: Iterable[tuple[Tensor, Tensor]], counts: np.ndarray) -> MeasuredSplit:
    """Gather (losses [n], tokens [n]) of predicted tokens by their training counts [V]."""
    parts = [(losses.double().cpu().numpy(), targets.cpu().numpy()) for losses, targets in pieces]
    losses = np.concatenate([part for part, _ in parts] or [np.zeros(0)])
    where = np.concatenate([bin_of(counts[part]) for _, part in parts] or [np.zeros(0, np.int64)])
    sums, sizes = np.bincount(where, losses, len(BINS)), np.bincount(where, minlength=len(BINS))
    bins = [BinNll(label, int(n), float(s / n) if n else None) for label, s, n in zip(BINS, sums, sizes, strict=True)]
    return MeasuredSplit(float(sums.sum() / len(losses)) if parts else math.nan, len(losses), bins)


def measured_shares(found: Mapping[str, Sequence[Tensor]], counts: np.ndarray) -> MeasuredSplit:
    """The same of what is `found` of MASKED tokens and of pairs: (losses in fp64, targets, which were right) [n]."""
    shares = {name: Share.of(int(right.sum()), len(nll), float(nll.mean())) for name, (nll, _, right) in found.items()}
    losses, targets, _ = found[MASKED]
    # of these tokens by nothing but their training counts, one added to each
    unigram = -np.log((counts + 1) / (counts.sum() + len(counts)))[targets.cpu().numpy()].mean()
    return replace(measured([(losses, targets)], counts), shares=shares, unigram_nll=float(unigram))


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Within this context a model is in evaluation mode."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def without_bars() -> Iterator[None]:
    """Within this context transformers draws no bar for each file that it writes: a run has one of its own."""
    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


class Kind(ABC):
    """What differs between kinds of run. Most methods are about one: its `job`, and the boundary `installed` for it."""

    backend = RUN  # its name among the backends that rows of spec options list
    where = ""  # says of a setting whose run it is: "in a recurrent run"
    options: type | None = None  # dataclass of the settings that it has beyond those of all
    defaults: Mapping[str, Any] = {}  # of settings, where they are others than those of all
    lacks: Mapping[str, tuple[Any, str]] = {}  # setting → (the one value that it can have, the way out)
    shards = False  # whether processes can hold its model between them
    alone: tuple[str, str] | None = None  # what several processes cannot train, and the way out
    curve_blocks = 32  # of a split, behind each point of a curve; the final figures take all of it
    side_by_side = True  # whether several runs at a time, with a share of the threads each, are faster
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
        if (held := ranks.sharded()) and not self.shards:
            flag = "--tp" if held[2] > 1 else "--fsdp"
            raise UnsupportedError(f"{flag} {self.where or 'with this kind of run'}", "leave it out")
        for name, spec in settings.specs().items():
            if spec != spec.plainly():
                what = f"{name}: the boundary cannot change while several processes train"
                raise UnsupportedError(what, "train on one process, or leave tie_at and untie_at out")

    @abstractmethod
    def prepare(self, settings: Settings, folder: Path) -> PreparedText:
        """Make a run's tokens in `folder`; SpecError for an arm that these sizes cannot have, DataError for a text."""

    def steps(self, settings: Settings, text: PreparedText) -> int:
        """Steps that a run takes."""
        return settings.steps

    def described(self, settings: Settings, text: PreparedText) -> str:
        """Say what was prepared, in a line."""
        sizes = ", ".join(f"{name} {split['tokens']:,}" for name, split in text.facts["splits"].items())
        return f"text: {', '.join(settings.text)}; {settings.tokenizer} tokens: {sizes}; vocabulary {text.vocab:,}"

    def feed_forward(self, settings: Settings, vocab: int) -> Mapping[str, int | None]:
        """Width of each arm's feed-forward layers; None where it is that of the settings."""
        return dict.fromkeys(settings.specs())

    @abstractmethod
    def build(self, job: Job) -> Installed:
        """Build, seed, install and start the model of an arm."""

    @abstractmethod
    def table_std(self, job: Job) -> float:
        """Scale that an arm's tables start with."""

    @abstractmethod
    def first_loss(self, job: Job) -> float:
        """First loss (nats) that is expected of an arm."""

    @abstractmethod
    def trainer(self, job: Job, installed: Installed) -> TiewiseTrainer:
        """Make what takes the steps, of what is `given` to all."""

    def given(self, job: Job, installed: Installed, rows: Any, **own: Any) -> dict[str, Any]:
        """What every Trainer is given; `own` are its `arguments` where they are others. A trial has no curve."""
        changes = ((untie_at, job.spec.untie_at), (tie_at, job.spec.tie_at))
        scheduled = [change(step) for change, step in changes if step is not None]
        return {
            "args": arguments(job, **own),
            "evaluator": None if job.trial else partial(self.point, job, installed),
            "train_dataset": rows,
            # the record first: what it measures is steps, not what others do after them
            "callbacks": [RunRecord(job), Events(job.folder / "tensorboard"), *scheduled],
        }

    def fit(self, job: Job, installed: Installed, checkpoint: Path | None, step: int) -> tuple[int, float]:
        """Train from a checkpoint at a step, if there is one; return how many steps were timed, and their seconds."""
        with ranks.agreed():
            # the boundary as it was when the checkpoint was written
            if job.spec.untie_at is not None and step > job.spec.untie_at:
                installed.untie()
            if job.spec.tie_at is not None and step > job.spec.tie_at:
                installed.tie()
            trainer = self.trainer(job, installed)
            trainer.remove_callback(PrinterCallback)  # the Trainer adds it where its own bar is off
        with Interrupt() as interrupt:
            trainer.add_callback(interrupt)
            if checkpoint is not None and step == trainer.args.max_steps:
                trainer.load(checkpoint)  # killed while it was measured; the Trainer would take one step more
            else:
                trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if ranks.any_of(interrupt.pressed):
            raise ranks.everywhere(Interrupted(str(job.folder)))
        record = next(one for one in trainer.callback_handler.callbacks if isinstance(one, RunRecord))
        return record.steps, record.seconds

    @abstractmethod
    def measure(self, job: Job, installed: Installed, split: str, *, point: bool = False) -> MeasuredSplit:
        """Evaluate a split: all of it that a result takes, or the little that a `point` of a curve does."""

    def point(self, job: Job, installed: Installed) -> dict[str, float]:
        """Measure what a point of the curve shows beside what training logs."""
        return {"heldout_nll": self.measure(job, installed, job.split, point=True).nll}

    def evaluated(self, job: Job) -> int:
        """Tokens that a run evaluates: before its first step, at the points of its curve, at its end."""
        steps, tokens = job.settings.steps, len(job.text.split(job.split))
        points = 1 if job.trial else 1 + steps // logging_window(steps)
        curve = points * min(tokens, self.curve_blocks * job.settings.length)
        return curve + (1 if job.trial else 2) * min(tokens, job.settings.measured)

    def tokens_seen(self, job: Job) -> np.ndarray:
        """Training tokens seen up to and with each step [steps]."""
        s = job.settings
        return np.arange(1, s.steps + 1) * (s.batch * s.accumulate * s.length)

    def parameters(self, installed: Installed) -> dict[str, int]:
        """Parameters by component, each counted once however often it is used; the values sum to the model's total."""
        model = installed.model
        table_in, table_out = installed.tables()
        head, lookup = model.get_output_embeddings(), model.get_input_embeddings()
        tables = (("shared", table_in),) if table_in is table_out else (("input", table_in), ("output", table_out))
        found = {f"{which} table": table.numel() for which, table in tables}
        maps = {p: p.numel() for end in (lookup, head) for name, p in end.named_parameters() if "_map." in name}
        if maps:
            found["maps"] = sum(maps.values())
        if getattr(head, "bias", None) is not None:
            found["output bias"] = head.bias.numel()
        found["body"] = sum(p.numel() for p in model.parameters()) - sum(found.values())
        return found

    def moments(self, job: Job) -> int:
        """Numbers that the optimizer keeps for each that is trained: Adam's and LAMB's two."""
        return 2

    def beside(self, validation: MeasuredSplit) -> dict[str, Any]:
        """JSON files that a run of this kind has beside its result, by their names."""
        return {}

    def setting(self, settings: Settings, text: PreparedText) -> dict[str, Any]:
        """Return what results.json says of the models."""
        own = vars(settings.own) if settings.own is not None else {}
        shape = {name: getattr(settings, name) for name in (*SHAPE, "match", "tune", "bf16", "backend")}
        tokens = settings.steps * settings.batch * settings.accumulate * settings.length
        return {**shape, **own, "vocab": text.vocab, "tokens_per_run": tokens, "tokenizer": settings.tokenizer}


def kind_of(settings: Settings) -> Kind:
    """Return the kind of run that settings ask for."""
    found: Kind = find(settings.run_kind)
    return found


def prepared_blocks(settings: Settings, folder: Path) -> PreparedText:
    """Make the tokens of a text of which each block is a training row."""
    s = settings
    text = prepare(s.text, s.tokenizer, folder, length=s.length, split=s.split, train_tokens=s.train_tokens)
    rows = len(text.split("train")) // s.length
    check_rows(s, rows, f"has {rows} training blocks")
    return text


def check_rows(settings: Settings, rows: int, has: str) -> None:
    """Refuse a text that does not make as many training rows as one step takes; `has` says how many it makes."""
    needed = settings.batch * settings.accumulate
    if rows < needed:
        what = f"the text {has} of {settings.length} tokens, and one step takes {needed}"
        raise DataError(what, "give more text, or less of length, batch or accumulate (--set batch=1, say)")


def causal_model(settings: Settings, config: Any) -> Any:
    """Build a causal model in its family's own class."""
    try:
        # weights in fp32 whatever the file says: in bf16 most updates would round to nothing
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, RuntimeError) as error:
        what = f"{settings.model}: no causal language model can be built ({one_line(error)})"
        raise RunError(what, "choose another") from None


def build_drawn(job: Job, make: Callable[[], Any], std: float, reach: float | None = None) -> Installed:
    """Make a model with seeded weights, install the job's boundary, and draw its tables.

    They are N(0, std²), or, with the maps, uniform within ± `reach`. Arms of one seed have the same body, bit for bit:
    it is drawn first, by a plain tied model, and only then does the boundary change. Tables are drawn last, from a seed
    of their own, so the arms' input tables agree where shapes do. The boundary's schedule, if any, is the caller's.
    """
    seed_generators(job.seed)
    installed = install(make(), replace(job.spec.plainly(), vectors=None, freeze=False, init=None))
    seed_generators(job.seed + TABLES)
    table_in, table_out = installed.tables()
    maps = [p for name, p in installed.model.named_parameters() if "_map." in name and p.dim() > 1]
    with torch.no_grad():
        for table in dict.fromkeys((table_in, table_out) if reach is None else (table_in, *maps, table_out)):
            table.normal_(0, std) if reach is None else table.uniform_(-reach, reach)
        for table in (table_in, table_out) if job.spec.pad is not None else ():
            table[job.spec.pad].zero_()
    if job.spec.vectors is not None:
        rows = load_vectors(job.spec.vectors, row_tokens(job.text.tokenizer, job.text.vocab))
        start_from_rows(table_in, rows, job.spec.freeze, job.spec)
    return installed


def cut(job: Job, model: torch.nn.Module, sizes: tuple[int, int, int]) -> None:
    """Have (replicas, fsdp, tp) processes hold a model: rows and heads over tp, what that leaves over fsdp.

    Also where fsdp is 1: its units average the gradients of replicas, which DDP does not of tensors that are spread.
    Tables are kept in rows over fsdp, or gathered, as is asked for, or what sends less.
    """
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    mesh = init_device_mesh(device, sizes, mesh_dim_names=("replicas", "fsdp", AXIS))
    if sizes[2] > 1:
        spread_over(model, mesh[AXIS])
    over = mesh["fsdp" if sizes[0] == 1 else ("replicas", "fsdp")]
    keep = ranks.tables() == ranks.KEEP or (ranks.tables() == ranks.AUTO and _keeping_sends_less(job, model, sizes))
    shard(model, over, keep_tables(model, over) if keep else None)


def _keeping_sends_less(job: Job, model: Any, sizes: tuple[int, int, int]) -> bool:
    if sizes[1] == 1 or sizes[2] > 1:
        return False
    s, v, d = job.settings, job.text.vocab, int(model.config.get_text_config().hidden_size)
    tables = budget(from_sizes(Sizes(v, d, 1)), job.spec.plainly(), SharingSpec())
    setting = Setting(ranks.share(s.batch), s.length, world=math.prod(sizes), fsdp=sizes[1])
    found = {rank["layout"]: rank for rank in costs_of_ranks(tables, setting, v)}
    return keeps(found[KEPT], found[FSDP], s.accumulate)


@dataclass(frozen=True)
class Outcome:
    """A run's result and its direct path on the tokens that were asked for."""

    result: RunResult
    direct_path: list[list[float]]


def finished(folder: Path) -> Outcome | None:
    """Return the outcome that a run left, or None where it has not finished."""
    record = read_json(folder / RESULT)
    return None if record is None else from_record(Outcome, record, str(folder / RESULT), AGAIN)


@kept_generators()
def train(job: Job) -> Outcome:
    """Train one job to its end, or take up its finished or interrupted self.

    Its folder is held meanwhile: a run is nobody else's, whichever machine they are on. Raises Interrupted after
    Ctrl-C, RunError where another process trains it.
    """
    kind, folder = kind_of(job.settings), job.folder
    with ranks.first_holds(locked(folder)), without_bars():
        done, checkpoint, step = ranks.first_does(lambda: (finished(folder), *newest_checkpoint(folder)))
        if done is not None:
            return done
        first: dict[str, float] = {}
        with fast_products(job.products):
            with ranks.agreed():
                installed = kind.build(job)
                if ranks.first():
                    first = {
                        "init_std": kind.table_std(job),
                        "predicted_initial_nll": kind.first_loss(job),
                        "initial_nll": kind.measure(job, installed, job.split, point=True).nll,
                    }
                if sizes := ranks.sharded():
                    cut(job, installed.model, sizes)
            timed, seconds = kind.fit(job, installed, checkpoint, step)
            if ranks.sharded():
                held = installed.model
                installed = kind.build(job)
                fill(installed.model, held)
            return ranks.first_does(lambda: _concluded(job, kind, installed, first, timed, seconds))


def _concluded(
    job: Job, kind: Kind, installed: Installed, first: dict[str, float], timed: int, seconds: float
) -> Outcome:
    """Measure a trained model, and write it and then the result."""
    validation = kind.measure(job, installed, job.split)
    for name, record in kind.beside(validation).items():
        write_json(job.folder / name, record)
    size, count, seen = job.text.facts["splits"][job.split], kind.parameters(installed), kind.tokens_seen(job)
    weights = {p: p.numel() * p.element_size() for p in installed.model.parameters()}
    learned = [p for p in weights if p.requires_grad]
    curve = [
        CurvePoint(p["step"], int(seen[p["step"] - 1]), **{k: p[k] for k in CURVE if k in p})
        for p in read_lines(job.folder / METRICS)
    ]
    result = RunResult(
        arm=job.arm,
        seed=job.seed,
        steps=job.settings.steps,
        train_nll=math.nan if job.trial else kind.measure(job, installed, "train").nll,
        heldout_nll=validation.nll,
        perplexity=math.exp(min(validation.nll, 700)),
        # masked tokens are not a text
        bits_per_byte=math.nan if validation.shares else validation.nll / math.log(2) * size["tokens"] / size["bytes"],
        frequency=validation.bins,
        parameters=count,
        total_parameters=sum(count.values()),
        bytes=sum(weights.values()),
        tokens_per_second=seen[-1] / len(seen) * timed / seconds if seconds else math.nan,
        seconds=seconds,
        learning_rate=job.settings.learning_rate,
        curve=curve,
        trainable_parameters=sum(p.numel() for p in learned),
        training_bytes=sum(weights.values()) + (1 + kind.moments(job)) * sum(weights[p] for p in learned),
        shares=validation.shares,
        unigram_nll=validation.unigram_nll,
        **first,
    )
    outcome = Outcome(result, direct_path(installed, list(job.probe)))
    _keep(job, installed)
    write_json(job.folder / RESULT, to_record(outcome))
    for pattern in kind.leftovers:
        for path in job.folder.glob(pattern):
            with suppress(OSError):  # of no use, and in nobody's way
                remove(path)
    return outcome


@torch.no_grad()
def direct_path(installed: Installed, tokens: list[int]) -> list[list[float]]:
    """Logits [K, K] of the lookup followed at once by the head, on K tokens: rows current, columns next token."""
    model = installed.model
    ids = torch.tensor(tokens, dtype=torch.long, device=installed.tables()[0].device)
    return model.get_output_embeddings()(model.get_input_embeddings()(ids))[:, ids].float().tolist()


def _keep(job: Job, installed: Installed) -> None:
    """Write the final model, as any transformers loads it too."""
    dense: Any = None
    config = installed.model.config
    if not job.trial and is_family(config) and config.plain_class.__module__.startswith("transformers."):
        with suppress(UnsupportedError):  # it has no such form
            dense = plain_copy(installed.model)  # in its family's own class, where only ours loads it
    for name, model in (FINAL, installed.model), (DENSE, dense):
        if model is not None:
            made = job.folder / f"{name}.partial"
            remove(made)
            model.save_pretrained(made)
            job.text.tokenizer.save_pretrained(made)
            replace_path(made, job.folder / name)
