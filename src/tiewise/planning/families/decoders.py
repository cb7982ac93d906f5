"""Decoders: model type -> what its class builds. Sources: the modeling files of transformers 5.23."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tiewise.core.mean_field import ACTIVATIONS, Signal
from tiewise.planning.architecture import Architecture
from tiewise.planning.config import Config
from tiewise.planning.families.shape import Attention, Decoder, FeedForward, even, heads_of


def _signal(c: Config, attention: Attention, ffn: FeedForward, **other: Any) -> Signal | None:
    activation = c.text("hidden_activation") or c.text("hidden_act") or c.text("activation_function")
    known = activation or c.text("activation")
    if known not in ACTIVATIONS:
        return None
    return Signal(
        std=other.pop("std", None) or c.number("initializer_range", 0.02),
        heads=attention.heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        ffn=ffn.width,
        layers=c.size("num_hidden_layers"),
        activation=known,
        gated=ffn.gated,
        normed_queries=attention.norms > 0,
        **other,
    )


def classic(c: Config, bias: bool, out_bias: bool, mlp_bias: bool = True, **scales: Any) -> dict[str, Any]:
    """Full attention heads, a plain ffn of 4 D unless said otherwise, LayerNorm."""
    d = c.size("hidden_size")
    heads = c.size("num_attention_heads")
    attention = Attention(heads, heads, even(d, heads), bias, out_bias)
    ffn = FeedForward(c.size("intermediate_size", 4 * d), gated=False, bias=mlp_bias)
    sizes = {"config": c, "width": d, "layers": c.size("num_hidden_layers")}
    signal = _signal(c, attention, ffn, **scales)
    return {**sizes, "attention": attention, "ffn": ffn, "norm": "layer", "signal": signal}


def _gpt2(c: Config) -> Decoder:
    std = c.number("initializer_range", 0.02)
    return Decoder(**classic(c, True, True, positions_std=std, depth_scaled=True), positions=c.size("n_positions"))


def _gpt_neo(c: Config) -> Decoder:
    std = c.number("initializer_range", 0.02)
    scales: dict[str, Any] = {"positions_std": std, "attention_scale": 1.0}
    return Decoder(**classic(c, False, True, **scales), positions=c.size("max_position_embeddings"))


def _gpt_bigcode(c: Config) -> Decoder:
    d, heads = c.size("hidden_size"), c.size("num_attention_heads")
    kv_heads = 1 if c.flag("multi_query") else heads
    attention = Attention(heads, kv_heads, even(d, heads), bias=True, out_bias=True)
    shape = classic(c, True, True, positions_std=c.number("initializer_range", 0.02), depth_scaled=True)
    if shape["signal"]:
        shape["signal"] = replace(shape["signal"], kv_heads=kv_heads)
    return Decoder(**{**shape, "attention": attention}, positions=c.size("n_positions"))


def _mpt(c: Config) -> Decoder:
    d, heads = c.size("hidden_size"), c.size("num_attention_heads")
    attention, ffn = Attention(heads, heads, even(d, heads)), FeedForward(4 * d, gated=False)
    return Decoder(c, d, c.size("num_hidden_layers"), attention, ffn, norm="layer without bias")


def _gptj(c: Config) -> Decoder:
    one: dict[str, Any] = {"attention_norms": 0, "ffn_norms": 0, "own_norms": 1, "head_bias": True}
    return Decoder(**classic(c, False, False, arrangement="parallel"), **one)


def _gpt_neox(c: Config) -> Decoder:
    bias = c.flag("attention_bias")
    arrangement = "parallel" if c.flag("use_parallel_residual") else "sequential"
    return Decoder(**classic(c, bias, bias, arrangement=arrangement))


def _bloom(c: Config) -> Decoder:
    shape = classic(c, True, True)
    shape["signal"] = None  # its embedding norm has not been measured
    return Decoder(**shape, embedding_norm=True)


def _opt(c: Config) -> Decoder:
    bias = c.flag("enable_bias")
    before = c.flag("do_layer_norm_before")
    width = c.size("word_embed_proj_dim", c.size("hidden_size"))
    std = c.number("init_std", 0.02)
    shape = classic(c, bias, bias, bias, std=std, positions_std=std)
    if not before or width != shape["width"]:
        shape["signal"] = None
    shape["norm"] = "layer" if c.flag("layer_norm_elementwise_affine") else "none"
    return Decoder(
        **shape,
        final_norm=before and not c.flag("_remove_final_layer_norm"),
        positions=c.size("max_position_embeddings") + 2,
        table_width=width,
    )


def modern(c: Config, **changed: Any) -> dict[str, Any]:
    """Grouped key-value heads, a gated ffn, RMSNorm, no biases; `changed` overrides attention, ffn and scales."""
    d = c.size("hidden_size")
    heads, kv_heads, head_dim = heads_of(c, d)
    attention = Attention(heads, kv_heads, head_dim, **changed.pop("attention", {}))
    ffn = FeedForward(c.size("intermediate_size", 4 * d), **changed.pop("ffn", {}))
    signal = _signal(c, attention, ffn, **changed)
    sizes = {"config": c, "width": d, "layers": c.size("num_hidden_layers")}
    return {**sizes, "attention": attention, "ffn": ffn, "signal": signal}


def _llama(c: Config) -> Decoder:
    bias, mlp_bias = c.flag("attention_bias"), c.flag("mlp_bias")
    return Decoder(**modern(c, attention={"bias": bias, "out_bias": bias}, ffn={"bias": mlp_bias}))


def _glm(c: Config) -> Decoder:
    return Decoder(**modern(c, attention={"bias": c.flag("attention_bias")}))


def _ernie(c: Config) -> Decoder:
    bias = c.flag("use_bias")
    return Decoder(**modern(c, attention={"bias": bias, "out_bias": bias}, ffn={"bias": bias}))


def _granite(c: Config) -> Decoder:
    bias, mlp_bias = c.flag("attention_bias"), c.flag("mlp_bias")
    scales = {
        "input_scale": c.number("embedding_multiplier", 1.0),
        "output_scale": 1 / c.number("logits_scaling", 1.0),
        "residual_scale": c.number("residual_multiplier", 1.0),
        "attention_scale": c.number("attention_multiplier", 1.0),
    }
    return Decoder(**modern(c, attention={"bias": bias, "out_bias": bias}, ffn={"bias": mlp_bias}, **scales))


def _qwen2(c: Config) -> Decoder:
    return Decoder(**modern(c, attention={"bias": True}))


def qwen3_attention(c: Config) -> dict[str, Any]:
    """Biases and per-head norms of Qwen3's attention."""
    bias = c.flag("attention_bias")
    return {"bias": bias, "out_bias": bias, "norms": 2 * heads_of(c, c.size("hidden_size"))[2]}


def _qwen3(c: Config) -> Decoder:
    return Decoder(**modern(c, attention=qwen3_attention(c)))


def _gemma_scales(c: Config, cap: float | None = None) -> dict[str, Any]:
    bias = c.flag("attention_bias")
    attention = {"bias": bias, "out_bias": bias}
    return {"attention": attention, "input_scale": math.sqrt(c.size("hidden_size")), "softcap": cap}


def _gemma(c: Config) -> Decoder:
    return Decoder(**modern(c, **_gemma_scales(c)))


def _gemma2(c: Config) -> Decoder:
    cap = None if c.get("final_logit_softcapping") is None else c.number("final_logit_softcapping")
    scales = {**_gemma_scales(c, cap), "arrangement": "sandwich"}
    scales["attention_scale"] = c.number("query_pre_attn_scalar") ** -0.5
    if c.family == "gemma3_text":
        scales["attention"]["norms"] = 2 * c.size("head_dim")
    return Decoder(**modern(c, **scales), attention_norms=2, ffn_norms=2)


def _phi(c: Config) -> Decoder:
    d = c.size("hidden_size")
    norms = 4 * heads_of(c, d)[2] if c.flag("qk_layernorm") else 0
    attention = {"bias": True, "out_bias": True, "norms": norms}
    shape = modern(c, attention=attention, ffn={"gated": False, "bias": True}, arrangement="parallel")
    return Decoder(**shape, norm="layer", attention_norms=0, ffn_norms=0, own_norms=1, head_bias=True)


def _falcon(c: Config) -> Decoder:
    d, heads, bias = c.size("hidden_size"), c.size("num_attention_heads"), c.flag("bias")
    new, parallel = c.flag("new_decoder_architecture"), c.flag("parallel_attn")
    grouped = c.size("num_kv_heads", heads) if new else heads
    kv_heads = 1 if c.flag("multi_query") and not new else grouped
    attention = Attention(heads, kv_heads, even(d, heads), bias, bias)
    ffn = FeedForward(c.size("ffn_hidden_size", 4 * d), gated=False, bias=bias)
    two = not parallel or c.size("num_ln_in_parallel_attn", 2 if new else 1) == 2
    norms: dict[str, Any] = {} if two else {"attention_norms": 0, "ffn_norms": 0, "own_norms": 1}
    signal = _signal(c, attention, ffn, arrangement="parallel" if parallel else "sequential")
    return Decoder(c, d, c.size("num_hidden_layers"), attention, ffn, norm="layer", signal=signal, **norms)


def _cohere(c: Config) -> Decoder:
    bias = c.flag("attention_bias")
    d = c.size("hidden_size")
    heads, kv_heads, head_dim = heads_of(c, d)
    norms = (heads + kv_heads) * head_dim if c.flag("use_qk_norm") else 0
    attention = {"bias": bias, "out_bias": bias, "norms": norms}
    shape = modern(c, attention=attention, arrangement="parallel", output_scale=c.number("logit_scale"))
    return Decoder(**shape, norm="layer without bias", attention_norms=0, ffn_norms=0, own_norms=1)


def _olmo(c: Config) -> Decoder:
    bias = c.flag("attention_bias")
    return Decoder(**modern(c, attention={"bias": bias, "out_bias": bias}), norm="none")


def _olmo2(c: Config) -> Decoder:
    bias = c.flag("attention_bias")
    heads, kv_heads, head_dim = heads_of(c, c.size("hidden_size"))
    attention = {"bias": bias, "out_bias": bias, "norms": (heads + kv_heads) * head_dim}
    return Decoder(**{**modern(c, attention=attention), "signal": None})


def _stablelm(c: Config) -> Decoder:
    heads, kv_heads, head_dim = heads_of(c, c.size("hidden_size"))
    norms = (heads + kv_heads) * head_dim if c.flag("qk_layernorm") else 0
    parallel = c.flag("use_parallel_residual")
    arrangement = "parallel" if parallel else "sequential"
    shape = modern(c, attention={"bias": c.flag("use_qkv_bias"), "norms": norms}, arrangement=arrangement)
    one: dict[str, Any] = {"attention_norms": 0, "ffn_norms": 0, "own_norms": 1} if parallel else {}
    return Decoder(**shape, norm="layer", **one)


def _starcoder2(c: Config) -> Decoder:
    bias = c.flag("use_bias")
    shape = modern(c, attention={"bias": bias, "out_bias": bias}, ffn={"gated": False, "bias": bias})
    return Decoder(**shape, norm="layer")


READERS: dict[str, Callable[[Config], Decoder]] = {
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": _gpt_neo,
    "gptj": _gptj,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "bloom": _bloom,
    "mpt": _mpt,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma2,
    "phi": _phi,
    "phi3": _llama,
    "falcon": _falcon,
    "cohere": _cohere,
    "cohere2": _cohere,
    "granite": _granite,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo2,
    "glm": _glm,
    "ernie4_5": _ernie,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "smollm3": _llama,
}


def read(c: Config) -> Architecture:
    """Read a decoder whose model type is in `READERS`."""
    return READERS[c.family](c).architecture()
