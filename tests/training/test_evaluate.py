"""What is measured, against plain transformers logits and plain cross-entropy in fp64 on the same blocks."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tiewise.training.kinds.decoder import KIND, measure
from tiewise.training.run import direct_path

LENGTH = 16


@pytest.fixture(params=["llama", "gpt2"])
def installed(request, job, tiny):
    """Of wide tables, so that losses differ much from token to token."""
    return KIND.build(job(tiny(model=request.param), arm="untied+init=0.5"))


def by_hand(installed, tokens, blocks):
    """Loss of every predicted token [blocks, T − 1] by the family's own classes."""
    plain = copy.deepcopy(installed.model)
    type(installed)(plain, plain._tiewise).uninstall()
    plain.eval().double()
    ids = torch.from_numpy(np.asarray(tokens[: blocks * LENGTH], dtype=np.int64)).view(-1, LENGTH)
    with torch.no_grad():
        logits = plain(input_ids=ids).logits.double()[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"), ids[:, 1:].flatten()


def test_nll_is_the_mean_over_every_predicted_token(installed, text):
    tokens = text.split("heldout")
    losses, _ = by_hand(installed, tokens, len(tokens) // LENGTH)
    found = measure(installed, tokens, LENGTH, text.counts)
    assert found.tokens == losses.numel() == len(tokens) // LENGTH * (LENGTH - 1)
    assert found.nll == pytest.approx(losses.mean().item(), abs=1e-5)


def test_bins_hold_the_tokens_of_their_frequency_and_sum_to_the_total(installed, text):
    tokens = text.split("heldout")
    losses, targets = by_hand(installed, tokens, len(tokens) // LENGTH)
    seen = torch.from_numpy(text.counts)[targets]
    found = measure(installed, tokens, LENGTH, text.counts)
    edges = [(0, 0), (1, 9), (10, 99), (100, 999), (1000, 9999), (10_000, math.inf)]
    for bin_, (low, high) in zip(found.bins, edges, strict=True):
        inside = losses[(seen >= low) & (seen <= high)]
        assert bin_.tokens == len(inside)
        assert bin_.nll is None if not len(inside) else bin_.nll == pytest.approx(inside.mean().item(), abs=1e-5)
    assert sum(b.tokens for b in found.bins) == found.tokens
    assert sum(b.tokens * (b.nll or 0) for b in found.bins) / found.tokens == pytest.approx(found.nll, abs=1e-9)
    assert len([b for b in found.bins if b.tokens]) >= 2


def test_so_many_blocks_spread_over_the_split(installed, text):
    tokens = text.split("heldout")[: 10 * LENGTH + 5]
    rows = np.asarray(tokens[: 10 * LENGTH]).reshape(10, LENGTH)
    losses, _ = by_hand(installed, rows[[0, 3, 6]].flatten(), 3)
    found = measure(installed, tokens, LENGTH, text.counts, blocks=3)
    assert found.tokens == 3 * (LENGTH - 1)
    assert found.nll == pytest.approx(losses.mean().item(), abs=1e-5)
    assert measure(installed, tokens, LENGTH, text.counts, blocks=10**6) == measure(
        installed, tokens, LENGTH, text.counts
    )


def test_batches_do_not_change_it(installed, text, monkeypatch):
    """Many batches and one: 4,096 tokens go at once."""
    tokens = np.tile(np.asarray(text.split("heldout")[:512]), 20)
    once = measure(installed, tokens[:512], LENGTH, text.counts)
    many = measure(installed, tokens, LENGTH, text.counts)
    assert many.tokens == 20 * once.tokens
    assert many.nll == pytest.approx(once.nll, abs=1e-6)


def test_no_block_gives_nan(installed, text):
    assert math.isnan(measure(installed, text.split("heldout")[:3], LENGTH, text.counts).nll)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_put_back_as_it_was(installed, text, training):
    installed.model.train(training)
    measure(installed, text.split("heldout"), LENGTH, text.counts, blocks=1)
    assert installed.model.training is training
    assert all(p.grad is None for p in installed.model.parameters())


@pytest.mark.parametrize("arm", ["tied", "untied", "factored:8", "tied+bias+output_scale=0.5"])
def test_direct_path_is_lookup_then_head(job, tiny, arm):
    installed = KIND.build(job(tiny(), arm=arm))
    lookup, head = installed.model.get_input_embeddings(), installed.model.get_output_embeddings()
    with torch.no_grad():
        if head.bias is not None:
            head.bias.normal_()
        into = lookup.in_map.weight if arm == "factored:8" else torch.eye(16)
        out = head.out_map.weight if arm == "factored:8" else torch.eye(16)
        scale = 0.5 if "output_scale" in arm else 1.0
        whole = lookup.weight @ into.T @ out.T @ head.weight.T * scale
        whole += 0 if head.bias is None else head.bias
    tokens = [5, 2, 40, 41]
    found = torch.tensor(direct_path(installed, tokens))
    torch.testing.assert_close(found, whole[tokens][:, tokens], rtol=1e-5, atol=1e-6)
    assert torch.allclose(found, found.T, atol=1e-6) == (arm == "tied")
    assert direct_path(installed, []) == []
