"""Encoder-decoders: a T5 or a BART that learns to write what was hidden from its encoder.

    text                    The cat from next door came in through our kitchen window .
    the encoder reads       The cat <0> door came in through <1> window . <eos>
    the decoder writes      <0> from next <1> our kitchen <eos>

This is T5's span corruption (Raffel et al. 2020, arXiv:1910.10683, §3.1.4, §3.3.4). A share `noise` of a row's `length`
tokens, in runs of `span` tokens on average, is replaced by sentinels, one for each run. Both texts together are the
row. Every row has the same number of runs and of hidden tokens, so no padding is needed. Every epoch draws the runs
again. The loss of a step is the mean over all tokens that the decoder writes. Logs and measurements leave sentinels and
ends out: they have the nll of the hidden tokens alone.

    arm                         encoder lookup  decoder lookup  output head
    tied, factored:64, …              A               A              A         Press & Wolf 2017; Vaswani et al. 2017
    untied, …                         A               A              B         T5 1.1
    tied+encoder=apart                A               B              B         tying in the decoder alone
    untied+encoder=apart              A               B              C
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from tiewise.boundary.installation import Installed
from tiewise.boundary.saved import ENTRY
from tiewise.core.errors import RunError, SpecError
from tiewise.core.records import require
from tiewise.core.spec import BoundarySpec
from tiewise.planning.first_loss import first_step, sound_std
from tiewise.training.built_models import build_with_random_tables
from tiewise.training.data.corpus import PreparedText
from tiewise.training.data.tokenizer import windows
from tiewise.training.data.training_rows import add_marks
from tiewise.training.measures import JudgedPredictions, MeasuredSplit, evaluating, measure_shares
from tiewise.training.results import MASKED
from tiewise.training.run import Kind, prepare_blocks
from tiewise.training.settings import Settings
from tiewise.training.trainer import Job, TiewiseTrainer

Ints = NDArray[np.int64]
T5, BART = "t5", "bart"
APART, ENCODER = "+encoder=apart", "encoder.embed_tokens.weight"
SENTINEL, PAD = "<extra_id_{}>", {"pad_token": "<pad>"}  # as in T5's tokenizer
MEASURED_SEED = 20_191  # seed of the hidden runs in evaluation, the same for all arms and seeds
_BATCH = 64  # rows of a forward pass of an evaluation


@dataclass(frozen=True)
class Seq2SeqOptions:
    """Settings of encoder-decoders and their task."""

    noise: float = 0.15  # share of hidden tokens in a row
    span: float = 3.0  # tokens of a hidden run, on average

    @classmethod
    def of(cls, settings: Settings) -> Seq2SeqOptions:
        """Return the options among the settings of an encoder-decoder."""
        assert isinstance(settings.kind_options, cls), "settings of an encoder-decoder have its options"
        return settings.kind_options

    def sizes(self, length: int) -> tuple[int, int]:
        """Return (hidden tokens, runs of them) of a row of `length` tokens."""
        hidden = max(1, round(self.noise * length))
        return hidden, max(1, round(hidden / self.span))

    def read_arm(self, text: str) -> tuple[str, BoundarySpec]:
        """Return (canonical name, boundary of decoder lookup and output head) of an arm."""
        boundary = text.removesuffix(APART)
        spec = BoundarySpec.parse(boundary)
        if boundary == text:
            return str(spec), spec
        if not spec.plain or spec != spec.plainly():
            raise SpecError(f"{text}: a separate encoder table needs plain tables", f"use tied{APART}, say")
        return str(spec) + APART, spec


# rows


class SpanRow(NamedTuple):
    """A row of T tokens of which some are hidden, in S runs."""

    read: Ints  # input of the encoder [T − hidden + S + 1]
    written: Ints  # targets of the decoder [hidden + S + 1]
    hidden: Ints  # 1 where a target is a token of the row, 0 at sentinels and the end [hidden + S + 1]


def hide(ids: Ints, hidden: int, sentinels: Ints, end: int, draw: np.random.Generator) -> SpanRow:
    """Hide `hidden` tokens of a row [T], in as many runs as there are sentinels [S].

    Both texts end in `end`.
    """
    runs = len(sentinels)
    hidden_sizes = _random_sizes(hidden, runs, draw)  # tokens of each hidden run
    visible_sizes = _random_sizes(len(ids) - hidden + 2, runs + 1, draw)  # tokens of each visible run around them
    visible_sizes[[0, -1]] -= 1  # a row may begin and end with a hidden run
    sizes = np.insert(visible_sizes, np.arange(1, runs + 1), hidden_sizes)
    is_hidden = np.repeat(np.arange(2 * runs + 1) % 2 == 1, sizes)
    # start of each hidden run within the visible tokens, and within the hidden ones
    before, begins = np.cumsum(visible_sizes)[:-1], np.cumsum(hidden_sizes) - hidden_sizes
    read = np.append(np.insert(ids[~is_hidden], before, sentinels), end)
    written = np.append(np.insert(ids[is_hidden], begins, sentinels), end)
    is_token = np.insert(np.ones(hidden, np.int64), begins, 0)
    return SpanRow(read, written, np.append(is_token, 0))


def _random_sizes(total: int, count: int, draw: np.random.Generator) -> Ints:
    """Return sizes [count] of 1 or more that sum to `total`, all divisions equally likely."""
    cuts = np.sort(draw.choice(total - 1, count - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=total)


class SpanRows(Dataset[dict[str, Tensor]]):
    """Rows with hidden runs from blocks of text [rows, T], epoch after epoch.

    Each is `{"input_ids", "decoder_input_ids", "labels", "hidden": int64[…]}`. Row i depends only on the seed and i, so
    a resumed run continues with the same rows. `count` is the total number of rows, by default one epoch.
    """

    def __init__(self, job: Job, blocks: np.ndarray, *, seed: int, count: int | None = None) -> None:
        tokenizer = job.text.tokenizer
        self.blocks, self.seed = blocks, seed
        self.count = len(blocks) if count is None else count
        self.sentinels = np.array(tokenizer.convert_tokens_to_ids(sentinels(job.settings)))
        self.hidden, _ = Seq2SeqOptions.of(job.settings).sizes(job.settings.length)
        self.marks = special_token_ids(job.settings, tokenizer)
        self.epoch, self.order = -1, np.zeros(0, np.int64)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        epoch, position = divmod(index, len(self.blocks))
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng([self.seed, 0, epoch]).permutation(len(self.blocks))
        ids = self.blocks[self.order[position]].astype(np.int64)
        draw = np.random.default_rng([self.seed, 1, index])
        row = hide(ids, self.hidden, self.sentinels, self.marks["eos_token_id"], draw)
        start = self.marks["decoder_start_token_id"]
        arrays = {
            "input_ids": row.read,
            "decoder_input_ids": np.insert(row.written[:-1], 0, start),
            "labels": row.written,
            "hidden": row.hidden,
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def sentinels(settings: Settings) -> list[str]:
    """Return the tokens that mark hidden runs, in order."""
    _, runs = Seq2SeqOptions.of(settings).sizes(settings.length)
    return [SENTINEL.format(i) for i in range(runs)]


def special_token_ids(settings: Settings, tokenizer: Any) -> dict[str, int]:
    """Return the ids of special tokens by the config's names.

    The decoder's start token is that of its family.
    """
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    start = pad if settings.model == T5 else end
    return {"pad_token_id": pad, "eos_token_id": end, "decoder_start_token_id": start}


# models


def make_config(settings: Settings, text: PreparedText) -> Any:
    """Configure a T5 or a BART without dropout, with equally deep encoder and decoder."""
    sizes = _t5_sizes(settings) if settings.model == T5 else _bart_sizes(settings, text.tokenizer.eos_token_id)
    sizes |= special_token_ids(settings, text.tokenizer)
    return AutoConfig.for_model(settings.model, vocab_size=text.vocab, d_model=settings.width, **sizes)


def _t5_sizes(s: Settings) -> dict[str, Any]:
    return {
        "d_kv": s.width // s.heads,
        "d_ff": 4 * s.width,
        "num_layers": s.layers,
        "num_heads": s.heads,
        "dropout_rate": 0.0,
        "tie_word_embeddings": False,  # here this only switches off T5's scale at the head
    }


def _bart_sizes(s: Settings, end: int) -> dict[str, Any]:
    sizes: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": s.layers, f"{side}_attention_heads": s.heads, f"{side}_ffn_dim": 4 * s.width}
    sizes |= dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
    sizes |= {"init_std": 0.5 * sound_std(s.width), "max_position_embeddings": 2 * s.length}
    return sizes | {"bos_token_id": None, "forced_eos_token_id": end}


def make_model(job: Job) -> Any:
    """Build an arm's model in its family's class."""
    model = AutoModelForSeq2SeqLM.from_config(make_config(job.settings, job.text), dtype=torch.float32)
    if job.arm.endswith(APART):
        lookup = model.get_encoder().embed_tokens
        lookup.weight = nn.Parameter(lookup.weight.detach().clone())
        for module in model.modules():  # transformers must not tie it again
            _forget_encoder_ties(module)
    return model


def _forget_encoder_ties(module: nn.Module) -> None:
    """Drop the encoder's lookup from the weights that transformers ties in a module."""
    keys: dict[str, str] = getattr(module, "_tied_weights_keys", None) or {}
    others = {key: keys[key] for key in keys if not key.endswith(ENCODER)}
    if len(others) < len(keys):
        module._tied_weights_keys = others  # type: ignore[assignment]  # a name of transformers, not a parameter


def logits_of(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the logits [rows, written, V] of the decoder's targets."""
    output = model(input_ids=batch["input_ids"], decoder_input_ids=batch["decoder_input_ids"], use_cache=False)
    logits: Tensor = output.logits
    return logits


class SpanTrainer(TiewiseTrainer):
    """Trainer on `SpanRows`; its logged loss is the nll of the hidden tokens."""

    def loss_of(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the mean nll of all the decoder's targets in the micro-batch."""
        logits = logits_of(model, inputs)
        losses = F.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten(), reduction="none")
        self.note(loss=losses.detach()[inputs["hidden"].flatten() == 1])
        return self.share_of_step(losses.mean(), kwargs.get("num_items_in_batch"))


class EncoderDecoders(Kind):
    """Runs on blocks of any text with hidden runs, by AdamW with warm-up and a cosine."""

    where = "in an encoder-decoder's run"
    options = Seq2SeqOptions
    defaults: Mapping[str, object] = {"model": T5, "batch": 32}  # a row has a quarter as many targets as a decoder's
    lacks: Mapping[str, tuple[object, str]] = {"match": ("width", "leave it out: arms have one body")}
    curve_blocks = 128  # more than for a decoder, since few tokens are hidden

    def check(self, settings: Settings) -> Seq2SeqOptions:
        """Refuse, too, sizes that leave nothing to predict."""
        super().check(settings)
        options = Seq2SeqOptions.of(settings)
        require(options, "noise", lambda x: 0 < x < 1, "use a share between 0 and 1")
        require(options, "span", lambda x: 1 <= x < float("inf"), "use 1 or more")
        require(settings, "model", (T5, BART).__contains__, f"choose {T5} or {BART}")
        if settings.width % settings.heads:
            raise RunError(f"{settings.heads} heads do not divide width {settings.width}", "choose heads that do")
        hidden, runs = options.sizes(settings.length)
        if runs - 1 > settings.length - hidden:
            problem = f"{runs} runs of {hidden} hidden tokens do not fit into rows of {settings.length}"
            raise RunError(problem, "use less noise, or a longer span")
        return options

    def prepare(self, settings: Settings, folder: Path) -> PreparedText:
        """Read a text, and add the sentinels to its tokenizer."""
        for spec in settings.specs().values():
            spec.maps(settings.width)
        return add_marks(prepare_blocks(settings, folder), PAD, sentinels(settings))

    def build(self, job: Job) -> Installed:
        """Build the model with tables drawn N(0, std²), several tables independently."""
        std = self.table_std(job)
        installed = build_with_random_tables(job, partial(make_model, job), std)
        if job.arm.endswith(APART):
            nn.init.normal_(installed.model.get_encoder().embed_tokens.weight, 0, std)
            # a saved boundary would be installed at the encoder, too; plain tables need none
            delattr(installed.model.config, ENTRY)
        return installed

    def table_std(self, job: Job) -> float:
        """Return the boundary's scale, else the run's, else the sound one for this width."""
        return job.spec.init or job.settings.init or sound_std(job.settings.width)

    def first_loss(self, job: Job) -> float:
        """Return the first loss of a decoder whose body predicts nothing."""
        return first_step(job.spec, job.text.vocab, job.settings.width, self.table_std(job)).compute()[0]

    def trainer(self, job: Job, installed: Installed) -> SpanTrainer:
        """Make the Trainer."""
        s, tokens = job.settings, job.text.split("train")
        blocks = windows(tokens, s.length, len(tokens) // s.length)
        rows = SpanRows(job, blocks, seed=job.seed, count=s.steps * s.batch * s.accumulate)
        changes: dict[str, Any] = {"train_sampling_strategy": "sequential"}
        changes["ddp_find_unused_parameters"] = False  # all are used; DDP cannot trace a loss outside the model
        return SpanTrainer(installed, **self.trainer_parts(job, installed, rows, **changes))

    @torch.no_grad()
    def measure(self, job: Job, installed: Installed, split: str, *, point: bool = False) -> MeasuredSplit:
        """Evaluate the hidden tokens of rows.

        Of training text, as many rows as the validation split has.
        """
        length, tokens, model = job.settings.length, job.text.split(split), installed.model
        most = self.curve_blocks
        if not point:
            most = max(1, min(len(job.text.split(job.split)), job.settings.measured) // length)
        count = min(len(tokens) // length, most)
        parts = []
        with evaluating(model):
            for batch in DataLoader(SpanRows(job, windows(tokens, length, count), seed=MEASURED_SEED), _BATCH):
                inputs = {name: value.to(model.device) for name, value in batch.items()}
                is_hidden = inputs["hidden"] == 1
                logits = logits_of(model, inputs)[is_hidden]
                parts.append(JudgedPredictions.of(logits.float(), inputs["labels"][is_hidden]))
        return measure_shares({MASKED: JudgedPredictions.joined(parts)}, job.text.counts)

    def evaluated_tokens(self, job: Job) -> int:
        """Return the number of hidden tokens that a run evaluates."""
        length = job.settings.length
        hidden, _ = Seq2SeqOptions.of(job.settings).sizes(length)
        return super().evaluated_tokens(job) * hidden // length

    def parameters(self, installed: Installed) -> dict[str, int]:
        """Count parameters, with a separate table of the encoder as a component."""
        counts = super().parameters(installed)
        table = installed.model.get_encoder().embed_tokens.weight
        table_in, table_out = installed.tables()
        if table is table_in or table is table_out:
            return counts
        return {"encoder table": table.numel(), **counts, "body": counts["body"] - table.numel()}


KIND = EncoderDecoders()
