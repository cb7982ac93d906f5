"""What changes while the arms of a comparison train: the measures of a moment, and their curves, as data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tiewise.core.estimates import ratio
from tiewise.core.found import NATS, Curve
from tiewise.training.results import CurvePoint


@dataclass(frozen=True)
class OverTraining:
    """A number of every moment of training, and its figure; {reference} stands for the reference's name."""

    title: str
    unit: str
    caption: str
    value: Callable[[CurvePoint], float | None]  # nan and None are not drawn
    paired: bool = False  # whether the reference's value of the same seed is taken away
    level: float | None = None  # a value to compare with


VALIDATION = OverTraining("Validation loss", NATS, "Lower is better.", lambda point: point.heldout_nll)
MINUS, AHEAD_IS = "Validation loss minus {reference} over training", "Below zero: ahead of {reference}."
AHEAD = OverTraining(MINUS, f"difference, {NATS}", AHEAD_IS, VALIDATION.value, paired=True, level=0.0)
TRAINING = OverTraining("Training loss", NATS, "Of each step's batch.", lambda p: p.train_nll)
OUTPUT_SHARE = OverTraining(
    "Head path’s share of the gradient",
    "‖B‖ / (‖A‖ + ‖B‖)",
    "A: lookup path, B: head path. Above 50 % the head pulls harder.",
    lambda p: None if p.path_a is None or p.path_b is None else ratio(p.path_b, p.path_a + p.path_b),
    level=0.5,
)
COSINE = OverTraining(
    "Do both paths pull the same way?", "cosine of both paths", "Above zero they agree.", lambda p: p.cosine, level=0.0
)


def over_training(
    curves: Mapping[str, Mapping[int, Sequence[CurvePoint]]], reference: str, measured: OverTraining
) -> tuple[list[Curve], list[Curve]]:
    """(mean over seeds of every arm, every seed of arms that have several), at the steps where all of an arm's were.

    Args:
        curves: arm → seed → its moments.
        reference: the arm whose value of the same seed is taken away, where the measure asks for it.
        measured: what is drawn.
    """
    values = {  # arm → seed → step → value
        arm: {
            seed: {p.step: v for p in points if (v := measured.value(p)) is not None and math.isfinite(v)}
            for seed, points in by_seed.items()
        }
        for arm, by_seed in curves.items()
    }
    base = values.pop(reference) if measured.paired else None
    title, caption = (text.format(reference=reference) for text in (measured.title, measured.caption))
    means: list[Curve] = []
    single: list[Curve] = []
    for arm, own in values.items():
        if base is not None:
            pairs = {seed: (own[seed], base[seed]) for seed in own.keys() & base.keys()}
            own = {seed: {step: y[step] - z[step] for step in y.keys() & z.keys()} for seed, (y, z) in pairs.items()}
        steps = tuple(sorted(set.intersection(*map(set, own.values())))) if own else ()
        if steps:
            seeds = [tuple(own[seed][step] for step in steps) for seed in sorted(own)]
            mean = Curve(title, steps, tuple(map(statistics.fmean, zip(*seeds, strict=True))), along="training step")
            why = f"{caption} Thin lines are single seeds."
            means.append(replace(mean, of=arm, unit=measured.unit, level=measured.level, why=why))
            single += [replace(means[-1], y=y) for y in seeds if len(seeds) > 1]
    return means, single
