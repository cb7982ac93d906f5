"""Configs whose counts are compared with the classes of transformers: those of the catalogue, and further families."""

from tiewise.checkpoint.families import FAMILIES
from tiewise.planning.catalogue import models

READERS = sorted(kind for kind, one in FAMILIES.items() if one.reader is not None and one.written_keys is None)


def standard_config(model_type, d, layers, heads, ffn, vocab, **more):
    sizes = {"hidden_size": d, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": ffn}
    return {"model_type": model_type, "vocab_size": vocab, **sizes, **more}


def t5_config(model_type, d, dkv, ff, layers, heads, vocab, proj="relu", **more):
    sizes = {"d_model": d, "d_kv": dkv, "d_ff": ff, "num_layers": layers, "num_heads": heads, "vocab_size": vocab}
    return {"model_type": model_type, "feed_forward_proj": proj, **sizes, **more}


def bart_config(model_type, d, layers, ffn, heads, vocab, **more):
    of_side = {"layers": layers, "ffn_dim": ffn, "attention_heads": heads}
    both = {f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in of_side.items()}
    return {"model_type": model_type, "d_model": d, "vocab_size": vocab, **both, **more}


PUBLISHED = {model.name: model.config for model in models() if model.config and model.family in READERS}
PUBLISHED |= {
    "gpt-neo-125m": {
        **{"model_type": "gpt_neo", "hidden_size": 768, "num_layers": 12, "num_heads": 12, "vocab_size": 50257},
        **{"attention_types": [[["global", "local"], 6]], "max_position_embeddings": 2048},
    },
    "qwen1.5-moe-a2.7b": standard_config(
        *("qwen2_moe", 2048, 24, 16, 5632, 151936),
        num_key_value_heads=16,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    ),
    "falcon-rw-1b": {
        **{"model_type": "falcon", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32},
        **{"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True, "vocab_size": 50304},
    },
    "command-r-plus": standard_config(
        "cohere", 12288, 64, 96, 33792, 256000, num_key_value_heads=8, tie_word_embeddings=True, use_qk_norm=True
    ),
    "command-r7b": standard_config(
        "cohere2", 4096, 32, 32, 14336, 256000, num_key_value_heads=8, tie_word_embeddings=True
    ),
    "stablelm-3b": standard_config(
        "stablelm", 2560, 32, 32, 6912, 50304, num_key_value_heads=32, tie_word_embeddings=False
    ),
    "stablelm-2-12b": standard_config(
        *("stablelm", 5120, 40, 32, 13824, 100352),
        num_key_value_heads=8,
        tie_word_embeddings=False,
        use_parallel_residual=True,
        qk_layernorm=True,
    ),
    "bert-base-model": standard_config("bert", 768, 12, 12, 3072, 30522, architectures=["BertModel"]),
    "bert-large-pretraining": standard_config("bert", 1024, 24, 16, 4096, 30522, architectures=["BertForPreTraining"]),
    "distilbert": {"model_type": "distilbert", "dim": 768, "n_layers": 6, "n_heads": 12, "hidden_dim": 3072},
    "electra-small-generator": standard_config("electra", 256, 12, 4, 1024, 30522, embedding_size=128),
    "electra-base-discriminator": standard_config(
        "electra", 768, 12, 12, 3072, 30522, embedding_size=768, architectures=["ElectraForPreTraining"]
    ),
    "albert-large-pretraining": standard_config(
        "albert", 1024, 24, 16, 4096, 30000, embedding_size=128, architectures=["AlbertForPreTraining"]
    ),
    "albert-base-model": standard_config(
        "albert", 768, 12, 12, 3072, 30000, embedding_size=128, architectures=["AlbertModel"]
    ),
    "umt5-small": t5_config("umt5", 512, 64, 1024, 8, 6, 256384, "gated-gelu"),
    "t5-encoder": t5_config("t5", 512, 64, 1024, 8, 6, 32128, "gated-gelu", architectures=["T5EncoderModel"]),
    "bart-large": bart_config("bart", 1024, 12, 4096, 16, 50265, max_position_embeddings=1024),
    "mbart-large-50": bart_config("mbart", 1024, 12, 4096, 16, 250054, max_position_embeddings=1024),
    "opus-mt-en-de": bart_config("marian", 512, 6, 2048, 8, 58101, max_position_embeddings=512),
    "marian-two-tables": bart_config(
        "marian", 512, 6, 2048, 8, 58101, decoder_vocab_size=60000, share_encoder_decoder_embeddings=False
    ),
    "mbart-decoder": bart_config(
        "mbart", 1024, 12, 4096, 16, 57525, max_position_embeddings=1536, architectures=["MBartForCausalLM"]
    ),
    "pegasus-decoder-untied": bart_config(
        "pegasus", 512, 6, 2048, 8, 96103, architectures=["PegasusForCausalLM"], tie_word_embeddings=False
    ),
    "marian-decoder-of-two-tables": bart_config(
        *("marian", 512, 6, 2048, 8, 58101),
        decoder_vocab_size=60000,
        share_encoder_decoder_embeddings=False,
        architectures=["MarianForCausalLM"],
    ),
    "pegasus-large": bart_config("pegasus", 1024, 16, 4096, 16, 96103, max_position_embeddings=1024),
    "mamba-130m": {"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50280},
}
QUICK = [
    *("gpt2", "pythia-70m", "opt-125m", "opt-350m", "smollm2-135m", "qwen2.5-0.5b", "gemma-3-270m"),
    *("bert-base-model", "albert-base-v2", "t5-small", "t5-v1_1-small", "bart-large", "qwen1.5-moe-a2.7b"),
    *("mamba-130m", "falcon-rw-1b"),
]
