"""How the two paths' gradients moved over a comparison's training, arm by arm, with intervals over seeds.

The trainer measures both norms at every step, before clipping, and keeps their means over logging windows. A share over
a range of steps is the mean of its windows' shares ‖B‖ / (‖A‖ + ‖B‖), each counted by its steps: what the published
figures of arXiv:2603.26663 are, which have a window of one step.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiewise.analysis.estimates import Estimate, mean_interval, ratio
from tiewise.core.errors import RunError
from tiewise.training.folder import read_json
from tiewise.training.results import Comparison, RunResult

TENTHS = 10


@dataclass(frozen=True)
class LoggedWindow:
    """The logging window that ends at `step`: means over its steps, one value per seed of the arm."""

    first: int  # its first step
    step: int  # its last
    a: tuple[float, ...]  # ‖A‖, of the lookup path
    b: tuple[float, ...]  # ‖B‖, of the head path
    share_b: tuple[float, ...]  # ‖B‖ / (‖A‖ + ‖B‖)
    cosine: tuple[float, ...]  # between A and B; nan where there are two tables


@dataclass(frozen=True)
class SharePart:
    """The head path's share over steps `first` to `last`, mean and 95 % interval over seeds."""

    first: int
    last: int
    share_b: Estimate


@dataclass(frozen=True)
class ArmPaths:
    """One arm: its seeds, its windows, and its shares over the whole run and over its tenths."""

    arm: str
    seeds: tuple[int, ...]
    points: tuple[LoggedWindow, ...]
    whole: SharePart
    tenths: tuple[SharePart, ...]

    def means(self, name: str) -> list[Estimate]:
        """Means over seeds of one of a point's fields, by point."""
        return [mean_interval(getattr(point, name)) for point in self.points]

    def change(self) -> Estimate:
        """Share of the last tenth minus that of the first, over seeds, each with itself; nan without tenths."""
        shares = [_per_seed(self.points, part.first, part.last) for part in (self.tenths[:1] + self.tenths[-1:])]
        if len(self.tenths) < 2:
            return Estimate(math.nan, math.nan, math.nan, len(self.seeds))
        return mean_interval([last - first for first, last in zip(*shares, strict=True)])


@dataclass(frozen=True)
class PathsOverTraining:
    """What `paths_over_training` found."""

    steps: int  # of every run
    batch_tokens: int | None  # tokens of a step: a share belongs to a batch size
    arms: tuple[ArmPaths, ...]  # in the comparison's order; one that measured no paths is left out


def paths_over_training(run: str | os.PathLike[str]) -> PathsOverTraining:
    """Read both paths over training from a finished comparison's folder.

    Raises:
        RunError: no finished comparison is there, or it measured no paths.
    """
    path = Path(run) / "results.json"
    record = read_json(path)
    if record is None:
        raise RunError(f"{path} cannot be read", "give the folder of a finished `tiewise compare`")
    comparison = Comparison.from_dict(record)
    found = paths_of(comparison)
    if not found.arms:
        raise RunError(f"{path} holds no gradients by path", "run the comparison again, longer")
    return found


def paths_of(comparison: Comparison) -> PathsOverTraining:
    """Return both paths over the training of a comparison that is in memory; its arms are those that measured paths."""
    arms = (_arm(arm, comparison.of(arm)) for arm in comparison.arms)
    steps = max((run.steps for run in comparison.runs), default=0)
    s = comparison.setting
    sizes = [s.get(name) for name in ("batch", "accumulate", "length")]
    tokens = math.prod(x for x in sizes if isinstance(x, int)) if all(isinstance(x, int) for x in sizes) else None
    return PathsOverTraining(steps, tokens, tuple(arm for arm in arms if arm is not None))


def _arm(name: str, runs: Sequence[RunResult]) -> ArmPaths | None:
    points = tuple(_points(runs))
    if not points:
        return None
    last = points[-1].step
    tenths = [_range(points, k * last // TENTHS + 1, (k + 1) * last // TENTHS) for k in range(TENTHS)]
    return ArmPaths(
        name,
        tuple(run.seed for run in runs),
        points,
        SharePart(points[0].first, last, mean_interval(_per_seed(points, 1, last))),
        tuple(x for x in tenths if x is not None),
    )


def _points(runs: Sequence[RunResult]) -> Iterator[LoggedWindow]:
    """Windows that every seed measured; a window begins after the logged step before it, measured or not."""
    curves = [{p.step: p for p in run.curve} for run in runs]
    before = 0
    for step in sorted(set().union(*curves)) if curves else []:
        first, before = before + 1, step
        found = [curve.get(step) for curve in curves]
        a, b = ([x for p in found if p and (x := getattr(p, n)) is not None] for n in ("path_a", "path_b"))
        if len(a) == len(b) == len(curves) and all(map(math.isfinite, [*a, *b])):
            shares = tuple(ratio(y, x + y) for x, y in zip(a, b, strict=True))
            turn = tuple(math.nan if p is None or p.cosine is None else p.cosine for p in found)
            yield LoggedWindow(first, step, tuple(a), tuple(b), shares, turn)


def _range(points: Sequence[LoggedWindow], first: int, last: int) -> SharePart | None:
    """Share over the windows that end within steps `first` to `last`, and the steps that these really are."""
    inside = _inside(points, first, last)
    if not inside:
        return None
    return SharePart(inside[0].first, inside[-1].step, mean_interval(_per_seed(points, first, last)))


def _per_seed(points: Sequence[LoggedWindow], first: int, last: int) -> list[float]:
    inside = _inside(points, first, last)
    weights = [p.step - p.first + 1 for p in inside]
    columns = zip(*(p.share_b for p in inside), strict=True)
    return [sum(w * x for w, x in zip(weights, column, strict=True)) / sum(weights) for column in columns]


def _inside(points: Sequence[LoggedWindow], first: int, last: int) -> list[LoggedWindow]:
    return [p for p in points if first <= p.step <= last]
