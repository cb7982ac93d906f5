"""Sizes of published models, as their public config.json files give them (keys that change a count)."""


def _llama(d, layers, heads, kv, ffn, vocab, tied=False, **more):
    return {
        "model_type": "llama",
        "hidden_size": d,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        **more,
    }


def _like(model_type, *sizes, **more):
    return {**_llama(*sizes), "model_type": model_type, **more}


def _neox(d, layers, heads, vocab):
    sizes = {"hidden_size": d, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * d}
    return {"model_type": "gpt_neox", "vocab_size": vocab, "tie_word_embeddings": False, **sizes}


def _opt(d, layers, heads, ffn, **more):
    sizes = {"hidden_size": d, "num_hidden_layers": layers, "num_attention_heads": heads, "ffn_dim": ffn}
    return {"model_type": "opt", "vocab_size": 50272, "max_position_embeddings": 2048, **sizes, **more}


def _bert(model_type, d, layers, heads, vocab, **more):
    sizes = {"hidden_size": d, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": 4 * d}
    return {"model_type": model_type, "vocab_size": vocab, **sizes, **more}


def _albert(d, layers, heads, **more):
    return _bert("albert", d, layers, heads, 30000, embedding_size=128, **more)


def _t5(model_type, d, dkv, ff, layers, heads, vocab, proj, **more):
    sizes = {"d_model": d, "d_kv": dkv, "d_ff": ff, "num_layers": layers, "num_heads": heads, "vocab_size": vocab}
    return {"model_type": model_type, "feed_forward_proj": proj, **sizes, **more}


def _bart(model_type, d, layers, ffn, heads, vocab, **more):
    both = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in _sides(layers, ffn, heads)}
    return {"model_type": model_type, "d_model": d, "vocab_size": vocab, **both, **more}


def _sides(layers, ffn, heads):
    return (("layers", layers), ("ffn_dim", ffn), ("attention_heads", heads))


PUBLISHED = {
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "vocab_size": 50257},
    "gpt-neo-125m": {
        "model_type": "gpt_neo",
        "hidden_size": 768,
        "num_layers": 12,
        "num_heads": 12,
        "attention_types": [[["global", "local"], 6]],
        "max_position_embeddings": 2048,
        "vocab_size": 50257,
    },
    "gpt-j-6b": {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "vocab_size": 50400},
    "pythia-70m": _neox(512, 6, 8, 50304),
    "pythia-1b": _neox(2048, 16, 8, 50304),
    "pythia-12b": _neox(5120, 36, 40, 50688),
    "opt-125m": _opt(768, 12, 12, 3072, word_embed_proj_dim=768),
    "opt-350m": _opt(1024, 24, 16, 4096, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-6.7b": _opt(4096, 32, 32, 16384),
    "llama-2-7b": _llama(4096, 32, 32, 32, 11008, 32000),
    "llama-3-8b": _llama(4096, 32, 32, 8, 14336, 128256),
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 8192, 128256, True, head_dim=64),
    "smollm2-135m": _llama(576, 30, 9, 3, 1536, 49152, True),
    "mistral-7b": _like("mistral", 4096, 32, 32, 8, 14336, 32000),
    "mixtral-8x7b": _like("mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
    "qwen2-7b": _like("qwen2", 3584, 28, 28, 4, 18944, 152064),
    "qwen2.5-0.5b": _like("qwen2", 896, 24, 14, 2, 4864, 151936, True),
    "qwen1.5-moe-a2.7b": _like(
        "qwen2_moe", 2048, 24, 16, 16, 5632, 151936, moe_intermediate_size=1408, shared_expert_intermediate_size=5632
    ),
    "qwen3-0.6b": _like("qwen3", 1024, 28, 16, 8, 3072, 151936, True, head_dim=128),
    "qwen3-8b": _like("qwen3", 4096, 36, 32, 8, 12288, 151936, head_dim=128),
    "qwen3-30b-a3b": _like(
        "qwen3_moe", 2048, 48, 32, 4, 6144, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128
    ),
    "gemma-2b": _like("gemma", 2048, 18, 8, 1, 16384, 256000, True, head_dim=256),
    "gemma-2-2b": _like("gemma2", 2304, 26, 8, 4, 9216, 256000, True, head_dim=256),
    "gemma-3-270m": _like("gemma3_text", 640, 18, 4, 1, 2048, 262144, True, head_dim=256),
    "phi-2": {
        "model_type": "phi",
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 10240,
        "vocab_size": 51200,
    },
    "phi-3-mini": _like("phi3", 3072, 32, 32, 32, 8192, 32064),
    "falcon-7b": {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71},
    "falcon-40b": {
        "model_type": "falcon",
        "hidden_size": 8192,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
        "vocab_size": 65024,
    },
    "falcon-rw-1b": {
        "model_type": "falcon",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
        "alibi": True,
        "vocab_size": 50304,
    },
    "bloom-560m": {"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16},
    "command-r": _like("cohere", 8192, 40, 64, 64, 22528, 256000, True, logit_scale=0.0625),
    "command-r-plus": _like("cohere", 12288, 64, 96, 8, 33792, 256000, True, use_qk_norm=True),
    "command-r7b": _like("cohere2", 4096, 32, 32, 8, 14336, 256000, True),
    "granite-3.1-2b": _like("granite", 2048, 40, 32, 8, 8192, 49155, True),
    "olmo-1b": _like("olmo", 2048, 16, 16, 16, 8192, 50304, True),
    "olmo-2-7b": _like("olmo2", 4096, 32, 32, 32, 11008, 100352),
    "stablelm-3b": _like("stablelm", 2560, 32, 32, 32, 6912, 50304),
    "stablelm-2-12b": _like("stablelm", 5120, 40, 32, 8, 13824, 100352, use_parallel_residual=True, qk_layernorm=True),
    "starcoder2-3b": _like("starcoder2", 3072, 30, 24, 2, 12288, 49152, True),
    "smollm3-3b": _like("smollm3", 2048, 36, 16, 4, 11008, 128256, True),
    "bert-base": _bert("bert", 768, 12, 12, 30522),
    "bert-base-model": _bert("bert", 768, 12, 12, 30522, architectures=["BertModel"]),
    "bert-large-pretraining": _bert("bert", 1024, 24, 16, 30522, architectures=["BertForPreTraining"]),
    "roberta-base": _bert("roberta", 768, 12, 12, 50265, max_position_embeddings=514, type_vocab_size=1),
    "distilbert": {"model_type": "distilbert", "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072},
    "electra-small-generator": _bert("electra", 256, 12, 4, 30522, embedding_size=128, intermediate_size=1024),
    "electra-base-discriminator": _bert(
        "electra", 768, 12, 12, 30522, embedding_size=768, architectures=["ElectraForPreTraining"]
    ),
    "albert-base": _albert(768, 12, 12),
    "albert-xxlarge": _albert(4096, 12, 64),
    "albert-large-pretraining": _albert(1024, 24, 16, architectures=["AlbertForPreTraining"]),
    "albert-base-model": _albert(768, 12, 12, architectures=["AlbertModel"]),
    "modernbert-base": {"model_type": "modernbert", "hidden_size": 768, "num_hidden_layers": 22, "vocab_size": 50368},
    "t5-small": _t5("t5", 512, 64, 2048, 6, 8, 32128, "relu"),
    "t5-v1.1-base": _t5("t5", 768, 64, 2048, 12, 12, 32128, "gated-gelu", tie_word_embeddings=False),
    "mt5-small": _t5("mt5", 512, 64, 1024, 8, 6, 250112, "gated-gelu", tie_word_embeddings=False),
    "umt5-small": _t5("umt5", 512, 64, 1024, 8, 6, 256384, "gated-gelu"),
    "t5-encoder": _t5("t5", 512, 64, 1024, 8, 6, 32128, "gated-gelu", architectures=["T5EncoderModel"]),
    "bart-large": _bart("bart", 1024, 12, 4096, 16, 50265, max_position_embeddings=1024),
    "mbart-large-50": _bart("mbart", 1024, 12, 4096, 16, 250054, max_position_embeddings=1024),
    "opus-mt-en-de": _bart("marian", 512, 6, 2048, 8, 58101, max_position_embeddings=512),
    "marian-two-tables": _bart(
        "marian", 512, 6, 2048, 8, 58101, decoder_vocab_size=60000, share_encoder_decoder_embeddings=False
    ),
    "pegasus-large": _bart("pegasus", 1024, 16, 4096, 16, 96103, max_position_embeddings=1024),
    "olmo-3-7b": _like("olmo3", 4096, 32, 32, 32, 11008, 100278),
    "ernie-4.5-0.3b": _like("ernie4_5", 1024, 18, 16, 2, 3072, 103424, True, head_dim=128),
    "glm-4-9b": _like("glm", 4096, 40, 32, 2, 13696, 151552, attention_bias=True),
    "starcoder": {"model_type": "gpt_bigcode", "n_embd": 6144, "n_layer": 40, "n_head": 48, "vocab_size": 49152},
    "mpt-7b": {"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 50432},
    "gpt-oss-20b": _like("gpt_oss", 2880, 24, 64, 8, 2880, 201088, num_local_experts=32, num_experts_per_tok=4),
    "llama-4-scout": _like("llama4_text", 5120, 48, 40, 8, 8192, 202048, num_local_experts=16),
    "deepseek-v2-lite": _like(
        "deepseek_v2",
        2048,
        27,
        16,
        16,
        10944,
        102400,
        q_lora_rank=None,
        moe_intermediate_size=1408,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
    ),
    "deepseek-v3": _like("deepseek_v3", 7168, 61, 128, 128, 18432, 129280),
    "mamba-130m": {"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50280},
}
QUICK = [
    *("gpt2", "pythia-70m", "opt-125m", "opt-350m", "smollm2-135m", "qwen2.5-0.5b", "gemma-3-270m"),
    *("bert-base-model", "albert-base", "t5-small", "t5-v1.1-base", "bart-large", "qwen1.5-moe-a2.7b"),
    *("mamba-130m", "falcon-rw-1b"),
]
