"""Figures of a section's `Measurement`, each a `Panel` with a caption and a table.

dot_plot, line_plot                    quantities and curves
stacked_plot, heat_map, token_plane    parts of a sum, a grid, points
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from tiewise.core.measurement import Curve, Grid, Measurement, Points, Quantity, Stack, plain
from tiewise.report.dot_plot import dots
from tiewise.report.drawing import Style, styles
from tiewise.report.heat_map import heat_map
from tiewise.report.line_plot import lines
from tiewise.report.report_page import Panel
from tiewise.report.stacked_plot import stacked
from tiewise.report.token_plane import plane

Named = TypeVar("Named", Stack, Curve, Grid)


def panels(by_model: Mapping[str, Measurement]) -> list[Panel]:
    """Return all figures of a section, or else a dot plot of every unit.

    The order is: quantities that have a figure's title (as dots), stacks, curves, grids and points.
    """
    quantities: list[Quantity] = []
    stacks: list[Stack] = []
    curves: list[Curve] = []
    grids: list[Grid] = []
    points: list[Points] = []
    for finding in by_model.values():
        quantities += finding.quantities
        stacks += finding.stacks
        curves += finding.curves
        grids += finding.grids
        points += finding.points
    looks = styles([*by_model, *(q.of for q in quantities)])  # models first, then other names of quantities
    figures = _dots_by_title(quantities, looks)
    figures += [_stacked_bars(bars) for bars in _by_name(stacks).values()]
    figures += [lines(of_name, looks) for of_name in _by_name(curves).values()]
    figures += [heat_map(grid) for grid in _distinct_grids(grids)]
    figures += [plane(one) for one in points]
    return figures or _dots_by_unit(quantities, looks)


def _by_name(parts: Iterable[Named]) -> dict[str, list[Named]]:
    """Return parts of figures by their name, in the order in which the names first occur."""
    groups: dict[str, list[Named]] = {}
    for part in parts:
        groups.setdefault(part.name, []).append(part)
    return groups


def _dots_by_title(quantities: Iterable[Quantity], looks: Mapping[str, Style]) -> list[Panel]:
    """Draw a figure for each title that quantities have."""
    by_title: dict[str, list[Quantity]] = {}
    for q in quantities:
        if q.figure:
            by_title.setdefault(q.figure, []).append(q)
    return [dots(title, of_title, looks) for title, of_title in by_title.items()]


def _dots_by_unit(quantities: Sequence[Quantity], looks: Mapping[str, Style]) -> list[Panel]:
    """Draw a figure for each unit that has a quantity with an interval."""
    figures = []
    for unit in dict.fromkeys(q.unit for q in quantities if not math.isnan(q.low)):
        of_unit = [q for q in quantities if q.unit == unit]
        figures.append(dots(unit.capitalize(), of_unit, looks))
    return figures


def _stacked_bars(bars: Sequence[Stack]) -> Panel:
    """Draw stacks of one name.

    A bar that several models share has a separate name, and is drawn once.
    """
    values = {}
    for bar in bars:
        label = bar.bar or f"{bar.of}, its own"
        values[label] = dict(bar.parts)
    first = bars[0]
    first_part, _ = first.parts[0]
    return stacked(values, first.name, first.unit, plain, first.why, first=first_part)


def _distinct_grids(grids: Iterable[Grid]) -> list[Grid]:
    """Return every grid once, those of one name together."""
    distinct = {}
    for of_name in _by_name(grids).values():
        for grid in of_name:
            distinct[repr(grid)] = grid  # grids with NaN are never equal, so their texts are compared
    return list(distinct.values())
