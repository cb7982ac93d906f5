"""Test counts of classes for other tasks than text, against those that transformers builds."""

import pytest
import torch
import transformers
from reader_configs import CASES
from transformers.models.auto import modeling_auto

import tiewise
from tiewise.planning.read_config import read

SCORED = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
SIZES = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LABELS = {"id2label": {"0": "low", "1": "middle", "2": "high"}}
TYPES = ("llama", "qwen3", "gemma2", "mixtral", "bloom", "falcon", "gpt_neox", "phi", "stablelm", "glm", "gpt_oss")
CONFIGS = {kind: {"model_type": kind, **SIZES, "head_dim": 8, "pad_token_id": 0} for kind in TYPES}
del CONFIGS["falcon"]["head_dim"]  # its class refuses this key
CONFIGS["opt with narrow tables"] = {"model_type": "opt", "hidden_size": 32, "ffn_dim": 24, "num_hidden_layers": 2}
CONFIGS["opt with narrow tables"] |= {"num_attention_heads": 4, "word_embed_proj_dim": 16}
MIXED = {case.config["model_type"]: case.config for case in CASES if case.config["model_type"] in SCORED}
CONFIGS |= {kind: config for kind, config in MIXED.items() if "text_config" not in config}


def class_total(config):
    values = {key: value for key, value in config.items() if key != "architectures"}
    (name,) = config["architectures"]
    with torch.device("meta"):
        built = getattr(transformers, name)(transformers.AutoConfig.for_model(**values))
    return sum(parameter.numel() for parameter in built.parameters())


def scored(config, **more):
    return {**config, "architectures": [SCORED[config["model_type"]]], **more}


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"zamba2"}))
def test_score_head_of_a_decoder_counts_like_the_class(name):
    config = scored(CONFIGS[name], **LABELS)
    architecture = read(config)
    assert (architecture.total, architecture.not_counted) == (class_total(config), ())
    assert not architecture.ends.head


@pytest.mark.parametrize(
    "labels", [{}, {"num_labels": 5}, {"id2label": {"0": "a"}}, {**LABELS, "num_labels": 7}], ids=str
)
def test_labels_count_as_the_config_class_reads_them(labels):
    config = scored(CONFIGS["llama"], **labels)
    assert read(config).total == class_total(config)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("llama", f"LlamaFor{task}") for task in ("TokenClassification", "QuestionAnswering", "RewardModel")),
        *(("bert", f"BertFor{task}") for task in ("SequenceClassification", "TokenClassification", "MultipleChoice")),
        ("gpt2", "GPT2DoubleHeadsModel"),
        ("llama", "LlamaForCausalLMEagle3"),
        ("bart", "BartForSequenceClassification"),
    ],
)
def test_any_other_head_is_named_as_not_counted(kind, name):
    model = tiewise.plan({"model_type": kind, "architectures": [name]}, build=False).record()["model"]
    assert model["not_counted"] == [f"parts of {name} next to its body (architectures)"]
    assert model["parameters"]["total"] is None


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaModel", "LlamaBidirectionalModel"])
def test_class_of_text_or_without_a_head_has_no_mark(name):
    assert read({"model_type": "llama", "architectures": [name]}).not_counted == ()
