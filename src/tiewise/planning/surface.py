"""A surface through the differences of many settings, for what they say of settings that nobody trained.

    y_i = β·f(log x_i) + u_i + e_i,   u ~ N(0, τ²) between settings,   e ~ N(0, σ²/n_i) between seeds

A random-effects meta-regression: f has a constant, each axis and, where there are settings enough, their products; σ²
is pooled over the seeds of all settings, τ² is that of Paule & Mandel (J. Res. Nat. Bur. Stand. 1982), and intervals
have Student's t of n − p degrees of freedom (Knapp & Hartung, Statistics in Medicine 2003). What it predicts is scored
on settings that it has not seen; beyond the hull of those that it has, it has no evidence and says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from tiewise.core.estimates import Estimate, critical
from tiewise.core.found import plain

SPARE = 2  # degrees of freedom, at least


@dataclass(frozen=True)
class Surface:
    """A fitted surface over n settings with d axes."""

    points: NDArray  # [n, d], logarithms
    products: tuple[tuple[int, int], ...]  # axes that interact
    beta: NDArray  # [p]
    covariance: NDArray  # [p, p] of beta
    between: float  # τ²
    within: float  # σ², of one seed

    def at(self, point: Sequence[float], seeds: float = math.inf) -> Estimate:
        """What a setting is predicted to have, were it trained with so many seeds: 95 % interval of that figure."""
        row = _features(np.atleast_2d(np.asarray(point, float)) - self.points.mean(0), self.products)[0]
        spread = math.sqrt(float(row @ self.covariance @ row) + self.between + self.within / seeds)
        value, half = float(row @ self.beta), critical(len(self.points) - len(self.beta)) * spread
        return Estimate(value, value - half, value + half, len(self.points))


@dataclass(frozen=True)
class SurfaceScore:
    """How well settings were predicted by the others: a count of them, or a mean loss above the better choice's."""

    settings: int
    held: int  # of them within the 95 % interval that was predicted
    enclosed: int  # of them within the hull of the others
    enclosed_held: int
    chosen: float  # loss of choosing the arm where its prediction is below 0
    always: float  # of choosing it everywhere
    never: float

    def said(self, arm: str) -> list[str]:
        """Two sentences about the choice of `arm`."""
        chosen, always, never = (f"{plain(lost)} nats per token" for lost in (self.chosen, self.always, self.never))
        return [
            f"Each setting was predicted from the others: {self.held} of {self.settings} lie within their 95 % "
            f"interval, {self.enclosed_held} of the {self.enclosed} that the others enclose.",
            f"To choose by the prediction loses {chosen} against the better choice, always {arm} {always}, "
            f"never {never}.",
        ]


def enclosed(points: ArrayLike, point: Sequence[float]) -> bool:
    """Whether a point [d] lies within the hull of others [n, d]: is it a mean of them with weights?"""
    rows = np.asarray(points, float)
    system, wanted = np.vstack([rows.T, np.ones(len(rows))]), np.array([*point, 1.0])
    return bool(scipy.optimize.linprog(np.zeros(len(rows)), A_eq=system, b_eq=wanted).success)


def _features(centred: NDArray, products: Sequence[tuple[int, int]]) -> NDArray:
    """[n, d] → [n, p]: a constant, the axes, and some of their products."""
    return np.column_stack([np.ones(len(centred)), centred, *(centred[:, i] * centred[:, j] for i, j in products)])


def fit(points: NDArray, values: NDArray, errors: NDArray, seeds: NDArray) -> Surface | None:
    """Fit settings `points` [n, d] (logarithms), their mean differences, standard errors and seeds, all [n].

    None for settings too few to leave degrees of freedom, or that do not tell the axes apart.
    """
    n, d = points.shape
    pairs = [*combinations(range(d), 2)] if n - (1 + d + d * (d - 1) // 2) >= max(SPARE, d) else []
    x, products = _features(points - points.mean(0), []), list[tuple[int, int]]()
    if n - x.shape[1] < SPARE or np.linalg.matrix_rank(x) < x.shape[1]:
        return None
    for pair in pairs:  # of two axes that vary with the others only, nothing tells the product
        more = _features(points - points.mean(0), [*products, pair])
        if np.linalg.matrix_rank(more) == more.shape[1]:
            x, products = more, [*products, pair]
    within = float(np.sum(errors**2 * seeds * (seeds - 1)) / np.sum(seeds - 1))

    def weighted(between: float) -> tuple[NDArray, NDArray, float]:
        """(β, its covariance, the weighted square of what is left per degree of freedom)."""
        weights = 1 / (within / seeds + between)
        inverse = np.linalg.inv(x.T @ (weights[:, None] * x))
        beta = inverse @ (x.T @ (weights * values))
        return beta, inverse, float(np.sum(weights * (values - x @ beta) ** 2)) / (n - x.shape[1])

    low, high = 1e-12 * max(within, 1e-12), 1e-12 + 4 * float(np.var(values)) * n
    if weighted(low)[2] > 1:  # settings differ by more than their seeds do
        low = float(scipy.optimize.brentq(lambda t: weighted(t)[2] - 1, low, high)) if weighted(high)[2] < 1 else high
    beta, inverse, left = weighted(low)
    return Surface(points, tuple(products), beta, inverse * max(1.0, left), low, within)


def leave_one_out(points: NDArray, values: NDArray, errors: NDArray, seeds: NDArray) -> list[tuple[Estimate, bool]]:
    """Predict every setting from the others, as it was measured, with its seeds; and whether their hull holds it.

    Others stand elsewhere: what was measured at the same place is left out with it. Empty where they are too few.
    """
    found = []
    for i in range(len(points)):
        others = (points != points[i]).any(1)
        surface = fit(points[others], values[others], errors[others], seeds[others])
        if surface is not None:
            found.append((surface.at(points[i], float(seeds[i])), enclosed(points[others], points[i])))
    return found if len(found) == len(points) else []


def scored(values: NDArray, left_out: Sequence[tuple[Estimate, bool]]) -> SurfaceScore:
    """Score what `leave_one_out` predicted against the differences that were measured [n]."""
    held = np.array([one.low <= value <= one.high for (one, _), value in zip(left_out, values, strict=True)])
    within, even = np.array([inside for _, inside in left_out]), np.ones(len(values))
    lost = (regret(values, signs) for signs in ([one.value for one, _ in left_out], -even, even))
    return SurfaceScore(len(values), int(held.sum()), int(within.sum()), int((held & within).sum()), *lost)


def regret(measured: ArrayLike, signs: ArrayLike) -> float:
    """Mean loss above the better arm's, of a rule that takes the arm where its sign is below 0, else the reference."""
    return float(np.maximum(np.where(np.asarray(signs) < 0, measured, np.negative(measured)), 0.0).mean())
