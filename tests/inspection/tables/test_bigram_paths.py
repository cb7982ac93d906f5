"""Fitted bigram paths against another optimiser; losses, splits and maps against dense sums."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax
from tiny_tables import exact_chain, random_chain

from tiewise.core.errors import DataError
from tiewise.core.estimates import interaction_residuals
from tiewise.inspection.tables import bigram_paths as module
from tiewise.inspection.tables import model_tables as tables
from tiewise.inspection.tables.bigram_counts import Chain, frequent
from tiewise.inspection.tables.bigram_paths import fit_path, frequent_loss, likeness, path_loss, path_map, text_map
from tiewise.inspection.tables.model_tables import ArrayTable
from tiewise.inspection.tables.open_path import DirectPath


def fit_with_scipy(q, width, tied, seed):
    """Return the lowest NLL of the same paths, by scipy with separate starts and formula."""
    v = len(q)

    def loss(x):
        left = x[: v * width].reshape(v, width)
        right = left if tied else x[v * width : 2 * v * width].reshape(v, width)
        logs = log_softmax(left @ right.T + x[-v:], axis=1)
        error = q.sum(1, keepdims=True) * np.exp(logs) - q
        slopes = [(error + error.T) @ left] if tied else [error @ right, error.T @ left]
        return -(q * logs).sum(), np.concatenate([*(s.ravel() for s in slopes), error.sum(0)])

    generator = np.random.default_rng(seed)
    size = (1 if tied else 2) * v * width + v
    # BFGS keeps the full curvature, unlike the method of `fit_path`
    return minimize(loss, generator.normal(0, 0.3, size), jac=True, method="BFGS", options={"gtol": 1e-10}).fun


@pytest.mark.parametrize(("states", "seed"), [(5, 1), (9, 2)])
def test_fit_path_at_full_width_matches_scipy_and_the_exact_parts(states, seed):
    q, _ = random_chain(states, seed)
    chain = exact_chain(q)
    tied, untied = fit_path(chain, states, True, 2), fit_path(chain, states, False, 2)
    assert untied.nll == pytest.approx(chain.entropy, abs=1e-8)
    assert tied.nll == pytest.approx(fit_with_scipy(q, states, True, 5), abs=1e-8)
    assert tied.nll > chain.entropy + chain.irreversibility - 1e-10
    assert tied.spread < 1e-8
    assert max(tied.gradient, untied.gradient) < 1e-6


@pytest.mark.parametrize("tied", [True, False])
def test_fit_path_of_small_width_is_at_least_as_good_as_scipy(tied):
    q, _ = random_chain(8, 3)
    found = fit_path(exact_chain(q), 2, tied, starts=6)
    assert found.nll <= min(fit_with_scipy(q, 2, tied, seed) for seed in range(6)) + 1e-8


def test_split_parts_add_up_and_rank_parts_vanish_at_full_width():
    chain = exact_chain(random_chain(8, 4)[0])
    found = module.split(chain, 2)
    whole = found.entropy + found.irreversibility + found.definiteness + found.tied_rank
    assert whole == pytest.approx(found.tied, abs=1e-12)
    assert found.entropy + found.untied_rank == pytest.approx(found.untied, abs=1e-12)
    assert min(found.irreversibility, found.definiteness, found.tied_rank, found.untied_rank) > 0
    full, wider = module.split(chain, 8), module.split(chain, 100)
    assert (full.tied_rank, full.untied_rank) == (0.0, 0.0)
    assert wider.definiteness == pytest.approx(full.definiteness, abs=1e-12)


def test_tied_fit_path_cannot_model_tokens_that_never_repeat():
    chain = exact_chain(np.full((4, 4), 1 / 12) - np.eye(4) / 12)
    assert chain.irreversibility == pytest.approx(0, abs=1e-12)
    # an inner product of a token with itself cannot be the smallest, so uniform logits are optimal
    assert fit_path(chain, 4, True).nll == pytest.approx(math.log(4), abs=1e-8)
    assert chain.entropy == pytest.approx(math.log(3), abs=1e-12)


V = 25


def draw_text(seed=0, length=3000):
    return np.random.default_rng(seed).choice(V - 3, length, p=np.random.default_rng(9).dirichlet(np.ones(V - 3)))


def reduce_to_states(ids, most):
    """Return a text's frequent tokens, the state of every token, and the chain of states."""
    kept = frequent(Chain.of(ids, V), most)
    state = np.array([kept.tolist().index(token) if token in kept else len(kept) for token in range(V)])
    return kept, state, Chain.of(state[ids], int(state[ids].max()) + 1)


@pytest.mark.parametrize("most", [6, 25])
def test_frequent_loss_matches_dense_sums_over_merged_states(most, monkeypatch):
    monkeypatch.setattr(tables, "CHUNK_VALUES", 60)
    ids = draw_text()
    kept, state, reduced = reduce_to_states(ids, most)
    table, other = np.random.default_rng(1).normal(size=(2, V, 4))
    path = DirectPath(ArrayTable(table), ArrayTable(other), bias=np.linspace(-1, 1, V), softcap=3.0)
    p = softmax(3.0 * np.tanh((table @ other.T + path.bias) / 3.0), axis=1)
    counts = np.bincount(ids, minlength=V).astype(float)
    member = np.eye(len(kept) + 1)[state]  # [V, states]
    with np.errstate(invalid="ignore"):
        by_state = member.T @ (counts[:, None] * p) @ member / (member.T @ counts)[:, None]
    expected = -np.log(by_state[state[ids], np.roll(state[ids], -1)]).mean()
    found = frequent_loss(path, Chain.of(ids, V), kept, reduced)
    assert found == pytest.approx(expected, abs=1e-10)
    assert found >= reduced.entropy
    assert reduced.irreversibility <= Chain.of(ids, V).irreversibility + 1e-12


def test_frequent_loss_from_sampled_tokens_is_close_to_the_exact_loss():
    ids, table = draw_text(), np.random.default_rng(1).normal(size=(V, 4))
    path, (kept, _, reduced) = DirectPath(ArrayTable(table), ArrayTable(table)), reduce_to_states(ids, 4)
    exact_loss = frequent_loss(path, Chain.of(ids, V), kept, reduced)
    found = np.array([frequent_loss(path, Chain.of(ids, V), kept, reduced, seed, most_others=10) for seed in range(20)])
    assert abs(found.mean() - exact_loss) < 4 * found.std(ddof=1) / np.sqrt(20) + 0.02
    assert found.std() > 0


def make_example(vocabulary=30):
    """Return a path, a chain, and the path's loss on the chain by definition."""
    e, u = np.random.default_rng(0).normal(size=(2, vocabulary, 4))
    chain = Chain.of(np.random.default_rng(1).integers(0, vocabulary, 3000) ** 2 // vocabulary, vocabulary)
    return DirectPath(ArrayTable(e), ArrayTable(u)), chain, -(chain.dense() * log_softmax(e @ u.T, axis=1)).sum()


def test_path_loss_is_exact_on_all_pairs_and_covers_the_truth_on_samples():
    path, chain, truth = make_example()
    found = path_loss(path, chain)
    assert found.value == pytest.approx(truth, abs=1e-12)
    assert math.isnan(found.low)
    assert found.rows == len(chain.keys)
    drawn = [path_loss(path, chain, 200, seed) for seed in range(60)]
    assert {f.rows for f in drawn} == {200}
    assert sum(f.low <= truth <= f.high for f in drawn) >= 52
    assert drawn[3] == path_loss(path, chain, 200, 3)


def test_path_loss_of_the_best_symmetric_path_adds_the_irreversibility():
    _, chain, _ = make_example(12)
    q = chain.dense() + 1e-12  # an unseen pair would need an infinite logit
    path = DirectPath(ArrayTable(np.eye(12)), ArrayTable(np.log(q + q.T)))
    assert path_loss(path, chain).value == pytest.approx(chain.entropy + chain.irreversibility, abs=1e-8)


def test_text_map_and_path_map_match_dense_log_ratios():
    ids = draw_text(length=400)
    chain = Chain.of(ids, V)
    shown = frequent(chain, 6)
    q = np.zeros((V, V))
    np.add.at(q, (ids, np.roll(ids, -1)), 1 / len(ids))
    pi = q.sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = np.log(q / (pi[:, None] * pi))[np.ix_(shown, shown)]
    expected[np.isinf(expected)] = np.nan  # the text lacks the pair
    assert 0 < np.isnan(expected).sum() < expected.size
    np.testing.assert_allclose(text_map(chain, shown), expected, atol=1e-10)
    table, other = np.random.default_rng(1).normal(size=(2, V, 4))
    found = path_map(DirectPath(ArrayTable(table), ArrayTable(other)), chain, shown)
    logs = log_softmax(table @ other.T, axis=1) - np.log(np.maximum(pi, 1e-9))
    np.testing.assert_allclose(found, logs[np.ix_(shown, shown)], atol=1e-10)


def fit_additive(values, marked):
    """Fit m + a_i + b_j to the marked entries by the normal equations."""
    k = len(values)
    ones = [np.kron(np.eye(k)[i], np.ones(k)) for i in range(k)] + [np.kron(np.ones(k), np.eye(k)[j]) for j in range(k)]
    design = np.array(ones).T
    chosen = design[marked.ravel()]
    return (design @ (np.linalg.pinv(chosen.T @ chosen) @ chosen.T @ values[marked])).reshape(k, k)


def test_interaction_residuals_and_likeness_match_least_squares():
    generator = np.random.default_rng(4)
    wanted, said = generator.normal(size=(2, 9, 9))
    said += 0.8 * wanted
    wanted[generator.random((9, 9)) < 0.3] = np.nan
    off = ~np.isnan(wanted) & ~np.eye(9, dtype=bool)
    np.testing.assert_allclose(interaction_residuals(wanted), wanted - fit_additive(wanted, off), atol=1e-9)
    moved = said + np.arange(9)[:, None] * 5.0 - np.arange(9) ** 2  # row and column effects
    (follows, p), (direction, _) = likeness(wanted, moved, permutations=99)
    a, b = (np.where(off, values - fit_additive(values, off), 0.0) for values in (wanted, said))
    both = np.triu(off & off.T)
    expected = [np.corrcoef(x, y)[0, 1] for x, y in ((a[off], b[off]), ((a - a.T)[both], (b - b.T)[both]))]
    assert (follows, direction) == pytest.approx(expected, abs=1e-9)
    assert p == 0.01


@given(st.integers(1, 8).flatmap(lambda n: arrays(float, (n, n), elements=st.floats(-5, 5))))
def test_interaction_residuals_of_any_map_match_least_squares(values):
    expected = values - fit_additive(values, ~np.eye(len(values), dtype=bool))
    np.testing.assert_allclose(interaction_residuals(values), expected, atol=1e-9)


def test_likeness_p_values_are_calibrated_for_unrelated_maps():
    """About one in ten unrelated maps has a p-value of at most 0.1."""
    generator = np.random.default_rng(6)
    found = [likeness(*generator.normal(size=(2, 8, 8)), permutations=39) for _ in range(100)]
    assert all(2 <= sum(one[at][1] <= 0.1 for one in found) <= 22 for at in (0, 1))


def test_likeness_is_nan_for_constant_or_too_small_maps():
    assert math.isnan(likeness(np.ones((5, 5)), np.random.default_rng(0).normal(size=(5, 5)))[0][0])
    lonely = np.full((4, 4), np.nan)
    lonely[0, 1] = 1.0
    assert math.isnan(likeness(lonely, np.ones((4, 4)))[1][0])


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda path, chain: fit_path(chain, 0, True), "width 0, 3 starts"),
        (lambda path, chain: fit_path(Chain(chain.keys, chain.counts, 3000), 2, True), "too many"),
        (lambda path, chain: path_loss(path, chain, 1), "a sample of 1"),
        (lambda path, chain: path_loss(path, Chain.of([1, 40], 41)), "outside the table's 30 rows"),
    ],
)
def test_fit_path_and_path_loss_refuse_unusable_arguments(ask, said):
    path, chain, _ = make_example()
    with pytest.raises(DataError, match=said):
        ask(path, chain)
