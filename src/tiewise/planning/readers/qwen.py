"""Qwen3-Next, Qwen3.5 and Qwen3.5 with experts: delta-rule layers between layers of gated attention."""

from __future__ import annotations

from tiewise.planning.architecture import Architecture, norm
from tiewise.planning.config import Config
from tiewise.planning.model_families import Experts, qwen_experts, read_experts, read_heads, register_reader
from tiewise.planning.readers.parts import (
    FULL,
    LINEAR,
    Layer,
    Sublayer,
    attention,
    choose,
    delta_net,
    experts_part,
    ffn,
    layer_kinds,
    mixed_decoder,
)

INTERVAL = 4  # every fourth layer attends, unless the config says otherwise


def _mixers(config: Config) -> dict[str, Sublayer]:
    """Return what mixes tokens, by kind of layer."""
    d, heads = config.size("hidden_size"), read_heads(config)
    norms = norm(heads.width, "rms", 2).parameters
    gated = attention(d, heads, bias=config.flag("attention_bias"), norms=norms, gated=True)
    return {LINEAR: delta_net(config), FULL: gated}


def _kinds(config: Config) -> list[str]:
    """Return the kind of each layer."""
    layers, interval = config.size("num_hidden_layers"), config.size("full_attention_interval", INTERVAL)
    usual = [LINEAR if (index + 1) % interval else FULL for index in range(layers)]
    return layer_kinds(config, otherwise=usual)


def _with_shared_expert(config: Config, experts: Experts) -> Experts:
    """Return experts with one more that every token uses behind a gate."""
    width = config.size("shared_expert_intermediate_size")
    return Experts(experts.count, experts.chosen, experts.width, width, shared_gate=True, dense=experts.dense)


@register_reader("qwen3_next")
def _qwen3_next(config: Config) -> Architecture:
    d, mixers, experts = config.size("hidden_size"), _mixers(config), _with_shared_expert(config, qwen_experts(config))
    plain, sparse = ffn(d, config.size("intermediate_size")), experts_part(d, experts)
    layers = []
    for index, kind in enumerate(_kinds(config)):
        layers.append(Layer(choose(mixers, kind, config), plain if index in experts.dense else sparse))
    return mixed_decoder(config, layers)


@register_reader("qwen3_5")
def _qwen3_5(config: Config) -> Architecture:
    mixers, plain = _mixers(config), ffn(config.size("hidden_size"), config.size("intermediate_size"))
    return mixed_decoder(config, (Layer(choose(mixers, kind, config), plain) for kind in _kinds(config)))


@register_reader("qwen3_5_moe")
def _qwen3_5_moe(config: Config) -> Architecture:
    experts = _with_shared_expert(config, read_experts(config, "num_experts", "moe_intermediate_size"))
    mixers, sparse = _mixers(config), experts_part(config.size("hidden_size"), experts)
    return mixed_decoder(config, (Layer(choose(mixers, kind, config), sparse) for kind in _kinds(config)))
