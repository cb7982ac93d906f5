"""How figures look: one colour and one dash per boundary, a light and a dark template, and stacked bars.

Arm colours are mid tones with a contrast of at least 3 : 1 on both page backgrounds, so a figure changes theme by its
template alone; every arm also has a dash and a marker of its own, because colour must not carry meaning alone.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import plotly.graph_objects as go

BACKGROUNDS = {"light": "#fbfaf8", "dark": "#17191d"}  # the same as --page in templates/report.css
COLOURS = ("#2f7fd1", "#d1660a", "#2a9468", "#9466d6", "#d4475a", "#13879a", "#9a7b12", "#c4559c")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star")
# one place in these for each boundary, whatever the figure, and others for the two ends of a model
PLACES = {"tied": 0, "untied": 1, "factored": 2, "projected": 3, "residual": 4, "spd": 5, "factored-untied": 6}
# the kind of boundary that a name begins with, or one of the folders of a path
KIND = re.compile(rf"(?:^|/)({'|'.join(sorted(PLACES, key=len, reverse=True))})(?![a-z])")
ENDS = {"input": 3, "output": 5}
COMPONENT_COLOURS = ("#8a8f99", "#5f86b8", "#b88a4e", "#6fa287", "#a47fae", "#b86f72")
COMPONENT_PATTERNS = ("", "/", "\\", "x", ".", "-")
MARGIN = {"l": 10, "r": 10, "t": 84, "b": 10}  # room for a title above a legend
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Style:
    """How one arm is drawn in every figure."""

    colour: str
    dash: str
    marker: str


def places(names: Sequence[str]) -> list[int]:
    """Where `style` has each of these, which are boundaries, models that are called by one, or anything else.

    The first of a kind of boundary has that kind's place in every figure; what is left takes places that are free, but
    never those of tied and untied.
    """
    found: dict[str, int] = {}
    left = []
    for name in dict.fromkeys(names):
        said = KIND.search(name)
        place = PLACES.get(said[1]) if said else None
        if place is None or place in found.values():
            left.append(name)
        else:
            found[name] = place
    free = (place for place in count() if place % len(COLOURS) > PLACES["untied"] and place not in found.values())
    found |= dict(zip(left, free, strict=False))
    return [found[name] for name in names]


def style(position: int) -> Style:
    """Style at a place; the periods differ in length, so 168 of them look different."""
    return Style(COLOURS[position % len(COLOURS)], DASHES[position % len(DASHES)], MARKERS[position % len(MARKERS)])


def component(position: int) -> dict[str, Any]:
    """Marker of the bars of the component at this position: a colour, and a pattern for eyes that see none."""
    pattern = COMPONENT_PATTERNS[position % len(COMPONENT_PATTERNS)]
    return {
        "color": COMPONENT_COLOURS[position % len(COMPONENT_COLOURS)],
        "pattern": {"shape": pattern, "fillmode": "overlay", "size": 6, "solidity": 0.18},
        "line": {"width": 0},
    }


def template(ink: str, quiet: str, grid: str, paper: str, diverging: tuple[str, str, str]) -> go.layout.Template:
    """Return a plotly template on a transparent background: text, axes, hover labels and the diverging colour scale."""
    axis = {
        "gridcolor": grid,
        "zerolinecolor": quiet,
        "zerolinewidth": 1,
        "linecolor": grid,
        "ticks": "outside",  # invisible, but they keep labels off the axis
        "ticklen": 6,
        "tickcolor": "rgba(0,0,0,0)",
        "tickfont": {"color": quiet, "size": 12},
        "title": {"font": {"color": quiet, "size": 12}, "standoff": 10},
        "automargin": True,
    }
    scale = [[position, colour] for position, colour in zip((0.0, 0.5, 1.0), diverging, strict=True)]
    return go.layout.Template(
        layout={
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": FONT, "size": 13, "color": ink},
            "title": {"font": {"size": 15}, "x": 0, "xanchor": "left", "xref": "paper", "y": 0.97, "yanchor": "top"},
            "xaxis": axis,
            "yaxis": axis,
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 12.5}},
            "hoverlabel": {"bgcolor": paper, "bordercolor": grid, "font": {"color": ink, "size": 12.5}},
            "coloraxis": {"colorscale": scale, "colorbar": {"outlinewidth": 0, "tickfont": {"color": quiet}}},
        }
    )


LIGHT = template("#22252b", "#656a75", "#e4e1db", "#ffffff", ("#2166ac", "#f7f5f1", "#b2441a"))
DARK = template("#e8e6e1", "#a0a5b0", "#30343c", "#22252b", ("#5aa2ea", "#1f2227", "#ee8a4a"))


def finish(figure: go.Figure, title: str, unit: str | None) -> go.Figure:
    """Give a figure its template, title, height and margins, and its y axis a title."""
    figure.update_layout(template=LIGHT, title=html.escape(title), height=380, margin=MARGIN)
    return figure.update_yaxes(title=unit) if unit else figure


def stacked(
    values: Mapping[str, Mapping[str, float]], title: str, unit: str, shown: Callable[[float], str], first: str = ""
) -> go.Figure:
    """Draw {bar: {part: value}} as horizontal stacks.

    Args:
        values: parts in the order in which they are stacked; `first` comes before all.
        title: of the figure.
        unit: of the axis.
        shown: a value as text, for the pointer.
        first: the part that all bars share, so that what differs stands side by side.
    """
    names = dict.fromkeys(name for parts in values.values() for name in parts)
    figure = go.Figure()
    for position, name in enumerate(sorted(names, key=lambda name: name != first)):
        found = [parts.get(name, 0) for parts in values.values()]
        figure.add_trace(
            go.Bar(
                name=html.escape(name),
                orientation="h",
                y=[html.escape(bar) for bar in values],
                x=found,
                marker=component(position),
                customdata=[shown(value) for value in found],
                hovertemplate="%{y}: %{customdata}<extra>%{fullData.name}</extra>",
            )
        )
    figure.update_layout(barmode="stack", bargap=0.45, legend={"traceorder": "normal"})
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    figure = finish(figure, title, None)
    figure.update_xaxes(title=unit, exponentformat="B")  # 8B: billions of parameters, no giga
    return figure.update_layout(height=140 + 44 * max(len(values), 1))
