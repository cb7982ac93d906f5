"""Surface through the differences of a study: predictions for new settings, and their score."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from tiewise.core.estimates import Estimate
from tiewise.core.measurement import NATS, Grid, Listing, Quantity
from tiewise.planning.surface import Surface, enclosed, fit, leave_one_out, score_predictions
from tiewise.report.comparison_measurement import difference
from tiewise.report.heat_map import heat_map
from tiewise.report.report_page import PageSection
from tiewise.report.sweep_axes import axes_of, number_texts, parted, words
from tiewise.training.study.study import Study, SweepResult

FITTED = "Crossed: no evidence; the interval holds zero, or no settings enclose it."
FINE = 13  # number of predictions along an axis


def fitted(study: Study) -> Iterator[PageSection]:
    """Yield a section for every contrast: predictions of a surface, and their score.

    The score is of settings that were left out of the fit. A contrast with too few settings has no section.
    """
    axes = axes_of(study)
    if not axes.numeric:
        return
    usable = [result for result in study.results if math.isfinite(result.error)]
    for name, results in parted(usable, axes.others).items():
        section = _surface_section(f"Surface: {name}", results, axes.numeric)
        if section is not None:
            yield section


def _surface_section(title: str, results: Sequence[SweepResult], axes: Sequence[str]) -> PageSection | None:
    """Return the surface over numeric axes of one contrast's results. None for too few settings."""
    settings, measured = [], []
    for result in results:
        settings.append([result.measure(axis) for axis in axes])
        measured.append((result.heldout.mean, result.error, result.heldout.n))
    points = np.log(settings)
    values, errors, seeds = np.array(measured).T
    surface = fit(points, values, errors, seeds)
    left_out = leave_one_out(points, values, errors, seeds)
    if surface is None or not left_out:
        return None
    maps = []
    if len(axes) > 1:
        maps.append(heat_map(predictions(surface, axes)))
    sentences = score_predictions(values, left_out).sentences(results[0].arm)
    return PageSection(title, maps, findings=sentences, folded=[_left_out_table(results, left_out)])


def _left_out_table(results: Sequence[SweepResult], left_out: Sequence[tuple[Estimate, bool]]) -> Listing:
    """Return each setting with its measured difference and the prediction from the others."""
    cells = []
    for result, (estimate, is_enclosed) in zip(results, left_out, strict=True):
        predicted = Quantity.of_estimate("", estimate, unit=NATS, digits=4)
        remark = "" if is_enclosed else "beyond the others: no evidence"
        cells.append([result.cell, str(difference(result.heldout)), str(predicted), remark])
    return Listing("Settings left out", ["setting", "measured", "predicted by the others", ""], cells)


def predictions(surface: Surface, axes: Sequence[str]) -> Grid:
    """Return predictions for new settings along the first two axes, the others at their means.

    A value is NaN if its interval contains zero, or if the settings do not enclose the point.
    """
    low, high = surface.points.min(0), surface.points.max(0)
    others = surface.points.mean(0)[2:]
    x_values = np.linspace(low[0], high[0], FINE)
    y_values = np.linspace(low[1], high[1], FINE)
    values = []
    for y in y_values:
        values.append(tuple(_clear_prediction(surface, [x, y, *others]) for x in x_values))
    gaps = [abs(value) for value in chain.from_iterable(values) if math.isfinite(value)]
    other_texts = number_texts(np.exp(others))
    fixed = [f"{words(axis)} {text}" for axis, text in zip(axes[2:], other_texts, strict=True)]
    return Grid(
        "Prediction for a new setting",
        tuple(number_texts(np.exp(y_values))),
        tuple(number_texts(np.exp(x_values))),
        tuple(values),
        max(gaps, default=1.0),
        (words(axes[1]), words(axes[0])),
        of=", ".join(fixed),
        why=FITTED,
    )


def _clear_prediction(surface: Surface, point: Sequence[float]) -> float:
    """Return the prediction at a point.

    NaN if its interval contains zero, or if the settings do not enclose the point.
    """
    estimate = surface.at(point)
    holds_zero = estimate.low < 0 < estimate.high
    if holds_zero or not enclosed(surface.points, point):
        return math.nan
    return estimate.value
