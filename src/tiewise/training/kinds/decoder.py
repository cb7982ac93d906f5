"""Decoders in PyTorch, the default kind of run.

A decoder is a Llama, a GPT-2, or the model of a `config.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tiewise.boundary.boundary import Boundary
from tiewise.boundary.installation import Installed
from tiewise.boundary.parallel_plans import body_plan
from tiewise.boundary.parameter_groups import param_groups
from tiewise.core import ranks
from tiewise.core.errors import PlanError, RunError, one_line_message, suggest_choices
from tiewise.core.spec import BoundarySpec
from tiewise.planning.first_loss import FreshBody, first_step, small_decoder, sound_std
from tiewise.planning.read_config import read
from tiewise.training.built_models import build_with_random_tables, causal_model
from tiewise.training.config_width import config_path
from tiewise.training.data.corpus import Blocks, PreparedText
from tiewise.training.document_losses import TextUnits
from tiewise.training.measures import MeasuredSplit, evaluating, measure_by_frequency
from tiewise.training.run import Kind, prepare_blocks
from tiewise.training.settings import BUILT_IN, Settings
from tiewise.training.trainer import ADAM_BETAS, Job, TiewiseTrainer

# Names of the feed-forward width in families' configs; `match parameters` changes it.
_FEED_FORWARD = ("intermediate_size", "n_inner", "ffn_dim", "inner_dim")
AT_ONCE = 4096  # tokens of a forward pass of an evaluation


class Decoders(Kind):
    """Runs on blocks of any text, by AdamW with warm-up and a cosine.

    The seed determines the order of the blocks.
    """

    shards = True

    def check_processes(self, settings: Settings) -> None:
        """Refuse, too, attention heads that the processes of --tp do not divide."""
        super().check_processes(settings)
        sizes = ranks.sharded()
        if sizes is not None and settings.table_rate is not None:
            raise RunError("table_rate with --fsdp or --tp", "leave it out, or train without them")
        if sizes is not None and sizes[2] > 1:
            with torch.device("meta"):
                body_plan(causal_model(settings, make_config(settings, vocab=1)), sizes[2])

    def prepare(self, settings: Settings, folder: Path) -> PreparedText:
        """Read a text, and check that it has enough blocks."""
        width = _hidden_size(make_config(settings, vocab=1))
        for spec in settings.specs().values():
            spec.maps(width)  # raises for a boundary that this width cannot have
        return prepare_blocks(settings, folder)

    def feed_forward(self, settings: Settings, vocab: int) -> Mapping[str, int | None]:
        """Return the width that gives every arm the total of the largest arm.

        None: arms are matched by width. The total counts parameters, or operations per token. Each matrix but an input
        table takes as many operations as it has entries. An arm with a smaller boundary gets a larger body.
        """
        specs = settings.specs()
        if settings.match == "width":
            return dict.fromkeys(specs)
        config = make_config(settings, vocab)
        _, width = feed_forward_of(config)
        per_width = (_body_size(settings, vocab, width + 8) - _body_size(settings, vocab, width)) / 8
        if per_width <= 0:
            raise RunError(f"{config.model_type}: its feed-forward width changes no parameter", "use --match width")
        if settings.match == "flops":
            sizes = {name: _operations(spec, vocab, _hidden_size(config)) for name, spec in specs.items()}
        else:
            sizes = {name: _boundary_size(spec, vocab, _hidden_size(config)) for name, spec in specs.items()}
        largest = max(sizes.values())
        return {name: width + round((largest - size) / per_width) for name, size in sizes.items()}

    def build(self, job: Job) -> Installed:
        """Build the model with tables drawn N(0, std²), two tables independently."""
        config = make_config(job.settings, job.text.vocab, job.feed_forward)
        return build_with_random_tables(job, partial(causal_model, job.settings, config), self.table_std(job))

    def table_std(self, job: Job) -> float:
        """Return the boundary's scale, else the run's, else the sound one for this width."""
        width = _hidden_size(make_config(job.settings, job.text.vocab))
        return job.spec.init or job.settings.init or sound_std(width)

    def first_loss(self, job: Job) -> float:
        """Return the loss that `plan` predicts.

        A body that `plan` does not follow is taken to predict nothing.
        """
        s, config = job.settings, make_config(job.settings, job.text.vocab, job.feed_forward)
        width = _hidden_size(config)
        body: FreshBody | None = None
        if s.model == "llama":  # built here, so its body needs no reader of configs
            ffn, heads = config.intermediate_size, s.heads
            body = replace(small_decoder(width), layers=s.layers, ffn=ffn, heads=heads, head_dim=width // heads)
        else:
            with suppress(PlanError):
                body = read(config.to_dict()).fresh
        return first_step(job.spec, job.text.vocab, width, self.table_std(job), body, positions=s.length).compute()[0]

    def trainer(self, job: Job, installed: Installed) -> TiewiseTrainer:
        """Make the Trainer."""
        s = job.settings
        rows = Blocks(job.text.split("train"), s.length)
        optimizer = None  # the Trainer makes its own, in which all parameters have one rate
        if s.table_rate is not None:
            optimizer = _adamw_with_table_rate(installed.model, s, s.table_rate)
        return TiewiseTrainer(installed, optimizers=(optimizer, None), **self.trainer_parts(job, installed, rows))

    def measure(self, job: Job, installed: Installed, split: str, *, point: bool = False) -> MeasuredSplit:
        """Evaluate blocks; of training text as many as the validation split has."""
        length, blocks = job.settings.length, self.curve_blocks
        if not point:
            most = min(len(job.text.split(job.split)), job.settings.measured)
            blocks = max(1, most // length)
        units = self.units(job, split, point=point)
        return measure(installed, job.text.split(split), length, job.text.counts, blocks, units)


def _adamw_with_table_rate(model: nn.Module, settings: Settings, table_rate: float) -> torch.optim.AdamW:
    """Return the AdamW of all runs, with a separate learning rate of tables and head."""
    tables, head, hidden, vectors = param_groups(model, lr=settings.peak_rate, table_lr=table_rate)
    groups = [tables, head, hidden, vectors | {"weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=ADAM_BETAS, weight_decay=settings.weight_decay, fused=True)


def _hidden_size(config: Any) -> int:
    return int(config.get_text_config().hidden_size)


def _body_size(settings: Settings, vocab: int, feed_forward: int) -> int:
    """Return the parameters of a plain model with this feed-forward width."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(settings, vocab, feed_forward))
    return sum(p.numel() for p in model.parameters())


def _boundary_size(spec: BoundarySpec, vocab: int, width: int) -> int:
    """Return the parameters of a boundary."""
    with torch.device("meta"):
        boundary = Boundary(replace(spec.plainly(), pad=None), vocab, width, counts=np.zeros(vocab))
    return sum(p.numel() for p in boundary.parameters())


def _operations(spec: BoundarySpec, vocab: int, width: int) -> int:
    """Return the entries of the boundary's matrices that multiply every token.

    These are the output table and the maps.
    """
    table = vocab * spec.table_widths(width)[1]
    return table + sum(math.prod(shape) for shape in spec.map_shapes(width).values())


@torch.no_grad()
def measure(
    installed: Installed,
    tokens: np.ndarray,
    length: int,
    counts: np.ndarray,
    blocks: int | None = None,
    units: TextUnits | None = None,
) -> MeasuredSplit:
    """Evaluate contiguous blocks of `length` tokens, each of which predicts length − 1.

    At most `blocks` blocks are used, evenly spread over the split; None takes all. `counts` [V] are training counts.
    With the `units` of the split, losses are also summed by them. The model's mode is restored.
    """
    rows = _rows(tokens, length)
    count = len(rows)
    if blocks is not None:
        count = min(blocks, count)
    if count == 0:
        return measure_by_frequency([], counts)
    # evenly spread: a text has the order of its sources, whose beginnings are alike
    spread = np.arange(count) * len(rows) // count
    chosen = torch.from_numpy(rows[spread].astype(np.int64))
    batches = torch.split(chosen, max(1, AT_ONCE // length))
    if units is not None:
        units = TextUnits(units.name, _rows(units.of_token, length)[spread, 1:].reshape(-1))
    with evaluating(installed.model):
        return measure_by_frequency((_block_losses(installed, ids) for ids in batches), counts, units)


def _rows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return the blocks of a split [blocks, length]; tokens that fill none are left out."""
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def _block_losses(installed: Installed, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return (losses, targets) [n] of all tokens of blocks [B, T] except each first.

    No logits are computed.
    """
    ids = ids.to(installed.tables()[0].device)
    with installed.deferred():
        logits = installed.model(input_ids=ids, use_cache=False).logits[:, :-1, :]
        targets = ids[:, 1:].reshape(-1)
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets, reduction="none"), targets


def make_config(settings: Settings, vocab: int, feed_forward: int | None = None) -> Any:
    """Configure the body; `feed_forward` overrides the width of its feed-forward layers."""
    width = settings.width
    of_family: dict[str, dict[str, Any]] = {
        # 8/3·D, rounded to a multiple of 8: a gated layer has three matrices, where others have two of width 4·D
        "llama": {"intermediate_size": feed_forward or max(8, round(width * 8 / 3 / 8) * 8)},
        "gpt2": {"n_inner": feed_forward or 4 * width, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    }
    if settings.model not in of_family:
        return _config_of_file(settings, vocab, feed_forward)
    return AutoConfig.for_model(
        settings.model,
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=settings.length,
        initializer_range=0.5 * sound_std(width),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        **of_family[settings.model],
    )


def _config_of_file(settings: Settings, vocab: int, feed_forward: int | None) -> Any:
    """Configure the body by the settings' `config.json`, with another vocabulary."""
    path = config_path(settings.model)
    if not path.is_file():
        remedy = suggest_choices(settings.model, BUILT_IN, "give the path of a config.json, or one of")
        raise RunError(f"unknown model {settings.model!r}", remedy)
    config = _read_config(path)
    if not hasattr(config.get_text_config(), "hidden_size"):
        raise RunError(f"{path}: no causal language model can be built (it has no hidden_size)", "choose another")
    config.vocab_size, config.tie_word_embeddings = vocab, True
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if (getattr(config, token, None) or 0) >= vocab:
            setattr(config, token, None)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and 0 <= positions < settings.length:  # a negative number is no limit
        problem = f"{path} has {positions} positions, blocks are {settings.length} long"
        raise RunError(problem, f"use --set length={positions} or less")
    if feed_forward is not None:
        name, _ = feed_forward_of(config)
        setattr(config, name, feed_forward)
    return config


def _read_config(path: Path) -> Any:
    """Read a config of transformers. Raises RunError."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return AutoConfig.for_model(record.pop("model_type"), **record)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = "no model_type" if isinstance(error, KeyError) else one_line_message(error)
        raise RunError(f"{path} is no model configuration: {reason}", "give a transformers config.json") from None


def feed_forward_of(config: Any) -> tuple[str, int]:
    """Return (name, value) of the configuration's feed-forward width."""
    for name in _FEED_FORWARD:
        width = getattr(config, name, "")
        if width is None and name == "n_inner" and hasattr(config, "n_embd"):
            width = 4 * config.n_embd  # default of GPT-2, GPT-J, CodeGen and GPT-BigCode
        if isinstance(width, int):
            return name, width
    remedy = "use --match width with this model"
    raise RunError(f"{config.model_type}: no feed-forward width to spend parameters on", remedy)


KIND = Decoders()
