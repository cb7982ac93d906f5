"""Exact readers: each turns the config of a family into an `Architecture`. Records of families name them.

Counts are what transformers 5.23 builds, to the parameter (its modeling files are the source). Nearly every decoder is
`decoder` with a few words of its own, and nearly every encoder is BERT, T5 or BART.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tiewise.checkpoint.family_record import Family
from tiewise.core.sharing_spec import SharingSpec
from tiewise.planning.architecture import (
    AppliedLayers,
    Architecture,
    Count,
    Counts,
    Heads,
    LayerCounts,
    TokenTables,
    elementwise,
    feed_forward,
    linear,
    lookup,
    norm,
)
from tiewise.planning.config import Config
from tiewise.planning.first_loss import ACTIVATIONS, FreshBody

# Decoders


@dataclass(frozen=True)
class Experts:
    """A router and `count` experts, of which a token uses `chosen`. Perhaps a shared expert, perhaps behind a gate."""

    count: int
    chosen: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    shared_bias: bool = False
    bias: bool = False
    dense: Collection[int] = ()  # layers with a plain ffn in their place

    def counts(self, d: int) -> Counts:
        """Count in a model of width `d`."""
        shared = feed_forward(d, self.shared_width, bias=self.shared_bias)
        return {
            "experts": feed_forward(d, self.width, bias=self.bias).times(self.count, min(self.chosen, self.count)),
            "router": linear(d, self.count, self.bias) + linear(d, 1).times(self.shared_gate),
            "shared_experts": shared.times(self.shared_width > 0),
        }


def experts_of(c: Config, count: str = "num_local_experts", width: str = "intermediate_size", **more: Any) -> Experts:
    """Read experts by these keys."""
    return Experts(c.size(count), c.size("num_experts_per_tok"), c.size(width), **more)


def heads_of(c: Config, grouped: bool = True) -> Heads:
    """Read heads by the usual keys; a head's width defaults to D / heads."""
    d, count = c.size("hidden_size"), c.size("num_attention_heads")
    if not grouped:
        return Heads.of(d, count)
    width = c.size("head_dim") if c.get("head_dim") is not None else None
    return Heads.of(d, count, c.size("num_key_value_heads", count), width)


Switch = bool | str  # on or off, or the key of the config that says so
Reader = Callable[..., Architecture]
NORMS = {"one": (0, 0, 1), "two": (1, 1, 0), "four": (2, 2, 0)}  # of attention, ffn, and what both read
AS_LLAMA: Mapping[str, Any] = {}  # options of a fresh body: none
ACTIVATION_KEYS = ("hidden_activation", "hidden_act", "activation_function", "activation")


def decoder(
    c: Config,
    *,
    bias: Switch = False,  # of queries, keys and values
    out_bias: Switch | None = None,  # of attention's output; None: as theirs
    ffn_bias: Switch = False,
    gated: bool = True,  # whether the ffn has a gate
    ffn_width: str = "intermediate_size",  # 4 D where the config says null
    grouped: bool = True,  # whether the config may set the heads of keys and values, and a head's width
    heads: Heads | None = None,  # where other keys say them
    maps: Count | None = None,  # where attention is another than query, key, value and output
    query_norms: str = "none",  # what a norm of queries, and one of keys, is over: one head, all heads; or sinks
    normed_queries: Switch = True,  # whether they are there
    kind: str = "rms",  # of norm
    norms: str = "two",  # of a layer, four (of each sublayer's output too), or one that both sublayers read
    parallel: Switch = False,  # whether both sublayers read the same state
    final_norm: bool = True,
    embedding_norm: bool = False,
    positions: int | str = 0,  # learned positions
    table_width: int | None = None,  # another than D: linear maps without bias stand between (OPT-350M)
    head_bias: bool = False,
    experts: Experts | None = None,
    # What a fresh body has besides; None where no measurement held its first loss against the prediction.
    fresh: Mapping[str, Any] | None = AS_LLAMA,
) -> Architecture:
    """Read a decoder: without further arguments, a Llama that has no biases."""
    d, layers = c.size("hidden_size"), c.size("num_hidden_layers")
    ffn = c.size(ffn_width, 4 * d)
    heads = heads or heads_of(c, grouped)
    all_heads = (heads.count + heads.kv) * heads.width
    norms_of_queries = _query_norms(heads, kind, query_norms) * c.flag(normed_queries)
    if maps is None:
        has_out_bias = c.flag(bias if out_bias is None else out_bias)
        maps = heads.maps(d, c.flag(bias), has_out_bias, norms_of_queries)
    plain = {"ffn": feed_forward(d, ffn, gated, c.flag(ffn_bias))}
    ffns: list[Counts] = []
    for index in range(layers):
        if experts is None or index in experts.dense:
            ffns.append(plain)
        else:
            ffns.append(experts.counts(d))
    if isinstance(positions, str):
        positions = c.size(positions)
    of_attention, of_ffn, of_both = ({"norms": norm(d, kind, n)} for n in NORMS[norms])
    stack = AppliedLayers(
        "decoder",
        tuple(LayerCounts({"attention": maps, **of_attention}, {**each, **of_ffn}, of_both) for each in ffns),
        {
            "positions": lookup(positions, d),
            "embedding_norm": norm(d, kind, int(embedding_norm)),
            "norms": norm(d, kind, int(final_norm)),
        },
        heads,
        # inputs of products, of norms and activations
        4 * d + 2 * all_heads + _middle_width(ffn, experts) * (3 if gated else 2),
    )
    table_width = table_width or d
    between = linear(table_width, d).times(2) if table_width != d else Count()
    ends = c.token_tables(table_width, maps=between, head_biases=int(head_bias))
    architecture = Architecture(c.family, d, ends, (stack,))
    if fresh is None:  # nor are the keys of a fresh body read
        return architecture
    activation = _activation(c)
    if activation not in ACTIVATIONS:
        return architecture
    std = c.number("initializer_range", 0.02)
    body: dict[str, Any] = {
        "heads": heads.count,
        "head_dim": heads.width,
        "ffn": ffn,
        "layers": layers,
        "gated": gated,
        "activation": activation,
        "arrangement": _arrangement(c.flag(parallel), norms),
        "normed_queries": norms_of_queries > 0,
        "std": std,
        "positions_std": std if positions else 0.0,
    }
    return replace(architecture, fresh=FreshBody(**{**body, **fresh}))


def _query_norms(heads: Heads, kind: str, over: str) -> int:
    """Return parameters of a norm of queries and one of keys over one head or all of them, or of sinks."""
    parameters = {
        "none": 0,
        "one head": norm(heads.width, kind, 2).parameters,
        "all heads": (heads.count + heads.kv) * heads.width,
        "sinks": heads.count,
    }
    return parameters[over]


def _middle_width(ffn: int, experts: Experts | None) -> int:
    """Return the width of all ffns that one token uses in a layer."""
    return ffn if experts is None else experts.width * experts.chosen + experts.shared_width


def _activation(c: Config) -> str:
    """Return the activation by its usual keys; "" where the config names none."""
    return next((c.text(key) for key in ACTIVATION_KEYS if c.text(key)), "")


def _arrangement(is_parallel: bool, norms: str) -> str:
    """Return the arrangement of a layer's sublayers, as `FreshBody` names it."""
    if is_parallel:
        return "parallel"
    return "sandwich" if norms == "four" else "sequential"


llama = partial(decoder, bias="attention_bias", ffn_bias="mlp_bias")
biased = partial(decoder, bias="attention_bias")
qwen3 = partial(biased, query_norms="one head")
gpt = partial(decoder, bias=True, ffn_bias=True, gated=False, grouped=False, kind="layer")
gpt2 = partial(gpt, positions="n_positions", fresh={"depth_scaled": True})
phi = partial(gpt, grouped=True, norms="one", parallel=True, head_bias=True)
beside = partial(biased, norms="one", parallel=True, kind="layer without bias")
cohere = partial(beside, query_norms="all heads", normed_queries="use_qk_norm")
READERS: dict[str, Reader] = {
    "decoder": decoder,
    "llama": llama,
    "biased": biased,
    "qwen3": qwen3,
    "gpt": gpt,
    "gpt2": gpt2,
    "phi": phi,
}


def reads(name: str) -> Callable[[Reader], Reader]:
    """Register a reader under the name that records of families use."""

    def register(reader: Reader) -> Reader:
        READERS[name] = reader
        return reader

    return register


def reader_of(known: Family) -> Reader | None:
    """Return the exact reader of a family with its options; None where it has none."""
    return None if known.reader is None else partial(READERS[known.reader.name], **known.reader.options)


@reads("gemma")
def _gemma(c: Config) -> Architecture:
    return biased(c, fresh={"input_scale": math.sqrt(c.size("hidden_size"))})


@reads("gemma2")
def _gemma2(c: Config, **more: Any) -> Architecture:
    cap = c.get("final_logit_softcapping")
    fresh = {
        "input_scale": math.sqrt(c.size("hidden_size")),
        "attention_scale": c.number("query_pre_attn_scalar") ** -0.5,
        "softcap": None if cap is None else c.number("final_logit_softcapping"),
    }
    return biased(c, norms="four", fresh=fresh, **more)


@reads("cohere")
def _cohere(c: Config) -> Architecture:
    return cohere(c, fresh={"output_scale": c.number("logit_scale")})


@reads("gpt_bigcode")
def _gpt_bigcode(c: Config) -> Architecture:
    """Read GPT-2 with one head of keys and values where `multi_query` is on."""
    return gpt2(c, heads=replace(heads_of(c, False), kv=1) if c.flag("multi_query") else None)


@reads("mixtral")
def _mixtral(c: Config) -> Architecture:
    return decoder(c, experts=experts_of(c), fresh=None)


@reads("gpt_oss")
def _gpt_oss(c: Config) -> Architecture:
    return biased(c, query_norms="sinks", experts=experts_of(c, bias=True), fresh=None)


@reads("stablelm")
def _stablelm(c: Config) -> Architecture:
    parallel, bias = c.flag("use_parallel_residual"), c.flag("use_qkv_bias")
    normed = partial(decoder, query_norms="all heads", normed_queries="qk_layernorm", kind="layer")
    return normed(c, bias=bias, out_bias=False, norms="one" if parallel else "two", parallel=parallel)


@reads("opt")
def _opt(c: Config) -> Architecture:
    width, before, std = c.size("hidden_size"), c.flag("do_layer_norm_before"), c.number("init_std", 0.02)
    table_width = c.size("word_embed_proj_dim", width)
    return gpt(
        c,
        bias="enable_bias",
        ffn_bias="enable_bias",
        kind="layer" if c.flag("layer_norm_elementwise_affine") else "none",
        final_norm=before and not c.flag("_remove_final_layer_norm"),
        positions=c.size("max_position_embeddings") + 2,
        table_width=table_width,
        fresh={"std": std, "positions_std": std} if before and table_width == width else None,
    )


@reads("granite")
def _granite(c: Config) -> Architecture:
    kinds = {"input": "embedding", "residual": "residual", "attention": "attention"}
    scales = {f"{ours}_scale": c.number(f"{theirs}_multiplier", 1.0) for ours, theirs in kinds.items()}
    return llama(c, fresh={**scales, "output_scale": 1 / c.number("logits_scaling", 1.0)})


@reads("falcon")
def _falcon(c: Config) -> Architecture:
    heads, is_new = heads_of(c, grouped=False), c.flag("new_decoder_architecture")
    is_parallel = c.flag("parallel_attn")
    if is_new:
        kv_heads = c.size("num_kv_heads", heads.count)
    else:
        kv_heads = 1 if c.flag("multi_query") else heads.count
    has_two_norms = not is_parallel or c.size("num_ln_in_parallel_attn", 2 if is_new else 1) == 2
    plain = partial(gpt, bias="bias", ffn_bias="bias", ffn_width="ffn_hidden_size", parallel=is_parallel)
    return plain(c, heads=replace(heads, kv=kv_heads), norms="two" if has_two_norms else "one")


@reads("qwen_moe")
def _qwen_moe(c: Config) -> Architecture:
    """Read experts in every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    step, only = c.size("decoder_sparse_step"), c.indices("mlp_only_layers")
    dense = {i for i in range(c.size("num_hidden_layers")) if i in only or (i + 1) % step}
    experts = experts_of(c, "num_experts", "moe_intermediate_size", dense=dense)
    if c.family == "qwen3_moe":
        return qwen3(c, experts=experts, fresh=None)
    experts = replace(experts, shared_width=c.size("shared_expert_intermediate_size"), shared_gate=True)
    return decoder(c, bias="qkv_bias", out_bias=False, experts=experts, fresh=None)


@reads("llama4")
def _llama4(c: Config) -> Architecture:
    layers, step = c.size("num_hidden_layers"), c.size("interleave_moe_layer_step")
    sparse = range(step - 1, layers, step) if c.get("moe_layers") is None else c.indices("moe_layers")
    experts = experts_of(c, shared_width=c.size("intermediate_size"), dense=set(range(layers)).difference(sparse))
    return biased(c, ffn_width="intermediate_size_mlp", experts=experts, fresh=None)


@reads("deepseek")
def _deepseek(c: Config) -> Architecture:
    """Read keys and values through a narrow latent state; queries too, where `q_lora_rank` is not 0."""
    d, count = c.size("hidden_size"), c.size("num_attention_heads")
    q_rank, kv_rank = c.size("q_lora_rank", 0, least=0), c.size("kv_lora_rank")
    # a head's keys are `nope` wide and `rope` more that all heads share
    nope, rope, value = (c.size(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    bias, queries = c.flag("attention_bias"), count * (nope + rope)
    keys = linear(d, kv_rank + rope, bias) + elementwise(kv_rank) + linear(kv_rank, count * (nope + value))
    narrow = linear(d, q_rank, bias) + elementwise(q_rank) + linear(q_rank, queries)
    maps = keys + linear(count * value, d, bias) + (narrow if q_rank else linear(d, queries))
    ffn_bias = c.family == "deepseek_v2" and c.flag("mlp_bias")  # of dense and shared ffns; version 3 has none
    routed, width = c.size("n_routed_experts"), c.size("moe_intermediate_size")
    shared, dense = (c.size(key, 0, least=0) for key in ("n_shared_experts", "first_k_dense_replace"))
    chosen = c.size("num_experts_per_tok", routed)
    experts = Experts(routed, chosen, width, shared * width, shared_bias=ffn_bias, dense=range(dense))
    heads = Heads(count, (nope + rope + value) // 2, count, latent=kv_rank + rope)  # the mean of keys and values
    return decoder(c, heads=heads, maps=maps, ffn_bias=ffn_bias, experts=experts, fresh=None)


@reads("mamba")
def _mamba(c: Config) -> Architecture:
    """Read a gated convolution and a selective state space per layer, where others attend, and no ffn."""
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


# Encoders, whose head transforms the hidden state (dense, activation, norm) before the table


@reads("bert")
def _bert(c: Config) -> Architecture:
    """Read post-norm encoders: BERT, RoBERTa, DistilBERT, ELECTRA, ALBERT."""
    d, stack = c.size("hidden_size"), _bert_layers(c)
    width = _bert_table_width(c)
    is_pretraining = c.head == "pretraining"
    judges_pairs = is_pretraining and c.family in ("bert", "albert")  # two classes on the pooled state: NSP, SOP
    has_head = c.head == "lm" or judges_pairs
    pools = judges_pairs or (c.head == "none" and c.family in ("bert", "roberta", "albert"))
    discriminates = is_pretraining and c.family == "electra"
    discriminator = linear(d, d, True) + linear(d, 1, True)
    around = {
        "pooler": linear(d, d, True).times(pools),
        "head_transform": (linear(d, width, True) + norm(width)).times(has_head),
        "other": linear(d, 2, True).times(judges_pairs) + discriminator.times(discriminates),
    }
    has_maps = width != d or c.family == "albert"  # ALBERT maps even where widths are equal
    maps = linear(width, d, bias=True).times(has_maps)
    ends = c.token_tables(width, has_head, maps=maps, head_biases=int(has_head))
    if has_head and not ends.tied and c.family in ("bert", "roberta"):
        ends = replace(ends, head_biases=2)  # untied, the class keeps the bias twice
    return Architecture(c.family, d, ends, (stack,), around)


def _bert_table_width(c: Config) -> int:
    """Return the width of the token table."""
    return c.size("embedding_size") if c.family in ("electra", "albert") else c.size("hidden_size")


def _bert_layers(c: Config) -> AppliedLayers:
    """Read the layers of a post-norm encoder, with its embeddings. Those of ALBERT are groups of layers."""
    d, count = c.size("hidden_size"), c.size("num_attention_heads")
    ffn = c.size("hidden_dim" if c.family == "distilbert" else "intermediate_size")
    types = 0 if c.family == "distilbert" else c.size("type_vocab_size")
    width = _bert_table_width(c)
    is_albert = c.family == "albert"
    inner = c.size("inner_group_num") if is_albert else 1  # layers of one group, applied together
    heads, norms = Heads.of(d, count), norm(d).times(inner)
    attention = heads.maps(d, True, True).times(inner)
    plain = feed_forward(d, ffn, gated=False, bias=True).times(inner)
    layer = LayerCounts({"attention": attention, "norms": norms}, {"ffn": plain, "norms": norms})
    embeddings = {
        "positions": lookup(c.size("max_position_embeddings"), width),
        "embedding_norm": norm(width),
        "token_types": lookup(types, width),
    }
    layers = (layer,) * c.size("num_hidden_layers")
    sharing = SharingSpec("all", c.size("num_hidden_groups")) if is_albert else SharingSpec()
    return AppliedLayers("encoder", layers, embeddings, heads, inner * (8 * d + 2 * ffn), sharing)


@reads("modernbert")
def _modernbert(c: Config) -> Architecture:
    kind, has_head = "layer" if c.flag("norm_bias") else "layer without bias", c.head == "lm"
    found = llama(c, grouped=False, kind=kind, embedding_norm=True, fresh=None)
    d, (stack,) = found.width, found.stacks
    first, *rest = stack.layers
    first = replace(first, attention={"attention": first.attention["attention"]})  # reads the embedding's own norm
    transform = {"head_transform": linear(d, d, c.flag("classifier_bias")) + norm(d, kind)} if has_head else {}
    ends = c.token_tables(d, has_head, head_biases=int(has_head and c.flag("decoder_bias")))
    return replace(found, ends=ends, stacks=(replace(stack, name="encoder", layers=(first, *rest)),), around=transform)


# Encoder-decoders, in which one table serves encoder, decoder and head where it is tied


def _side(
    name: str, d: int, layers: int, heads: Heads, ffn: int, gated: bool, kind: str, biases: bool, **more: Counts
) -> AppliedLayers:
    """Encoder or decoder; `more` are counts `around` its layers and `beside` the attention of each."""
    maps, times = heads.maps(d, biases, biases), 2 if name == "decoder" else 1  # a decoder attends to the source too
    mixing = {"attention": maps, "cross_attention": maps.times(times - 1), "norms": norm(d, kind, times)}
    ffns = {"ffn": feed_forward(d, ffn, gated, biases), "norms": norm(d, kind)}
    layer = LayerCounts({**mixing, **more.get("beside", {})}, ffns)
    saved = times * (2 * d + 4 * heads.count * heads.width) + 2 * d + ffn * (3 if gated else 2)
    return AppliedLayers(name, (layer,) * layers, more["around"], heads, saved)


@reads("t5")
def _t5(c: Config) -> Architecture:
    d, count, ffn = c.size("d_model"), c.size("num_heads"), c.size("d_ff")
    heads, gated = Heads(count, c.size("d_kv"), count), c.text("feed_forward_proj").startswith("gated-")
    relative = {"positions": elementwise(c.size("relative_attention_num_buckets") * count)}
    of_layer, of_side = (relative, {}) if c.family == "umt5" else ({}, relative)
    sides = {"encoder": c.size("num_layers"), "decoder": c.size("num_decoder_layers", c.size("num_layers"))}
    if c.class_name.endswith("EncoderModel"):
        del sides["decoder"]
    side = partial(_side, heads=heads, ffn=ffn, gated=gated, kind="rms", biases=False, beside=of_layer)
    stacks = (side(name, d, layers, around={"norms": norm(d, "rms"), **of_side}) for name, layers in sides.items())
    head = c.head != "none"
    forced = (
        "transformers 5.23 builds this class tied whatever the file says; "
        "this file says untied, and its checkpoint may hold a separate head: compare with the choice untied"
    )
    notes = (forced,) if head and c.values.get("tie_word_embeddings") is False else ()
    return Architecture(c.family, d, TokenTables(c.size("vocab_size"), d, head, head), tuple(stacks), notes=notes)


@reads("bart")
def _bart(c: Config) -> Architecture:
    d, vocab = c.size("d_model"), c.size("vocab_size")
    learned = c.family in ("bart", "mbart")  # positions; the others' are sinusoids, stored and never trained
    positions = c.size("max_position_embeddings") + (2 if learned else 0)
    first, last = (norm(d, count=int(there)) for there in (learned, c.family in ("mbart", "pegasus")))
    around = {"positions": lookup(positions, d), "embedding_norm": first, "norms": last}
    stacks = []
    for name in ("encoder", "decoder"):
        layers, count, ffn = (c.size(f"{name}_{key}") for key in ("layers", "attention_heads", "ffn_dim"))
        stacks.append(_side(name, d, layers, Heads.of(d, count), ffn, False, "layer", True, around=around))
    ends, other = c.token_tables(d), Count()
    notes: tuple[str, ...] = ()
    if c.family == "marian" and not c.flag("share_encoder_decoder_embeddings"):
        ends, other = replace(ends, vocab=c.size("decoder_vocab_size", vocab)), lookup(vocab, d)
        notes = ("the encoder has a table of its own, counted as other",)
    elif not c.flag("tie_word_embeddings"):
        other = lookup(vocab, d).times(2, 0)
        notes = ("untied, the class also stores a table of the encoder's and one of the decoder's, counted as other",)
    frozen = 0 if learned else 2 * positions * d
    return Architecture(c.family, d, ends, tuple(stacks), {"other": other}, frozen=frozen, notes=notes)
