"""Exact readers: each returns the `Architecture` of a family's config.

The records of families refer to readers by name. Counts equal those of transformers 5.23 to the parameter (its
modeling files are the source). Nearly every decoder is `decoder` with other arguments, and nearly every encoder is
BERT, T5 or BART.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tiewise.core.errors import PlanError
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
from tiewise.planning.config import Config, saved_class
from tiewise.planning.first_loss import ACTIVATIONS, FreshBody

# Decoders


@dataclass(frozen=True)
class Experts:
    """A router and `count` experts, of which a token uses `chosen`, with an optional shared expert."""

    count: int
    chosen: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False
    shared_bias: bool = False
    bias: bool = False
    dense: Collection[int] = ()  # layers with a plain ffn instead
    gated: bool = True
    latent: int = 0  # width of the state in which the experts work, if not D; two maps connect them
    latent_bias: bool = False

    def counts(self, d: int) -> Counts:
        """Return the counts in a model of width `d`."""
        shared = feed_forward(d, self.shared_width, self.gated, self.shared_bias)
        experts = feed_forward(self.latent or d, self.width, self.gated, self.bias)
        experts = experts.times(self.count, min(self.chosen, self.count))
        if self.latent:
            experts += linear(d, self.latent, self.latent_bias) + linear(self.latent, d, self.latent_bias)
        return {
            "experts": experts,
            "router": linear(d, self.count, self.bias) + linear(d, 1).times(self.shared_gate),
            "shared_experts": shared.times(self.shared_width > 0),
        }


def read_experts(
    config: Config, count: str = "num_local_experts", width: str = "intermediate_size", **more: Any
) -> Experts:
    """Read experts, given the keys of their count and width."""
    return Experts(config.size(count), config.size("num_experts_per_tok"), config.size(width), **more)


def read_heads(config: Config, grouped: bool = True) -> Heads:
    """Read heads from the usual keys; a head's width defaults to D / heads."""
    d, count = config.size("hidden_size"), config.size("num_attention_heads")
    if not grouped:
        return Heads.of(d, count)
    kv_heads, width = config.size("num_key_value_heads", count), None
    if config.get("head_dim") is not None:
        width = config.size("head_dim")
    return Heads.of(d, count, kv_heads, width)


Switch = bool | str  # on or off, or a key of the config with that value
Reader = Callable[..., Architecture]
# Numbers of norms of attention, of the ffn, and common to both.
NORMS = {"one": (0, 0, 1), "two": (1, 1, 0), "four": (2, 2, 0)}
EAGER_GELUS = ("gelu_new", "gelu_fast")  # activations that transformers composes from several operations
VALUES_OF_EAGER_GELU = 5  # values per middle neuron that they store
AS_LLAMA: Mapping[str, Any] = {}  # no options of `FreshBody`
CROSSES = "add_cross_attention"  # key of a decoder that attends to an encoder
ACTIVATION_KEYS = ("hidden_activation", "hidden_act", "activation_function", "activation")


def decoder(
    config: Config,
    *,
    bias: Switch = False,  # biases of queries, keys and values
    out_bias: Switch | None = None,  # of attention's output; None: as `bias`
    ffn_bias: Switch = False,
    gated: bool = True,  # the ffn has a gate
    ffn_width: str = "intermediate_size",  # key of the ffn's width; null in the config means 4 D
    grouped: bool = True,  # the config may set the heads of keys and values, and a head's width
    heads: Heads | None = None,  # None: read from the usual keys
    maps: Count | None = None,  # None: the maps of query, key, value and output
    query_norms: str = "none",  # width of the norms of queries and keys: none, one head, all heads; or sinks
    normed_queries: Switch = True,  # the norms of queries and keys exist
    kind: str = "rms",  # kind of norm
    norms: str = "two",  # norms per layer: two, four (also of each sublayer's output), or one that both sublayers read
    parallel: Switch = False,  # both sublayers read the same state
    final_norm: bool = True,
    embedding_norm: bool = False,
    positions: int | str = 0,  # rows of a table of learned positions, or their key in the config
    table_width: int | None = None,  # if not D, linear maps without bias connect tables and body (OPT-350M)
    head_bias: bool = False,
    crosses: Switch = False,  # each layer also attends to an encoder, with maps like its own and one more norm
    experts: Experts | None = None,
    # Options of `FreshBody`; None if the predicted first loss has not been compared with a measurement.
    fresh: Mapping[str, Any] | None = AS_LLAMA,
) -> Architecture:
    """Read a decoder. The defaults are those of a Llama without biases."""
    d, layers = config.size("hidden_size"), config.size("num_hidden_layers")
    ffn = config.size(ffn_width, 4 * d) if config.knows(ffn_width) else 4 * d
    heads = heads or read_heads(config, grouped)
    norms_of_queries = _query_norms(heads, kind, query_norms) * config.flag(normed_queries)
    if maps is None:
        if out_bias is None:
            out_bias = bias
        maps = heads.maps(d, config.flag(bias), config.flag(out_bias), norms_of_queries)
    crossing = int(config.flag(crosses))
    plain = feed_forward(d, ffn, gated, config.flag(ffn_bias))
    if isinstance(positions, str):
        positions = config.size(positions)
    norms_before, norms_of_ffn, norms_of_both = (norm(d, kind, count) for count in NORMS[norms])
    attention = {"attention": maps, "cross_attention": maps.times(crossing)}
    attention["norms"] = norms_before + norm(d, kind, crossing)
    counted_layers = []
    for ffn_counts in _count_ffns(d, layers, plain, experts):
        counted_layers.append(LayerCounts(attention, {**ffn_counts, "norms": norms_of_ffn}, {"norms": norms_of_both}))
    around = {
        "positions": lookup(positions, d),
        "embedding_norm": norm(d, kind, int(embedding_norm)),
        "norms": norm(d, kind, int(final_norm)),
    }
    all_heads = (heads.count + heads.kv) * heads.width
    values = _values_between(gated)
    if fresh is not None and _activation(config) in EAGER_GELUS:
        values = VALUES_OF_EAGER_GELU
    inputs = d * (sum(NORMS[norms]) + crossing)  # of norms
    saved_by_attention = (1 + crossing) * (2 * d + 2 * all_heads)  # inputs of products
    saved_per_token = saved_by_attention + values * _middle_width(ffn, experts)  # and activations
    normed_per_token = 0
    if kind == "rms":
        normed_per_token = inputs + all_heads * (norms_of_queries > 0)
    else:
        saved_per_token += inputs
    stack = AppliedLayers("decoder", tuple(counted_layers), around, heads, saved_per_token, normed_per_token)
    table_width = table_width or d
    between = Count()
    if table_width != d:
        between = linear(table_width, d).times(2)
    ends = config.token_tables(table_width, maps=between, head_biases=int(head_bias))
    architecture = Architecture(config.family, d, ends, (stack,))
    if fresh is None:  # the keys for a fresh body are then not read
        return architecture
    activation = _activation(config)
    if activation not in ACTIVATIONS:
        return architecture
    std = config.number("initializer_range", 0.02)
    body: dict[str, Any] = {
        "heads": heads.count,
        "head_dim": heads.width,
        "ffn": ffn,
        "layers": layers,
        "gated": gated,
        "activation": activation,
        "arrangement": _arrangement(config.flag(parallel), norms),
        "normed_queries": norms_of_queries > 0,
        "std": std,
        "positions_std": std if positions else 0.0,
    }
    return replace(architecture, fresh=FreshBody(**{**body, **fresh}))


def _count_ffns(d: int, layers: int, plain: Count, experts: Experts | None) -> list[Counts]:
    """Count the feed-forward part of each layer: a plain one, or experts."""
    ffns: list[Counts] = [{"ffn": plain}] * layers
    if experts is not None:
        for index in set(range(layers)).difference(experts.dense):
            ffns[index] = experts.counts(d)
    return ffns


def _values_between(gated: bool) -> int:
    """Return how many values per middle neuron an ffn stores for the backward pass.

    These are the activation's input and output. With a gate they are the two factors of the product, too.
    """
    return 4 if gated else 2


def _query_norms(heads: Heads, kind: str, over: str) -> int:
    """Return parameters of the norms of queries and keys, or of attention sinks.

    `over` says whether a norm has one head's width or that of all heads.
    """
    parameters = {
        "none": 0,
        "one head": norm(heads.width, kind, 2).parameters,
        "all heads": (heads.count + heads.kv) * heads.width,
        "sinks": heads.count,
    }
    return parameters[over]


def _middle_width(ffn: int, experts: Experts | None) -> int:
    """Return the sum of the widths of all ffns that one token uses in a layer."""
    if experts is None:
        return ffn
    return experts.width * experts.chosen + experts.shared_width


def _activation(config: Config) -> str:
    """Return the activation's name, read from the usual keys; "" if there is none."""
    names = filter(None, map(config.text, ACTIVATION_KEYS))
    return next(names, "")


def _arrangement(is_parallel: bool, norms: str) -> str:
    """Return the arrangement of a layer's sublayers, as `FreshBody` names it."""
    if is_parallel:
        return "parallel"
    if norms == "four":
        return "sandwich"
    return "sequential"


llama = partial(decoder, bias="attention_bias", ffn_bias="mlp_bias")
biased = partial(decoder, bias="attention_bias")
qwen3 = partial(biased, query_norms="one head")
gpt = partial(decoder, bias=True, ffn_bias=True, gated=False, grouped=False, kind="layer")
gpt2 = partial(gpt, positions="n_positions", crosses=CROSSES, fresh={"depth_scaled": True})
phi = partial(gpt, grouped=True, norms="one", parallel=True, head_bias=True)
parallel_decoder = partial(biased, norms="one", parallel=True, kind="layer without bias")
cohere = partial(parallel_decoder, query_norms="all heads", normed_queries="use_qk_norm")
READERS: dict[str, Reader] = {
    "decoder": decoder,
    "llama": llama,
    "biased": biased,
    "qwen3": qwen3,
    "gpt": gpt,
    "gpt2": gpt2,
    "phi": phi,
}


def register_reader(name: str) -> Callable[[Reader], Reader]:
    """Register a reader under the name that records of families use."""

    def register(reader: Reader) -> Reader:
        """Add `reader` to `READERS` and return it."""
        READERS[name] = reader
        return reader

    return register


@register_reader("gemma")
def _gemma(config: Config) -> Architecture:
    return biased(config, fresh={"input_scale": math.sqrt(config.size("hidden_size"))})


@register_reader("gemma2")
def _gemma2(config: Config, **more: Any) -> Architecture:
    fresh = {
        "input_scale": math.sqrt(config.size("hidden_size")),
        "attention_scale": config.number("query_pre_attn_scalar") ** -0.5,
    }
    if config.get("final_logit_softcapping") is not None:
        fresh["softcap"] = config.number("final_logit_softcapping")
    return biased(config, norms="four", fresh=fresh, **more)


@register_reader("cohere")
def _cohere(config: Config) -> Architecture:
    return cohere(config, fresh={"output_scale": config.number("logit_scale")})


@register_reader("gpt_bigcode")
def _gpt_bigcode(config: Config) -> Architecture:
    """Read a GPT-2 that has one head of keys and values if `multi_query` is on.

    Raises:
        PlanError: the config also adds cross-attention, which the class refuses.
    """
    heads = read_heads(config, grouped=False)
    if config.flag("multi_query"):
        if config.flag(CROSSES):
            raise PlanError(f"{config.family} has no {CROSSES} with multi_query", f"set {CROSSES} to false")
        heads = replace(heads, kv=1)
    return gpt2(config, heads=heads)


@register_reader("mixtral")
def _mixtral(config: Config) -> Architecture:
    return decoder(config, experts=read_experts(config), fresh=None)


@register_reader("experts")
def _with_experts(
    config: Config, *, count: str = "num_local_experts", width: str = "intermediate_size", **more: Any
) -> Architecture:
    """Read a decoder with experts in each layer.

    Args:
        config: the model's config.
        count: key of the number of experts.
        width: key of an expert's width.
        more: options of `decoder`.
    """
    return decoder(config, experts=read_experts(config, count, width), fresh=None, **more)


@register_reader("routed")
def _routed(config: Config, **more: Any) -> Architecture:
    """Read a decoder with DeepSeek's experts, dense in its first layers, and usual attention."""
    d, count = config.size("hidden_size"), config.size("num_attention_heads")
    width = config.size("head_dim", d // count)  # rounded down, as the class does
    heads = Heads.of(d, count, config.size("num_key_value_heads", count), width)
    return decoder(config, heads=heads, experts=read_routed_experts(config), fresh=None, **more)


@register_reader("gpt_oss")
def _gpt_oss(config: Config) -> Architecture:
    return biased(config, query_norms="sinks", experts=read_experts(config, bias=True), fresh=None)


@register_reader("stablelm")
def _stablelm(config: Config) -> Architecture:
    parallel, bias = config.flag("use_parallel_residual"), config.flag("use_qkv_bias")
    normed = partial(decoder, query_norms="all heads", normed_queries="qk_layernorm", kind="layer")
    return normed(config, bias=bias, out_bias=False, norms="one" if parallel else "two", parallel=parallel)


@register_reader("opt")
def _opt(config: Config) -> Architecture:
    width, std = config.size("hidden_size"), config.number("init_std", 0.02)
    before = config.flag("do_layer_norm_before")  # pre-norm
    table_width = config.size("word_embed_proj_dim", width)
    return gpt(
        config,
        bias="enable_bias",
        ffn_bias="enable_bias",
        kind="layer" if config.flag("layer_norm_elementwise_affine") else "none",
        final_norm=before and not config.flag("_remove_final_layer_norm"),
        positions=config.size("max_position_embeddings") + 2,
        table_width=table_width,
        fresh={"std": std, "positions_std": std} if before and table_width == width else None,
    )


@register_reader("granite")
def _granite(config: Config) -> Architecture:
    fresh = {
        "input_scale": config.number("embedding_multiplier", 1.0),
        "residual_scale": config.number("residual_multiplier", 1.0),
        "attention_scale": config.number("attention_multiplier", 1.0),
        "output_scale": 1 / config.number("logits_scaling", 1.0),
    }
    return llama(config, fresh=fresh)


@register_reader("falcon")
def _falcon(config: Config) -> Architecture:
    heads, is_parallel, usual_norms = read_heads(config, grouped=False), config.flag("parallel_attn"), 1
    if config.flag("new_decoder_architecture"):
        heads, usual_norms = replace(heads, kv=config.size("num_kv_heads", heads.count)), 2
    elif config.flag("multi_query"):
        heads = replace(heads, kv=1)
    norms = "two"
    if is_parallel and config.size("num_ln_in_parallel_attn", usual_norms) != 2:
        norms = "one"
    plain = partial(gpt, bias="bias", ffn_bias="bias", ffn_width="ffn_hidden_size", parallel=is_parallel)
    return plain(config, heads=heads, norms=norms)


@register_reader("qwen2_moe")
def _qwen2_moe(config: Config) -> Architecture:
    """Read a decoder with experts, one of them shared behind a gate."""
    shared_width = config.size("shared_expert_intermediate_size")
    experts = replace(qwen_experts(config), shared_width=shared_width, shared_gate=True)
    return decoder(config, bias="qkv_bias", out_bias=False, experts=experts, fresh=None)


@register_reader("qwen3_moe")
def _qwen3_moe(config: Config) -> Architecture:
    return qwen3(config, experts=qwen_experts(config), fresh=None)


def qwen_experts(config: Config) -> Experts:
    """Read experts in every `decoder_sparse_step`-th layer, except those of `mlp_only_layers`."""
    step, only = config.size("decoder_sparse_step"), config.indices("mlp_only_layers")
    layers = set(range(config.size("num_hidden_layers")))
    dense = layers.difference(range(step - 1, len(layers), step)).union(only)
    return read_experts(config, "num_experts", "moe_intermediate_size", dense=dense)


@register_reader("llama4")
def _llama4(config: Config) -> Architecture:
    layers, step = config.size("num_hidden_layers"), config.size("interleave_moe_layer_step")
    sparse = list(range(step - 1, layers, step))
    if config.get("moe_layers") is not None:
        sparse = config.indices("moe_layers")
    experts = read_experts(
        config, shared_width=config.size("intermediate_size"), dense=set(range(layers)).difference(sparse)
    )
    return biased(config, ffn_width="intermediate_size_mlp", experts=experts, fresh=None)


@dataclass(frozen=True)
class LatentAttention:
    """Attention whose keys and values are read from a narrow state: its maps, and its heads."""

    maps: Count
    heads: Heads


def read_latent_attention(config: Config) -> LatentAttention:
    """Read attention with latent keys and values. Queries have a latent state too if `q_lora_rank` is not 0."""
    d, count = config.size("hidden_size"), config.size("num_attention_heads")
    q_rank, kv_rank = config.size("q_lora_rank", 0, least=0), config.size("kv_lora_rank")
    # a head's keys have `nope` entries, and `rope` more that all heads share
    nope, rope, value = config.size("qk_nope_head_dim"), config.size("qk_rope_head_dim"), config.size("v_head_dim")
    bias, queries = config.flag("attention_bias"), count * (nope + rope)
    if q_rank:
        query_maps = linear(d, q_rank, bias) + elementwise(q_rank) + linear(q_rank, queries)
    else:
        query_maps = linear(d, queries)
    key_maps = linear(d, kv_rank + rope, bias) + elementwise(kv_rank) + linear(kv_rank, count * (nope + value))
    maps = query_maps + key_maps + linear(count * value, d, bias)
    mean_width = (nope + rope + value) // 2  # of keys and values
    return LatentAttention(maps, Heads(count, mean_width, count, latent=kv_rank + rope))


def read_routed_experts(config: Config, shared_bias: bool = False) -> Experts:
    """Read experts with the keys of DeepSeek.

    The first layers are dense, and some experts are shared.
    """
    routed, width = config.size("n_routed_experts"), config.size("moe_intermediate_size")
    shared, dense = config.size("n_shared_experts", 0, least=0), config.size("first_k_dense_replace", 0, least=0)
    chosen = config.size("num_experts_per_tok", routed)
    dense_layers = range(min(dense, config.size("num_hidden_layers")))
    return Experts(routed, chosen, width, shared * width, shared_bias=shared_bias, dense=dense_layers)


@register_reader("deepseek")
def _deepseek(config: Config, ffn_bias: Switch = False) -> Architecture:
    latent, experts = read_latent_attention(config), read_routed_experts(config, config.flag(ffn_bias))
    return decoder(config, heads=latent.heads, maps=latent.maps, ffn_bias=ffn_bias, experts=experts, fresh=None)


@register_reader("mamba")
def _mamba(config: Config) -> Architecture:
    """Read layers of a gated convolution and a selective state space, without attention and ffn."""
    d, state, kernel = config.size("hidden_size"), config.size("state_size"), config.size("conv_kernel")
    inner = config.size("intermediate_size", int(config.number("expand") * d))
    if config.get("time_step_rank") == "auto":
        rank = math.ceil(d / 16)
    else:
        rank = config.size("time_step_rank")
    bias, conv_bias = config.flag("use_bias"), inner * config.flag("use_conv_bias")
    convolution = Count(inner * kernel, inner * kernel, inner * kernel)
    mixer = linear(d, 2 * inner, bias) + convolution + linear(inner, rank + 2 * state)
    mixer += linear(rank, inner, True) + linear(inner, d, bias)
    mixer += elementwise(inner * state + inner + conv_bias)
    layers = (LayerCounts({"mixer": mixer, "norms": norm(d, "rms")}, {}),) * config.size("num_hidden_layers")
    heads = Heads(state=inner * (state + kernel))
    stack = AppliedLayers("decoder", layers, {"norms": norm(d, "rms")}, heads, 2 * d + 6 * inner)
    return Architecture(config.family, d, config.token_tables(d), (stack,))


# Encoders, whose head transforms the hidden state (dense, activation, norm) before the table


@register_reader("bert")
def bert(
    config: Config,
    *,
    table_width: str = "hidden_size",  # key of the token table's width
    ffn_width: str = "intermediate_size",
    token_types: bool = True,
    pools: bool = False,  # the model without a head has a pooler
    judges_pairs: bool = False,  # pretraining: two classes on the pooled state (next sentence, sentence order)
    discriminates: bool = False,  # pretraining: a head that detects replaced tokens (ELECTRA), and no token head
    crosses: Switch = False,  # as a decoder, each layer also attends to an encoder
    head_biases: int = 1,  # bias vectors of an untied token head: BERT and RoBERTa store two; a tied one has one
) -> Architecture:
    """Read post-norm encoders: BERT, RoBERTa, DistilBERT, ELECTRA."""
    d, width = config.size("hidden_size"), config.size(table_width)
    is_pretraining = config.head == "pretraining"
    judges_pairs = judges_pairs and is_pretraining
    discriminates = discriminates and is_pretraining
    has_head = config.head == "lm" or judges_pairs
    has_pooler = judges_pairs or (pools and config.head == "none")
    discriminator = linear(d, d, True) + linear(d, 1, True)
    around = {
        "pooler": linear(d, d, True).times(has_pooler),
        "head_transform": (linear(d, width, True) + norm(width)).times(has_head),
        "other": linear(d, 2, True).times(judges_pairs) + discriminator.times(discriminates),
    }
    maps = linear(width, d, bias=True).times(width != d)
    ends = config.token_tables(width, has_head, maps=maps, head_biases=int(has_head))
    if has_head and not ends.tied:
        ends = replace(ends, head_biases=head_biases)
    stack = _bert_layers(config, width, ffn_width, token_types, config.flag(crosses))
    return Architecture(config.family, d, ends, (stack,), around)


def _bert_layers(config: Config, table_width: int, ffn_width: str, token_types: bool, crosses: bool) -> AppliedLayers:
    """Read the layers of a post-norm encoder, with its embeddings.

    Raises:
        PlanError: the layers have cross-attention and the model is no decoder.
    """
    if crosses and not config.flag("is_decoder"):
        raise PlanError(f"{config.family} has {CROSSES} only as a decoder", "set is_decoder to true")
    d, count, ffn = config.size("hidden_size"), config.size("num_attention_heads"), config.size(ffn_width)
    heads, norms = Heads.of(d, count), norm(d)
    maps = heads.maps(d, True, True)
    attention, saved_by_attention = {"attention": maps, "norms": norms}, 6 * d
    if crosses:
        attention |= {"cross_attention": maps, "norms": norms.times(2)}
        saved_by_attention *= 2
    layer = LayerCounts(attention, {"ffn": feed_forward(d, ffn, gated=False, bias=True), "norms": norms})
    around = {
        "positions": lookup(config.size("max_position_embeddings"), table_width),
        "embedding_norm": norm(table_width),
    }
    if token_types:
        around["token_types"] = lookup(config.size("type_vocab_size"), table_width)
    layers = (layer,) * config.size("num_hidden_layers")
    return AppliedLayers("encoder", layers, around, heads, saved_by_attention + 2 * d + 2 * ffn)


@register_reader("albert")
def _albert(config: Config, **more: Any) -> Architecture:
    """Read a BERT with groups of layers that share parameters.

    The map behind its table exists even if the two widths are equal.
    """
    architecture = bert(config, **more)
    ends, (stack,) = architecture.ends, architecture.stacks
    inner = config.size("inner_group_num")  # layers of one group, applied together
    layers = tuple(_repeat_counts(layer, inner) for layer in stack.layers)
    stack = replace(
        stack,
        layers=layers,
        saved_per_token=inner * stack.saved_per_token,
        sharing=SharingSpec("all", config.size("num_hidden_groups")),
    )
    ends = replace(ends, maps=linear(ends.width, architecture.width, bias=True))
    return replace(architecture, ends=ends, stacks=(stack,))


def _repeat_counts(layer: LayerCounts, times: int) -> LayerCounts:
    """Return the counts of a layer, `times` over."""
    attention = {name: count.times(times) for name, count in layer.attention.items()}
    return LayerCounts(attention, {name: count.times(times) for name, count in layer.ffn.items()})


@register_reader("modernbert")
def _modernbert(config: Config) -> Architecture:
    kind, has_head = "layer without bias", config.head == "lm"
    if config.flag("norm_bias"):
        kind = "layer"
    architecture = llama(config, grouped=False, kind=kind, embedding_norm=True, fresh=None)
    d, (stack,) = architecture.width, architecture.stacks
    first, *rest = stack.layers
    # the first layer reads the output of the embedding's norm, so it has no attention norm
    first = replace(first, attention={"attention": first.attention["attention"]})
    encoder = replace(stack, name="encoder", layers=(first, *rest))
    transform = linear(d, d, config.flag("classifier_bias")) + norm(d, kind)
    around = {"head_transform": transform.times(has_head)}
    ends = config.token_tables(d, has_head, head_biases=int(has_head and config.flag("decoder_bias")))
    return replace(architecture, ends=ends, stacks=(encoder,), around=around)


# Encoder-decoders: if tied, one table serves encoder, decoder and head


@dataclass(frozen=True)
class Sublayers:
    """Attention and feed-forward shapes in the layers of an encoder or a decoder."""

    heads: Heads
    ffn: int
    gated: bool = False
    kind: str = "layer"  # kind of norm
    biases: bool = True
    positions: Count = field(default_factory=Count)  # relative positions, stored per layer

    def side(self, name: str, d: int, layers: int, around: Counts) -> AppliedLayers:
        """Count `layers` layers of an encoder or decoder of width `d`.

        `around` has the counts of parts outside the layers.
        """
        maps = self.heads.maps(d, self.biases, self.biases)
        attended = 1
        mixing = {"attention": maps, "norms": norm(d, self.kind), "positions": self.positions}
        if name == "decoder":  # a decoder also attends to the source
            attended = 2
            mixing |= {"cross_attention": maps, "norms": norm(d, self.kind, 2)}
        ffns = {"ffn": feed_forward(d, self.ffn, self.gated, self.biases), "norms": norm(d, self.kind)}
        saved_by_attention = attended * (2 * d + 4 * self.heads.count * self.heads.width)
        saved = saved_by_attention + 2 * d + self.ffn * _values_between(self.gated)
        return AppliedLayers(name, (LayerCounts(mixing, ffns),) * layers, around, self.heads, saved)


@register_reader("t5")
def _t5(config: Config, positions_in_layers: bool = False) -> Architecture:
    d, count, ffn = config.size("d_model"), config.size("num_heads"), config.size("d_ff")
    heads = Heads(count, config.size("d_kv"), count)
    sublayers = Sublayers(heads, ffn, _is_t5_gated(config), kind="rms", biases=False)
    around = {"norms": norm(d, "rms")}
    relative = elementwise(config.size("relative_attention_num_buckets") * count)
    if positions_in_layers:
        sublayers = replace(sublayers, positions=relative)
    else:
        around["positions"] = relative
    depth = config.size("num_layers")
    decoder_depth = config.size("num_decoder_layers", depth)
    if config.class_name.endswith("EncoderModel"):
        # with this flag the class for the encoder alone builds a decoder, which attends to another encoder
        stacks = [sublayers.side("decoder" if config.flag("is_decoder") else "encoder", d, depth, around)]
    else:
        stacks = [sublayers.side("encoder", d, depth, around), sublayers.side("decoder", d, decoder_depth, around)]
    head = config.head != "none"
    notes: tuple[str, ...] = ()
    if head and config.values.get("tie_word_embeddings") is False:
        notes = (
            "The config says untied, and transformers 5.23 ties this class anyway. "
            "The checkpoint may store a separate head; see the column untied.",
        )
    return Architecture(
        config.family, d, TokenTables(config.size("vocab_size"), d, head, head), tuple(stacks), notes=notes
    )


def _is_t5_gated(config: Config) -> bool:
    """Return whether the ffn of a T5 has a gate.

    A stored value replaces the one that its class derives.
    """
    derived = config.text("feed_forward_proj").startswith("gated-")
    return bool(config.get("is_gated_act", derived))


@register_reader("bart")
def _bart(config: Config, learned_positions: bool = False, final_norm: bool = False) -> Architecture:
    """Read BART and related models, or their decoder alone if a `ForCausalLM` class is saved.

    Positions are learned, or sinusoids that are stored and never trained.
    """
    d, rows = config.size("d_model"), config.size("max_position_embeddings")
    if learned_positions:
        rows += 2
    around = {
        "positions": lookup(rows, d),
        "embedding_norm": norm(d, count=int(learned_positions)),
        "norms": norm(d, count=int(final_norm)),
    }
    sides = ["encoder", "decoder"]
    if _is_decoder_alone(config):
        sides = ["decoder"]
    stacks = []
    for name in sides:
        layers, count = config.size(f"{name}_layers"), config.size(f"{name}_attention_heads")
        sublayers = Sublayers(Heads.of(d, count), config.size(f"{name}_ffn_dim"))
        stacks.append(sublayers.side(name, d, layers, around))
    architecture = Architecture(config.family, d, config.token_tables(d), tuple(stacks))
    if not learned_positions:
        architecture = replace(architecture, frozen=len(sides) * rows * d)
    if config.flag("tie_word_embeddings") or _is_decoder_alone(config):
        return architecture
    note = "Untied, the class also stores one table for the encoder and one for the decoder, counted as other."
    other = lookup(config.size("vocab_size"), d).times(2, 0)
    return replace(architecture, around={"other": other}, notes=(note,))


def _is_decoder_alone(config: Config) -> bool:
    """Return whether the saved class of an encoder-decoder family is its decoder with a head."""
    return saved_class(config.values).endswith("ForCausalLM")


@register_reader("marian")
def _marian(config: Config) -> Architecture:
    """Read a BART whose encoder and decoder may have different vocabularies."""
    architecture = _bart(config)
    is_alone = _is_decoder_alone(config)
    if config.flag("share_encoder_decoder_embeddings") and not is_alone:
        return architecture
    vocab = config.size("vocab_size")
    ends = replace(architecture.ends, vocab=config.size("decoder_vocab_size", vocab))
    if is_alone:
        return replace(architecture, ends=ends, not_counted=_untied_rows(ends, vocab))
    other = lookup(vocab, architecture.width)
    note = "The encoder has a separate table, counted as other."
    return replace(architecture, ends=ends, around={"other": other}, notes=(note,))


def _untied_rows(ends: TokenTables, rows: int) -> tuple[str, ...]:
    """Return an untied head with other rows than its table, which is not counted."""
    if ends.tied or not ends.head or ends.vocab == rows:
        return ()
    return (f"a head with {rows:,} rows (vocab_size)",)
