"""Test configs at other sizes against catalogue siblings, and growth terms against hand counts."""

import re

import pytest

from tiewise.core.errors import PlanError
from tiewise.planning import catalogue
from tiewise.planning.plan import plan
from tiewise.planning.read_config import Sizes, read
from tiewise.planning.resized import Growth, config_like, growth, resize_config


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("pythia-70m", "pythia-160m"),
        ("pythia-70m", "pythia-2.8b"),
        ("opt-125m", "opt-6.7b"),
        ("gpt2", "gpt2-xl"),
        ("qwen2.5-7b", "qwen2.5-72b"),
        ("gemma-3-1b", "gemma-3-12b"),
    ],
)
def test_config_like_at_the_sizes_of_a_sibling_counts_like_the_sibling(name, other):
    """The catalogue's counts of both models come from the classes of transformers."""
    wanted = catalogue.find(other)
    sizes = growth(wanted.config).sizes
    given = {size: value for size, value in sizes.items() if size in growth(catalogue.find(name).config).sizes}
    resized_plan = plan(config_like(name, **given), ("tied" if wanted.tied else "untied",))
    assert resized_plan.choices[0]["parameters"]["total"] == wanted.parameters


def test_config_like_keeps_unnamed_sizes_and_derives_default_widths():
    assert plan(config_like("gpt2", width=1024, layers=24, heads=16)).architecture.total == 354_823_168  # GPT-2 medium
    assert config_like("llama-3-8b", width=2048)["intermediate_size"] == 14_336


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("gpt2", {"kv_heads": 4}, "no size kv_heads; leave kv_heads out"),
        ("starcoder", {"kv_heads": 4}, "no size kv_heads; leave kv_heads out"),
        ("bloom-560m", {"ffn": 4}, "no size ffn; leave ffn out"),
        ("t5-small", {"width": 4}, "an encoder and a decoder"),
        ("gpt2", {"heads": 5}, "768 is not a multiple of 5 heads"),
        ("gpt2", {"width": 0}, "whole number"),
    ],
)
def test_config_like_refuses_impossible_sizes(name, sizes, said):
    with pytest.raises(PlanError, match=said):
        config_like(name, **sizes)


def test_growth_equals_the_terms_counted_by_hand():
    """Each layer counts 12·D², as in textbooks, split into the terms below."""
    terms = growth(Sizes(1000, 64, 3, heads=4))
    assert isinstance(terms, Growth)
    assert terms.ends == {
        "untied": {"input_table": {"DV": 1}, "output_table": {"DV": 1}},
        "tied": {"input_table": {"DV": 1}},
        "factored": {"input_table": {"Vk": 1}, "maps": {"Dk": 2}},
    }
    heads = {"DDL": 2, "DDKL/H": 2}
    assert terms.body["none"] == {"attention": heads, "ffn": {"DFL": 2}}
    assert terms.body["attention"] == {"attention": {"DDg": 2, "DDKg/H": 2}, "ffn": {"DFL": 2}}
    assert terms.divided == {("D", "H"), ("H", "K")}
    assert growth(catalogue.find("deepseek-v3").config) is None  # has dense layers, then expert layers


LLAMA = {"model_type": "llama", "vocab_size": 100, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
ODD = (None, "8", [8, 8], {}, 1.5, True, -1, 0)


@pytest.mark.parametrize("key", [*LLAMA, "intermediate_size", "num_key_value_heads"])
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_growth_of_a_malformed_config_fails_as_plan_does(key, value):
    config = {**LLAMA, key: value}
    try:
        plan(config)
    except PlanError as error:
        with pytest.raises(PlanError, match=re.escape(str(error))):
            growth(config)
    else:
        assert growth(config) is None or growth(config).sizes["vocab"] == 100


def test_resized_config_has_no_alias_of_a_changed_key():
    config = {"model_type": "gpt2", "hidden_size": 64, "num_hidden_layers": 2, "n_head": 4, "vocab_size": 90}
    resized = resize_config(config, {"width": 32, "layers": 3})
    assert (read(resized).width, read(resized).layers) == (32, 3)
    assert config["hidden_size"] == 64
