"""Test the counted parameters of a config against the model that transformers builds from it, per component."""

import json
import re
import warnings
from collections import Counter

import pytest
import torch
import transformers
from family_defaults import PATH, all_records
from published_configs import PUBLISHED, QUICK
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel
from transformers.models.auto import modeling_auto as auto

from tiewise.checkpoint.families import FAMILIES
from tiewise.core.errors import PlanError
from tiewise.planning.config import Config
from tiewise.planning.model_families import READERS as READER_FUNCTIONS
from tiewise.planning.read_config import read

READERS = sorted(kind for kind, one in FAMILIES.items() if one.reader is not None and one.written_keys is None)

DEFAULTS = json.loads(PATH.read_text())


def is_tested_here(kind: str) -> bool:
    """Return whether all layers of a family are alike and it has a class; test_readers.py tests the others."""
    function = getattr(READER_FUNCTIONS[FAMILIES[kind].reader.name], "func", None)
    function = function or READER_FUNCTIONS[FAMILIES[kind].reader.name]
    is_mixed = ".planning.readers" in function.__module__
    tables = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    return not is_mixed and any(kind in table for table in (*tables, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES))


UNIFORM = [kind for kind in READERS if is_tested_here(kind)]
# Name patterns of each component, in the order of trial. They are independent of the readers.
PATTERNS = [
    ("cross_attention", r"EncDecAttention|encoder_attn\."),
    ("positions", r"wpe|embed_positions|position_embeddings|relative_attention_bias"),
    ("token_types", r"token_type_embeddings"),
    ("embedding_norm", r"embeddings\.(LayerNorm|norm)|word_embeddings_layernorm|layernorm_embedding"),
    ("maps", r"project_in|project_out|embedding_hidden_mapping_in|embeddings_project\."),
    ("head_bias", r"(lm_head|predictions|vocab_projector|generator_lm_head|^decoder|predictions\.decoder)\.bias$"),
    ("head_transform", r"cls\.predictions\.|^predictions\.|lm_head\.(dense|layer_norm)|vocab_(transform|layer_norm)"),
    ("head_transform", r"generator_predictions|^head\."),
    ("other", r"seq_relationship|sop_classifier|discriminator_predictions|^model\.encoder\.embed_tokens"),
    ("other", r"(attn|ffn)_hc\.|hc_head\."),
    ("pooler", r"pooler"),
    ("shared_experts", r"shared_experts?\."),
    ("experts", r"experts\.|fc[12]_latent_proj"),
    ("router", r"(mlp|mixer)\.gate\.|shared_expert_gate|router\."),
    ("attention", r"(q|k|kv)(_a)?_(norm|layernorm)|mixer\.[qkvo]_proj"),
    ("ffn", r"mixer\.(up|down)_proj"),
    ("mixer", r"mixer|linear_attn"),
    ("norms", r"norm|\.ln_|sa_layer_norm|LayerNorm|ln_(f|attn|mlp)|norm_(1|2|f)"),
    ("attention", r"attn|attention|SelfAttention"),
    ("output_table", r"lm_head\.weight|^cls\.predictions\.decoder"),
    ("input_table", r"wte|embed_tokens|embed_in|word_embeddings|tok_embeddings|shared\.weight|embeddings\.weight"),
    ("ffn", r"mlp|feed_forward|\.ffn\.|fc1|fc2|ffn|DenseReluDense|intermediate|output\.dense"),
]


def build_model(config: dict) -> torch.nn.Module:
    values = dict(config)
    named = values.get("architectures")
    hf_config = AutoConfig.for_model(values.pop("model_type"), **values)
    family, masked = hf_config.model_type, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    tables = (auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, masked)
    order = (masked,) if family in ("bert", "roberta", "electra") else tables
    names = named or [table[family] for table in order if family in table]
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if names:
            return getattr(transformers, names[0])(hf_config)
        return WithHead(AutoModel.from_config(hf_config), hf_config)


class WithHead(torch.nn.Module):
    """The text model of a composite, which has no class with a head of its own."""

    def __init__(self, body: torch.nn.Module, config: transformers.PretrainedConfig) -> None:
        super().__init__()
        self.model = body
        if not config.tie_word_embeddings:
            self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)


def count_parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def count_by_component(model: torch.nn.Module) -> Counter:
    counts: Counter = Counter()
    for name, parameter in model.named_parameters():  # named_parameters yields a shared parameter once
        component = next((c for c, pattern in PATTERNS if re.search(pattern, name)), None)
        assert component, f"no pattern for {name}"
        counts[component] += parameter.numel()
    return counts


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in sorted(PUBLISHED)]
)
def test_read_counts_every_component_like_the_built_model(name):
    model, architecture = build_model(PUBLISHED[name]), read(PUBLISHED[name])
    assert not architecture.estimated
    assert architecture.total == count_parameters(model)
    assert architecture.frozen == sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert dict(architecture.parameters()) == dict(count_by_component(model))


def test_stored_class_defaults_equal_those_of_transformers():
    assert all_records() == DEFAULTS


# Sizes that every class accepts; none is a default or a common multiple of another.
ODD = {
    "vocab_size": 160_007,
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "d_ff", "ffn_hidden_size"), 1000),
    **dict.fromkeys(("encoder_ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"), 1000),
    **dict.fromkeys(("decoder_ffn_dim", "max_position_embeddings", "n_positions", "word_embed_proj_dim"), 520),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), 5),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "type_vocab_size", "inner_group_num"), 3),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "relative_attention_num_buckets", "state_size", "conv_kernel"), 12
    ),
    **dict.fromkeys(("embedding_size", "d_kv", "head_dim", "time_step_rank"), 96),
    **dict.fromkeys(("decoder_sparse_step", "num_hidden_groups", "expand"), 3),
    "mlp_only_layers": [1],
    "moe_layers": [1, 2],
    "interleave_moe_layer_step": 2,
}
KEYS = [
    (family, key, ODD.get(key, not default))
    for family, known in DEFAULTS.items()
    if family in UNIFORM
    for key, default in known["defaults"].items()
    if key in ODD or (isinstance(default, bool) and key != "tie_word_embeddings")
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "key", "value"), KEYS)
def test_read_counts_every_config_key_like_the_class(family, key, value):
    config = {"model_type": family, key: value}
    if key == "add_cross_attention":  # its classes refuse it without the first, or with the second
        config |= {"is_decoder": True, "multi_query": False}
    if key == "num_hidden_groups":
        config["num_hidden_layers"] = 12
    if family == "gpt_neo" and key == "num_layers":
        config["attention_types"] = [[["global"], 5]]
    model = build_model(config)
    assert read(config).total == count_parameters(model)


@pytest.mark.slow
@pytest.mark.parametrize("family", UNIFORM)
@pytest.mark.parametrize("tied", [None, True, False])
def test_read_counts_class_defaults_like_transformers_tied_or_untied(family, tied):
    if tied is not None and family in ("t5", "mt5", "umt5"):
        return  # their classes overrule the config's key
    config = {"model_type": family} | ({} if tied is None else {"tie_word_embeddings": tied})
    assert read(config).total == count_parameters(build_model(config))


def aliased_keys():
    """Return (family, alias, key of the class) of every size or number that a reader reads under an alias."""
    cases = []
    for family in READERS:
        defaults = DEFAULTS[family]["defaults"]
        for alias, key in CONFIG_MAPPING[family].attribute_map.items():
            if (family, key) == ("gpt_neo", "num_layers"):
                continue  # the class also wants a list of kinds of this length
            if alias in DEFAULTS[family]["names"] and type(defaults.get(key)) is int:
                cases.append((family, alias, key))
    return cases


@pytest.mark.parametrize(("family", "alias", "key"), aliased_keys(), ids=str)
def test_key_and_its_alias_at_once_are_read_like_the_class(family, alias, key):
    for written in ({alias: 8, key: 4}, {key: 4, alias: 8}):
        assert Config({"model_type": family, **written}, family).get(key) == 8
        assert getattr(CONFIG_MAPPING[family].from_dict(written), key) == 8


def test_deepseek_v4_with_both_intermediate_sizes_counts_like_its_class():
    sizes = {"vocab_size": 90, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 8}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "hc_mult": 2, "model_type": "deepseek_v4"}
    for widths in ({"moe_intermediate_size": 24, "intermediate_size": 40}, {"intermediate_size": 40}):
        assert read({**sizes, **widths}).total == count_parameters(build_model({**sizes, **widths}))


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32"])
@pytest.mark.parametrize("older", [4, 8, None])
def test_older_key_of_experts_counts_like_its_class(family, older):
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 24}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 4, "first_k_dense_replace": 1}
    config = {"model_type": family, **sizes, "num_experts": older, "n_routed_experts": 6}
    assert read(config).total == count_parameters(build_model(config))


def test_number_of_dense_layers_beyond_the_layers_costs_no_time():
    sizes = {"hidden_size": 4096, "num_attention_heads": 96, "num_hidden_layers": 1}
    for family in ("glm4_moe", "deepseek_v3"):
        totals = {read({"model_type": family, **sizes, "first_k_dense_replace": n}).total for n in (1, 2**31)}
        assert len(totals) == 1


def test_width_that_the_class_of_bloom_does_not_know_is_ignored():
    config = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "intermediate_size": 24}
    assert read(config).total == count_parameters(build_model(config))


def test_older_flag_of_lfm2_unties():
    config = {"model_type": "lfm2", "num_hidden_layers": 2, "tie_embedding": False, "tie_word_embeddings": True}
    assert read(config).total == count_parameters(build_model(config))


@pytest.mark.parametrize(("outer", "inner"), [(False, True), (True, False)])
def test_older_flag_of_lfm2_vl_counts_at_its_root_alone(outer, inner):
    text = {"model_type": "lfm2", "num_hidden_layers": 2, "vocab_size": 90, "hidden_size": 32, "tie_embedding": inner}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
    architectures = ["Lfm2VlForConditionalGeneration"]
    config = {"model_type": "lfm2_vl", "tie_embedding": outer, "text_config": text, "architectures": architectures}
    model = build_model(config)
    assert read(config).ends.tied == (model.lm_head.weight is model.get_input_embeddings().weight) == outer


def test_lfm2_moe_without_kinds_of_layers_is_refused_like_its_class():
    config = {"model_type": "lfm2_moe", "num_hidden_layers": 2, "full_attn_idxs": [1]}
    with pytest.raises(TypeError):
        build_model(config)
    with pytest.raises(PlanError, match="has no layer_types"):
        read(config)


def test_read_uses_a_nested_text_config_and_notes_it():
    text = PUBLISHED["gemma-3-270m"]
    nested = {"model_type": "acme_vl", "text_config": text, "vision_config": {"hidden_size": 1152}}
    architecture = read(nested)
    assert architecture.total == read(text).total
    assert any("text_config" in note for note in architecture.notes)
    assert not read({**nested, "tie_word_embeddings": False}).ends.tied


def test_read_estimates_an_unknown_family_and_notes_it():
    config = {**PUBLISHED["llama-3.2-1b"], "model_type": "brand_new"}
    architecture = read(config)
    assert architecture.estimated
    assert "brand_new" in architecture.notes[0]
    exact = read(PUBLISHED["llama-3.2-1b"]).parameters()
    estimate = architecture.parameters()
    assert {k: v for k, v in exact.items() if k != "norms"} == dict(estimate)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "llama", "hidden_size": 100, "num_attention_heads": 3}, "not a multiple"),
        ({"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 4}, "cannot be grouped"),
        ({"model_type": "llama", "vocab_size": 0}, "vocab_size = '0'"),
        ({"model_type": "gpt2", "n_embd": "768"}, "hidden_size = '768'"),
        ({"model_type": "gpt2", "n_layer": True}, "num_hidden_layers = 'True'"),
        ({"model_type": "brand_new", "hidden_size": 64}, "no vocab_size"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": "many"}, "query_pre_attn_scalar"),
    ],
)
def test_read_refuses_contradictory_sizes(config, says):
    with pytest.raises(PlanError, match=says) as caught:
        read(config)
    assert caught.value.remedy


def test_untied_bert_stores_its_head_bias_twice():
    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 1000}
    tied, untied = (read({**config, "tie_word_embeddings": tie}).parameters() for tie in (True, False))
    assert (tied["head_bias"], untied["head_bias"]) == (1000, 2000)
