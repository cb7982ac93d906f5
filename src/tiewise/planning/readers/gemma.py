"""Gemma 3n and 4: tables per layer, reused keys and values, and several shapes of heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tiewise.core.errors import PlanError
from tiewise.planning.architecture import Architecture, Count, Heads, elementwise, linear, norm
from tiewise.planning.config import Config, is_integer
from tiewise.planning.model_families import Experts, read_heads, register_reader
from tiewise.planning.readers.parts import (
    FULL,
    SLIDING,
    Layer,
    Sublayer,
    attention,
    experts_part,
    ffn,
    layer_kinds,
    mixed_decoder,
)


def _kinds(config: Config, every: int) -> list[str]:
    """Return the kind of each layer; by default every few attend to the full length."""
    layers = config.size("num_hidden_layers")
    usual = [FULL if (index + 1) % every == 0 else SLIDING for index in range(layers)]
    return layer_kinds(config, otherwise=usual)


def _first_reusing(config: Config) -> int:
    """Return the index of the first layer that has no keys and values."""
    return config.size("num_hidden_layers") - config.size("num_kv_shared_layers", 0, least=0)


def _attention(d: int, heads: Heads, bias: bool, reuses: bool, keys_are_values: bool = False) -> Sublayer:
    """Count attention with norms of queries and keys.

    Args:
        d: width of the model.
        heads: shape of the heads.
        bias: the maps have biases.
        reuses: the layer uses the keys and values of an earlier one.
        keys_are_values: one map gives both.
    """
    both = attention(d, heads, bias=bias, norms=2 * heads.width)
    keys = linear(d, heads.kv * heads.width, bias)
    if reuses:
        return replace(both, counts={"attention": _less(both.counts["attention"], keys.times(2), heads.width)})
    if keys_are_values:
        return replace(both, counts={"attention": _less(both.counts["attention"], keys, 0)})
    return both


def _less(count: Count, missing: Count, norms: int) -> Count:
    """Return a count without some maps and norms."""
    missing += elementwise(norms)
    return Count(
        count.parameters - missing.parameters, count.multiplied - missing.multiplied, count.read - missing.read
    )


def _widths(config: Config) -> list[int]:
    """Return the width of each layer's feed-forward part, from one number or a list."""
    layers, widths = config.size("num_hidden_layers"), config.get("intermediate_size")
    if not isinstance(widths, list):
        return [config.size("intermediate_size")] * layers
    if len(widths) != layers or not all(is_integer(width) and width > 0 for width in widths):
        raise PlanError(
            f"intermediate_size of {config.family} is a list of {len(widths)}", "give one width for each layer"
        )
    return widths


@register_reader("gemma3n")
def _gemma3n(config: Config) -> Architecture:
    """Read a Gemma 3n: several residual streams (AltUp), and a low-rank path next to each layer."""
    d, heads, streams = config.size("hidden_size"), read_heads(config), config.size("altup_num_inputs")
    rank, per_layer = config.size("laurel_rank"), config.size("hidden_size_per_layer_input")
    bias, first = config.flag("attention_bias"), _first_reusing(config)
    laurel = linear(d, rank) + linear(rank, d)
    altup = elementwise(d) + linear(streams, streams) + linear(streams, streams**2) + linear(d, streams)
    layers = []
    for index, width in enumerate(_widths(config)):
        mixer = _attention(d, heads, bias, index >= first)
        # norms: four around the sublayers, and one each of the low-rank path, the streams and the table's row
        layers.append(Layer(mixer, ffn(d, width), norms=7, other=laurel + altup))
    around = {"maps": linear(d, d).times(2 * (streams - 1)), "embedding_norm": norm(per_layer, "rms")}
    return mixed_decoder(config, layers, around)


@register_reader("gemma4")
def _gemma4(config: Config) -> Architecture:
    """Read a Gemma 4."""
    first, per_layer = _first_reusing(config), config.size("hidden_size_per_layer_input", 0, least=0)
    kinds = _kinds(config, every=6)
    kinds[-1] = FULL  # whatever the config says
    layers = []
    for index, heads in enumerate(_gemma4_heads(config, kinds)):
        keys_are_values = config.flag("attention_k_eq_v") and kinds[index] == FULL
        reuses = index >= first
        mixer = _attention(config.width, heads, config.flag("attention_bias"), reuses, keys_are_values)
        layers.append(_gemma4_layer(config, mixer, reuses, bool(per_layer)))
    around = {"embedding_norm": norm(per_layer, "rms").times(int(per_layer > 0))}
    return mixed_decoder(config, layers, around)


def _gemma4_layer(config: Config, mixer: Sublayer, reuses: bool, has_row: bool) -> Layer:
    """Return one layer of a Gemma 4.

    Args:
        config: the model's config.
        mixer: its attention.
        reuses: the layer uses the keys and values of an earlier one, and may have a feed-forward part twice as wide.
        has_row: the layer has a row of the per-layer table for each token.
    """
    d, width = config.size("hidden_size"), config.size("intermediate_size")
    if reuses and config.flag("use_double_wide_mlp"):
        width *= 2
    plain, norms = ffn(d, width), 4 + has_row
    if not config.flag("enable_moe_block"):
        return Layer(mixer, plain, norms)
    experts = Experts(config.size("num_experts"), config.size("top_k_experts"), config.size("moe_intermediate_size"))
    routed = experts_part(d, experts)
    scales = elementwise(d + experts.count)  # of the router's input, and of each expert's output
    counts = {**plain.counts, **routed.counts, "router": routed.counts["router"] + scales}
    return Layer(mixer, Sublayer(counts, saved=plain.saved + routed.saved), norms + 3)


def _gemma4_heads(config: Config, kinds: list[str]) -> list[Heads]:
    """Return the heads of each layer.

    Full attention may have wider heads and fewer heads of keys and values. A config that transformers 5.23 saves lists
    the sizes of such layers by number, and its keys for full attention do not count.
    """
    listed = config.get("per_layer_config")
    if isinstance(listed, Mapping):
        return [read_heads(_at_layer(config, listed, index)) for index in range(len(kinds))]
    usual = read_heads(config)
    kv = usual.kv
    if config.flag("attention_k_eq_v"):
        kv = config.size("num_global_key_value_heads", kv)
    full = replace(usual, kv=kv, width=config.size("global_head_dim", 512))
    return [full if kind == FULL else usual for kind in kinds]


def _at_layer(config: Config, listed: Mapping[Any, Any], index: int) -> Config:
    """Return the config of one layer: the model's, with the listed values of this layer."""
    changed = listed.get(str(index), listed.get(index))
    if not isinstance(changed, Mapping):
        return config
    return Config({**config.values, **changed}, config.family)
