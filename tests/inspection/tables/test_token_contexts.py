"""Left and right contexts of tokens against scipy, simulated tosses and known texts."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from tiny_tables import random_chain, sample_text

from tiewise.core.errors import DataError
from tiewise.inspection.sections.tokens import around_tokens
from tiewise.inspection.tables.bigram_counts import Chain, contexts, tossed
from tiewise.inspection.tables.token_texts import Groups


def count_ring_pairs(text, vocabulary):
    made = np.zeros((vocabulary, vocabulary))
    for before, after in zip(text, np.roll(text, -1), strict=True):
        made[before, after] += 1
    return made


@given(st.lists(st.integers(0, 6), min_size=20, max_size=120), st.integers(0, 3))
def test_contexts_divergence_matches_scipy_for_every_token(tokens, more):
    vocabulary = 7 + more
    found = contexts(np.array(tokens), vocabulary, parts=2)
    dense = count_ring_pairs(np.array(tokens), vocabulary)
    for token in range(vocabulary):
        if dense[token].sum() == 0:
            assert np.isnan(found.plug_in[token])
            assert found.counts[token] == 0
        else:
            expected = jensenshannon(dense[:, token], dense[token]) ** 2
            assert found.plug_in[token] == pytest.approx(np.nan_to_num(expected), abs=1e-9)
            assert -1e-12 <= found.plug_in[token] <= np.log(2) + 1e-12


def test_contexts_mean_divergence_over_occurrences_equals_the_irreversibility():
    text = np.random.default_rng(0).zipf(1.6, 4000) % 60
    found = contexts(text, 60)
    assert found.weighted(found.plug_in) == pytest.approx(Chain.of(text, 60).irreversibility, abs=1e-12)


@pytest.mark.parametrize("m", [1, 2, 3, 7, 10])
def test_tossed_matches_the_enumeration_of_all_tosses(m):
    values = []
    for tosses in product((0, 1), repeat=m):
        parts = [part for part in (sum(tosses), m - sum(tosses)) if part]
        values.append(sum(part * np.log(2 * part / m) for part in parts))
    assert tossed(m) == pytest.approx((np.mean(values), np.var(values)), abs=1e-12)


def test_tossed_is_continuous_where_it_changes_to_its_limit():
    assert tossed(1000) == pytest.approx(tossed(1001), abs=1e-5)


def test_contexts_coin_level_matches_simulated_tosses():
    """Toss the direction of every pair: compare mean and deviation of each token's divergence per occurrence."""
    text = np.random.default_rng(1).zipf(1.5, 3000) % 25
    found = contexts(text, 25)
    generator = np.random.default_rng(2)
    dense = count_ring_pairs(text, 25)
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
    """Sample a reversible chain on a weighted graph: π_i P_ij = π_j P_ji."""
    weights = np.random.default_rng(seed).gamma(0.5, size=(states, states))
    weights += weights.T
    return sample_text(weights / weights.sum(1, keepdims=True), length, seed)


def summarise_by_group(found, groups):
    """Return the measurement, its listing rows by name, and the levels of its curves by estimate."""
    said = around_tokens(found, {"script": groups}, None)
    rows = {row[0]: row for row in said.listings[0].rows}
    return said, rows, {curve.which: curve.y for curve in said.curves}


def test_around_tokens_shows_no_difference_for_a_reversible_text():
    found = contexts(reversible_text(40, 20_000, 3), 40)
    said, rows, levels = summarise_by_group(found, Groups(("all",), np.zeros(40, np.int64)))
    excess, guessed = said["excess over tossed directions, script all"], said["left and right contexts differ by"]
    assert excess.low < 0 < excess.high
    assert levels["counts"][0] > 0.01  # counts alone would show a difference
    assert guessed.low < 0
    assert guessed.value < 0.001
    assert float(rows["all"][-1].rstrip("%")) < 20


def test_around_tokens_shows_the_full_difference_for_a_directed_text():
    found = contexts(np.tile(np.arange(30), 100), 40)
    assert found.plug_in[:30] == pytest.approx(np.full(30, np.log(2)))
    assert np.isnan(found.plug_in[30:]).all()
    said, rows, _ = summarise_by_group(found, Groups(("first", "second", "empty"), np.repeat([0, 1, 2], [10, 20, 10])))
    assert said["left and right contexts differ by"].low > 0.6
    assert {name: (row[2], row[-1]) for name, row in rows.items()} == {
        "first": ("1,000", "100.0%"),
        "second": ("2,000", "100.0%"),
    }
    assert all(said[f"excess over tossed directions, script {name}"].low > 0.6 for name in rows)


def test_contexts_estimates_are_below_and_above_the_true_divergence():
    """The oracle is the divergence computed from the transition matrix of a known chain."""
    q, moves = random_chain(30, 5)
    truth = np.sum(q * np.log(2 * q / (q + q.T)))
    found = contexts(sample_text(moves, 15_000, 5), 30)
    assert found.by_part.mean() < truth < found.weighted(found.plug_in)


def test_around_tokens_lists_frequent_one_sided_tokens():
    text = np.concatenate([reversible_text(20, 4000, 6), np.tile([20, 21, 22], 200)])
    rows = around_tokens(contexts(text, 23), {}, None).listings[-1].rows
    assert {row[0] for row in rows[:3]} == {"#20", "#21", "#22"}
    assert around_tokens(contexts(text[:300], 23), {}, None).listings[-1].rows == ()


def test_contexts_refuses_short_texts_and_tokens_outside_the_vocabulary():
    with pytest.raises(DataError, match="9 tokens in 2 parts; give 10 tokens or more"):
        contexts(np.arange(9), 9, parts=2)
    with pytest.raises(DataError, match="token 50 is outside a vocabulary of 50"):
        contexts(np.arange(200) % 51, 50)
