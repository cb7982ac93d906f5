"""The surface: planted ones are found again, its intervals hold what they say, and beyond its hull it knows nothing."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiewise.planning.surface import enclosed, fit, leave_one_out, regret

SEEDS = 4


def setting(draw, points, noise=0.005, between=0.003):
    """(values, errors, seeds) of settings whose truth is linear with a product; σ and τ as given."""
    true = 0.02 * points[:, 0] - 0.01 * points[:, 1] + 0.004 * points[:, 0] * points[:, 1]
    true = true + draw.normal(0, between, len(points)) if between else true
    each = true[:, None] + draw.normal(0, noise, (len(points), SEEDS))
    return each.mean(1), each.std(1, ddof=1) / SEEDS**0.5, np.full(len(points), float(SEEDS))


GRID = np.array(list(itertools.product(range(5), range(4))), float)


def test_a_planted_surface_is_found_again():
    values, errors, seeds = setting(np.random.default_rng(1), GRID, noise=1e-6, between=0)
    found = fit(GRID, values, errors, seeds)
    for point in ([0.5, 0.5], [3.2, 2.7]):
        true = 0.02 * point[0] - 0.01 * point[1] + 0.004 * point[0] * point[1]
        assert found.at(point).value == pytest.approx(true, abs=1e-5)


def test_without_spread_between_settings_it_is_least_squares():
    values, errors, seeds = setting(np.random.default_rng(2), GRID, between=0)
    found = fit(GRID, values, errors * 10, seeds)  # seeds explain more than all: τ² = 0
    assert found.between < 1e-9
    x = np.column_stack([np.ones(20), GRID, GRID[:, 0] * GRID[:, 1]])
    beta = np.linalg.lstsq(x, values, rcond=None)[0]
    assert found.at([1.5, 2.5]).value == pytest.approx(beta @ [1, 1.5, 2.5, 3.75], abs=1e-12)


def test_intervals_of_new_settings_hold_their_measured_figure_95_times_in_100():
    draw, held, n = np.random.default_rng(3), 0, 0
    for _ in range(60):
        values, errors, seeds = setting(draw, GRID)
        for value, (found, _) in zip(values, leave_one_out(GRID, values, errors, seeds), strict=True):
            held, n = held + (found.low <= value <= found.high), n + 1
    assert 0.93 <= held / n <= 0.97  # 1,200 of them: a standard error of 0.006, more as they share settings


def test_the_spread_between_settings_is_found():
    draw = np.random.default_rng(4)
    found = [fit(GRID, *setting(draw, GRID)).between ** 0.5 for _ in range(40)]
    assert np.mean(found) == pytest.approx(0.003, rel=0.25)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999))
def test_a_mean_of_settings_lies_in_the_hull_and_what_is_beyond_one_axis_does_not(seed):
    draw = np.random.default_rng(seed)
    points = draw.normal(size=(12, 2))
    assert enclosed(points, draw.dirichlet(np.ones(12)) @ points)
    assert not enclosed(points, points.max(0) + np.array([0.1, 0]))


def test_corners_of_a_grid_are_beyond_the_others():
    out = leave_one_out(GRID, *setting(np.random.default_rng(5), GRID))
    beyond = {tuple(point) for point, (_, inside) in zip(GRID, out, strict=True) if not inside}
    assert beyond == set(itertools.product((0.0, 4.0), (0.0, 3.0)))


def test_too_few_settings_make_no_surface():
    for points in (GRID[:3], np.ones((9, 2)), np.column_stack([np.arange(9.0), np.arange(9.0)])):
        values, errors, seeds = setting(np.random.default_rng(6), points)
        assert fit(points, values, errors, seeds) is None
    four = GRID[[0, 1, 4, 5]]
    assert leave_one_out(four, *setting(np.random.default_rng(6), four)) == []


def test_regret_is_what_the_other_choice_would_have_saved():
    measured = [-0.02, 0.01, 0.03]
    assert regret(measured, measured) == 0
    assert regret(measured, [-1, -1, -1]) == pytest.approx(0.04 / 3)
    assert regret(measured, [1, 1, 1]) == pytest.approx(0.02 / 3)
