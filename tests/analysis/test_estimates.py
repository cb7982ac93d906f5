"""Intervals over values, and over pairs of models: how often they hold the truth, drawn 4,000 times."""

import math
from itertools import combinations, permutations

import numpy as np
import pytest
from scipy import stats

from tiewise.analysis.estimates import jackknife, mean_interval

DRAWS = 4000
KINDS = {"models": (1.0, 0.0), "pairs": (0.0, 1.0), "both": (1.0, 1.0)}  # deviations of models' and pairs' own effects


def covered(of_models, of_pairs, n, beside, partners=None):
    """Share of draws whose interval holds the truth, 0. A pair (i, j) scores aᵢ + bⱼ + noise; b is a, by default."""
    draw = np.random.default_rng([n, len(beside), int(of_models), int(of_pairs)])
    a = of_models * draw.standard_normal((DRAWS, n))
    b = a if partners is None else partners * a + (1 - partners**2) ** 0.5 * of_models * draw.standard_normal(a.shape)
    scores = a[:, [i for i, _ in beside]] + b[:, [j for _, j in beside]]
    scores += of_pairs * draw.standard_normal(scores.shape)
    kept = {tuple(s for s in range(n) if s != out): [out not in pair for pair in beside] for out in (None, *range(n))}
    weights = {seeds: np.array(which) / sum(which) for seeds, which in kept.items()}
    found = [jackknife(lambda seeds, row=row: row @ weights[tuple(seeds)], range(n)) for row in scores]
    return np.mean([x.low <= 0 <= x.high for x in found])


@pytest.mark.parametrize("n", [3, 5, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_pairs_of_seeds_trained_again(kind, n):
    share = covered(*KINDS[kind], n, list(combinations(range(n), 2)))
    assert share >= 0.93
    if kind == "models":
        assert share <= 0.97


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_two_arms_whose_models_of_one_seed_are_alike_or_not(alike, n):
    """A tied model beside the untied models of all other seeds."""
    assert 0.93 <= covered(1.0, 0.0, n, list(permutations(range(n), 2)), alike) <= 0.97


def test_what_the_pairs_taken_as_independent_would_cover():
    """Pairs 1→2, 2→3, … with Student's interval fall far short: the simulation can tell."""
    for n in (3, 5, 9):
        a = np.random.default_rng(n).standard_normal((DRAWS, n))
        pairs = a + np.roll(a, -1, axis=1)
        half = stats.t.ppf(0.975, n - 1) * pairs.std(1, ddof=1) / n**0.5
        assert np.mean(np.abs(pairs.mean(1)) <= half) < 0.86


def test_the_jackknife_of_a_mean_is_students_interval():
    values = np.array([0.3, -1.2, 2.5, 0.9, 4.0])
    found = jackknife(lambda kept: values[list(kept)].mean(), range(5))
    low, high = stats.t.interval(0.95, 4, values.mean(), stats.sem(values))
    assert (found.value, found.low, found.high) == pytest.approx((values.mean(), low, high))
    assert np.isnan(jackknife(lambda kept: 1.0, range(2)).low)
    assert np.isnan(jackknife(lambda kept: np.nan if len(kept) < 4 else 1.0, range(4)).value)


def test_intervals_of_means_are_students():
    found = mean_interval([1.0, 2.0, 4.0])
    low, high = stats.t.interval(0.95, 2, 7 / 3, stats.sem([1, 2, 4]))
    assert (found.value, found.low, found.high) == pytest.approx((7 / 3, low, high))
    assert math.isnan(mean_interval([1.0]).low)
    assert math.isnan(mean_interval([1.0, math.nan]).value)
    assert mean_interval([]).rows == 0
