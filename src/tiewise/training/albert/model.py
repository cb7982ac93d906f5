"""The model of an ALBERT arm: its boundary's width is that of the three tables, its projections are the maps.

factored:64            E = 64, one table and its projection: ALBERT; factored-untied:64 has two tables
tied, untied, …        E = the run's `embedding`, or H, where no projection is needed
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tiewise.boundary.install import Installed, install
from tiewise.core.errors import SpecError
from tiewise.core.spec import BoundarySpec
from tiewise.data.prepared import PreparedText
from tiewise.models.albert import OpenAlbertForPreTraining
from tiewise.models.albert_layers import OpenAlbertConfig
from tiewise.training.albert.options import Albert, read_arm
from tiewise.training.model import parameters
from tiewise.training.settings import Settings

_FACTORED = {"factored": "tied", "factored-untied": "untied"}  # by what is installed between the projections


def options(settings: Settings) -> Albert:
    """Return the ALBERT part of an ALBERT run's settings."""
    assert settings.albert is not None
    return settings.albert


def arm_config(settings: Settings, arm: str, vocab: int, marks: dict[str, int | None]) -> OpenAlbertConfig:
    """Return the configuration of an arm's model; `marks` are its special tokens' ids by the config's names.

    Raises:
        SpecError: sizes or options that no model can have.
    """
    o = options(settings)
    boundary, share = read_arm(arm)
    width = _width(boundary, o.embedding or settings.width)
    return OpenAlbertConfig(
        vocab_size=vocab,
        embedding_size=width,
        hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        intermediate_size=o.inner,
        hidden_act=o.act,
        norm=o.norm,
        projection=width != settings.width or boundary.kind in _FACTORED,
        hidden_dropout_prob=o.dropout,
        attention_probs_dropout_prob=o.dropout,
        max_position_embeddings=settings.length,
        sharing=share or o.share,
        **marks,
    )


def build_arm(settings: Settings, arm: str, text: PreparedText, seed: int) -> Installed:
    """Build, seed and install one arm's model.

    Raises:
        SpecError, InstallError: as the parts do.
    """
    tokenizer = text.tokenizer()
    marks = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
    }
    config = arm_config(settings, arm, text.vocab, marks)
    if settings.init is not None:
        config.initializer_range = settings.init
    torch.manual_seed(seed)
    model: Any = OpenAlbertForPreTraining(config)
    torch.manual_seed(seed + 1_000_003)
    return install(model, _installed(read_arm(arm)[0]))


def parts(installed: Installed) -> dict[str, int]:
    """Parameters as `tiewise.training.model.parameters` counts them, the body's by attention, ffn and the rest."""
    found = parameters(installed)
    rest = found.pop("body")
    for name in ("attention", "ffn"):
        found[name] = sum(p.numel() for key, p in installed.model.named_parameters() if f".{name}." in key)
        rest -= found[name]
    return {**found, "positions, projection, heads": rest}


def _width(boundary: BoundarySpec, otherwise: int) -> int:
    if boundary.kind not in _FACTORED:
        return otherwise
    if boundary.out_width not in (None, boundary.width):
        what = f"{boundary}: ALBERT's ends are both of one width E"
        raise SpecError(what, f"choose factored-untied:{boundary.width}")
    assert boundary.width is not None
    return boundary.width


def _installed(boundary: BoundarySpec) -> BoundarySpec:
    """What is installed at width E, where ALBERT's own projections are a factored boundary's maps."""
    plain = boundary.plainly()
    if plain.kind in _FACTORED:
        return replace(plain, kind=_FACTORED[plain.kind], width=None, out_width=None)
    return plain
