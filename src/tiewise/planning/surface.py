"""A surface fitted to the differences of many settings, to predict untrained settings.

    y_i = β·f(log x_i) + u_i + e_i,   u ~ N(0, τ²) between settings,   e ~ N(0, σ²/n_i) between seeds

A random-effects meta-regression: f has a constant, each axis and, with enough settings, their products. σ² is pooled
over the seeds of all settings, τ² is that of Paule & Mandel (J. Res. Nat. Bur. Stand. 1982), and intervals have
Student's t of n − p degrees of freedom (Knapp & Hartung, Statistics in Medicine 2003). Predictions are scored on
settings that were left out of the fit. Outside the convex hull of the settings there is no evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from tiewise.core.estimates import Estimate, critical_t
from tiewise.core.measurement import plain

Array = NDArray[np.float64]
SPARE = 2  # minimum of degrees of freedom


@dataclass(frozen=True)
class Surface:
    """A fitted surface over n settings with d axes."""

    points: Array  # [n, d], logarithms
    products: tuple[tuple[int, int], ...]  # axes that interact
    beta: Array  # [p]
    covariance: Array  # [p, p] of beta
    between: float  # τ²
    within: float  # σ², variance of one seed

    def at(self, point: Sequence[float], seeds: float = math.inf) -> Estimate:
        """Predict the difference of a setting with so many seeds, with its 95 % interval."""
        row = _features(np.atleast_2d(np.asarray(point, float)) - self.points.mean(0), self.products)[0]
        spread = math.sqrt(float(row @ self.covariance @ row) + self.between + self.within / seeds)
        value, half = float(row @ self.beta), critical_t(len(self.points) - len(self.beta)) * spread
        return Estimate(value, value - half, value + half, len(self.points))


@dataclass(frozen=True)
class SurfaceScore:
    """Quality of predictions of left-out settings: counts of settings, and mean losses.

    A mean loss is that of a rule for choosing an arm, minus the loss of the better arm, in nats per token.
    """

    settings: int
    covered: int  # settings whose difference is within the predicted 95 % interval
    enclosed: int  # settings in the convex hull of the others
    enclosed_covered: int  # settings counted in both
    chosen: float  # mean loss of choosing the arm if its prediction is below 0
    always: float  # mean loss of always choosing the arm
    never: float  # mean loss of never choosing it

    def sentences(self, arm: str) -> list[str]:
        """Return two sentences about the choice of `arm`."""
        chosen, always, never = (f"{plain(losses)} nats per token" for losses in (self.chosen, self.always, self.never))
        return [
            f"Each setting was predicted from the others: {self.covered} of {self.settings} lie within their 95 % "
            f"interval, {self.enclosed_covered} of the {self.enclosed} that the others enclose.",
            f"To choose by the prediction loses {chosen} against the better choice, always {arm} {always}, "
            f"never {never}.",
        ]


def enclosed(points: ArrayLike, point: Sequence[float]) -> bool:
    """Return whether a point [d] is in the convex hull of the points [n, d]."""
    rows = np.asarray(points, float)
    system, target = np.vstack([rows.T, np.ones(len(rows))]), np.array([*point, 1.0])
    return bool(scipy.optimize.linprog(np.zeros(len(rows)), A_eq=system, b_eq=target).success)


def _features(centred: Array, products: Sequence[tuple[int, int]]) -> Array:
    """Return features [n, p] of points [n, d]: a constant, the axes and some products."""
    return np.column_stack([np.ones(len(centred)), centred, *(centred[:, i] * centred[:, j] for i, j in products)])


def fit(points: Array, values: Array, errors: Array, seeds: Array) -> Surface | None:
    """Fit a surface to settings `points` [n, d], which are logarithms.

    `values` are their mean differences, `errors` standard errors and `seeds` counts of seeds, all [n]. None if settings
    are too few to leave degrees of freedom, or do not distinguish the axes.
    """
    n, d = points.shape
    products = _distinct_products(points)
    x = _features(points - points.mean(0), products)
    if n - (1 + d) < SPARE or np.linalg.matrix_rank(x) < x.shape[1]:
        return None
    within = float(np.sum(errors**2 * seeds * (seeds - 1)) / np.sum(seeds - 1))

    def weighted(between: float) -> tuple[Array, Array, float]:
        """Return β, its covariance, and the weighted squared residuals per degree of freedom."""
        weights = 1 / (within / seeds + between)
        inverse: Array = np.linalg.inv(x.T @ (weights[:, None] * x)).astype(np.float64, copy=False)
        beta = inverse @ (x.T @ (weights * values))
        return beta, inverse, float(np.sum(weights * (values - x @ beta) ** 2)) / (n - x.shape[1])

    low, high = 1e-12 * max(within, 1e-12), 1e-12 + 4 * float(np.var(values)) * n
    between = low
    if weighted(low)[2] > 1:  # settings differ by more than their seeds do
        between = high
        if weighted(high)[2] < 1:
            between = float(scipy.optimize.brentq(lambda t: weighted(t)[2] - 1, low, high))
    beta, inverse, residual = weighted(between)
    return Surface(points, products, beta, inverse * max(1.0, residual), between, within)


def _distinct_products(points: Array) -> tuple[tuple[int, int], ...]:
    """Return the pairs of axes whose product settings [n, d] distinguish from the other features.

    Empty if the products leave too few degrees of freedom.
    """
    n, d = points.shape
    pairs = list(combinations(range(d), 2))
    degrees_of_freedom = n - (1 + d + len(pairs))  # of a surface with a constant, every axis and every product
    if degrees_of_freedom < max(SPARE, d):
        return ()
    centred = points - points.mean(0)
    products: list[tuple[int, int]] = []
    for pair in pairs:
        # a product that the other features already determine raises no rank: it cannot be fitted
        features = _features(centred, [*products, pair])
        if np.linalg.matrix_rank(features) == features.shape[1]:
            products.append(pair)
    return tuple(products)


def leave_one_out(points: Array, values: Array, errors: Array, seeds: Array) -> list[tuple[Estimate, bool]]:
    """Predict the difference of every setting, with its seeds, from the other settings.

    The second of a pair is true if the setting is in the convex hull of the others. All settings with the same sizes
    are left out together. Empty unless every setting can be predicted.
    """
    predictions = []
    for i in range(len(points)):
        others = (points != points[i]).any(1)
        surface = fit(points[others], values[others], errors[others], seeds[others])
        if surface is not None:
            predictions.append((surface.at(points[i], float(seeds[i])), enclosed(points[others], points[i])))
    return predictions if len(predictions) == len(points) else []


def score_predictions(values: Array, left_out: Sequence[tuple[Estimate, bool]]) -> SurfaceScore:
    """Score the predictions of `leave_one_out` against the measured differences [n]."""
    covered = np.array([one.low <= value <= one.high for (one, _), value in zip(left_out, values, strict=True)])
    within, even = np.array([inside for _, inside in left_out]), np.ones(len(values))
    losses = (regret(values, signs) for signs in ([one.value for one, _ in left_out], -even, even))
    return SurfaceScore(len(values), int(covered.sum()), int(within.sum()), int((covered & within).sum()), *losses)


def regret(measured: ArrayLike, signs: ArrayLike) -> float:
    """Return the mean loss of a rule, minus that of the better arm.

    The rule takes the arm if its sign is below 0, else the reference.
    """
    return float(np.maximum(np.where(np.asarray(signs) < 0, measured, np.negative(measured)), 0.0).mean())
