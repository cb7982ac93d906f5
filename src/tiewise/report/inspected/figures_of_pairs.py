"""Requested pairs both ways: logits as bars, probabilities as points, for every model and path."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from tiewise.analysis.text_pairs import TextPair
from tiewise.report import theme
from tiewise.report.bars import finish
from tiewise.report.inspected.asked_pairs import Asked, in_text, logit_table, probability_table, ways
from tiewise.report.sheet import Panel

GREY = "#8a8f99"
FLOOR = 1e-12  # where a probability is drawn that is smaller still


def pair_panels(asked: Sequence[Asked], text: Sequence[TextPair] = ()) -> list[Panel]:
    """Return logits and probabilities of the requested pairs; nothing where none was requested."""
    if not asked or not asked[0].pairs:
        return []
    logits = (
        "Logit of the second token behind the first, as the model's head gives it. Two orders with equal bars are what "
        "a symmetric path gives; their probabilities still differ, because each row has its own normaliser."
    )
    chances = "Softmax over the whole vocabulary, on a logarithmic axis."
    chances += " Grey: the share in the text; an order that it never has is not drawn." if text else ""
    return [
        Panel(_logits(asked), logits, logit_table(asked)),
        Panel(_probabilities(asked, text), chances, probability_table(asked, text)),
    ]


def _logits(asked: Sequence[Asked]) -> go.Figure:
    figure, looks = go.Figure(), _looks(asked)
    for one in asked:
        found = ways(one.pairs)
        look = looks[one.position]
        figure.add_bar(
            name=html.escape(one.name),
            orientation="h",
            y=[html.escape(way, quote=False) for way in found],
            x=[logit for logit, _, _ in found.values()],
            marker={
                "color": look.colour,
                "opacity": 1.0 if one.filled else 0.55,
                "pattern": {"shape": "" if one.filled else "/", "size": 6, "solidity": 0.25},
                "line": {"width": 0},
            },
            hovertemplate="%{y}: %{x:.3f}<extra>%{fullData.name}</extra>",
        )
    figure.update_layout(barmode="group", bargap=0.3)
    return _rows(figure, "Requested pairs: logits", "logit", asked)


def _probabilities(asked: Sequence[Asked], text: Sequence[TextPair]) -> go.Figure:
    figure, looks = go.Figure(), _looks(asked)
    for one in asked:
        look = looks[one.position]
        found = {way: chance for way, (_, chance, _) in ways(one.pairs).items()}
        symbol = look.marker if one.filled else f"{look.marker}-open"
        figure.add_trace(_points(one.name, found, {"color": look.colour, "symbol": symbol, "size": 10}))
    seen = {way: share for way, share in in_text(text).items() if share}
    if seen:
        figure.add_trace(_points("text", seen, {"color": GREY, "symbol": "line-ns-open", "size": 16}))
    figure.update_xaxes(type="log", dtick=1, exponentformat="power")
    return _rows(figure, "Requested pairs: probabilities", "probability", asked)


def _looks(asked: Sequence[Asked]) -> dict[int, theme.Style]:
    """Style of each model by its position; what is drawn of it first is called by its label alone."""
    models = {one.position: one.name for one in reversed(asked)}
    return dict(zip(models, map(theme.style, theme.places(list(models.values()))), strict=True))


def _points(name: str, found: Mapping[str, float], marker: Mapping[str, object]) -> go.Scatter:
    return go.Scatter(
        name=html.escape(name),
        mode="markers",
        y=[html.escape(way, quote=False) for way in found],
        x=[max(chance, FLOOR) for chance in found.values()],
        customdata=list(found.values()),
        marker={**marker, "line": {"width": 2, "color": marker["color"]}},
        hovertemplate="%{y}: %{customdata:.3g}<extra>%{fullData.name}</extra>",
    )


def _rows(figure: go.Figure, title: str, unit: str, asked: Sequence[Asked]) -> go.Figure:
    finish(figure, title, None)
    figure.update_xaxes(title=unit)
    labels = [html.escape(way, quote=False) for way in ways(asked[0].pairs)]
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=labels, autorange="reversed")
    return figure.update_layout(height=150 + (26 + 11 * len(asked)) * len(labels))
