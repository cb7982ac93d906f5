"""Which use of the table pulls harder as training goes on? One arm of a comparison, with intervals over its seeds.

The trainer measures both norms at every step, before clipping, and keeps their means over logging windows. A share over
a range of steps is the mean of its windows' shares ‖B‖ / (‖A‖ + ‖B‖), each counted by its steps: what the published
figures of arXiv:2603.26663 are, which have a window of one step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiewise.core.estimates import mean_interval
from tiewise.core.found import Curve, Found, Listing, Quantity, count
from tiewise.inspection.bench import Bench, NotHere, Subject, comparison_of, mean_of, section
from tiewise.training.results import RunResult

TENTHS = 10
LOGGED = "Means over seeds and logging windows."


@section(asks="Which use of the table pulls harder as training goes on?", place=80)
def gradients_over_training(subject: Subject, bench: Bench) -> Found:
    """Follow both paths' gradients over the training of one arm of a comparison."""
    if subject.run is None:
        raise NotHere("needs a comparison", "give the folder of `tiewise compare`")
    return gradients_over_training_of(subject.run, subject.label)


def gradients_over_training_of(run: str | os.PathLike[str], arm: str) -> Found:
    """Read both paths over the training of one arm from a finished comparison's folder.

    Raises:
        RunError: no finished comparison is there.
        NotHere: the arm measured no paths.
    """
    found = logged_paths(comparison_of(Path(run)).of(arm))
    if not len(found.last):
        raise NotHere(f"{arm} measured no gradients by path", "run it again, longer")
    return found_of(found)


@dataclass(frozen=True)
class LoggedPaths:
    """Logging windows that every seed measured: means over their steps."""

    first: NDArray[np.int64]  # first step of each window
    last: NDArray[np.int64]  # its last
    a: NDArray[np.float64]  # ‖A‖, of the lookup path [windows, seeds]
    b: NDArray[np.float64]  # ‖B‖, of the head path
    cosine: NDArray[np.float64]  # between A and B; nan where there are two tables

    @property
    def share(self) -> NDArray[np.float64]:
        """‖B‖ / (‖A‖ + ‖B‖), nan where both are zero."""
        both = self.a + self.b
        return np.divide(self.b, both, out=np.full_like(both, math.nan), where=both > 0)

    def over(self, its: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Mean share over some windows, counted by their steps [seeds]."""
        return np.average(self.share[its], axis=0, weights=(self.last - self.first + 1)[its])


def logged_paths(runs: Sequence[RunResult]) -> LoggedPaths:
    """Read an arm's curves; a window begins after the logged step before it, measured or not."""
    curves = [{point.step: point for point in run.curve} for run in runs]
    steps, rows, before = [], [], 0
    for step in sorted(set().union(*curves)):
        found = [curve.get(step) for curve in curves]
        norms = [(p.path_a, p.path_b) for p in found if p and p.path_a is not None and p.path_b is not None]
        if len(norms) == len(runs) and np.isfinite(norms).all():
            cosines = [math.nan if p is None or p.cosine is None else p.cosine for p in found]
            steps.append((before + 1, step))
            rows.append((*zip(*norms, strict=True), cosines))
        before = step
    columns = np.array(rows, np.float64).reshape(len(rows), 3, len(runs)).transpose(1, 0, 2)
    return LoggedPaths(*np.array(steps, np.int64).reshape(-1, 2).T, *columns)


def found_of(found: LoggedPaths) -> Found:
    """Say what the head path's share is, and whether it moved."""
    last, seeds = int(found.last[-1]), found.a.shape[1]
    # in which tenth of the run each window ends
    tenth = np.searchsorted([(k + 1) * last // TENTHS for k in range(TENTHS)], found.last)
    ranges = [*(tenth == k for k in np.unique(tenth)), tenth >= 0]
    first, *more, whole = [found.over(its) for its in ranges]
    change = more[-1] - first if more else np.full(seeds, math.nan)
    share = mean_of("head path's share of both norms", whole, unit="%", chance=0.5)
    moved = mean_of("last tenth − first tenth", change, unit="%", chance=0.0, why="in points of a hundred")
    steps = [f"{count(found.first[its][0])}–{count(found.last[its][-1])}" for its in ranges]
    rows = [*zip(steps, (str(mean_of("", one, unit="%")) for one in (first, *more, whole)), strict=True)]
    of_both = found.cosine.mean(1)[np.isfinite(found.cosine).all(1)]
    cosines = [
        Quantity(f"{end} cosine of the two paths", float(of(of_both)), unit="cosine", main=False, why=LOGGED)
        for end, of in (("lowest", np.min), ("highest", np.max))
        if len(of_both)
    ]
    norms = ((f"Norm of the {path} path's gradient", a) for path, a in (("lookup", found.a), ("head", found.b)))
    curves = [
        Curve.through(
            name, zip(map(int, found.last), map(mean_interval, values), strict=True),
            along="step", unit=unit, log=log, level=level, why=LOGGED,
        )
        for name, values, unit, level, log in (
            ("Head path's share over training", found.share, "share of the two norms", 0.5, False),
            *((name, a, "norm", None, True) for name, a in norms),
            ("Do both paths pull the same way over training?", found.cosine, "cosine", 0.0, False),
        )
    ]  # fmt: skip
    said = "the head" if share.low > 0.5 else "the lookup" if share.high < 0.5 else "neither clearly"
    way = "falls" if moved.high < 0 else "rises" if moved.low > 0 else "is not shown to move"
    return Found(
        answer=f"{said}; the head's share {way} over training" if math.isfinite(moved.value) else said,
        quantities=(share, moved, *cosines),
        curves=tuple(curve for curve in curves if curve.x),  # none that was never a number
        listings=(Listing("Head path's share by tenths of the run", ("steps", "share [95 %]"), rows),),
        notes=(f"over {seeds} seed{'s' if seeds > 1 else ''}, before clipping",),
    )
