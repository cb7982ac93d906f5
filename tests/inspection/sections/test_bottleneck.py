"""The head's bottleneck against an explicit projection of a dense gradient, in fp64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.boundary.tiny_models import V, build
from tests.inspection.running.test_two_paths import asked, logits_of, opened, text

from tiewise import install
from tiewise.boundary.locate import locate
from tiewise.core.text import BINS, frequency_bins
from tiewise.inspection.running.loaded import Opened
from tiewise.inspection.sections.bottleneck import bottleneck_of

SHARE = "share of the squared gradient"


def explicit(model, windows):
    """(‖P g‖², ‖g‖², target) of every predicted token; P [V, V] by the pseudo-inverse of the head."""
    made, (loss, masked) = [], asked(model, windows)

    def keep(module, inputs, output):
        output.retain_grad()
        made.append(output)

    head = model.ends.head
    with head.register_forward_hook(keep):
        logits, targets = logits_of(model.model, loss.kind, torch.from_numpy(windows), masked)
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
def test_shares_by_an_explicit_projection(name, tied, tmp_path):
    model, windows, counts = opened(build(name, tied=tied), tmp_path), text(6), np.arange(V) ** 2 // 3
    found = bottleneck_of(model, windows, counts)
    passed, whole, targets = explicit(model, windows)
    by_window = passed.reshape(6, -1).sum(1) / whole.reshape(6, -1).sum(1)
    assert found[SHARE].value == pytest.approx(by_window.mean(), rel=1e-9)
    assert found[SHARE].chance == model.ends.head.weight.shape[1] / V
    assert found["norm that is lost"].value == pytest.approx(1 - by_window.mean() ** 0.5, rel=1e-9)
    for band in np.unique(frequency_bins(counts)[targets]):
        its = frequency_bins(counts)[targets] == band
        value = found[f"next token occurs {BINS[band]} times"].value
        assert value == pytest.approx(passed[its].sum() / whole[its].sum(), rel=1e-9)
    assert found.answer.endswith(f"{100 * found[SHARE].chance:.1f} % by chance")


def test_a_factored_head_passes_what_its_rank_does(tmp_path):
    model = build("llama").double().eval()
    install(model, "factored:4")
    found = bottleneck_of(Opened(opened(build("llama"), tmp_path).folder, model, locate(model)), text(6))
    assert found[SHARE].chance == 4 / V


def test_lost_columns_and_a_few_windows_at_a_time(tmp_path, monkeypatch):
    model = opened(build("llama", tied=False), tmp_path)
    with torch.no_grad():
        model.ends.head.weight[:, 5:] = model.ends.head.weight[:, :1]  # rank 5
    whole = bottleneck_of(model, text(7))
    passed, all_, _ = explicit(model, text(7))
    by_window = passed.reshape(7, -1).sum(1) / all_.reshape(7, -1).sum(1)
    assert whole[SHARE].value == pytest.approx(by_window.mean(), rel=1e-9)
    assert whole[SHARE].chance == 5 / V
    monkeypatch.setattr("tiewise.inspection.running.two_paths._MOST_LOGITS", 9 * 12 * V)
    assert bottleneck_of(model, text(7))[SHARE].value == pytest.approx(whole[SHARE].value, rel=1e-12)


def test_short_columns_of_fp32_count(tmp_path):
    model = opened(build("llama", tied=False), tmp_path)
    with torch.no_grad():
        model.ends.head.weight.mul_(torch.logspace(0, -4, 16))
    exact = bottleneck_of(model, text(6))[SHARE]
    model.model.float()
    found = bottleneck_of(model, text(6))[SHARE]
    assert found.chance == exact.chance == 16 / V
    assert found.value == pytest.approx(exact.value, rel=1e-5)


def test_without_anything_learnt_the_share_is_the_chance_level(tmp_path):
    """Of even logits over targets drawn at random: that of a random direction among those that sum to zero."""
    model = opened(build("llama", tied=False), tmp_path)
    with torch.no_grad():
        model.model.model.norm.weight.zero_()
    weight = model.ends.head.weight.detach()
    projection = weight @ torch.linalg.pinv(weight)
    expected = float(projection.trace() - projection.sum() / V) / (V - 1)
    found = bottleneck_of(model, np.random.default_rng(0).integers(0, V, (200, 12)))[SHARE]
    assert found.low < expected < found.high
    assert found.chance == pytest.approx(expected, abs=1 / V)
