"""The Flax training loop: learning, points of the curve, order of batches and losses per token."""

import numpy as np
import pytest
from flax import nnx

from tiewise.boundary.flax.models import FlaxDecoder
from tiewise.boundary.flax.training import Fitting, OptaxRecipe, batches, token_losses
from tiewise.core.errors import DataError

V, T = 7, 6
CYCLE = np.arange(700) % V  # each token determines the next, so an nll of zero is possible


def test_fitting_learns_a_deterministic_text():
    model = FlaxDecoder("tied", V, 8, 1, 2, rngs=nnx.Rngs(0))
    fitting = Fitting(model, CYCLE, OptaxRecipe(steps=60, batch=4, length=T, learning_rate=3e-2))
    curve = [point for point in fitting.steps() if point is not None]
    assert [point.step for point in curve] == list(range(3, 61, 3))
    assert curve[0].train_nll > 1.5
    assert curve[-1].paths.a > 0
    assert (fitting.step, fitting.timed) == (60, 59)
    losses, targets = token_losses(model, CYCLE, T, blocks=10)
    assert losses.shape == targets.shape == (50,)
    assert losses.mean() < 0.5


def test_curve_point_is_the_mean_loss_since_the_previous_point():
    recipe = OptaxRecipe(steps=80, batch=4, length=T, learning_rate=3e-2)
    model = FlaxDecoder("tied", V, 8, 1, 2, rngs=nnx.Rngs(0))
    steps, ahead = Fitting(model, CYCLE, recipe).steps(), batches(CYCLE, recipe)
    for _ in range(2):
        losses, points = [], []
        for _ in range(4):
            ids = next(ahead)
            logits = np.asarray(model.logits(ids[:, :-1]), np.float64)
            at_target = np.take_along_axis(logits, ids[:, 1:, None], 2)[..., 0]
            losses.append((np.log(np.exp(logits).sum(-1)) - at_target).mean())
            points.append(next(steps))
        assert points[:3] == [None] * 3
        assert points[3].train_nll == pytest.approx(np.mean(losses), abs=1e-6)
        assert abs(np.mean(losses) - np.median(losses)) > 1e-5


def test_token_losses_equal_those_computed_from_all_logits():
    model = FlaxDecoder("untied", V, 8, 1, 2, rngs=nnx.Rngs(0))
    losses, targets = token_losses(model, CYCLE, T)
    logits = np.asarray(model.logits(CYCLE[: 116 * T].reshape(116, T)[:, :-1]), np.float64)
    at_target = np.take_along_axis(logits.reshape(-1, V), targets[:, None], 1).ravel()
    np.testing.assert_allclose(losses, np.log(np.exp(logits).sum(-1)).ravel() - at_target, rtol=1e-4, atol=1e-6)


def test_batches_visit_every_block_once_per_round_in_seeded_order():
    tokens = np.arange(10 * T)
    recipe = OptaxRecipe(batch=5, length=T)
    first = [b[:, 0] // T for b, _ in zip(batches(tokens, recipe), range(4), strict=False)]
    assert sorted(np.concatenate(first[:2])) == sorted(np.concatenate(first[2:])) == list(range(10))
    other = [next(batches(tokens, OptaxRecipe(batch=5, length=T, seed=s)))[:, 0] for s in range(2, 8)]
    assert np.array_equal(next(batches(tokens, recipe))[:, 0] // T, first[0])
    assert any(not np.array_equal(o // T, first[0]) for o in other)
    with pytest.raises(DataError, match="hold no batch of 11 blocks"):
        next(batches(tokens, OptaxRecipe(batch=11, length=T)))
