"""What sharing saves and what it does not, as one figure: times, work and memory beside the same model unshared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from tiewise.internals.sharing_costs import Cost, SharingCosts
from tiewise.numerals import count, plain, size
from tiewise.report import theme
from tiewise.report.bars import finish
from tiewise.report.grid import Table
from tiewise.report.sheet import Panel

# what is drawn, and as text; of times the values of all rounds
_MEASURES: dict[str, tuple[Callable[[Cost], Sequence[float]], Callable[[float], str]]] = {
    "forward": (lambda cost: cost.forward, lambda seconds: f"{plain(1e3 * seconds, 1)} ms"),
    "forward and<br>backward": (lambda cost: cost.step, lambda seconds: f"{plain(1e3 * seconds, 1)} ms"),
    "arithmetic": (lambda cost: [cost.flops], lambda flops: f"{plain(flops / 1e9, 2)} GFLOP"),
    "kept for<br>backward": (lambda cost: [cost.kept], size),
    "weights,<br>gradients,<br>moments": (lambda cost: [cost.state], size),
    "parameters": (lambda cost: [cost.parameters], count),
}


def panel(found: SharingCosts) -> Panel:
    """Return times, work and memory of every way of sharing, each over that of the unshared model."""
    threads = f"{found.threads} thread{'s' if found.threads > 1 else ''}"
    same = " and the same logits to the bit" if found.equal else ""
    caption = (
        f"An ALBERT of H = {found.width}, L = {found.layers}, V = {count(found.vocab)}, with the same weights{same} "
        f"however its layers share them; {found.batch} × {found.length} tokens, {threads}, fp32. Measured when this "
        f"version was made, on {found.where}: not the models above. Bars of times are medians of "
        f"{len(found.costs[0].forward)} rounds in turn, each over the unshared model's of its round; lines are ranges."
    )
    return Panel(_figure(found), caption, _table(found))


def _figure(found: SharingCosts) -> go.Figure:
    figure = go.Figure()
    first = found.costs[0]
    for position, cost in enumerate(found.costs):
        ratios = [[a / b for a, b in zip(read(cost), read(first), strict=True)] for read, _ in _MEASURES.values()]
        middle = [statistics.median(values) for values in ratios]
        figure.add_bar(
            name=cost.sharing,
            x=list(_MEASURES),
            y=middle,
            marker=theme.component(position),
            error_y={
                "array": [_reach(max(values) - at, values) for values, at in zip(ratios, middle, strict=True)],
                "arrayminus": [_reach(at - min(values), values) for values, at in zip(ratios, middle, strict=True)],
                "color": "#8a8f99",
                "thickness": 1.2,
                "width": 3,
            },
            customdata=[shown(statistics.median(read(cost))) for read, shown in _MEASURES.values()],
            hovertemplate="%{customdata}, %{y:.2f} × unshared",
        )
    figure.add_hline(y=1, line={"width": 1, "color": "#8a8f99"})
    figure.update_layout(barmode="group", bargap=0.25)
    title = f"What sharing saves: {found.batch} × {found.length} tokens, width {found.width}"
    return finish(figure, title, "× unshared").update_yaxes(rangemode="tozero")


def _reach(length: float, values: Sequence[float]) -> float | None:
    """Length of one side of a range; none where there is one value."""
    return length if len(values) > 1 else None


def _table(found: SharingCosts) -> Table:
    rows = [[cost.sharing, *(_cell(read(cost), shown) for read, shown in _MEASURES.values())] for cost in found.costs]
    return Table(["shared", *(name.replace("<br>", " ") for name in _MEASURES)], rows)


def _cell(values: Sequence[float], shown: Callable[[float], str]) -> str:
    middle = shown(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({shown(min(values))} to {shown(max(values))})"
