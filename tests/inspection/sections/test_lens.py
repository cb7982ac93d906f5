"""Both lenses against dense fp64, planted layers, and what is true of distributions that are the same everywhere."""

import math

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from scipy.stats import t
from tests.boundary.tiny_models import V, build
from tests.inspection.running.test_repeats import Affine, opened

from tiewise.core.errors import DataError, UnsupportedError
from tiewise.core.progress import listen_to_progress
from tiewise.inspection.running import stack as stacks
from tiewise.inspection.sections.lens import Translator, lens_of

WIDTH = 16


def texts(count=24, length=12, seed=1):
    return np.random.default_rng(seed).integers(3, V, (count, length))


def final_logs(model, ids):
    """Log-probabilities [n, T - 1, V] in fp64, by transformers alone."""
    with torch.no_grad():
        return log_softmax(model(torch.as_tensor(ids)).logits.double().numpy(), axis=-1)[:, :-1]


def rotated():
    """A model whose last layer turns the residual stream."""
    model = build("llama")
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)))[0]
    model.model.layers[1] = Affine(turn.T, np.zeros(WIDTH))
    return model


def curves(found, name):
    return {curve.which: curve for curve in found.curves if name in curve.name}


def kl(found):
    """(logit, tuned): held-out KL by depth."""
    both = curves(found, "How far is each layer")
    return [both[f"{which} lens"].y for which in ("logit", "tuned")]


def column(found, name):
    """A column of the table of all places, as numbers."""
    (listing,) = found.listings
    cells = [row[listing.header.index(name)] for row in listing.rows]
    return [one if one in ("yes", "no", "–") else float(one.split()[0].replace("−", "-")) for one in cells]


def notes(found):
    return " ".join(found.notes)


def test_layers_that_do_nothing_are_at_the_end_from_the_start():
    model = build("gpt2")
    with torch.no_grad():
        for layer in model.transformer.h:
            for part in (layer.attn.c_proj, layer.mlp.c_proj):
                part.weight.zero_()
                part.bias.zero_()
    found = lens_of(opened(model), texts(), texts(4, seed=2), steps=40)
    assert np.abs(kl(found)).max() < 1e-6
    assert curves(found, "already name")["logit lens"].y == (1, 1)
    assert column(found, "logit lens, nll") == pytest.approx([found["the model's own nll"].value] * 3, abs=6e-4)
    assert column(found, "converged") == ["yes", "yes", "–"]
    assert found.answer == "the first choice at most positions, before any layer"
    assert "still moved" not in notes(found)


def test_the_logit_lens_equals_the_dense_computation():
    model, apart = build("llama"), texts(5, seed=2)
    found = lens_of(opened(model), texts(), apart, steps=20)
    with torch.no_grad():
        states = model(torch.as_tensor(apart), output_hidden_states=True).hidden_states
    gain, table = (p.detach().double().numpy() for p in (model.model.norm.weight, model.lm_head.weight))
    final = final_logs(model, apart)
    distance, choice = (curves(found, name)["logit lens"] for name in ("How far", "already name"))
    for depth, state in enumerate(states[:-1]):
        h = state.double().numpy()[:, :-1]
        normed = gain * h / np.sqrt((h**2).mean(-1, keepdims=True) + model.config.rms_norm_eps)
        lens = log_softmax(normed @ table.T, axis=-1)
        apart_by = (np.exp(final) * (final - lens)).sum(-1).mean(-1)
        nll = -np.take_along_axis(lens, apart[:, 1:, None], -1)[..., 0]
        half = t.ppf(0.975, 4) * apart_by.std(ddof=1) / math.sqrt(5)
        assert distance.y[depth] == pytest.approx(apart_by.mean(), rel=1e-4)
        assert distance.high[depth] - distance.y[depth] == pytest.approx(half, rel=1e-3)
        assert choice.y[depth] == pytest.approx((lens.argmax(-1) == final.argmax(-1)).mean())
        assert column(found, "logit lens, nll")[depth] == pytest.approx(nll.mean(), abs=6e-4)
        assert column(found, "logit lens, bits")[depth] == pytest.approx(apart_by.mean() / math.log(2), abs=6e-3)
    own = -np.take_along_axis(final, apart[:, 1:, None], -1).mean()
    assert found["the model's own nll"].value == pytest.approx(own, rel=1e-5)
    assert column(found, "logit lens, nats")[-1] == 0
    assert found["logit lens there"].value == distance.y[0]
    assert found["logit lens there"].why.startswith(f"{distance.y[0] / math.log(2):.2f} bits")


def test_a_planted_rotation_is_learnt():
    found = lens_of(opened(rotated()), texts(72), texts(6, seed=2), steps=200)
    logit, tuned = kl(found)
    assert logit[1] > 0.3
    assert tuned[1] < 0.001
    assert curves(found, "already name")["tuned lens"].y[1] > 0.9
    trained = curves(found, "trained long enough")["depth 1"]
    assert trained.x[-1] == 200
    assert trained.y[0] == pytest.approx(logit[1], rel=1e-5)  # the identity at first
    assert trained.y[-1] == pytest.approx(tuned[1], rel=1e-9)
    assert found.answer == "the first choice at most positions, after layer 1 of 2"


def test_a_translator_is_read_by_the_average_of_its_weights():
    states = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    translator = Translator(states.mean(0), states.T @ states / len(states))
    expected = [torch.zeros(4, 4), torch.zeros(4)]
    for _ in range(3):
        (translator(states, translator.trained) ** 2).sum().backward()
        translator.step(0.9)
        expected = [0.9 * mean + 0.1 * now.detach() for mean, now in zip(expected, translator.trained, strict=True)]
    for average, mean in zip(translator.average, expected, strict=True):
        torch.testing.assert_close(average, mean)
        assert average.abs().max() > 0


def test_training_that_stops_early_is_called_so():
    found = lens_of(opened(rotated()), texts(), texts(4, seed=2), steps=20)
    trained = curves(found, "trained long enough")["depth 1"]
    assert trained.x == tuple(range(21))
    moved = 1 - trained.y[20] / trained.y[18]
    assert moved > 0.01
    assert column(found, "last tenth")[1] == pytest.approx(-100 * moved, abs=6e-3)
    assert column(found, "converged")[1] == "no"
    assert "tuned lenses still moved in the last tenth; raise" in notes(found)
    assert found.answer == "not the first choice at half of the positions"


def test_a_lens_that_was_trained_on_too_little_says_so():
    found = lens_of(opened(build("llama")), texts(4), texts(4, seed=2), steps=300)
    assert "the tuned lens knows its windows by heart, seen 300.0 times" in notes(found)


def test_no_distribution_that_is_the_same_everywhere_beats_the_mean():
    """Σ KL(p‖q) = Σ KL(p‖p̄) + n KL(p̄‖q)."""
    model, ids = build("llama"), texts(6)
    found = lens_of(opened(model), ids, ids, steps=20)
    final = final_logs(model, ids)
    mean = np.exp(final).reshape(-1, V).mean(0)
    counts = np.bincount(ids.ravel(), minlength=V) + 1
    chances = {"uniform distribution": np.full(V, 1 / V), "text's token frequencies": counts / counts.sum()}
    floor = (np.exp(final) * (final - np.log(mean))).sum(-1).mean()
    for name, q in {**chances, "model's mean distribution": mean}.items():
        wanted = floor + (mean * np.log(mean / q)).sum()
        assert found[name].value == pytest.approx(wanted, rel=1e-4)
    worse = (np.array(curves(found, "How far")["logit lens"].low) > found["model's mean distribution"].high).sum()
    assert f"at {worse} of 2 places the logit lens is further off" in notes(found)


def test_chunks_change_nothing(monkeypatch):
    whole = lens_of(opened(build("gemma2")), texts(6), texts(3, seed=2), steps=20)
    monkeypatch.setattr(stacks, "LOGITS", 29 * V)  # 66 and 33 positions
    parts = lens_of(opened(build("gemma2")), texts(6), texts(3, seed=2), steps=20)
    for one, other in zip(whole.curves, parts.curves, strict=True):
        assert one.y == pytest.approx(other.y, rel=1e-3, abs=1e-7)


def test_progress_is_told_and_one_seed_is_one_result():
    told = []

    def run(seed):
        return lens_of(opened(build("llama")), texts(60), texts(3, seed=2), steps=20, seed=seed).curves

    with listen_to_progress(lambda *seen: told.append(seen)):
        first = run(0)
    assert (told[0][1:], told[-1][1:]) == ((0, 20), (20, 20))
    assert first == run(0)
    assert first != run(1)


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
        lens_of(opened(build("gpt2")), windows, held_out, steps)


def test_models_that_see_what_they_predict_are_refused():
    with pytest.raises(UnsupportedError, match="both sides"):
        lens_of(opened(build("bert")), texts(), texts(3), 20)
