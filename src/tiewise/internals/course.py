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
from typing import Any

from tiewise.analysis.estimates import Estimate, mean_interval, ratio
from tiewise.core.errors import RunError
from tiewise.training.folder import read_json
from tiewise.training.results import Comparison, RunResult, to_record

TENTHS = 10


@dataclass(frozen=True)
class Point:
    """The logging window that ends at `step`: means over its steps, one value per seed of the arm.

    Args:
        first: its first step.
        step: its last.
        a: ‖A‖.
        b: ‖B‖.
        share_b: ‖B‖ / (‖A‖ + ‖B‖).
        cosine: between A and B; nan where there are two tables.
    """

    first: int
    step: int
    a: tuple[float, ...]
    b: tuple[float, ...]
    share_b: tuple[float, ...]
    cosine: tuple[float, ...]


@dataclass(frozen=True)
class Range:
    """Path B's share over steps `first` to `last`, mean and 95 % interval over seeds."""

    first: int
    last: int
    share_b: Estimate


@dataclass(frozen=True)
class Arm:
    """One arm: its seeds, its points, and its shares over the whole run and over its tenths."""

    arm: str
    seeds: tuple[int, ...]
    points: tuple[Point, ...]
    whole: Range
    tenths: tuple[Range, ...]

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
class Course:
    """What `course` found.

    Args:
        steps: of every run.
        batch_tokens: tokens of a step: a share belongs to a batch size.
        arms: in the comparison's order; one that measured no paths is left out.
    """

    steps: int
    batch_tokens: int | None
    arms: tuple[Arm, ...]

    def record(self) -> dict[str, Any]:
        """Return everything as strict JSON takes it; what is not a number is None."""
        return to_record(self)


def course(run: str | os.PathLike[str]) -> Course:
    """Read the course of both paths from a finished comparison's folder.

    Raises:
        RunError: no finished comparison is there, or it measured no paths.
    """
    path = Path(run) / "results.json"
    record = read_json(path)
    if record is None:
        raise RunError(f"{path} cannot be read", "give the folder of a finished `tiewise compare`")
    comparison = Comparison.from_dict(record)
    found = course_of(comparison)
    if not found.arms:
        raise RunError(f"{path} holds no gradients by path", "run the comparison again, longer")
    return found


def course_of(comparison: Comparison) -> Course:
    """Return the course of a comparison that is in memory; its arms are those that measured paths."""
    arms = (_arm(arm, comparison.of(arm)) for arm in comparison.arms)
    steps = max((run.steps for run in comparison.runs), default=0)
    s = comparison.setting
    sizes = [s.get(name) for name in ("batch", "accumulate", "length")]
    tokens = math.prod(x for x in sizes if isinstance(x, int)) if all(isinstance(x, int) for x in sizes) else None
    return Course(steps, tokens, tuple(arm for arm in arms if arm is not None))


def _arm(name: str, runs: Sequence[RunResult]) -> Arm | None:
    points = tuple(_points(runs))
    if not points:
        return None
    last = points[-1].step
    tenths = [_range(points, k * last // TENTHS + 1, (k + 1) * last // TENTHS) for k in range(TENTHS)]
    return Arm(
        name,
        tuple(run.seed for run in runs),
        points,
        Range(points[0].first, last, mean_interval(_per_seed(points, 1, last))),
        tuple(x for x in tenths if x is not None),
    )


def _points(runs: Sequence[RunResult]) -> Iterator[Point]:
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
            yield Point(first, step, tuple(a), tuple(b), shares, turn)


def _range(points: Sequence[Point], first: int, last: int) -> Range | None:
    """Share over the windows that end within steps `first` to `last`, and the steps that these really are."""
    inside = _inside(points, first, last)
    if not inside:
        return None
    return Range(inside[0].first, inside[-1].step, mean_interval(_per_seed(points, first, last)))


def _per_seed(points: Sequence[Point], first: int, last: int) -> list[float]:
    inside = _inside(points, first, last)
    weights = [p.step - p.first + 1 for p in inside]
    columns = zip(*(p.share_b for p in inside), strict=True)
    return [sum(w * x for w, x in zip(weights, column, strict=True)) / sum(weights) for column in columns]


def _inside(points: Sequence[Point], first: int, last: int) -> list[Point]:
    return [p for p in points if first <= p.step <= last]
