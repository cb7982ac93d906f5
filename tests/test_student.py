"""Quantiles of Student's t against printed tables, the power of its test against its definition."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from tiewise.core import student

DF = [*range(1, 13), 29, 30, 99, 500]
PRINTED = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 29: 2.045, 120: 1.980}  # Fisher & Yates, table III


@pytest.mark.parametrize("df", PRINTED)
def test_critical_value_is_the_quantile_of_the_tables(df):
    assert student.critical(df) == pytest.approx(PRINTED[df], abs=5e-4)
    assert student.critical(df, 0.5) == pytest.approx(stats.t.ppf(0.75, df), rel=1e-12)


def power(shift, df):
    """With S² = χ²/df: the mean over S of what the normal distribution finds against the critical value c·S."""
    c = student.critical(df)
    log = math.log(2) + df / 2 * math.log(df / 2) - math.lgamma(df / 2)

    def found(s):
        beyond = stats.norm.cdf(shift - c * s) + stats.norm.cdf(-shift - c * s)
        return beyond * math.exp(log + (df - 1) * math.log(s) - df * s * s / 2)

    spread = 10 / math.sqrt(2 * df)
    return integrate.quad(found, max(1e-300, 1 - spread), 1 + spread, epsabs=1e-12, limit=500)[0]


@pytest.mark.parametrize("df", DF)
def test_detectable_shift_has_the_stated_power(df):
    assert power(student.detectable(df), df) == pytest.approx(0.8, abs=1e-9)


def test_many_seeds_approach_the_normal_distribution():
    assert student.critical(100_000) == pytest.approx(stats.norm.ppf(0.975), rel=1e-4)
    assert student.detectable(100_000) == pytest.approx(stats.norm.ppf(0.975) + stats.norm.ppf(0.8), rel=1e-4)


@pytest.mark.parametrize("df", DF)
@pytest.mark.parametrize("t", [0.0, 0.3, -2.1, 12.7, 1e9])
def test_two_sided_p(t, df):
    assert student.two_sided(t, df) == pytest.approx(2 * stats.t.sf(abs(t), df), rel=1e-9, abs=1e-12)


def test_holm_on_figures_written_down():
    """By hand: 4·0.005, 3·0.01, 2·0.03, then 0.04 raised to the one before."""
    assert student.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert student.holm([0.6, 0.9]) == [1.0, 1.0]
    assert student.holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.sampled_from([0.01, 0.05, 0.2]))
def test_holm_rejects_what_stepping_down_rejects(p, alpha):
    rejected, left = set(), sorted(range(len(p)), key=lambda i: p[i])
    while left and p[left[0]] * len(left) < alpha:
        rejected.add(left.pop(0))
    assert {i for i, x in enumerate(student.holm(p)) if x < alpha} == rejected
