"""Pair counts against a plain loop; irreversibility against an independent optimiser and known chains."""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import logsumexp
from tiny_tables import exact_chain, random_chain, sample_text

from tiewise.core.errors import DataError
from tiewise.inspection.tables.bigram_counts import (
    Chain,
    frequent,
    irreversibility,
    one_way_pairs,
    pair_counts,
    ring_and_parts,
)


def count_ring_pairs(text):
    """Count the pairs of a text closed into a ring, by a plain loop."""
    return Counter((text[i - 1], text[i]) for i in range(len(text)))


def counts_by_pair(chain):
    return dict(zip(zip(chain.before.tolist(), chain.after.tolist(), strict=True), chain.counts.tolist(), strict=True))


@settings(max_examples=150)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=60), st.sampled_from(["u2", "i8", "u4"]))
def test_chain_counts_match_a_plain_loop(text, kind):
    chain = Chain.of(np.array(text, kind), 7)
    assert counts_by_pair(chain) == count_ring_pairs(text)
    assert chain.pairs == len(text)
    q = np.zeros((7, 7))
    for pair, count in count_ring_pairs(text).items():
        q[pair] = count / len(text)
    np.testing.assert_allclose(chain.dense(), q, atol=1e-15)
    assert (chain.tokens == np.bincount(text, minlength=7)).all()
    pi = q.sum(1)
    np.testing.assert_allclose(q.sum(0), pi, atol=1e-15)
    h = sum(-q[i, j] * math.log(q[i, j] / pi[i]) for i, j in np.argwhere(q))
    lost = sum(q[i, j] * math.log(2 * q[i, j] / (q[i, j] + q[j, i])) for i, j in np.argwhere(q))
    assert (chain.entropy, chain.irreversibility) == pytest.approx((h, lost), abs=1e-12)
    assert -1e-12 <= chain.irreversibility <= math.log(2) + 1e-12


def test_chain_does_not_overflow_with_a_large_vocabulary():
    top = 300_000
    found = counts_by_pair(Chain.of(np.array([top - 1, top - 2, top - 1], np.uint32), top))
    assert found == {(top - 1, top - 2): 1, (top - 2, top - 1): 1, (top - 1, top - 1): 1}


def test_frequent_lists_common_tokens_first_then_requested_tokens_in_the_text():
    ids = np.random.default_rng(0).integers(0, 20, 300) ** 2 // 20
    found = frequent(Chain.of(ids, 20), 6, also=[19, 3])
    assert found[:6].tolist() == np.argsort(-np.bincount(ids, minlength=20), kind="stable")[:6].tolist()
    assert (19 in found, 3 in found) == (False, True)


def fit_symmetric_logits(q):
    """Return the lowest NLL of symmetric logits with a bias, by scipy from a separate formula."""
    v = len(q)
    upper = np.triu_indices(v)

    def loss(x):
        s = np.zeros((v, v))
        s[upper] = x[: len(upper[0])]
        logits = s + np.triu(s, 1).T + x[len(upper[0]) :]
        normaliser = logsumexp(logits, axis=1, keepdims=True)
        error = q.sum(1, keepdims=True) * np.exp(logits - normaliser) - q
        both = error + error.T - np.diag(error.diagonal())
        return -(q * (logits - normaliser)).sum(), np.concatenate([both[upper], error.sum(0)])

    options = {"maxiter": 20_000, "maxfun": 40_000, "maxcor": 50, "ftol": 0, "gtol": 1e-11}
    return minimize(loss, np.zeros(len(upper[0]) + v), jac=True, method="L-BFGS-B", options=options).fun


@pytest.mark.parametrize(("states", "seed"), [(3, 0), (6, 1), (6, 2), (12, 3), (20, 4)])
def test_irreversibility_equals_the_excess_nll_of_the_best_symmetric_path(states, seed):
    q, _ = random_chain(states, seed)
    chain = exact_chain(q)
    assert chain.irreversibility > 0.01
    assert fit_symmetric_logits(q) - chain.entropy == pytest.approx(chain.irreversibility, abs=1e-8)


def test_irreversibility_estimates_are_below_and_above_the_true_value():
    q, p = random_chain(30, 7)
    truth = exact_chain(q).irreversibility
    found = [irreversibility(sample_text(p, 4000, seed), 30, seed=seed) for seed in range(12)]
    assert np.mean([f.heldout.value for f in found]) < truth < np.mean([f.plug_in for f in found])
    bias = np.mean([f.plug_in for f in found]) - truth
    longer = [irreversibility(sample_text(p, 16000, seed), 30, seed=seed) for seed in range(3)]
    assert np.mean([f.plug_in for f in longer]) - truth < bias / 2
    # the held-out estimate is biased low, so its interval must not start above the truth
    assert sum(f.heldout.low > truth for f in found) <= 2
    for f in longer:
        assert f.heldout.low < f.heldout.value < f.heldout.high
        assert f.plug_in > f.coin + 5 * f.coin_spread


def test_irreversibility_of_a_reversible_text_matches_its_coin_level():
    q, _ = random_chain(40, 3)
    p = (q + q.T) / (q + q.T).sum(1, keepdims=True)
    found = [irreversibility(sample_text(p, 3000, seed), 40, seed=seed) for seed in range(8)]
    assert np.mean([f.heldout.value for f in found]) <= 0.002
    assert min(f.plug_in for f in found) > 0.03  # counts alone would claim irreversibility
    away = [(f.plug_in - f.coin) / f.coin_spread for f in found]
    assert abs(np.mean(away)) < 1.5
    assert max(map(abs, away)) < 4


def test_ring_and_parts_returns_parts_that_sum_to_the_ring():
    text = np.random.default_rng(0).integers(0, 9, 103)
    assert sum(
        (Counter(counts_by_pair(part)) for part in ring_and_parts(text, 9, 7)[1]), Counter()
    ) == count_ring_pairs(text.tolist())


def test_irreversibility_predicts_each_part_from_the_other_parts():
    text = (np.random.default_rng(1).integers(0, 6, 200) ** 2 // 6).tolist()
    parts = [Counter((text[t], text[(t + 1) % 200]) for t in range(a, b)) for a, b in pairwise((0, 50, 100, 150, 200))]
    expected = []
    for part in parts:
        rest = Counter(count_ring_pairs(text))
        rest.subtract(part)
        losses = [
            count * math.log(2 * (rest[i, j] + 0.5) / (rest[i, j] + rest[j, i] + 1)) if i != j else 0.0
            for (i, j), count in part.items()
        ]
        expected.append(sum(losses) / 50)
    found = irreversibility(np.array(text), 6, parts=4)
    half = 3.182446305 * np.std(expected, ddof=1) / 2  # Student's t of three degrees of freedom
    mean, heldout = np.mean(expected), found.heldout
    assert (heldout.value, heldout.low, heldout.high) == pytest.approx((mean, mean - half, mean + half), abs=1e-7)
    assert found == irreversibility(np.array(text, np.uint16), 6, parts=4)


def test_pair_counts_and_one_way_pairs_match_a_plain_loop():
    v = 25
    ids = np.random.default_rng(0).choice(v - 3, 3000, p=np.random.default_rng(9).dirichlet(np.ones(v - 3)))
    chain = Chain.of(ids, v)
    everything = np.array([(i, j) for i in range(v) for j in range(i + 1, v)])
    there, share, nats = pair_counts(chain, everything)
    assert nats.sum() == pytest.approx(chain.irreversibility, abs=1e-12)
    best = everything[np.argsort(-nats)[:5]]
    assert [{*pair} for pair in one_way_pairs(chain, 5).tolist()] == [{*pair} for pair in best.tolist()]
    follows = list(zip(ids.tolist(), np.roll(ids, -1).tolist(), strict=True))
    for k, (i, j) in enumerate(everything[:40].tolist()):
        assert (there[k], pair_counts(chain, [(j, i)])[0][0]) == (follows.count((i, j)), follows.count((j, i)))
        if i in ids:
            assert share[k] == pytest.approx(there[k] / np.count_nonzero(ids == i))
    last = pair_counts(chain, [(v - 1, 0)])
    assert (last[0].item(), last[2].item()) == (0, 0.0)
    assert np.isnan(last[1])


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (lambda: Chain.of([1, 9], 9), "token 9 is outside a vocabulary of 9"),
        (lambda: Chain.of([1], 9), "a text of 1 tokens has no pairs"),
        (lambda: Chain.of([], 9), "a text of 0 tokens"),
        (lambda: irreversibility(np.zeros(99, int), 9), "99 tokens in 10 parts"),
        (lambda: frequent(Chain.of([1, 1, 1], 3), 9), "again and again"),
    ],
)
def test_chain_irreversibility_and_frequent_refuse_unusable_texts(count, said):
    with pytest.raises(DataError, match=said):
        count()
