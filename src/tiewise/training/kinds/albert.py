"""ALBERTs, pretrained on masked words and pairs of sentences, with every choice of what their layers share open.

An arm is a boundary, and what its layers share where that is not the run's `share`: `factored:64+share=ffn`,
`tied+share=all:groups=2`. Its boundary's width is that of the three tables, its projections are the maps:

factored:64            E = 64, one table and its projection: ALBERT; factored-untied:64 has two tables
tied, untied, …        E = the run's `embedding`, or H, where no projection is needed
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

from tiewise.boundary.install import Installed, install
from tiewise.boundary.undisturbed import seed_generators
from tiewise.core.errors import DataError, RunError, SpecError
from tiewise.core.records import require, require_choice, to_record
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.core.spec_options import ALBERT_RUN
from tiewise.planning.first_loss import first_step
from tiewise.training.built_models import TABLES
from tiewise.training.data.corpus import PreparedText, prepare
from tiewise.training.data.sentence_pairs import OBJECTIVES, Packing
from tiewise.training.data.training_rows import Masking, PairRows, mark, split_sentences
from tiewise.training.measures import JudgedPredictions, MeasuredSplit, evaluating, measure_shares
from tiewise.training.models.open_albert import OpenAlbertConfig, OpenAlbertForPreTraining
from tiewise.training.optimizers import Lamb, lamb_groups
from tiewise.training.results import MASKED
from tiewise.training.run import Kind, check_rows
from tiewise.training.settings import Settings
from tiewise.training.trainer import Job, TiewiseTrainer

ACCURACIES = "pretraining.json"  # in a run's folder: accuracies on tokens and pairs, with intervals
CURVE_ROWS = 64  # of the validation split, behind each point of a curve
SAMPLE = 256  # predicted tokens of a micro-batch behind a logged training accuracy
_BATCH = 16  # rows of a forward pass that measures
MEASURED_SEED = 20_191  # of the rows that models are measured on: the same for all arms and seeds
ACTS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "tanh")  # of those that transformers knows
_CHOICES = {"objective": OBJECTIVES, "optimizer": ("lamb", "adamw"), "norm": ("before", "after"), "act": ACTS}
_SHARE = "+share="
_FACTORED = {"factored": "tied", "factored-untied": "untied"}  # by what is installed between the projections
_SHORTER = "leave it out; --steps makes them shorter"


@dataclass(frozen=True)
class AlbertOptions:
    """Settings of ALBERTs and their pretraining."""

    share: str = "all"  # what layers share, in the written form of `SharingSpec`, in arms that do not say
    embedding: int | None = None  # E of arms whose boundary does not say (`factored:64` does); None: `width`
    inner: int | None = None  # width of the ffn; None: four times `width`
    norm: str = "before"  # of the embeddings: before their projection, or after it
    act: str = "gelu_new"  # activation, by transformers' name
    dropout: float = 0.0  # of embeddings, attention and what each sublayer adds
    objective: str = "sop"  # of the pairs: sop, nsp, or none
    in_order: float = 0.5  # share of pairs as in the text
    short: float = 0.1  # share of rows packed to a random shorter length
    masking: float = 0.15  # share of tokens that are predicted
    longest: int = 3  # words of the longest masked run
    whole_words: bool = True  # mask words, not tokens
    optimizer: str = "lamb"  # or adamw; matrices decay by `weight_decay`, biases and norms do not
    warmup: float = 0.1  # share of the steps in which the rate rises, before it falls to 0, both linearly
    clip: float = 1.0  # largest norm of the gradient; 0 leaves it

    @classmethod
    def of(cls, settings: Settings) -> AlbertOptions:
        """Return the options among the settings of an ALBERT."""
        assert isinstance(settings.kind_options, cls), "settings of an ALBERT have its options"
        return settings.kind_options

    def checked(self) -> AlbertOptions:
        """Return these options, `share` in its canonical form."""
        for name, choices in _CHOICES.items():
            require_choice(self, name, choices)
        numbers = " ".join(item.name for item in fields(self) if isinstance(item.default, float))
        require(self, numbers, lambda x: math.isfinite(x) and x >= 0, "use zero or a positive number")
        require(self, "embedding inner", lambda n: n >= 1, "use 1 or more")
        if self.dropout >= 1 or self.warmup > 1:
            raise RunError(f"dropout = {self.dropout}, warmup = {self.warmup}", "use shares below 1")
        self.masks()  # refuses shares that cannot be masked
        return replace(self, share=str(SharingSpec.parse(self.share)))

    def masks(self) -> Masking:
        """Return how tokens are masked."""
        return Masking(share=self.masking, longest=self.longest, whole_words=self.whole_words)

    def packing(self, length: int, objective: str | None = None) -> Packing:
        """Return how pairs are made, for this objective or another."""
        return Packing(length, objective or self.objective, self.in_order, self.short)

    def read_arm(self, text: str) -> tuple[str, BoundarySpec]:
        """Return (canonical name, boundary) of an arm."""
        boundary, sharing = parts_of(text)
        if sharing is None:
            return str(boundary), boundary
        return f"{boundary}{_SHARE}{sharing}", boundary

    def shared_arms(self, arms: Sequence[str], shares: Sequence[str]) -> tuple[str, ...]:
        """Return every arm with every sharing, boundary by boundary."""
        for arm in arms:
            if _SHARE in arm:
                raise SpecError(f"{arm} says itself what its layers share", "leave +share= out, or --share")
        return tuple(f"{arm}{_SHARE}{share}" for arm, share in product(arms, shares))


def parts_of(arm: str) -> tuple[BoundarySpec, SharingSpec | None]:
    """Return (boundary, what layers share; None where it does not say) of an arm. Raises SpecError."""
    boundary, marked, share = arm.partition(_SHARE)
    spec = BoundarySpec.parse(boundary)
    return spec, SharingSpec.parse(share) if marked else None


class Alberts(Kind):
    """Pretrained on any text, in sentences."""

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
        """Refuse what cannot be packed, too."""
        super().check(settings)
        options = AlbertOptions.of(settings).checked()
        options.packing(settings.length)
        return options

    def prepare(self, settings: Settings, folder: Path) -> PreparedText:
        """Read a text in sentences, give its tokenizer its marks, and see that every split makes pairs."""
        s = settings
        for arm in s.specs():
            arm_config(s, arm, 8)
        text = mark(prepare(s.text, s.tokenizer, folder, length=s.length, split=s.split, apart=True))
        for split in ("heldout", "train"):
            try:
                rows = rows_of(s, text, split, seed=1)
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
        return install(model, _between(job.spec))

    def table_std(self, job: Job) -> float:
        """Return the config's, where neither boundary nor run say."""
        return job.spec.init or job.settings.init or OpenAlbertConfig.initializer_range

    def first_loss(self, job: Job) -> float:
        """Return it without a token's own logit: the head starts with a random dense layer."""
        width = arm_config(job.settings, job.arm, job.text.vocab).embedding_size
        return first_step(_between(job.spec), job.text.vocab, width, self.table_std(job)).compute()[0]

    def trainer(self, job: Job, installed: Installed) -> PretrainingTrainer:
        """Make the trainer."""
        s, options = job.settings, AlbertOptions.of(job.settings)
        rows = rows_of(s, job.text, "train", seed=job.seed, count=s.steps * s.batch * s.accumulate)
        changes: dict[str, Any] = {"train_sampling_strategy": "sequential", "lr_scheduler_type": "linear"}
        changes |= {"warmup_steps": round(options.warmup * s.steps), "max_grad_norm": options.clip}
        optimizer = _make_optimizer(installed, s)
        parts = self.trainer_parts(job, installed, rows, **changes)
        return PretrainingTrainer(installed, optimizers=(optimizer, None), **parts)

    def measure(self, job: Job, installed: Installed, split: str, *, point: bool = False) -> MeasuredSplit:
        """Evaluate rows of a split: on the run's own objective, a finished model's validation rows on both."""
        s = job.settings
        objectives: tuple[str, ...] = (AlbertOptions.of(s).objective,)
        if split == job.split and not point:
            objectives += ("sop", "nsp")
        most = CURVE_ROWS if point else max(1, s.measured // s.length)
        return measure_pretrained(installed, measured_rows(job, split, objectives, most), job.text.counts)

    def point(self, job: Job, installed: Installed) -> dict[str, float]:
        """Measure the run's own objective, accuracies too."""
        split = self.measure(job, installed, job.split, point=True)
        tokens, *pairs = split.shares.values()
        values = {"heldout_nll": split.nll, "heldout_accuracy": tokens.share}
        for pair in pairs:
            values |= {"heldout_pair_nll": pair.nll, "heldout_pair_accuracy": pair.share}
        return values

    def parameters(self, installed: Installed) -> dict[str, int]:
        """Count the body's by attention, ffn and the rest."""
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
        return Lamb(groups, lr=settings.learning_rate)
    # AdamW keeps a group's `adapt` and asks nothing of it
    return torch.optim.AdamW(groups, lr=settings.learning_rate, eps=1e-6)


def rows_of(
    settings: Settings, text: PreparedText, split: str, *, seed: int, count: int | None = None, objective: str = ""
) -> PairRows:
    """Make the rows of a split that a run's settings ask for, from `seed`."""
    options = AlbertOptions.of(settings)
    packing = options.packing(settings.length, objective)
    most: int | None = 8 * settings.measured
    if split == "train" and count is not None:  # rows to train on
        most = None
    sentences = split_sentences(text, split, most)
    return PairRows(sentences, packing, options.masks(), seed=seed, count=count)


@lru_cache(1)  # the points of a curve ask for the same
def measured_rows(job: Job, split: str, objectives: tuple[str, ...], most: int) -> dict[str, PairRows]:
    """Return up to `most` rows of a split for each objective, always the same ones."""
    by_objective = {}
    for objective in objectives:
        rows = rows_of(job.settings, job.text, split, seed=MEASURED_SEED, objective=objective)
        rows.count = min(most, len(rows))
        by_objective[objective] = rows
    return by_objective


def arm_config(settings: Settings, arm: str, vocab: int, **marks: int | None) -> OpenAlbertConfig:
    """Return the configuration of an arm's model; `marks` are its special tokens' ids by the config's names."""
    options = AlbertOptions.of(settings)
    boundary, share = parts_of(arm)
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


def _between(spec: BoundarySpec) -> BoundarySpec:
    """Return what is installed between ALBERT's own projections, which are a factored boundary's maps."""
    if spec.kind not in _FACTORED:
        return spec.plainly()
    return replace(spec.plainly(), kind=_FACTORED[spec.kind], width=None, out_width=None)


class PretrainingTrainer(TiewiseTrainer):
    """Trains on `PairRows`, masked tokens and pairs, their losses summed; its logged loss is the masked tokens' nll."""

    def loss_of(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Return the nll of masked tokens plus that of pairs, each a mean over the micro-batch."""
        chosen = inputs["labels"] != -100
        output = model(**inputs, predict=chosen)
        self.note(loss=output.mlm_loss.detach())
        if output.pair_loss is not None:
            right = output.pair_logits.detach().argmax(-1) == inputs["pair_labels"]
            self.note(pair_nll=output.pair_loss.detach(), pair_accuracy=right)
        if (self.state.global_step + 1) % self.args.logging_steps == 0:
            with torch.no_grad():  # of the first predicted tokens: the fused loss computes no logits to ask
                right = output.logits[:SAMPLE].argmax(-1) == inputs["labels"][chosen][:SAMPLE]
            self.note(train_accuracy=right)
        return self.share_of_step(output.loss, num_items_in_batch)


@torch.no_grad()
def measure_pretrained(installed: Installed, rows: Mapping[str, PairRows], counts: np.ndarray) -> MeasuredSplit:
    """Evaluate rows by the objective of their pairs. `counts` [V] are of the training split."""
    predictions: dict[str, JudgedPredictions] = {}
    for objective, pair_rows in rows.items():
        masked, pairs = _judged(installed, pair_rows)
        if masked and MASKED not in predictions:  # every objective's rows have masked tokens: the first's count
            predictions[MASKED] = JudgedPredictions.joined(masked).cpu()
        if pairs:
            predictions[objective] = JudgedPredictions.joined(pairs).cpu()
    return measure_shares(predictions, counts)


def _judged(installed: Installed, rows: PairRows) -> tuple[list[JudgedPredictions], list[JudgedPredictions]]:
    """Return the predictions of masked tokens and of pairs, batch by batch; pairs without an objective have none."""
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
