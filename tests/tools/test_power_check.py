"""Tests of the simulation of stated power, and of the power that the atlas states."""

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import power_check  # noqa: E402

from tiewise.core.estimates import detectable_difference, holm_adjusted  # noqa: E402


def test_simulation_rejects_as_adjusted_p_does():
    p = np.random.default_rng(1).uniform(0, 0.04, (200, 5))
    expected = [[one < 0.05 for one in holm_adjusted(row.tolist())] for row in p]
    assert power_check.rejected(p).tolist() == expected


def test_equivalence_needs_the_interval_within_the_margin():
    rows = power_check.StudyRows(np.zeros(2), np.full(2, 0.002), np.array([4.0, 4.0]), np.zeros(2), margin=0.02)
    drawn = power_check.Draw(np.array([[0.0140, 0.0150]]), np.full((1, 2), 0.002))  # intervals of ± 0.00555
    _, p = power_check.p_values(rows, drawn)
    assert (p < 0.05).tolist() == [[True, False]]


def test_uncorrected_power_misses_the_bar(monkeypatch):
    """The former rule stated one test at 5 % with the estimated error as the true one."""
    monkeypatch.setattr(power_check, "detectable_difference", lambda df, level: detectable_difference(df))
    rows = power_check.read_studies()["size-text-vocabulary"]
    measured = power_check.study_power(rows, 300, np.random.default_rng(0))
    assert measured.mean < power_check.STATED - power_check.TOLERANCE
    assert not measured.within_bars()


@pytest.mark.slow
@pytest.mark.parametrize("study", sorted(power_check.read_studies()))
def test_stated_power_of_a_study_is_that_of_its_whole_rule(study):
    rows = power_check.read_studies()[study]
    measured = power_check.study_power(rows, 4000, np.random.default_rng(0))
    assert measured.within_bars(), power_check.line(study, rows, measured)
