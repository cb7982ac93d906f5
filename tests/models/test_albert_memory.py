"""Sharing saves weights, gradients and optimizer state as counted, and no activations; the benchmark finds the same."""

import pytest
import torch
from albert_tools import TINY, batch
from benchmarks.sharing import kept_bytes, measure, state_bytes, table

from tiewise.models import OpenAlbertConfig, OpenAlbertForPreTraining


def measured(sharing):
    """(parameters, bytes of weights + gradients + AdamW's moments, bytes kept for the backward pass)."""
    torch.manual_seed(0)
    model = OpenAlbertForPreTraining(OpenAlbertConfig(**TINY, sharing=sharing))
    ids, mask, segments, labels, pairs = batch()

    def loss():
        return model(ids, mask, segments, labels=labels, pair_labels=pairs).loss

    return sum(p.numel() for p in model.parameters()), state_bytes(model, loss), kept_bytes(model, loss)


@pytest.mark.parametrize("sharing", ["none", "attention", "ffn", "all"])
def test_memory(sharing):
    parameters, states, activations = measured(sharing)
    assert states == 16 * parameters  # fp32: weight, gradient, two moments
    assert activations == measured("none")[2]


def test_what_is_kept_is_what_a_layer_needs_and_no_weight():
    weight = torch.nn.Linear(5, 7, bias=False)
    given = torch.ones(3, 5)
    assert kept_bytes(weight, lambda: weight(given).pow(2).sum()) == 4 * (
        3 * 5 + 3 * 7
    )  # its input, the square's input


def test_the_benchmark_measures_one_function_shared_in_four_ways():
    found = measure(2, 8, 64, 3, 16, 50, rounds=2)
    assert found.equal
    none, attention, ffn, whole = found.costs
    layer = OpenAlbertForPreTraining(
        OpenAlbertConfig(vocab_size=50, embedding_size=16, hidden_size=64, num_hidden_layers=1, num_attention_heads=1)
    ).albert.layers[0]
    parts = {name: sum(p.numel() for p in getattr(layer, name).parameters()) for name in ("attention", "ffn")}
    assert none.parameters - attention.parameters == 2 * parts["attention"]
    assert none.parameters - ffn.parameters == 2 * parts["ffn"]
    assert none.parameters - whole.parameters == 2 * sum(parts.values())
    assert {cost.flops for cost in found.costs} == {none.flops}
    assert {cost.kept for cost in found.costs} == {none.kept}
    assert [cost.state for cost in found.costs] == [16 * cost.parameters for cost in found.costs]
    assert all(len(cost.forward) == len(cost.step) == 2 for cost in found.costs)
    rows = table(found).splitlines()
    assert "the same bit for bit" in rows[0]
    assert [row.split(" | ")[0] for row in rows[4:]] == ["| none", "| attention", "| ffn", "| all"]
