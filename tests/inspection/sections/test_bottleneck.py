"""The bottleneck of the head against an explicit projection of the dense gradient in fp64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.boundary.tiny_models import V, build
from tests.inspection.running.test_two_paths import logits_of, loss_and_inputs, open_in_fp64, text

from tiewise import install
from tiewise.boundary.locate import locate
from tiewise.core.text import BINS, frequency_bins
from tiewise.inspection.running.loaded import Opened
from tiewise.inspection.sections.bottleneck import bottleneck_of

SHARE = "share of the squared gradient"


def project_explicitly(model, windows):
    """Return ‖P g‖², ‖g‖² and target of every predicted token.

    P [V, V] is computed with the pseudo-inverse of the head.
    """
    made, (loss, masked) = [], loss_and_inputs(model, windows)

    def keep(module, inputs, output):
        output.retain_grad()
        made.append(output)

    head = model.ends.head
    with head.register_forward_hook(keep):
        logits, targets = logits_of(model.model, loss.objective, torch.from_numpy(windows), masked)
    F.cross_entropy(logits, targets, reduction="sum").backward()
    model.model.zero_grad()
    gradient = made[0].grad.flatten(0, -2)
    gradient = gradient[gradient.abs().sum(-1) > 0]
    weight = head.weight.detach()
    projection = weight @ torch.linalg.pinv(weight)
    assert len(gradient) == len(targets)
    return (gradient @ projection).square().sum(-1).numpy(), gradient.square().sum(-1).numpy(), targets.numpy()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "cohere", "opt_350m", "t5", "bert"])
def test_bottleneck_of_matches_an_explicit_projection(name, tied, tmp_path):
    model, windows, counts = open_in_fp64(build(name, tied=tied), tmp_path), text(6), np.arange(V) ** 2 // 3
    found = bottleneck_of(model, windows, counts)
    passed, whole, targets = project_explicitly(model, windows)
    by_window = passed.reshape(6, -1).sum(1) / whole.reshape(6, -1).sum(1)
    assert found[SHARE].value == pytest.approx(by_window.mean(), rel=1e-9)
    assert found[SHARE].chance == model.ends.head.weight.shape[1] / V
    assert found["norm that is lost"].value == pytest.approx(1 - by_window.mean() ** 0.5, rel=1e-9)
    for band in np.unique(frequency_bins(counts)[targets]):
        its = frequency_bins(counts)[targets] == band
        value = found[f"next token occurs {BINS[band]} times"].value
        assert value == pytest.approx(passed[its].sum() / whole[its].sum(), rel=1e-9)
    assert found.answer.endswith(f"{100 * found[SHARE].chance:.1f} % by chance")


def test_bottleneck_of_a_factored_head_has_a_chance_level_of_rank_over_v(tmp_path):
    model = build("llama").double().eval()
    install(model, "factored:4")
    found = bottleneck_of(Opened(open_in_fp64(build("llama"), tmp_path).folder, model, locate(model)), text(6))
    assert found[SHARE].chance == 4 / V


def test_bottleneck_of_handles_a_rank_deficient_head_at_any_batch_size(tmp_path, monkeypatch):
    model = open_in_fp64(build("llama", tied=False), tmp_path)
    with torch.no_grad():
        model.ends.head.weight[:, 5:] = model.ends.head.weight[:, :1]  # rank 5
    whole = bottleneck_of(model, text(7))
    passed, all_, _ = project_explicitly(model, text(7))
    by_window = passed.reshape(7, -1).sum(1) / all_.reshape(7, -1).sum(1)
    assert whole[SHARE].value == pytest.approx(by_window.mean(), rel=1e-9)
    assert whole[SHARE].chance == 5 / V
    monkeypatch.setattr("tiewise.inspection.running.two_paths._MOST_LOGITS", 9 * 12 * V)
    assert bottleneck_of(model, text(7))[SHARE].value == pytest.approx(whole[SHARE].value, rel=1e-12)


def test_bottleneck_of_counts_small_columns_in_fp32(tmp_path):
    model = open_in_fp64(build("llama", tied=False), tmp_path)
    with torch.no_grad():
        model.ends.head.weight.mul_(torch.logspace(0, -4, 16))
    exact = bottleneck_of(model, text(6))[SHARE]
    model.model.float()
    found = bottleneck_of(model, text(6))[SHARE]
    assert found.chance == exact.chance == 16 / V
    assert found.value == pytest.approx(exact.value, rel=1e-5)


def test_bottleneck_of_uniform_logits_is_at_the_chance_level(tmp_path):
    """Uniform logits and random targets give the share of a random direction that sums to zero."""
    model = open_in_fp64(build("llama", tied=False), tmp_path)
    with torch.no_grad():
        model.model.model.norm.weight.zero_()
    weight = model.ends.head.weight.detach()
    projection = weight @ torch.linalg.pinv(weight)
    expected = float(projection.trace() - projection.sum() / V) / (V - 1)
    found = bottleneck_of(model, np.random.default_rng(0).integers(0, V, (200, 12)))[SHARE]
    assert found.low < expected < found.high
    assert found.chance == pytest.approx(expected, abs=1 / V)
