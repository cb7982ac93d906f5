"""A small L-BFGS for smooth functions of an array (Liu & Nocedal 1989), with a weak Wolfe line search by bisection."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tiewise.analysis.token_table import Array

MEMORY = 30
ARMIJO, CURVATURE = 1e-4, 0.9
MOST_HALVINGS = 60


@dataclass(frozen=True)
class Minimum:
    """Where the search ended."""

    x: Array  # the point
    value: float  # of the function there
    gradient: float  # its largest element there in size; the distance from an optimum, as far as a slope can tell
    steps: int  # taken


def minimise(loss: Callable[[Array], tuple[float, Array]], x: Array, steps: int, tolerance: float) -> Minimum:
    """Walk from `x` until no element of the gradient exceeds `tolerance`, or a step no longer lowers the value.

    `loss` returns value and gradient.
    """
    memory: deque[tuple[Array, Array, float]] = deque(maxlen=MEMORY)
    value, slope = loss(x)
    for step in range(steps):
        if np.abs(slope).max() <= tolerance:
            return Minimum(x, value, float(np.abs(slope).max()), step)
        direction = _direction(slope, memory)
        if direction @ slope >= 0:
            memory.clear()
            direction = -slope
        found = _line(loss, x, value, slope, direction)
        if found is None and not memory:
            return Minimum(x, value, float(np.abs(slope).max()), step)
        if found is None:
            memory.clear()
            continue
        moved, value, turned = found
        s, y = moved - x, turned - slope
        curvature = float(s @ y)
        if curvature > 0:
            memory.append((s, y, curvature))
        x, slope = moved, turned
    return Minimum(x, value, float(np.abs(slope).max()), steps)


def _direction(slope: Array, memory: deque[tuple[Array, Array, float]]) -> Array:
    """Minus the slope times the inverse curvature that the last steps show."""
    found, shares = slope.copy(), []
    for s, y, curvature in reversed(memory):
        share = s @ found / curvature
        found -= share * y
        shares.append(share)
    if memory:
        _, y, curvature = memory[-1]
        found *= curvature / (y @ y)
    for (s, y, curvature), share in zip(memory, reversed(shares), strict=True):
        found += (share - y @ found / curvature) * s
    return -found


def _line(
    loss: Callable[[Array], tuple[float, Array]], x: Array, value: float, slope: Array, direction: Array
) -> tuple[Array, float, Array] | None:
    """The point that a step along `direction` leads to; None where no step lowers the value."""
    descent = float(slope @ direction)
    low, high, size = 0.0, math.inf, min(1.0, 1.0 / float(np.abs(direction).max()))
    for _ in range(MOST_HALVINGS):
        moved = x + size * direction
        there, turned = loss(moved)
        if not there <= value + ARMIJO * size * descent:
            high = size
        elif turned @ direction < CURVATURE * descent:
            low = size
        else:
            return moved, there, turned
        size = (low + high) / 2 if math.isfinite(high) else 2 * size
    return None
