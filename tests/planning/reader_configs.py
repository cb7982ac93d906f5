"""Small configs of families whose layers differ, each with the parameters that a token does not use.

`unused` is written out by hand: in every layer with experts, those that the router does not choose, of three matrices
[D, F] each (two without gates). Tables and towers are not in it. No class has these sizes.
"""

from dataclasses import dataclass, field
from typing import Any

V, D, L = 101, 48, 5  # vocabulary, width and layers, unless a case says otherwise


@dataclass(frozen=True)
class Case:
    """A config, and the parameters of experts that a token does not use."""

    name: str
    config: dict[str, Any] = field(hash=False)
    unused: int = 0


BASE = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": 4}
BASE |= {"num_key_value_heads": 2, "intermediate_size": 40, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
ROUTED = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_shared_experts": 3}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10}
DELTA |= {"linear_conv_kernel_dim": 3}
LATENT = {"q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
INDEX = {"index_n_heads": 3, "index_head_dim": 8, "index_topk": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_d_conv": 3}
GEMMA = {"head_dim": 10, "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 70}
MIXED = ["linear_attention", "full_attention", "full_attention", "linear_attention", "linear_attention"]


def case(name: str, family: str, *parts: dict[str, Any], unused: int = 0, **more: Any) -> Case:
    """Return a case of a family with the usual sizes."""
    config: dict[str, Any] = {"model_type": family, **BASE}
    for part in (*parts, more):
        config |= part
    if family == "deepseek_v4":
        del config["intermediate_size"]  # for its class this is another name of `moe_intermediate_size`
    return Case(f"{family}: {name}", config, unused)


def composite(name: str, family: str, text: Case, vision: dict[str, Any], **more: Any) -> Case:
    """Return a case of a composite with a language model and a vision tower."""
    config = {"model_type": family, "text_config": text.config, "vision_config": vision, "tie_word_embeddings": False}
    return Case(f"{family}: {name}", config | more, text.unused)


CASES = [
    # 3 · D · F · (E − k) for each layer with experts
    case(
        "default layers", "qwen3_next", EXPERTS, DELTA, unused=5 * 3 * 48 * 20 * 4, shared_expert_intermediate_size=12
    ),
    case(
        *("every second layer sparse, one only dense, tied", "qwen3_next", EXPERTS, DELTA),
        **{"decoder_sparse_step": 2, "mlp_only_layers": [3], "tie_word_embeddings": True, "head_dim": 20},
        **{"layer_types": MIXED, "attention_bias": True, "unused": 3 * 48 * 20 * 4},
    ),
    case("default layers", "qwen3_5_text", DELTA),
    case(
        "listed layers, tied, biased", "qwen3_5_text", DELTA, layer_types=MIXED, tie_word_embeddings=True, head_dim=20
    ),
    case("interval", "qwen3_5_text", DELTA, full_attention_interval=2, attention_bias=True),
    case("experts", "qwen3_5_moe_text", EXPERTS, DELTA, unused=5 * 3 * 48 * 20 * 4, shared_expert_intermediate_size=12),
    case(
        *("more experts, tied", "qwen3_5_moe_text", EXPERTS, DELTA),
        **{"num_experts": 9, "layer_types": MIXED, "tie_word_embeddings": True, "unused": 5 * 3 * 48 * 20 * 7},
    ),
    case("experts", "minimax_m2", num_local_experts=6, num_experts_per_tok=2, unused=5 * 3 * 48 * 40 * 4),
    case(
        "tied, one expert used",
        "minimax_m2",
        {"num_local_experts": 3, "num_experts_per_tok": 1, "head_dim": 10, "tie_word_embeddings": True},
        unused=5 * 3 * 48 * 40 * 2,
    ),
    case("first layer dense", "mimo_v2_flash", ROUTED, head_dim=10, v_head_dim=6, unused=4 * 3 * 48 * 20 * 4),
    case(
        *("listed layers, biased", "mimo_v2_flash", ROUTED),
        **{"attention_bias": True, "mlp_layer_types": ["dense", "sparse"] * 2 + ["dense"]},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]},
        **{"unused": 2 * 3 * 48 * 20 * 4},
    ),
    case("one dense layer", "glm4_moe", ROUTED, first_k_dense_replace=1, unused=4 * 3 * 48 * 20 * 4),
    case(
        *("normed queries, biased, all dense but one", "glm4_moe", ROUTED),
        **{"first_k_dense_replace": 4, "use_qk_norm": True, "attention_bias": True, "unused": 3 * 48 * 20 * 4},
    ),
    case("default", "glm4_moe_lite", ROUTED, LATENT, num_key_value_heads=4, unused=4 * 3 * 48 * 20 * 4),
    case(
        "no rank of queries",
        "glm4_moe_lite",
        ROUTED,
        LATENT,
        q_lora_rank=None,
        num_key_value_heads=4,
        unused=4 * 3 * 48 * 20 * 4,
    ),
    case("default", "deepseek_v32", ROUTED, LATENT, INDEX, num_key_value_heads=4, unused=2 * 3 * 48 * 20 * 4),
    case(
        *("one dense layer, biased, tied, layers that predict further tokens", "deepseek_v32", ROUTED, LATENT, INDEX),
        **{"num_key_value_heads": 4, "first_k_dense_replace": 1, "attention_bias": True, "tie_word_embeddings": True},
        **{"num_nextn_predict_layers": 1, "unused": 4 * 3 * 48 * 20 * 4},
    ),
    case("default", "glm_moe_dsa", ROUTED, LATENT, INDEX, num_key_value_heads=4, unused=2 * 3 * 48 * 20 * 4),
    case(
        *("shared indexers", "glm_moe_dsa", ROUTED, LATENT, INDEX),
        **{"num_key_value_heads": 4, "index_topk_freq": 2, "unused": 2 * 3 * 48 * 20 * 4},
    ),
    case(
        *("a pattern of indexers", "glm_moe_dsa", ROUTED, LATENT, INDEX),
        **{"num_key_value_heads": 4, "index_topk_pattern": "FSSFS", "first_k_dense_replace": 0},
        **{"unused": 5 * 3 * 48 * 20 * 4},
    ),
    case(
        *("default layers", "deepseek_v4", ROUTED, INDEX),
        **{"q_lora_rank": 14, "o_lora_rank": 10, "o_groups": 2, "head_dim": 16, "num_key_value_heads": 1, "hc_mult": 3},
        **{"unused": 5 * 3 * 48 * 20 * 4},
    ),
    case(
        *("rates of compression, tied", "deepseek_v4", ROUTED, INDEX),
        **{"q_lora_rank": 14, "o_lora_rank": 10, "o_groups": 4, "head_dim": 16, "num_key_value_heads": 1},
        **{"compress_ratios": [0, 128, 4, 0, 4, 0], "compress_rate_csa": 8, "tie_word_embeddings": True},
        **{"num_hash_layers": 1, "unused": 5 * 3 * 48 * 20 * 4},
    ),
    # 2 · D · F · (E − k): no gates
    case(
        *("a pattern", "nemotron_h", ROUTED),
        **{"hybrid_override_pattern": "ME*-E", "mamba_num_heads": 6, "mamba_head_dim": 4, "ssm_state_size": 5},
        **{"n_groups": 3, "conv_kernel": 3, "head_dim": 10, "moe_shared_expert_intermediate_size": 12},
        **{"unused": 2 * 2 * 48 * 20 * 4},
    ),
    case(
        *("latent experts, biases, tied, layers that predict further tokens", "nemotron_h", ROUTED),
        **{"layers_block_type": ["mamba", "moe", "attention", "moe"], "num_hidden_layers": 4, "moe_latent_size": 16},
        **{"mamba_num_heads": 6, "mamba_head_dim": 4, "n_groups": 2, "mlp_bias": True, "use_bias": True},
        **{"use_conv_bias": False, "num_nextn_predict_layers": 1, "tie_word_embeddings": True},
        **{"attention_bias": True},
        **{"moe_shared_expert_intermediate_size": 12, "unused": 2 * 2 * 16 * 20 * 4},
    ),
    case("no experts", "nemotron_h", hybrid_override_pattern="M-M*-", mamba_num_heads=8, mamba_head_dim=4),
    case(
        *("experts", "granitemoehybrid", MAMBA),
        **{"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 14, "layer_types": MIXED},
        **{"unused": 5 * 3 * 48 * 40 * 4},
    ),
    case(
        *("no experts, attention alone, tied", "granitemoehybrid", MAMBA),
        **{"num_local_experts": 0, "shared_intermediate_size": 14, "layer_types": ["attention"] * 5},
        **{"tie_word_embeddings": True, "attention_bias": True},
    ),
    case("attention in two layers", "bamba", MAMBA, attn_layer_indices=[1, 4]),
    case(
        "biases, tied", "bamba", MAMBA, mamba_proj_bias=True, mlp_bias=True, attention_bias=True, mamba_conv_bias=False
    ),
    case(
        *("periods", "jamba"),
        **{"num_experts": 6, "num_experts_per_tok": 2, "attn_layer_period": 3, "attn_layer_offset": 1},
        **{"mamba_d_state": 5, "mamba_d_conv": 3, "unused": 2 * 3 * 48 * 40 * 4},
    ),
    case(
        *("no experts, biases, tied", "jamba"),
        **{"num_experts": 1, "num_experts_per_tok": 1, "mamba_dt_rank": 7, "mamba_proj_bias": True},
        **{"tie_word_embeddings": True, "attn_layer_period": 2, "attn_layer_offset": 0},
    ),
    case(
        *("two shared blocks, tied", "zamba2"),
        **{"layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 2},
        **{"tie_word_embeddings": True, "n_mamba_heads": 4, "mamba_ngroups": 2, "adapter_rank": 6},
    ),
    case(  # of five adapters [48, 6] and [6, 80], three are used
        *("a block for each layer", "zamba2"),
        **{"layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid"], "num_mem_blocks": 2},
        **{"n_mamba_heads": 4, "mamba_ngroups": 2, "adapter_rank": 6, "unused": 2 * (48 * 6 + 6 * 80)},
    ),
    case(
        *("adapters of attention, tied", "zamba2"),
        **{"layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid", "linear_attention"]},
        **{"use_shared_attention_adapter": True, "add_bias_linear": True, "tie_word_embeddings": True},
        **{"n_mamba_heads": 4, "num_key_value_heads": 4},
    ),
    case("adjusted width", "lfm2", full_attn_idxs=[1, 3], block_multiple_of=32, block_ffn_dim_multiplier=1.1),
    case("plain width, biases", "lfm2", block_auto_adjust_ff_dim=False, conv_bias=True, layer_types=["conv"] * 5),
    case(
        *("two dense layers", "lfm2_moe", EXPERTS),
        **{"layer_types": ["conv", "full_attention"] * 2 + ["conv"], "num_dense_layers": 2},
        **{"unused": 3 * 3 * 48 * 20 * 4},
    ),
    case("two layers reuse keys", "gemma3n_text", GEMMA, num_kv_shared_layers=2, layer_types=["full_attention"] * 5),
    case(
        *("a list of widths, more streams, tied", "gemma3n_text", GEMMA),
        **{
            "intermediate_size": [24, 32, 40, 24, 16],
            "altup_num_inputs": 3,
            "laurel_rank": 5,
            "num_kv_shared_layers": 0,
        },
        **{"tie_word_embeddings": True, "attention_bias": True},
    ),
    case("wider full attention", "gemma4_text", GEMMA, global_head_dim=14),
    case(
        *("experts, keys as values, tied", "gemma4_text", GEMMA),
        **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20},
        **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
        **{
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        },
        **{"unused": 5 * 3 * 48 * 20 * 4},
    ),
    case(
        *("layers that reuse keys are twice as wide", "gemma4_text", GEMMA),
        **{"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "layer_types": ["full_attention"] * 5},
    ),
    case("experts", "qwen3_moe", EXPERTS, decoder_sparse_step=2, unused=2 * 3 * 48 * 20 * 4),
]

VISION = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 4}
QWEN_VISION = {"hidden_size": 24, "intermediate_size": 36, "depth": 3, "num_heads": 4, "out_hidden_size": 48}
QWEN_VISION |= {"patch_size": 6, "temporal_patch_size": 3, "spatial_merge_size": 3, "num_position_embeddings": 25}
GEMMA4_VISION = {**VISION, "head_dim": 8, "num_key_value_heads": 2, "position_embedding_size": 9, "patch_size": 4}
GEMMA4_AUDIO = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "output_proj_dims": 20}
LLAMA4_VISION = {**VISION, "projector_input_dim": 28, "projector_output_dim": 28, "vision_output_dim": 28}
TEXT = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": V}


def text_of(family: str, *parts: dict[str, Any], unused: int = 0) -> Case:
    """Return a language model for a composite."""
    return case("text", family, *parts, unused=unused)


CASES += [
    composite("default indexes", "qwen3_vl", text_of("qwen3_vl_text"), QWEN_VISION),
    composite(
        *("two merged layers, tied", "qwen3_vl", text_of("qwen3_vl_text"), QWEN_VISION),
        **{"tie_word_embeddings": True},
    ),
    composite(
        *("experts", "qwen3_vl_moe", text_of("qwen3_vl_moe_text", EXPERTS, unused=5 * 3 * 48 * 20 * 4)),
        {**QWEN_VISION, "deepstack_visual_indexes": [0, 2]},
    ),
    composite("dense", "qwen3_5", text_of("qwen3_5_text", DELTA), QWEN_VISION),
    composite(
        *("experts", "qwen3_5_moe", text_of("qwen3_5_moe_text", EXPERTS, DELTA, unused=5 * 3 * 48 * 20 * 4)),
        QWEN_VISION,
    ),
    composite("vision", "gemma3", text_of("gemma3_text", {"query_pre_attn_scalar": 8}), {**VISION, "image_size": 28}),
    composite("vision", "gemma4", text_of("gemma4_text", GEMMA), GEMMA4_VISION),
    composite(
        *("vision and audio", "gemma4", text_of("gemma4_text", GEMMA), GEMMA4_VISION),
        **{"audio_config": GEMMA4_AUDIO, "tie_word_embeddings": True},
    ),
    composite("no tower", "gemma4", text_of("gemma4_text", GEMMA), None),
    composite(
        *("experts in every second layer", "llama4"),
        text_of(
            "llama4_text",
            {
                "num_local_experts": 6,
                "num_experts_per_tok": 2,
                "interleave_moe_layer_step": 2,
                "intermediate_size_mlp": 44,
            },
            unused=2 * 3 * 48 * 40 * 4,
        ),
        {**LLAMA4_VISION, "image_size": 28, "intermediate_size": 112, "pixel_shuffle_ratio": 0.5},
    ),
    composite("convolutions", "lfm2_vl", text_of("lfm2"), {**VISION, "num_patches": 9}, projector_hidden_size=20),
    composite(
        *("head and no norm", "lfm2_vl", text_of("lfm2"), {**VISION, "vision_use_head": False, "patch_size": 4}),
        **{"projector_use_layernorm": False, "projector_bias": False, "downsample_factor": 3},
    ),
    composite(
        *("latent", "kimi_k25"),
        text_of("deepseek_v3", ROUTED, LATENT, {"num_key_value_heads": 4}, unused=2 * 3 * 48 * 20 * 4),
        {**VISION, "pos_emb_height": 5, "pos_emb_width": 7},
        projection_hidden_size=24,
    ),
    Case("clip", {"model_type": "clip", "text_config": TEXT, "vision_config": VISION, "projection_dim": 20}),
    Case(
        "clip: small pictures",
        {"model_type": "clip", "text_config": TEXT, "vision_config": {**VISION, "image_size": 30, "patch_size": 7}},
    ),
    Case("siglip", {"model_type": "siglip", "text_config": TEXT, "vision_config": VISION}),
    Case(
        "siglip: no head, projected texts",
        {
            **{"model_type": "siglip", "text_config": {**TEXT, "projection_size": 20}},
            "vision_config": {**VISION, "vision_use_head": False, "image_size": 30, "patch_size": 7},
        },
    ),
]
