"""Decoders of state-space, convolution and attention layers: Nemotron-H, Granite 4, Bamba, Zamba2, LFM2, Jamba."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from tiewise.planning.architecture import Architecture, Count, Heads, elementwise, feed_forward, linear, norm
from tiewise.planning.config import Config
from tiewise.planning.model_families import Experts, read_experts, read_heads, register_reader
from tiewise.planning.readers.parts import (
    FULL,
    LINEAR,
    Layer,
    Mamba2Shape,
    Sublayer,
    attention,
    choose,
    depthwise,
    experts_part,
    ffn,
    layer_kinds,
    mamba2,
    mixed_decoder,
    short_convolution,
)

NEMOTRON_LETTERS = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}
CONV, HYBRID = "conv", "hybrid"
ZAMBA2_KINDS = [
    LINEAR,
    *([LINEAR] * 5 + [HYBRID]) * 7,
    *[LINEAR] * 4,
    HYBRID,
    *[LINEAR] * 3,
    HYBRID,
    *[LINEAR] * 2,
]


def _usual_mamba2(config: Config) -> Sublayer:
    """Count Mamba 2 with the keys of Bamba and Granite."""
    d = config.size("hidden_size")
    shape = Mamba2Shape(
        inner=int(config.number("mamba_expand") * d),
        heads=config.size("mamba_n_heads"),
        groups=config.size("mamba_n_groups"),
        state=config.size("mamba_d_state"),
        kernel=config.size("mamba_d_conv"),
        bias=config.flag("mamba_proj_bias"),
        conv_bias=config.flag("mamba_conv_bias"),
    )
    return mamba2(d, shape)


@register_reader("nemotron_h")
def _nemotron_h(config: Config) -> Architecture:
    """Read a Nemotron-H, whose layers are one sublayer each.

    A sublayer is Mamba 2, attention, a feed-forward part, or experts.
    """
    d = config.size("hidden_size")
    shape = Mamba2Shape(
        inner=config.size("mamba_num_heads") * config.size("mamba_head_dim"),
        heads=config.size("mamba_num_heads"),
        groups=config.size("mamba_n_groups", config.size("n_groups")),
        state=config.size("ssm_state_size"),
        kernel=config.size("mamba_d_conv", config.size("conv_kernel")),
        bias=config.flag("use_bias"),
        conv_bias=bool(config.get("mamba_conv_bias", config.flag("use_conv_bias"))),
    )
    bias = config.flag("mlp_bias")
    sublayers = {
        LINEAR: mamba2(d, shape),
        FULL: attention(d, read_heads(config)),  # its class ignores `attention_bias`
        "mlp": ffn(d, config.size("intermediate_size"), gated=False, bias=bias),
    }
    kinds = _nemotron_kinds(config)
    if "moe" in kinds:
        sublayers["moe"] = experts_part(d, _nemotron_experts(config, bias))
    return mixed_decoder(config, (Layer(choose(sublayers, kind, config), norms=1) for kind in kinds))


def _nemotron_kinds(config: Config) -> list[str]:
    """Return the kind of each layer, from a list or from a pattern of letters."""
    pattern = config.get("hybrid_override_pattern")
    if config.get("layers_block_type") is not None or not isinstance(pattern, str):
        kinds = config.get("layers_block_type")
        return layer_kinds(_without_depth(config, kinds), "layers_block_type", [LINEAR, "moe", FULL, "mlp"])
    kinds = [NEMOTRON_LETTERS.get(letter, letter) for letter in pattern]
    return layer_kinds(_without_depth(config, kinds), "layers_block_type")


def _without_depth(config: Config, kinds: list[str] | None) -> Config:
    """Return the config with this list of kinds.

    It has no number of layers, which the class ignores.
    """
    values = {**config.values, "layers_block_type": kinds, "num_hidden_layers": None}
    return Config(values, config.family)


def _nemotron_experts(config: Config, bias: bool) -> Experts:
    """Return experts without gates, which may work in a latent state narrower than the model."""
    experts = read_experts(config, "n_routed_experts", "moe_intermediate_size")
    return replace(
        experts,
        shared_width=config.size("moe_shared_expert_intermediate_size"),
        shared_bias=bias,
        gated=False,
        latent=config.size("moe_latent_size", 0, least=0),
        latent_bias=bias,
    )


@register_reader("granite_hybrid")
def _granite_hybrid(config: Config) -> Architecture:
    """Read a Granite 4: Mamba 2 or attention, then a plain part next to optional experts."""
    d, layers = config.size("hidden_size"), config.size("num_hidden_layers")
    heads = attention(d, read_heads(config), bias=config.flag("attention_bias"))
    after = ffn(d, config.size("shared_intermediate_size"))
    count = config.size("num_local_experts", 0, least=0)
    if count:
        experts = Experts(count, config.size("num_experts_per_tok"), config.size("intermediate_size"))
        routed = experts_part(d, experts)
        shared = {"shared_experts": after.counts["ffn"]}
        after = Sublayer({**routed.counts, **shared}, saved=after.saved + routed.saved)
    mixers = {FULL: heads}
    kinds = layer_kinds(config, otherwise=[LINEAR] * layers)
    if LINEAR in kinds:
        mixers[LINEAR] = _usual_mamba2(config)
    return mixed_decoder(config, (Layer(choose(mixers, kind, config), after) for kind in kinds))


@register_reader("bamba")
def _bamba(config: Config) -> Architecture:
    d = config.size("hidden_size")
    heads = attention(d, read_heads(config), bias=config.flag("attention_bias"))
    attending, mixer = config.indices("attn_layer_indices"), _usual_mamba2(config)
    after = ffn(d, config.size("intermediate_size"), bias=config.flag("mlp_bias"))
    layers = []
    for index in range(config.size("num_hidden_layers")):
        layers.append(Layer(heads if index in attending else mixer, after))
    return mixed_decoder(config, layers)


@register_reader("jamba")
def _jamba(config: Config) -> Architecture:
    """Read a Jamba: Mamba or attention, then a plain part or experts."""
    d, heads = config.size("hidden_size"), read_heads(config)
    attending, mixer = attention(d, heads), _jamba_mamba(config)
    plain = ffn(d, config.size("intermediate_size"))
    experts = experts_part(d, read_experts(config, "num_experts"))
    has_experts = config.size("num_experts") > 1
    layers = []
    for index in range(config.size("num_hidden_layers")):
        attends, is_sparse = _is_turn(config, "attn_layer", index), _is_turn(config, "expert_layer", index)
        after = experts if has_experts and is_sparse else plain
        layers.append(Layer(attending if attends else mixer, after))
    return mixed_decoder(config, layers)


def _is_turn(config: Config, name: str, index: int) -> bool:
    """Return whether a layer is one of every `<name>_period`, beginning at `<name>_offset`."""
    return index % config.size(f"{name}_period") == config.size(f"{name}_offset", least=0)


def _jamba_mamba(config: Config) -> Sublayer:
    """Count a Mamba layer with norms of the time step and of the state's maps."""
    d, state, kernel = config.size("hidden_size"), config.size("mamba_d_state"), config.size("mamba_d_conv")
    inner, bias = config.size("mamba_expand") * d, config.flag("mamba_proj_bias")
    rank = math.ceil(d / 16) if config.get("mamba_dt_rank") == "auto" else config.size("mamba_dt_rank")
    mixer = linear(d, 2 * inner, bias) + depthwise(inner, kernel, config.flag("mamba_conv_bias"))
    mixer += linear(inner, rank + 2 * state) + linear(rank, inner, True) + linear(inner, d, bias)
    mixer += elementwise(inner * state + inner + rank + 2 * state)
    return Sublayer({"mixer": mixer}, Heads(state=inner * (state + kernel)), 6 * inner)


@register_reader("lfm2")
def _lfm2(config: Config) -> Architecture:
    """Read an LFM2, whose layers all attend unless the config lists kinds or indices of layers."""
    indices = range(config.size("num_hidden_layers"))
    attending = config.get("full_attn_idxs")
    if not isinstance(attending, list):
        attending = indices
    usual = [FULL if index in attending else CONV for index in indices]
    after = ffn(config.size("hidden_size"), _lfm2_width(config))
    layers = []
    for mixer in _lfm2_mixers(config, layer_kinds(config, otherwise=usual)):
        layers.append(Layer(mixer, after))
    return mixed_decoder(_with_older_flag(config), layers)


@register_reader("lfm2_moe")
def _lfm2_moe(config: Config) -> Architecture:
    """Read an LFM2 with experts. Its class builds no model without a list of kinds."""
    d, dense = config.size("hidden_size"), config.size("num_dense_layers", 0, least=0)
    plain = ffn(d, config.size("intermediate_size"))
    sparse = experts_part(d, read_experts(config, "num_experts", "moe_intermediate_size"))
    layers = []
    for index, mixer in enumerate(_lfm2_mixers(config, layer_kinds(config))):
        layers.append(Layer(mixer, plain if index < dense else sparse))
    return mixed_decoder(_with_older_flag(config), layers)


def _lfm2_mixers(config: Config, kinds: list[str]) -> list[Sublayer]:
    """Return the mixer of each layer: attention, or a short convolution."""
    d, heads = config.size("hidden_size"), read_heads(config)
    mixers = {
        FULL: attention(d, heads, norms=norm(heads.width, "rms", 2).parameters),
        CONV: short_convolution(d, config.size("conv_L_cache"), config.flag("conv_bias")),
    }
    return [choose(mixers, kind, config) for kind in kinds]


def _with_older_flag(config: Config) -> Config:
    """Return the config with the value of `tie_embedding` as its flag. The class prefers this older key."""
    if "tie_embedding" not in config.values:
        return config
    return Config({**config.values, "tie_word_embeddings": config.get("tie_embedding")}, config.family)


def _lfm2_width(config: Config) -> int:
    """Return the width of the feed-forward part, which the class derives from the config's."""
    width = config.size("block_ff_dim", config.size("intermediate_size"))
    if not config.flag("block_auto_adjust_ff_dim"):
        return width
    width = int(2 * width / 3)
    if config.get("block_ffn_dim_multiplier") is None:
        return width
    width, step = int(config.number("block_ffn_dim_multiplier") * width), config.size("block_multiple_of")
    return step * math.ceil(width / step)


@register_reader("zamba2")
def _zamba2(config: Config) -> Architecture:
    """Read a Zamba2: Mamba 2 in each layer, and blocks that some layers share."""
    d, kinds = config.size("hidden_size"), layer_kinds(config, "layers_block_type", ZAMBA2_KINDS)
    shape = Mamba2Shape(
        inner=int(config.number("mamba_expand") * d),
        heads=config.size("n_mamba_heads"),
        groups=config.size("mamba_ngroups"),
        state=config.size("mamba_d_state"),
        kernel=config.size("mamba_d_conv"),
        bias=config.flag("add_bias_linear"),
    )
    plain = Layer(mamba2(d, shape), norms=1)
    joined = replace(plain, other=linear(d, d))
    layers = [joined if kind == HYBRID else plain for kind in kinds]
    hybrid = kinds.count(HYBRID)
    return mixed_decoder(config, layers, {"other": _zamba2_blocks(config, hybrid)})


def _zamba2_blocks(config: Config, hybrid: int) -> Count:
    """Count the shared blocks: attention over a state twice as wide, and a feed-forward part.

    The flag ties the layers to the blocks. An untied model has a block for each layer, with the adapters of all layers
    that would share it.

    Args:
        config: the model's config.
        hybrid: number of layers that apply a block; each of them has separate adapters.
    """
    d, heads = config.size("hidden_size"), config.size("num_attention_heads")
    wide, width = config.size("attention_hidden_size", 2 * d), config.size("intermediate_size", 4 * d)
    kv, rank = config.size("num_key_value_heads", heads), config.size("adapter_rank")
    head_dim = config.size("attention_head_dim", 2 * d // heads)
    bias = config.flag("add_bias_linear")
    maps = linear(wide, heads * head_dim) + linear(wide, kv * head_dim).times(2) + linear(heads * head_dim, d)
    block = maps + feed_forward(d, width, gated=True, bias=bias) + norm(wide, "rms") + norm(d, "rms")
    adapters = linear(d, rank) + linear(rank, 2 * width)
    if config.flag("use_shared_attention_adapter"):
        adapters += (linear(wide, rank) + linear(rank, wide)).times(3)
    blocks = min(hybrid, config.size("num_mem_blocks"))
    if config.flag("tie_word_embeddings"):
        return block.times(blocks, hybrid) + adapters.times(hybrid)
    layers_of_block = Counter(layer % blocks for layer in range(hybrid))
    stored_adapters = sum(count**2 for count in layers_of_block.values())
    return block.times(hybrid) + adapters.times(stored_adapters, hybrid)
