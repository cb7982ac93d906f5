"""One HTML file that opens from disk, offline, for as long as browsers exist: what every page of tiewise is made of.

    sections (lines, tables, figures) → templates/report.html + .css + .js + plotly.js → one file

Whatever a user wrote is escaped: by the template in the page, as plotly text in figures, and `<` in the embedded JSON.
A content security policy forbids every request, so a slip could not reach the network either.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from tiewise.core.found import DIVERGING, Listing

SENTENCE = 24  # characters of a cell from which on its column is read as sentences
MARGIN = {"l": 10, "r": 10, "t": 84, "b": 10}  # of a figure: room for a title above a legend
FONT = "system-ui, sans-serif"


def _look(ink: str, quiet: str, grid: str, paper: str, diverging: tuple[str, str, str]) -> go.layout.Template:
    """A theme of figures on a transparent background: text, axes, hover labels and the diverging colour scale."""
    layout = go.Layout(
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font=go.layout.Font(family=FONT, size=13, color=ink),
        title=go.layout.Title(font_size=15, x=0, xanchor="left", xref="paper", y=0.97, yanchor="top"),
        legend=go.layout.Legend(orientation="h", x=0, y=1.02, yanchor="bottom", font_size=12.5),
        hoverlabel=go.layout.Hoverlabel(bgcolor=paper, bordercolor=grid, font_color=ink, font_size=12.5),
        coloraxis_colorscale=[*zip((0.0, 0.5, 1.0), diverging, strict=True)],
        coloraxis_colorbar=go.layout.coloraxis.ColorBar(outlinewidth=0, tickfont_color=quiet),
    )
    for axis in (layout.xaxis, layout.yaxis):
        axis.update(gridcolor=grid, zerolinecolor=quiet, zerolinewidth=1, linecolor=grid, automargin=True)
        axis.update(ticks="outside", ticklen=6, tickcolor="rgba(0,0,0,0)")  # invisible; they keep labels off the axis
        axis.update(tickfont_color=quiet, tickfont_size=12)
        axis.update(title_font_color=quiet, title_font_size=12, title_standoff=10)
    return go.layout.Template(layout=layout)


LIGHT = _look("#22252b", "#656a75", "#e4e1db", "#ffffff", DIVERGING["light"])
DARK = _look("#e8e6e1", "#a0a5b0", "#30343c", "#22252b", DIVERGING["dark"])


@dataclass(frozen=True)
class Panel:
    """A figure (its title is the heading), how to read it, and its numbers."""

    figure: go.Figure
    caption: str
    table: Listing

    @property
    def title(self) -> str:
        """Heading of the panel; plotly holds it as HTML."""
        return html.unescape(str(self.figure.layout.title.text))

    @property
    def margin(self) -> dict[str, int]:
        """Margins in the page, which writes the title itself: only a legend or a colour bar needs room above."""
        bare = not any(trace.showlegend is not False or trace.type == "heatmap" for trace in self.figure.data)
        return {"l": 6, "r": 12, "t": 10 if bare else 40, "b": 6}

    @property
    def height(self) -> int:
        """Pixels of the figure in the page."""
        return self.figure.layout.height - MARGIN["t"] + self.margin["t"]

    def record(self) -> dict[str, Any]:
        """The figure as plotly.js takes it, without what the page gives: title, template and outer margins."""
        found, dropped = json.loads(self.figure.to_json()), ("title", "template", "height")
        layout = {key: value for key, value in found["layout"].items() if key not in dropped}
        return {"data": found["data"], "layout": {**layout, "margin": self.margin}}


@dataclass(frozen=True)
class PageSection:
    """What stands under a heading, all of it text, in this order; a table without rows is left out."""

    title: str
    panels: Sequence[Panel] = ()
    said: Sequence[str] = ()  # what was found, before all else
    tables: Sequence[Listing] = ()  # before the figures, each under its name but for the first
    more: Sequence[Panel] = ()  # figures for a reader who opens them
    folded: Sequence[Listing] = ()  # after them, for a reader who opens them
    notes: Sequence[str] = ()  # how to read it, last
    kind: str = "panels"  # classes of the figures' grid

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show under the heading."""
        rows = any(one.rows for one in (*self.tables, *self.folded))
        return not (self.panels or self.said or rows or self.notes)


@dataclass(frozen=True)
class Sheet:
    """A page: the answer, what it rests on, everything else."""

    command_name: str
    title: str
    subject: str
    heading: str  # of the answer
    answer: Sequence[str]
    results: PageSection  # the table and the figure that a reader sees first
    sections: Sequence[PageSection]
    command: str
    facts: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()  # (heading, (name, value)s): how it was made, folded
    made: Sequence[PageSection] = ()  # tables beside these facts
    contents: bool = False  # whether the sections are listed first
    banner: str = ""

    @property
    def panels(self) -> list[Panel]:
        """Every figure, in the page's order."""
        return [panel for one in (self.results, *self.sections) for panel in (*one.panels, *one.more)]

    def render(self) -> str:
        """Return the page as text."""
        themes = {name: look.to_plotly_json() for name, look in (("light", LIGHT), ("dark", DARK))}
        record = {"figures": [panel.record() for panel in self.panels], "themes": themes}
        # JSON that can stand inside a script element whatever its strings hold
        figures = json.dumps(record, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
        figures = figures.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
        return _template().render(
            sheet=self,
            sections=[section for section in self.sections if not section.empty],
            number=count().__next__,
            columns=_columns,
            plotly=Markup(get_plotlyjs()),
            figures=Markup(figures),
        )


@cache
def _template() -> Template:
    loader = PackageLoader("tiewise.report")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters["unbroken"] = lambda line: line.replace(" %", "\N{NO-BREAK SPACE}%")
    return made.get_template("report.html")


def _columns(table: Listing) -> list[str]:
    """The class of each column: `sentence` where its cells are read as such, `verdict` for "number → side"."""
    rows = [row for row in table.rows if len(row) == len(table.header)]  # a row of one cell heads those that follow
    kinds = []
    for cells in zip(*rows, strict=True):
        # sentences and long names break into lines, numbers with their intervals do not
        long = [cell for cell in cells if len(cell) > SENTENCE and any(map(str.isalpha, cell))]
        kinds.append(("verdict" if all(" → " in cell for cell in long) else "sentence") if long else "")
    return kinds or [""] * len(table.header)
