"""Make any transformers config tiny by the names of its settings, without knowing the family."""

import re

import torch

VOCABULARY = 99
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, INNER, EXPERTS, POSITIONS = 2, 32, 4, 4, 8, 40, 4, 64

# the first pattern that matches the full name of a setting gives its tiny value
RULES = [
    (r"(decoder_|text_|entity_)?vocab_size", VOCABULARY),
    (r"(vocab_size_per_layer_input|pronunciation_vocab_size|shape_vocab_size)", VOCABULARY),
    (r"(num_)?((hidden|encoder|decoder|n)_)?(layers?|num_layers)|n_layers?|num_(encoder|decoder)_layers|depth", LAYERS),
    (r"num_blocks|num_hidden_groups|max_window_layers|num_dense_layers|first_k_dense_replace|n_encoder_layers", 1),
    (r"num_kv_shared_layers|num_nextn_predict_layers|num_mtp_layers|moe_layer_start_index", 0),
    (r"hidden_size|d_model|n_embd|dim|d_embed|model_dim|hidden_dim_size|emb_dim|attention_hidden_size", WIDTH),
    (r"word_embed_proj_dim|embedding_size|embedding_dim|input_embedding_size|pronunciation_embed_dim", WIDTH),
    (r"output_embedding_size|shape_embed_dim|pooler_hidden_size|prediction_head_size|lru_width", WIDTH),
    (r"hidden_size_global|encoder_hidden_size|output_dim|out_hidden_size|vision_output_dim", WIDTH),
    (r"attention_head_dim", 2 * WIDTH // HEADS),
    (r"(num_)?key_value_heads|num_kv_heads|n_head_kv|multi_query_group_num|swa_num_key_value_heads", KV_HEADS),
    (
        r"((swa_)?(num_)?((encoder|decoder)_)?attention_heads|n_heads?|num_heads|num_(en|de)coder_attention_heads)",
        HEADS,
    ),
    (r"linear_num_(key|value)_heads|linear_num_heads|index_n_heads|mamba_n_heads|mamba_num_heads", HEADS),
    (r"(global_|swa_|index_|linear_(key_|value_)?)?head_dim|attention_head_size|kv_channels|d_kv|d_head", HEAD_WIDTH),
    (r"mamba_d_head|mamba_head_dim", 2 * WIDTH // HEADS),
    (r"dim_head|v_head_dim|qk_nope_head_dim|qk_rope_head_dim|rotary_dim", HEAD_WIDTH),
    (r"qk_head_dim", 2 * HEAD_WIDTH),
    (r".*(intermediate_size|ffn_dim|d_ff|n_inner|d_inner|ffn_hidden_size|intermediate_size_mlp)", INNER),
    (r"feed_forward_size|dim_ff|inner_dim|ffn_dim|hidden_dim|ff_dim|expert_ffn_hidden_size", INNER),
    (r"(q|kv|o)_lora_rank|.*_lowrank_dim|laurel_rank|altup_lora_rank", 16),
    (r"(num_|n_routed_|num_local_|moe_num_|num_routed_)experts|zero_expert_num", EXPERTS),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|num_selected_experts|top_k_experts|expert_capacity", 2),
    (r"n_shared_experts|num_shared_experts|moe_num_shared_experts|n_group|topk_group|num_expert_group", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|model_max_length|n_embed_positions", POSITIONS),
    (r"max_(source|target|sequence|seq)_(positions|length|len)|original_max_position_embeddings", POSITIONS),
    (r"sliding_window(_size)?|local_attention|window_size|attention_chunk_size|chunk_size|index_topk", 16),
    (r"(mamba_)?(d_state|state_size)|ssm_state_size|mamba_d_state", HEAD_WIDTH),
    (r"mamba_chunk_size|mamba_n_groups|n_groups|time_step_rank|mamba_dt_rank", 4),
    (r"hidden_size_per_layer_input|d_rel|ple_embed_dim|hc_lowrank|gated_norm_rank", HEAD_WIDTH),
    (r"rel_extent|ngram_vocab_size_base|encoder_hash_byte_group_vocab|make_ngram_vocab_size_divisible_by", 128),
    (r"split_ngram_parts|audio_channels|num_filters", 4),
]
_REFORMER = {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (3, 4)}
_REFORMER |= {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4}
# Reformer draws a new seed for its hashes and dropout in every training forward, also after a fixed seed
_REFORMER |= {"attn_layers": ["local", "local"], "hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0}
_XMOD = {"languages": ["en_XX"], "default_language": "en_XX"}
EXCEPTIONS = {
    "Mamba2ForCausalLM": {"head_dim": 16, "num_heads": 4},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "EsmForMaskedLM": {"pad_token_id": 1},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2},
    "Zamba2ForCausalLM": {"attention_head_dim": 16, "attention_hidden_size": 64},
    "MiMoV2FlashForCausalLM": {"head_dim": 16, "v_head_dim": 16, "swa_head_dim": 16, "swa_v_head_dim": 16},
    "XmodForCausalLM": _XMOD,
    "XmodForMaskedLM": _XMOD,
    "WhisperForConditionalGeneration": {"begin_suppress_tokens": [3, 4]},
    "ReformerForMaskedLM": _REFORMER,
    "ReformerModelWithLMHead": _REFORMER | {"is_decoder": True},
}
_SPECIAL = ("bos", "eos", "pad", "sep", "cls", "mask", "unk", "decoder_start")


def shrink(model_class):
    """Return a tiny config for the model class."""
    config_class = model_class.config_class
    config = config_class(**(_tiny(config_class().to_dict()) | EXCEPTIONS.get(model_class.__name__, {})))
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    config.use_cache = False  # a cache needs attention layers, which two layers of a hybrid may lack
    return config


def _tiny(full):
    tiny = {}
    depth = next((v for k, v in full.items() if isinstance(v, int) and _rule(k) == LAYERS and v > 0), None)
    for key, value in full.items():
        if key in ("transformers_version", "model_type") or key.startswith("_"):
            continue
        if isinstance(value, dict) and "model_type" in value:
            tiny[key] = _tiny(value) | {"model_type": value["model_type"]}
        elif isinstance(value, list) and depth and len(value) == depth and depth > LAYERS:
            tiny[key] = [value[0], next((v for v in value if v != value[0]), value[0])]  # both kinds of layer
        elif value is None and key in ("head_dim", "num_key_value_heads", "vocab_size", "decoder_start_token_id"):
            tiny[key] = 0 if key == "decoder_start_token_id" else _rule(key)
        elif isinstance(value, bool) or not isinstance(value, int):
            continue
        elif key.endswith(("token_id", "token_index", "_index", "_idx")):
            tiny[key] = _special(key, value)
        elif _rule(key) is not None and value > 0:
            tiny[key] = min(value, _rule(key))
    return {k: v for k, v in tiny.items() if v is not None}


def _rule(key):
    return next((value for pattern, value in RULES if re.fullmatch(pattern, key)), None)


def _special(key, value):
    if value < 3:
        return value
    names = [i for i, name in enumerate(_SPECIAL) if key.startswith(name)]
    return names[0] % 3 if names else VOCABULARY - 1


def parameters_on_meta(model_class, config):
    """Return the number of parameters of a model with this config."""
    with torch.device("meta"):
        return sum(p.numel() for p in model_class(config).parameters())
