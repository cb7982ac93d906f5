"""Exact readers: each turns the config of a family into an `Architecture`. Records of families name them.

Counts are what transformers 5.23 builds, to the parameter (its modeling files are the source). Nearly every decoder is
`decoder` with a few words of its own, and nearly every encoder is BERT, T5 or BART.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
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
    dense: Collection[int] = ()  # layers with a plain ffn instead

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
    kv_heads, width = c.size("num_key_value_heads", count), None
    if c.get("head_dim") is not None:
        width = c.size("head_dim")
    return Heads.of(d, count, kv_heads, width)


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
    norms_of_queries = _query_norms(heads, kind, query_norms) * c.flag(normed_queries)
    if maps is None:
        if out_bias is None:
            out_bias = bias
        maps = heads.maps(d, c.flag(bias), c.flag(out_bias), norms_of_queries)
    plain = feed_forward(d, ffn, gated, c.flag(ffn_bias))
    if isinstance(positions, str):
        positions = c.size(positions)
    norms_of_attention, norms_of_ffn, norms_of_both = ({"norms": norm(d, kind, n)} for n in NORMS[norms])
    attention = {"attention": maps, **norms_of_attention}
    counted_layers = []
    for ffn_counts in _ffns(d, layers, plain, experts):
        counted_layers.append(LayerCounts(attention, {**ffn_counts, **norms_of_ffn}, norms_of_both))
    around = {
        "positions": lookup(positions, d),
        "embedding_norm": norm(d, kind, int(embedding_norm)),
        "norms": norm(d, kind, int(final_norm)),
    }
    all_heads = (heads.count + heads.kv) * heads.width
    saved_in_ffn = _middle_width(ffn, experts) * _values_between(gated)
    saved_per_token = 4 * d + 2 * all_heads + saved_in_ffn  # inputs of products, of norms and activations
    stack = AppliedLayers("decoder", tuple(counted_layers), around, heads, saved_per_token)
    table_width = table_width or d
    between = Count()
    if table_width != d:
        between = linear(table_width, d).times(2)
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


def _ffns(d: int, layers: int, plain: Count, experts: Experts | None) -> list[Counts]:
    """Count the feed-forward part of each layer: a plain one, or experts."""
    ffns: list[Counts] = [{"ffn": plain}] * layers
    if experts is not None:
        for index in set(range(layers)).difference(experts.dense):
            ffns[index] = experts.counts(d)
    return ffns


def _values_between(gated: bool) -> int:
    """Return how many values of a middle neuron an ffn keeps for the backward pass: its inputs, its output."""
    return 3 if gated else 2


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
    if experts is None:
        return ffn
    return experts.width * experts.chosen + experts.shared_width


def _activation(c: Config) -> str:
    """Return the activation by its usual keys; "" where the config names none."""
    names = filter(None, map(c.text, ACTIVATION_KEYS))
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
    if known.reader is None:
        return None
    return partial(READERS[known.reader.name], **known.reader.options)


@reads("gemma")
def _gemma(c: Config) -> Architecture:
    return biased(c, fresh={"input_scale": math.sqrt(c.size("hidden_size"))})


@reads("gemma2")
def _gemma2(c: Config, **more: Any) -> Architecture:
    fresh = {
        "input_scale": math.sqrt(c.size("hidden_size")),
        "attention_scale": c.number("query_pre_attn_scalar") ** -0.5,
    }
    if c.get("final_logit_softcapping") is not None:
        fresh["softcap"] = c.number("final_logit_softcapping")
    return biased(c, norms="four", fresh=fresh, **more)


@reads("cohere")
def _cohere(c: Config) -> Architecture:
    return cohere(c, fresh={"output_scale": c.number("logit_scale")})


@reads("gpt_bigcode")
def _gpt_bigcode(c: Config) -> Architecture:
    """Read GPT-2 with one head of keys and values where `multi_query` is on."""
    heads = heads_of(c, grouped=False)
    if c.flag("multi_query"):
        heads = replace(heads, kv=1)
    return gpt2(c, heads=heads)


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
    fresh = {
        "input_scale": c.number("embedding_multiplier", 1.0),
        "residual_scale": c.number("residual_multiplier", 1.0),
        "attention_scale": c.number("attention_multiplier", 1.0),
        "output_scale": 1 / c.number("logits_scaling", 1.0),
    }
    return llama(c, fresh=fresh)


@reads("falcon")
def _falcon(c: Config) -> Architecture:
    heads, is_parallel, usual_norms = heads_of(c, grouped=False), c.flag("parallel_attn"), 1
    if c.flag("new_decoder_architecture"):
        heads, usual_norms = replace(heads, kv=c.size("num_kv_heads", heads.count)), 2
    elif c.flag("multi_query"):
        heads = replace(heads, kv=1)
    norms = "two"
    if is_parallel and c.size("num_ln_in_parallel_attn", usual_norms) != 2:
        norms = "one"
    plain = partial(gpt, bias="bias", ffn_bias="bias", ffn_width="ffn_hidden_size", parallel=is_parallel)
    return plain(c, heads=heads, norms=norms)


@reads("qwen2_moe")
def _qwen2_moe(c: Config) -> Architecture:
    """Read experts, one of them shared behind a gate."""
    shared_width = c.size("shared_expert_intermediate_size")
    experts = replace(_qwen_experts(c), shared_width=shared_width, shared_gate=True)
    return decoder(c, bias="qkv_bias", out_bias=False, experts=experts, fresh=None)


@reads("qwen3_moe")
def _qwen3_moe(c: Config) -> Architecture:
    return qwen3(c, experts=_qwen_experts(c), fresh=None)


def _qwen_experts(c: Config) -> Experts:
    """Read experts in every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    step, only = c.size("decoder_sparse_step"), c.indices("mlp_only_layers")
    layers = set(range(c.size("num_hidden_layers")))
    dense = layers.difference(range(step - 1, len(layers), step)).union(only)
    return experts_of(c, "num_experts", "moe_intermediate_size", dense=dense)


@reads("llama4")
def _llama4(c: Config) -> Architecture:
    layers, step = c.size("num_hidden_layers"), c.size("interleave_moe_layer_step")
    sparse = list(range(step - 1, layers, step))
    if c.get("moe_layers") is not None:
        sparse = c.indices("moe_layers")
    experts = experts_of(c, shared_width=c.size("intermediate_size"), dense=set(range(layers)).difference(sparse))
    return biased(c, ffn_width="intermediate_size_mlp", experts=experts, fresh=None)


@reads("deepseek")
def _deepseek(c: Config, ffn_bias: Switch = False) -> Architecture:
    """Read keys and values through a narrow latent state; queries too, where `q_lora_rank` is not 0."""
    d, count = c.size("hidden_size"), c.size("num_attention_heads")
    q_rank, kv_rank = c.size("q_lora_rank", 0, least=0), c.size("kv_lora_rank")
    # a head's keys are `nope` wide and `rope` more that all heads share
    nope, rope, value = c.size("qk_nope_head_dim"), c.size("qk_rope_head_dim"), c.size("v_head_dim")
    bias, queries = c.flag("attention_bias"), count * (nope + rope)
    if q_rank:
        query_maps = linear(d, q_rank, bias) + elementwise(q_rank) + linear(q_rank, queries)
    else:
        query_maps = linear(d, queries)
    key_maps = linear(d, kv_rank + rope, bias) + elementwise(kv_rank) + linear(kv_rank, count * (nope + value))
    maps = query_maps + key_maps + linear(count * value, d, bias)
    routed, width = c.size("n_routed_experts"), c.size("moe_intermediate_size")
    shared, dense = c.size("n_shared_experts", 0, least=0), c.size("first_k_dense_replace", 0, least=0)
    chosen = c.size("num_experts_per_tok", routed)
    experts = Experts(routed, chosen, width, shared * width, shared_bias=c.flag(ffn_bias), dense=range(dense))
    heads = Heads(count, (nope + rope + value) // 2, count, latent=kv_rank + rope)  # the mean of keys and values
    return decoder(c, heads=heads, maps=maps, ffn_bias=ffn_bias, experts=experts, fresh=None)


@reads("mamba")
def _mamba(c: Config) -> Architecture:
    """Read a gated convolution and a selective state space per layer, where others attend, and no ffn."""
    d, state, kernel = c.size("hidden_size"), c.size("state_size"), c.size("conv_kernel")
    inner = int(c.number("expand") * d)
    if c.get("time_step_rank") == "auto":
        rank = math.ceil(d / 16)
    else:
        rank = c.size("time_step_rank")
    bias, conv_bias = c.flag("use_bias"), inner * c.flag("use_conv_bias")
    convolution = Count(inner * kernel, inner * kernel, inner * kernel)
    mixer = linear(d, 2 * inner, bias) + convolution + linear(inner, rank + 2 * state)
    mixer += linear(rank, inner, True) + linear(inner, d, bias)
    mixer += elementwise(inner * state + inner + conv_bias)
    layers = (LayerCounts({"mixer": mixer, "norms": norm(d, "rms")}, {}),) * c.size("num_hidden_layers")
    heads = Heads(state=inner * (state + kernel))
    stack = AppliedLayers("decoder", layers, {"norms": norm(d, "rms")}, heads, 2 * d + 6 * inner)
    return Architecture(c.family, d, c.token_tables(d), (stack,))


# Encoders, whose head transforms the hidden state (dense, activation, norm) before the table


@reads("bert")
def bert(
    c: Config,
    *,
    table_width: str = "hidden_size",  # the key of the token table's width
    ffn_width: str = "intermediate_size",
    token_types: bool = True,
    pools: bool = False,  # whether the bare model has a pooler
    judges_pairs: bool = False,  # pretraining: two classes on the pooled state (next sentence, sentence order)
    discriminates: bool = False,  # pretraining: a head that detects replaced tokens (ELECTRA), and no token head
    head_biases: int = 1,  # bias vectors of an untied token head: BERT and RoBERTa store two; a tied one has one
) -> Architecture:
    """Read post-norm encoders: BERT, RoBERTa, DistilBERT, ELECTRA."""
    d, width = c.size("hidden_size"), c.size(table_width)
    is_pretraining = c.head == "pretraining"
    judges_pairs = judges_pairs and is_pretraining
    discriminates = discriminates and is_pretraining
    has_head = c.head == "lm" or judges_pairs
    has_pooler = judges_pairs or (pools and c.head == "none")
    discriminator = linear(d, d, True) + linear(d, 1, True)
    around = {
        "pooler": linear(d, d, True).times(has_pooler),
        "head_transform": (linear(d, width, True) + norm(width)).times(has_head),
        "other": linear(d, 2, True).times(judges_pairs) + discriminator.times(discriminates),
    }
    maps = linear(width, d, bias=True).times(width != d)
    ends = c.token_tables(width, has_head, maps=maps, head_biases=int(has_head))
    if has_head and not ends.tied:
        ends = replace(ends, head_biases=head_biases)
    stack = _bert_layers(c, width, ffn_width, token_types)
    return Architecture(c.family, d, ends, (stack,), around)


def _bert_layers(c: Config, table_width: int, ffn_width: str, token_types: bool) -> AppliedLayers:
    """Read the layers of a post-norm encoder, with its embeddings."""
    d, count, ffn = c.size("hidden_size"), c.size("num_attention_heads"), c.size(ffn_width)
    heads, norms = Heads.of(d, count), norm(d)
    attention = {"attention": heads.maps(d, True, True), "norms": norms}
    layer = LayerCounts(attention, {"ffn": feed_forward(d, ffn, gated=False, bias=True), "norms": norms})
    around = {
        "positions": lookup(c.size("max_position_embeddings"), table_width),
        "embedding_norm": norm(table_width),
    }
    if token_types:
        around["token_types"] = lookup(c.size("type_vocab_size"), table_width)
    layers = (layer,) * c.size("num_hidden_layers")
    return AppliedLayers("encoder", layers, around, heads, 8 * d + 2 * ffn)


@reads("albert")
def _albert(c: Config, **more: Any) -> Architecture:
    """Read BERT with groups of layers that share, and with a map behind its table even where widths are equal."""
    architecture = bert(c, **more)
    ends, (stack,) = architecture.ends, architecture.stacks
    inner = c.size("inner_group_num")  # layers of one group, applied together
    layers = tuple(_repeated(layer, inner) for layer in stack.layers)
    stack = replace(
        stack,
        layers=layers,
        saved_per_token=inner * stack.saved_per_token,
        sharing=SharingSpec("all", c.size("num_hidden_groups")),
    )
    ends = replace(ends, maps=linear(ends.width, architecture.width, bias=True))
    return replace(architecture, ends=ends, stacks=(stack,))


def _repeated(layer: LayerCounts, times: int) -> LayerCounts:
    """Return the counts of a layer so many times."""
    attention = {name: count.times(times) for name, count in layer.attention.items()}
    return LayerCounts(attention, {name: count.times(times) for name, count in layer.ffn.items()})


@reads("modernbert")
def _modernbert(c: Config) -> Architecture:
    kind, has_head = "layer without bias", c.head == "lm"
    if c.flag("norm_bias"):
        kind = "layer"
    architecture = llama(c, grouped=False, kind=kind, embedding_norm=True, fresh=None)
    d, (stack,) = architecture.width, architecture.stacks
    first, *rest = stack.layers
    first = replace(first, attention={"attention": first.attention["attention"]})  # reads the embedding's own norm
    encoder = replace(stack, name="encoder", layers=(first, *rest))
    transform = linear(d, d, c.flag("classifier_bias")) + norm(d, kind)
    around = {"head_transform": transform.times(has_head)}
    ends = c.token_tables(d, has_head, head_biases=int(has_head and c.flag("decoder_bias")))
    return replace(architecture, ends=ends, stacks=(encoder,), around=around)


# Encoder-decoders, in which one table serves encoder, decoder and head where it is tied


@dataclass(frozen=True)
class Sublayers:
    """Attention and feed-forward of one side's layers."""

    heads: Heads
    ffn: int
    gated: bool = False
    kind: str = "layer"  # of norm
    biases: bool = True
    positions: Count = field(default_factory=Count)  # relative positions that each layer stores for itself

    def side(self, name: str, d: int, layers: int, around: Counts) -> AppliedLayers:
        """Count so many layers of an encoder or decoder of width `d`, and what is `around` them."""
        maps = self.heads.maps(d, self.biases, self.biases)
        attended = 1
        mixing = {"attention": maps, "norms": norm(d, self.kind), "positions": self.positions}
        if name == "decoder":  # which attends to the source too
            attended = 2
            mixing |= {"cross_attention": maps, "norms": norm(d, self.kind, 2)}
        ffns = {"ffn": feed_forward(d, self.ffn, self.gated, self.biases), "norms": norm(d, self.kind)}
        saved_by_attention = attended * (2 * d + 4 * self.heads.count * self.heads.width)
        saved = saved_by_attention + 2 * d + self.ffn * _values_between(self.gated)
        return AppliedLayers(name, (LayerCounts(mixing, ffns),) * layers, around, self.heads, saved)


@reads("t5")
def _t5(c: Config, positions_in_layers: bool = False) -> Architecture:
    d, count, ffn = c.size("d_model"), c.size("num_heads"), c.size("d_ff")
    heads, gated = Heads(count, c.size("d_kv"), count), c.text("feed_forward_proj").startswith("gated-")
    sublayers = Sublayers(heads, ffn, gated, kind="rms", biases=False)
    around = {"norms": norm(d, "rms")}
    relative = elementwise(c.size("relative_attention_num_buckets") * count)
    if positions_in_layers:
        sublayers = replace(sublayers, positions=relative)
    else:
        around["positions"] = relative
    depth = c.size("num_layers")
    decoder_depth = c.size("num_decoder_layers", depth)
    stacks = [sublayers.side("encoder", d, depth, around)]
    if not c.class_name.endswith("EncoderModel"):
        stacks.append(sublayers.side("decoder", d, decoder_depth, around))
    head = c.head != "none"
    notes: tuple[str, ...] = ()
    if head and c.values.get("tie_word_embeddings") is False:
        notes = (
            "transformers 5.23 builds this class tied whatever the file says; "
            "this file says untied, and its checkpoint may hold a separate head: compare with the choice untied",
        )
    return Architecture(c.family, d, TokenTables(c.size("vocab_size"), d, head, head), tuple(stacks), notes=notes)


@reads("bart")
def _bart(c: Config, learned_positions: bool = False, final_norm: bool = False) -> Architecture:
    """Read BART and its kin. Positions are learned, or sinusoids that are stored and never trained."""
    d, rows = c.size("d_model"), c.size("max_position_embeddings")
    if learned_positions:
        rows += 2
    around = {
        "positions": lookup(rows, d),
        "embedding_norm": norm(d, count=int(learned_positions)),
        "norms": norm(d, count=int(final_norm)),
    }
    stacks = []
    for name in ("encoder", "decoder"):
        layers, count = c.size(f"{name}_layers"), c.size(f"{name}_attention_heads")
        sublayers = Sublayers(Heads.of(d, count), c.size(f"{name}_ffn_dim"))
        stacks.append(sublayers.side(name, d, layers, around))
    architecture = Architecture(c.family, d, c.token_tables(d), tuple(stacks))
    if not learned_positions:
        architecture = replace(architecture, frozen=2 * rows * d)
    if c.flag("tie_word_embeddings"):
        return architecture
    note = "untied, the class also stores a table of the encoder's and one of the decoder's, counted as other"
    other = lookup(c.size("vocab_size"), d).times(2, 0)
    return replace(architecture, around={"other": other}, notes=(note,))


@reads("marian")
def _marian(c: Config) -> Architecture:
    """Read BART, whose encoder may have another vocabulary than its decoder."""
    architecture = _bart(c)
    if c.flag("share_encoder_decoder_embeddings"):
        return architecture
    vocab = c.size("vocab_size")
    ends = replace(architecture.ends, vocab=c.size("decoder_vocab_size", vocab))
    other = lookup(vocab, architecture.width)
    note = "the encoder has a table of its own, counted as other"
    return replace(architecture, ends=ends, around={"other": other}, notes=(note,))
