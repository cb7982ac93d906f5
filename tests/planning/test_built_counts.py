"""Test plans of configs whose class is asked: the counts, what is not asked, and the child process."""

import re
import warnings

import pytest
import torch
import transformers
from tests.checkpoint.asked_classes import reply_here

import tiewise
from tiewise.checkpoint import built_class
from tiewise.checkpoint.built_class import NotBuilt
from tiewise.core.errors import PlanError
from tiewise.planning import built_counts
from tiewise.planning.built_counts import count_on_meta

# no reader knows these families; D = 32, F = 24, L = 3
SIZES = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
PHIMOE = {"model_type": "phimoe", **SIZES, "num_local_experts": 6, "num_experts_per_tok": 2}
OLMOE = {"model_type": "olmoe", **SIZES, "num_experts": 5, "num_experts_per_tok": 3}
HELIUM = {"model_type": "helium", **SIZES, "head_dim": 8}
UNKNOWN = {"model_type": "acme", **SIZES, "num_experts": 5}


@pytest.fixture
def asked(monkeypatch):
    """Let plans ask classes in this process, and return the questions."""
    questions = []

    def ask(question):
        questions.append(question)
        return reply_here(question)

    monkeypatch.setattr(built_counts, "ask", ask)
    return questions


def class_total(config):
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    return sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize(
    ("config", "unused"),
    [(PHIMOE, 3 * 3 * 32 * 24 * 4), (OLMOE, 3 * 3 * 32 * 24 * 2), ({**OLMOE, "num_experts": 3}, 0), (HELIUM, 0)],
)
def test_plan_counts_a_family_without_reader_like_its_class(asked, config, unused):
    record = tiewise.plan(config, arms=("tied", "untied")).record()
    total = class_total(config)
    assert len(asked) == 1
    assert record["model"]["parameters"]["total"] == total
    assert record["model"]["parameters"]["active"] == total - unused - 89 * 32  # of the lookup, one row of 90
    assert (record["model"]["estimated"], record["model"]["not_counted"]) == (False, [])
    assert [choice["saved"] for choice in record["choices"]] == [90 * 32, 0]


def test_plan_asks_about_the_class_that_the_config_names(asked):
    config = {"model_type": "acme", **SIZES, "architectures": ["OlmoeForCausalLM"], "num_experts": 5}
    tiewise.plan({**config, "num_experts_per_tok": 3, "quantization_config": {"quant_method": "fp8"}})
    (question,) = asked
    assert question.class_name == "OlmoeForCausalLM"
    assert "quantization_config" not in question.config


@pytest.mark.parametrize(
    "foreign",
    [
        {"model_type": "phi-msft", "architectures": ["PhiForCausalLM"], "n_embd": 48, "n_layer": 3},  # Phi-2 by mlc-llm
        {"model_type": "rwkv5", "architectures": ["RwkvForCausalLM"], "head_size": 64},  # the class is RWKV-4's
    ],
)
def test_class_of_another_type_does_not_count_if_it_ignores_a_size(asked, foreign):
    model = tiewise.plan({**foreign, **SIZES}).record()["model"]
    assert len(asked) == 1
    assert model["estimated"] or model["not_counted"]
    with pytest.raises(PlanError, match=r"has no key (n_embd|head_size)"):
        count_on_meta({**foreign, **SIZES})


def test_plan_asks_no_class_if_a_reader_counts_or_transformers_has_none(asked):
    assert tiewise.plan("gpt2").architecture.total == 124_439_808
    assert tiewise.plan({"model_type": "llama", **SIZES}).record()["model"]["estimated"] is False
    assert tiewise.plan(UNKNOWN).record()["model"]["not_counted"]
    assert asked == []


def test_plan_builds_no_class_if_the_caller_refuses(asked):
    assert tiewise.plan(HELIUM, build=False).record()["model"]["estimated"]
    assert tiewise.plan(PHIMOE, build=False).record()["model"]["not_counted"]
    assert asked == []


def test_plan_of_shared_layers_keeps_the_estimate(asked):
    assert tiewise.plan(HELIUM, share="none,all").record()["model"]["estimated"]
    assert asked == []


def test_plan_keeps_its_marks_if_the_class_refuses_the_config_or_is_not_built(monkeypatch):
    replies = {NotBuilt("heads do not divide", is_refused=True): 1, NotBuilt("torch is not installed"): 0}
    for reply, notes in replies.items():
        monkeypatch.setattr(built_counts, "ask", lambda _question, reply=reply: reply)
        model = tiewise.plan(PHIMOE).record()["model"]
        assert model["not_counted"]
        assert model["parameters"]["total"] is model["parameters"]["active"] is None
        assert sum("refuses this config: heads do not divide" in note for note in model["notes"]) == notes


# width 32, 2 layers; the classes are not in any AutoModel mapping of a language model
BERT_SIZES = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
BERT_SIZES |= {"num_attention_heads": 4, "max_position_embeddings": 40}
VISION = {**BERT_SIZES, "image_size": 28, "patch_size": 14}
OF_MODULES = [  # config, and the modules of its class by their place
    (
        {"model_type": "distilbert", "architectures": ["DistilBertForSequenceClassification"], "dim": 32}
        | {"hidden_dim": 24, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 40, "vocab_size": 90},
        {"positions": r"position_embeddings"},
    ),
    (
        {"model_type": "clip_text_model", "architectures": ["CLIPTextModelWithProjection"], **BERT_SIZES},
        {"positions": r"position_embedding"},
    ),
    (
        {"model_type": "dpr", "architectures": ["DPRContextEncoder"], **BERT_SIZES},
        {"positions": r"position_embeddings|token_type"},
    ),
    (
        {"model_type": "git", "architectures": ["GitForCausalLM"], **BERT_SIZES, "vision_config": VISION},
        {"positions": r"git\.embeddings\.position", "towers": r"image_encoder|visual_projection"},
    ),
    (
        {"model_type": "blip", "architectures": ["BlipForConditionalGeneration"], "vision_config": VISION}
        | {"text_config": {**BERT_SIZES, "encoder_hidden_size": 32}},
        {"positions": r"bert\.embeddings\.position", "towers": r"vision_model"},
    ),
    (
        {"model_type": "moshi", "architectures": ["MoshiForCausalLM"], **BERT_SIZES, "ffn_dim": 24},
        {"other_tables": "one more row"},
    ),
]


@pytest.mark.parametrize(("config", "places"), OF_MODULES, ids=lambda value: str(value.get("model_type", "")))
def test_built_class_counts_parts_like_its_modules(config, places):
    (name,) = config["architectures"]
    counted = dict(count_on_meta(config).parameters())
    model_class = getattr(transformers, name)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_class(model_class.config_class(**config))
    model.tie_weights()
    tensors = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert sum(counted.values()) == sum(tensors.values())
    for place in ("positions", "towers", "other_tables"):
        pattern = re.compile(places.get(place, "no such module"))
        expected = sum(size for name, size in tensors.items() if pattern.search(name))
        if pattern.pattern == "one more row":
            expected = len(model.get_input_embeddings().weight[90:]) * 32
            assert expected == 32
        assert counted.get(place, 0) == expected


def test_counts_of_experts_without_a_number_per_token_leave_active_empty():
    config = {
        "model_type": "switch_transformers",
        "num_experts": 4,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
    }
    record = tiewise.plan(count_on_meta({**config, "vocab_size": 90, "num_heads": 4})).record()
    assert record["model"]["parameters"]["total"]
    assert record["model"]["parameters"]["active"] is None
    assert "parameters.active" in record["choices"][0]["not_counted"]


def test_class_without_tokens_is_refused():
    with pytest.raises(PlanError, match="vit"):
        count_on_meta({"model_type": "vit", "architectures": ["ViTModel"]})


@pytest.mark.slow
def test_plan_asks_the_class_in_a_child_process(monkeypatch, tmp_path):
    monkeypatch.setenv(built_class.SWITCH, "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tiewise.plan(PHIMOE).architecture.total == class_total(PHIMOE)
    assert len(list(tmp_path.rglob("*.json"))) == 1
