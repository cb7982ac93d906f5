"""Test configs that fuzzing found: each is read as its class reads it, or refused in one printable line."""

import json

import pytest
from transformers import AutoConfig

from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import family_data
from tiewise.core.errors import PlanError
from tiewise.planning.config import MOST_LAYERS
from tiewise.planning.plan import plan
from tiewise.planning.read_config import read

COMPOSITES = [name for name in family_data()["families"] if family(name).towers is not None]


def composite(name, **values):
    text = family(name).ends.levels.get("text_config", "llama")
    return {"model_type": name, "text_config": {"model_type": text, **family(text).keys.defaults}, **values}


@pytest.mark.parametrize("name", COMPOSITES)
def test_null_vision_config_counts_as_the_class_reads_it(name):
    without = read(composite(name)).around.get("towers")
    assert read(composite(name, vision_config=None)).around.get("towers") == without
    class_has_tower = AutoConfig.for_model(name, vision_config=None).vision_config is not None
    assert (without is not None and without.parameters > 0) == class_has_tower


@pytest.mark.parametrize("size", [[0, 14], [14, -1], [14.5, 14], [True, 14], "14", [14]])
def test_odd_patch_size_of_tower_is_refused_in_one_line(size):
    with pytest.raises(PlanError, match="patch_size must be a whole number from 1"):
        read(composite("siglip", vision_config={"patch_size": size}))


def test_odd_list_of_merged_layers_is_refused_in_one_line():
    assert read(composite("qwen3_vl", vision_config={"deepstack_visual_indexes": [8]}))
    with pytest.raises(PlanError, match="deepstack_visual_indexes must be a list"):
        read(composite("qwen3_vl", vision_config={"deepstack_visual_indexes": 3}))


def test_more_layers_than_a_plan_counts_in_seconds_are_refused():
    config = {"model_type": "gpt2", "n_layer": MOST_LAYERS + 1}
    with pytest.raises(PlanError, match="num_hidden_layers must be a whole number from 1 to 2,000"):
        read(config)


ODD = "a\x1b[31m\n\ud800"


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": ODD},
        {"architectures": [ODD]},
        {"architectures": ["OursForTokenClassification"], "model_type": ODD, f"{ODD}moe": 1},
        {"text_config": {"model_type": "llama", "hidden_size": 64, "vocab_size": 24}, f"{ODD}_vision": "x"},
        {"_name_or_path": ODD},
    ],
)
def test_names_of_config_are_printable_in_plan(values):
    sizes = {"vocab_size": 24, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    record = plan({"model_type": "llama", **sizes, **values}, share="none").record()
    texts = [*record["notes"], *record["model"]["notes"], *record["model"]["not_counted"], record["model"]["name"]]
    assert all(text.isprintable() for text in (*texts, record["model"]["family"]))
    json.dumps(record, allow_nan=False)


def test_errors_are_printable():
    with pytest.raises(PlanError) as raised:
        read({"model_type": ODD, "hidden_size": "\0"})
    assert str(raised.value).isprintable()
