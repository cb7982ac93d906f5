"""Curves over training, averaged over seeds: what the figures draw and what their data tables list."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from tiewise.training.results import Comparison, CurvePoint

Value = Callable[[CurvePoint], float | None]


@dataclass(frozen=True)
class Series:
    """One arm's curve at the steps where every one of its seeds was measured."""

    arm: str
    steps: list[int]
    seeds: dict[int, list[float]]  # seed → value per step
    mean: list[float]


def heldout_nll(point: CurvePoint) -> float | None:
    """Held-out nll in nats per token."""
    return point.heldout_nll


def train_nll(point: CurvePoint) -> float | None:
    """Training nll in nats per token."""
    return point.train_nll


def cosine(point: CurvePoint) -> float | None:
    """Cosine between the two paths' gradients."""
    return point.cosine


def path_b_share(point: CurvePoint) -> float | None:
    """‖B‖ / (‖A‖ + ‖B‖): the output projection's share of the two gradient norms."""
    if point.path_a is None or point.path_b is None or point.path_a + point.path_b == 0:
        return None
    return point.path_b / (point.path_a + point.path_b)


def series(comparison: Comparison, value: Value) -> list[Series]:
    """Each arm's curve; an arm in which this was never measured is left out."""
    found = (_series(arm, _measured(comparison, arm, value)) for arm in comparison.arms)
    return [one for one in found if one.steps]


def difference_series(comparison: Comparison, value: Value) -> list[Series]:
    """Each arm's curve minus the reference's of the same seed."""
    base = _measured(comparison, comparison.reference, value)
    found = []
    for arm in comparison.arms:
        own = _measured(comparison, arm, value)
        paired = {
            seed: {step: own[seed][step] - base[seed][step] for step in own[seed].keys() & base[seed].keys()}
            for seed in own.keys() & base.keys()
        }
        found.append(_series(arm, paired))
    return [one for one in found if one.steps and one.arm != comparison.reference]


def _measured(comparison: Comparison, arm: str, value: Value) -> dict[int, dict[int, float]]:
    return {
        run.seed: {p.step: v for p in run.curve if (v := value(p)) is not None and math.isfinite(v)}
        for run in comparison.of(arm)
    }


def _series(arm: str, measured: dict[int, dict[int, float]]) -> Series:
    common = set.intersection(*map(set, measured.values())) if measured else set()
    steps = sorted(common)
    seeds = {seed: [values[step] for step in steps] for seed, values in sorted(measured.items())}
    return Series(arm, steps, seeds, [statistics.fmean(column) for column in zip(*seeds.values(), strict=True)])
