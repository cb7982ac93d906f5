"""Test plans of models with uncounted or estimated parts against the classes of transformers."""

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
import transformers
from uncounted_configs import CLIP, CONFIGS, PARTS

import tiewise
from tiewise.checkpoint.family_record import estimated_families
from tiewise.core.measurement import rounded
from tiewise.planning.built_counts import count_on_meta
from tiewise.planning.costs import Setting
from tiewise.planning.plan_rows import certainty_sentence, lookup_tables, rows
from tiewise.planning.read_config import read
from tiewise.report.plan_page import render

QWEN = {"vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
OF_WHOLE = ("checkpoint_bytes", "training_bytes")
COUNTED_ROWS = {"input table", "output table", "saved", "16 bits", "8 bits", "4 bits"}


def text_config(config):
    return config.get("text_config", config)


def leaf_numbers(value):
    """Return every leaf of nested objects."""
    if isinstance(value, dict):
        return [number for held in value.values() for number in leaf_numbers(held)]
    return [value]


@pytest.mark.parametrize("name", CONFIGS)
def test_uncounted_part_leaves_totals_and_derived_numbers_empty(name):
    config = CONFIGS[name]
    record = tiewise.plan(config, ("tied", "untied"), setting=Setting(world=4)).record()
    record = json.loads(json.dumps(record, allow_nan=False))
    table = text_config(config)["vocab_size"] * text_config(config)["hidden_size"]
    assert PARTS[name] in " ".join(record["model"]["not_counted"])
    assert record["model"]["parameters"]["total"] is None
    tied, untied = record["choices"]
    assert (tied["saved"], untied["saved"]) == (table, 0)
    assert tied["parameters"]["input_table"] == untied["parameters"]["output_table"] == table
    assert tied["table_bytes"]["16 bits"] == 2 * table
    for choice in (tied, untied):
        assert choice["parameters"]["total"] is choice["parameters"]["trainable"] is None
        assert {number for key in OF_WHOLE for number in leaf_numbers(choice[key])} == {None}
        assert {rank["memory"] for rank in choice["ranks"]} == {rank["sent"] for rank in choice["ranks"]} == {None}
        assert all(rank["sent_for_tables"] for rank in choice["ranks"])
        assert {"parameters.total", "checkpoint_bytes", "training_bytes"} <= set(choice["not_counted"])
    assert tied["saved_share"] is None
    values = {row["name"]: row["value"] for row in record["thresholds"]}
    assert {value is None for name, value in values.items() if "largest k" not in name} == {True}
    assert all(value for name, value in values.items() if "largest k" in name)


@pytest.mark.parametrize("name", CONFIGS)
def test_views_of_an_uncounted_model_show_no_total(name):
    uncounted_plan = tiewise.plan(CONFIGS[name], ("tied", "untied"))
    shown = {row[0]: row[1:] for row in rows(uncounted_plan.record()) if len(row) > 1}
    for label in ("total", "float32", "bfloat16", "AdamW"):
        assert shown[label] == ["not counted", "not counted"]
    assert shown["saved, share"][0] == "not counted"
    text, page = repr(uncounted_plan), render(uncounted_plan, "tiewise plan")
    uncertain = certainty_sentence(uncounted_plan.record())
    assert uncertain in text.splitlines()
    assert "--build" in uncertain
    assert "No total: " in page
    assert "the total is not counted" in page
    assert "Shares of the whole" not in page


def test_plan_omits_an_uncountable_body_and_counts_a_body_next_to_a_tower():
    experts = tiewise.plan(CONFIGS["minimax_m2"], share=("none", "all")).choices
    assert set(experts[0]["parameters"]) == {"total", "trainable", "active", "input_table"}
    assert leaf_numbers(experts[0]["flops_per_token"]) == [None, None]
    assert experts[1]["saved"] is None  # the saving of shared layers depends on the body
    beside = tiewise.plan(CONFIGS["gemma3 with its tower"]).choices[0]
    alone = tiewise.plan(text_config(CONFIGS["gemma3 with its tower"])).choices[0]
    for part in ("attention", "ffn", "norms"):
        assert beside["parameters"][part] == alone["parameters"][part]
    assert beside["flops_per_token"] == alone["flops_per_token"]


def test_clip_has_no_token_head_and_saves_nothing_by_tying():
    record = tiewise.plan(CLIP).record()
    assert record["model"]["boundary"] is None
    assert {choice["saved"] for choice in record["choices"]} == {0}
    assert record["model"]["parameters"]["input_table"] == 49_408 * 512
    assert "--build" not in certainty_sentence(record)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "gemma4 moe"])
def test_built_model_counts_like_its_class(name):
    config = json.loads(json.dumps(CONFIGS[name]).replace('"acme_', '"').replace('"Acme', '"'))  # the real type
    built = transformers.AutoConfig.for_model(**config)
    kinds = [transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText]
    if "text_config" in config:
        kinds.reverse()  # a composite may also have a class of its language model alone
    with torch.device("meta"):
        kind = next(kind for kind in kinds if type(built) in kind._model_mapping)
        theirs = sum(parameter.numel() for parameter in kind.from_config(built).parameters())
    record = tiewise.plan(count_on_meta(config)).record()
    assert record["model"]["parameters"]["total"] == theirs
    assert record["model"]["not_counted"] == []
    # a built model reveals neither the experts that a token uses nor the heads of attention
    assert leaf_numbers(record["choices"][0]["flops_per_token"]) == [None, None]


ESTIMATED = {**QWEN, "model_type": "somebodys_own", "intermediate_size": 200, "num_key_value_heads": 2}


def test_estimates_are_rounded_and_marked_in_every_view():
    estimated_plan = tiewise.plan(ESTIMATED, ("tied", "untied"), setting=Setting(world=2))
    record = estimated_plan.record()
    exact = read(ESTIMATED).total
    assert record["model"]["parameters"]["total"] == rounded(exact) != exact
    for choice in record["choices"]:
        marked = set(choice["estimated"])
        assert {"parameters.total", "parameters.attention", "flops_per_token", "ranks.sent", "first_loss"} <= marked
        for path in ("checkpoint_bytes", "training_bytes", "flops_per_token", "decode_bytes"):
            assert all(number == float(f"{number:.3g}") for number in leaf_numbers(choice[path]))
        assert not {"saved", "parameters.input_table", "table_bytes", "logits_bytes"} & marked
    shown = {row[0]: row[1:] for row in rows(record) if len(row) > 1}
    exactly = {"input table", "output table", "saved", *(name for name in shown if "bits" in name or "logits" in name)}
    exactly |= {"tables alone", "of it for tables", "tables or states gathered", "sends less below, tokens a rank"}
    for label, cells in shown.items():
        assert all(("≈" in cell) == (label not in exactly) for cell in cells if cell not in ("–", "0.0 %")), label
    assert shown["saved"] == ["64,000", "0"]
    thresholds = {name: value for name, value, _ in lookup_tables(record)[0].rows}
    assert {value[0] == "≈" for name, value in thresholds.items() if "largest k" not in name} == {True}
    digits = re.compile(rf"{exact:,}|{exact}")
    for text in (repr(estimated_plan), json.dumps(record), render(estimated_plan, "tiewise plan")):
        assert not digits.search(text)


def test_exact_plan_has_no_marks_and_does_not_suggest_build():
    record = tiewise.plan("gpt2").record()
    assert [(choice["estimated"], choice["not_counted"]) for choice in record["choices"]] == [([], [])] * 2
    assert certainty_sentence(record) == ""


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("num_experts", 8, "experts"),
        ("mamba_d_state", 16, "state-space"),
        ("kv_lora_rank", 512, "low-rank attention"),
        ("layer_types", ["full_attention", "linear_attention"], "layers of several kinds"),
        ("is_encoder_decoder", True, "an encoder and a decoder"),
        ("num_kv_shared_layers", 1, "layers that share keys and values"),
    ],
)
def test_read_detects_an_uncounted_part_by_its_key_in_an_unknown_family(key, value, part):
    (missing,) = read({**ESTIMATED, key: value}).not_counted
    assert missing.startswith(part)
    assert key in missing
    for absent in (None, 0, [], ["full_attention", "sliding_attention"] if key == "layer_types" else False):
        assert read({**ESTIMATED, key: absent}).not_counted == ()


def test_read_marks_a_miscounted_type_of_transformers_without_any_key():
    """BitNet has norms and an ffn that none of its config keys shows."""
    assert "bitnet" in estimated_families()["not_counted"]
    assert read({**QWEN, "model_type": "bitnet"}).not_counted
    assert read({**QWEN, "model_type": "arcee"}).not_counted == ()


@pytest.mark.parametrize("family", ["arcee", "exaone4", "glm4", "seed_oss", "xlm-roberta", "helium"])
def test_formula_counts_its_listed_types_within_two_percent(family):
    config = transformers.AutoConfig.for_model(family)
    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM)
    with torch.device("meta"):
        model = next(kind for kind in kinds if type(config) in kind._model_mapping).from_config(config)
    assert read(config.to_dict()).total == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)


@pytest.mark.parametrize("family", ["olmoe", "convbert", "moshi"])
def test_estimated_family_without_a_flag_ties_like_its_class(family):
    config = transformers.AutoConfig.for_model(family, num_hidden_layers=2)
    kinds = (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM)
    with torch.device("meta"):
        model = next(kind for kind in kinds if type(config) in kind._model_mapping).from_config(config)
    model.tie_weights()
    written = {key: value for key, value in config.to_dict().items() if key != "tie_word_embeddings"}
    ends = read({**written, "model_type": family}).ends
    assert ends.tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


def test_class_with_another_ending_has_no_head_if_none_of_its_family_has():
    config = {**QWEN, "model_type": "dpr", "architectures": ["DPRQuestionEncoder"]}
    assert not read(config).ends.head
    assert read({**config, "model_type": "acme", "architectures": ["AcmeReader"]}).ends.head


@pytest.mark.slow
def test_listed_types_equal_those_that_the_tool_generates():
    """Build every type of transformers on the meta device, which takes one to two minutes."""
    root = Path(__file__).parents[2]
    generated = runpy.run_path(str(root / "tools" / "make_estimated_families.py"))["families"]()
    assert estimated_families() == generated, "run python tools/make_estimated_families.py"
