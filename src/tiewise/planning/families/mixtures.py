"""Decoders with experts: a router sends each token to a few of many ffns.

Sources: the modeling files of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tiewise.planning.architecture import Architecture
from tiewise.planning.config import Config
from tiewise.planning.families.decoders import modern, qwen3_attention
from tiewise.planning.families.shape import Attention, Decoder, Experts, FeedForward, LatentAttention, heads_of


def _stepped(c: Config, shape: dict[str, Any], experts: Experts) -> Decoder:
    """Experts in every `decoder_sparse_step`-th layer but those of `mlp_only_layers`."""
    step, only = c.size("decoder_sparse_step"), c.indices("mlp_only_layers")
    dense = frozenset(i for i in range(shape["layers"]) if i in only or (i + 1) % step)
    return Decoder(**{**shape, "signal": None}, experts=experts, dense_layers=dense)


def _qwen2_moe(c: Config) -> Decoder:
    width, shared = c.size("moe_intermediate_size"), c.size("shared_expert_intermediate_size")
    experts = Experts(c.size("num_experts"), c.size("num_experts_per_tok"), width, shared, shared_gate=True)
    return _stepped(c, modern(c, attention={"bias": c.flag("qkv_bias")}), experts)


def _qwen3_moe(c: Config) -> Decoder:
    experts = Experts(c.size("num_experts"), c.size("num_experts_per_tok"), c.size("moe_intermediate_size"))
    return _stepped(c, modern(c, attention=qwen3_attention(c)), experts)


def _mixtral(c: Config) -> Decoder:
    experts = Experts(c.size("num_local_experts"), c.size("num_experts_per_tok"), c.size("intermediate_size"))
    return Decoder(**{**modern(c), "signal": None}, experts=experts)


def _gpt_oss(c: Config) -> Decoder:
    bias, heads = c.flag("attention_bias"), c.size("num_attention_heads")
    width, count = c.size("intermediate_size"), c.size("num_local_experts")
    experts = Experts(count, c.size("num_experts_per_tok"), width, bias=True)
    attention = {"bias": bias, "out_bias": bias, "norms": heads}  # one sink a head
    return Decoder(**{**modern(c, attention=attention), "signal": None}, experts=experts)


def _llama4(c: Config) -> Decoder:
    d, bias, width = c.size("hidden_size"), c.flag("attention_bias"), c.size("intermediate_size")
    layers, step = c.size("num_hidden_layers"), c.size("interleave_moe_layer_step")
    attention = Attention(*heads_of(c, d), bias=bias, out_bias=bias)
    every = c.get("moe_layers") is None
    sparse = range(step - 1, layers, step) if every else c.indices("moe_layers")
    experts = Experts(c.size("num_local_experts"), c.size("num_experts_per_tok"), width, shared_width=width)
    dense = frozenset(i for i in range(layers) if i not in sparse)
    ffn = FeedForward(c.size("intermediate_size_mlp"))
    return Decoder(c, d, layers, attention, ffn, experts=experts, dense_layers=dense)


def _deepseek(c: Config) -> Decoder:
    d, layers, count = c.size("hidden_size"), c.size("num_hidden_layers"), c.size("n_routed_experts")
    attention = LatentAttention(
        c.size("num_attention_heads"),
        c.size("q_lora_rank", 0, least=0),
        c.size("kv_lora_rank"),
        c.size("qk_nope_head_dim"),
        c.size("qk_rope_head_dim"),
        c.size("v_head_dim"),
        c.flag("attention_bias"),
    )
    width = c.size("moe_intermediate_size")
    shared = c.size("n_shared_experts", 0, least=0) * width
    bias = c.family == "deepseek_v2" and c.flag("mlp_bias")  # of dense and shared ffns; version 3 has none
    experts = Experts(count, c.size("num_experts_per_tok", count), width, shared, shared_bias=bias)
    dense = frozenset(range(min(layers, c.size("first_k_dense_replace", 0, least=0))))
    ffn = FeedForward(c.size("intermediate_size"), bias=bias)
    return Decoder(c, d, layers, attention, ffn, experts=experts, dense_layers=dense)


READERS: dict[str, Callable[[Config], Decoder]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}


def read(c: Config) -> Architecture:
    """Read a decoder whose model type is in `READERS`."""
    return READERS[c.family](c).architecture()
