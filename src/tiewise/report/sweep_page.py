"""What a study found, on a terminal and as a page: where the sign changes, the table, maps of signs, curves, surfaces.

Axes that are numbers (tokens of a text and V of a tokenizer too) are drawn to a logarithmic scale; every other axis,
and what more than two of them leave, parts a figure from the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Group
from rich.text import Text

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


def varying(study: Study) -> list[str]:
    """Axes with more than one value, or else the first; those that are numbers everywhere come first."""
    axes = [axis for axis, values in study.grid.axes.items() if len(values) > 1] or list(study.grid.axes)[:1]
    return sorted(axes, key=lambda axis: not _numeric(study, axis))


def _numeric(study: Study, axis: str) -> bool:
    return not any(math.isnan(row.measure(axis)) for row in study.rows)


def parted(rows: Iterable[SweepRow], axes: Sequence[str]) -> dict[str, list[SweepRow]]:
    """Rows by their contrast and what they have on these axes, in words."""
    found: dict[str, list[SweepRow]] = {}
    for row in rows:
        found.setdefault(", ".join([row.contrast, *(said(row, axis) for axis in axes)]), []).append(row)
    return found


def said(row: SweepRow, axis: str) -> str:
    """Where a row stands on an axis, in words."""
    return f"{_words(axis)} {_value(row, axis)}"


def _words(axis: str) -> str:
    return axis.replace("_", " ")


def _value(row: SweepRow, axis: str) -> str:
    value = row.at[axis]
    if value is None:
        return "all" if axis == "train_tokens" else "default"
    return count(value) if isinstance(value, int) else str(value)


def _number(value: float) -> str:
    return count(value) if value >= 10 else f"{value:.3g}"  # a learning rate, too


def turns(study: Study, contrast: str) -> list[str]:
    """Every change from one detected sign to the other along one axis, nothing but undetected between them."""
    found = []
    for axis in (axis for axis in varying(study) if _numeric(study, axis)):
        others = [other for other in varying(study) if other != axis]
        for line in parted((row for row in study.rows if row.contrast == contrast), others).values():
            clear = sorted((row for row in line if row.sign), key=lambda row: row.measure(axis))
            for a, b in pairwise(clear):
                if a.sign != b.sign:
                    ends = f"between {_words(axis)} {_value(a, axis)} and {_value(b, axis)}"
                    where = ", ".join(said(a, other) for other in others)
                    found.append(f"from {WORDS[a.sign]} to {WORDS[b.sign]} {ends}" + (where and f" (at {where})"))
    return found


def answer(study: Study) -> list[str]:
    """Where the sign changes, a sentence for every contrast; and of which models it speaks."""
    sentences = []
    for contrast, rows in parted(study.rows, []).items():
        who, n, changed = f"{rows[0].arm} against {rows[0].reference}", len(rows), turns(study, contrast)
        signs, gaps = [row.sign for row in rows], sorted(abs(row.heldout.mean) for row in rows if row.sign)
        if changed:
            more = f", and at {len(changed) - 2} other places" if len(changed) > 2 else ""
            sentences.append(f"{who} turns {'; '.join(changed[:2])}{more}.")
        elif len({*signs} - {0}) == 1:
            size = plain(gaps[0]) if len(gaps) == 1 else f"{plain(gaps[0])} to {plain(gaps[-1])}"
            where = f"in {len(gaps)} of {n} settings, by {size} {NATS}"
            sentences.append(f"{who} is {WORDS[max(signs) or -1]} wherever a difference is detected: {where}.")
        elif gaps:
            sentences.append(f"{who} is better in {signs.count(-1)} and worse in {signs.count(1)} of {n} settings.")
        else:
            seen = [row.heldout.detectable for row in rows if row.heldout.detectable is not None]
            smallest = (
                f"; the most sensitive detects {plain(min(seen))} {NATS} in 80 of 100 repetitions" if seen else ""
            )
            sentences.append(f"{who}: no difference is detected in any of {n} settings{smallest}.")
    sizes = [size for row in study.rows for size in (row.parameters, row.reference_parameters)]
    of = f"Models of {count(min(sizes))} to {count(max(sizes))} parameters: nothing is said of larger ones."
    return [*sentences, of, *([f"Not finished: {study.left} of the grid’s cells."] if study.left else [])]


def table(study: Study) -> Listing:
    """Every row of the study, what differs between them first."""
    axes, several = varying(study), len({row.contrast for row in study.rows}) > 1
    header = [*map(_words, axes), *(["arm"] if several else []), "held-out", "±", "sign", "could show", "training", "n"]
    rows = []
    for row in study.rows:
        where = [*(_value(row, axis) for axis in axes), *([row.arm] if several else [])]
        measured = signed(row.heldout.mean), plain(row.half), WORDS[row.sign], plain(row.heldout.detectable)
        rows.append([*where, *measured, signed(row.training.mean), str(row.heldout.n)])
    contrast = f"arm − {study.rows[0].reference}" if several else study.rows[0].contrast
    return Listing(f"Every row: {contrast}", header, rows)


def sign_maps(study: Study) -> Iterator[Grid]:
    """The difference over two axes, or over one and the arms; nothing but its number where it is not detected."""
    across, *others = [*varying(study), ""]
    down, rest = others[0], others[1:-1]
    top = max((abs(row.heldout.mean) for row in study.rows if row.sign), default=1.0)
    for name, rows in parted(study.rows, rest).items() if down else [(ALL, study.rows)]:
        place = {(_value(row, down) if down else row.arm, _value(row, across)): row for row in rows}
        y, x = (tuple(dict.fromkeys(key[i] for key in place)) for i in (0, 1))
        clear = {at: row.heldout.mean for at, row in place.items() if row.sign}
        yield Grid(
            name, y, x, tuple(tuple(clear.get((b, a), math.nan) for a in x) for b in y),
            top=top, axes=(_words(down or "arm"), _words(across)), why=MAP,
            texts=tuple(tuple(signed(place[b, a].heldout.mean) if (b, a) in place else "" for a in x) for b in y),
        )  # fmt: skip


def curves(study: Study) -> Iterator[Panel]:
    """The difference along one axis, text if that is one: a line for all that a second one has, or for every arm."""
    axes = [axis for axis in varying(study) if _numeric(study, axis)]
    for axis in sorted(axes, key=lambda axis: axis not in TEXT_AXES)[:1]:
        second, *rest = [*(other for other in varying(study) if other != axis), ""]
        for name, rows in parted(study.rows, rest[:-1]).items() if second else [(ALL, study.rows)]:
            drawn: dict[str, list[tuple[float, SweepRow]]] = {}
            for row in rows:
                drawn.setdefault(said(row, second) if second else row.contrast, []).append((row.measure(axis), row))
            yield _lines(f"{name}, by {_words(axis)}", drawn, _words(axis))


def by_rank(study: Study) -> Iterator[Panel]:
    """Held-out loss above the reference's against parameters: a line through the ranks of every kind of boundary."""
    if len({row.rank for row in study.rows} - {None}) < 2:
        return
    for name, rows in parted((replace(row, arm="loss") for row in study.rows), varying(study)).items():
        kinds = (row.contrast.partition(":")[0] for row in study.rows if row.cell == rows[0].cell)
        drawn: dict[str, list[tuple[float, SweepRow]]] = {}
        for kind, row in zip(kinds, rows, strict=True):
            drawn.setdefault(kind.partition(" ")[0], []).append((float(row.parameters), row))
        yield _lines(name, drawn, "parameters")


def _lines(name: str, drawn: Mapping[str, list[tuple[float, SweepRow]]], along: str) -> Panel:
    """Differences with their intervals, each line by what it is of."""
    made = []
    for of, rows in drawn.items():
        points = [(x, difference(row.heldout)) for x, row in sorted(rows, key=lambda one: one[0])]
        made.append(Curve.through(name, points, along=along, unit=NATS, of=of, level=0.0, log_x=True, why=BANDS))
    panel, every = lines(made, styles(drawn), digits=4), sorted({x for rows in drawn.values() for x, _ in rows})
    panel.figure.update_xaxes(tickvals=every, ticktext=[*map(_number, every)])
    return panel


def fitted(study: Study) -> Iterator[PageSection]:
    """A surface for every contrast, what it predicts, and how well it did on settings that were left out."""
    axes = [axis for axis in varying(study) if _numeric(study, axis)]
    usable = [row for row in study.rows if math.isfinite(row.error)]
    for name, rows in parted(usable, [axis for axis in varying(study) if axis not in axes]).items() if axes else ():
        points = np.log([[row.measure(axis) for axis in axes] for row in rows])
        values, errors, seeds = np.array([(row.heldout.mean, row.error, row.heldout.n) for row in rows]).T
        surface, out = fit(points, values, errors, seeds), leave_one_out(points, values, errors, seeds)
        if surface is None or not out:
            continue  # too few settings: nothing is said of others
        listing = [
            [row.cell, str(difference(row.heldout)), str(Quantity.of_estimate("", one, unit=NATS, digits=4)),
             "" if within else "beyond the others: no evidence"]
            for row, (one, within) in zip(rows, out, strict=True)
        ]  # fmt: skip
        left_out = Listing("Settings left out", ["setting", "measured", "predicted by the others", ""], listing)
        maps = [heat_map(predictions(surface, axes))] if len(axes) > 1 else []
        yield PageSection(f"Surface: {name}", maps, said=scored(values, out).said(rows[0].arm), folded=[left_out])


def predictions(surface: Surface, axes: Sequence[str]) -> Grid:
    """What a new setting is predicted to have along the first two axes, the others at their means."""
    ends = zip(surface.points.min(0), surface.points.max(0), strict=True)
    x, y = (np.linspace(*end, FINE) for end in list(ends)[:2])

    def clear(*place: float) -> float:
        point = [*place, *surface.points.mean(0)[2:]]
        found = surface.at(point)
        return math.nan if found.low < 0 < found.high or not enclosed(surface.points, point) else found.value

    values = tuple(tuple(clear(a, b) for a in x) for b in y)
    top = max((abs(value) for line in values for value in line if math.isfinite(value)), default=1.0)
    down, across = (tuple(map(_number, np.exp(axis))) for axis in (y, x))
    others = zip(axes[2:], np.exp(surface.points.mean(0)[2:]), strict=True)
    at = ", ".join(f"{_words(axis)} {_number(value)}" for axis, value in others)
    names = _words(axes[1]), _words(axes[0])
    return Grid("Prediction for a new setting", down, across, values, top, names, of=at, why=FITTED)


def render(study: Study, command: str) -> str:
    """Return the page as text."""
    drawn = [*curves(study), *by_rank(study)]
    maps, axes = [*map(heat_map, sign_maps(study))], " × ".join(map(_words, varying(study)))
    commands = {row.cell: row.command for row in study.rows}
    repeated = Listing("The command of every cell", ["cell", "command"], [*commands.items()])
    asked = {**study.grid.settings, **study.grid.axes}
    return Sheet(
        command_name="sweep",
        title=f"{axes}: tiewise sweep",
        subject=axes,
        heading=study.grid.asks or "What was found",
        answer=answer(study),
        results=PageSection("Results", maps[:FIRST], more=maps[FIRST:], folded=[table(study)], notes=[NOTE]),
        sections=[
            PageSection("Curves", drawn[:FIRST], more=drawn[FIRST:]),
            *fitted(study),
            PageSection("To repeat a row", folded=[repeated]),
        ],
        command=command,
        facts=[("Grid", [(_words(name), str(value).replace("'", "").strip("[]")) for name, value in asked.items()])],
        banner=DEMO.capitalize() if any(row.demo for row in study.rows) else "",
    ).render()


def write_sweep(study: Study, command: str) -> Path:
    """Write the page into the study's folder, whole or not at all. Raises RunError where it cannot be written."""
    return write_result(render(study, command), study.folder / PAGE, "--out")


def sweep_view(study: Study) -> Group:
    """What the terminal shows: the answer, and the table."""
    first, *more = answer(study)
    found = table(study)
    rows = rich_table([found.header, *found.rows], justified=True)
    return Group(Text(first, "bold"), *map(Text, more), Text(f"\n{found.name}", "italic"), rows, Text(NOTE, "dim"))
