"""Quantiles and power of Student's t against scipy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tiewise.core import student

DF = [*range(1, 13), 29, 30, 99, 500]


@pytest.mark.parametrize("df", DF)
def test_critical_value_is_the_quantile(df):
    assert student.critical(df) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-12)
    assert student.critical(df, 0.5) == pytest.approx(stats.t.ppf(0.75, df), rel=1e-12)


@pytest.mark.parametrize("df", DF)
def test_detectable_shift_has_the_stated_power(df):
    shift, c = student.detectable(df), stats.t.ppf(0.975, df)
    assert stats.nct.sf(c, df, shift) + stats.nct.cdf(-c, df, shift) == pytest.approx(0.8, abs=1e-9)


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
