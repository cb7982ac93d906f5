"""A text reduced to its frequent tokens, and a path's loss on it, against dense sums."""

import numpy as np
import pytest
from scipy.special import softmax

from tiewise.analysis import bigram_paths as module
from tiewise.analysis import token_table as tables
from tiewise.analysis.bigram_counts import Chain, one_way_pairs, text_pairs
from tiewise.analysis.bigram_paths import frequent_loss, keep_frequent, split
from tiewise.analysis.path_matrix import DirectPath
from tiewise.analysis.token_table import HeldTable
from tiewise.core.errors import DataError

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
    assert (full.tied_rank, full.untied_rank, full.untied.starts) == (0.0, 0.0, 0)
    assert narrow.definiteness == pytest.approx(full.definiteness, abs=1e-12)


def test_pairs_and_what_they_add_to_irreversibility():
    ids = text()
    chain = Chain.of([ids], V)
    everything = [(i, j) for i in range(V) for j in range(i + 1, V)]
    found = text_pairs(chain, everything, [("", "")] * len(everything))
    assert sum(pair.irreversibility for pair in found) == pytest.approx(chain.irreversibility, abs=1e-12)
    best = sorted(found, key=lambda pair: -pair.irreversibility)[:5]
    assert [{*pair} for pair in one_way_pairs(chain, 5)] == [{*pair.ids} for pair in best]
    follows = list(zip(ids.tolist(), np.roll(ids, -1).tolist(), strict=True))
    for pair in found[:40]:
        i, j = pair.ids
        assert (pair.there, pair.back) == (follows.count((i, j)), follows.count((j, i)))
        if i in ids:
            assert pair.probability_there == pytest.approx(pair.there / np.count_nonzero(ids == i))
    last = text_pairs(chain, [(V - 1, 0)], [("a", "b")])[0]
    assert (last.probability_there, last.there, last.irreversibility) == (None, 0, 0.0)
