"""Test the coverage of intervals over 4,000 draws, and Student's t against printed tables and scipy."""

import math
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from tiewise.core.estimates import (
    correlation_interval,
    critical_t,
    detectable_difference,
    holm_adjusted,
    holm_levels,
    jackknife,
    mean_interval,
    paired_bootstrap,
    ratio_interval,
    two_sided_p,
    wilson_interval,
)

DRAWS = 4000
KINDS = {"models": (1.0, 0.0), "pairs": (0.0, 1.0), "both": (1.0, 1.0)}  # deviations of models and pairs


def jackknife_coverage(of_models, of_pairs, n, seed_pairs, partners=None):
    """Return the share of draws whose interval contains the truth, 0.

    A pair (i, j) scores aᵢ + bⱼ + noise. By default b is a; otherwise `partners` is their correlation.
    """
    draw = np.random.default_rng([n, len(seed_pairs), int(of_models), int(of_pairs)])
    a = of_models * draw.standard_normal((DRAWS, n))
    b = a if partners is None else partners * a + (1 - partners**2) ** 0.5 * of_models * draw.standard_normal(a.shape)
    scores = a[:, [i for i, _ in seed_pairs]] + b[:, [j for _, j in seed_pairs]]
    scores += of_pairs * draw.standard_normal(scores.shape)
    indicators = {
        tuple(s for s in range(n) if s != out): [out not in pair for pair in seed_pairs] for out in (None, *range(n))
    }
    weights = {seeds: np.array(which) / sum(which) for seeds, which in indicators.items()}
    intervals = [jackknife(lambda seeds, row=row: row @ weights[tuple(seeds)], range(n)) for row in scores]
    return np.mean([x.low <= 0 <= x.high for x in intervals])


@pytest.mark.parametrize("n", [3, 5, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_jackknife_interval_over_seed_pairs_covers_truth(kind, n):
    share = jackknife_coverage(*KINDS[kind], n, list(combinations(range(n), 2)))
    assert share >= 0.93
    if kind == "models":
        assert share <= 0.97


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("alike", [0.0, 1.0])
def test_jackknife_interval_of_two_arms_covers_truth_for_any_correlation(alike, n):
    """Compare each tied model with the untied models of all other seeds."""
    assert 0.93 <= jackknife_coverage(1.0, 0.0, n, list(permutations(range(n), 2)), alike) <= 0.97


def test_student_interval_of_chained_pairs_covers_too_little():
    """If pairs 1→2, 2→3, … count as independent, the simulation detects that Student's interval covers too little."""
    for n in (3, 5, 9):
        a = np.random.default_rng(n).standard_normal((DRAWS, n))
        pairs = a + np.roll(a, -1, axis=1)
        half = stats.t.ppf(0.975, n - 1) * pairs.std(1, ddof=1) / n**0.5
        assert np.mean(np.abs(pairs.mean(1)) <= half) < 0.86


def test_jackknife_of_mean_equals_student_interval():
    values = np.array([0.3, -1.2, 2.5, 0.9, 4.0])
    interval = jackknife(lambda kept: values[list(kept)].mean(), range(5))
    low, high = stats.t.interval(0.95, 4, values.mean(), stats.sem(values))
    assert (interval.value, interval.low, interval.high) == pytest.approx((values.mean(), low, high))
    assert np.isnan(jackknife(lambda kept: 1.0, range(2)).low)
    assert np.isnan(jackknife(lambda kept: np.nan if len(kept) < 4 else 1.0, range(4)).value)


def test_mean_interval_equals_student_interval_of_scipy():
    interval = mean_interval([1.0, 2.0, 4.0])
    low, high = stats.t.interval(0.95, 2, 7 / 3, stats.sem([1, 2, 4]))
    assert (interval.value, interval.low, interval.high) == pytest.approx((7 / 3, low, high))
    assert math.isnan(mean_interval([1.0]).low)
    assert math.isnan(mean_interval([1.0, math.nan]).value)
    assert mean_interval([]).rows == 0


def synthetic_documents(draw, sigma):
    """Return log-normal lengths of 2,000 documents, and their numbers of covered tokens at a share that varies."""
    lengths = np.maximum(draw.lognormal(6, sigma, 2000).astype(int), 20)
    shares = draw.beta(14, 6, len(lengths))
    return lengths, draw.binomial(lengths, shares)


@pytest.mark.parametrize("sigma", [0.3, 0.8, 1.27])  # the built-in text: 1.27
@pytest.mark.parametrize("documents", [12, 40, 150])
def test_ratio_interval_covers_share_for_documents_of_unequal_length(documents, sigma):
    """Draw the documents 2,000 times. Intervals from independent blocks of tokens would cover half of the time."""
    draw = np.random.default_rng([documents, int(100 * sigma)])
    lengths, covered = synthetic_documents(draw, sigma)
    true, hits = covered.sum() / lengths.sum(), []
    for _ in range(2000):
        chosen = draw.integers(0, len(lengths), documents)
        interval = ratio_interval(covered[chosen], lengths[chosen])
        assert interval.value == pytest.approx(covered[chosen].sum() / lengths[chosen].sum())
        if not math.isnan(interval.low):
            hits.append(interval.low <= true <= interval.high)
    assert 0.925 <= np.mean(hits) <= 0.985
    assert len(hits) > 1000


@pytest.mark.parametrize(("n", "fails", "share"), [(5, 0.0, 0.95), (5, 0.2, 0.87), (3, 0.2, 0.90)])
def test_mean_interval_covers_less_if_a_seed_fails(n, fails, share):
    """The docstring of `mean_interval` states these shares: one seed in five lies 5 standard deviations off."""
    draw = np.random.default_rng(n)
    values = draw.standard_normal((DRAWS, n)) + 5 * (draw.random((DRAWS, n)) < fails)
    intervals = [mean_interval(row) for row in values]
    assert np.mean([e.low <= 5 * fails <= e.high for e in intervals]) == pytest.approx(share, abs=0.02)


def test_ratio_interval_is_nan_for_few_or_dominated_units():
    assert math.isnan(ratio_interval([1, 2, 3, 4], [10, 10, 10, 10]).low)
    assert not math.isnan(ratio_interval([1, 2, 3, 4, 5], [10, 10, 10, 10, 10]).low)
    assert math.isnan(ratio_interval(np.ones(40), [1000, *[1] * 39]).low)
    assert math.isnan(ratio_interval([], []).value)


def bootstrap_coverage(draw, times=600):
    """Return how often the bootstrap interval of `draw`'s values [n] contains their mean 0, and percentiles too."""
    hits, percentiles = [], []
    for seed in range(times):
        values = draw()
        interval = paired_bootstrap(np.zeros(len(values)), values, seed, resamples=400)
        assert interval.value == pytest.approx(values.mean())
        hits.append(interval.low <= 0 <= interval.high)
        means = values[np.random.default_rng(seed).integers(0, len(values), (400, len(values)))].mean(1)
        low, high = np.quantile(means, [0.025, 0.975])
        percentiles.append(low <= 0 <= high)
    return np.mean(hits), np.mean(percentiles)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "skewed_at_least"), [(8, 0.84), (20, 0.89), (100, 0.91)])
def test_paired_bootstrap_covers_few_rows_better_than_percentiles(n, skewed_at_least):
    """Percentiles of the resampled mean cover 90 % over 20 normal rows, and 85 % over log-normal ones."""
    generator = np.random.default_rng(n)
    covers, by_percentiles = bootstrap_coverage(lambda: generator.standard_normal(n))
    skewed, by_percentiles_skewed = bootstrap_coverage(lambda: np.exp(generator.standard_normal(n)) - math.exp(0.5))
    assert 0.92 <= covers <= 0.975
    assert skewed >= skewed_at_least
    if n <= 20:
        assert covers > by_percentiles + 0.01
        assert skewed > by_percentiles_skewed + 0.03


def test_paired_bootstrap_of_ten_rows_is_as_wide_as_student_interval():
    """The values are normal. Percentiles of the resampled mean of ten values are a fifth narrower."""
    generator, wide = np.random.default_rng(0), []
    for seed in range(20):
        values = generator.standard_normal(10)
        interval, student = paired_bootstrap(np.zeros(10), values, seed), mean_interval(values)
        wide.append((interval.high - interval.low) / (student.high - student.low))
    assert 0.95 < np.mean(wide) < 1.15


def test_paired_bootstrap_has_zero_width_for_constants_and_nan_for_few_rows():
    same = paired_bootstrap(np.zeros(5), np.ones(5))
    assert (same.value, same.low, same.high) == (1, 1, 1)
    assert math.isnan(paired_bootstrap(np.zeros(1), np.ones(1)).low)
    assert math.isnan(paired_bootstrap(np.zeros(2), np.array([1.0, 2.0])).low)  # NaN, not zero width


def test_correlation_interval_covers_normal_rows_but_not_heavy_tails():
    """With ρ = 0.5 the interval is right for normal rows and too narrow for elliptical t with 4 degrees."""
    draw, hits = np.random.default_rng(0), {"normal": [], "t4": []}
    for _ in range(1500):
        rows = draw.standard_normal((200, 2)) @ np.linalg.cholesky([[1, 0.5], [0.5, 1]]).T
        heavy = rows / np.sqrt(draw.chisquare(4, (200, 1)) / 4)
        for name, values in (("normal", rows), ("t4", heavy)):
            interval = correlation_interval(float(np.corrcoef(values.T)[0, 1]), 200)
            hits[name].append(interval.low <= 0.5 <= interval.high)
    assert 0.935 <= np.mean(hits["normal"]) <= 0.965
    assert 0.71 <= np.mean(hits["t4"]) <= 0.84


def test_wilson_interval_covers_true_share():
    generator = np.random.default_rng(0)
    for true in (0.01, 0.3, 0.9):
        draws = generator.binomial(200, true, DRAWS) / 200
        covered = np.mean([low <= true <= high for low, high in (wilson_interval(share, 200) for share in draws)])
        assert 0.93 < covered < 0.98
    assert (wilson_interval(0.0, 100)[0], wilson_interval(1.0, 100)[1]) == pytest.approx((0.0, 1.0))


PRINTED = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 29: 2.045, 120: 1.980}  # Fisher & Yates, table III


def power(shift, df, c):
    """Return the chance that a normal value with mean `shift` exceeds c·S in size, averaged over S² = χ²/df."""
    return mean_over_errors(lambda s: stats.norm.cdf(shift - c * s) + stats.norm.cdf(-shift - c * s), df)


def mean_over_errors(function, df):
    """Return the mean of a function of S = √(χ²/df)."""
    log = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)

    def weighted(s):
        return function(s) * math.exp(log + (df - 1) * math.log(s) - df * s * s / 2)

    spread = 10 / math.sqrt(2 * df)
    return integrate.quad(weighted, max(1e-300, 1 - spread), 1 + spread, epsabs=1e-10, limit=500)[0]


@pytest.mark.parametrize("df", [*range(1, 13), 29, 30, 99, 500])
def test_critical_t_and_p_value_match_printed_table_and_scipy(df):
    assert critical_t(df) == pytest.approx(PRINTED.get(df, stats.t.ppf(0.975, df)), abs=5e-4)
    for t in (0.0, 0.3, -2.1, 12.7, 1e9):
        assert two_sided_p(t, df) == pytest.approx(2 * stats.t.sf(abs(t), df), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("df", "level"),
    [
        (2, 0.05),
        (4, 0.05 / 6),
        pytest.param(2, 0.05 / 12, marks=pytest.mark.slow),
        pytest.param(99, 0.05, marks=pytest.mark.slow),
    ],
)
def test_detectable_difference_has_80_percent_power(df, level):
    """Two standard errors are estimates: the unit of the difference, and the error in the test."""
    c = stats.t.ppf(1 - level / 2, df)
    assert critical_t(df, level) == pytest.approx(c, rel=1e-9)
    mean_power = mean_over_errors(lambda s: power(detectable_difference(df, level) * s, df, c), df)
    assert mean_power == pytest.approx(0.8, abs=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("seeds", "rows"), [(2, 1), (3, 1), (3, 4), (5, 6), (5, 20)])
def test_simulated_study_finds_detectable_difference_in_80_percent_of_runs(seeds, rows):
    """One study estimates the error. Another one tests one such difference among rows without any by Holm's method."""
    draw, sigma, times = np.random.default_rng([seeds, rows]), 0.02, 4000
    detected = 0
    for _ in range(times):
        first = sigma * draw.standard_normal(seeds)
        error = first.std(ddof=1) / math.sqrt(seeds)
        study = sigma * draw.standard_normal((rows, seeds))
        study[0] += detectable_difference(seeds - 1, 0.05 / rows) * error
        p = stats.ttest_1samp(study, 0.0, axis=1).pvalue
        detected += is_rejected_by_step_down(p.tolist(), 0.05, 0)
    assert detected / times == pytest.approx(0.8, abs=4 * math.sqrt(0.8 * 0.2 / times) + 0.01)


def is_rejected_by_step_down(p, alpha, place):
    """Return whether Holm's procedure rejects the test at a place, from its definition."""
    left = sorted(range(len(p)), key=lambda i: p[i])
    while left and p[left[0]] * len(left) < alpha:
        if left.pop(0) == place:
            return True
    return False


@given(st.lists(st.floats(0, 0.2), min_size=1, max_size=8), st.integers(0, 7))
def test_holm_levels_are_thresholds_of_step_down_procedure(p, place):
    place %= len(p)
    level = holm_levels(p)[place]
    for p_value, rejected in ((level * (1 - 1e-9), True), (level * (1 + 1e-9), False)):
        p_values = [*p[:place], p_value, *p[place + 1 :]]
        assert is_rejected_by_step_down(p_values, 0.05, place) == rejected


def test_critical_t_and_detectable_difference_approach_normal_limits():
    assert critical_t(100_000) == pytest.approx(stats.norm.ppf(0.975), rel=1e-4)
    assert detectable_difference(100_000) == pytest.approx(stats.norm.ppf(0.975) + stats.norm.ppf(0.8), rel=1e-4)


def test_holm_adjusted_matches_values_computed_by_hand():
    """By hand: 4·0.005, 3·0.01, 2·0.03, then 0.04 raised to the previous value."""
    assert holm_adjusted([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm_adjusted([0.6, 0.9]) == [1.0, 1.0]
    assert holm_adjusted([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.sampled_from([0.01, 0.05, 0.2]))
def test_holm_adjusted_rejects_what_step_down_procedure_rejects(p, alpha):
    rejected, left = set(), sorted(range(len(p)), key=lambda i: p[i])
    while left and p[left[0]] * len(left) < alpha:
        rejected.add(left.pop(0))
    assert {i for i, x in enumerate(holm_adjusted(p)) if x < alpha} == rejected
