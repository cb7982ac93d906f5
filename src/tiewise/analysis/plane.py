"""A table's rows in two dimensions: along the two directions of largest variance, which both ends can be drawn in."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.anisotropy import Moments
from tiewise.analysis.tables import Array, Table


@dataclass(frozen=True)
class Plane:
    """Sampled rows less the table's mean, along its two leading directions.

    Args:
        shares: of the variance of all rows along each; exact, from the table's covariance.
        points: coordinates of the sampled rows [n][2], in the table's units.
        variance: Σ‖row − mean‖² / V: what the shares are of.
    """

    shares: tuple[float, float]
    points: tuple[tuple[float, float], ...]
    variance: float

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return asdict(self)


def plane(table: Table, found: Moments, ids: NDArray[np.int64], beside: Plane | None = None) -> Plane:
    """Project the rows `ids` of a table whose `moments` are `found`.

    The direction of an axis has no meaning. It is turned so that it runs along with the same axis of `beside`, else so
    that the sampled points' largest coordinate on it is positive.
    """
    values, axes = found.principal
    if table.width == 1:
        values, axes = np.pad(values, (0, 1)), np.pad(axes, ((0, 0), (0, 1)))
    total = float(values.sum())
    shares = values[:2] / total if total > 0 else np.zeros(2)
    points: Array = (table.take(ids) - found.sum / found.rows) @ axes[:, :2]
    points *= _signs(points, beside)
    coordinates = tuple((float(x), float(y)) for x, y in points)
    return Plane((float(shares[0]), float(shares[1])), coordinates, total / found.rows)


def _signs(points: Array, beside: Plane | None) -> Array:
    if beside is None or not len(points):
        chosen = [column[np.abs(column).argmax()] if len(column) else 1.0 for column in points.T]
    else:
        chosen = list((points * np.array(beside.points)).sum(0))
    return np.where(np.array(chosen) < 0, -1.0, 1.0)
