"""Results of a study for a terminal and a page: table, maps of signs, curves.

Numeric axes (also the tokens of a text and the V of a tokenizer) have a logarithmic scale. Every other axis, and
numeric axes beyond the first two, split the results into separate figures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Group
from rich.text import Text

from tiewise.core.files import write_result
from tiewise.core.measurement import NATS, NONE, Curve, Grid, Listing, plain, signed
from tiewise.report.comparison_measurement import demo_banner, difference
from tiewise.report.drawing import styles
from tiewise.report.heat_map import heat_map
from tiewise.report.line_plot import lines
from tiewise.report.report_page import PageSection, Panel, ReportPage
from tiewise.report.sweep_answer import answer
from tiewise.report.sweep_axes import ARM, axes_of, heading, in_words, number_texts, parted, value_text, words
from tiewise.report.views import rich_table
from tiewise.training.folder import REPORT
from tiewise.training.study.study import Study, SweepResult
from tiewise.training.verdicts import verdict_of

NOTE = (
    "Arm minus reference in nats per token, paired by seed, ± 95 %; below zero the arm is better. "
    "Verdict: p < 0.05 by Holm over all rows, for a difference (better, worse) or against one of the margin or more "
    "(equivalent). Could show: a repetition detects it by that rule in 80 of 100 cases. "
    "Losses are those of the step that each run keeps (select)."
)
MAP = f"Blue: better; orange: worse; no colour: equivalent or undecided. In {NATS}."
BANDS = "Below zero: better; bands: 95 % intervals."
ALL = "All arms"
TEXT_AXES = ("train_tokens", "steps")
FIRST = 4  # number of figures of a section that are not folded
MEASURED_HEADER = ("held-out", "±", "verdict", "could show", "training", "n")
LAST_HEADER = ("last step",)  # column of a study whose runs keep their best step
BITS_HEADER = ("bits per byte", "±")  # columns of a study whose vocabularies differ


def table(study: Study) -> Listing:
    """Return every result of the study, varying axes first."""
    columns = axes_of(study).varying
    contrast = study.results[0].contrast
    if len({result.contrast for result in study.results}) > 1:
        columns.append(ARM)
        contrast = f"arm − {study.results[0].reference}"
    rows = []
    for result in study.results:
        cells = [value_text(result, axis) for axis in columns]
        cells += [
            signed(result.heldout.mean),
            plain(result.half),
            verdict_of(result.heldout),
            plain(result.heldout.detectable),
        ]
        cells += [signed(result.training.mean), str(result.heldout.n)]
        if has_last_steps(study):
            cells += [NONE if result.last is None else signed(result.last.mean)]
        if needs_bits(study):
            cells += _bits_cells(result)
        rows.append(cells)
    header = [*(words(axis) for axis in columns), *MEASURED_HEADER]
    if has_last_steps(study):
        header += LAST_HEADER
    if needs_bits(study):
        header += BITS_HEADER
    return Listing(f"Every row: {contrast}", header, rows)


def has_last_steps(study: Study) -> bool:
    """Return whether a difference at the last step is another one than at the best step."""
    return any(_differs_at_last_step(result) for result in study.results)


def _differs_at_last_step(result: SweepResult) -> bool:
    """Return whether a result has another difference at the last step."""
    return result.last is not None and result.last.mean != result.heldout.mean


def needs_bits(study: Study) -> bool:
    """Return whether a study's vocabularies differ.

    Nats per token are then of other tokens in each row, and bits per byte compare the rows.
    """
    return len({result.vocab for result in study.results}) > 1


def _bits_cells(result: SweepResult) -> list[str]:
    """Return the held-out difference in bits per byte and half its interval, as text."""
    bits = result.bits
    if bits is None:
        return [NONE, NONE]
    if bits.high is None:
        return [signed(bits.mean), NONE]
    return [signed(bits.mean), plain(bits.high - bits.mean)]


def sign_maps(study: Study) -> Iterator[Grid]:
    """Yield the difference over two axes, or over one axis and the arms.

    Cells without a significant sign have no colour.
    """
    across, *others = axes_of(study).varying
    gaps = [abs(result.heldout.mean) for result in study.results if result.sign]
    top = max(gaps, default=1.0)
    if not others:
        yield _sign_map(ALL, study.results, (ARM, across), top)
        return
    down, *apart = others
    for name, results in parted(study.results, apart).items():
        yield _sign_map(name, results, (down, across), top)


def _sign_map(name: str, results: Sequence[SweepResult], axes: tuple[str, str], top: float) -> Grid:
    """Return results as a grid.

    Args:
        name: name of the map.
        results: results of the study, at most one for each cell.
        axes: the axis down and the axis across.
        top: the difference at the end of the colour scale.
    """
    down, across = axes
    columns = tuple(dict.fromkeys(value_text(result, across) for result in results))
    lines_of_map: dict[str, dict[str, SweepResult]] = {}  # value down → value across → result
    for result in results:
        lines_of_map.setdefault(value_text(result, down), {})[value_text(result, across)] = result
    values, texts = [], []
    for by_column in lines_of_map.values():
        in_line = [by_column.get(column) for column in columns]
        values.append(tuple(_detected_mean(result) for result in in_line))
        texts.append(tuple(_mean_text(result) for result in in_line))
    return Grid(
        name,
        tuple(lines_of_map),
        columns,
        tuple(values),
        top=top,
        axes=(words(down), words(across)),
        why=MAP,
        texts=tuple(texts),
    )


def _detected_mean(result: SweepResult | None) -> float:
    """Return a result's difference if its sign is significant, else NaN."""
    if result is None or not result.sign:
        return math.nan
    return result.heldout.mean


def _mean_text(result: SweepResult | None) -> str:
    """Return a result's difference as text, "" without a result."""
    if result is None:
        return ""
    return signed(result.heldout.mean)


class _Point(NamedTuple):
    """A result in a figure of differences, and the line to which it belongs."""

    line: str
    x: float
    result: SweepResult


def curves(study: Study) -> Iterator[Panel]:
    """Yield the difference along one axis, preferably an amount of text.

    A second axis has a line for each of its values; without one, every arm has a line.
    """
    axes = axes_of(study)
    if not axes.numeric:
        return
    text_axes = [axis for axis in axes.numeric if axis in TEXT_AXES]
    along = (text_axes or axes.numeric)[0]
    others = axes.all_but(along)
    if not others:
        points = [_Point(result.contrast, result.measure(along), result) for result in study.results]
        yield _lines(f"{ALL}, by {words(along)}", points, words(along))
        return
    line_axis, *apart = others
    for name, results in parted(study.results, apart).items():
        points = [_Point(in_words(result, line_axis), result.measure(along), result) for result in results]
        yield _lines(f"{name}, by {words(along)}", points, words(along))


def by_rank(study: Study) -> Iterator[Panel]:
    """Yield held-out loss minus the reference's against parameters.

    A line connects the ranks of each kind of boundary. A kind with fewer than two ranks has no line.
    """
    ranks = {result.rank for result in study.results if result.rank is not None}
    if len(ranks) < 2:
        return
    axes = axes_of(study).varying
    points_by_setting: dict[str, list[_Point]] = {}
    for result in study.results:
        setting = heading(f"loss − {result.reference}", result, axes)
        kind = result.arm.partition(":")[0]
        points_by_setting.setdefault(setting, []).append(_Point(kind, float(result.parameters), result))
    for setting, points in points_by_setting.items():
        yield _lines(setting, points, "parameters")


def _lines(name: str, points: Sequence[_Point], along: str) -> Panel:
    """Draw differences with their intervals; `along` names the axis of x."""
    points_by_line: dict[str, list[_Point]] = {}
    for point in points:
        points_by_line.setdefault(point.line, []).append(point)
    curves_of_panel = []
    for line, of_line in points_by_line.items():
        of_line.sort(key=lambda point: point.x)
        quantities = [(point.x, difference(point.result.heldout)) for point in of_line]
        curve = Curve.through(name, quantities, along=along, unit=NATS, of=line, level=0.0, log_x=True, why=BANDS)
        curves_of_panel.append(curve)
    panel = lines(curves_of_panel, styles(points_by_line), digits=4)
    ticks = sorted({point.x for point in points})
    panel.figure.update_xaxes(tickvals=ticks, ticktext=number_texts(ticks))
    return panel


def render(study: Study, command: str) -> str:
    """Return the page as text."""
    figures = [*curves(study), *by_rank(study)]
    maps = [heat_map(grid) for grid in sign_maps(study)]
    axes = " × ".join(words(axis) for axis in axes_of(study).varying)
    commands = {result.cell: result.command for result in study.results}
    repeat = Listing("The command of every cell", ["cell", "command"], list(commands.items()))
    return ReportPage(
        command_name="sweep",
        title=f"{axes}: tiewise sweep",
        subject=axes,
        heading=study.grid.asks or "What was found",
        answer=answer(study),
        results=PageSection("Results", maps[:FIRST], folded_panels=maps[FIRST:], folded=[table(study)], notes=[NOTE]),
        sections=[
            PageSection("Curves", figures[:FIRST], folded_panels=figures[FIRST:]),
            PageSection("To repeat a row", folded=[repeat]),
        ],
        command=command,
        facts=[("Grid", _grid_facts(study))],
        banner=demo_banner(any(result.demo for result in study.results)),
    ).render()


def _grid_facts(study: Study) -> list[tuple[str, str]]:
    """Return settings and axes of the grid, in words."""
    settings = {**study.grid.settings, **study.grid.axes}
    return [(words(name), str(value).replace("'", "").strip("[]")) for name, value in settings.items()]


def write_sweep(study: Study, command: str) -> Path:
    """Write the page into the study's folder, complete or not at all.

    Raises:
        RunError: the file cannot be written.
    """
    return write_result(render(study, command), study.folder / REPORT, "out")


def sweep_view(study: Study) -> Group:
    """Return the answer and the table, for a terminal."""
    first, *more = answer(study)
    every_row = table(study)
    rows = rich_table([every_row.header, *every_row.rows], justified=True)
    name = Text(f"\n{every_row.name}", "italic")
    return Group(Text(first, "bold"), *map(Text, more), name, rows, Text(NOTE, "dim"))
