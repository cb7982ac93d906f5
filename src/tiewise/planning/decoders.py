"""Decoders: what transformers' class of a model type builds, to the parameter, as one row of a table.

Sources: the modeling files of transformers 5.23. `DECODERS` has a row per model type, which `decoder` reads; the
state-space model, which has no attention, is read by `mamba`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tiewise.core.errors import PlanError
from tiewise.core.first_loss import ACTIVATIONS, FreshBody
from tiewise.planning.architecture import (
    AppliedLayers,
    Architecture,
    Count,
    Counts,
    Heads,
    LayerCounts,
    elementwise,
    even,
    feed_forward,
    linear,
    lookup,
    norm,
)
from tiewise.planning.config import Config

Switch = bool | str  # whether, or the key of the config that says so
Row = Callable[[Config], "DecoderFamily"]


@dataclass(frozen=True)
class DecoderFamily:
    """How a model type is built: without arguments, a Llama that has no biases."""

    bias: Switch = False  # of queries, keys and values
    out_bias: Switch | None = None  # of attention's output; None: as theirs
    ffn_bias: Switch = False
    gated: bool = True  # whether the ffn has a gate
    ffn_width: str = "intermediate_size"  # 4 D where the config says null
    grouped: bool = True  # whether the config may set the heads of keys and values, and a head's width
    heads: Heads | None = None  # where other keys say them
    maps: Count | None = None  # where attention is another than query, key, value and output
    query_norms: int | str = 0  # parameters of queries' and keys' norms, or sinks; or what one norm is over
    norm: str = "rms"
    norms: str = "two"  # of a layer: two, four (of each sublayer's output too) or one that both sublayers read
    parallel: Switch = False  # whether both sublayers read the same state
    final_norm: bool = True
    embedding_norm: bool = False
    positions: int | str = 0  # learned positions
    table_width: int | None = None  # another than D: linear maps without bias stand between (OPT-350M)
    head_bias: bool = False
    experts: Experts | None = None
    # What a fresh body has besides; None where no measurement held its first loss against the prediction.
    fresh: Mapping[str, Any] | None = field(default_factory=dict)


@dataclass(frozen=True)
class Experts:
    """A router and `count` experts, of which a token uses `chosen`; perhaps a shared expert, perhaps behind a gate."""

    count: int
    chosen: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    shared_bias: bool = False
    bias: bool = False
    dense: frozenset[int] = frozenset()  # layers with a plain ffn in their place

    def counts(self, d: int) -> Counts:
        """Count in a model of width `d`."""
        router = linear(d, self.count, self.bias)
        expert = feed_forward(d, self.width, bias=self.bias)
        shared = feed_forward(d, self.shared_width, bias=self.shared_bias)
        return {
            "experts": expert.times(self.count, min(self.chosen, self.count)),
            "router": router + linear(d, 1) if self.shared_gate else router,
            "shared_experts": shared if self.shared_width else Count(),
        }


def heads_of(c: Config, grouped: bool = True) -> Heads:
    """Heads by the usual keys; a head's width defaults to D / heads.

    Raises:
        PlanError: the sizes contradict each other.
    """
    d, count = c.size("hidden_size"), c.size("num_attention_heads")
    if not grouped:
        return Heads(count, even(d, count), count)
    kv = c.size("num_key_value_heads", count)
    if count % kv:
        what = f"{count} attention heads cannot be grouped over num_key_value_heads = {kv}"
        raise PlanError(what, "the key-value heads must divide the heads")
    return Heads(count, c.size("head_dim") if c.get("head_dim") is not None else even(d, count), kv)


GPT2 = DecoderFamily(bias=True, ffn_bias=True, gated=False, grouped=False, norm="layer")
NEO = replace(GPT2, bias=False)
LLAMA = DecoderFamily("attention_bias", ffn_bias="mlp_bias")
QWEN3 = DecoderFamily("attention_bias", query_norms="one head")
OLMO2 = DecoderFamily("attention_bias", query_norms="all heads", fresh=None)
DECODERS: dict[str, DecoderFamily | Row] = {
    "gptj": replace(NEO, norms="one", parallel=True, head_bias=True),
    "gpt_neox": replace(GPT2, bias="attention_bias", parallel="use_parallel_residual"),
    "bloom": replace(GPT2, embedding_norm=True, fresh=None),
    "mpt": replace(NEO, ffn_bias=False, norm="layer without bias", fresh=None),
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": DecoderFamily(bias=True, out_bias=False),
    "qwen3": QWEN3,
    "phi3": LLAMA,
    "olmo": DecoderFamily("attention_bias", norm="none"),
    "olmo2": OLMO2,
    "olmo3": OLMO2,
    "glm": DecoderFamily("attention_bias", out_bias=False),
    "ernie4_5": DecoderFamily("use_bias", ffn_bias="use_bias"),
    "starcoder2": DecoderFamily("use_bias", ffn_bias="use_bias", gated=False, norm="layer"),
    "smollm3": LLAMA,
}


def family(*types: str) -> Callable[[Row], Row]:
    """Register what makes the row of these model types from their config."""

    def register(row: Row) -> Row:
        DECODERS.update(dict.fromkeys(types, row))
        return row

    return register


@family("gpt2", "gpt_bigcode")
def _gpt2(c: Config) -> DecoderFamily:
    heads = replace(heads_of(c, grouped=False), kv=1) if c.flag("multi_query") else None  # GPT-BigCode
    fresh = {"positions_std": c.number("initializer_range", 0.02), "depth_scaled": True}
    return replace(GPT2, heads=heads, positions="n_positions", fresh=fresh)


@family("gpt_neo")
def _gpt_neo(c: Config) -> DecoderFamily:
    fresh = {"positions_std": c.number("initializer_range", 0.02), "attention_scale": 1.0}
    return replace(NEO, out_bias=True, positions="max_position_embeddings", fresh=fresh)


@family("opt")
def _opt(c: Config) -> DecoderFamily:
    width, before, std = c.size("hidden_size"), c.flag("do_layer_norm_before"), c.number("init_std", 0.02)
    table_width = c.size("word_embed_proj_dim", width)
    return replace(
        GPT2,
        bias="enable_bias",
        ffn_bias="enable_bias",
        norm="layer" if c.flag("layer_norm_elementwise_affine") else "none",
        final_norm=before and not c.flag("_remove_final_layer_norm"),
        positions=c.size("max_position_embeddings") + 2,
        table_width=table_width,
        fresh={"std": std, "positions_std": std} if before and table_width == width else None,
    )


@family("granite")
def _granite(c: Config) -> DecoderFamily:
    scales = {
        "input_scale": c.number("embedding_multiplier", 1.0),
        "output_scale": 1 / c.number("logits_scaling", 1.0),
        "residual_scale": c.number("residual_multiplier", 1.0),
        "attention_scale": c.number("attention_multiplier", 1.0),
    }
    return replace(LLAMA, fresh=scales)


@family("gemma", "gemma2", "gemma3_text")
def _gemma(c: Config) -> DecoderFamily:
    fresh = {"input_scale": math.sqrt(c.size("hidden_size"))}
    if c.family == "gemma":
        return DecoderFamily("attention_bias", fresh=fresh)
    if c.get("final_logit_softcapping") is not None:
        fresh["softcap"] = c.number("final_logit_softcapping")
    fresh["attention_scale"] = c.number("query_pre_attn_scalar") ** -0.5
    query_norms = "one head" if c.family == "gemma3_text" else 0
    return DecoderFamily("attention_bias", query_norms=query_norms, norms="four", fresh=fresh)


@family("phi")
def _phi(c: Config) -> DecoderFamily:
    query_norms = 4 * heads_of(c).width if c.flag("qk_layernorm") else 0
    biased = DecoderFamily(True, ffn_bias=True, gated=False, norm="layer", head_bias=True)
    return replace(biased, query_norms=query_norms, norms="one", parallel=True)


@family("falcon")
def _falcon(c: Config) -> DecoderFamily:
    heads, new = heads_of(c, grouped=False), c.flag("new_decoder_architecture")
    kv_heads = c.size("num_kv_heads", heads.count) if new else 1 if c.flag("multi_query") else heads.count
    two = not c.flag("parallel_attn") or c.size("num_ln_in_parallel_attn", 2 if new else 1) == 2
    return DecoderFamily(
        "bias",
        ffn_bias="bias",
        gated=False,
        ffn_width="ffn_hidden_size",
        heads=replace(heads, kv=kv_heads),
        norm="layer",
        norms="two" if two else "one",
        parallel="parallel_attn",
    )


@family("cohere", "cohere2")
def _cohere(c: Config) -> DecoderFamily:
    query_norms = "all heads" if c.flag("use_qk_norm") else 0
    one = DecoderFamily("attention_bias", norm="layer without bias", norms="one", parallel=True)
    return replace(one, query_norms=query_norms, fresh={"output_scale": c.number("logit_scale")})


@family("stablelm")
def _stablelm(c: Config) -> DecoderFamily:
    query_norms = "all heads" if c.flag("qk_layernorm") else 0
    norms = "one" if c.flag("use_parallel_residual") else "two"
    plain = DecoderFamily("use_qkv_bias", out_bias=False, norm="layer", parallel="use_parallel_residual")
    return replace(plain, query_norms=query_norms, norms=norms)


def _experts(c: Config, count: str, width: str, **more: Any) -> Experts:
    return Experts(c.size(count), c.size("num_experts_per_tok"), c.size(width), **more)


@family("qwen2_moe", "qwen3_moe")
def _qwen_moe(c: Config) -> DecoderFamily:
    """Read experts in every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    step, only = c.size("decoder_sparse_step"), c.indices("mlp_only_layers")
    dense = frozenset(i for i in range(c.size("num_hidden_layers")) if i in only or (i + 1) % step)
    if c.family == "qwen3_moe":
        return replace(QWEN3, experts=_experts(c, "num_experts", "moe_intermediate_size", dense=dense), fresh=None)
    shared = {"shared_width": c.size("shared_expert_intermediate_size"), "shared_gate": True}
    experts = _experts(c, "num_experts", "moe_intermediate_size", dense=dense, **shared)
    return DecoderFamily("qkv_bias", out_bias=False, experts=experts, fresh=None)


@family("mixtral")
def _mixtral(c: Config) -> DecoderFamily:
    return DecoderFamily(experts=_experts(c, "num_local_experts", "intermediate_size"), fresh=None)


@family("gpt_oss")
def _gpt_oss(c: Config) -> DecoderFamily:
    experts = _experts(c, "num_local_experts", "intermediate_size", bias=True)
    sinks = c.size("num_attention_heads")  # one a head
    return DecoderFamily("attention_bias", query_norms=sinks, experts=experts, fresh=None)


@family("llama4_text")
def _llama4(c: Config) -> DecoderFamily:
    layers, step, width = c.size("num_hidden_layers"), c.size("interleave_moe_layer_step"), c.size("intermediate_size")
    sparse = range(step - 1, layers, step) if c.get("moe_layers") is None else c.indices("moe_layers")
    dense = frozenset(range(layers)).difference(sparse)
    experts = _experts(c, "num_local_experts", "intermediate_size", shared_width=width, dense=dense)
    return DecoderFamily("attention_bias", ffn_width="intermediate_size_mlp", experts=experts, fresh=None)


@family("deepseek_v2", "deepseek_v3")
def _deepseek(c: Config) -> DecoderFamily:
    """Read keys and values through a narrow latent state; queries too, where `q_lora_rank` is not 0."""
    d, count = c.size("hidden_size"), c.size("num_attention_heads")
    q_rank, kv_rank = c.size("q_lora_rank", 0, least=0), c.size("kv_lora_rank")
    # a head's keys are `nope` wide and `rope` more that all heads share
    nope, rope, value = (c.size(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    bias, queries = c.flag("attention_bias"), count * (nope + rope)
    keys = linear(d, kv_rank + rope, bias) + elementwise(kv_rank) + linear(kv_rank, count * (nope + value))
    narrow = linear(d, q_rank, bias) + elementwise(q_rank) + linear(q_rank, queries)
    maps = keys + linear(count * value, d, bias) + (narrow if q_rank else linear(d, queries))
    routed, width = c.size("n_routed_experts"), c.size("moe_intermediate_size")
    ffn_bias = c.family == "deepseek_v2" and c.flag("mlp_bias")  # of dense and shared ffns; version 3 has none
    experts = Experts(
        routed,
        c.size("num_experts_per_tok", routed),
        width,
        shared_width=c.size("n_shared_experts", 0, least=0) * width,
        shared_bias=ffn_bias,
        dense=frozenset(range(min(c.size("num_hidden_layers"), c.size("first_k_dense_replace", 0, least=0)))),
    )
    heads = Heads(count, (nope + rope + value) // 2, count, latent=kv_rank + rope)  # the mean of keys and values
    return DecoderFamily(heads=heads, maps=maps, ffn_bias=ffn_bias, experts=experts, fresh=None)


def decoder(c: Config) -> Architecture:
    """Read a decoder whose model type is in `DECODERS`."""
    row = DECODERS[c.family]
    f = row(c) if callable(row) else row
    d, layers = c.size("hidden_size"), c.size("num_hidden_layers")
    ffn = c.size(f.ffn_width, 4 * d)
    heads = f.heads or heads_of(c, f.grouped)
    theirs = {"one head": 2 * heads.width, "all heads": (heads.count + heads.kv) * heads.width}
    query_norms = theirs[f.query_norms] if isinstance(f.query_norms, str) else f.query_norms
    out_bias = f.bias if f.out_bias is None else f.out_bias
    maps = f.maps or heads.maps(d, c.flag(f.bias), c.flag(out_bias), query_norms)
    of_attention, of_ffn, of_both = {"one": (0, 0, 1), "two": (1, 1, 0), "four": (2, 2, 0)}[f.norms]
    attention = {"attention": maps, "norms": norm(d, f.norm, of_attention)}
    dense = {"ffn": feed_forward(d, ffn, f.gated, c.flag(f.ffn_bias)), "norms": norm(d, f.norm, of_ffn)}
    sparse = {**f.experts.counts(d), "norms": norm(d, f.norm, of_ffn)} if f.experts else dense
    both = {"norms": norm(d, f.norm, of_both)}
    of_plain_ffn = f.experts.dense if f.experts else ()
    middle = f.experts.width * f.experts.chosen + f.experts.shared_width if f.experts else ffn
    stack = AppliedLayers(
        "decoder",
        tuple(LayerCounts(attention, dense if i in of_plain_ffn else sparse, both) for i in range(layers)),
        {
            "positions": lookup(c.size(f.positions) if isinstance(f.positions, str) else f.positions, d),
            "embedding_norm": norm(d, f.norm, int(f.embedding_norm)),
            "norms": norm(d, f.norm, int(f.final_norm)),
        },
        heads,
        # inputs of products, of norms and activations
        4 * d + 2 * (heads.count + heads.kv) * heads.width + middle * (3 if f.gated else 2),
    )
    table_width = f.table_width or d
    between = linear(table_width, d).times(2) if table_width != d else Count()
    ends = c.token_tables(table_width, maps=between, head_biases=int(f.head_bias))
    fresh = None if f.fresh is None else _fresh(c, f, heads, ffn, query_norms > 0)
    return Architecture(c.family, d, ends, (stack,), fresh=fresh)


def _fresh(c: Config, f: DecoderFamily, heads: Heads, ffn: int, normed_queries: bool) -> FreshBody | None:
    """Return the scales of a freshly drawn body; None where its activation is not followed."""
    keys = ("hidden_activation", "hidden_act", "activation_function", "activation")
    activation = next(filter(None, map(c.text, keys)), "")
    if activation not in ACTIVATIONS:
        return None
    arrangement = "parallel" if c.flag(f.parallel) else "sandwich" if f.norms == "four" else "sequential"
    drawn = {"std": c.number("initializer_range", 0.02), **(f.fresh or {})}
    return FreshBody(
        heads=heads.count,
        kv_heads=heads.kv,
        head_dim=heads.width,
        ffn=ffn,
        layers=c.size("num_hidden_layers"),
        activation=activation,
        gated=f.gated,
        arrangement=arrangement,
        normed_queries=normed_queries,
        **drawn,
    )


def mamba(c: Config) -> Architecture:
    """Read Mamba: a gated convolution and a selective state space per layer, where others attend, and no ffn."""
    d, state, kernel = c.size("hidden_size"), c.size("state_size"), c.size("conv_kernel")
    inner = int(c.number("expand") * d)
    rank = -(-d // 16) if c.get("time_step_rank") == "auto" else c.size("time_step_rank")
    bias = c.flag("use_bias")
    convolution = Count(inner * kernel, inner * kernel, inner * kernel)
    mixer = linear(d, 2 * inner, bias) + convolution + linear(inner, rank + 2 * state)
    mixer += linear(rank, inner, True) + linear(inner, d, bias)
    mixer += elementwise(inner * state + inner + (inner if c.flag("use_conv_bias") else 0))
    layers = (LayerCounts({"mixer": mixer, "norms": norm(d, "rms")}, {}),) * c.size("num_hidden_layers")
    heads = Heads(state=inner * (state + kernel))
    stack = AppliedLayers("decoder", layers, {"norms": norm(d, "rms")}, heads, 2 * d + 6 * inner)
    return Architecture(c.family, d, c.token_tables(d), (stack,))
