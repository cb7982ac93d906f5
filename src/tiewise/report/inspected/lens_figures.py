"""Logit lens and tuned lens as figures: by depth, and over the training of the tuned ones."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import plotly.graph_objects as go

from tiewise.analysis.estimates import Estimate
from tiewise.internals.lens_results import Layer, Lenses, Read
from tiewise.numerals import count, plain
from tiewise.report import theme
from tiewise.report.bars import finish
from tiewise.report.grid import Table
from tiewise.report.inspected.lens import place
from tiewise.report.inspected.refinement import shown
from tiewise.report.sheet import Panel

SMALLEST = 1e-4  # nats: below this a log axis shows rounding
CURVES = 3  # depths of each model whose training is drawn
_HOW = "Solid: tuned lens; dashed, open markers: logit lens. Bands are 95 % intervals over held-out windows."


def panels(found: Mapping[str, Lenses]) -> list[Panel]:
    """Return KL by depth, agreement by depth, and the training curves."""
    distance = (
        f"KL from the model's final distribution to the lens, nats per position. {_HOW} Dotted: the model's mean "
        "distribution, the best of all that are the same at every position. Depth 0 is what the first layer reads."
    )
    same = f"Share of positions where lens and model name the same token first. {_HOW}"
    trained = (
        "Held-out KL of the tuned lenses over their training, at the first, a middle and the last depth. Right of the "
        "grey line is the last tenth of the steps: a lens counts as converged where it changes there by less than 1 %."
    )
    return [
        Panel(_distance(found), distance, _by_depth(found, _kl)),
        Panel(_agreement(found), same, _by_depth(found, _same)),
        Panel(_training(found), trained, _marks(found)),
    ]


def _kl(read: Read) -> Estimate:
    return read.kl


def _same(read: Read) -> Estimate:
    return read.agreement


def _distance(found: Mapping[str, Lenses]) -> go.Figure:
    figure = _depths(found, _kl, last=False)
    drawn = [one for lens in found.values() for layer in lens.layers[:-1] for one in _reads(layer)]
    values = [max(read.kl.value, SMALLEST) for read in drawn]
    values += [lens.constant.value for lens in found.values()]
    for position, (label, lens) in zip(theme.places(list(found)), found.items(), strict=True):
        figure.add_scatter(
            x=[0, max(len(lens.layers) - 2, 1)],
            y=[lens.constant.value] * 2,
            mode="lines",
            name=f"{html.escape(label)}, mean distribution",
            line={"color": theme.style(position).colour, "width": 1.4, "dash": "dot"},
            hovertemplate=shown(lens.constant),
        )
    figure = finish(figure, "How far is each layer from the final distribution?", "nats per position")
    reach = [math.log10(min(values) / 2), math.log10(max(values) * 1.6)]
    dtick = _decades(min(values), max(values))
    return figure.update_yaxes(type="log", range=reach, tickformat="~g", dtick=dtick)


def _agreement(found: Mapping[str, Lenses]) -> go.Figure:
    figure = finish(
        _depths(found, _same, last=True), "Does a layer already name the model's token?", "share of positions"
    )
    return figure.update_yaxes(range=[0, 1.02], tickformat=".0%")


def _depths(found: Mapping[str, Lenses], value: Callable[[Read], Estimate], last: bool) -> go.Figure:
    """Draw both lenses of every model by depth, with bands."""
    figure = go.Figure()
    for position, (label, lens) in zip(theme.places(list(found)), found.items(), strict=True):
        layers = lens.layers if last else lens.layers[:-1]
        tuned = [(layer.depth, value(layer.tuned or layer.logit)) for layer in layers]
        logit = [(layer.depth, value(layer.logit)) for layer in layers]
        for points, name, dashed in ((tuned, "tuned lens", False), (logit, "logit lens", True)):
            figure.add_trace(_band(position, points))
            figure.add_trace(_line(position, f"{label}, {name}", points, dashed))
    figure.update_xaxes(title="layers applied", dtick=_ticks(found), zeroline=False)
    return figure


def _line(position: int, name: str, points: Sequence[tuple[int, Estimate]], dashed: bool) -> go.Scatter:
    look = theme.style(position)
    return go.Scatter(
        x=[x for x, _ in points],
        y=[one.value for _, one in points],
        name=html.escape(name),
        mode="lines+markers",
        line={"color": look.colour, "width": 2.2, "dash": "dash" if dashed else "solid"},
        marker={"symbol": f"{look.marker}-open" if dashed else look.marker, "size": 7, "color": look.colour},
        customdata=[shown(one) for _, one in points],
        hovertemplate="after %{x}: %{customdata}",
    )


def _band(position: int, points: Sequence[tuple[int, Estimate]]) -> go.Scatter:
    """Area between the ends of the intervals; what a log axis cannot show is cut off far below it."""
    upper = [one.high for _, one in points]
    lower = [max(one.low, SMALLEST / 10) for _, one in points]
    x = [x for x, _ in points]
    return go.Scatter(
        x=[*x, *reversed(x)],
        y=[*upper, *reversed(lower)],
        fill="toself",
        fillcolor=theme.style(position).colour,
        opacity=0.18,
        line={"width": 0},
        mode="lines",
        showlegend=False,
        hoverinfo="skip",
    )


def _training(found: Mapping[str, Lenses]) -> go.Figure:
    figure = go.Figure()
    for position, (label, lens) in zip(theme.places(list(found)), found.items(), strict=True):
        colour = theme.style(position).colour
        for dash, layer in zip(theme.DASHES, _picked(lens), strict=False):
            figure.add_scatter(
                x=lens.marks,
                y=[max(value, SMALLEST) for value in layer.curve],
                name=html.escape(f"{label}, depth {layer.depth}"),
                mode="lines",
                line={"color": colour, "width": 2.2, "dash": dash},
                hovertemplate="%{y:.4f}",
            )
    for steps in {lens.steps for lens in found.values()}:
        figure.add_vline(x=0.9 * steps, line={"width": 1, "color": "#8a8f99"})
    figure.update_layout(hovermode="x unified")
    figure = finish(figure, "Were the tuned lenses trained long enough?", "held-out KL, nats")
    values = [max(value, SMALLEST) for lens in found.values() for layer in _picked(lens) for value in layer.curve]
    figure.update_yaxes(type="log", tickformat="~g", dtick=_decades(min(values), max(values)))
    return figure.update_xaxes(title="step of training", zeroline=False)


def _picked(lens: Lenses) -> list[Layer]:
    """First, middle and last of the depths that have a tuned lens."""
    depth = len(lens.layers) - 1
    return [lens.layers[i] for i in sorted({round(i * (depth - 1) / (CURVES - 1)) for i in range(CURVES)})]


def _reads(layer: Layer) -> Iterator[Read]:
    yield layer.logit
    if layer.tuned is not None:
        yield layer.tuned


def _decades(low: float, high: float) -> str | int:
    """Ticks of a log axis: 1, 2 and 5 of each decade where there are few."""
    return "D2" if high < 1000 * low else 1


def _ticks(found: Mapping[str, Lenses]) -> int:
    return max(1, max(len(lens.layers) for lens in found.values()) // 12)


def _by_depth(found: Mapping[str, Lenses], value: Callable[[Read], Estimate]) -> Table:
    header = ["place", *(f"{label}, {name}" for label in found for name in ("tuned", "logit"))]
    depth = max(len(lens.layers) for lens in found.values())
    longest = max(found.values(), key=lambda lens: len(lens.layers))
    rows = []
    for i in range(depth):
        cells = [
            _cells(lens.layers[i], value) if i < len(lens.layers) else [shown(None)] * 2 for lens in found.values()
        ]
        rows.append([place(longest.layers[i]), *(cell for pair in cells for cell in pair)])
    return Table(header, rows)


def _cells(layer: Layer, value: Callable[[Read], Estimate]) -> list[str]:
    return [shown(None if layer.tuned is None else value(layer.tuned)), shown(value(layer.logit))]


def _marks(found: Mapping[str, Lenses]) -> Table:
    """Every depth's curve, a row for each."""
    marks = next(iter(found.values())).marks
    rows = [
        [f"{label}, {place(layer)}", *(plain(layer.curve[i]) for i in range(0, len(lens.marks), 2))]
        for label, lens in found.items()
        for layer in lens.layers[:-1]
    ]
    return Table(["place", *(f"step {count(marks[i])}" for i in range(0, len(marks), 2))], rows)
