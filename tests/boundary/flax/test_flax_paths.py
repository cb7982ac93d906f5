"""Gradients of the lookup and head paths and their norms, compared with plain autograd in JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp64_truth import error
from hypothesis import given, settings
from hypothesis import strategies as st

from tiewise.boundary.flax.paths import enter, path_norms, probe


@settings(max_examples=12)
@given(st.lists(st.integers(0, 6), min_size=5, max_size=5), st.sampled_from([None, 0, 3]), st.sampled_from([1.0, 0.5]))
def test_path_gradients_sum_to_the_plain_gradient(ids, stopped, alpha):
    g = np.random.default_rng(0)
    table = jnp.asarray(g.normal(size=(7, 3)), jnp.float32)
    out = jnp.asarray(g.normal(size=(5, 7)), jnp.float32)
    ids = np.array(ids)
    head = lambda rows, w: (jnp.tanh(rows @ w.T) * out).sum()  # noqa: E731

    def threaded(table, probe):
        return head(*enter(table, ids, probe, stopped=stopped, alpha=alpha))

    value, (total, seen) = jax.value_and_grad(threaded, (0, 1))(table, probe())
    d_rows, path_b = jax.grad(head, (0, 1))(table[ids], table)
    path_b = path_b if stopped is None else path_b.at[stopped].set(0)
    path_a = np.zeros((7, 3))
    for token, row in zip(ids, np.asarray(d_rows), strict=True):
        if token != stopped:
            path_a[token] += alpha * row
    assert error(total, path_a + np.asarray(path_b)) < 1e-5
    norms = path_norms(seen)
    b = np.asarray(path_b, np.float64)
    assert norms.a == pytest.approx(np.linalg.norm(path_a), rel=1e-4, abs=1e-6)
    assert norms.b == pytest.approx(np.linalg.norm(b), rel=1e-4)
    assert norms.total == pytest.approx(np.linalg.norm(path_a + b), rel=1e-3)
    if norms.a:
        assert norms.cosine == pytest.approx((path_a * b).sum() / np.linalg.norm(path_a) / np.linalg.norm(b), abs=1e-4)
    assert float(value) == pytest.approx(float(head(table[ids], table)), rel=1e-6)


def test_enter_supports_chained_lookups_and_a_missing_path():
    table = jnp.arange(12.0).reshape(4, 3)

    def chained(w):
        rows, w = enter(w, np.array([1, 1]))
        more, w = enter(w, np.array([2]))
        return rows.sum() + 2 * more.sum() + 3 * w.sum()

    np.testing.assert_array_equal(jax.grad(chained)(table)[:, 0], [3, 5, 5, 3])
    np.testing.assert_array_equal(jax.grad(lambda w: enter(w, np.array([1]))[0].sum())(table)[:, 0], [0, 1, 0, 0])
    np.testing.assert_array_equal(jax.grad(lambda w: enter(w, np.array([1]))[1].sum())(table)[:, 0], [1, 1, 1, 1])
