"""Both lenses against dense fp64, planted layers, and what is true of distributions that are the same everywhere."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import t
from tests.boundary.tiny_models import V, build
from torch import nn

from tiewise.boundary.locate import locate
from tiewise.core.errors import DataError, UnsupportedError
from tiewise.core.estimates import Estimate
from tiewise.core.long_work import heard
from tiewise.inspection.sections.lens import Lenses, LensLayer, LensRead, found_of, lenses
from tiewise.internals import stack as stacks
from tiewise.internals.loaded import Opened
from tiewise.internals.stack import find_stack

WIDTH = 16


def opened(model):
    return Opened(None, model.eval(), locate(model))


def texts(count=24, length=12, seed=1):
    return np.random.default_rng(seed).integers(3, V, (count, length))


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def final_logs(model, ids):
    """Log-probabilities [n, T - 1, V] in fp64, by transformers alone."""
    with torch.no_grad():
        return log_softmax(model(torch.as_tensor(ids)).logits.double().numpy())[:, :-1]


class Rotation(nn.Module):
    """A layer that turns the residual stream."""

    def __init__(self, seed=0):
        super().__init__()
        turn = np.linalg.qr(np.random.default_rng(seed).normal(size=(WIDTH, WIDTH)))[0]
        self.turn = nn.Parameter(torch.tensor(turn, dtype=torch.float32))

    def forward(self, states, *_, **__):
        return states @ self.turn


def rotated():
    model = build("llama")
    model.model.layers[1] = Rotation()
    return model


def test_layers_that_do_nothing_are_at_the_end_from_the_start():
    model = build("gpt2")
    with torch.no_grad():
        for layer in model.transformer.h:
            for part in (layer.attn.c_proj, layer.mlp.c_proj):
                part.weight.zero_()
                part.bias.zero_()
    found = lenses(opened(model), texts(), texts(4, seed=2), steps=40)
    assert len(found.layers) == 3
    for layer in found.layers:
        assert abs(layer.logit.kl.value) < 1e-6
        assert layer.logit.agreement.value == 1
        assert layer.logit.nll.value == pytest.approx(found.nll.value, abs=1e-6)
    assert all(abs(layer.tuned.kl.value) < 1e-6 and layer.converged for layer in found.layers[:-1])


def test_the_logit_lens_equals_the_dense_computation():
    model, apart = build("llama"), texts(5, seed=2)
    found = lenses(opened(model), texts(), apart, steps=20)
    with torch.no_grad():
        states = model(torch.as_tensor(apart), output_hidden_states=True).hidden_states
    gain, table = (p.detach().double().numpy() for p in (model.model.norm.weight, model.lm_head.weight))
    final = final_logs(model, apart)
    for layer in found.layers[:-1]:
        h = states[layer.depth].double().numpy()[:, :-1]
        lens = log_softmax(gain * h / np.sqrt((h**2).mean(-1, keepdims=True) + model.config.rms_norm_eps) @ table.T)
        kl = (np.exp(final) * (final - lens)).sum(-1).mean(-1)
        nll = -np.take_along_axis(lens, apart[:, 1:, None], -1)[..., 0]
        half = t.ppf(0.975, 4) * kl.std(ddof=1) / math.sqrt(5)
        assert layer.logit.kl.value == pytest.approx(kl.mean(), rel=1e-4)
        assert layer.logit.kl.high - layer.logit.kl.value == pytest.approx(half, rel=1e-3)
        assert layer.logit.nll.value == pytest.approx(nll.mean(), rel=1e-4)
        assert layer.logit.agreement.value == pytest.approx((lens.argmax(-1) == final.argmax(-1)).mean())
        assert layer.logit.bits == pytest.approx(kl.mean() / math.log(2), rel=1e-4)
    own = -np.take_along_axis(final, apart[:, 1:, None], -1).mean()
    assert found.nll.value == pytest.approx(own, rel=1e-5)
    assert found.layers[-1].logit.kl.value == pytest.approx(0, abs=1e-7)


def test_a_planted_rotation_is_learnt():
    found = lenses(opened(rotated()), texts(72), texts(6, seed=2), steps=200)
    layer = found.layers[1]
    assert layer.logit.kl.value > 0.3
    assert layer.tuned.kl.value < 0.001
    assert layer.tuned.agreement.value > 0.9
    assert layer.curve[0] == pytest.approx(layer.logit.kl.value, rel=1e-5)  # the identity at first
    assert layer.curve[-1] == pytest.approx(layer.tuned.kl.value, rel=1e-9)


def test_training_that_stops_early_is_called_so():
    found = lenses(opened(rotated()), texts(), texts(4, seed=2), steps=20)
    layer = found.layers[1]
    assert found.marks == tuple(range(21))
    assert layer.improvement == pytest.approx(1 - layer.curve[20] / layer.curve[18])
    assert layer.improvement > 0.01
    assert layer.converged is False
    assert found.converged is False


def test_no_distribution_that_is_the_same_everywhere_beats_the_mean():
    """Σ KL(p‖q) = Σ KL(p‖p̄) + n KL(p̄‖q): the best constant is the mean, and a constant state reaches no further."""
    model, ids = build("llama"), texts(6)
    found = lenses(opened(model), ids, ids, steps=20)
    final = final_logs(model, ids)
    mean = np.exp(final).reshape(-1, V).mean(0)
    counts = np.bincount(ids.ravel(), minlength=V) + 1
    chances = {"uniform": np.full(V, 1 / V), "unigram": counts / counts.sum(), "constant": mean}
    floor = (np.exp(final) * (final - np.log(mean))).sum(-1).mean()
    for name, q in chances.items():
        wanted = floor + (mean * np.log(mean / q)).sum()
        assert getattr(found, name).value == pytest.approx(wanted, rel=1e-4)

    stack, target = find_stack(opened(model)), torch.tensor(final, dtype=torch.float32)
    state = torch.zeros(WIDTH).normal_(generator=torch.Generator().manual_seed(0)).requires_grad_()
    optimizer = torch.optim.LBFGS([state], max_iter=200, line_search_fn="strong_wolfe")

    def distance():
        optimizer.zero_grad()
        loss = (target.exp() * (target - stack.to_logits(state).log_softmax(-1))).sum(-1).mean()
        loss.backward()
        return loss

    optimizer.step(distance)
    reached = float(distance().detach())
    assert reached > floor  # strictly: 16 directions of one length do not reach 61 tokens' mean


def test_chunks_change_nothing(monkeypatch):
    whole = lenses(opened(build("gemma2")), texts(6), texts(3, seed=2), steps=20)
    monkeypatch.setattr(stacks, "LOGITS", 29 * V)  # 66 and 33 positions
    parts = lenses(opened(build("gemma2")), texts(6), texts(3, seed=2), steps=20)
    for one, other in zip(whole.layers, parts.layers, strict=True):
        assert one.logit.kl.value == pytest.approx(other.logit.kl.value, rel=1e-4, abs=1e-7)
        assert one.curve == pytest.approx(other.curve, rel=1e-3)


def test_progress_is_told():
    told = []
    with heard(lambda *seen: told.append(seen)):
        found = lenses(opened(build("opt")), texts(), texts(3, seed=2), steps=30)
    assert found.marks[-1] == 30
    assert found.layers[-1].tuned is None
    assert found.passes == pytest.approx(30 * 24 / 24)  # 24 windows of 11 positions are one batch of 256 or more
    assert told[0][1:] == (0, 30)
    assert told[-1][1:] == (30, 30)


def test_one_seed_one_result():
    def run(seed):
        return lenses(opened(build("llama")), texts(60), texts(3, seed=2), steps=20, seed=seed).layers[0].curve

    assert run(0) == run(0)
    assert run(0) != run(1)


@pytest.mark.parametrize(
    ("windows", "held_out", "steps", "said"),
    [
        (texts(), texts(3), 5, "5 steps"),
        (texts(), texts(3, length=11), 20, "differ in length"),
        (texts(), texts(1), 20, "1 held-out"),
        (texts(length=41), texts(3, length=41), 20, "40 positions"),
        (texts() + V, texts(3), 20, "in tables of 61 rows"),
    ],
)
def test_windows_that_cannot_be_used_are_refused(windows, held_out, steps, said):
    with pytest.raises(DataError, match=said):
        lenses(opened(build("gpt2")), windows, held_out, steps)


def test_models_that_see_what_they_predict_are_refused():
    with pytest.raises(UnsupportedError, match="both sides"):
        lenses(opened(build("bert")), texts(), texts(3), 20)


def about(value, half=0.02):
    return Estimate(value, value - half, value + half, 4)


def curves(found, name):
    return {curve.which: curve for curve in found.curves if curve.name == name}


def read(kl, agreement=0.4):
    return LensRead(about(kl), about(kl + 3), about(agreement))


def layer(depth, logit, tuned, improvement=0.005, fitted=None):
    curve = (logit, 2 * tuned, tuned / (1 - improvement), tuned)
    reads = read(logit, 0.1), read(tuned, 0.3 + 0.3 * depth)
    return LensLayer(depth, "h.<0>" if depth else "input", *reads, curve, fitted or tuned, improvement)


def made(*layers):
    last = LensLayer(len(layers), "h.1", LensRead(about(0.0), about(3.0), about(1.0)))
    fixed = about(2.5), about(1.6), about(1.5)
    return Lenses((*layers, last), about(3.0), *fixed, marks=(0, 50, 90, 100), passes=8.0)


def test_the_lens_answers_where_half_of_the_positions_are_named():
    assert found_of(made(layer(0, 7.0, 0.5), layer(1, 0.8, 0.2))).answer == (
        "the first choice at most positions, after layer 1 of 2"
    )
    assert found_of(made(layer(0, 7.0, 0.5))).answer.startswith("not the first choice")


def test_the_lens_gives_both_distances_beside_a_distribution_that_is_the_same_everywhere():
    found = found_of(made(layer(0, 7.0, 0.5), layer(1, 0.8, 0.2)))
    tuned, logit = found["tuned lens, before any layer"], found["logit lens there"]
    assert (tuned.value, tuned.low, tuned.high) == (0.5, 0.48, 0.52)
    assert (tuned.chance, logit.value) == (1.5, 7.0)
    assert tuned.why.startswith(f"{0.5 / math.log(2):.2f} bits")
    assert found["uniform distribution"].value == 2.5
    assert "at 1 of 2 places the logit lens is clearly further off" in found.notes[0]
    distance = curves(found, "How far is each layer from the final distribution?")
    assert (distance["tuned lens"].x, distance["tuned lens"].y) == ((0, 1), (0.5, 0.2))
    assert distance["logit lens"].y == (7.0, 0.8)
    assert curves(found, "Does a layer already name the model's first choice?")["tuned lens"].y == (0.3, 0.6)
    assert curves(found, "Were the tuned lenses trained long enough?")["depth 0"].x == (0, 50, 90, 100)
    (places,) = found.listings
    assert [row[0] for row in places.rows] == ["input", "1 · h.<0>", "2 · h.1"]


@pytest.mark.parametrize(
    ("one", "note"),
    [
        (layer(0, 7.0, 0.5, improvement=0.04), "1 of 2 tuned lenses still moved in the last tenth of 100 steps"),
        (layer(0, 7.0, 0.5, fitted=0.3), "at 1 place the tuned lens fits the windows better"),
    ],
)
def test_a_lens_that_was_trained_too_little_or_too_much_says_so(one, note):
    assert any(note in said for said in found_of(made(one, layer(1, 0.8, 0.2))).notes)
    assert not any(note in said for said in found_of(made(layer(0, 7.0, 0.5), layer(1, 0.8, 0.2))).notes)
