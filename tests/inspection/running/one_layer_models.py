"""One-layer models of transformers with zero attention output, or without layers: oracles of both paths."""

import torch
from tests.boundary.tiny_models import _LLAMA
from transformers import AutoConfig, AutoModelForCausalLM

V, E = 40, 16
SIZES = _LLAMA | {"vocab_size": V, "hidden_size": E, "num_hidden_layers": 1, "num_key_value_heads": 2}
SIZES |= {"dtype": "float64"}
SETTINGS = {
    "opt": {"word_embed_proj_dim": E, "ffn_dim": 24},
    "gpt_neo": {"attention_types": [[["global"], 1]], "attention_layers": ["global"]},
    "granite": {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.3},
    "gptj": {"rotary_dim": 4},
    "cohere": {"logit_scale": 0.25},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 3.0},
    "mistral": {"rms_norm_eps": 0.5},
    "gpt_neox": {"layer_norm_eps": 0.5},
}
OUTPUT_PROJECTIONS = ("o_proj", "c_proj", "out_proj", "dense")


def one_layer(family, tied=False, **settings):
    """Build a random model in fp64 whose positions and attention output projection are zero.

    With num_hidden_layers=0 its logits are the direct path.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(family)
    for key, value in (SIZES | SETTINGS.get(family, {}) | {"tie_word_embeddings": tied} | settings).items():
        setattr(config, key, value)
    if hasattr(config, "layer_types"):
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    model = AutoModelForCausalLM.from_config(config).to(torch.float64).eval()
    silenced = 0
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.randn_like(value))
            parts = name.split(".")
            attention = any("attn" in part or "attention" in part for part in parts[:-2])
            if "wpe" in name or "positions" in name:
                value.zero_()
            elif attention and parts[-2] in OUTPUT_PROJECTIONS:
                value.zero_()
                silenced += 1
    assert silenced or not config.num_hidden_layers, [name for name, _ in model.named_parameters()]
    if tied:
        model.tie_weights()
    return model
