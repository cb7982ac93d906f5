"""ALBERTs, pretrained on masked words and sentence pairs, with a choice of shared layers.

An arm is a boundary, and optionally its layer sharing, if that differs from the run's `share`: `factored:64+share=ffn`,
`tied+share=all:groups=2`. The boundary's width is that of the three tables. The model's projections are its maps:

factored:64            E = 64, one table and its projection: ALBERT; factored-untied:64 has two tables tied, untied, …
E = the run's `embedding`, or H, which needs no projection
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tiewise.boundary.installation import Installed, install
from tiewise.boundary.undisturbed import seed_generators
from tiewise.core.errors import DataError, RunError, SpecError
from tiewise.core.records import require, require_choice, to_record
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.core.spec_options import ALBERT_RUN
from tiewise.core.written_options import written_option
from tiewise.planning.first_loss import first_step
from tiewise.training.best_step import TUNE, TUNE_NLL
from tiewise.training.built_models import TABLES
from tiewise.training.data.corpus import PreparedText, prepare
from tiewise.training.data.sentence_pairs import OBJECTIVES, Packing
from tiewise.training.data.training_rows import Masking, PairRows, add_marks, split_sentences
from tiewise.training.measures import JudgedPredictions, MeasuredSplit, evaluating, measure_shares
from tiewise.training.models.open_albert import OpenAlbertConfig, OpenAlbertForPreTraining
from tiewise.training.optimizers import Lamb, lamb_groups
from tiewise.training.results import MASKED
from tiewise.training.run import Kind, check_rows
from tiewise.training.settings import Settings
from tiewise.training.trainer import Job, TiewiseTrainer

ACCURACIES = "pretraining.json"  # file of a run: accuracies on tokens and pairs, with intervals
CURVE_ROWS = 64  # tuning rows per point of a curve
SAMPLE = 256  # predicted tokens of a micro-batch for the logged training accuracy
_BATCH = 16  # rows of a forward pass of an evaluation
MEASURED_SEED = 20_191  # seed of the evaluated rows, the same for all arms and seeds
ACTS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "tanh")  # a part of transformers' ACT2FN
_CHOICES = {"objective": OBJECTIVES, "optimizer": ("lamb", "adamw"), "norm": ("before", "after"), "act": ACTS}
_SHARE = "+share="
_FACTORED = {"factored": "tied", "factored-untied": "untied"}  # arm's kind → kind installed between projections
_SHORTER = "leave it out; --steps makes them shorter"


@dataclass(frozen=True)
class AlbertOptions:
    """Settings of ALBERTs and their pretraining."""

    share: str = "all"  # `SharingSpec` of the layers, for arms without +share=
    embedding: int | None = None  # E of arms whose boundary has no width (`factored:64` has); None: `width`
    inner: int | None = None  # width of the feed-forward layers; None: four times `width`
    norm: str = "before"  # of the embeddings: before their projection, or after it
    act: str = "gelu_new"  # activation, by transformers' name
    dropout: float = 0.0  # dropout of embeddings, attention and each sublayer's output
    objective: str = "sop"  # objective on pairs: sop, nsp, or none
    in_order: float = 0.5  # share of pairs in the order of the text
    short: float = 0.1  # share of rows packed to a random shorter length
    masking: float = 0.15  # share of predicted tokens
    longest: int = 3  # words of the longest masked run
    whole_words: bool = True  # mask words, not tokens
    optimizer: str = "lamb"  # or adamw; matrices decay by `weight_decay`, biases and norms do not
    warmup: float = 0.1  # share of the steps in which the rate rises, before it falls to 0, both linearly
    clip: float = 1.0  # largest norm of the gradient; 0: no clipping

    @classmethod
    def of(cls, settings: Settings) -> AlbertOptions:
        """Return the options among the settings of an ALBERT."""
        assert isinstance(settings.kind_options, cls), "settings of an ALBERT have its options"
        return settings.kind_options

    def checked(self) -> AlbertOptions:
        """Return these options with `share` in canonical form.

        RunError: a value is out of range.
        """
        for name, choices in _CHOICES.items():
            require_choice(self, name, choices)
        numbers = " ".join(item.name for item in fields(self) if isinstance(item.default, float))
        require(self, numbers, lambda x: math.isfinite(x) and x >= 0, "use zero or a positive number")
        require(self, "embedding inner", lambda n: n >= 1, "use 1 or more")
        if self.dropout >= 1 or self.warmup > 1:
            raise RunError(f"dropout = {self.dropout}, warmup = {self.warmup}", "use shares below 1")
        self.masks()  # raises for shares that cannot be masked
        return replace(self, share=str(SharingSpec.parse(self.share)))

    def masks(self) -> Masking:
        """Return the rules for masking tokens."""
        return Masking(share=self.masking, longest=self.longest, whole_words=self.whole_words)

    def packing(self, length: int, objective: str | None = None) -> Packing:
        """Return the rules for making pairs, for this objective or another."""
        return Packing(length, objective or self.objective, self.in_order, self.short)

    def read_arm(self, text: str) -> tuple[str, BoundarySpec]:
        """Return (canonical name, boundary) of an arm."""
        boundary, sharing = parse_arm(text)
        if sharing is None:
            return str(boundary), boundary
        return f"{boundary}{_SHARE}{sharing}", boundary

    def shared_arms(self, arms: Sequence[str], shares: Sequence[str]) -> tuple[str, ...]:
        """Return every arm with every layer sharing, boundary by boundary."""
        for arm in arms:
            if _SHARE in arm:
                remedy = f"leave {_SHARE} out, or {written_option('share')}"
                raise SpecError(f"{arm} says itself what its layers share", remedy)
        return tuple(f"{arm}{_SHARE}{share}" for arm, share in product(arms, shares))


def parse_arm(arm: str) -> tuple[BoundarySpec, SharingSpec | None]:
    """Return (boundary, layer sharing) of an arm; None if it names no sharing.

    Raises SpecError.
    """
    boundary, marked, share = arm.partition(_SHARE)
    spec = BoundarySpec.parse(boundary)
    return spec, SharingSpec.parse(share) if marked else None


class Alberts(Kind):
    """Runs on the sentences of any text."""

    backend = ALBERT_RUN
    where = "in an ALBERT run"
    options = AlbertOptions
    lacks: Mapping[str, tuple[object, str]] = {
        "model": ("albert", "leave it out, or use albert"),
        "minutes": (None, _SHORTER),
        "match": ("width", _SHORTER),
        "tune": (False, _SHORTER),
        "train_tokens": (None, "leave it out, or give less --text"),
    }

    def check(self, settings: Settings) -> AlbertOptions:
        """Refuse, too, rows that are too short to pack."""
        super().check(settings)
        options = AlbertOptions.of(settings).checked()
        options.packing(settings.length)
        return options

    def prepare(self, settings: Settings, folder: Path) -> PreparedText:
        """Read a text in sentences, add marks to its tokenizer, and check every split.

        A split must make pairs.
        """
        s = settings
        for arm in s.specs():
            arm_config(s, arm, 8)
        text = add_marks(prepare(s.text, s.tokenizer, folder, length=s.length, split=s.split, apart=True))
        for split in ("heldout", "tune", "train"):
            try:
                rows = make_rows(s, text, split, seed=1)
            except DataError as error:
                raise DataError(f"{split}: {error.problem}", error.remedy) from None
        check_rows(s, len(rows), f"makes {len(rows)} training rows")
        return text

    def build(self, job: Job) -> Installed:
        """Build the model of an arm, and install its boundary."""
        t = job.text.tokenizer
        marks = {"pad_token_id": t.pad_token_id, "bos_token_id": t.cls_token_id, "eos_token_id": t.sep_token_id}
        seed_generators(job.seed)
        model: Any = OpenAlbertForPreTraining(arm_config(job.settings, job.arm, job.text.vocab, **marks))
        seed_generators(job.seed + TABLES)
        return install(model, _inner_boundary(job.spec))

    def table_std(self, job: Job) -> float:
        """Return the scale of the boundary, else of the run, else of the config."""
        return job.spec.init or job.settings.init or OpenAlbertConfig.initializer_range

    def first_loss(self, job: Job) -> float:
        """Return the first loss without a token's logit for itself.

        The head starts with a random dense layer.
        """
        width = arm_config(job.settings, job.arm, job.text.vocab).embedding_size
        return first_step(_inner_boundary(job.spec), job.text.vocab, width, self.table_std(job)).compute()[0]

    def trainer(self, job: Job, installed: Installed) -> PretrainingTrainer:
        """Make the Trainer."""
        s, options = job.settings, AlbertOptions.of(job.settings)
        rows = make_rows(s, job.text, "train", seed=job.seed, count=s.steps * s.batch * s.accumulate)
        changes: dict[str, Any] = {"train_sampling_strategy": "sequential", "lr_scheduler_type": "linear"}
        changes |= {"warmup_steps": round(options.warmup * s.steps), "max_grad_norm": options.clip}
        optimizer = _make_optimizer(installed, s)
        parts = self.trainer_parts(job, installed, rows, **changes)
        return PretrainingTrainer(installed, optimizers=(optimizer, None), **parts)

    def measure(self, job: Job, installed: Installed, split: str, *, point: bool = False) -> MeasuredSplit:
        """Evaluate rows of a split on the run's objective.

        The validation rows of a finished model are evaluated on both objectives.
        """
        s = job.settings
        objectives: tuple[str, ...] = (AlbertOptions.of(s).objective,)
        if split == job.split and not point:
            objectives += ("sop", "nsp")
        most = CURVE_ROWS if point else max(1, s.measured // s.length)
        return measure_pretrained(installed, evaluation_rows(job, split, objectives, most), job.text.counts)

    def point(self, job: Job, installed: Installed) -> dict[str, float]:
        """Measure the run's objective, with accuracies."""
        split = self.measure(job, installed, TUNE, point=True)
        tokens, *pairs = split.shares.values()
        values = {TUNE_NLL: split.nll, "tune_accuracy": tokens.share}
        for pair in pairs:
            values |= {"tune_pair_nll": pair.nll, "tune_pair_accuracy": pair.share}
        return values

    def parameters(self, installed: Installed) -> dict[str, int]:
        """Count parameters, with those of the body by attention, ffn and the rest."""
        counts = super().parameters(installed)
        rest = counts.pop("body")
        for name in ("attention", "ffn"):
            counts[name] = sum(p.numel() for key, p in installed.model.named_parameters() if f".{name}." in key)
            rest -= counts[name]
        return {**counts, "positions, projection, heads": rest}

    def extra_files(self, validation: MeasuredSplit) -> dict[str, Any]:
        """Return the accuracies on tokens and pairs."""
        pairs = {name: to_record(share) for name, share in validation.shares.items()}
        return {ACCURACIES: {"tokens": pairs.pop(MASKED), "pairs": pairs, "unigram_nll": validation.unigram_nll}}


def _make_optimizer(installed: Installed, settings: Settings) -> torch.optim.Optimizer:
    """Make LAMB or AdamW over a model's parameters, in the groups of LAMB's authors."""
    groups = lamb_groups(installed.model, settings.weight_decay)  # biases and norms: no decay and no trust ratio
    if AlbertOptions.of(settings).optimizer == "lamb":
        return Lamb(groups, lr=settings.peak_rate)
    # AdamW ignores a group's `adapt`
    return torch.optim.AdamW(groups, lr=settings.peak_rate, eps=1e-6)


def make_rows(
    settings: Settings, text: PreparedText, split: str, *, seed: int, count: int | None = None, objective: str = ""
) -> PairRows:
    """Make the rows of a split for a run's settings, drawn from `seed`."""
    options = AlbertOptions.of(settings)
    packing = options.packing(settings.length, objective)
    most: int | None = 8 * settings.measured
    if split == "train" and count is not None:  # training rows use the full split
        most = None
    sentences = split_sentences(text, split, most)
    return PairRows(sentences, packing, options.masks(), seed=seed, count=count)


@lru_cache(1)  # every point of a curve has the same rows
def evaluation_rows(job: Job, split: str, objectives: tuple[str, ...], most: int) -> dict[str, PairRows]:
    """Return up to `most` rows of a split for each objective, the same at every call."""
    by_objective = {}
    for objective in objectives:
        rows = make_rows(job.settings, job.text, split, seed=MEASURED_SEED, objective=objective)
        rows.count = min(most, len(rows))
        by_objective[objective] = rows
    return by_objective


def arm_config(settings: Settings, arm: str, vocab: int, **marks: int | None) -> OpenAlbertConfig:
    """Return the configuration of an arm's model.

    `marks` are the ids of special tokens by the config's names.
    """
    options = AlbertOptions.of(settings)
    boundary, share = parse_arm(arm)
    width = options.embedding or settings.width
    is_factored = boundary.kind in _FACTORED
    if is_factored:
        if boundary.out_width not in (None, boundary.width):
            fix = f"choose factored-untied:{boundary.width}"
            raise SpecError(f"{boundary}: ALBERT's ends are both of one width E", fix)
        assert boundary.width is not None, "a factored boundary names its width"
        width = boundary.width
    return OpenAlbertConfig(
        vocab_size=vocab,
        embedding_size=width,
        hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        intermediate_size=options.inner,
        hidden_act=options.act,
        norm=options.norm,
        projection=is_factored or width != settings.width,
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=options.dropout,
        max_position_embeddings=settings.length,
        sharing=share or options.share,
        initializer_range=settings.init or OpenAlbertConfig.initializer_range,
        **marks,
    )


def _inner_boundary(spec: BoundarySpec) -> BoundarySpec:
    """Return the boundary to install between ALBERT's projections.

    The projections are the maps of a factored boundary.
    """
    if spec.kind not in _FACTORED:
        return spec.plainly()
    return replace(spec.plainly(), kind=_FACTORED[spec.kind], width=None, out_width=None)


class PretrainingTrainer(TiewiseTrainer):
    """Trainer on `PairRows`, whose loss is that of masked tokens plus that of pairs.

    The logged loss is the masked tokens' nll.
    """

    def loss_of(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Return the nll of masked tokens plus that of pairs, means over the micro-batch."""
        chosen = inputs["labels"] != -100
        output = model(**inputs, predict=chosen)
        self.note(loss=output.mlm_loss.detach())
        if output.pair_loss is not None:
            right = output.pair_logits.detach().argmax(-1) == inputs["pair_labels"]
            self.note(pair_nll=output.pair_loss.detach(), pair_accuracy=right)
        if (self.state.global_step + 1) % self.args.logging_steps == 0:
            with torch.no_grad():  # logits of the first predicted tokens; the fused loss computes none
                right = output.logits[:SAMPLE].argmax(-1) == inputs["labels"][chosen][:SAMPLE]
            self.note(train_accuracy=right)
        return self.share_of_step(output.loss, num_items_in_batch)


@torch.no_grad()
def measure_pretrained(installed: Installed, rows: Mapping[str, PairRows], counts: np.ndarray) -> MeasuredSplit:
    """Evaluate rows by the objective of their pairs; `counts` [V] are training counts."""
    predictions: dict[str, JudgedPredictions] = {}
    for objective, pair_rows in rows.items():
        masked, pairs = _predict_rows(installed, pair_rows)
        if masked and MASKED not in predictions:  # use the masked tokens of the first objective's rows
            predictions[MASKED] = JudgedPredictions.joined(masked).cpu()
        if pairs:
            predictions[objective] = JudgedPredictions.joined(pairs).cpu()
    return measure_shares(predictions, counts)


def _predict_rows(installed: Installed, rows: PairRows) -> tuple[list[JudgedPredictions], list[JudgedPredictions]]:
    """Return the predictions of masked tokens and of pairs, batch by batch.

    Without an objective, there are none of pairs.
    """
    device = installed.tables()[0].device
    masked, pairs = [], []
    with evaluating(installed.model):
        for batch in DataLoader(rows, _BATCH):
            inputs = {name: value.to(device) for name, value in batch.items()}
            labels, order = inputs.pop("labels"), inputs.pop("pair_labels", None)
            is_masked = labels != -100
            output = installed.model(**inputs, predict=is_masked)  # logits of masked positions alone
            masked.append(JudgedPredictions.of(output.logits.float(), labels[is_masked]))
            if order is not None:
                pairs.append(JudgedPredictions.of(output.pair_logits.float(), order))
    return masked, pairs


KIND = Alberts()
