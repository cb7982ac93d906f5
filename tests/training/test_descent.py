"""Test the fall of the loss at the end of training: the fit, and the note about it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
from tests.training.test_results import comparison, make_run

from tiewise.core.estimates import common_slope
from tiewise.training.descent import descent_note, descents
from tiewise.training.finding import explanations
from tiewise.training.results import Comparison, CurvePoint

# curves of runs on 20,000 synthetic words (`compare synthetic:words=20000 --set width=16 …`): 60 steps, and 1,500
SHORT = [3.2166, 3.137, 3.0745, 3.0272, 2.9936, 2.9715, 2.958, 2.9508, 2.9479, 2.9474]
LONG = [1.9082, 1.9092, 1.8991, 1.8984, 1.8988, 1.8995, 1.8974, 1.8966, 1.8979, 1.8974]
LONG_AGAIN = [1.911, 1.9121, 1.9074, 1.904, 1.9069, 1.902, 1.9054, 1.9055, 1.904, 1.9039]


def with_curve(arm, seed, losses):
    curve = [CurvePoint(10 * (at + 1), 100 * at, tune_nll=loss) for at, loss in enumerate(losses)]
    return replace(make_run(arm, seed, losses[-1]), curve=curve)


def compared(**losses):
    """Return a comparison of arms, each with the curves of its seeds."""
    runs = [with_curve(arm, seed, curve) for arm, curves in losses.items() for seed, curve in enumerate(curves, 1)]
    return comparison(runs)


def test_common_slope_of_one_series_equals_linear_regression():
    rng = np.random.default_rng(0)
    x, y = np.arange(7.0), rng.normal(size=7)
    fit, wanted = common_slope([list(zip(x, y, strict=True))]), scipy.stats.linregress(x, y)
    assert (fit.slope, fit.error, fit.df) == (pytest.approx(wanted.slope), pytest.approx(wanted.stderr), 5)
    assert fit.p == pytest.approx(wanted.pvalue)


def test_common_slope_of_several_series_equals_least_squares_with_their_levels():
    rng = np.random.default_rng(1)
    series = [[(x, y) for x, y in zip(range(5), rng.normal(level, 1, 5), strict=True)] for level in (0, 10, 20)]
    design = np.zeros((15, 4))
    for row, (index, x) in enumerate((index, x) for index, points in enumerate(series) for x, _ in points):
        design[row, index], design[row, 3] = 1, x
    y = np.array([y for points in series for _, y in points])
    solution, squares, *_ = np.linalg.lstsq(design, y, rcond=None)
    variance = float(squares[0]) / 11 * np.linalg.inv(design.T @ design)[3, 3]
    fit = common_slope(series)
    assert (fit.slope, fit.error, fit.df) == (pytest.approx(solution[3]), pytest.approx(math.sqrt(variance)), 11)
    assert common_slope([[(1, 2.0), (2, 3.0)]]) is None
    assert common_slope([[(1, 2.0), (1, 3.0), (1, 4.0)]]) is None


def test_note_names_arms_that_still_fall_and_no_converged_one():
    falling = compared(tied=[SHORT, SHORT], untied=[LONG, LONG_AGAIN])
    assert [(each.arm, each.detected) for each in falling.descents] == [("tied", True), ("untied", False)]
    tied, untied = falling.descents
    slope = np.polyfit(range(5), SHORT[-5:], 1)[0] / 10  # per step
    assert tied.steps == 40
    assert tied.fall == pytest.approx(-40 * slope)
    assert tied.low < tied.fall < tied.high
    assert untied.low < 0 < untied.high
    note = explanations(falling)[0]
    assert note == (
        "Training ended while the loss on tuning text of tied still fell, by 0.023 nats/token over the last 40 steps: "
        "more steps would lower it, and may change the result."
    )
    assert Comparison.from_dict(falling.record()).descents == falling.descents
    converged = compared(tied=[LONG, LONG_AGAIN], untied=[LONG_AGAIN, LONG])
    assert descent_note(converged.descents) == ""
    assert not any("still fell" in line for line in explanations(converged))


@pytest.mark.parametrize(
    "curve", [[], [3.0, 2.0, 1.0, 0.5], [5.0, 4.0, 3.0, 2.0, math.nan, 1.0], [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]]
)
def test_no_note_without_enough_finite_evaluations_or_for_a_rising_loss(curve):
    runs = [
        replace(make_run(arm, 1, 2.0), curve=with_curve(arm, 1, curve or [2.0]).curve) for arm in ("tied", "untied")
    ]
    assert not any(each.detected for each in descents(comparison(runs)))


def test_note_of_one_run_speaks_of_it_alone():
    (fall,) = compared(tied=[SHORT]).descents
    assert descent_note([fall]).endswith("by 0.023 nats/token over the last 40 steps: more steps would lower it.")


def test_plateaus_are_rarely_called_falling():
    """With independent evaluations, one in twenty fits is significant, and half of these fall."""
    rng = np.random.default_rng(2)
    noted = sum(bool(descent_note(compared(tied=[2 + 0.01 * rng.normal(size=20)]).descents)) for _ in range(400))
    assert noted <= 20  # 10 are expected; more than 20 have a probability of 0.001
