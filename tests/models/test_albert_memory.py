"""Sharing saves weights, gradients and optimizer state as counted, and no activations."""

import pytest
import torch
from albert_tools import TINY, batch

from tiewise.models import OpenAlbertConfig, OpenAlbertForPreTraining


def storages(tensors):
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def measured(sharing):
    """(parameters, bytes of weights + gradients + AdamW's moments, bytes kept for the backward pass)."""
    torch.manual_seed(0)
    model = OpenAlbertForPreTraining(OpenAlbertConfig(**TINY, sharing=sharing))
    ids, mask, segments, labels, pairs = batch()
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(ids, mask, segments, labels=labels, pair_labels=pairs).loss
    own = storages(model.parameters())
    activations = {key: size for key, size in storages(kept).items() if key not in own}
    loss.backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    moments = [v for state in optimizer.state.values() for v in state.values() if v.dim()]
    states = storages([*model.parameters(), *(p.grad for p in model.parameters()), *moments])
    return sum(p.numel() for p in model.parameters()), sum(states.values()), sum(activations.values())


@pytest.mark.parametrize("sharing", ["none", "attention", "ffn", "all"])
def test_memory(sharing):
    parameters, states, activations = measured(sharing)
    assert states == 16 * parameters  # fp32: weight, gradient, two moments
    assert activations == measured("none")[2]
