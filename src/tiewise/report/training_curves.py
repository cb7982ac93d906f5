"""Numbers over training as curves: each arm's mean over seeds, and its single seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tiewise.core.estimates import ratio
from tiewise.core.measurement import NATS, Curve
from tiewise.training.results import Comparison, CurvePoint

Moments = Mapping[str, Mapping[int, Sequence[CurvePoint]]]  # arm → seed → its logged steps
ValuesOfSeeds = Mapping[int, Mapping[int, float]]  # seed → step → value


@dataclass(frozen=True)
class OverTraining:
    """A number measured at every logged step, and its figure.

    {reference} in a text is replaced by the reference's name.
    """

    title: str
    unit: str
    caption: str
    value: Callable[[CurvePoint], float | None]  # nan and None are left out of the curve
    paired: bool = False  # the reference's value of the same seed is subtracted
    level: float | None = None  # horizontal line to compare with


def _tuning_loss(point: CurvePoint) -> float | None:
    """Return the loss on tuning text; in older results on validation text."""
    return point.heldout_nll if point.tune_nll is None else point.tune_nll


def _training_loss(point: CurvePoint) -> float | None:
    """Return the loss of the step's batch."""
    return point.train_nll


def _head_share(point: CurvePoint) -> float | None:
    """Return the head path's share of the norms of both gradients."""
    if point.path_a is None or point.path_b is None:
        return None
    return ratio(point.path_b, point.path_a + point.path_b)


def _cosine(point: CurvePoint) -> float | None:
    """Return the cosine of both paths' gradients."""
    return point.cosine


TUNING = OverTraining("Loss on tuning text", NATS, "Lower is better. It chooses the best step.", _tuning_loss)
AHEAD = OverTraining(
    "Loss on tuning text minus {reference} over training",
    f"difference, {NATS}",
    "Below zero: ahead of {reference}.",
    _tuning_loss,
    paired=True,
    level=0.0,
)
TRAINING = OverTraining("Training loss", NATS, "Of each step's batch.", _training_loss)
OUTPUT_SHARE = OverTraining(
    "Head path’s share of the gradient",
    "‖B‖ / (‖A‖ + ‖B‖)",
    "A: lookup path, B: head path. Above 50 %: the head pulls harder.",
    _head_share,
    level=0.5,
)
COSINE = OverTraining(
    "Do both paths pull the same way?", "cosine of both paths", "Above zero they agree.", _cosine, level=0.0
)


def moments_of(comparison: Comparison) -> Moments:
    """Return the logged steps of every run of a comparison."""
    return {arm: {run.seed: run.curve for run in comparison.of(arm)} for arm in comparison.arms}


def over_training(curves: Moments, reference: str, measured: OverTraining) -> tuple[list[Curve], list[Curve]]:
    """Return the mean over seeds of every arm, and every seed of arms with several seeds.

    A curve has the steps at which all seeds of its arm were measured; an arm without any is left out.

    Args:
        curves: arm → seed → its logged steps.
        reference: arm whose value of the same seed is subtracted, if the measure is paired.
        measured: the number to draw.
    """
    values: dict[str, ValuesOfSeeds] = {}
    for arm, by_seed in curves.items():
        values[arm] = {seed: _values(points, measured) for seed, points in by_seed.items()}
    if measured.paired:
        of_reference = values.pop(reference)
        values = {arm: _minus(of_arm, of_reference) for arm, of_arm in values.items()}
    template = Curve(
        measured.title.format(reference=reference),
        (),
        (),
        along="training step",
        unit=measured.unit,
        level=measured.level,
        why=f"{measured.caption.format(reference=reference)} Thin lines are single seeds.",
    )
    means: list[Curve] = []
    single: list[Curve] = []
    for arm, of_arm in values.items():
        seeds = _curves_of_seeds(replace(template, of=arm), of_arm)
        if seeds:
            means.append(_mean_curve(seeds))
        if len(seeds) > 1:
            single += seeds
    return means, single


def _values(points: Sequence[CurvePoint], measured: OverTraining) -> dict[int, float]:
    """Return step → value of one run, at the steps that have a finite one."""
    values = {}
    for point in points:
        value = measured.value(point)
        if value is not None and math.isfinite(value):
            values[point.step] = value
    return values


def _minus(values: ValuesOfSeeds, reference: ValuesOfSeeds) -> ValuesOfSeeds:
    """Return the difference from the reference at every step that both runs of a seed have."""
    differences = {}
    for seed in values.keys() & reference.keys():
        ours, theirs = values[seed], reference[seed]
        differences[seed] = {step: ours[step] - theirs[step] for step in ours.keys() & theirs.keys()}
    return differences


def _curves_of_seeds(template: Curve, values: ValuesOfSeeds) -> list[Curve]:
    """Return a curve for each seed over the steps that all seeds have. Empty if there are no such steps."""
    if not values:
        return []
    steps_of_seeds = [set(of_seed) for of_seed in values.values()]
    steps = tuple(sorted(set.intersection(*steps_of_seeds)))
    if not steps:
        return []
    curves = []
    for _, of_seed in sorted(values.items()):
        curves.append(replace(template, x=steps, y=tuple(of_seed[step] for step in steps)))
    return curves


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean of curves that have the same steps."""
    at_steps = zip(*(curve.y for curve in curves), strict=True)
    return replace(curves[0], y=tuple(statistics.fmean(values) for values in at_steps))
