"""`match flops`: what an arm's ends save of the operations of a token is spent on its body."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tiewise.training.kinds.decoder import KIND
from tiewise.training.trainer import Job

ARMS = ("untied", "tied", "factored:4", "projected:24", "residual:2", "factored-untied:in=4,out=8")


def operations(job):
    """Of one forward pass over one block, counted by PyTorch."""
    installed = KIND.build(job)
    ids = torch.zeros(1, job.settings.length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        installed.model(input_ids=ids).logits + 0  # logits are deferred until they are read
    return counter.get_total_flops()


def test_every_arm_takes_as_many_operations(tiny, text, tmp_path):
    settings = tiny(arms=ARMS, match="flops", width=32).checked()
    wide = KIND.feed_forward(settings, text.vocab)
    assert wide["tied"] == wide["untied"]
    found = {
        arm: operations(Job(arm, spec, settings, tmp_path / "x", text, seed=1, feed_forward=wide[arm]))
        for arm, spec in settings.specs().items()
    }
    unit = 2 * 3 * 32 * settings.length  # of one more column of a gated feed-forward layer
    for arm, count in found.items():
        assert count == pytest.approx(max(found.values()), abs=unit), arm
