"""Small freshly drawn models of several families, and the expected loss of their first step on random tokens."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB, T = 2000, 64
SIZES = {
    "gpt2": {"n_embd": 192, "n_layer": 4, "n_head": 4, "n_positions": T},
    "llama": {
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
    },
    "gemma2": {
        "hidden_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "intermediate_size": 512,
        "query_pre_attn_scalar": 48,
    },
    "gpt_neox": {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 768},
    "opt": {
        "hidden_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "ffn_dim": 768,
        "max_position_embeddings": T,
        "word_embed_proj_dim": 192,
        "dropout": 0.0,
    },
    "qwen3": {
        "hidden_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 512,
    },
}
_COMMON = {
    "hidden_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT = {"n_embd": 192, "n_layer": 3, "n_head": 6, "n_positions": T}
_MULTIPLIERS = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
OTHERS = {
    **dict.fromkeys(("mistral", "qwen2", "phi", "phi3", "cohere", "cohere2", "olmo", "stablelm"), _COMMON),
    **dict.fromkeys(("starcoder2", "smollm3"), _COMMON),
    **{family: {**_COMMON, "head_dim": 32} for family in ("gemma", "glm", "ernie4_5")},
    "gemma3_text": {**_COMMON, "head_dim": 32, "query_pre_attn_scalar": 32},
    "granite": {**_COMMON, **_MULTIPLIERS, "attention_multiplier": 1 / 64},
    "gptj": {**_GPT, "rotary_dim": 16},
    "gpt_bigcode": _GPT,
    "gpt_neo": {
        "hidden_size": 192,
        "num_layers": 4,
        "num_heads": 6,
        "attention_types": [[["global", "local"], 2]],
        "max_position_embeddings": T,
    },
    "falcon": {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6},
}
STD_KEY = {"opt": "init_std"}


def config(family: str, std: float, tied: bool, **more) -> dict:
    key = STD_KEY.get(family, "initializer_range")
    return {
        "model_type": family,
        "vocab_size": VOCAB,
        "tie_word_embeddings": tied,
        key: std,
        **(SIZES | OTHERS)[family],
        **more,
    }


def measured(values: dict, table_std: float | None = None, seeds: int = 2, sequences: int = 8) -> float:
    """Mean nll over fresh models and over every possible target; `table_std` draws the tables anew."""
    sizes = dict(values)
    made = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    losses = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(made).eval()
        tables = {id(t): t for t in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)}
        for table in tables.values():
            if table_std is not None:
                torch.nn.init.normal_(table, std=table_std)
        ids = torch.randint(2, made.vocab_size, (sequences, T))
        with torch.no_grad():
            logits = model(ids).logits
        losses.append((logits.logsumexp(-1) - logits.mean(-1)).mean().item())
    return sum(losses) / len(losses)
