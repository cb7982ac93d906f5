"""ALBERTs, pretrained on masked words and pairs of sentences, with every choice of what their layers share open.

An arm is a boundary, and what its layers share where that is not the run's `share`: `factored:64+share=ffn`,
`tied+share=all:groups=2`. Its boundary's width is that of the three tables, its projections are the maps:

factored:64            E = 64, one table and its projection: ALBERT; factored-untied:64 has two tables
tied, untied, …        E = the run's `embedding`, or H, where no projection is needed
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiewise.boundary.install import Installed, install
from tiewise.core.errors import DataError, RunError, SpecError
from tiewise.core.first_loss import first_step
from tiewise.core.records import require, to_record
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.data.corpus import PreparedText, prepare
from tiewise.data.sentence_pairs import OBJECTIVES, Packing
from tiewise.data.training_rows import Masking, PairRows, mark, split_sentences
from tiewise.models.open_albert import OpenAlbertConfig, OpenAlbertForPreTraining
from tiewise.training import ranks
from tiewise.training.callbacks import Clock
from tiewise.training.evaluate import MeasuredSplit
from tiewise.training.folder import write_json
from tiewise.training.kind import Kind, check_rows
from tiewise.training.model import TABLES, parameters
from tiewise.training.pretraining_trainer import LOGGED, PretrainingTrainer, measure_pretrained
from tiewise.training.results import MASKED
from tiewise.training.settings import Job, Settings
from tiewise.training.trainer import arguments, callbacks

FOUND = "pretraining.json"  # in a run's folder: accuracies on tokens and pairs, with intervals
CURVE_ROWS = 64  # of the held-out split, behind each point of a curve
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
        """Return these options, `share` in its canonical form.

        Raises:
            RunError: a value out of range.
            DataError, SpecError: as `Masking` and `SharingSpec`.
        """
        for name, choices in _CHOICES.items():
            require(self, name, choices.__contains__, f"choose one of {', '.join(choices)}")
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
        """(canonical name, boundary) of an arm.

        Raises:
            SpecError: it cannot be read.
        """
        boundary, sharing = parts_of(text)
        return str(boundary) + (f"{_SHARE}{sharing}" if sharing is not None else ""), boundary

    def shared_arms(self, arms: Sequence[str], shares: Sequence[str]) -> tuple[str, ...]:
        """Every arm with every sharing, boundary by boundary.

        Raises:
            SpecError: an arm that has a sharing of its own.
        """
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

    title = "ALBERT"
    where = "in an ALBERT run"
    options = AlbertOptions
    lacks: Mapping[str, tuple[Any, str]] = {
        "model": ("albert", "leave it out, or use albert"),
        "minutes": (None, _SHORTER),
        "match": ("width", _SHORTER),
        "tune": (False, _SHORTER),
    }

    def check(self, settings: Settings) -> AlbertOptions:
        """Refuse what cannot be packed, too."""
        own: AlbertOptions = super().check(settings).checked()
        own.packing(settings.length)
        return own

    def check_sizes(self, settings: Settings) -> None:
        """Refuse arms that no model of these sizes can have."""
        for arm in settings.specs():
            arm_config(settings, arm, 8, {})

    def prepare(self, settings: Settings, folder: Path) -> PreparedText:
        """Read a text in sentences, and see that every split makes pairs."""
        found = prepare(
            settings.text, settings.tokenizer, folder, length=settings.length, split=settings.split, apart=True
        )
        return marked(settings, found)

    def build(self, job: Job, text: PreparedText, seed: int) -> Installed:
        """Build the model of an arm, and install its boundary."""
        return build_arm(job.settings, job.arm, text, seed)

    def table_std(self, job: Job, vocab: int) -> float:
        """As the config has it, where neither boundary nor run say."""
        return float(job.spec.init or arm_config(job.settings, job.arm, vocab, {}).initializer_range)

    def first_loss(self, job: Job, installed: Installed, vocab: int) -> float:
        """Behind the head's random dense layer no row meets itself."""
        width = installed.model.config.embedding_size
        return first_step(installed.spec, vocab, width, self.table_std(job, vocab)).computed()[0]

    def trainer(
        self, job: Job, installed: Installed, text: PreparedText, counts: np.ndarray, clock: Clock
    ) -> PretrainingTrainer:
        """Make the trainer, its points measured on the run's own objective."""
        s, o = job.settings, job.settings.own
        rows = measured_rows(s, text, job.split, (o.objective,), CURVE_ROWS)

        def found() -> dict[str, float]:
            point = measure_pretrained(trainer.installed, rows, counts)
            tokens, *pairs = point.shares.values()
            said = {"heldout_nll": point.nll, "heldout_accuracy": tokens.share}
            for pair in pairs:
                said |= {"heldout_pair_nll": pair.nll, "heldout_pair_accuracy": pair.share}
            return said

        trainer = PretrainingTrainer(
            installed,
            paired=o.objective != "none",
            lamb=o.optimizer == "lamb",
            found=found,
            args=arguments(
                job,
                per_device_train_batch_size=ranks.share(s.batch),
                lr_scheduler_type="linear",
                warmup_steps=round(o.warmup * s.steps),
                max_grad_norm=o.clip,
            ),
            train_dataset=rows_of(s, text, "train", seed=job.seed, count=s.steps * s.batch * s.accumulate),
            callbacks=callbacks(job, clock, *LOGGED),
        )
        return trainer

    def measure(
        self, job: Job, installed: Installed, text: PreparedText, counts: np.ndarray, split: str, *, point: bool = False
    ) -> MeasuredSplit:
        """Evaluate rows of a split: on the run's own objective, a finished model's held-out rows on both."""
        s = job.settings
        objectives = dict.fromkeys((s.own.objective, *(("sop", "nsp") if split == job.split and not point else ())))
        most = CURVE_ROWS if point else max(1, s.measured // s.length)
        return measure_pretrained(installed, measured_rows(s, text, split, objectives, most), counts)

    def parameters(self, installed: Installed) -> dict[str, int]:
        """The body's by attention, ffn and the rest."""
        found = parameters(installed)
        rest = found.pop("body")
        for name in ("attention", "ffn"):
            found[name] = sum(p.numel() for key, p in installed.model.named_parameters() if f".{name}." in key)
            rest -= found[name]
        return {**found, "positions, projection, heads": rest}

    def finish(self, job: Job, heldout: MeasuredSplit) -> None:
        """Write what was found on tokens and pairs."""
        pairs = {name: to_record(share) for name, share in heldout.shares.items() if name != MASKED}
        tokens = to_record(heldout.shares[MASKED])
        write_json(job.folder / FOUND, {"tokens": tokens, "pairs": pairs, "unigram_nll": heldout.unigram_nll})


def rows_of(
    settings: Settings, text: PreparedText, split: str, *, seed: int, count: int | None = None, objective: str = ""
) -> PairRows:
    """Rows of a split as a run's settings make them, from `seed`.

    Raises:
        DataError: a text that makes no pairs.
    """
    packing = settings.own.packing(settings.length, objective)
    most = None if split == "train" and count is not None else 8 * settings.measured
    sentences = split_sentences(text, split, most)
    return PairRows(sentences, packing, settings.own.masks(), seed=seed, count=count)


def measured_rows(
    settings: Settings, text: PreparedText, split: str, objectives: Iterable[str], most: int
) -> dict[str, PairRows]:
    """Up to `most` rows of a split for each objective, always the same ones."""
    found = {}
    for objective in objectives:
        found[objective] = rows = rows_of(settings, text, split, seed=MEASURED_SEED, objective=objective)
        rows.count = min(most, len(rows))
    return found


def marked(settings: Settings, text: PreparedText) -> PreparedText:
    """Give a text's tokenizer its marks, and see that every split makes pairs.

    Raises:
        DataError: a split of which no document has two sentences, or fewer rows than a step takes.
    """
    text = mark(text)
    for split in ("heldout", "train"):
        try:
            rows = rows_of(settings, text, split, seed=1)
        except DataError as error:
            raise DataError(f"{split}: {error.what}", error.fix) from None
    check_rows(settings, len(rows), f"makes {len(rows)} training rows")
    return text


def arm_config(settings: Settings, arm: str, vocab: int, marks: dict[str, int | None]) -> OpenAlbertConfig:
    """Return the configuration of an arm's model; `marks` are its special tokens' ids by the config's names.

    Raises:
        SpecError: sizes or options that no model can have.
    """
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
        **({} if settings.init is None else {"initializer_range": settings.init}),
        **marks,
    )


def build_arm(settings: Settings, arm: str, text: PreparedText, seed: int) -> Installed:
    """Build, seed and install one arm's model.

    Raises:
        SpecError, InstallError: as the parts do.
    """
    tokenizer = text.tokenizer()
    ids = (tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id)
    marks = dict(zip(("pad_token_id", "bos_token_id", "eos_token_id"), ids, strict=True))
    torch.manual_seed(seed)
    model: Any = OpenAlbertForPreTraining(arm_config(settings, arm, text.vocab, marks))
    torch.manual_seed(seed + TABLES)
    boundary = parts_of(arm)[0].plainly()
    if boundary.kind in _FACTORED:  # ALBERT's own projections are a factored boundary's maps
        boundary = replace(boundary, kind=_FACTORED[boundary.kind], width=None, out_width=None)
    return install(model, boundary)


KIND = Alberts()
