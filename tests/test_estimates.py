"""Intervals: how often they hold the truth, drawn 4,000 times; Student's t against tables and its own definition."""

import math
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from tiewise.core.estimates import critical, detectable, holm, jackknife, mean_interval, two_sided, wilson

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


def test_wilson_covers():
    generator = np.random.default_rng(0)
    for true in (0.01, 0.3, 0.9):
        draws = generator.binomial(200, true, DRAWS) / 200
        covered = np.mean([low <= true <= high for low, high in (wilson(share, 200) for share in draws)])
        assert 0.93 < covered < 0.98
    assert (wilson(0.0, 100)[0], wilson(1.0, 100)[1]) == pytest.approx((0.0, 1.0))


PRINTED = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 29: 2.045, 120: 1.980}  # Fisher & Yates, table III


def power(shift, df):
    """With S² = χ²/df: the mean over S of what the normal distribution finds against the critical value c·S."""
    c = critical(df)
    log = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)

    def found(s):
        beyond = stats.norm.cdf(shift - c * s) + stats.norm.cdf(-shift - c * s)
        return beyond * math.exp(log + (df - 1) * math.log(s) - df * s * s / 2)

    spread = 10 / math.sqrt(2 * df)
    return integrate.quad(found, max(1e-300, 1 - spread), 1 + spread, epsabs=1e-12, limit=500)[0]


@pytest.mark.parametrize("df", [*range(1, 13), 29, 30, 99, 500])
def test_students_t(df):
    assert critical(df) == pytest.approx(PRINTED.get(df, stats.t.ppf(0.975, df)), abs=5e-4)
    assert power(detectable(df), df) == pytest.approx(0.8, abs=1e-9)
    for t in (0.0, 0.3, -2.1, 12.7, 1e9):
        assert two_sided(t, df) == pytest.approx(2 * stats.t.sf(abs(t), df), rel=1e-9, abs=1e-12)


def test_many_seeds_approach_the_normal_distribution():
    assert critical(100_000) == pytest.approx(stats.norm.ppf(0.975), rel=1e-4)
    assert detectable(100_000) == pytest.approx(stats.norm.ppf(0.975) + stats.norm.ppf(0.8), rel=1e-4)


def test_holm_on_figures_written_down():
    """By hand: 4·0.005, 3·0.01, 2·0.03, then 0.04 raised to the one before."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.sampled_from([0.01, 0.05, 0.2]))
def test_holm_rejects_what_stepping_down_rejects(p, alpha):
    rejected, left = set(), sorted(range(len(p)), key=lambda i: p[i])
    while left and p[left[0]] * len(left) < alpha:
        rejected.add(left.pop(0))
    assert {i for i, x in enumerate(holm(p)) if x < alpha} == rejected
