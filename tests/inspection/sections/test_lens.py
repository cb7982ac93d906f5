"""Logit and tuned lens against dense fp64 computation, planted layers and identities of KL divergence."""

import math

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from scipy.stats import t
from tests.boundary.tiny_models import V, build
from tests.inspection.running.test_repeats import Affine, open_for_evaluation

from tiewise.core.errors import DataError, UnsupportedError
from tiewise.core.progress import listen_to_progress
from tiewise.inspection.running import stack as stacks
from tiewise.inspection.sections.lens import Translator, lens_of

WIDTH = 16


def texts(count=24, length=12, seed=1):
    return np.random.default_rng(seed).integers(3, V, (count, length))


def final_logs(model, ids):
    """Return log-probabilities [n, T - 1, V] in fp64, from the model's own forward pass."""
    with torch.no_grad():
        return log_softmax(model(torch.as_tensor(ids)).logits.double().numpy(), axis=-1)[:, :-1]


def model_with_rotation():
    """Build a model whose last layer rotates the residual stream."""
    model = build("llama")
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(WIDTH, WIDTH)))[0]
    model.model.layers[1] = Affine(turn.T, np.zeros(WIDTH))
    return model


def curves_by_lens(found, name):
    return {curve.which: curve for curve in found.curves if name in curve.name}


def kl_by_depth(found):
    """Return the held-out KL by depth, of the logit lens and of the tuned lens."""
    both = curves_by_lens(found, "How far is each layer")
    return [both[f"{which} lens"].y for which in ("logit", "tuned")]


def listing_column(found, name):
    """Return a column of the listing of all depths, as numbers."""
    (listing,) = found.listings
    cells = [row[listing.header.index(name)] for row in listing.rows]
    return [one if one in ("yes", "no", "–") else float(one.split()[0].replace("−", "-")) for one in cells]


def joined_notes(found):
    return " ".join(found.notes)


def test_lens_of_identity_layers_matches_the_final_distribution_at_every_depth():
    model = build("gpt2")
    with torch.no_grad():
        for layer in model.transformer.h:
            for part in (layer.attn.c_proj, layer.mlp.c_proj):
                part.weight.zero_()
                part.bias.zero_()
    found = lens_of(open_for_evaluation(model), texts(), texts(4, seed=2), steps=40)
    assert np.abs(kl_by_depth(found)).max() < 1e-6
    assert curves_by_lens(found, "already name")["logit lens"].y == (1, 1)
    assert listing_column(found, "logit lens, nll") == pytest.approx([found["the model's own nll"].value] * 3, abs=6e-4)
    assert listing_column(found, "converged") == ["yes", "yes", "–"]
    assert found.answer == "at most positions the first choice can be read before any layer"
    assert "still moved" not in joined_notes(found)


def test_logit_lens_matches_dense_computation():
    model, apart = build("llama"), texts(5, seed=2)
    found = lens_of(open_for_evaluation(model), texts(), apart, steps=20)
    with torch.no_grad():
        states = model(torch.as_tensor(apart), output_hidden_states=True).hidden_states
    gain, table = (p.detach().double().numpy() for p in (model.model.norm.weight, model.lm_head.weight))
    final = final_logs(model, apart)
    distance, choice = (curves_by_lens(found, name)["logit lens"] for name in ("How far", "already name"))
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
        assert listing_column(found, "logit lens, nll")[depth] == pytest.approx(nll.mean(), abs=6e-4)
        assert listing_column(found, "logit lens, bits")[depth] == pytest.approx(
            apart_by.mean() / math.log(2), abs=6e-3
        )
    own = -np.take_along_axis(final, apart[:, 1:, None], -1).mean()
    assert found["the model's own nll"].value == pytest.approx(own, rel=1e-5)
    assert listing_column(found, "logit lens, nats")[-1] == 0
    assert found["logit lens there"].value == distance.y[0]
    assert found["logit lens there"].why.startswith(f"{distance.y[0] / math.log(2):.2f} bits")


def test_tuned_lens_learns_a_planted_rotation():
    found = lens_of(open_for_evaluation(model_with_rotation()), texts(72), texts(6, seed=2), steps=200)
    logit, tuned = kl_by_depth(found)
    assert logit[1] > 0.3
    assert tuned[1] < 0.001
    assert curves_by_lens(found, "already name")["tuned lens"].y[1] > 0.9
    trained = curves_by_lens(found, "trained long enough")["depth 1"]
    assert trained.x[-1] == 200
    assert trained.y[0] == pytest.approx(logit[1], rel=1e-5)  # the translator starts as the identity
    assert trained.y[-1] == pytest.approx(tuned[1], rel=1e-9)
    assert found.answer == "at most positions the first choice can be read after layer 1 of 2"


def test_translator_keeps_an_exponential_average_of_its_weights():
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


def test_lens_of_reports_translators_that_have_not_converged():
    found = lens_of(open_for_evaluation(model_with_rotation()), texts(), texts(4, seed=2), steps=20)
    trained = curves_by_lens(found, "trained long enough")["depth 1"]
    assert trained.x == tuple(range(21))
    moved = 1 - trained.y[20] / trained.y[18]
    assert moved > 0.01
    assert listing_column(found, "last tenth")[1] == pytest.approx(-100 * moved, abs=6e-3)
    assert listing_column(found, "converged")[1] == "no"
    assert "tuned lenses still moved in the last tenth; raise" in joined_notes(found)
    assert found.answer == "no earlier layer gives the final first choice at half of the positions"


def test_lens_of_notes_a_tuned_lens_trained_on_too_few_windows():
    found = lens_of(open_for_evaluation(build("llama")), texts(4), texts(4, seed=2), steps=300)
    assert "the tuned lens knows its windows by heart, seen 300.0 times" in joined_notes(found)


def test_levels_of_constant_distributions_match_the_kl_decomposition():
    """The oracle is the identity Σ KL(p‖q) = Σ KL(p‖p̄) + n KL(p̄‖q)."""
    model, ids = build("llama"), texts(6)
    found = lens_of(open_for_evaluation(model), ids, ids, steps=20)
    final = final_logs(model, ids)
    mean = np.exp(final).reshape(-1, V).mean(0)
    counts = np.bincount(ids.ravel(), minlength=V) + 1
    chances = {"uniform distribution": np.full(V, 1 / V), "text's token frequencies": counts / counts.sum()}
    floor = (np.exp(final) * (final - np.log(mean))).sum(-1).mean()
    for name, q in {**chances, "model's mean distribution": mean}.items():
        wanted = floor + (mean * np.log(mean / q)).sum()
        assert found[name].value == pytest.approx(wanted, rel=1e-4)
    worse = (
        np.array(curves_by_lens(found, "How far")["logit lens"].low) > found["model's mean distribution"].high
    ).sum()
    assert f"at {worse} of 2 places the logit lens is further off" in joined_notes(found)


def test_lens_of_is_independent_of_chunk_size(monkeypatch):
    whole = lens_of(open_for_evaluation(build("gemma2")), texts(6), texts(3, seed=2), steps=20)
    monkeypatch.setattr(stacks, "LOGITS", 29 * V)  # 66 and 33 positions
    parts = lens_of(open_for_evaluation(build("gemma2")), texts(6), texts(3, seed=2), steps=20)
    for one, other in zip(whole.curves, parts.curves, strict=True):
        assert one.y == pytest.approx(other.y, rel=1e-3, abs=1e-7)


def test_lens_of_reports_progress_and_is_deterministic_for_a_seed():
    told = []

    def run(seed):
        return lens_of(open_for_evaluation(build("llama")), texts(60), texts(3, seed=2), steps=20, seed=seed).curves

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
def test_lens_of_refuses_unusable_windows(windows, held_out, steps, said):
    with pytest.raises(DataError, match=said):
        lens_of(open_for_evaluation(build("gpt2")), windows, held_out, steps)


def test_lens_of_refuses_bidirectional_models():
    with pytest.raises(UnsupportedError, match="both sides"):
        lens_of(open_for_evaluation(build("bert")), texts(), texts(3), 20)
