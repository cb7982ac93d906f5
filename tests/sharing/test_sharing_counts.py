"""Parameters that remain in real models are those that the budget counts from their configs, over many families."""

import pytest
import torch
import transformers as tr
from tests.boundary.tiny_models import FAMILIES, V, sizes

from tiewise.core.errors import SpecError
from tiewise.core.sharing_spec import SharingSpec
from tiewise.planning.architecture import budget
from tiewise.planning.read_config import read
from tiewise.sharing.layout import find_stacks
from tiewise.sharing.share import share_layers

_LLAMA = sizes("num_hidden_layers=4 num_attention_heads=4 num_key_value_heads=2 hidden_size=32 intermediate_size=48")
_LLAMA |= sizes(f"vocab_size={V} pad_token_id=0 bos_token_id=1 eos_token_id=2")
_BERT = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"} | {"max_position_embeddings": 40}
_SHORT = sizes(f"vocab_size={V} hidden_size=32 n_layer=4 n_head=4")
_GPT = sizes(f"vocab_size={V} n_embd=32 n_layer=4 n_head=4 n_positions=40 bos_token_id=1 eos_token_id=2")
_DISTIL = sizes(f"vocab_size={V} dim=32 n_layers=4 n_heads=4 hidden_dim=48 max_position_embeddings=40")
_FALCON = sizes(f"vocab_size={V} hidden_size=32 num_hidden_layers=4 num_attention_heads=4")
_FALCON_NEW = _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
_UMT5 = sizes(f"vocab_size={V} d_model=32 d_kv=8 d_ff=48 num_layers=4 num_decoder_layers=4 num_heads=4")
_UMT5 |= sizes("decoder_start_token_id=0 pad_token_id=0")
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_DEEPSEEK = _LLAMA | _LATENT | _EXPERTS | {"moe_intermediate_size": 16, "first_k_dense_replace": 1}
# one of each arrangement that places norms, biases or experts otherwise than `FAMILIES` do
MORE = {
    "albert": ("AlbertForMaskedLM", "AlbertConfig", _BERT | {"embedding_size": 16, "num_hidden_groups": 4}),
    "bloom": ("BloomForCausalLM", "BloomConfig", _SHORT),
    "deepseek": ("DeepseekV2ForCausalLM", "DeepseekV2Config", _DEEPSEEK | {"num_key_value_heads": 4}),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", _DISTIL),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", _BERT | {"embedding_size": 16}),
    "falcon": ("FalconForCausalLM", "FalconConfig", _FALCON),
    "falcon_new": ("FalconForCausalLM", "FalconConfig", _FALCON_NEW),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", _GPT | {"rotary_dim": 4}),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", _LLAMA | {"num_local_experts": 4, "head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", _LLAMA | {"num_local_experts": 4}),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", _BERT | {"cls_token_id": 1, "sep_token_id": 2}),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", _LLAMA),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _LLAMA),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", _LLAMA | {"use_parallel_residual": True}),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", _UMT5),
}
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


def build(name):
    """A random model of four layers."""
    torch.manual_seed(0)
    if name in MORE:
        kind, config, settings = MORE[name]
        return getattr(tr, kind)(getattr(tr, config)(**settings))
    kind, config, settings = FAMILIES[name]
    return kind(config(**settings | {key: 4 for key in _DEPTHS if key in settings}))


def predicted(model, text):
    architecture = read(model.config.to_dict() | {"architectures": [type(model).__name__]})
    assert not architecture.estimated
    return budget(architecture, architecture.boundary, SharingSpec.parse(text)).total


QUICK = {"bert", "falcon_new", "gemma2", "gpt2", "gpt_neox", "modernbert", "phi", "t5"}


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in sorted(FAMILIES.keys() | MORE.keys())],
)
def test_counts_are_those_that_the_budget_predicts(name):
    for text in ("none", "attention", "ffn", "all", "all:groups=2", "ffn:cycle=2", "sandwich"):
        model = build(name)
        before = predicted(model, text)
        assert share_layers(model, text).parameters == before, text


def test_norms_are_placed_by_what_reads_them_even_where_two_give_the_same_values():
    (stack,) = find_stacks(build("gpt_neox"))  # parallel branches, two norms of the same input, both new
    assert stack.parts[0]["input_layernorm.weight"] == "attention"
    assert stack.parts[0]["post_attention_layernorm.weight"] == "ffn"
    (stack,) = find_stacks(build("phi"))  # parallel branches that read one norm
    assert stack.parts[0]["input_layernorm.weight"] == "own"


def test_finding_stacks_leaves_no_trace():
    model = build("llama").train()
    model.model.layers[1].eval()
    find_stacks(model)
    assert [layer.training for layer in model.model.layers] == [True, False, True, True]
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_without_an_ffn_says_so():
    settings = {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}
    mamba = tr.MambaForCausalLM(tr.MambaConfig(**settings))
    with pytest.raises(SpecError, match="no ffn found"):
        share_layers(mamba, "ffn")
