"""Intervals over seeds and documents: the variance of an analysis of variance, and its limits."""

import numpy as np
import pytest
from scipy import stats

from tiewise.core.crossed_effects import Parts, crossed_interval, seed_interval, variance_parts


def test_seed_interval_is_students():
    values = [0.051, 0.049, 0.058, 0.044]
    found = seed_interval(values)
    expected = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected, rel=1e-12)
    assert found.p == pytest.approx(stats.ttest_1samp(values, 0).pvalue, rel=1e-9)


def test_equal_documents_give_the_mean_squares_of_a_two_way_table():
    generator, seeds, documents, tokens = np.random.default_rng(3), 4, 9, 50
    table = generator.normal(size=(seeds, documents)) + generator.normal(size=documents)
    table += 2 * generator.normal(size=(seeds, 1))
    rows, columns = table.mean(1), table.mean(0)
    residuals = table - rows[:, None] - columns + table.mean()
    mean_square = (residuals**2).sum() / ((seeds - 1) * (documents - 1))
    parts = variance_parts(tokens * table, np.full(documents, tokens))
    assert parts.seeds == pytest.approx(rows.var(ddof=1) / seeds)
    assert parts.documents == pytest.approx(columns.var(ddof=1) / documents)
    assert parts.interaction == pytest.approx(mean_square / (seeds * documents))
    found = crossed_interval(tokens * table, np.full(documents, tokens))
    assert found.estimate == pytest.approx(table.mean())
    assert found.standard_error == pytest.approx(np.sqrt(sum(parts[:2]) - parts[2]))
    freedom = found.standard_error**4 / (parts.seeds**2 / 3 + parts.documents**2 / 8)
    assert found.degrees_of_freedom == pytest.approx(freedom)


def test_identical_documents_leave_students_interval_over_seeds():
    values = np.array([0.05, 0.07, 0.06])
    tokens = np.array([100, 300, 50])
    found, over_seeds = crossed_interval(values[:, None] * tokens, tokens), seed_interval(values)
    assert found.estimate == pytest.approx(over_seeds.estimate)
    assert found.standard_error == pytest.approx(over_seeds.standard_error)
    assert found.degrees_of_freedom == pytest.approx(2)


def test_identical_seeds_leave_the_jackknife_over_documents():
    nats, tokens = np.array([5.0, 9.0, -1.0, 4.0]), np.array([100, 120, 80, 300])
    without = np.array([np.delete(nats, j).sum() / np.delete(tokens, j).sum() for j in range(4)])
    found = crossed_interval(np.stack([nats, nats]), tokens)
    assert found.standard_error == pytest.approx(np.sqrt(3 / 4 * ((without - without.mean()) ** 2).sum()))
    assert found.degrees_of_freedom == pytest.approx(600**2 / (tokens.astype(float) ** 2).sum() - 1)


def test_variance_is_never_below_that_of_one_sample():
    assert Parts(2.0, 1.0, 2.5).total == 2.0
    assert Parts(1.0, 2.0, 2.5).total == 2.0
    assert Parts(2.0, 1.0, 0.5).total == 2.5


def test_interval_without_spread_is_a_point():
    found = crossed_interval([[3.0, 3.0], [3.0, 3.0]], [10, 10])
    assert (found.low, found.high, found.degrees_of_freedom) == (0.3, 0.3, 1)
    assert found.p == 0.0
    assert crossed_interval([[0.0, 0.0], [0.0, 0.0]], [10, 10]).p == 1.0
