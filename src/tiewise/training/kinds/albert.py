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
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tiewise.boundary.install import Installed, install
from tiewise.boundary.undisturbed import seed_generators
from tiewise.core.errors import DataError, RunError, SpecError
from tiewise.core.files import require, require_one, to_record
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.core.spec_options import ALBERT_RUN
from tiewise.planning.first_loss import first_step
from tiewise.training.data.corpus import PreparedText, prepare
from tiewise.training.data.sentence_pairs import OBJECTIVES, Packing
from tiewise.training.data.training_rows import Masking, PairRows, mark, split_sentences
from tiewise.training.models.open_albert import OpenAlbertConfig, OpenAlbertForPreTraining
from tiewise.training.optimizers import Lamb, lamb_groups
from tiewise.training.results import MASKED
from tiewise.training.run import TABLES, Kind, MeasuredSplit, check_rows, evaluating, measured_shares
from tiewise.training.settings import Settings
from tiewise.training.trainer import Job, TiewiseTrainer

FOUND = "pretraining.json"  # in a run's folder: accuracies on tokens and pairs, with intervals
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

    def checked(self) -> AlbertOptions:
        """Return these options, `share` in its canonical form."""
        for name, choices in _CHOICES.items():
            require_one(self, name, choices)
        numbers = " ".join(item.name for item in fields(self) if isinstance(item.default, float))
        require(self, numbers, lambda x: math.isfinite(x) and x >= 0, "use zero or a positive number")
        require(self, "embedding inner", lambda n: n >= 1, "use 1 or more")
        if self.dropout >= 1 or self.warmup > 1:
            raise RunError(f"dropout = {self.dropout}, warmup = {self.warmup}", "use shares below 1")
        self.masks()
        return replace(self, share=str(SharingSpec.parse(self.share)))

    def masks(self) -> Masking:
        """How tokens are masked."""
        return Masking(share=self.masking, longest=self.longest, whole_words=self.whole_words)

    def packing(self, length: int, objective: str | None = None) -> Packing:
        """How pairs are made, for this objective or another."""
        return Packing(length, objective or self.objective, self.in_order, self.short)

    def read_arm(self, text: str) -> tuple[str, BoundarySpec]:
        """(canonical name, boundary) of an arm."""
        boundary, sharing = parts_of(text)
        return str(boundary) + (f"{_SHARE}{sharing}" if sharing is not None else ""), boundary

    def shared_arms(self, arms: Sequence[str], shares: Sequence[str]) -> tuple[str, ...]:
        """Every arm with every sharing, boundary by boundary."""
        own = next((arm for arm in arms if _SHARE in arm), None)
        if own is not None:
            raise SpecError(f"{own} says itself what its layers share", "leave +share= out, or --share")
        return tuple(f"{arm}{_SHARE}{share}" for arm in arms for share in shares)


def parts_of(arm: str) -> tuple[BoundarySpec, SharingSpec | None]:
    """(boundary, what layers share; None where it does not say) of an arm. Raises SpecError."""
    boundary, marked, share = arm.partition(_SHARE)
    return BoundarySpec.parse(boundary), SharingSpec.parse(share) if marked else None


class Alberts(Kind):
    """Pretrained on any text, in sentences."""

    backend = ALBERT_RUN
    where = "in an ALBERT run"
    options = AlbertOptions
    lacks: Mapping[str, tuple[Any, str]] = {
        "model": ("albert", "leave it out, or use albert"),
        "minutes": (None, _SHORTER),
        "match": ("width", _SHORTER),
        "tune": (False, _SHORTER),
        "train_tokens": (None, "leave it out, or give less --text"),
    }

    def check(self, settings: Settings) -> AlbertOptions:
        """Refuse what cannot be packed, too."""
        own: AlbertOptions = super().check(settings).checked()
        own.packing(settings.length)
        return own

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
                raise DataError(f"{split}: {error.what}", error.fix) from None
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
        """As the config has it, where neither boundary nor run say."""
        return job.spec.init or job.settings.init or OpenAlbertConfig.initializer_range

    def first_loss(self, job: Job) -> float:
        """Behind the head's random dense layer no row meets itself."""
        width = arm_config(job.settings, job.arm, job.text.vocab).embedding_size
        return first_step(_between(job.spec), job.text.vocab, width, self.table_std(job)).computed()[0]

    def trainer(self, job: Job, installed: Installed) -> PretrainingTrainer:
        """Make the trainer."""
        s, o = job.settings, job.settings.own
        groups = lamb_groups(installed.model, s.weight_decay)  # biases and norms neither decay nor have a trust ratio
        # AdamW keeps a group's `adapt` and asks nothing of it
        by: Any = Lamb if o.optimizer == "lamb" else partial(torch.optim.AdamW, eps=1e-6)
        rows = rows_of(s, job.text, "train", seed=job.seed, count=s.steps * s.batch * s.accumulate)
        own: dict[str, Any] = {"train_sampling_strategy": "sequential", "lr_scheduler_type": "linear"}
        own |= {"warmup_steps": round(o.warmup * s.steps), "max_grad_norm": o.clip}
        optimizer = by(groups, lr=s.learning_rate)
        return PretrainingTrainer(installed, optimizers=(optimizer, None), **self.given(job, installed, rows, **own))

    def measure(self, job: Job, installed: Installed, split: str, *, point: bool = False) -> MeasuredSplit:
        """Evaluate rows of a split: on the run's own objective, a finished model's validation rows on both."""
        s = job.settings
        both = ("sop", "nsp") if split == job.split and not point else ()
        most = CURVE_ROWS if point else max(1, s.measured // s.length)
        return measure_pretrained(installed, measured_rows(job, split, (s.own.objective, *both), most), job.text.counts)

    def point(self, job: Job, installed: Installed) -> dict[str, float]:
        """Measure the run's own objective, accuracies too."""
        found = self.measure(job, installed, job.split, point=True)
        tokens, *pairs = found.shares.values()
        said = {"heldout_nll": found.nll, "heldout_accuracy": tokens.share}
        for pair in pairs:
            said |= {"heldout_pair_nll": pair.nll, "heldout_pair_accuracy": pair.share}
        return said

    def parameters(self, installed: Installed) -> dict[str, int]:
        """The body's by attention, ffn and the rest."""
        found = super().parameters(installed)
        rest = found.pop("body")
        for name in ("attention", "ffn"):
            found[name] = sum(p.numel() for key, p in installed.model.named_parameters() if f".{name}." in key)
            rest -= found[name]
        return {**found, "positions, projection, heads": rest}

    def beside(self, validation: MeasuredSplit) -> dict[str, Any]:
        """What was found on tokens and pairs."""
        pairs = {name: to_record(share) for name, share in validation.shares.items()}
        return {FOUND: {"tokens": pairs.pop(MASKED), "pairs": pairs, "unigram_nll": validation.unigram_nll}}


def rows_of(
    settings: Settings, text: PreparedText, split: str, *, seed: int, count: int | None = None, objective: str = ""
) -> PairRows:
    """Rows of a split as a run's settings make them, from `seed`."""
    packing = settings.own.packing(settings.length, objective)
    most = None if split == "train" and count is not None else 8 * settings.measured
    sentences = split_sentences(text, split, most)
    return PairRows(sentences, packing, settings.own.masks(), seed=seed, count=count)


@lru_cache(1)  # the points of a curve ask for the same
def measured_rows(job: Job, split: str, objectives: tuple[str, ...], most: int) -> dict[str, PairRows]:
    """Up to `most` rows of a split for each objective, always the same ones."""
    found = {}
    for objective in objectives:
        found[objective] = rows = rows_of(job.settings, job.text, split, seed=MEASURED_SEED, objective=objective)
        rows.count = min(most, len(rows))
    return found


def arm_config(settings: Settings, arm: str, vocab: int, **marks: int | None) -> OpenAlbertConfig:
    """Return the configuration of an arm's model; `marks` are its special tokens' ids by the config's names."""
    o: AlbertOptions = settings.own
    boundary, share = parts_of(arm)
    factored = boundary.kind in _FACTORED
    if factored and boundary.out_width not in (None, boundary.width):
        fix = f"choose factored-untied:{boundary.width}"
        raise SpecError(f"{boundary}: ALBERT's ends are both of one width E", fix)
    width = boundary.width if factored else o.embedding or settings.width
    return OpenAlbertConfig(
        vocab_size=vocab,
        embedding_size=width,
        hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        intermediate_size=o.inner,
        hidden_act=o.act,
        norm=o.norm,
        projection=width != settings.width or factored,
        hidden_dropout_prob=o.dropout,
        attention_probs_dropout_prob=o.dropout,
        max_position_embeddings=settings.length,
        sharing=share or o.share,
        initializer_range=settings.init or OpenAlbertConfig.initializer_range,
        **marks,
    )


def _between(spec: BoundarySpec) -> BoundarySpec:
    """What is installed between ALBERT's own projections, which are a factored boundary's maps."""
    kind = _FACTORED.get(spec.kind)
    return spec.plainly() if kind is None else replace(spec.plainly(), kind=kind, width=None, out_width=None)


class PretrainingTrainer(TiewiseTrainer):
    """Trains on `PairRows`, masked tokens and pairs, their losses summed; its logged loss is the masked tokens' nll."""

    def loss_of(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Nll of masked tokens plus that of pairs, each a mean over the micro-batch."""
        chosen = inputs["labels"] != -100
        output = model(**inputs, predict=chosen)
        self.see(loss=output.mlm_loss.detach())
        if output.pair_loss is not None:
            right = output.pair_logits.detach().argmax(-1) == inputs["pair_labels"]
            self.see(pair_nll=output.pair_loss.detach(), pair_accuracy=right)
        if (self.state.global_step + 1) % self.args.logging_steps == 0:
            with torch.no_grad():  # of the first predicted tokens: the fused loss computes no logits to ask
                right = output.logits[:SAMPLE].argmax(-1) == inputs["labels"][chosen][:SAMPLE]
            self.see(train_accuracy=right)
        return self.share_of_step(output.loss, num_items_in_batch)


@torch.no_grad()
def measure_pretrained(installed: Installed, rows: Mapping[str, PairRows], counts: np.ndarray) -> MeasuredSplit:
    """Evaluate rows by the objective of their pairs; masked tokens are the first's. `counts` [V] are training's."""
    device = installed.tables()[0].device
    found: dict[str, list[Tensor]] = {}  # masked tokens or an objective's pairs: nll in fp64, target, whether right
    for objective, own in rows.items():
        judged: dict[str, list[tuple[Tensor, ...]]] = {MASKED: [], objective: []}
        with evaluating(installed.model):
            for batch in DataLoader(own, _BATCH):
                given = {name: value.to(device) for name, value in batch.items()}
                labels, order = given.pop("labels"), given.pop("pair_labels", None)
                output = installed.model(**given, predict=labels != -100)
                asked = (output.logits, labels[labels != -100]), (output.pair_logits, order)
                for kept, (logits, wanted) in zip(judged.values(), asked, strict=True):
                    if wanted is not None:
                        losses = F.cross_entropy(logits.float(), wanted, reduction="none").double()
                        kept.append((losses, wanted, logits.float().argmax(-1) == wanted))
        new = {name: kept for name, kept in judged.items() if kept and name not in found}
        found |= {name: [torch.cat(part).cpu() for part in zip(*kept, strict=True)] for name, kept in new.items()}
    return measured_shares(found, counts)


KIND = Alberts()
