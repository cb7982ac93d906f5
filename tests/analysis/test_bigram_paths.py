"""Fitted paths against scipy's optimiser, the split's exact parts, frequent tokens, and a path's loss on a text."""

import math

import numpy as np
import pytest
from scipy.optimize import approx_fprime, minimize
from scipy.special import log_softmax, softmax

from tiewise.analysis import bigram_paths as module
from tiewise.analysis import model_tables as tables
from tiewise.analysis.bigram_counts import Chain
from tiewise.analysis.bigram_paths import (
    fit_path,
    frequent_loss,
    keep_frequent,
    minimise,
    path_loss,
    path_nll,
    split,
)
from tiewise.analysis.model_tables import HeldTable
from tiewise.analysis.path_matrix import DirectPath
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
    q = random_q(4, 0)
    x = np.random.default_rng(1).normal(size=(8 if tied else 16) + 4)
    numeric = approx_fprime(x, lambda x: path_nll(x, q, 2)[0], 1e-7)
    np.testing.assert_allclose(path_nll(x, q, 2)[1], numeric, atol=1e-6)


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


V = 25


def text(seed=0):
    return np.random.default_rng(seed).choice(V - 3, 3000, p=np.random.default_rng(9).dirichlet(np.ones(V - 3)))


def test_other_tokens_become_one_state():
    ids = text()
    chain = Chain.of([ids], V)
    kept = keep_frequent(chain, 6)
    counts = np.bincount(ids, minlength=V)
    assert kept.ids.tolist() == np.argsort(-counts, kind="stable")[:6].tolist()
    assert kept.share == pytest.approx(counts[kept.ids].sum() / len(ids))
    q = np.zeros((7, 7))
    place = {token: k for k, token in enumerate(kept.ids.tolist())}
    states = [place.get(token, 6) for token in ids.tolist()]
    np.add.at(q, (states, np.roll(states, -1)), 1 / len(ids))
    reduced = kept.of(ids)
    np.testing.assert_allclose(reduced.dense(), q, atol=1e-15)
    np.testing.assert_allclose(q.sum(0), q.sum(1), atol=1e-15)
    assert reduced.irreversibility <= chain.irreversibility + 1e-12


def test_a_text_of_few_tokens_has_no_other_state():
    ids = np.array([1, 2, 1, 3, 2, 2])
    kept = keep_frequent(Chain.of([ids], V), 10)
    assert (kept.states, kept.share, kept.of(ids).vocabulary) == (3, 1.0, 3)
    with pytest.raises(DataError, match="1 tokens kept"):
        keep_frequent(Chain.of([ids], V), 1)


@pytest.mark.parametrize("most", [6, 25])
def test_the_loss_equals_dense_sums(most, monkeypatch):
    monkeypatch.setattr(tables, "CHUNK_VALUES", 60)
    ids = text()
    chain = Chain.of([ids], V)
    table, other = np.random.default_rng(1).normal(size=(2, V, 4))
    path = DirectPath(HeldTable(table), HeldTable(other), bias=np.linspace(-1, 1, V), softcap=3.0)
    kept = keep_frequent(chain, most)
    p = softmax(3.0 * np.tanh((table @ other.T + path.bias) / 3.0), axis=1)
    counts = np.bincount(ids, minlength=V).astype(float)
    merged = kept.state[np.arange(V)]
    count = len(kept.ids)
    by_state = np.zeros((count + 1, count + 1))
    for i in range(V):
        for j in range(V):
            by_state[merged[i], merged[j]] += counts[i] * p[i, j]
    totals = np.array([counts[merged == s].sum() for s in range(count + 1)])
    with np.errstate(divide="ignore", invalid="ignore"):
        by_state /= totals[:, None]
    pairs = list(zip(merged[ids], np.roll(merged[ids], -1), strict=True))
    expected = -np.mean([np.log(by_state[pair]) for pair in pairs])
    found, drawn = frequent_loss(path, chain, kept, kept.of(ids))
    assert found == pytest.approx(expected, abs=1e-10)
    assert drawn == ((counts > 0).sum() - count if most == 6 else 0)
    assert found >= kept.of(ids).entropy


def test_drawn_tokens_stand_for_many(monkeypatch):
    ids = text()
    chain = Chain.of([ids], V)
    table = np.random.default_rng(1).normal(size=(V, 4))
    path = DirectPath(HeldTable(table), HeldTable(table))
    kept = keep_frequent(chain, 4)
    exact, _ = frequent_loss(path, chain, kept, kept.of(ids))
    monkeypatch.setattr(module, "OTHERS", 10)
    losses = [frequent_loss(path, chain, kept, kept.of(ids), seed) for seed in range(20)]
    assert {drawn for _, drawn in losses} == {10}
    found = np.array([loss for loss, _ in losses])
    assert abs(found.mean() - exact) < 4 * found.std(ddof=1) / np.sqrt(20) + 0.02
    assert found.std() > 0


def test_a_full_width_needs_no_narrow_fit():
    ids = text() % 4
    chain = Chain.of([ids], 4)
    full, narrow = split(chain, 4), split(chain, 100)
    assert (full.tied_rank, full.untied_rank) == (0.0, 0.0)
    assert narrow.definiteness == pytest.approx(full.definiteness, abs=1e-12)


def example(vocabulary=30):
    generator = np.random.default_rng(0)
    e, u = generator.normal(size=(2, vocabulary, 4))
    text = generator.integers(0, vocabulary, 3000) ** 2 // vocabulary
    path, chain = DirectPath(HeldTable(e), HeldTable(u)), Chain.of([text], vocabulary)
    return path, chain, -(chain.dense() * log_softmax(e @ u.T, axis=1)).sum()


def test_all_pairs_are_exact():
    path, chain, truth = example()
    found = path_loss(path, chain)
    assert found.value == pytest.approx(truth, abs=1e-12)
    assert found.value > chain.entropy
    assert math.isnan(found.low)
    assert found.rows == len(chain.keys)


def test_a_sample_covers_the_truth():
    path, chain, truth = example()
    found = [path_loss(path, chain, 200, seed) for seed in range(60)]
    assert {f.rows for f in found} == {200}
    assert sum(f.low <= truth <= f.high for f in found) >= 52
    assert found[3] == path_loss(path, chain, 200, 3)


def test_the_best_symmetric_path_pays_the_irreversibility():
    _, chain, _ = example(12)
    q = chain.dense() + 1e-12  # no pair unseen: its logit would be infinite
    path = DirectPath(HeldTable(np.eye(12)), HeldTable(np.log(q + q.T)))
    assert path_loss(path, chain).value == pytest.approx(chain.entropy + chain.irreversibility, abs=1e-8)


def test_refused():
    path, chain, _ = example()
    with pytest.raises(DataError, match="a sample of 1"):
        path_loss(path, chain, 1)
    short = DirectPath(HeldTable(np.ones((4, 2))), HeldTable(np.ones((4, 2))))
    with pytest.raises(DataError, match="outside the table's 4 rows"):
        path_loss(short, chain)
