"""Test the replayed ties of a class against `tie_weights` of transformers, on random ties of random parameters."""

import random

import pytest
import torch
from transformers import PreTrainedModel

from tiewise.checkpoint.class_ties import ClassTie, TiedTensors, tie_loaded

NAMES = [f"{letter}.weight" for letter in "abcdef"]


class Model(torch.nn.Module):
    """Modules whose weights transformers ties as those of a model that it loads."""

    tie_weights = PreTrainedModel.tie_weights
    get_parameter_or_buffer = PreTrainedModel.get_parameter_or_buffer
    _adjust_bias = PreTrainedModel._adjust_bias

    def __init__(self, values, ties):
        super().__init__()
        for name, value in values.items():
            layer = torch.nn.Linear(2, 3, bias=False)
            layer.weight = torch.nn.Parameter(torch.full((3, 2), float(value)))
            self.add_module(name.removesuffix(".weight"), layer)
        self.all_tied_weights_keys = dict(ties)


def drawn_ties(draw):
    """Return {target: source}: each target once, and no source a target, as transformers expands them."""
    sources = draw.sample(NAMES, 2)
    targets = [name for name in NAMES if name not in sources]
    return {target: draw.choice(sources) for target in draw.sample(targets, draw.randint(1, 4))}


@pytest.mark.parametrize("seed", range(200))
def test_ties_are_those_of_transformers(seed):
    draw = random.Random(seed)
    ties = drawn_ties(draw)
    values = {name: draw.choice([1, 1, 2]) for name in NAMES}
    absent = {name for name in NAMES if draw.random() < 0.4}
    model, missing = Model(values, ties), set(absent)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    tied = tie_loaded(ties, absent, lambda one, other: values[one] == values[other])
    parameters = {name: model.get_parameter(name) for name in NAMES}
    for one in NAMES:
        for other in NAMES:
            assert tied.are_tied(one, other) == (parameters[one] is parameters[other])
    assert ties.keys() - model.all_tied_weights_keys.keys() == {tie.target for tie in tied.refused}


def test_refused_tie_concerns_all_tensors_of_its_parameters():
    tied = TiedTensors({"head": "shared"}, [ClassTie("decoder", "shared")])
    assert [name for name in ("head", "shared", "decoder", "encoder") if tied.warns_about(name)] == [
        "head",
        "shared",
        "decoder",
    ]
