"""Gradients of lookup and head path over the training of one arm, over its seeds.

The trainer measures both norms at every step, before clipping, and stores their means over logging windows. A share
over a range of steps is the mean of its windows' shares ‖B‖ / (‖A‖ + ‖B‖), weighted by their steps. The published
figures of arXiv:2603.26663 are such shares with a window of one step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiewise.core.estimates import mean_interval
from tiewise.core.measurement import Curve, Listing, Measurement, Quantity, count
from tiewise.inspection.workspace import (
    InspectedModel,
    NotApplicable,
    Workspace,
    comparison_of,
    longer_path,
    mean_of,
    section,
)
from tiewise.training.results import CurvePoint, RunResult

TENTHS = 10
LOGGED = "Means over seeds and logging windows."


@section(question="Which use of the table had the larger gradient during training?", order=80)
def gradients_over_training(model: InspectedModel, workspace: Workspace) -> Measurement:
    """Report both paths' gradients over the training of one arm of a comparison."""
    if model.run is None:
        raise NotApplicable("needs a comparison", "give the folder of `tiewise compare`")
    return gradients_over_training_of(model.run, model.label)


def gradients_over_training_of(run: str | os.PathLike[str], arm: str) -> Measurement:
    """Read both paths over the training of one arm from a finished comparison's folder.

    Raises:
        RunError: the folder has no finished comparison.
        NotApplicable: the arm measured no paths.
    """
    paths = logged_paths(comparison_of(Path(run)).of(arm))
    if not len(paths.last):
        raise NotApplicable(f"{arm} measured no gradients by path", "run it again, longer")
    return measurement_of(paths)


@dataclass(frozen=True)
class LoggedPaths:
    """Means of both paths' norms over the logging windows that every seed measured."""

    first: NDArray[np.int64]  # first step of each window
    last: NDArray[np.int64]  # last step of each window
    a: NDArray[np.float64]  # ‖A‖ of the lookup path [windows, seeds]
    b: NDArray[np.float64]  # ‖B‖ of the head path [windows, seeds]
    cosine: NDArray[np.float64]  # between A and B [windows, seeds]; NaN for two tables

    @property
    def share(self) -> NDArray[np.float64]:
        """Return ‖B‖ / (‖A‖ + ‖B‖), NaN where both are zero."""
        both = self.a + self.b
        return np.divide(self.b, both, out=np.full_like(both, math.nan), where=both > 0)

    def over(self, selected: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the mean share over some windows, weighted by their steps [seeds]."""
        return np.average(self.share[selected], axis=0, weights=(self.last - self.first + 1)[selected])

    def tenths(self) -> list[NDArray[np.bool_]]:
        """Mark the windows that end in each tenth of the run.

        Tenths without a window are left out.
        """
        ends = np.arange(1, TENTHS + 1) * int(self.last[-1]) // TENTHS
        tenth = np.searchsorted(ends, self.last)
        return [tenth == k for k in np.unique(tenth)]


def logged_paths(runs: Sequence[RunResult]) -> LoggedPaths:
    """Read an arm's curves; a window starts after the previous logged step, measured or not."""
    curves = [{point.step: point for point in run.curve} for run in runs]
    first, last = [], []
    windows: list[NDArray[np.float64]] = []
    before = 0
    for step in sorted(set().union(*curves)):
        measured = _measured_by_all([curve.get(step) for curve in curves])
        if measured is not None:
            first.append(before + 1)
            last.append(step)
            windows.append(measured)
        before = step
    values = np.array(windows, np.float64).reshape(len(windows), len(runs), 3)
    a, b, cosine = np.moveaxis(values, -1, 0)
    return LoggedPaths(np.array(first, np.int64), np.array(last, np.int64), a, b, cosine)


def _measured_by_all(points: Sequence[CurvePoint | None]) -> NDArray[np.float64] | None:
    """Return (‖A‖, ‖B‖, cosine) of each seed [seeds, 3].

    None if a seed has no finite norms.
    """
    by_seed = []
    for point in points:
        if point is None or point.path_a is None or point.path_b is None:
            return None
        cosine = math.nan if point.cosine is None else point.cosine
        by_seed.append((point.path_a, point.path_b, cosine))
    values = np.array(by_seed, np.float64)
    if not np.isfinite(values[:, :2]).all():
        return None
    return values


# the report


def measurement_of(paths: LoggedPaths) -> Measurement:
    """Report the head path's share, and whether it changed over training."""
    seeds = paths.a.shape[1]
    tenths, all_windows = paths.tenths(), np.ones(len(paths.last), bool)
    by_tenth = [paths.over(selected) for selected in tenths]
    of_run = paths.over(all_windows)
    change = np.full(seeds, math.nan)
    if len(by_tenth) > 1:
        change = by_tenth[-1] - by_tenth[0]
    share = mean_of("head path's share of both norms", of_run, unit="%", chance=0.5)
    moved = mean_of("last tenth − first tenth", change, unit="%", chance=0.0, why="in points of a hundred")
    rows = []
    for selected, shares in zip([*tenths, all_windows], [*by_tenth, of_run], strict=True):
        steps = f"{count(paths.first[selected][0])}–{count(paths.last[selected][-1])}"
        rows.append((steps, str(mean_of("", shares, unit="%"))))
    return Measurement(
        answer=_answer(share, moved),
        quantities=(share, moved, *_cosines(paths)),
        curves=tuple(curve for curve in _curves(paths) if curve.x),  # curves without a finite value are left out
        listings=(Listing("Head path's share by tenths of the run", ("steps", "share [95 %]"), rows),),
        notes=("over 1 seed, before clipping" if seeds == 1 else f"over {seeds} seeds, before clipping",),
    )


def _answer(share: Quantity, moved: Quantity) -> str:
    """Return which path is longer, and whether the head's share changed over training.

    The change is that from the first to the last tenth, if there are two.
    """
    longer = longer_path(share)
    if not math.isfinite(moved.value):
        return longer
    trend = "did not change detectably"
    if moved.high < 0:
        trend = "fell"
    elif moved.low > 0:
        trend = "rose"
    return f"{longer}; the head's share {trend} during training"


def _cosines(paths: LoggedPaths) -> list[Quantity]:
    """Return the lowest and the highest mean cosine of the two paths; none for two tables."""
    is_measured = np.isfinite(paths.cosine).all(1)
    cosines = paths.cosine.mean(1)[is_measured]
    if not len(cosines):
        return []
    lowest, highest = float(np.min(cosines)), float(np.max(cosines))
    return [
        Quantity("lowest cosine of the two paths", lowest, unit="cosine", main=False, why=LOGGED),
        Quantity("highest cosine of the two paths", highest, unit="cosine", main=False, why=LOGGED),
    ]


def _curves(paths: LoggedPaths) -> Iterator[Curve]:
    """Yield share, both norms and cosine over training."""
    curve = partial(_over_training, paths.last)
    yield curve("Head path's share over training", paths.share, unit="share of the two norms", level=0.5)
    for path, norms in (("lookup", paths.a), ("head", paths.b)):
        yield curve(f"Norm of the {path} path's gradient", norms, unit="norm", log=True)
    yield curve("Do both paths pull the same way over training?", paths.cosine, unit="cosine", level=0.0)


def _over_training(
    steps: NDArray[np.int64],
    name: str,
    values: NDArray[np.float64],
    unit: str,
    level: float | None = None,
    log: bool = False,
) -> Curve:
    """Return the mean of values [windows, seeds] by step, with its interval."""
    means = [mean_interval(of_seeds) for of_seeds in values]
    points = zip(steps.tolist(), means, strict=True)
    return Curve.through(name, points, along="step", unit=unit, log=log, level=level, why=LOGGED)
