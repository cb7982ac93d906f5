"""Fall of the tuning loss at the end of training.

A line with one slope for all seeds of an arm, and a level for each seed, is fitted to the last evaluations of each run.
An arm still learns if the slope is below zero, by Student's t of the fit's residuals: the scatter of evaluations around
the line is their standard error. Holm's correction covers the arms. The learning rate of most runs ends at zero, so a
flat end does not show that more steps would be of no use; a falling one shows that they would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from tiewise.core.estimates import ALPHA, SlopeFit, common_slope, holm_adjusted
from tiewise.core.measurement import plain
from tiewise.training.results import Comparison, CurvePoint, Descent, RunResult

PART = 4  # a quarter of a run's evaluations is fitted
FEWEST = 5  # evaluations of a run that are fitted, at least


def descents(comparison: Comparison) -> list[Descent]:
    """Return the fall of every arm whose runs have enough evaluations, corrected over the arms."""
    return descents_of({arm: comparison.of(arm) for arm in comparison.arms})


def descents_of(runs_by_arm: Mapping[str, Sequence[RunResult]]) -> list[Descent]:
    """Return the fall of each arm's runs, corrected over the arms."""
    measured: list[Descent] = []
    probabilities: list[float] = []
    for arm, runs in runs_by_arm.items():
        ends = [_last_evaluations(run.curve) for run in runs]
        fit = common_slope(ends) if ends and all(ends) else None
        if fit is not None:
            first, *_, last = ends[0]
            measured.append(_descent(arm, fit, steps=round(last[0] - first[0])))
            probabilities.append(fit.p)
    adjusted = holm_adjusted(probabilities)
    return [replace(each, detected=each.fall > 0 and p < ALPHA) for each, p in zip(measured, adjusted, strict=True)]


def _last_evaluations(curve: Sequence[CurvePoint]) -> list[tuple[float, float]]:
    """Return (step, tuning loss) of a run's last evaluations.

    Curves of older versions have validation losses instead.

    It is empty if there are too few, or if one diverged.
    """
    points: list[tuple[float, float]] = []
    for point in curve:
        nll = point.heldout_nll if point.tune_nll is None else point.tune_nll
        if nll is not None:
            points.append((float(point.step), nll))
    last = points[-max(FEWEST, len(points) // PART) :]
    if len(last) < FEWEST or not all(math.isfinite(nll) for _, nll in last):
        return []
    return last


def _descent(arm: str, fit: SlopeFit, steps: int) -> Descent:
    """Return the fall over `steps` steps along the fitted line, with its interval."""
    low, high = fit.interval()
    return Descent(arm, steps, -fit.slope * steps, -high * steps, -low * steps, detected=False)


def descent_note(falls: Sequence[Descent]) -> str:
    """Return a sentence on the arms whose loss still fell; "" if there are none."""
    falling = [each for each in falls if each.detected]
    if not falling:
        return ""
    largest = max(falling, key=lambda each: each.fall)
    loss, up_to, outcome = "the loss on tuning text", "", "more steps would lower it"
    if len(falls) > 1:
        loss = f"the loss on tuning text of {', '.join(each.arm for each in falling)}"
        outcome += ", and may change the result"
    if len(falling) > 1:
        up_to = "up to "
    fall = f"by {up_to}{plain(largest.fall, 3)} nats/token over the last {largest.steps:,} steps"
    return f"Training ended while {loss} still fell, {fall}: {outcome}."
