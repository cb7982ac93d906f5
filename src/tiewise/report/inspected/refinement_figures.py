"""From layer to layer, as figures: change, cosine, and what applying a repeated block further gives."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import plotly.graph_objects as go

from tiewise.analysis.estimates import Estimate
from tiewise.internals.refined import Application, Course, Refinement, Rest
from tiewise.numerals import plain
from tiewise.report import theme
from tiewise.report.bars import finish
from tiewise.report.grid import Table
from tiewise.report.heat_map import heat_map
from tiewise.report.inspected.refinement import courses, shown
from tiewise.report.sheet import Panel

Measured = Callable[[Application], Estimate | None]
_CONTROL = "Dashed: the same architecture with fresh weights. Bars are 95 % intervals over windows."
_SMALLEST = 1e-9  # what a residual that is exactly 0 is drawn at: a log axis has no 0


def panels(found: Mapping[str, Refinement]) -> list[Panel]:
    """Return the change and the cosine of every application, and the residual of every repeated block."""
    change = (
        f"‖h after − h before‖ / ‖h before‖, mean over tokens. Open markers: the same layer applied a second time. "
        f"{_CONTROL}"
    )
    cosine = (
        "Of a layer's output and its input (as in figure 1 of Lan et al. 2020); 1 where nothing turns, 0 where nothing "
        f"is kept. {_CONTROL}"
    )
    turn = (
        "Above 0 a layer goes on where the one before it was heading, below 0 it turns back: a course that oscillates "
        f"stays below 0. {_CONTROL}"
    )
    made = [
        Panel(
            _lines(found, "Change per application", "relative change", _change, log=True),
            change,
            _table(found, _change),
        ),
        Panel(_lines(found, "Cosine of output and input", "cosine", _cosine), cosine, _table(found, _cosine)),
    ]
    if any(one.turn is not None for label in found for one in found[label].trained.applications):
        title = "Does a layer go on or turn back?"
        made.append(Panel(_lines(found, title, "cosine of successive changes", _turn), turn, _table(found, _turn)))
    made += [_alike(f"How alike the states are: {name}", course) for *_, name, course in _all(found)]
    rests = list(_rests(found))
    if rests:
        caption = (
            "‖f(h) − h‖ / ‖h‖ of the block f that the model repeats; the grey line is where the model itself stops. "
            "A straight fall is a fixed point that is approached at a constant rate, a level line is none. "
            "Dashed: fresh weights."
        )
        made.append(Panel(_residuals(rests), caption, _residual_table(rests)))
    return made


def _alike(title: str, course: Course) -> Panel:
    """Heat map of one course, the same colours for all."""
    states = [str(i) for i in range(len(course.alike))]
    values = [[None if math.isnan(x) else x for x in row] for row in course.alike]
    figure = heat_map(states, values, 1.0, title)
    every = [i for i in range(len(states)) if i % max(1, len(states) // 12) == 0]
    axis = {"tickvals": every, "ticktext": [states[i] for i in every], "tickangle": 0}
    figure.update_layout(xaxis={**axis, "title": "applications"}, yaxis={**axis, "title": "applications"})
    caption = (
        "Cosine of the states after so many applications, mean over tokens; 0 is what the first layer reads. A square "
        "of one colour is a stretch in which little changes."
    )
    rows = [[state, *(plain(x, 3) for x in row)] for state, row in zip(states, values, strict=True)]
    return Panel(figure, caption, Table(["after", *states], rows))


def _change(one: Application) -> Estimate | None:
    return one.change


def _cosine(one: Application) -> Estimate | None:
    return one.cosine


def _turn(one: Application) -> Estimate | None:
    return one.turn


def _all(found: Mapping[str, Refinement]) -> Iterator[tuple[int, bool, str, Course]]:
    for position, (label, one) in zip(theme.places(list(found)), found.items(), strict=True):
        for name, course in courses(label, one):
            yield position, course is one.untrained, name, course


def _lines(found: Mapping[str, Refinement], title: str, unit: str, value: Measured, log: bool = False) -> go.Figure:
    figure = go.Figure()
    for position, control, name, course in _all(found):
        points = [(i, e) for i, one in enumerate(course.applications, 1) if (e := value(one)) is not None]
        figure.add_trace(_trace(position, control, name, points))
        if log and not control:
            again = [(i, e) for i, one in enumerate(course.applications, 1) if (e := one.again) is not None]
            trace = _trace(position, control, f"{name}, applied twice", again)
            trace.update(mode="markers", error_y=None)
            figure.add_trace(trace.update(marker={"symbol": f"{trace.marker.symbol}-open", "size": 8}))
    figure = finish(figure, title, unit)
    figure.update_xaxes(title="application", tick0=1, dtick=_step(found))
    if log:
        figure.update_yaxes(type="log", dtick=1, tickformat="~g")
    return figure


def _trace(position: int, control: bool, name: str, points: Sequence[tuple[int, Estimate]]) -> go.Scatter:
    look = theme.style(position)
    half = [e.high - e.value if e.rows > 1 else 0.0 for _, e in points]
    return go.Scatter(
        x=[x for x, _ in points],
        y=[max(e.value, _SMALLEST) if e.value >= 0 else e.value for _, e in points],
        name=html.escape(name),
        mode="lines+markers",
        opacity=0.7 if control else 1.0,
        line={"color": look.colour, "width": 1.4 if control else 2.2, "dash": "dash" if control else "solid"},
        marker={"color": look.colour, "symbol": look.marker, "size": 4 if control else 7},
        error_y={"array": half, "color": look.colour, "thickness": 1.2, "width": 3},
        customdata=[shown(e) for _, e in points],
        hovertemplate="application %{x}: %{customdata}",
    )


def _step(found: Mapping[str, Refinement]) -> int:
    return max(1, max(len(one.trained.applications) for one in found.values()) // 12)


def _rests(found: Mapping[str, Refinement]) -> Iterator[tuple[int, bool, str, Rest]]:
    for position, control, name, course in _all(found):
        for rest in course.repeats:
            several = f", from application {rest.first + 1}" if len(course.repeats) > 1 else ""
            yield position, control, f"{name}{several}", rest


def _residuals(rests: Sequence[tuple[int, bool, str, Rest]]) -> go.Figure:
    figure = go.Figure()
    for position, control, name, rest in rests:
        points = [(k, e) for k, e in enumerate(rest.residual, 1) if e is not None]
        figure.add_trace(_trace(position, control, name, points).update(mode="lines", error_y=None))
    for times in {rest.times for *_, rest in rests}:
        figure.add_vline(x=times, line={"width": 1, "color": "#8a8f99"})
    figure = finish(figure, "Does the repeated block come to rest?", "relative change")
    figure.update_yaxes(type="log", dtick=1, tickformat="~g")
    return figure.update_xaxes(title="application of the block", range=[0, max(len(r.residual) for *_, r in rests) + 1])


def _table(found: Mapping[str, Refinement], value: Measured) -> Table:
    columns = [(name, course.applications) for _, _, name, course in _all(found)]
    depth = max(len(parts) for _, parts in columns)
    rows = [
        [str(i + 1), *(shown(value(parts[i])) if i < len(parts) else shown(None) for _, parts in columns)]
        for i in range(depth)
    ]
    return Table(["application", *(name for name, _ in columns)], rows)


def _residual_table(rests: Sequence[tuple[int, bool, str, Rest]]) -> Table:
    depth = max(len(rest.residual) for *_, rest in rests)
    rows = [
        [str(k + 1), *(shown(rest.residual[k]) if k < len(rest.residual) else shown(None) for *_, rest in rests)]
        for k in range(depth)
    ]
    return Table(["application", *(name for _, _, name, _ in rests)], rows)
