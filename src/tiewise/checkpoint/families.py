"""Families of models: one record each, and the lookup that every command uses.

    family("llama")             its record
    family("acme")              a record without facts: `has_facts` is False, `unknown_message` is what to print

A family of transformers that is not listed here has a record too: the generated data has its config and classes. A
listed record adds facts that the data lacks: an exact reader, the final norm, the first MLP, and exceptions of loaders.
`family_record.py` describes the fields, and docs/dev/extend.md shows how to add a family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tiewise.checkpoint.family_record import LAYER, BlockNames, ConfigKeys, Family, FinalNorm, read_with

# final norms
_NORM, _NORM_5 = FinalNorm(), FinalNorm(eps=1e-5)
_LN_F = FinalNorm("ln_f", LAYER, "layer_norm_epsilon", 1e-5)
_GEMMA_NORM = FinalNorm(plus_one=True, root_width=True)
_CAPPED_NORM = replace(_GEMMA_NORM, scalars=("final_logit_softcapping",))

_CROSSES = "add_cross_attention"  # key of a decoder whose layers also attend to an encoder

# first MLPs
_MLP = BlockNames()
_GPT2_MLP = BlockNames("h", ("ln_2",))
_FOUR_NORMS = BlockNames(before=("pre_feedforward_layernorm",), after="post_feedforward_layernorm")
_PARALLEL = BlockNames(before=("input_layernorm",))

# Kimi K2 is published with separate code that counts like DeepSeek V3. The defaults are those of its config class.
_KIMI_K2 = ConfigKeys(
    defaults={
        **{"tie_word_embeddings": False, "attention_bias": False, "intermediate_size": 18_432},
        **{"moe_intermediate_size": 2048, "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8},
        **{"first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    }
)

_DECODERS = (
    Family("llama", read_with("llama"), final_norm=_NORM, first_mlp=_MLP),
    Family("mistral", read_with("llama"), final_norm=_NORM, first_mlp=_MLP),
    Family("smollm3", read_with("llama"), final_norm=_NORM, first_mlp=_MLP),
    Family("phi3", read_with("llama"), final_norm=_NORM_5, first_mlp=_MLP),
    Family("qwen2", read_with("decoder", bias=True, out_bias=False), final_norm=_NORM, first_mlp=_MLP),
    Family("qwen3", read_with("qwen3"), final_norm=_NORM, first_mlp=_MLP),
    Family("glm", read_with("biased", out_bias=False), final_norm=FinalNorm(eps=1.5625e-7), first_mlp=_MLP),
    Family(
        "olmo",
        read_with("biased", kind="none"),
        final_norm=FinalNorm(kind=LAYER, eps_key="", eps=1e-5, stored=False),
        first_mlp=_MLP,
    ),
    Family(
        "olmo2",
        read_with("biased", query_norms="all heads", fresh=None),
        final_norm=_NORM_5,
        first_mlp=replace(_FOUR_NORMS, before=()),
    ),
    Family("olmo3", read_with("biased", query_norms="all heads", fresh=None)),
    Family("gemma", read_with("gemma"), final_norm=_GEMMA_NORM, first_mlp=_MLP, llama_cpp="no head"),
    Family(
        "gemma2",
        read_with("gemma2"),
        final_norm=_CAPPED_NORM,
        first_mlp=_FOUR_NORMS,
        llama_cpp="no head",
        vllm="no head",
    ),
    Family("gemma3_text", read_with("gemma2", query_norms="one head"), final_norm=_CAPPED_NORM, first_mlp=_FOUR_NORMS),
    Family(
        "granite",
        read_with("granite"),
        final_norm=FinalNorm(scalars=("embedding_multiplier", "logits_scaling")),
        first_mlp=replace(_MLP, scale="residual_multiplier"),
    ),
    Family("ernie4_5", read_with("decoder", bias="use_bias", ffn_bias="use_bias")),
    Family(
        "starcoder2",
        read_with("decoder", bias="use_bias", ffn_bias="use_bias", gated=False, kind="layer"),
        final_norm=FinalNorm("norm", LAYER, "norm_epsilon", 1e-5),
        first_mlp=_MLP,
    ),
    Family(
        "stablelm",
        read_with("stablelm"),
        final_norm=FinalNorm("norm", LAYER, "layer_norm_eps", 1e-5),
        first_mlp=BlockNames(before=("post_attention_layernorm", "input_layernorm")),
        llama_cpp="head required",
    ),
    Family(
        "cohere",
        read_with("cohere"),
        final_norm=FinalNorm(kind=LAYER, eps_key="layer_norm_eps", eps=1e-5, scalars=("logit_scale",)),
        first_mlp=_PARALLEL,
        llama_cpp="head unnamed",
        vllm="no head",
    ),
    Family("cohere2", read_with("cohere"), llama_cpp="head unnamed", vllm="no head"),
    Family("gpt2", read_with("gpt2"), final_norm=_LN_F, first_mlp=_GPT2_MLP, stores_transposed=True),
    Family("gpt_bigcode", read_with("gpt_bigcode")),
    Family(
        "gpt_neo",
        read_with(
            "gpt", bias=False, out_bias=True, positions="max_position_embeddings", fresh={"attention_scale": 1.0}
        ),
        final_norm=_LN_F,
        first_mlp=_GPT2_MLP,
    ),
    Family(
        "gptj",
        read_with("gpt", bias=False, norms="one", parallel=True, head_bias=True),
        final_norm=_LN_F,
        first_mlp=BlockNames("h", ("ln_1",)),
    ),
    Family(
        "gpt_neox",
        read_with("gpt", bias="attention_bias", parallel="use_parallel_residual"),
        final_norm=FinalNorm("final_layer_norm", LAYER, "layer_norm_eps", 1e-5),
        first_mlp=_MLP,
    ),
    Family(
        "phi",
        read_with("phi", query_norms="one head", normed_queries="qk_layernorm"),
        final_norm=FinalNorm("final_layernorm", LAYER, "layer_norm_eps", 1e-5),
        first_mlp=_PARALLEL,
        llama_cpp="head required",
    ),
    Family(
        "falcon",
        read_with("falcon"),
        final_norm=_LN_F,
        first_mlp=BlockNames("h", ("ln_mlp", "post_attention_layernorm", "input_layernorm")),
    ),
    Family(
        "opt",
        read_with("opt"),
        final_norm=FinalNorm("final_layer_norm", LAYER, "", 1e-5),
        first_mlp=BlockNames("decoder.layers", ("final_layer_norm",), ("fc1", "activation_fn", "fc2")),
    ),
    Family("bloom", read_with("gpt", embedding_norm=True, fresh=None)),
    Family("mpt", read_with("gpt", bias=False, ffn_bias=False, kind="layer without bias", fresh=None), vllm="no head"),
    Family("mixtral", read_with("mixtral"), final_norm=_NORM_5),
    Family("olmoe", final_norm=_NORM_5),
    Family("gpt_oss", read_with("gpt_oss")),
    Family("qwen2_moe", read_with("qwen2_moe"), llama_cpp="head required"),
    Family("qwen3_moe", read_with("qwen3_moe")),
    Family("qwen3_next", read_with("qwen3_next")),
    Family("qwen3_5_text", read_with("qwen3_5")),
    Family("qwen3_5_moe_text", read_with("qwen3_5_moe")),
    Family("qwen3_vl_text", read_with("qwen3", fresh=None)),
    Family("qwen3_vl_moe_text", read_with("qwen3_moe")),
    Family("llama4_text", read_with("llama4")),
    Family("minimax_m2", read_with("experts", query_norms="all heads")),
    Family("mimo_v2_flash", read_with("mimo_v2")),
    Family(
        "glm4_moe",
        read_with(
            "routed", bias="attention_bias", out_bias=False, query_norms="one head", normed_queries="use_qk_norm"
        ),
    ),
    Family("glm4_moe_lite", read_with("latent")),
    Family("glm_moe_dsa", read_with("glm_moe_dsa")),
    Family("kimi_k2", read_with("deepseek"), written_keys=_KIMI_K2),
    Family("deepseek_v32", read_with("indexed")),
    Family("deepseek_v4", read_with("deepseek_v4")),
    Family("nemotron_h", read_with("nemotron_h")),
    Family("granitemoehybrid", read_with("granite_hybrid")),
    Family("bamba", read_with("bamba")),
    Family("jamba", read_with("jamba")),
    Family("zamba2", read_with("zamba2")),
    Family("lfm2", read_with("lfm2")),
    Family("deepseek_v2", read_with("deepseek", ffn_bias="mlp_bias")),
    Family("deepseek_v3", read_with("deepseek")),
    Family("mamba", read_with("mamba")),
    Family("lfm2_moe", read_with("lfm2_moe"), llama_cpp="head unnamed"),
)
_ENCODERS = (
    Family("bert", read_with("bert", pools=True, judges_pairs=True, crosses=_CROSSES, head_biases=2)),
    Family("roberta", read_with("bert", pools=True, crosses=_CROSSES, head_biases=2)),
    Family("distilbert", read_with("bert", ffn_width="hidden_dim", token_types=False)),
    Family("electra", read_with("bert", table_width="embedding_size", crosses=_CROSSES, discriminates=True)),
    Family("albert", read_with("albert", table_width="embedding_size", pools=True, judges_pairs=True, head_biases=2)),
    Family("modernbert", read_with("modernbert")),
)
_ENCODER_DECODERS = (
    Family("t5", read_with("t5"), unit_table="scaled if tied", llama_cpp="T5"),
    Family("mt5", read_with("t5"), unit_table="not scaled", is_t5_like=True, llama_cpp="T5"),
    Family("umt5", read_with("t5", positions_in_layers=True), unit_table="scaled", llama_cpp="T5"),
    Family("switch_transformers", is_t5_like=True),
    Family("bart", read_with("bart", learned_positions=True)),
    Family("mbart", read_with("bart", learned_positions=True, final_norm=True)),
    Family("marian", read_with("marian")),
    Family("pegasus", read_with("bart", final_norm=True)),
)
_WITH_PICTURES_OR_SOUND = (
    Family("mllama", extra_rows=8, head_lacks_extra_rows=True),
    Family("mllama_text_model", extra_rows=8, head_lacks_extra_rows=True),
    Family("moshi", extra_rows=1),
    Family("moshi_depth", extra_rows=1),
    Family("musicgen", extra_rows=1),
    Family("musicgen_decoder", extra_rows=1),
    Family("musicgen_melody", extra_rows=1),
    Family("musicgen_melody_decoder", extra_rows=1),
    Family("imagegpt", extra_rows=-1, stores_transposed=True),
    Family("kyutai_speech_to_text", has_codebook_rows=True),
    Family("gemma3", towers=read_with("gemma3"), replaces_placeholders=True),
    Family("gemma3n", repeats_first_row=True),
    Family("gemma3n_text", read_with("gemma3n"), repeats_first_row=True),
    Family("gemma4", towers=read_with("gemma4"), replaces_placeholders=True),
    Family("gemma4_text", read_with("gemma4")),
    Family("gemma4_unified", replaces_placeholders=True),
    Family("embedding_gemma2", replaces_placeholders=True),
    Family("paligemma", replaces_placeholders=True),
    Family("granite_speech", replaces_placeholders=True),
    Family("granite_speech_plus", replaces_placeholders=True),
    Family("kimi_k25", towers=read_with("kimi_k25"), replaces_placeholders=True),
    Family("muse_glimmer", replaces_placeholders=True),
    Family("muse_spark", replaces_placeholders=True),
    Family("nemotron3_5_transcribe", replaces_placeholders=True),
    Family("nemotron_parse", vllm="own head"),
    Family("qwen3_vl", towers=read_with("qwen3_vl", family="qwen3_vl_vision"), sglang="dropped head"),
    Family("qwen3_vl_moe", towers=read_with("qwen3_vl", family="qwen3_vl_moe_vision"), sglang="dropped head"),
    Family("qwen3_5", towers=read_with("qwen3_vl", family="qwen3_5_vision", deep=False)),
    Family("qwen3_5_moe", towers=read_with("qwen3_vl", family="qwen3_5_moe_vision", deep=False)),
    Family("llama4", towers=read_with("llama4")),
    Family("lfm2_vl", towers=read_with("lfm2_vl")),
    Family("clip", towers=read_with("clip")),
    Family("clip_text_model", read_with("clip_text")),
    Family("siglip", towers=read_with("siglip")),
    Family("siglip_text_model", read_with("siglip_text")),
    Family("clvp", stores_transposed=True),
)
_OTHERS = (
    Family("openai-gpt", stores_transposed=True),
    Family("decision_transformer", stores_transposed=True),
    # model types of tiewise
    Family("tiewise"),
    Family("tiewise-rnn"),
    Family("tiewise-albert"),
)


def _by_type(records: Iterable[Family]) -> dict[str, Family]:
    """Return the records by model type. Raise a ValueError for two records of one type."""
    table: dict[str, Family] = {}
    for record in records:
        if record.model_type in table:
            raise ValueError(f"two records of the family {record.model_type}")
        table[record.model_type] = record
    return table


FAMILIES: Mapping[str, Family] = _by_type(
    (*_DECODERS, *_ENCODERS, *_ENCODER_DECODERS, *_WITH_PICTURES_OR_SOUND, *_OTHERS)
)


def family(model_type: Any) -> Family:
    """Return the record of a `model_type`. An unknown type has a record without facts."""
    name = model_type if isinstance(model_type, str) else ""
    return FAMILIES.get(name) or _unlisted(name)


@lru_cache(maxsize=64)
def _unlisted(model_type: str) -> Family:
    """Return the record of a family that is not listed. It has only the generated data."""
    return Family(model_type, is_written=False)
