"""Test readers of decoders whose layers differ, and of towers, against the classes that transformers builds."""

import warnings

import pytest
import torch
import transformers
from reader_configs import CASES

import tiewise
from tiewise.planning.plan_rows import main_rows, rows
from tiewise.planning.read_config import read

AUTO = ("CausalLM", "ImageTextToText")


def build(values):
    """Build the usual class of a config without weights."""
    config = transformers.AutoConfig.for_model(**values)
    named = [getattr(transformers, f"AutoModelFor{name}") for name in AUTO]
    if "text_config" in values:
        named.reverse()  # some composites also have a class for their language model alone
    auto = next((auto for auto in named if type(config) in auto._model_mapping), transformers.AutoModel)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return auto.from_config(config)


def ends_of(model):
    """Return the input table and the head; None for those that a class does not name."""
    try:
        return model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:
        return None, None


def numel(parameters):
    return sum(parameter.numel() for parameter in parameters)


def lookups_of(model):
    """Return the parameters of tables that only lookups read, but for one row of each."""
    head, unused = ends_of(model)[1], 0
    for name, module in model.named_modules():
        is_of_text = not any(part in name for part in ("vision", "visual", "audio"))
        if isinstance(module, torch.nn.Embedding) and is_of_text and (head is None or head.weight is not module.weight):
            unused += module.weight.numel() - module.weight.shape[1]
    return unused


def towers_of(model):
    """Return the parameters of towers and of the maps behind them."""
    language = ("language_model", "text_model", "lm_head", "model.lm_head")
    if not hasattr(model.config, "text_config"):
        return 0
    names = [name.removeprefix("model.") for name, _ in model.named_parameters()]
    of_names = dict(zip(names, model.parameters(), strict=True))
    return numel(value for name, value in of_names.items() if not name.startswith(language))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_reader_counts_total_and_active_parameters_like_the_class(case):
    architecture, model = read(case.config), build(case.config)
    assert (architecture.estimated, architecture.not_counted) == (False, ())
    assert architecture.total == numel(model.parameters())
    assert architecture.active == architecture.total - case.unused - lookups_of(model) - towers_of(model)
    table, head = ends_of(model)
    assert architecture.ends.head == (head is not None)
    assert architecture.ends.tied == (head is not None and head.weight is table.weight)
    assert architecture.layers == len(architecture.stacks[0].heads_by_layer)


def test_plan_prints_active_parameters_of_a_model_with_experts_alone():
    (case,) = [case for case in CASES if case.name == "minimax_m2: experts"]
    label = "parameters, active per token"
    record = tiewise.plan(case.config, arms=("untied",)).record()
    active = f"{read(case.config).active:,}"
    assert [label, active] in rows(record)
    assert [label, active] in main_rows(record)
    assert record["choices"][0]["parameters"]["active"] == record["model"]["parameters"]["active"]
    assert label not in {row[0] for row in rows(tiewise.plan("gpt2").record())}
