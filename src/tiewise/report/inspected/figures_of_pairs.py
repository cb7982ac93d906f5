"""Requested pairs both ways: logits as bars, probabilities as points, for every model's direct path."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence

import plotly.graph_objects as go

from tiewise.analysis.path_tokens import WordPair
from tiewise.core.numerals import count, plain
from tiewise.report import theme
from tiewise.report.bars import finish
from tiewise.report.grid import Table
from tiewise.report.labels import visible
from tiewise.report.sheet import Panel

FLOOR = 1e-12  # where a probability is drawn that is smaller still
Way = tuple[float, float, int]  # logit, probability, rank
Ways = Mapping[str, Mapping[str, Way]]  # model → "New → York" → what its path says


def pair_panels(asked: Mapping[str, Sequence[WordPair]]) -> list[Panel]:
    """Return logits and probabilities of the requested pairs by model; nothing where none was requested."""
    if not any(asked.values()):
        return []
    logits = (
        "Logit of the second token behind the first, as the model's head gives it. Two orders with equal bars are what "
        "a symmetric path gives; their probabilities still differ, because each row has its own normaliser."
    )
    chances = "Softmax over the whole vocabulary, on a logarithmic axis."
    ways = {name: _ways(pairs) for name, pairs in asked.items()}
    return [
        Panel(_logits(ways), logits, _table(ways, lambda way: plain(way[0], 3))),
        Panel(_probabilities(ways), chances, _table(ways, lambda way: f"{way[1]:.3g} (rank {count(way[2] + 1)})")),
    ]


def _ways(pairs: Sequence[WordPair]) -> dict[str, Way]:
    """Both orders of every pair."""
    found = {}
    for pair in pairs:
        for a, b, said in ((pair.first, pair.second, pair.there), (pair.second, pair.first, pair.back)):
            found[f"{visible(a)} → {visible(b)}"] = (said.logit, said.probability, said.rank)
    return found


def _table(ways: Ways, shown: Callable[[Way], str]) -> Table:
    orders = next(iter(ways.values()))
    return Table(["order", *ways], [[order, *(shown(found[order]) for found in ways.values())] for order in orders])


def _logits(ways: Ways) -> go.Figure:
    figure = go.Figure()
    for place, (name, found) in zip(theme.places(list(ways)), ways.items(), strict=True):
        figure.add_bar(
            name=html.escape(name),
            orientation="h",
            y=[html.escape(order, quote=False) for order in found],
            x=[logit for logit, _, _ in found.values()],
            marker={"color": theme.style(place).colour, "line": {"width": 0}},
            hovertemplate="%{y}: %{x:.3f}<extra>%{fullData.name}</extra>",
        )
    figure.update_layout(barmode="group", bargap=0.3)
    return _rows(figure, "Requested pairs: logits", "logit", ways)


def _probabilities(ways: Ways) -> go.Figure:
    figure = go.Figure()
    for place, (name, found) in zip(theme.places(list(ways)), ways.items(), strict=True):
        look, chances = theme.style(place), [chance for _, chance, _ in found.values()]
        figure.add_scatter(
            name=html.escape(name),
            mode="markers",
            y=[html.escape(order, quote=False) for order in found],
            x=[max(chance, FLOOR) for chance in chances],
            customdata=chances,
            marker={
                "color": look.colour,
                "symbol": look.marker,
                "size": 10,
                "line": {"width": 2, "color": look.colour},
            },
            hovertemplate="%{y}: %{customdata:.3g}<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(type="log", dtick=1, exponentformat="power")
    return _rows(figure, "Requested pairs: probabilities", "probability", ways)


def _rows(figure: go.Figure, title: str, unit: str, ways: Ways) -> go.Figure:
    finish(figure, title, None)
    figure.update_xaxes(title=unit)
    labels = [html.escape(order, quote=False) for order in next(iter(ways.values()))]
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=labels, autorange="reversed")
    return figure.update_layout(height=150 + (26 + 11 * len(ways)) * len(labels))
