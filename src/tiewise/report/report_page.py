"""Pages of tiewise: each one HTML file that opens from disk and needs no network.

    sections (lines, tables, figures) → templates/report.html + .css + .js + plotly.js → one file

The page shows its figures as static charts (`report/chart`), with all texts and tables, without a script. plotly.js is
compressed in the page and starts only if the reader makes a figure interactive. Folded parts are texts until opened.

Texts of users are escaped: by the template in the page, as plotly text in figures, and `<` in the embedded JSON. A
content security policy forbids every request, so a mistake in the escaping cannot reach the network.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from tiewise.core.measurement import DIVERGING, Listing
from tiewise.report.chart.chart import static_chart
from tiewise.report.chart.symbols import definitions

SENTENCE = 24  # characters; a column with a longer cell counts as sentences
MARGIN = {"l": 10, "r": 10, "t": 84, "b": 10}  # pixels; with room for a title above a legend
FONT = "system-ui, sans-serif"


def _look(ink: str, quiet: str, grid: str, paper: str, diverging: tuple[str, str, str]) -> go.layout.Template:
    """Return a theme of figures: text, axes, hover labels and diverging colours on a transparent background."""
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
    """A figure (its title is the heading), its caption, and its numbers as a table."""

    figure: go.Figure
    caption: str
    table: Listing

    @property
    def title(self) -> str:
        """Heading of the panel; plotly stores it as HTML."""
        return html.unescape(str(self.figure.layout.title.text))

    @property
    def margin(self) -> dict[str, int]:
        """Margins in pixels. The page shows the title outside; a legend or colour bar needs room."""
        top = 10
        if any(_has_key(trace) for trace in self.figure.data):
            top = 40
        return {"l": 6, "r": 12, "t": top, "b": 6}

    @property
    def height(self) -> int:
        """Height of the interactive figure, in pixels."""
        with_title: int = self.figure.layout.height
        return with_title - MARGIN["t"] + self.margin["t"]

    def record(self) -> dict[str, Any]:
        """Return the figure as plotly.js reads it, without title and template, which the page sets."""
        figure = json.loads(self.figure.to_json())
        layout = figure["layout"]
        for key in ("title", "template"):
            layout.pop(key, None)
        layout["margin"] = self.margin
        layout["height"] = self.height
        return {"data": figure["data"], "layout": layout}


def _has_key(trace: Any) -> bool:
    """Return whether a trace of plotly has a legend or a colour bar."""
    return trace.showlegend is not False or trace.type == "heatmap"


@dataclass(frozen=True)
class PageSection:
    """Texts, tables and figures under a heading. A table without rows is left out."""

    title: str
    panels: Sequence[Panel] = ()
    findings: Sequence[str] = ()  # sentences at the top
    tables: Sequence[Listing] = ()  # before the figures; all but the first are titled with their names
    folded_panels: Sequence[Panel] = ()  # figures that are folded at first
    folded: Sequence[Listing] = ()  # tables after the figures that are folded at first
    notes: Sequence[str] = ()  # explanations, last
    kind: str = "panels"  # CSS classes of the figures' grid

    @property
    def empty(self) -> bool:
        """True if nothing is to be displayed under the heading."""
        has_rows = any(table.rows for table in (*self.tables, *self.folded))
        return not any((self.panels, self.findings, has_rows, self.notes))


@dataclass(frozen=True)
class ReportPage:
    """A page: the answer, the evidence for it, then everything else."""

    command_name: str
    title: str
    subject: str
    heading: str  # heading of the answer
    answer: Sequence[str]
    results: PageSection  # table and figure at the top of the page
    sections: Sequence[PageSection]
    command: str
    facts: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()  # settings, folded: (heading, pairs of name and value)
    provenance: Sequence[PageSection] = ()  # tables below the facts
    contents: bool = False  # the page starts with a list of its sections
    banner: str = ""

    @property
    def panels(self) -> list[Panel]:
        """All figures, in the page's order."""
        panels: list[Panel] = []
        for section in (self.results, *self.sections):
            panels += [*section.panels, *section.folded_panels]
        return panels

    def render(self) -> str:
        """Return the page as text."""
        themes = {"light": LIGHT.to_plotly_json(), "dark": DARK.to_plotly_json()}
        panels = self.panels
        records = [panel.record() for panel in panels]
        charts = []
        for panel, of_panel in zip(panels, records, strict=True):
            charts.append(Markup(static_chart(of_panel, f"{panel.title}. {panel.caption}")))
        record = {"figures": records, "themes": themes}
        # escaped, so that no string can close the script element
        figures = json.dumps(record, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
        figures = figures.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
        return _template().render(
            report_page=self,
            sections=[section for section in self.sections if not section.empty],
            number=count().__next__,
            columns=_columns,
            charts=charts,
            definitions=Markup(definitions(records)),
            plotly=_packed_plotly(),
            figures=Markup(figures),
        )


@cache
def _packed_plotly() -> str:
    """Return plotly.js, compressed by zlib, in base64: 2.0 MB instead of 4.8."""
    return base64.b64encode(zlib.compress(get_plotlyjs().encode(), level=9)).decode()


@cache
def _template() -> Template:
    """Return the template of all pages, which escapes texts automatically."""
    environment = Environment(
        loader=PackageLoader("tiewise.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["unbroken"] = _unbroken
    return environment.get_template("report.html")


def _unbroken(line: str) -> str:
    """Return a line in which no per cent sign starts a new line."""
    return line.replace(" %", "\N{NO-BREAK SPACE}%")


def _columns(table: Listing) -> list[str]:
    """Return the class of each column (see `_column_class`)."""
    rows = [row for row in table.rows if len(row) == len(table.header)]  # a row of one cell is a heading
    if not rows:
        return [""] * len(table.header)
    return [_column_class(cells) for cells in zip(*rows, strict=True)]


def _column_class(cells: Sequence[str]) -> str:
    """Return the CSS class of a column, which depends on its long cells.

    The class is `verdict` if all long cells have " → ", else `sentence`. A column without long cells has the class "".
    Its cells, numbers with their intervals, do not break into lines.
    """
    long_texts = [cell for cell in cells if _is_long_text(cell)]
    if not long_texts:
        return ""
    if all(" → " in text for text in long_texts):
        return "verdict"
    return "sentence"


def _is_long_text(cell: str) -> bool:
    """Return whether a cell is long and has a letter."""
    if len(cell) <= SENTENCE:
        return False
    return any(map(str.isalpha, cell))
