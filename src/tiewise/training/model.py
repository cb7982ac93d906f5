"""The model of one arm: a Hugging Face decoder with a seeded body, its boundary installed and started.

Arms of one seed have the same body, bit for bit: it is drawn first, by a plain tied model, and only then does the
boundary change. Tables are drawn last, from a seed of their own, so the arms' input tables agree where shapes do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig

from tiewise.boundary.boundary import Boundary, draw, sound_std
from tiewise.boundary.install import Installed, install
from tiewise.boundary.vectors import load_vectors, row_tokens, start_from_rows
from tiewise.core.errors import PlanError, RunError
from tiewise.core.first_loss import first_step
from tiewise.core.spec import BoundarySpec
from tiewise.data.corpus import PreparedText
from tiewise.planning.read_config import read
from tiewise.training.settings import Settings

TABLES = 1_000_003  # between the seed of a body and that of its tables
# The width of the feed-forward layer, as families call it: what `match parameters` widens.
_FEED_FORWARD = ("intermediate_size", "n_inner", "ffn_dim", "inner_dim")


def make_config(settings: Settings, vocab: int, feed_forward: int | None = None) -> Any:
    """Configuration of the body; `feed_forward` overrides the width of its feed-forward layers.

    Raises:
        RunError: an unknown model, or a `config.json` that cannot be used.
    """
    wide = feed_forward or (
        # 4·D, or 8/3·D rounded to 8 for the three matrices of a gated layer
        4 * settings.width if settings.model == "gpt2" else max(8, round(settings.width * 8 / 3 / 8) * 8)
    )
    shared = {"vocab_size": vocab, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None}
    if settings.model == "llama":
        return LlamaConfig(
            hidden_size=settings.width,
            intermediate_size=wide,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            max_position_embeddings=settings.length,
            initializer_range=0.5 * sound_std(settings.width),
            **shared,
        )
    if settings.model == "gpt2":
        return GPT2Config(
            n_embd=settings.width,
            n_inner=wide,
            n_layer=settings.layers,
            n_head=settings.heads,
            n_positions=settings.length,
            initializer_range=0.5 * sound_std(settings.width),
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **shared,
        )
    return _config_file(settings, vocab, feed_forward)


def _config_file(settings: Settings, vocab: int, feed_forward: int | None) -> Any:
    path = Path(settings.model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise RunError(f"unknown model {settings.model!r}", "use llama, gpt2, or the path of a config.json")
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        config = AutoConfig.for_model(record.pop("model_type"), **record)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = "no model_type" if isinstance(error, KeyError) else str(error).splitlines()[0][:120]
        raise RunError(f"{path} is no model configuration: {reason}", "give a transformers config.json") from None
    config.vocab_size = vocab
    config.tie_word_embeddings = True
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if (getattr(config, token, None) or 0) >= vocab:
            setattr(config, token, None)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and 0 <= positions < settings.length:  # a negative number is no limit
        raise RunError(
            f"{path} has {positions} positions, blocks are {settings.length} long",
            f"use --set length={positions} or less",
        )
    if feed_forward is not None:
        setattr(config, feed_forward_name(config), feed_forward)
    return config


def feed_forward_name(config: Any) -> str:
    """Name of the configuration's feed-forward width.

    Raises:
        RunError: where the family has none of the known names.
    """
    for name in _FEED_FORWARD:
        if isinstance(getattr(config, name, None), int) or _unset_inner(config, name):
            return name
    fix = "use --match width with this model"
    raise RunError(f"{config.model_type}: no feed-forward width to spend parameters on", fix)


def feed_forward_width(config: Any) -> int:
    """Return the configuration's feed-forward width. Raises as `feed_forward_name`."""
    name = feed_forward_name(config)
    return 4 * int(config.n_embd) if _unset_inner(config, name) else int(getattr(config, name))


def _unset_inner(config: Any, name: str) -> bool:
    """Whether an absent width means 4·D, as GPT-2, GPT-J, CodeGen and GPT-BigCode have it."""
    return name == "n_inner" and getattr(config, name, 0) is None and hasattr(config, "n_embd")


def build(settings: Settings, spec: BoundarySpec, text: PreparedText, seed: int, feed_forward: int | None) -> Installed:
    """Build, seed, install and start one arm's model; its schedule, if any, is the caller's.

    Raises:
        RunError, SpecError, InstallError: as the parts do.
    """
    config = make_config(settings, text.vocab, feed_forward)
    std = starting_std(settings, spec, int(config.get_text_config().hidden_size))
    return built(config, settings.model, spec, text, seed, lambda installed: start_tables(installed, std, spec))


def built(
    config: Any, name: str, spec: BoundarySpec, text: PreparedText, seed: int, start: Callable[[Installed], None]
) -> Installed:
    """Build the model of a configuration with seeded weights, install a boundary, and have `start` draw its tables."""
    torch.manual_seed(seed)
    try:
        # weights in fp32 whatever the file says: in bf16 most updates would round to nothing
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:160]
        raise RunError(f"{name}: no causal language model can be built ({reason})", "choose another") from None
    installed = install(model, replace(spec.plainly(), vectors=None, freeze=False, init=None))
    torch.manual_seed(seed + TABLES)
    start(installed)
    if spec.vectors is not None:
        rows = load_vectors(spec.vectors, row_tokens(text.tokenizer(), text.vocab))
        start_from_rows(installed.tables()[0], rows, spec.freeze, spec)
    return installed


def starting_std(settings: Settings, spec: BoundarySpec, d: int) -> float:
    """Scale of an arm's tables: the spec's own, else the run's, else the sound one for this width."""
    return spec.init or settings.init or sound_std(d)


def predicted_nll(settings: Settings, spec: BoundarySpec, vocab: int, feed_forward: int | None = None) -> float:
    """Expected first loss (nats) of an arm, as `plan` has it; of bodies that it does not follow, taken to know nothing.

    Raises:
        RunError: as `make_config`.
    """
    config = make_config(settings, vocab, feed_forward)
    d = int(config.get_text_config().hidden_size)
    try:
        body = read(config.to_dict()).fresh
    except PlanError:
        body = None
    return first_step(spec, vocab, d, starting_std(settings, spec, d), body, positions=settings.length).computed()[0]


def start_tables(installed: Installed, std: float, spec: BoundarySpec) -> None:
    """Draw the tables N(0, std²), both ends of two tables independently."""
    table_in, table_out = installed.tables()
    draw(table_in, std, spec.pad)
    if table_out is not table_in:
        draw(table_out, std, spec.pad)


def parameters(installed: Installed) -> dict[str, int]:
    """Parameters by component, each counted once however often it is used; the values sum to the model's total."""
    model = installed.model
    table_in, table_out = installed.tables()
    head, lookup = model.get_output_embeddings(), model.get_input_embeddings()
    found = (
        {"shared table": table_in.numel()}
        if table_in is table_out
        else {"input table": table_in.numel(), "output table": table_out.numel()}
    )
    maps = {id(p): p.numel() for end in (lookup, head) for name, p in end.named_parameters() if "_map." in name}
    if maps:
        found["maps"] = sum(maps.values())
    if getattr(head, "bias", None) is not None:
        found["output bias"] = head.bias.numel()
    found["body"] = sum(p.numel() for p in model.parameters()) - sum(found.values())
    return found


def matched_feed_forward(settings: Settings, vocab: int) -> dict[str, int | None]:
    """Feed-forward width per arm: None where arms are matched by width, else what brings every total to the largest.

    What an arm's boundary saves beside the largest boundary is spent on its body.
    """
    specs = settings.specs()
    if settings.match == "width":
        return dict.fromkeys(specs)
    config = make_config(settings, vocab)
    wide = feed_forward_width(config)
    configs = [make_config(settings, vocab, wide + extra) for extra in (0, 8)]
    with torch.device("meta"):
        one, two = (sum(p.numel() for p in AutoModelForCausalLM.from_config(c).parameters()) for c in configs)
    per_unit = (two - one) / 8
    if per_unit <= 0:
        raise RunError(f"{config.model_type}: its feed-forward width changes no parameter", "use --match width")
    d = int(config.get_text_config().hidden_size)
    sizes = {name: boundary_size(spec, vocab, d) for name, spec in specs.items()}
    largest = max(sizes.values())
    return {name: wide + round((largest - size) / per_unit) for name, size in sizes.items()}


def boundary_size(spec: BoundarySpec, vocab: int, d: int) -> int:
    """Parameters of a boundary, each counted once."""
    with torch.device("meta"):
        return sum(p.numel() for p in Boundary(replace(spec.plainly(), pad=None), vocab, d).parameters())
