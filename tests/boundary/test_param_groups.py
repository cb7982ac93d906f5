"""The groups of `param_groups`, compared with hand-written lists of parameter names."""

import pytest
import torch
import transformers as tr
from tests.boundary.tiny_models import FAMILIES, batch, build, variant
from torch import nn

import tiewise
from tiewise.core.errors import UnsupportedError

NAMES = ("tables", "head", "hidden", "vectors")


def names_by_group(model):
    """Return {group: names of its parameters}."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = tiewise.param_groups(model)
    assert tuple(group["name"] for group in groups) == NAMES
    return {group["name"]: [names[id(parameter)] for parameter in group["params"]] for group in groups}


# the tables of each family by their names in transformers
TABLES = {
    "gpt2": ["transformer.wte.weight", "transformer.wpe.weight"],
    "llama": ["model.embed_tokens.weight"],
    "opt": ["model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"],
    "t5": ["shared.weight"]
    + [f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight" for side in ("encoder", "decoder")],
    "bert": [f"bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")],
}
HEADS = {"gpt2": "lm_head", "llama": "lm_head", "opt": "lm_head", "t5": "lm_head", "bert": "cls.predictions.decoder"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("installed", [False, True])
def test_param_groups_separate_lookup_tables_from_an_untied_head(name, tied, installed):
    model = build(name, tied)
    if installed:
        tiewise.install(model)
    found = names_by_group(model)
    apart = {
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
    }  # T5 ties its input tables by the flag of the head
    assert found["tables"] == TABLES[name] if tied or name != "t5" else {*found["tables"]} == {*TABLES[name]} | apart
    assert found["head"] == ([] if tied else [f"{HEADS[name]}.weight"])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_trainable_parameter_is_in_exactly_one_group(name):
    model = build(name)
    frozen = next(p for p in model.parameters() if p.dim() == 2)
    frozen.requires_grad_(False)
    groups = tiewise.param_groups(model)
    found = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(found) == sorted({id(p) for p in model.parameters() if p.requires_grad})
    assert id(frozen) not in found
    hidden, vectors = groups[2]["params"], groups[3]["params"]
    assert hidden
    assert all(p.dim() == 2 for p in hidden)
    assert all(p.dim() == 1 for p in vectors)


@pytest.mark.parametrize("spec", ["factored:8", "projected:8", "residual:4", "spd"])
def test_the_maps_of_a_boundary_are_hidden_matrices(spec):
    model = build("llama")
    plain = {*names_by_group(model)["hidden"], *names_by_group(model)["tables"]}
    tiewise.install(model, spec)
    found = names_by_group(model)
    maps = {name for name, _ in model.named_parameters() if "_map." in name}
    assert maps
    assert maps <= set(found["hidden"])
    assert {*found["hidden"], *found["tables"]} - maps == plain
    assert not found["head"]


def test_param_groups_find_the_tables_of_a_boundary_module():
    model = nn.Sequential(tiewise.Boundary("factored-untied:4+bias", 11, 8), nn.Linear(8, 8))
    found = names_by_group(model)
    assert found["tables"] == ["0.table_in"]
    assert found["head"] == ["0.table_out"]
    assert found["hidden"] == ["0.in_map.weight", "0.out_map.weight", "1.weight"]
    assert found["vectors"] == ["0.bias", "1.bias"]


def test_param_groups_count_single_rows_and_3d_kernels_as_vectors():
    model = build("llama")
    model.kernel, model.row = nn.Parameter(torch.zeros(3, 4, 2)), nn.Parameter(torch.zeros(1, 5))
    assert {"kernel", "row"} <= set(names_by_group(model)["vectors"])


def test_param_groups_accept_a_nested_model_and_one_without_a_head():
    wrapped = nn.ModuleDict({"module": build("llama", tied=False)})
    assert names_by_group(wrapped)["head"] == ["module.lm_head.weight"]
    assert names_by_group(variant("llama", tr.LlamaModel))["head"] == []


def test_param_groups_refuse_a_model_that_names_no_head():
    with pytest.raises(UnsupportedError, match="Sequential does not say") as e:
        tiewise.param_groups(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)))
    assert "get_output_embeddings" in e.value.remedy


def test_muon_and_adamw_take_the_groups_and_move_every_parameter():
    model = build("llama", tied=False)
    tables, head, hidden, vectors = tiewise.param_groups(model)
    adamw = torch.optim.AdamW([tables, head, vectors | {"weight_decay": 0.0}], lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(**batch(model)).loss.backward()
    for optimizer in (torch.optim.Muon(hidden["params"], lr=1e-2), adamw):
        optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_groups_have_learning_rates_only_where_they_are_given():
    model = build("llama", tied=False)
    assert all("lr" not in group for group in tiewise.param_groups(model))
    assert [group["lr"] for group in tiewise.param_groups(model, lr=0.01)] == [0.01] * 4
    assert [group["lr"] for group in tiewise.param_groups(model, 0.01, table_lr=0.2)] == [0.2, 0.2, 0.01, 0.01]
    assert [group.get("lr") for group in tiewise.param_groups(model, table_lr=0.2)] == [0.2, 0.2, None, None]
