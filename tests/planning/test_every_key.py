"""Test that no key of a config makes a plan wrong without a mark.

Each test builds a class of transformers on the meta device from a small config, and changes one key, or two switches.
The exact reader of the family then counts what the class has, or the plan is marked as an estimate, or it is refused.
"""

import copy
import functools
import json
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch
import transformers
from shrink import shrink
from transformers.initialization import no_init_weights
from transformers.models.auto import modeling_auto

from tiewise.checkpoint.families import family
from tiewise.core.errors import PlanError
from tiewise.planning.read_config import read

# keys of a config that are no sizes and no switches of a class, or that name tokens
OTHER_KEYS = {"id2label", "label2id", "rope_parameters", "architectures", "dtype", "problem_type", "is_encoder_decoder"}
TOKENS = ("_id", "_ids", "index")
# switches of every class that choose what a call returns; each is changed alone, and not with a second switch
OF_CALLS = {"output_attentions", "output_hidden_states", "return_dict", "use_cache"}
# endings of a family's classes with all of its layers, the fullest class first
FULL_CLASSES = ("ConditionalGeneration", "MTModel", "PreTraining", "CausalLM", "LMHeadModel", "MaskedLM", "Model")


@functools.cache
def exact_classes() -> list[str]:
    """Return the classes of transformers in the mappings whose family has an exact reader."""
    names = set[str]()
    for mapping_name, mapping in vars(modeling_auto).items():
        if mapping_name.startswith("MODEL_") and mapping_name.endswith("_NAMES"):
            for model_type, value in mapping.items():
                record = family(model_type)
                if record.reader is not None or record.towers is not None:
                    names |= {value} if isinstance(value, str) else set(value)
    return sorted(names)


@functools.cache
def full_classes() -> set[str]:
    """Return one class of each model type, which has all layers of its family."""
    by_type: dict[str, list[str]] = {}
    for name in exact_classes():
        by_type.setdefault(getattr(transformers, name).config_class.model_type, []).append(name)
    return {min(names, key=lambda name: [not name.endswith(end) for end in FULL_CLASSES]) for names in by_type.values()}


def record_of(config: Any) -> dict[str, Any]:
    """Return a config as JSON stores it."""
    record: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return record


def build(model_class: Any, record: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the number of a class's parameters, and the config that it saves."""
    config = model_class.config_class.from_dict(copy.deepcopy(record))
    config.architectures = [model_class.__name__]
    with torch.device("meta"), no_init_weights():  # a count needs no initial values
        model = model_class(config)
    model.tie_weights()
    return sum(tensor.numel() for tensor in model.parameters()), json.loads(config.to_json_string())


def build_small(name: str) -> tuple[Any, dict[str, Any]]:
    """Return a class and its small config."""
    model_class = getattr(transformers, name)
    record = record_of(shrink(model_class))
    build(model_class, record)
    return model_class, record


def keys_of(record: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of every key, also of nested configs."""
    for key, value in record.items():
        if key in OTHER_KEYS or key.endswith(TOKENS):
            continue
        if isinstance(value, dict):
            yield from keys_of(value, (*path, key))
        else:
            yield (*path, key), value


def other_values(value: Any, more: bool) -> list[Any]:
    """Return values that a key may have instead of this one; `more` than one for a size or an absent value."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        values = {value * 2, value + 1, max(1, value // 2)} if more else {value * 2 or 1}
        return sorted(values - {value})
    if isinstance(value, float) and value:
        return [value * 2]
    if value is None:
        return [3, 8, True] if more else [8, True]
    return []


def with_value(record: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a copy of a record with another value at a path."""
    changed = copy.deepcopy(record)
    level = changed
    for key in path[:-1]:
        level = level[key]
    level[path[-1]] = value
    return changed


def changed_records(record: dict[str, Any], more: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every change of one key, by one value or `more`, and every change of two switches."""
    keys = list(keys_of(record))
    for path, value in keys:
        for other in other_values(value, more):
            yield f"{'.'.join(path)} = {other}", with_value(record, path, other)
    switches = [(path, value) for path, value in keys if isinstance(value, bool) and path[-1] not in OF_CALLS]
    for (first, value), (second, other) in combinations(switches, 2):
        changed = with_value(with_value(record, first, not value), second, not other)
        yield f"{'.'.join(first)} = {not value}, {'.'.join(second)} = {not other}", changed


def wrong_total(model_class: Any, record: dict[str, Any]) -> str:
    """Return both totals if the plan is wrong and has no mark, else ""."""
    try:
        parameters, saved = build(model_class, record)
    except Exception:  # the class refuses the value
        return ""
    try:
        architecture = read(saved)
    except PlanError:
        return ""
    if architecture.estimated or architecture.not_counted or architecture.total == parameters:
        return ""
    return f"{architecture.total} in the plan, {parameters} in the class"


@pytest.mark.slow
@pytest.mark.parametrize("name", exact_classes())
def test_plan_is_exact_or_marked_for_every_key(name):
    """Change every key; one class of each family tries several sizes, because its classes share their layers."""
    try:
        model_class, record = build_small(name)
    except Exception as error:
        pytest.skip(f"the class has no small model: {error}")
    wrong = {"the small config": wrong_total(model_class, record)}
    for change, changed in changed_records(record, more=name in full_classes()):
        wrong[change] = wrong_total(model_class, changed)
    assert {change: totals for change, totals in wrong.items() if totals} == {}


CROSSES = {"add_cross_attention": True, "is_decoder": True}
# changes of small configs that change the parameters of a class
CHANGES = [
    *((name, CROSSES) for name in ("GPT2Model", "GPT2LMHeadModel", "GPT2ForSequenceClassification")),
    *((name, CROSSES) for name in ("BertModel", "BertLMHeadModel", "BertForMaskedLM")),
    *((name, CROSSES) for name in ("RobertaForCausalLM", "ElectraForCausalLM")),
    ("GPTBigCodeForCausalLM", {**CROSSES, "multi_query": False}),
    *((name, {"tie_word_embeddings": False}) for name in ("AlbertForMaskedLM", "AlbertForPreTraining")),
    *(("MambaForCausalLM", {"intermediate_size": width}) for width in (24, 100)),
    ("Zamba2ForCausalLM", {"attention_hidden_size": 100}),
    ("Zamba2ForCausalLM", {"attention_head_dim": 20}),
    *((name, {"is_gated_act": True}) for name in ("T5ForConditionalGeneration", "T5EncoderModel")),
    *((name, {"is_gated_act": False}) for name in ("MT5ForConditionalGeneration", "UMT5Model", "UMT5EncoderModel")),
    *((name, {"is_decoder": True}) for name in ("T5EncoderModel", "UMT5EncoderModel")),
    ("Gemma4ForCausalLM", {"per_layer_config": {"1": {"head_dim": 20, "num_key_value_heads": 1}}}),
    ("Gemma4ForCausalLM", {"per_layer_config": {}}),
]


@pytest.mark.parametrize(("name", "changes"), CHANGES, ids=str)
def test_plan_counts_a_changed_config_like_its_class(name, changes):
    model_class, record = build_small(name)
    parameters, saved = build(model_class, {**record, **changes})
    architecture = read(saved)
    assert (architecture.estimated, architecture.not_counted) == (False, ())
    assert architecture.total == parameters
    if changes == {**CROSSES, **changes}:
        assert architecture.total > read(build(model_class, record)[1]).total
        assert architecture.parameters()["cross_attention"] > 0


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("BertLMHeadModel", {"add_cross_attention": True, "is_decoder": False}, "only as a decoder"),
        ("GPTBigCodeForCausalLM", {"add_cross_attention": True, "multi_query": True}, "with multi_query"),
    ],
)
def test_plan_refuses_cross_attention_that_the_class_refuses(name, changes, problem):
    model_class, record = build_small(name)
    changed = {**record, **changes, "architectures": [name]}
    with pytest.raises((ValueError, NotImplementedError)):
        build(model_class, changed)
    with pytest.raises(PlanError, match=problem):
        read(changed)


@pytest.mark.parametrize(("tied", "is_counted"), [(True, True), (False, False)])
def test_plan_of_a_saved_decoder_marks_a_head_with_other_rows_than_its_table(tied, is_counted):
    model_class, record = build_small("MarianForCausalLM")
    parameters, saved = build(model_class, {**record, "decoder_vocab_size": 77, "tie_word_embeddings": tied})
    architecture = read(saved)
    assert (architecture.not_counted == ()) is is_counted
    assert (architecture.total == parameters) is is_counted
