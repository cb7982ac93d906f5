"""The ends of two models side by side, as figures."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from tiewise.analysis.align_tables import Closer
from tiewise.analysis.end_alignment import AcrossFound
from tiewise.report import theme
from tiewise.report.inspected.alignment import measures
from tiewise.report.inspected.alignment_figures import READ, scored
from tiewise.report.inspected.closer import centred, leans, pair_name
from tiewise.report.inspected.dots import QUIET, Dot, Series, dot_plot
from tiewise.report.sheet import Panel


def panels(found: Mapping[str, AcrossFound]) -> list[Panel]:
    """Return the answer (scores, then differences), then every pair of ends."""
    made = []
    for one in found.values():
        if one.closer is not None and one.one is not None:
            table, other = one.labels[one.one], one.labels[1 - one.one]
            read = (
                f"Each measure of the table of {table} against both tables of {other}, over the same tokens; bars are "
                "95 % intervals over tokens for the maps as fitted. Grey strokes are what unrelated tables give."
            )
            made.append(Panel(_both(one.closer, table, other), read, leans(one.closer)))
            read = "Right of zero it is closer to the output table. Bars: bootstrap over tokens, 95 %."
            made.append(Panel(_difference(one.closer, table), read, leans(one.closer)))
        for pair in one.pairs:
            name = pair_name(one, pair)
            figure = dot_plot(scored(pair.alignment, 2), name, "mean cosine, share or correlation")
            made.append(Panel(figure, READ, measures(pair.alignment)))
    return made


def _both(found: Closer, table: str, other: str) -> go.Figure:
    order = centred(found)
    chance = [Dot(x.measure, found.neighbour_chance if x.measure == "neighbours" else 0.0) for x in order]
    ends = [
        Series("by chance", chance, QUIET, "line-ns-open", 16),
        *(
            Series(
                f"{end} of {other}",
                [Dot(x.measure, e.value, e.low, e.high) for x in order for e in (getattr(x, end),)],
                look.colour,
                look.marker,
            )
            for end, look in ((end, theme.style(place)) for end, place in theme.ENDS.items())
        ),
    ]
    return dot_plot(ends, f"The table of {table} against both of {other}", "mean cosine, or share")


def _difference(found: Closer, table: str) -> go.Figure:
    dots = [Dot(x.measure, x.difference.value, x.difference.low, x.difference.high) for x in centred(found)]
    look = theme.style(2)
    return dot_plot(
        [Series("output − input", dots, look.colour, look.marker)], f"Output less input, for {table}", "output − input"
    )
