"""Outcome of the runs of a claim, with its 95 % interval over seeds.

A measure is a mapping with a `kind`, which names a function of `MEASURES`. A *term* is a list: weight, arm, metric,
then the value of each axis; a grid with one cell needs none.

    sum                Σ weight × value of the terms, for each seed
    ratio              the sum of `terms` over the sum of `over`, of means over seeds
    equivalent_depth   φ: with `at` applications of one layer, a model is as good as `at`^φ separate layers
    equivalent_size    ψ: the parameters by which a larger model of the arm `curve` equals `arm`, over those `arm` adds
    section            a quantity of a section of `tiewise inspect`

Sections measure each seed's model, or, with a `model` instead of an arm, all seeds together. The size that equals a
loss is read from the line through the losses of `curve` over the logarithm of its sizes. Ratios and sizes have
jackknife intervals.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from tiewise.core.estimates import Estimate, jackknife, mean_interval
from tiewise.core.measurement import Measurement
from tiewise.inspection.inspection import inspect
from tiewise.training.folder import RESULTS, read_json, seed_folder
from tiewise.training.results import FINAL, Comparison, RunResult
from tiewise.training.study.grid import StudyGrid

Measure = Mapping[str, Any]
Term = Sequence[Any]
Cell = tuple[Any, ...]  # value of each axis
BySeed = dict[int, float]
TEXT = "builtin"  # text that sections of single models run on
OUTPUT_SHARE = "output_share@"


@dataclass(frozen=True)
class ClaimRuns:
    """Finished runs of a claim's grid."""

    comparisons: Mapping[Cell, Comparison]
    folders: Mapping[Cell, Path]

    @classmethod
    def read(cls, grid: StudyGrid, folder: Path) -> ClaimRuns:
        """Read the results of a finished study."""
        cells = list(itertools.product(*grid.axes.values()))
        folders = {cell: folder / name for cell, name in zip(cells, grid.cells(), strict=True)}
        return cls({cell: Comparison.from_dict(read_json(path / RESULTS)) for cell, path in folders.items()}, folders)

    def cell(self, values: Sequence[Any] = ()) -> Cell:
        """Return the cell with these values; without values, the only one."""
        if values:
            return tuple(values)
        (only,) = self.comparisons
        return only

    def runs(self, arm: str, cell: Cell) -> dict[int, RunResult]:
        """Return an arm's runs by seed."""
        return {run.seed: run for run in self.comparisons[cell].of(arm)}


def run_value(run: RunResult, metric: str) -> float:
    """Return a metric of a run.

    `gap` is validation less training loss. `share:NAME` is a share of right predictions. `output_share@A-B` is the
    output path's part of the two gradient norms of the table, over the steps from A to B (shares of all steps).
    """
    if metric == "gap":
        return run.heldout_nll - run.train_nll
    if metric.startswith("share:"):
        return run.shares[metric.removeprefix("share:")].share
    if metric.startswith(OUTPUT_SHARE):
        first, last = metric.removeprefix(OUTPUT_SHARE).split("-")
        return output_share(run, float(first), float(last))
    value: float = getattr(run, metric)
    return value


def output_share(run: RunResult, first: float, last: float) -> float:
    """Return the output path's mean share of the two gradient norms of a tied table."""
    shares = []
    for point in run.curve:
        if point.path_a is None or point.path_b is None:
            continue
        if first * run.steps <= point.step <= last * run.steps:
            shares.append(point.path_b / (point.path_a + point.path_b))
    return fmean(shares) if shares else math.nan


def _sum_by_seed(terms: Sequence[Term], runs: ClaimRuns) -> BySeed:
    """Return the weighted sum of terms for each seed that all of them have."""
    sums: list[BySeed] = []
    for weight, arm, metric, *at in terms:
        by_seed = runs.runs(arm, runs.cell(at))
        sums.append({seed: weight * run_value(run, metric) for seed, run in by_seed.items()})
    common = set.intersection(*(set(each) for each in sums))
    return {seed: sum(each[seed] for each in sums) for seed in sorted(common)}


def measure_sum(measure: Measure, runs: ClaimRuns) -> Estimate:
    """Return a weighted sum of metrics, with Student's interval over seeds."""
    return mean_interval(list(_sum_by_seed(measure["terms"], runs).values()))


def measure_ratio(measure: Measure, runs: ClaimRuns) -> Estimate:
    """Return the ratio of two weighted sums of metrics."""
    parts, totals = _sum_by_seed(measure["terms"], runs), _sum_by_seed(measure["over"], runs)
    seeds = sorted(parts.keys() & totals.keys())

    def of_seeds(chosen: Sequence[int]) -> float:
        """Return the ratio for some seeds."""
        return fmean(parts[seed] for seed in chosen) / fmean(totals[seed] for seed in chosen)

    return jackknife(of_seeds, seeds)


def equal_size(sizes: Sequence[float], losses: Sequence[float], loss: float) -> float:
    """Return the size at which a line through losses over log size has a loss.

    NaN: the losses do not fall with the size.

    >>> round(equal_size([1, 2, 4], [3.0, 2.0, 1.0], 1.5), 3)
    2.828
    """
    slope, level = np.polyfit(np.log(sizes), losses, 1)
    if slope >= 0:
        return math.nan
    return float(np.exp((loss - level) / slope))


@dataclass(frozen=True)
class EqualSizes:
    """Runs of the arm `curve` in all cells, and of another arm in one."""

    curve: list[dict[int, RunResult]]  # in the order of the cells
    arm: dict[int, RunResult]
    cells: list[Cell]
    at: Cell

    @classmethod
    def of(cls, measure: Measure, runs: ClaimRuns) -> EqualSizes:
        """Return the runs that a measure names."""
        cells, at = list(runs.comparisons), (measure["at"],)
        curve = [runs.runs(measure["curve"], cell) for cell in cells]
        return cls(curve, runs.runs(measure["arm"], at), cells, at)

    @property
    def seeds(self) -> list[int]:
        """Seeds that all arms and cells have."""
        return sorted(set(self.arm).intersection(*self.curve))

    def equal(self, sizes: Sequence[float], seeds: Sequence[int]) -> float:
        """Return the size on the curve that has the arm's mean loss over these seeds."""
        losses = [fmean(runs[seed].heldout_nll for seed in seeds) for runs in self.curve]
        return equal_size(sizes, losses, fmean(self.arm[seed].heldout_nll for seed in seeds))

    def parameters(self) -> list[int]:
        """Return the parameters of the curve's models, by cell."""
        return [next(iter(runs.values())).total_parameters for runs in self.curve]


def measure_equivalent_depth(measure: Measure, runs: ClaimRuns) -> Estimate:
    """Return φ: r applications of one layer are as good as r^φ layers."""
    models = EqualSizes.of(measure, runs)
    depths = [cell[0] for cell in models.cells]
    return jackknife(lambda seeds: math.log(models.equal(depths, seeds)) / math.log(measure["at"]), models.seeds)


def measure_equivalent_size(measure: Measure, runs: ClaimRuns) -> Estimate:
    """Return ψ: parameters of a larger model for each one that the arm adds."""
    models = EqualSizes.of(measure, runs)
    sizes = models.parameters()
    before = sizes[models.cells.index(models.at)]
    added = next(iter(models.arm.values())).total_parameters - before
    return jackknife(lambda seeds: (models.equal(sizes, seeds) - before) / added, models.seeds)


def measure_section(measure: Measure, runs: ClaimRuns) -> Estimate:
    """Return a quantity of a section of an inspection."""
    cell, section = runs.cell(), measure["section"]
    folder = runs.folders[cell]
    if "arm" not in measure:
        by_model = inspect(folder, only=[section]).found(section)
        return _quantity_of(by_model[measure["model"]], measure)
    values = []
    for seed in runs.runs(measure["arm"], cell):
        model = seed_folder(folder, measure["arm"], seed) / FINAL
        (measured,) = inspect(model, text=TEXT, only=[section]).found(section).values()
        values.append(_quantity_of(measured, measure).value)
    return mean_interval(values)


def _quantity_of(measured: Any, measure: Measure) -> Estimate:
    """Return the named quantity of a measurement, less its chance level on request."""
    assert isinstance(measured, Measurement)
    q = next(q for q in measured.quantities if q.name == measure["quantity"])
    chance = q.chance or 0.0
    if not measure.get("less_chance"):
        chance = 0.0
    return Estimate(q.value - chance, q.low - chance, q.high - chance, q.n)


MEASURES: Mapping[str, Callable[[Measure, ClaimRuns], Estimate]] = {
    "sum": measure_sum,
    "ratio": measure_ratio,
    "equivalent_depth": measure_equivalent_depth,
    "equivalent_size": measure_equivalent_size,
    "section": measure_section,
}
