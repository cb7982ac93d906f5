"""Small freshly drawn models of several families, and the expected loss of their first step on random tokens."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB, T = 2000, 64


def _sized(layers=3, heads=6, **more):
    return {"hidden_size": 192, "num_hidden_layers": layers, "num_attention_heads": heads, **more}


def _gated(layers=3, heads=6, **more):
    return _sized(layers, heads, num_key_value_heads=2, intermediate_size=512, **more)


def _gpt(layers, heads):
    return {"n_embd": 192, "n_layer": layers, "n_head": heads, "n_positions": T}


_OPT = {"ffn_dim": 768, "max_position_embeddings": T, "word_embed_proj_dim": 192, "dropout": 0.0}
SIZES = {
    "gpt2": _gpt(4, 4),
    "llama": _gated(4),
    "gemma2": _gated(3, 4, head_dim=48, query_pre_attn_scalar=48),
    "gpt_neox": _sized(4, 4, intermediate_size=768),
    "opt": _sized(4, 4, **_OPT),
    "qwen3": _gated(head_dim=32),
}
_COMMON = _gated(pad_token_id=0, bos_token_id=1, eos_token_id=2)
_MULTIPLIERS = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22}
_NEO = {"hidden_size": 192, "num_layers": 4, "num_heads": 6, "max_position_embeddings": T}
OTHERS = {
    **dict.fromkeys(("mistral", "qwen2", "phi", "phi3", "cohere", "cohere2", "olmo", "stablelm"), _COMMON),
    **dict.fromkeys(("starcoder2", "smollm3"), _COMMON),
    **{family: {**_COMMON, "head_dim": 32} for family in ("gemma", "glm", "ernie4_5")},
    "gemma3_text": {**_COMMON, "head_dim": 32, "query_pre_attn_scalar": 32},
    "granite": {**_COMMON, **_MULTIPLIERS, "attention_multiplier": 1 / 64},
    "gptj": {**_gpt(3, 6), "rotary_dim": 16},
    "gpt_bigcode": _gpt(3, 6),
    "gpt_neo": {**_NEO, "attention_types": [[["global", "local"], 2]]},
    "falcon": _sized(),
}
STD_KEY = {"opt": "init_std"}


def config(family: str, std: float, tied: bool, **more) -> dict:
    key = STD_KEY.get(family, "initializer_range")
    named = {"model_type": family, "vocab_size": VOCAB, "tie_word_embeddings": tied, key: std}
    return {**named, **(SIZES | OTHERS)[family], **more}


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
