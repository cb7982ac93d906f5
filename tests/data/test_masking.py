"""Masking by its statistics, and what it may never do."""

import numpy as np
import pytest

from tiewise.core.errors import DataError
from tiewise.data.training_rows import IGNORED, Masking, choose, mask


def draws(seed=0):
    return np.random.default_rng(seed)


def within(found, expected, count, sigmas=5):
    """Whether a share of `count` draws is what is expected, up to chance."""
    return abs(found - expected) < sigmas * np.sqrt(max(expected * (1 - expected), 1e-9) / count)


def test_inputs_are_replaced_80_10_10():
    draw, options = draws(1), Masking()
    ids = draw.integers(4, 1000, 200_000)
    chosen = np.zeros(len(ids), bool)
    chosen[::3] = True
    inputs, labels = mask(ids, chosen, 2, np.arange(4, 1000), options, draw)
    assert np.array_equal(inputs[~chosen], ids[~chosen])
    assert np.array_equal(labels, np.where(chosen, ids, IGNORED))
    masked, same = inputs[chosen] == 2, inputs[chosen] == ids[chosen]
    count, by_chance = chosen.sum(), 0.1 / 996
    assert within(masked.mean(), 0.8, count)
    assert within(same.mean(), 0.1 + by_chance, count)
    others = inputs[chosen][~masked & ~same]
    assert within(len(others) / count, 0.1 - by_chance, count)
    spread = np.bincount(others, minlength=1000)[4:]
    assert others.min() >= 4
    assert (spread - spread.mean()).std() < 1.3 * np.sqrt(spread.mean())  # uniform: the variance of a count is its mean


@pytest.mark.parametrize(("masked", "random", "expected"), [(1, 0, "mask"), (0, 0, "same"), (0, 1, "random")])
def test_shares_at_their_ends(masked, random, expected):
    ids = np.arange(100, 1100)
    options = Masking(masked=masked, random=random)
    inputs, _ = mask(ids, np.ones(1000, bool), 2, 50, options, draws())
    assert {"mask": (inputs == 2).all(), "same": (inputs == ids).all(), "random": (inputs < 50).all()}[expected]


@pytest.mark.parametrize("whole", [True, False])
def test_share_of_tokens(whole):
    draw = draws(2)
    total = taken = 0
    for _ in range(300):
        begins = draw.random(120) < (0.6 if whole else 1)
        begins[[1, 61]] = True
        words = np.cumsum(begins)
        words[[0, 60, 119]] = -1
        chosen = choose(words, Masking(), draw)
        assert not chosen[words < 0].any()
        for number in np.unique(words[words >= 0]):
            assert len(set(chosen[words == number])) == 1  # a word is taken whole or not at all
        total += (words >= 0).sum()
        taken += chosen.sum()
        assert chosen.sum() <= round(0.15 * (words >= 0).sum())
    assert taken / total == pytest.approx(0.15, abs=0.004)


def test_runs_have_the_papers_lengths():
    assert Masking().lengths == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    draw, options = draws(3), Masking(share=0.004)
    counts = np.zeros(7)
    for _ in range(400):
        chosen = choose(np.arange(5000), options, draw)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen, [0]]).astype(int)))
        counts += np.bincount(edges[1::2] - edges[::2], minlength=7)[:7]
    found = counts / counts.sum()  # a few runs meet by chance, and the last of 20 tokens is cut short
    assert found[1:4] == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.03)
    assert found[4:].sum() < 0.01


def test_no_run_goes_over_a_gap():
    options, draw = Masking(share=0.5), draws(4)

    def across(words):
        return np.mean([choose(np.array(words), options, draw)[1:3].all() for _ in range(2500)])

    # of four words two are taken; the middle two together only by two runs of one, or by one run over no gap
    assert across([0, 1, 3, 4]) < across([0, 1, 2, 3]) - 0.05


def test_one_token_at_least_and_nothing_of_nothing():
    assert choose(np.array([-1, 0, -1]), Masking(), draws()).tolist() == [False, True, False]
    one = choose(np.zeros(50, int), Masking(), draws())  # one word, longer than its share
    assert one.tolist() == [True] * 8 + [False] * 42
    assert not choose(np.array([-1, -1]), Masking(), draws()).any()


@pytest.mark.parametrize(
    "wrong", [{"share": 0}, {"share": 1.1}, {"masked": 0.8, "random": 0.3}, {"longest": 0}, {"random": float("nan")}]
)
def test_refused(wrong):
    with pytest.raises(DataError):
        Masking(**wrong)
