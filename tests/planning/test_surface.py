"""Test the fitted surface of the atlas against planted surfaces, least squares and coverage counts."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiewise.planning.surface import enclosed, fit, leave_one_out, regret

SEEDS = 4


def draw_settings(draw, points, noise=0.005, between=0.003):
    """Draw (values, errors, seeds) of settings whose true mean is linear plus a product term.

    `noise` is the deviation between seeds (σ), `between` that between settings (τ).
    """
    true = 0.02 * points[:, 0] - 0.01 * points[:, 1] + 0.004 * points[:, 0] * points[:, 1]
    true = true + draw.normal(0, between, len(points)) if between else true
    each = true[:, None] + draw.normal(0, noise, (len(points), SEEDS))
    return each.mean(1), each.std(1, ddof=1) / SEEDS**0.5, np.full(len(points), float(SEEDS))


GRID = np.array(list(itertools.product(range(5), range(4))), float)


def test_fit_recovers_a_planted_surface():
    values, errors, seeds = draw_settings(np.random.default_rng(1), GRID, noise=1e-6, between=0)
    surface = fit(GRID, values, errors, seeds)
    for point in ([0.5, 0.5], [3.2, 2.7]):
        true = 0.02 * point[0] - 0.01 * point[1] + 0.004 * point[0] * point[1]
        assert surface.at(point).value == pytest.approx(true, abs=1e-5)


def test_fit_without_spread_between_settings_equals_least_squares():
    values, errors, seeds = draw_settings(np.random.default_rng(2), GRID, between=0)
    surface = fit(GRID, values, errors * 10, seeds)  # the errors of the seeds exceed the spread, so τ² = 0
    assert surface.between < 1e-9
    x = np.column_stack([np.ones(20), GRID, GRID[:, 0] * GRID[:, 1]])
    beta = np.linalg.lstsq(x, values, rcond=None)[0]
    assert surface.at([1.5, 2.5]).value == pytest.approx(beta @ [1, 1.5, 2.5, 3.75], abs=1e-12)


def test_leave_one_out_intervals_cover_95_percent_of_the_measured_values():
    draw, covered, n = np.random.default_rng(3), 0, 0
    for _ in range(60):
        values, errors, seeds = draw_settings(draw, GRID)
        for value, (prediction, _) in zip(values, leave_one_out(GRID, values, errors, seeds), strict=True):
            covered, n = covered + (prediction.low <= value <= prediction.high), n + 1
    assert 0.93 <= covered / n <= 0.97  # 1,200 intervals: standard error 0.006, or more because they share settings


def test_fit_recovers_the_spread_between_settings():
    draw = np.random.default_rng(4)
    spreads = [fit(GRID, *draw_settings(draw, GRID)).between ** 0.5 for _ in range(40)]
    assert np.mean(spreads) == pytest.approx(0.003, rel=0.25)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999))
def test_enclosed_accepts_means_of_settings_and_rejects_points_beyond_an_axis(seed):
    draw = np.random.default_rng(seed)
    points = draw.normal(size=(12, 2))
    assert enclosed(points, draw.dirichlet(np.ones(12)) @ points)
    assert not enclosed(points, points.max(0) + np.array([0.1, 0]))


def test_leave_one_out_marks_grid_corners_as_outside_the_hull():
    out = leave_one_out(GRID, *draw_settings(np.random.default_rng(5), GRID))
    beyond = {tuple(point) for point, (_, inside) in zip(GRID, out, strict=True) if not inside}
    assert beyond == set(itertools.product((0.0, 4.0), (0.0, 3.0)))


def test_fit_returns_none_for_too_few_or_collinear_settings():
    for points in (GRID[:3], np.ones((9, 2)), np.column_stack([np.arange(9.0), np.arange(9.0)])):
        values, errors, seeds = draw_settings(np.random.default_rng(6), points)
        assert fit(points, values, errors, seeds) is None
    four = GRID[[0, 1, 4, 5]]
    assert leave_one_out(four, *draw_settings(np.random.default_rng(6), four)) == []


def test_regret_is_the_mean_loss_of_wrong_choices():
    measured = [-0.02, 0.01, 0.03]
    assert regret(measured, measured) == 0
    assert regret(measured, [-1, -1, -1]) == pytest.approx(0.04 / 3)
    assert regret(measured, [1, 1, 1]) == pytest.approx(0.02 / 3)
