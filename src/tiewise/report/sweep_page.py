"""Findings of a study, on a terminal and as a page: sign changes, the table, maps of signs, curves, surfaces.

Axes that are numbers (tokens of a text and V of a tokenizer too) are drawn to a logarithmic scale. Every other axis,
and numbers beyond the first two, split the rows into separate figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Group
from rich.text import Text

from tiewise.core.estimates import Estimate
from tiewise.core.files import write_result
from tiewise.core.found import NATS, Curve, Grid, Listing, Quantity, count, plain, signed
from tiewise.planning.surface import Surface, enclosed, fit, leave_one_out, scored
from tiewise.report.comparison_found import DEMO, difference
from tiewise.report.drawing import styles
from tiewise.report.faces import rich_table
from tiewise.report.figures import heat_map
from tiewise.report.line_plot import lines
from tiewise.report.sheet import PageSection, Panel, Sheet
from tiewise.training.study.study import Study, SweepRow

PAGE = "report.html"
NOTE = (
    "Arm minus reference in nats per token, paired by seed, ± 95 % (Student’s t); below zero the arm is better. "
    "Sign: p < 0.05 by Holm over all rows. Could show: a repetition detects it by that rule in 80 of 100 cases. "
    "All losses are those of the last step."
)
MAP = f"Blue: better; orange: worse; no colour: not detected. In {NATS}."
BANDS = "Below zero: better; bands: 95 % intervals."
FITTED = "Crossed: no evidence; the interval holds zero, or no settings enclose it."
ALL = "All arms"
TEXT_AXES = ("train_tokens", "steps")
WORDS = {-1: "better", 0: "–", 1: "worse"}
FINE = 13  # predictions along an axis
FIRST = 4  # figures of a section that are not folded
MEASURED_HEADER = ("held-out", "±", "sign", "could show", "training", "n")


def varying(study: Study) -> list[str]:
    """Return axes with more than one value, or else the first. Those that are numbers everywhere come first."""
    axes = [axis for axis, values in study.grid.axes.items() if len(values) > 1] or list(study.grid.axes)[:1]
    return sorted(axes, key=lambda axis: not _is_numeric(study, axis))


def _is_numeric(study: Study, axis: str) -> bool:
    """Return whether every row has a number on an axis."""
    return not any(math.isnan(row.measure(axis)) for row in study.rows)


def _numeric_axes(study: Study) -> list[str]:
    """Return the varying axes that are numbers everywhere."""
    return [axis for axis in varying(study) if _is_numeric(study, axis)]


def parted(rows: Iterable[SweepRow], axes: Sequence[str]) -> dict[str, list[SweepRow]]:
    """Return rows by their contrast and their values on these axes, in words."""
    groups: dict[str, list[SweepRow]] = {}
    for row in rows:
        name = ", ".join([row.contrast, *(_in_words(row, axis) for axis in axes)])
        groups.setdefault(name, []).append(row)
    return groups


def _in_words(row: SweepRow, axis: str) -> str:
    """Return an axis and a row's value on it, in words."""
    return f"{_words(axis)} {_value(row, axis)}"


def _words(axis: str) -> str:
    """Return an axis in words."""
    return axis.replace("_", " ")


def _value(row: SweepRow, axis: str) -> str:
    """Return a row's value on an axis, in words."""
    value = row.at[axis]
    if value is None:
        return "all" if axis == "train_tokens" else "default"
    return count(value) if isinstance(value, int) else str(value)


def _number(value: float) -> str:
    """Return a number of an axis as text."""
    return count(value) if value >= 10 else f"{value:.3g}"  # a learning rate, too


def turns(study: Study, contrast: str) -> list[str]:
    """Return every change from one detected sign to the other along one axis, in words.

    Rows without a detected sign may be between the two.
    """
    rows = [row for row in study.rows if row.contrast == contrast]
    changes = []
    for axis in _numeric_axes(study):
        others = [other for other in varying(study) if other != axis]
        for line in parted(rows, others).values():
            changes += _turns_along(axis, line, others)
    return changes


def _turns_along(axis: str, rows: Iterable[SweepRow], others: Sequence[str]) -> list[str]:
    """Return the changes of the sign along one axis, in words, of rows that are alike on the `others`."""
    detected = sorted((row for row in rows if row.sign), key=lambda row: row.measure(axis))
    changes = []
    for a, b in pairwise(detected):
        if a.sign == b.sign:
            continue
        change = (
            f"from {WORDS[a.sign]} to {WORDS[b.sign]} between {_words(axis)} {_value(a, axis)} and {_value(b, axis)}"
        )
        if others:
            change += f" (at {', '.join(_in_words(a, other) for other in others)})"
        changes.append(change)
    return changes


def answer(study: Study) -> list[str]:
    """Return a sentence for every contrast on where its sign changes; then sizes of the models."""
    sentences = [_answer_of(study, rows) for rows in parted(study.rows, []).values()]
    sizes = [row.parameters for row in study.rows] + [row.reference_parameters for row in study.rows]
    smallest, largest = count(min(sizes)), count(max(sizes))
    sentences.append(f"Models of {smallest} to {largest} parameters: nothing is said of larger ones.")
    if study.left:
        sentences.append(f"Not finished: {study.left} of the grid’s cells.")
    return sentences


def _answer_of(study: Study, rows: Sequence[SweepRow]) -> str:
    """Return in a sentence where the sign of one contrast changes, or which sign is detected."""
    contrast = f"{rows[0].arm} against {rows[0].reference}"
    settings = len(rows)
    changes = turns(study, rows[0].contrast)
    if changes:
        more = f", and at {len(changes) - 2} other places" if len(changes) > 2 else ""
        return f"{contrast} turns {'; '.join(changes[:2])}{more}."
    better = sum(row.sign < 0 for row in rows)
    worse = sum(row.sign > 0 for row in rows)
    if better and worse:
        return f"{contrast} is better in {better} and worse in {worse} of {settings} settings."
    if better or worse:
        gaps = sorted(abs(row.heldout.mean) for row in rows if row.sign)
        span = plain(gaps[0]) if len(gaps) == 1 else f"{plain(gaps[0])} to {plain(gaps[-1])}"
        where = f"in {len(gaps)} of {settings} settings, by {span} {NATS}"
        outcome = WORDS[-1] if better else WORDS[1]
        return f"{contrast} is {outcome} wherever a difference is detected: {where}."
    sensitivity = ""
    detectable = [row.heldout.detectable for row in rows if row.heldout.detectable is not None]
    if detectable:
        sensitivity = f"; the most sensitive detects {plain(min(detectable))} {NATS} in 80 of 100 repetitions"
    return f"{contrast}: no difference is detected in any of {settings} settings{sensitivity}."


def table(study: Study) -> Listing:
    """Return every row of the study, varying axes first."""
    axes = varying(study)
    has_arms = len({row.contrast for row in study.rows}) > 1
    header = [_words(axis) for axis in axes]
    if has_arms:
        header.append("arm")
    rows = []
    for row in study.rows:
        cells = [_value(row, axis) for axis in axes]
        if has_arms:
            cells.append(row.arm)
        cells += [signed(row.heldout.mean), plain(row.half), WORDS[row.sign], plain(row.heldout.detectable)]
        rows.append([*cells, signed(row.training.mean), str(row.heldout.n)])
    contrast = f"arm − {study.rows[0].reference}" if has_arms else study.rows[0].contrast
    return Listing(f"Every row: {contrast}", [*header, *MEASURED_HEADER], rows)


def sign_maps(study: Study) -> Iterator[Grid]:
    """Yield the difference over two axes, or over one and the arms. Uncoloured where it is not detected."""
    across, *others = varying(study)
    top = max((abs(row.heldout.mean) for row in study.rows if row.sign), default=1.0)
    if not others:
        yield _sign_map(ALL, study.rows, ("arm", across), lambda row: row.arm, top)
        return
    down = others[0]
    for name, rows in parted(study.rows, others[1:]).items():
        yield _sign_map(name, rows, (down, across), lambda row: _value(row, down), top)


def _sign_map(
    name: str, rows: Iterable[SweepRow], axes: tuple[str, str], row_of: Callable[[SweepRow], str], top: float
) -> Grid:
    """Return rows as a grid.

    Args:
        name: of the map.
        rows: of the study, one for each cell at most.
        axes: down and across.
        row_of: names the row of the map that a row of the study is in.
        top: the difference at the end of the colours.
    """
    across = axes[1]
    cells = {(row_of(row), _value(row, across)): row for row in rows}
    down_values = tuple(dict.fromkeys(down for down, _ in cells))
    across_values = tuple(dict.fromkeys(place for _, place in cells))
    values, texts = [], []
    for down in down_values:
        in_row = [cells.get((down, place)) for place in across_values]
        values.append(tuple(_detected_mean(row) for row in in_row))
        texts.append(tuple(signed(row.heldout.mean) if row else "" for row in in_row))
    return Grid(
        name,
        down_values,
        across_values,
        tuple(values),
        top=top,
        axes=(_words(axes[0]), _words(across)),
        why=MAP,
        texts=tuple(texts),
    )


def _detected_mean(row: SweepRow | None) -> float:
    """Return a row's difference if its sign is detected, else NaN."""
    return row.heldout.mean if row is not None and row.sign else math.nan


Points = dict[str, list[tuple[float, SweepRow]]]  # line → (x, row)


def curves(study: Study) -> Iterator[Panel]:
    """Yield the difference along one axis, an amount of text if there is one.

    A second axis has a line for each of its values; without one, every arm has a line.
    """
    axes = sorted(_numeric_axes(study), key=lambda axis: axis not in TEXT_AXES)
    if not axes:
        return
    along = axes[0]
    others = [other for other in varying(study) if other != along]
    groups = parted(study.rows, others[1:]) if others else {ALL: list(study.rows)}
    for name, rows in groups.items():
        points: Points = {}
        for row in rows:
            line = _in_words(row, others[0]) if others else row.contrast
            points.setdefault(line, []).append((row.measure(along), row))
        yield _lines(f"{name}, by {_words(along)}", points, _words(along))


def by_rank(study: Study) -> Iterator[Panel]:
    """Yield held-out loss above the reference's against parameters.

    A line goes through the ranks of each kind of boundary. Nothing is drawn of fewer than two ranks.
    """
    ranks = {row.rank for row in study.rows if row.rank is not None}
    if len(ranks) < 2:
        return
    nameless = [replace(row, arm="loss") for row in study.rows]  # one group for all arms of a setting
    for name, rows in parted(nameless, varying(study)).items():
        contrasts = [row.contrast for row in study.rows if row.cell == rows[0].cell]
        points: Points = {}
        for contrast, row in zip(contrasts, rows, strict=True):
            kind = contrast.partition(":")[0].partition(" ")[0]
            points.setdefault(kind, []).append((float(row.parameters), row))
        yield _lines(name, points, "parameters")


def _lines(name: str, points: Points, along: str) -> Panel:
    """Draw differences with their intervals; `along` names the axis of x."""
    lines_of_panel = []
    x_values: set[float] = set()
    for label, of_line in points.items():
        ascending = sorted(of_line, key=lambda point: point[0])
        quantities = [(x, difference(row.heldout)) for x, row in ascending]
        lines_of_panel.append(
            Curve.through(name, quantities, along=along, unit=NATS, of=label, level=0.0, log_x=True, why=BANDS)
        )
        x_values.update(x for x, _ in of_line)
    panel = lines(lines_of_panel, styles(points), digits=4)
    ticks = sorted(x_values)
    panel.figure.update_xaxes(tickvals=ticks, ticktext=[_number(x) for x in ticks])
    return panel


def fitted(study: Study) -> Iterator[PageSection]:
    """Yield for every contrast a surface, its predictions, and how well it predicts settings that were left out.

    A contrast with too few settings is left out.
    """
    axes = _numeric_axes(study)
    if not axes:
        return
    usable = [row for row in study.rows if math.isfinite(row.error)]
    others = [axis for axis in varying(study) if axis not in axes]
    for name, rows in parted(usable, others).items():
        points = np.log([[row.measure(axis) for axis in axes] for row in rows])
        values, errors, seeds = np.array([(row.heldout.mean, row.error, row.heldout.n) for row in rows]).T
        surface = fit(points, values, errors, seeds)
        left_out = leave_one_out(points, values, errors, seeds)
        if surface is None or not left_out:
            continue
        maps = [heat_map(predictions(surface, axes))] if len(axes) > 1 else []
        sentences = scored(values, left_out).said(rows[0].arm)
        yield PageSection(f"Surface: {name}", maps, said=sentences, folded=[_left_out_table(rows, left_out)])


def _left_out_table(rows: Sequence[SweepRow], left_out: Sequence[tuple[Estimate, bool]]) -> Listing:
    """Return each setting as it was measured and as the others predict it."""
    cells = []
    for row, (estimate, is_enclosed) in zip(rows, left_out, strict=True):
        predicted = Quantity.of_estimate("", estimate, unit=NATS, digits=4)
        remark = "" if is_enclosed else "beyond the others: no evidence"
        cells.append([row.cell, str(difference(row.heldout)), str(predicted), remark])
    return Listing("Settings left out", ["setting", "measured", "predicted by the others", ""], cells)


def predictions(surface: Surface, axes: Sequence[str]) -> Grid:
    """Return predictions for new settings along the first two axes, the others at their means.

    A value is NaN where its interval holds zero, or no settings enclose the place.
    """
    low, high, mean = surface.points.min(0), surface.points.max(0), surface.points.mean(0)
    x, y = (np.linspace(low[i], high[i], FINE) for i in (0, 1))
    values = tuple(tuple(_clear_prediction(surface, [a, b, *mean[2:]]) for a in x) for b in y)
    finite = [abs(value) for value in np.ravel(values).tolist() if math.isfinite(value)]
    fixed = [f"{_words(axis)} {_number(value)}" for axis, value in zip(axes[2:], np.exp(mean[2:]), strict=True)]
    return Grid(
        "Prediction for a new setting",
        tuple(_number(value) for value in np.exp(y)),
        tuple(_number(value) for value in np.exp(x)),
        values,
        max(finite, default=1.0),
        (_words(axes[1]), _words(axes[0])),
        of=", ".join(fixed),
        why=FITTED,
    )


def _clear_prediction(surface: Surface, point: Sequence[float]) -> float:
    """Return the prediction at a point. NaN if its interval holds zero, or the settings do not enclose it."""
    estimate = surface.at(point)
    has_sign = not estimate.low < 0 < estimate.high
    return estimate.value if has_sign and enclosed(surface.points, point) else math.nan


def render(study: Study, command: str) -> str:
    """Return the page as text."""
    figures = [*curves(study), *by_rank(study)]
    maps = [heat_map(grid) for grid in sign_maps(study)]
    axes = " × ".join(_words(axis) for axis in varying(study))
    commands = {row.cell: row.command for row in study.rows}
    repeat = Listing("The command of every cell", ["cell", "command"], list(commands.items()))
    return Sheet(
        command_name="sweep",
        title=f"{axes}: tiewise sweep",
        subject=axes,
        heading=study.grid.asks or "What was found",
        answer=answer(study),
        results=PageSection("Results", maps[:FIRST], more=maps[FIRST:], folded=[table(study)], notes=[NOTE]),
        sections=[
            PageSection("Curves", figures[:FIRST], more=figures[FIRST:]),
            *fitted(study),
            PageSection("To repeat a row", folded=[repeat]),
        ],
        command=command,
        facts=[("Grid", _grid_facts(study))],
        banner=DEMO.capitalize() if any(row.demo for row in study.rows) else "",
    ).render()


def _grid_facts(study: Study) -> list[tuple[str, str]]:
    """Return settings and axes of the grid, in words."""
    settings = {**study.grid.settings, **study.grid.axes}
    return [(_words(name), str(value).replace("'", "").strip("[]")) for name, value in settings.items()]


def write_sweep(study: Study, command: str) -> Path:
    """Write the page into the study's folder, whole or not at all. Raises RunError where it cannot be written."""
    return write_result(render(study, command), study.folder / PAGE, "--out")


def sweep_view(study: Study) -> Group:
    """Return the answer and the table, for a terminal."""
    first, *more = answer(study)
    every_row = table(study)
    rows = rich_table([every_row.header, *every_row.rows], justified=True)
    name = Text(f"\n{every_row.name}", "italic")
    return Group(Text(first, "bold"), *map(Text, more), name, rows, Text(NOTE, "dim"))
