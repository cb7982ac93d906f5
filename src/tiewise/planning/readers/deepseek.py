"""DeepSeek V3.2 and V4: attention that an indexer or a compressor makes sparse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tiewise.core.errors import PlanError
from tiewise.planning.architecture import Architecture, Count, Heads, elementwise, linear, norm
from tiewise.planning.config import Config
from tiewise.planning.model_families import (
    Experts,
    read_latent_attention,
    read_routed_experts,
    register_reader,
)
from tiewise.planning.readers.parts import (
    DENSE,
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

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {CSA: 4, HCA: 128}  # tokens per compressed entry, by default
OF_RATE = {0: SLIDING, 4: CSA, 128: HCA}  # older configs list a rate for each layer


def indexer(config: Config) -> Count:
    """Count the maps that score past tokens, with a LayerNorm of the keys."""
    d, heads, width = config.size("hidden_size"), config.size("index_n_heads"), config.size("index_head_dim")
    return linear(config.size("q_lora_rank"), heads * width) + linear(d, width) + norm(width) + linear(d, heads)


def dense_first(config: Config) -> list[str]:
    """Return the kind of each layer's feed-forward part: dense in the first layers, then sparse."""
    return ffn_kinds(config, config.size("first_k_dense_replace", 0, least=0))


@register_reader("latent")
def _latent(config: Config) -> Architecture:
    """Read GLM-4.7 Flash, a DeepSeek V3 with a list of dense and sparse layers."""
    return latent_decoder(config, ffn_kinds(config, dense=1), [False] * config.size("num_hidden_layers"))


@register_reader("indexed")
def _indexed(config: Config) -> Architecture:
    """Read DeepSeek V3.2, a V3 with an indexer in each layer."""
    has_indexer = [True] * config.size("num_hidden_layers")
    return latent_decoder(config, dense_first(config), has_indexer, rerouted_experts(config))


def rerouted_experts(config: Config) -> Experts:
    """Read experts of a class in which the older key `num_experts` replaces `n_routed_experts`."""
    experts = read_routed_experts(config)
    return replace(experts, count=config.size("num_experts", experts.count))


def latent_decoder(
    config: Config, kinds: Sequence[str], has_indexer: Sequence[bool], experts: Experts | None = None
) -> Architecture:
    """Return a decoder with latent keys and values.

    Args:
        config: the model's config.
        kinds: kind of each layer's feed-forward part, dense or sparse.
        has_indexer: which layers have an indexer.
        experts: its experts; None: those of DeepSeek's usual keys.
    """
    d, latent = config.size("hidden_size"), read_latent_attention(config)
    routed = experts_part(d, experts or read_routed_experts(config))
    ffns = {SPARSE: routed, DENSE: ffn(d, config.size("intermediate_size"))}
    layers = []
    for kind, indexes in zip(kinds, has_indexer, strict=True):
        maps = latent.maps
        if indexes:
            maps += indexer(config)
        mixer = Sublayer({"attention": maps}, latent.heads, 2 * latent.heads.count * latent.heads.width)
        layers.append(Layer(mixer, choose(ffns, kind, config)))
    return mixed_decoder(config, layers)


@register_reader("deepseek_v4")
def _deepseek_v4(config: Config) -> Architecture:
    """Read V4: one head of keys and values, compressed entries, and several residual streams."""
    d, streams = config.size("hidden_size"), config.size("hc_mult")
    mixers = _v4_mixers(config)
    width = config.size("moe_intermediate_size")
    count, chosen = config.size("n_routed_experts"), config.size("num_experts_per_tok")
    routed = experts_part(d, Experts(count, chosen, width, width, shared_bias=config.flag("mlp_bias")))
    mixing = (2 + streams) * streams
    connection = linear(streams * d, mixing) + elementwise(mixing + 3)
    head = linear(streams * d, streams) + elementwise(streams + 1)
    layers = []
    for kind in _v4_kinds(config):
        layers.append(Layer(choose(mixers, kind, config), routed, other=connection.times(2)))
    return mixed_decoder(config, layers, {"other": head})


def _v4_kinds(config: Config) -> list[str]:
    """Return the kind of each layer's attention.

    The config lists kinds or rates of compression, or the class has a default.
    """
    layers = config.size("num_hidden_layers")
    usual = [HCA] * min(2, layers) + [CSA if index % 2 else HCA for index in range(max(0, layers - 2))]
    rates = config.get("compress_ratios")
    if config.get("layer_types") is None and isinstance(rates, list):
        unknown = [rate for rate in rates if rate not in OF_RATE]
        if unknown:
            raise PlanError(f"compress_ratios has {str(unknown[0])[:40]!r}", "choose from 0, 4 and 128")
        usual = [OF_RATE[rate] for rate in rates][:layers]
    return layer_kinds(config, otherwise=usual)


def _v4_mixers(config: Config) -> dict[str, Sublayer]:
    """Return the attention of each kind of layer."""
    d, count, width = config.size("hidden_size"), config.size("num_attention_heads"), config.size("head_dim")
    rank, groups, out_rank = config.size("q_lora_rank"), config.size("o_groups"), config.size("o_lora_rank")
    queries = linear(d, rank) + elementwise(rank) + linear(rank, count * width)
    keys = linear(d, width) + elementwise(width)
    # each of the groups of heads has a separate map to its part of the output's latent state
    output = linear(count * width // groups, groups * out_rank) + linear(groups * out_rank, d)
    maps = queries + keys + output + elementwise(count)
    heads = Heads(count, width, 1, latent=width)
    compressors = {SLIDING: Count(), HCA: _compressor(config, HCA, d, width)}
    index_heads, index_width = config.size("index_n_heads"), config.size("index_head_dim")
    scores = linear(rank, index_heads * index_width) + linear(d, index_heads)
    indexing = _compressor(config, CSA, d, index_width, doubled=True) + scores
    compressors[CSA] = _compressor(config, CSA, d, width, doubled=True) + indexing
    mixers = {}
    for kind, compressor in compressors.items():
        mixers[kind] = Sublayer({"attention": maps + compressor}, heads, 2 * (count + 1) * width)
    return mixers


def _compressor(config: Config, kind: str, d: int, width: int, doubled: bool = False) -> Count:
    """Count the maps that compress several tokens to one entry.

    They are values, gates, positions within the entry, and a norm.
    """
    rates = config.get("compress_rates")
    rate = RATES[kind]
    if isinstance(rates, dict):
        rate = Config(rates, config.family).size(kind)
    legacy = {CSA: "compress_rate_csa", HCA: "compress_rate_hca"}[kind]
    rate = config.size(legacy, rate)
    wide = 2 * width if doubled else width
    return linear(d, wide).times(2) + elementwise(rate * wide + width)
