"""Gradient by path, as figures: by frequency, by row, by batch size."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from tiewise.internals.path_gradients import PathGradients
from tiewise.internals.path_shares import HISTOGRAM
from tiewise.report import theme
from tiewise.report.bars import finish
from tiewise.report.grid import Table
from tiewise.report.inspected.gradients import by_batch, percent
from tiewise.report.sheet import Panel

_GREY = {"width": 1, "color": "#8a8f99"}
_SHARE = "‖B‖ / (‖A‖ + ‖B‖)"
_COUNTS = "times the token occurs in the text"


def panels(found: Mapping[str, PathGradients]) -> list[Panel]:
    """Return B's share by frequency, where each path's energy lies, B's share by row, and by batch size."""
    made = [_by_frequency(found), _energy(found), _by_row(found)]
    if any(one.by_batch for one in found.values()):
        made.append(_by_batch(found))
    return made


def _by_frequency(found: Mapping[str, PathGradients]) -> Panel:
    figure, columns = go.Figure(), {}
    for position, (label, one) in zip(theme.places(list(found)), found.items(), strict=True):
        kept = [part for part in one.bins if part.tokens]
        for kind, open_, shares in (
            ("gradient", False, [part.gradient.share_b for part in kept]),
            ("Adam's step", True, [part.update.share_b for part in kept]),
        ):
            name = f"{label}, {kind}"
            columns[name] = {part.label: share for part, share in zip(kept, shares, strict=True)}
            figure.add_trace(_bars(position, name, [part.label for part in kept], shares, open_))
    figure.update_layout(barmode="group")
    figure.update_xaxes(title=_COUNTS, type="category", categoryorder="array", categoryarray=_labels(found))
    figure.update_yaxes(range=[0, 1], tickformat=".0%")
    figure.add_hline(y=0.5, line=_GREY)
    caption = (
        "Path B's part of the two norms on the rows of each bin, in the gradient of the text's mean loss and in Adam's "
        "step. Rows of tokens that do not occur get Path B alone. The line is one half."
    )
    return Panel(finish(figure, "Share of Path B by token frequency", _SHARE), caption, _table("count", columns, found))


def _energy(found: Mapping[str, PathGradients]) -> Panel:
    figure, columns = go.Figure(), {}
    for position, (label, one) in zip(theme.places(list(found)), found.items(), strict=True):
        kept = [part for part in one.bins if part.tokens]
        for kind, open_, parts in (
            ("Path A", True, [part.of_a for part in kept]),
            ("Path B", False, [part.of_b for part in kept]),
        ):
            name = f"{label}, {kind}"
            columns[name] = {part.label: share for part, share in zip(kept, parts, strict=True)}
            figure.add_trace(_bars(position, name, [part.label for part in kept], parts, open_))
    figure.update_layout(barmode="group")
    figure.update_xaxes(title=_COUNTS, type="category", categoryorder="array", categoryarray=_labels(found))
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    caption = "Part of ‖A‖² and of ‖B‖² that lies on the rows of each bin; a path's bars sum to 100 %."
    title = "Which tokens each path moves"
    return Panel(finish(figure, title, "part of the path's energy"), caption, _table("count", columns, found))


def _by_row(found: Mapping[str, PathGradients]) -> Panel:
    figure, columns = go.Figure(), {}
    places = [(k + 0.5) / HISTOGRAM for k in range(HISTOGRAM)]
    names = [f"{100 * k // HISTOGRAM}–{100 * (k + 1) // HISTOGRAM} %" for k in range(HISTOGRAM)]
    for position, (label, one) in zip(theme.places(list(found)), found.items(), strict=True):
        look = theme.style(position)
        for kind, values in (("gradient", one.rows.histogram), ("Adam's step", one.rows.update_histogram)):
            step = kind != "gradient"
            columns[f"{label}, {kind}"] = dict(zip(names, values, strict=True))
            figure.add_scatter(
                x=places,
                y=values,
                name=html.escape(f"{label}, {kind}"),
                mode="lines",
                line={"color": look.colour, "width": 2.2, "shape": "hvh", "dash": "dot" if step else "solid"},
                hovertemplate="%{y:.1%} of rows",
            )
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(title=_SHARE, range=[0, 1], tickformat=".0%")
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    caption = (
        "Rows of tokens that occur in the windows, by Path B's share in the row; twenty bins. Rows that do not occur "
        "would all stand at 100 %."
    )
    rows = [[name, *(percent(values[name]) for values in columns.values())] for name in names]
    return Panel(finish(figure, "Share of Path B in single rows", "rows"), caption, Table(["share", *columns], rows))


def _by_batch(found: Mapping[str, PathGradients]) -> Panel:
    figure = go.Figure()
    for position, (label, one) in zip(theme.places(list(found)), found.items(), strict=True):
        look = theme.style(position)
        points = [at for at in one.by_batch if at.windows is not None]
        figure.add_scatter(
            x=[at.windows for at in points],
            y=[at.share_b for at in points],
            name=html.escape(label),
            mode="lines",
            line={"color": look.colour, "width": 2.2, "dash": look.dash},
            hovertemplate="%{y:.1%}",
        )
        for name, estimate, symbol in (
            (f"{label}, measured", one.per_batch.share_b, look.marker),
            (f"{label}, activation norms", one.activation.share_b, f"{look.marker}-open"),
        ):
            figure.add_scatter(
                x=[one.per_batch.windows * 1.1**position],  # beside each other
                y=[estimate.value],
                name=html.escape(name),
                mode="markers",
                marker={"color": look.colour, "symbol": symbol, "size": 10},
                error_y={"array": [estimate.high - estimate.value], "color": look.colour, "thickness": 1.4, "width": 4},
                hovertemplate="%{y:.1%}",
            )
    figure.update_layout(hovermode="closest")
    figure.update_xaxes(type="log", title="windows in a batch", tickvals=[2**k for k in range(0, 13, 2)])
    figure.update_yaxes(tickformat=".0%")
    caption = (
        "Noise makes both norms longer, by different factors, so a share belongs to a batch size. Lines: the share of "
        "batches of so many windows, estimated from the scatter of those that were run. Open markers: the older "
        "activation-norm convention, which is not commensurable. Bars are 95 % intervals over batches."
    )
    return Panel(finish(figure, "Share of Path B by batch size", _SHARE), caption, by_batch(found))


def _bars(position: int, name: str, labels: Sequence[str], values: Sequence[float], hatched: bool) -> go.Bar:
    pattern = {"shape": "/" if hatched else "", "fillmode": "replace", "solidity": 0.35}
    return go.Bar(
        x=labels,
        y=values,
        name=html.escape(name),
        marker={"color": theme.style(position).colour, "pattern": pattern},
        hovertemplate=f"{html.escape(name)}: %{{y:.1%}}<extra></extra>",
    )


def _labels(found: Mapping[str, PathGradients]) -> list[str]:
    return list(dict.fromkeys(part.label for one in found.values() for part in one.bins))


def _table(first: str, columns: Mapping[str, Mapping[str, float]], found: Mapping[str, PathGradients]) -> Table:
    rows = [
        [label, *(percent(values.get(label, float("nan"))) for values in columns.values())]
        for label in _labels(found)
        if any(label in values for values in columns.values())
    ]
    return Table([first, *columns], rows)
