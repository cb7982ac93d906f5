"""Contexts against scipy, against tossed coins, and on planted texts with and without a direction."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon

from tiewise.analysis.bigram_counts import Chain
from tiewise.analysis.token_contexts import _toss, contexts, furthest, grouped
from tiewise.analysis.token_texts import Groups
from tiewise.core.errors import DataError


def ring_counts(text, vocabulary):
    made = np.zeros((vocabulary, vocabulary))
    for before, after in zip(text, np.roll(text, -1), strict=True):
        made[before, after] += 1
    return made


@given(st.lists(st.integers(0, 6), min_size=20, max_size=120), st.integers(0, 3))
def test_divergence_is_scipys_token_by_token(tokens, more):
    vocabulary = 7 + more
    found = contexts(np.array(tokens), vocabulary, parts=2)
    dense = ring_counts(np.array(tokens), vocabulary)
    for token in range(vocabulary):
        if dense[token].sum() == 0:
            assert np.isnan(found.plug_in[token])
            assert found.counts[token] == 0
        else:
            expected = jensenshannon(dense[:, token], dense[token]) ** 2
            assert found.plug_in[token] == pytest.approx(np.nan_to_num(expected), abs=1e-9)
            assert -1e-12 <= found.plug_in[token] <= np.log(2) + 1e-12


def test_its_mean_over_occurrences_is_the_irreversibility():
    text = np.random.default_rng(0).zipf(1.6, 4000) % 60
    assert contexts(text, 60).weighted(contexts(text, 60).plug_in) == pytest.approx(
        Chain.of(text, 60).irreversibility, abs=1e-12
    )


@pytest.mark.parametrize("m", [1, 2, 3, 7, 10])
def test_tossed_pairs_equal_all_tosses(m):
    values = []
    for tosses in product((0, 1), repeat=m):
        parts = [part for part in (sum(tosses), m - sum(tosses)) if part]
        values.append(sum(part * np.log(2 * part / m) for part in parts))
    assert _toss(m) == pytest.approx((np.mean(values), np.var(values)), abs=1e-12)


def test_many_tosses_meet_the_limit():
    mean, variance = _toss(1000)
    assert mean == pytest.approx(0.5 + 1 / 4000, abs=1e-6)
    assert variance == pytest.approx(0.5 + 1 / 2000, abs=1e-5)


def test_coin_equals_simulated_tosses():
    """Directions of every pair tossed by hand: mean and deviation of each token's divergence, per its own count."""
    text = np.random.default_rng(1).zipf(1.5, 3000) % 25
    found = contexts(text, 25)
    generator = np.random.default_rng(2)
    dense = ring_counts(text, 25)
    both, upper = dense + dense.T, np.triu(np.ones((25, 25), bool), 1)
    drawn = []
    for _ in range(800):
        there = np.where(upper, generator.binomial(both.astype(int), 0.5), 0)
        tossed = there + np.where(upper, both - there, 0).T
        with np.errstate(divide="ignore", invalid="ignore"):
            nats = np.nan_to_num(tossed * np.log(2 * tossed / both))
        drawn.append((nats.sum(0) + nats.sum(1)) / (2 * dense.sum(1)))
    drawn = np.array(drawn)
    noise = drawn.std(0) / np.sqrt(len(drawn))
    assert (np.abs(drawn.mean(0) - found.coin) < 5 * noise + 1e-12).all()
    assert found.coin_deviation == pytest.approx(drawn.std(0), rel=0.15)


def reversible_text(states, length, seed):
    """A walk on a weighted graph: π_i P_ij = π_j P_ji."""
    generator = np.random.default_rng(seed)
    weights = generator.gamma(0.5, size=(states, states))
    weights += weights.T
    rising = np.cumsum(weights / weights.sum(1, keepdims=True), axis=1)
    text, draws = np.zeros(length, np.int64), generator.random(length)
    for at in range(1, length):
        text[at] = min(np.searchsorted(rising[text[at - 1]], draws[at]), states - 1)
    return text


def test_a_reversible_text_shows_no_difference():
    found = contexts(reversible_text(40, 20_000, 3), 40)
    whole = Groups(("all",), np.zeros(40, np.int64))
    (group,) = grouped(found, whole)
    assert group.excess.low < 0 < group.excess.high
    assert group.plug_in.value > 0.01  # what counts alone would have claimed
    assert found.guessed.low < 0
    assert found.guessed.value < 0.001
    assert group.beyond < 0.2


def test_a_directed_text_shows_all_of_it():
    text = np.tile(np.arange(30), 100)
    found = contexts(text, 40)
    assert found.plug_in[:30] == pytest.approx(np.full(30, np.log(2)))
    assert np.isnan(found.plug_in[30:]).all()
    assert found.guessed.low > 0.6
    bins = Groups(("first", "second", "empty"), np.repeat([0, 1, 2], [10, 20, 10]))
    groups = grouped(found, bins)
    assert [group.label for group in groups] == ["first", "second"]
    assert all(group.beyond == 1.0 and group.excess.low > 0.6 for group in groups)
    assert [group.occurrences for group in groups] == [1000, 2000]


def test_the_truth_lies_between_counts_and_guesses():
    """A known chain: its own divergence, from its transition matrix, between the two estimates from a text."""
    generator = np.random.default_rng(5)
    moves = generator.dirichlet(np.full(30, 0.3), size=30)
    rising = np.cumsum(moves, axis=1)
    text, draws = np.zeros(15_000, np.int64), generator.random(15_000)
    for at in range(1, len(text)):
        text[at] = min(np.searchsorted(rising[text[at - 1]], draws[at]), 29)
    values, vectors = np.linalg.eig(moves.T)
    steady = np.abs(vectors[:, np.argmax(values.real)].real)
    joint = (steady / steady.sum())[:, None] * moves
    truth = np.nansum(joint * np.log(2 * joint / (joint + joint.T)))
    found = contexts(text, 30)
    assert found.guessed.value < truth < found.weighted(found.plug_in)


def test_furthest_names_frequent_one_sided_tokens():
    noise = reversible_text(20, 4000, 6)
    text = np.concatenate([noise, np.tile([20, 21, 22], 200)])
    found = contexts(text, 23)
    assert set(furthest(found, least=100, top=3).tolist()) == {20, 21, 22}
    assert furthest(found, least=10**6, top=3).tolist() == []


def test_too_short_a_text_and_foreign_tokens():
    with pytest.raises(DataError, match="9 tokens in 2 parts; give 10 tokens or more"):
        contexts(np.arange(9), 9, parts=2)
    with pytest.raises(DataError, match="token 50 is outside a vocabulary of 50"):
        contexts(np.arange(200) % 51, 50)
