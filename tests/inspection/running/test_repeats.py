"""Shared layers and repeated blocks, on models and sequences with planted repeats."""

import numpy as np
import pytest
import torch
from tests.boundary.tiny_models import _LLAMA, FAMILIES, V, build
from torch import nn

from tiewise.boundary.locate import locate
from tiewise.inspection.running.loaded import Opened
from tiewise.inspection.running.stack import Repeat, find_stack, keys, repeats, shared_fractions


class Affine(nn.Module):
    """Layer that computes h → h Aᵀ + b."""

    def __init__(self, matrix, bias):
        super().__init__()
        self.linear = nn.Linear(len(matrix), len(matrix))
        with torch.no_grad():
            self.linear.weight.copy_(torch.as_tensor(matrix))
            self.linear.bias.copy_(torch.as_tensor(bias))

    def forward(self, hidden_states, **_):
        return self.linear(hidden_states)


class IdentityLayer(nn.Module):
    """Layer h → h, without parameters."""

    def forward(self, hidden_states, **_):
        return hidden_states


def with_layers(layers):
    """Open a Llama whose stack is `layers`."""
    model = build("llama").eval()
    model.model.layers = nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    return Opened(None, model, locate(model))


def open_for_evaluation(model):
    return Opened(None, model.eval(), locate(model))


def windows(count=4, length=8, seed=3):
    return np.random.default_rng(seed).integers(3, V, (count, length))


def rotation_like(norms, seed=0):
    """Return a symmetric matrix [D, D] with these eigenvalues."""
    basis, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(len(norms),) * 2))
    return basis @ np.diag(norms) @ basis.T


def test_keys_are_equal_for_layers_that_share_all_parameters():
    settings = _LLAMA | {"num_hidden_layers": 4}
    kind, config, _ = FAMILIES["llama"]
    model = kind(config(**settings))
    layers = model.model.layers
    for name, value in list(layers[0].named_parameters()):  # layers 0 and 2 share all parameters; 3 has a separate FFN
        for index in (2, 3):
            if index == 2 or not name.startswith("mlp"):
                owner, _, leaf = name.rpartition(".")
                setattr(layers[index].get_submodule(owner), leaf, value)
    assert layers[0] is not layers[2]
    stack = find_stack(open_for_evaluation(model))
    calls = stack.calls(torch.tensor(windows(2)))
    found = keys(calls)
    assert found[0] == found[2]
    assert len(set(found)) == 3
    whole = sum(p.numel() for p in layers[0].parameters())
    ffn = sum(p.numel() for p in layers[0].mlp.parameters())
    assert shared_fractions(calls) == pytest.approx([0, 0, 1, 1 - ffn / whole])

    one = layers[1]
    model.model.layers = nn.ModuleList([one, one, one, one])
    calls = find_stack(open_for_evaluation(model)).calls(torch.tensor(windows(2)))
    assert repeats(keys(calls)) == [Repeat(0, 1, 4)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abcd", []),
        ("abbbc", [Repeat(1, 1, 3)]),
        ("ababab", [Repeat(0, 2, 3)]),
        ("abbabbc", [Repeat(0, 3, 2)]),
        ("aabbb", [Repeat(0, 1, 2), Repeat(2, 1, 3)]),
        ("abab" + "cc", [Repeat(0, 2, 2), Repeat(4, 1, 2)]),
        ("", []),
    ],
)
def test_repeats_finds_runs_of_a_block(text, expected):
    assert repeats([(letter,) for letter in text]) == expected
