"""Quantiles and power of Student's t against scipy."""

import pytest
from scipy import stats

from tiewise import student

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
