"""Tokens of a checkpoint in figures: norms and contexts by frequency, spectra, rows in two dimensions."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from tiewise.analysis.estimates import Estimate
from tiewise.analysis.row_directions import gaussian_shares
from tiewise.analysis.token_contexts import ContextGroup
from tiewise.analysis.tokens import TableTokens, TokensFound
from tiewise.data.frequency import bin_of, frequency_bins
from tiewise.report import theme
from tiewise.report.bars import finish
from tiewise.report.inspected.tokens import (
    anisotropy_table,
    contexts_table,
    different_contexts,
    name_of,
    norms_table,
    percent,
    planes_table,
)
from tiewise.report.labels import token_label
from tiewise.report.sheet import Panel

GREY = "#8a8f99"
ENTRY = 19  # height of a legend's entry
RARE_TO_FREQUENT = ("#8a8f99", "#2f7fd1", "#13879a", "#2a9468", "#c98a06", "#d4475a")
NAMED = 6  # tokens of a view that carry their text
CONTEXT_MARKS = (("counts", 3, "circle"), ("tossed directions", 2, "diamond-open"), ("guessed", 5, "square"))


def panels(found: Mapping[str, TokensFound]) -> list[Panel]:
    """Return every figure that the results have data for."""
    return [*_norms(found), *_contexts(found), *_spectrum(found), *_planes(found)]


def norms_figure(found: Mapping[str, TokensFound]) -> go.Figure:
    """Median norm by frequency, with quartiles as bars."""
    figure = go.Figure()
    named = list(_named(found))
    for position, (name, table) in zip(theme.places([name for name, _ in named]), named, strict=True):
        bins, look = table.norms.bins, theme.style(position)
        up = [group.quartiles[1] - group.median for group in bins]
        down = [group.median - group.quartiles[0] for group in bins]
        figure.add_scatter(
            x=[group.label for group in bins],
            y=[group.median for group in bins],
            name=html.escape(name),
            mode="lines+markers",
            line={"color": look.colour, "width": 1.6, "dash": look.dash},
            marker={"symbol": look.marker, "size": 8},
            error_y={"array": up, "arrayminus": down, "thickness": 1.4, "width": 4, "color": look.colour},
            customdata=[[group.tokens, *group.quartiles] for group in bins],
            hovertemplate="median %{y:.3f}, quartiles %{customdata[1]:.3f} to %{customdata[2]:.3f}, "
            "%{customdata[0]:,} tokens<extra>%{fullData.name}</extra>",
        )
    order = [found_bin.label for found_bin in frequency_bins(np.zeros(0, np.int64))]
    figure.update_layout(scattermode="group", scattergap=0.75)
    figure.update_xaxes(title="times the text has the token", type="category", categoryarray=order)
    return _room(finish(figure, "Length of rows by token frequency", "row norm, median and quartiles"))


def contexts_figure(groups: Sequence[ContextGroup], title: str, unit: str) -> go.Figure:
    """Divergence of left and right contexts by group, between its two null levels."""
    figure = go.Figure()
    labels = [html.escape(group.label) for group in groups]
    for (name, colour, symbol), read in zip(CONTEXT_MARKS, (_counts, _tossed, _guessed), strict=True):
        estimates = [read(group) for group in groups]
        middle = [estimate.value for estimate in estimates]
        half = [(estimate.high - estimate.low) / 2 for estimate in estimates]
        figure.add_scatter(
            x=labels,
            y=middle,
            name=name,
            mode="markers",
            marker={"color": theme.COLOURS[colour], "size": 9, "symbol": symbol},
            error_y={"array": half, "thickness": 1.6, "width": 5, "color": theme.COLOURS[colour]},
            customdata=[group.tokens for group in groups],
            hovertemplate="%{x}: %{y:.3f} nats, %{customdata:,} tokens<extra>%{fullData.name}</extra>",
        )
    figure.add_hline(y=math.log(2), line={"width": 1, "color": GREY, "dash": "dot"})
    figure.update_xaxes(title=unit, type="category")
    figure = finish(figure, title, "nats, mean over tokens")
    lowest = min(0.0, *(group.held_out.low for group in groups))
    return figure.update_yaxes(range=[1.08 * lowest, 0.74], zeroline=False)


def _counts(group: ContextGroup) -> Estimate:
    return group.plug_in


def _tossed(group: ContextGroup) -> Estimate:
    return Estimate(group.coin, group.coin, group.coin, group.tokens)


def _guessed(group: ContextGroup) -> Estimate:
    return group.held_out


def spectrum_figure(found: Mapping[str, TokensFound]) -> go.Figure:
    """Cumulative share of the variance by directions, with that of a Gaussian table of each shape."""
    figure = go.Figure()
    shapes: dict[tuple[int, int], None] = {}
    named = list(_named(found))
    for position, (name, table) in zip(theme.places([name for name, _ in named]), named, strict=True):
        shapes.setdefault((table.rows, table.width))
        look = theme.style(position)
        line = {"color": look.colour, "width": 2.2, "dash": look.dash}
        figure.add_trace(_cumulative(np.array(table.anisotropy.shares), html.escape(name), line))
    for rows, width in shapes:
        line = {"color": GREY, "width": 1.2, "dash": "dot"}
        figure.add_trace(_cumulative(gaussian_shares(rows, width), f"Gaussian, {rows:,} × {width:,}", line))
    figure.update_xaxes(title="leading directions", type="log", dtick="D2")
    figure = finish(figure, "How many directions a table fills", "share of the variance")
    return _room(figure.update_yaxes(range=[0, 1.02], tickformat=".0%"))


def _room(figure: go.Figure) -> go.Figure:
    """Give a legend whose entries stand one above the other the height that they take."""
    return figure.update_layout(height=figure.layout.height + ENTRY * max(0, len(figure.data) - 2))


def plane_figure(label: str, found: TokensFound) -> go.Figure:
    """A model's tables in two dimensions, side by side, coloured by frequency."""
    columns = min(2, len(found.tables))
    rows = math.ceil(len(found.tables) / columns)
    titles = [html.escape(f"{t.name}, {t.rows:,} × {t.width:,}") for t in found.tables]
    figure = make_subplots(rows, columns, subplot_titles=titles, horizontal_spacing=0.2, vertical_spacing=0.2)
    where = bin_of(np.array(found.counts, np.int64)) if found.counts else np.zeros(len(found.sample), np.int64)
    named = list(_worth_naming(found))
    for number, table in enumerate(found.tables):
        place = {"row": number // columns + 1, "col": number % columns + 1}
        for trace in _points(found, table, where, first=number == 0):
            figure.add_trace(trace, **place)
        for trace in _names(found, table, named):
            figure.add_trace(trace, **place)
        first, second = table.plane.shares
        figure.update_xaxes(title=f"first axis, {percent(first)} of the variance", **place)
        figure.update_yaxes(title=f"second axis, {percent(second)}", **place)
    figure.update_annotations(font={"size": 12})
    figure = finish(figure, f"Rows in two dimensions: {label}", None)
    legend = {"itemsizing": "constant", "y": 1.0 + 0.14 / rows}
    return figure.update_layout(height=150 + 330 * rows, legend=legend)


def _named(found: Mapping[str, TokensFound]) -> Iterator[tuple[str, TableTokens]]:
    for label, one in found.items():
        for table in one.tables:
            yield name_of(label, table), table


def _norms(found: Mapping[str, TokensFound]) -> Iterator[Panel]:
    if any(table.norms.bins for _, table in _named(found)):
        caption = (
            "Half of the tokens of a bin lie between the ends of its bar. The text's counts stand for those of "
            "training, which are not known here."
        )
        yield Panel(norms_figure(found), caption, norms_table(found, "bins"))


def _contexts(found: Mapping[str, TokensFound]) -> Iterator[Panel]:
    caption = (
        "How far what precedes a token differs from what follows it: 0 is the same, the dotted line (ln 2) no common "
        "neighbour. Counts give too much, guesses from other parts of the text too little; tossed directions show what "
        "counts of this size give where both sides are alike. Bars are 95 % intervals over tokens."
    )
    texts = different_contexts(found)
    for names, around in texts:
        of = f": {names}" if len(texts) > 1 else ""
        for groups, what, unit in (
            (around.bins, "frequency", "times the text has the token"),
            (around.scripts, "script", "script of the token"),
        ):
            if groups:
                figure = contexts_figure(groups, f"Left and right contexts by {what}{of}", unit)
                yield Panel(figure, caption, contexts_table(groups))


def _spectrum(found: Mapping[str, TokensFound]) -> Iterator[Panel]:
    caption = (
        "Variance of the rows, less their mean, in the first directions; a curve far above its dotted line has few "
        "directions that matter. A table behind a map cannot fill more directions than before it."
    )
    yield Panel(spectrum_figure(found), caption, anisotropy_table(found))


def _planes(found: Mapping[str, TokensFound]) -> Iterator[Panel]:
    for label, one in found.items():
        many = f"{len(one.sample):,} tokens" + (", half of them the text's most frequent," if one.counts else "")
        caption = (
            f"{many} along the two directions of largest variance of each table. Distances across the plane are true "
            "only in so far as these two hold the variance; the direction of an axis has no meaning."
        )
        yield Panel(plane_figure(label, one), caption, planes_table({label: one}))


def _cumulative(shares: np.ndarray, name: str, line: dict[str, object]) -> go.Scatter:
    k = np.unique(np.round(np.geomspace(1, len(shares), 120)).astype(int))
    y = np.cumsum(shares)[k - 1]
    hover = "%{x} directions: %{y:.1%}<extra>%{fullData.name}</extra>"
    return go.Scatter(x=k.tolist(), y=y.round(5).tolist(), name=name, mode="lines", line=line, hovertemplate=hover)


def _points(found: TokensFound, table: TableTokens, where: np.ndarray, *, first: bool) -> Iterator[go.Scatter]:
    points = np.array(table.plane.points).reshape(-1, 2).round(4)
    labels = [bin_.label for bin_ in frequency_bins(np.zeros(0, np.int64))]
    for place in np.unique(where).tolist():
        chosen = np.nonzero(where == place)[0]
        yield go.Scatter(
            x=points[chosen, 0].tolist(),
            y=points[chosen, 1].tolist(),
            name=labels[place] if found.counts else "tokens",
            legendgroup=labels[place],
            showlegend=first,
            mode="markers",
            marker={"color": RARE_TO_FREQUENT[place], "size": 4, "opacity": 0.65},
            text=[token_label(found.labels[index]) for index in chosen],
            hovertemplate="%{text}<extra>%{fullData.name}</extra>",
        )


def _names(found: TokensFound, table: TableTokens, named: list[int]) -> Iterator[go.Scatter]:
    points = np.array(table.plane.points).reshape(-1, 2).round(4)[named]
    yield go.Scatter(
        x=points[:, 0].tolist(),
        y=points[:, 1].tolist(),
        mode="markers+text",
        text=[token_label(found.labels[index]) for index in named],
        textposition="top center",
        textfont={"size": 11},
        marker={"symbol": "circle-open", "size": 8, "color": GREY},
        showlegend=False,
        hoverinfo="skip",
    )


def _worth_naming(found: TokensFound) -> Iterator[int]:
    """Places of the tokens to name in every view: frequent words that lie apart in the first."""
    points = np.array(found.tables[0].plane.points).reshape(-1, 2)
    order = np.argsort(-np.array(found.counts), kind="stable") if found.counts else np.arange(len(points))
    reach = np.ptp(points, axis=0) if len(points) else np.zeros(2)
    taken: list[int] = []
    for index in order.tolist():
        text = found.labels[index].strip()
        apart = all((np.abs(points[index] - points[other]) > (0.3, 0.1) * reach).any() for other in taken)
        if len(text) > 1 and text.isalpha() and apart:
            taken.append(index)
            yield index
        if len(taken) == NAMED:
            return
