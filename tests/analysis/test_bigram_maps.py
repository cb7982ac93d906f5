"""Heat maps and their likeness against dense counts, dense softmax and least squares written once more."""

import numpy as np
import pytest
from scipy.special import log_softmax

from tiewise.analysis.bigram_counts import Chain
from tiewise.analysis.bigram_maps import frequent, interaction, likeness, path_map, text_map
from tiewise.analysis.model_tables import HeldTable
from tiewise.analysis.path_matrix import DirectPath
from tiewise.core.errors import DataError

V = 30


def text(seed=0, length=4000):
    generator = np.random.default_rng(seed)
    return generator.choice(V - 2, length, p=generator.dirichlet(np.full(V - 2, 0.7)))


def test_the_text_map_is_the_log_ratio_of_counts():
    ids = text(length=400)
    chain = Chain.of([ids], V)
    shown = frequent(chain, 6, also=[V - 1, 3])
    counts = np.bincount(ids, minlength=V)
    assert shown[:6].tolist() == np.argsort(-counts, kind="stable")[:6].tolist()
    assert V - 1 not in shown  # the text does not have it
    assert 3 in shown
    q = np.zeros((V, V))
    np.add.at(q, (ids, np.roll(ids, -1)), 1 / len(ids))
    pi = q.sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = np.log(q / (pi[:, None] * pi))[np.ix_(shown, shown)]
    expected[np.isinf(expected)] = np.nan  # the text never has the pair
    assert 0 < np.isnan(expected).sum() < expected.size
    np.testing.assert_allclose(text_map(chain, shown), expected, atol=1e-10)


def test_the_path_map_is_a_dense_softmax_over_all_tokens():
    ids = text()
    chain = Chain.of([ids], V)
    shown = frequent(chain, 5)
    table, other = np.random.default_rng(1).normal(size=(2, V, 4))
    found = path_map(DirectPath(HeldTable(table), HeldTable(other)), chain, shown)
    logs = log_softmax(table @ other.T, axis=1) - np.log(np.maximum(np.bincount(ids, minlength=V), 1e-9) / len(ids))
    np.testing.assert_allclose(found, logs[np.ix_(shown, shown)], atol=1e-10)


def additive(values, marked):
    """m + a_i + b_j fitted to the marked entries, by the normal equations with a pseudo-inverse."""
    k = len(values)
    ones = [np.kron(np.eye(k)[i], np.ones(k)) for i in range(k)] + [np.kron(np.ones(k), np.eye(k)[j]) for j in range(k)]
    design = np.array(ones).T
    chosen = design[marked.ravel()]
    return (design @ (np.linalg.pinv(chosen.T @ chosen) @ chosen.T @ values[marked])).reshape(k, k)


def test_interaction_and_likeness_against_least_squares():
    generator = np.random.default_rng(4)
    wanted, said = generator.normal(size=(2, 9, 9))
    said += 0.8 * wanted
    wanted[generator.random((9, 9)) < 0.3] = np.nan
    off = ~np.isnan(wanted) & ~np.eye(9, dtype=bool)
    np.testing.assert_allclose(interaction(wanted)[off], (wanted - additive(wanted, off))[off], atol=1e-9)
    moved = said + np.arange(9)[:, None] * 5.0 - np.arange(9) ** 2  # what rows and columns have in common
    (follows, p), (direction, _) = likeness(wanted, moved, permutations=99)
    a, b = (np.where(off, values - additive(values, off), 0.0) for values in (wanted, said))
    assert follows == pytest.approx(np.corrcoef(a[off], b[off])[0, 1], abs=1e-9)
    both = np.triu(off & off.T)
    expected = np.corrcoef((a - a.T)[both], (b - b.T)[both])[0, 1]
    assert direction == pytest.approx(expected, abs=1e-9)
    assert p == 0.01


def test_the_null_holds_for_unrelated_maps():
    """Of many unrelated maps about one in ten has a p of 0.1 or less."""
    generator = np.random.default_rng(6)
    found = [likeness(*generator.normal(size=(2, 8, 8)), permutations=39) for _ in range(100)]
    assert 2 <= sum(p <= 0.1 for (_, p), _ in found) <= 22
    assert 2 <= sum(p <= 0.1 for _, (_, p) in found) <= 22


def test_maps_too_small_or_constant_have_no_correlation():
    assert likeness(np.ones((5, 5)), np.random.default_rng(0).normal(size=(5, 5)))[0] == (None, None)
    lonely = np.full((4, 4), np.nan)
    lonely[0, 1] = 1.0
    assert likeness(lonely, np.ones((4, 4)))[1] == (None, None)


def test_tokens_that_the_text_lacks_are_refused():
    chain = Chain.of([text()], V)
    with pytest.raises(DataError, match=f"no token {V - 1}"):
        text_map(chain, np.array([0, V - 1]))
    with pytest.raises(DataError, match="again and again"):
        frequent(Chain.of([[1, 1, 1]], 3))
