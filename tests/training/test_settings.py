"""Tests of settings: the round trip through run.yaml, and one-line refusals of invalid values."""

import json
import math
import os

import pytest
import yaml
from tests.training.conftest import refusal

from tiewise.core.errors import RunError
from tiewise.training.settings import FILE, Settings, recipe


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"arms": ("factored-untied:in=8,out=16", "tied+vectors=a%20b.txt"), "minutes": 0.5, "init": 0.1},
        {"seed": 7, "arms": ("tied",), "learning_rate": 1e-05, "text": ("a.txt", "b.jsonl:body")},
        {"tune": True, "bf16": True, "match": "parameters", "model": "some/config.json"},
        {"report_to": ("trackio", "wandb")},
    ],
)
def test_settings_round_trip_through_yaml_file(tmp_path, changes):
    settings = Settings(**changes)
    settings.save(tmp_path)
    assert Settings.load(tmp_path / FILE) == settings
    left_out = {"kind_options"} if settings.report_to else {"kind_options", "report_to"}
    assert set(yaml.safe_load((tmp_path / FILE).read_text())) == set(vars(settings)) - left_out


def test_checked_settings_use_canonical_arm_names_and_allow_late_step_with_minutes():
    found = Settings(arms=(" tied+bias", "factored:k=64", "tied+untie_at=900"), minutes=1.0).checked()
    assert found.arms == ("tied+bias", "factored:64", "tied+untie_at=900")


@pytest.mark.parametrize("value", ["3e-3", "0.003", 0.003])
def test_settings_accept_numbers_in_any_notation(value):
    assert Settings.of({"learning_rate": value}).learning_rate == 0.003


@pytest.mark.parametrize(("width", "rate"), [(32, 0.016), (64, 0.008), (128, 0.004), (256, 0.002)])
def test_default_learning_rate_is_inverse_to_width_and_written_to_run_file(tmp_path, width, rate):
    settings = Settings.of({"width": width}).checked()
    assert settings.learning_rate == settings.peak_rate == rate
    settings.save(tmp_path)
    assert yaml.safe_load((tmp_path / FILE).read_text())["learning_rate"] == rate


@pytest.mark.parametrize("given", ["", "config.json"])
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen2", "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2},
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2},
        {"model_type": "ctrl", "n_embd": 32, "n_layer": 1, "n_head": 2},
        {"model_type": "xlm", "emb_dim": 32},
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 32}},
    ],
    ids=lambda config: config["model_type"],
)
def test_default_learning_rate_follows_width_of_config_file(tmp_path, config, given):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Settings(model=str(tmp_path / given), width=128).checked().learning_rate == 0.016
    assert Settings(model=str(tmp_path / given), learning_rate=0.01).checked().learning_rate == 0.01


@pytest.mark.parametrize("text", ["", "[]", "null", "[" * 100_000, '{"hidden_size": "wide"}', '{"hidden_size": -3}'])
def test_unreadable_config_file_is_left_to_the_builder_of_the_model(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert Settings(model=str(tmp_path), width=64).checked().learning_rate == 0.008


def test_pipe_as_config_file_is_left_to_the_builder_of_the_model(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    assert Settings(model=str(tmp_path / "config.json"), width=64).checked().learning_rate == 0.008


def test_given_learning_rate_and_that_of_recipe_hold_at_any_width():
    assert Settings.of({"width": 256, "learning_rate": 0.004}).checked().learning_rate == 0.004
    assert Settings.of(recipe("albert-small") | {"width": 64}).learning_rate == 0.001


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        *(({name: 0}, f"{name} = 0") for name in ("seeds", "width", "heads", "batch", "accumulate", "steps")),
        ({"length": 1}, "length = 1"),
        ({"learning_rate": 0.0}, "learning_rate = 0.0"),
        ({"learning_rate": math.nan}, "learning_rate = nan"),
        ({"learning_rate": math.inf}, "learning_rate = inf"),
        ({"minutes": -1.0}, "minutes = -1.0"),
        ({"init": 0.0}, "init = 0.0"),
        ({"weight_decay": -0.1}, "weight_decay = -0.1"),
        ({"weight_decay": math.nan}, "weight_decay = nan"),
        ({"match": "tokens"}, "match = 'tokens'"),
        ({"split": "by hand"}, "split = 'by hand'"),
        ({"heads": 3}, "3 heads do not divide width 128"),
        ({"width": 12, "heads": 4}, "a head of width 12/4 = 3"),
        ({"arms": ("factored:64", "factored:k=64")}, "an arm is given twice"),
        ({"arms": ("tied+untie_at=600",)}, "step 600 is not within 600 steps"),
        ({"arms": ("untied+tie_at=900",)}, "step 900 is not within 600 steps"),
        ({"seed": 1, "arms": ("tied",), "minutes": 1.0}, "minutes is a setting of compare"),
        ({"seed": 1, "arms": ("tied",), "match": "parameters"}, "match is a setting of compare"),
    ],
)
def test_checked_settings_refuse_invalid_values(changes, says):
    with refusal(says):
        Settings(**changes).checked()


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("width: wide", "width in FILE must be a whole number, not 'wide'"),
        ("width: 1.5", "width in FILE must be a whole number, not 1.5"),
        ("width: true", "width in FILE must be a whole number, not True"),
        ("learning_rate: fast", "learning_rate in FILE must be a number, not 'fast'"),
        ("tune: 1", "tune in FILE must be true or false, not 1"),
        ("model: 3", "model in FILE must be text, not 3"),
        ("minutes: soon", "minutes in FILE must be a number"),
        ("arms: []", "arms in FILE must be a list of text"),
        ("arms: [1]", "arms in FILE must be a list of text"),
        ("3: 3", "unknown setting 3 in FILE"),
        ("- width", "FILE holds no settings"),
        ("!!python/object/apply:os.system ['true']", "FILE is not YAML"),
        ("text: 2024-13-01", "FILE is not YAML: month must be in 1..12"),
        pytest.param("[" * 600, "FILE is not YAML: maximum recursion depth exceeded", id="brackets"),
        (b"\xff\xfe\x00", "cannot read FILE: not text"),
        (None, "cannot read FILE: No such file"),
    ],
)
def test_settings_load_refuses_unusable_file(tmp_path, written, says):
    path = tmp_path / "settings.yaml"
    if written is not None:
        path.write_bytes(written if isinstance(written, bytes) else written.encode())
    with refusal(says.replace("FILE", str(path)), RunError):
        Settings.load(path)
