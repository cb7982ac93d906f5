"""MiMo V2: values narrower than keys, and more heads of keys and values in sliding layers."""

from __future__ import annotations

from tiewise.planning.architecture import Architecture, Heads, elementwise, linear
from tiewise.planning.config import Config
from tiewise.planning.model_families import read_experts, register_reader
from tiewise.planning.readers.parts import (
    DENSE,
    FULL,
    SLIDING,
    SPARSE,
    Layer,
    Sublayer,
    choose,
    experts_part,
    ffn,
    ffn_kinds,
    layer_kinds,
    mixed_decoder,
)

FULL_EVERY = 6  # and the first layer


@register_reader("mimo_v2")
def _mimo_v2(config: Config) -> Architecture:
    d, layers = config.size("hidden_size"), config.size("num_hidden_layers")
    mixers = {FULL: _attention(config, sliding=False), SLIDING: _attention(config, sliding=True)}
    experts = read_experts(config, "n_routed_experts", "moe_intermediate_size")
    after = {DENSE: ffn(d, config.size("intermediate_size")), SPARSE: experts_part(d, experts)}
    usual = [FULL if index == 0 or (index + 1) % FULL_EVERY == 0 else SLIDING for index in range(layers)]
    kinds = layer_kinds(config, otherwise=usual)
    joined = []
    for kind, ffn_kind in zip(kinds, ffn_kinds(config, dense=1), strict=True):
        joined.append(Layer(choose(mixers, kind, config), choose(after, ffn_kind, config)))
    return mixed_decoder(config, joined)


def _attention(config: Config, sliding: bool) -> Sublayer:
    """Count attention. A sliding layer has twice the heads of keys and values, and a sink per head."""
    d, count, kv = config.size("hidden_size"), config.size("num_attention_heads"), config.size("num_key_value_heads")
    keys, values, bias = config.size("head_dim"), config.size("v_head_dim"), config.flag("attention_bias")
    if sliding:
        kv *= 2
    maps = linear(d, count * keys, bias) + linear(d, kv * keys, bias) + linear(d, kv * values, bias)
    maps += linear(count * values, d) + elementwise(count * sliding)
    heads = Heads(count, (keys + values) // 2, kv)
    return Sublayer({"attention": maps}, heads, 2 * (count + kv) * keys)
