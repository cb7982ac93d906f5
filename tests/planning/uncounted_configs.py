"""Configs of models with parts that no formula counts: keys and sizes of public models, under types that nobody knows.

`PARTS` maps each config to a word that the plan uses for its missing part. The sizes are facts; nothing else is copied.
"""

from typing import Any

Config = dict[str, Any]
VISION = {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "out_hidden_size": 2048}
MLA = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
ROUTED = {"n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
QWEN_TEXT = {"vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32}
QWEN_TEXT |= {"num_key_value_heads": 4, "head_dim": 128, "hidden_act": "silu"}
LINEAR = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
LINEAR |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
LINEAR |= {"layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 768}


def nested_config(family: str, text: Config, vision: Config | None = VISION, named: str | None = None) -> Config:
    """Nest a text model and a tower in the config of `family`."""
    config: Config = {"model_type": f"acme_{family}", "tie_word_embeddings": False, "text_config": text}
    config |= {} if vision is None else {"vision_config": vision}
    return config | ({} if named is None else {"architectures": [named]})


CONFIGS: dict[str, Config] = {
    "qwen3_vl": nested_config("qwen3_vl", {**QWEN_TEXT, "model_type": "acme_qwen3_vl_text", "intermediate_size": 6144}),
    "qwen3_vl_moe": nested_config("qwen3_vl_moe", {**QWEN_TEXT, **EXPERTS, "model_type": "acme_qwen3_vl_moe_text"}),
    "qwen3_5": nested_config(
        "qwen3_5",
        {**QWEN_TEXT, **LINEAR, "model_type": "acme_qwen3_5_text", "intermediate_size": 6144, "vocab_size": 248_320},
    ),
    "qwen3_5_moe": nested_config(
        "qwen3_5_moe", {**QWEN_TEXT, **LINEAR, **EXPERTS, "model_type": "acme_qwen3_5_moe_text"}
    ),
    "deepseek_v32": {
        **{"model_type": "acme_deepseek_v32", "architectures": ["AcmeDeepseekV32ForCausalLM"], "vocab_size": 129_280},
        **{"hidden_size": 7168, "intermediate_size": 18_432, "num_hidden_layers": 4, "num_attention_heads": 128},
        **{**MLA, **ROUTED, "num_key_value_heads": 128, "first_k_dense_replace": 3, "tie_word_embeddings": False},
        **{"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "num_nextn_predict_layers": 1},
    },
    "deepseek_v4": {
        **{"model_type": "acme_deepseek_v4", "architectures": ["AcmeDeepseekV4ForCausalLM"], "vocab_size": 129_280},
        **{"hidden_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 64, "num_key_value_heads": 1},
        **{**ROUTED, "head_dim": 512, "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8},
        **{"tie_word_embeddings": False, "num_hash_layers": 1},
    },
    "glm_moe_dsa": {
        **{"model_type": "acme_glm_moe_dsa", "architectures": ["AcmeGlmMoeDsaForCausalLM"], "vocab_size": 154_880},
        **{"hidden_size": 6144, "intermediate_size": 12_288, "num_hidden_layers": 4, "num_attention_heads": 64},
        **{**MLA, **ROUTED, "first_k_dense_replace": 3, "tie_word_embeddings": False},
    },
    "minimax_m2": {
        **{"model_type": "acme_minimax_m2", "architectures": ["AcmeMiniMaxM2ForCausalLM"], "vocab_size": 200_064},
        **{"hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 48},
        **{"num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16, "num_experts_per_tok": 8},
        **{"tie_word_embeddings": False},
    },
    "gemma4 moe": {
        **{
            "model_type": "acme_gemma4",
            "architectures": ["AcmeGemma4ForConditionalGeneration"],
            "tie_word_embeddings": True,
        },
        "text_config": {
            **{"model_type": "acme_gemma4_text", "vocab_size": 262_144, "hidden_size": 2816, "intermediate_size": 2112},
            **{"num_hidden_layers": 6, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256},
            **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 4, "moe_intermediate_size": 704},
            **{"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 262_144},
        },
    },
    "nemotron_h": {
        **{"model_type": "acme_nemotron_h", "architectures": ["AcmeNemotronHForCausalLM"], "vocab_size": 131_072},
        **{"hidden_size": 8192, "intermediate_size": 32_768, "num_attention_heads": 64, "num_key_value_heads": 8},
        **{"mlp_hidden_act": "relu2", "hybrid_override_pattern": "M-M*", "ssm_state_size": 256},
        **{"mamba_num_heads": 256, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "num_hidden_layers": 4},
        **{"tie_word_embeddings": False},
    },
    "mimo_v2": {
        **{"model_type": "acme_mimo_v2_flash", "architectures": ["AcmeMiMoV2FlashForCausalLM"], "vocab_size": 152_576},
        **{"hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 4, "num_attention_heads": 64},
        **{"num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128, "n_routed_experts": 16},
        **{"num_experts_per_tok": 8, "moe_intermediate_size": 2048, "tie_word_embeddings": False},
        **{"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    },
    "gemma3 with its tower": nested_config(
        "gemma3",
        {
            **{"model_type": "gemma3_text", "vocab_size": 262_208, "hidden_size": 2560, "intermediate_size": 10_240},
            **{"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
        },
        {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4},
    ),
}
PARTS = {
    "qwen3_vl": "vision tower",
    "qwen3_vl_moe": "experts",
    "qwen3_5": "recurrent",
    "qwen3_5_moe": "experts",
    "deepseek_v32": "low-rank attention",
    "deepseek_v4": "low-rank attention",
    "glm_moe_dsa": "low-rank attention",
    "minimax_m2": "experts",
    "gemma4 moe": "experts",
    "nemotron_h": "state-space",
    "mimo_v2": "several shapes of attention",
    "gemma3 with its tower": "vision tower",
}
CLIP: Config = {
    **{"model_type": "acme_clip", "architectures": ["AcmeCLIPModel"], "projection_dim": 512},
    "text_config": {"vocab_size": 49_408, "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8},
    "vision_config": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
}
