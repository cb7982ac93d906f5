"""Fitted paths against scipy's optimiser and the exact parts of the split."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from scipy.optimize import approx_fprime, minimize
from scipy.special import log_softmax

from tiewise.analysis.bigram_counts import Chain
from tiewise.analysis.bigram_paths import _Problem, fit_path, split
from tiewise.analysis.lbfgs import minimise
from tiewise.core.errors import DataError


def random_q(states, seed):
    """A dense Q with equal row and column sums and no zero."""
    generator = np.random.default_rng(seed)
    p = generator.dirichlet(np.full(states, 0.5), states) * 0.98 + 0.02 / states
    q = np.linalg.matrix_power(p, 4096)[0][:, None] * p
    return q / q.sum()


def chain_of(q):
    """A `Chain` with Q's shares, rounded to 1e-15."""
    counts = np.rint(q * 10**15).astype(np.int64).ravel()
    return Chain(np.flatnonzero(counts), counts[counts > 0], len(q))


def by_scipy(q, width, tied, seed):
    """Lowest nll of the same paths, by scipy from its own starts, the formula written once more."""
    v = len(q)

    def loss(x):
        left = x[: v * width].reshape(v, width)
        right = left if tied else x[v * width : 2 * v * width].reshape(v, width)
        logs = log_softmax(left @ right.T + x[-v:], axis=1)
        error = q.sum(1, keepdims=True) * np.exp(logs) - q
        slopes = [(error + error.T) @ left] if tied else [error @ right, error.T @ left]
        return -(q * logs).sum(), np.concatenate([*(s.ravel() for s in slopes), error.sum(0)])

    generator = np.random.default_rng(seed)
    options = {"maxiter": 20_000, "maxfun": 40_000, "maxcor": 50, "ftol": 0, "gtol": 1e-10}
    size = (1 if tied else 2) * v * width + v
    return minimize(loss, generator.normal(0, 0.3, size), jac=True, method="L-BFGS-B", options=options).fun


@pytest.mark.parametrize("tied", [True, False])
def test_gradient(tied):
    problem = _Problem(random_q(4, 0), 2, tied)
    x = np.random.default_rng(1).normal(size=(8 if tied else 16) + 4)
    numeric = approx_fprime(x, lambda x: problem.loss(x)[0], 1e-7)
    np.testing.assert_allclose(problem.loss(x)[1], numeric, atol=1e-6)


@pytest.mark.parametrize(("states", "seed"), [(5, 1), (9, 2)])
def test_full_width_equals_scipy_and_the_exact_parts(states, seed):
    q = random_q(states, seed)
    chain = chain_of(q)
    tied, untied = fit_path(chain, states, True, 2), fit_path(chain, states, False, 2)
    assert untied.nll == pytest.approx(chain.entropy, abs=1e-8)
    assert tied.nll == pytest.approx(by_scipy(q, states, True, 5), abs=1e-8)
    assert tied.nll > chain.entropy + chain.irreversibility - 1e-10
    assert tied.spread < 1e-8
    assert max(tied.gradient, untied.gradient) < 1e-6


@pytest.mark.parametrize("tied", [True, False])
def test_narrow_paths_are_as_good_as_scipys(tied):
    q = random_q(8, 3)
    found = fit_path(chain_of(q), 2, tied, starts=6)
    assert found.nll <= min(by_scipy(q, 2, tied, seed) for seed in range(6)) + 1e-8


def test_the_parts_add_up():
    chain = chain_of(random_q(8, 4))
    found = split(chain, 2)
    whole = found.entropy + found.irreversibility + found.definiteness + found.tied_rank
    assert whole == pytest.approx(found.tied.nll, abs=1e-12)
    assert found.entropy + found.untied_rank == pytest.approx(found.untied.nll, abs=1e-12)
    assert min(found.irreversibility, found.definiteness, found.tied_rank, found.untied_rank) > 0
    assert json.loads(json.dumps(asdict(found))) == asdict(found)
    again = split(chain, 8)
    assert again.tied_rank == pytest.approx(0, abs=1e-8)
    assert again.untied_rank == pytest.approx(0, abs=1e-8)


def test_a_definite_reversible_chain_costs_a_tied_path_nothing():
    table = np.random.default_rng(0).normal(size=(6, 6))
    q = np.exp(table @ table.T)
    found = split(chain_of(q / q.sum()), 6)
    assert found.irreversibility == pytest.approx(0, abs=1e-12)
    assert found.definiteness == pytest.approx(0, abs=1e-8)


def test_a_token_that_never_follows_itself_costs_definiteness():
    q = np.full((4, 4), 1 / 12) - np.eye(4) / 12
    chain = chain_of(q)
    assert chain.irreversibility == pytest.approx(0, abs=1e-12)
    # no inner product can be smaller for oneself than for all others: the best is to say nothing
    assert fit_path(chain, 4, True).nll == pytest.approx(math.log(4), abs=1e-8)
    assert chain.entropy == pytest.approx(math.log(3), abs=1e-12)


def test_minimise_finds_rosenbrocks_valley():
    def loss(x):
        a, b = 1 - x[0], x[1] - x[0] ** 2
        return a * a + 100 * b * b, np.array([-2 * a - 400 * x[0] * b, 200 * b])

    found = minimise(loss, np.array([-1.2, 1.0]), 500, 1e-9)
    np.testing.assert_allclose(found.x, 1, atol=1e-7)
    assert found.steps < 100


def test_what_cannot_be_fitted_is_refused():
    chain = chain_of(random_q(3, 0))
    with pytest.raises(DataError, match="width 0, 3 starts"):
        fit_path(chain, 0, True)
    with pytest.raises(DataError, match="too many"):
        fit_path(Chain(chain.keys, chain.counts, 3000), 2, True)
