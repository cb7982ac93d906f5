"""One HTML file that opens from disk, offline, for as long as browsers exist: what every page of tiewise is made of.

    sections of panels (figure, caption, table) → templates/report.html + .css + .js + plotly.js → one file

Whatever a user wrote is escaped: as HTML in the page, as plotly text in figures, and `<` in the embedded JSON. A
content security policy forbids every request, so a slip could not reach the network either.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import count as numbers
from pathlib import Path
from string import Template
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from tiewise.core.errors import RunError
from tiewise.core.files import write_whole
from tiewise.report import theme
from tiewise.report.grid import Table

SENTENCE = 24  # characters of a cell from which on its column is read as sentences


@dataclass(frozen=True)
class Panel:
    """A figure (its title is the heading), how to read it, and its numbers."""

    figure: go.Figure
    caption: str
    table: Table

    @property
    def title(self) -> str:
        """Heading of the panel, as escaped HTML."""
        return str(self.figure.layout.title.text)


@dataclass(frozen=True)
class Section:
    """Panels under a heading; `lead` is HTML before them and `extra` after them, `kind` classes of their grid."""

    title: str
    panels: Sequence[Panel]
    extra: str = ""
    kind: str = "panels"
    lead: str = ""
    more: Sequence[Panel] = ()  # figures that a reader opens

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show under the heading."""
        return not (self.panels or self.lead or self.extra)


@dataclass(frozen=True)
class Sheet:
    """A page. Fields named `html` hold markup that is already escaped; the others are text."""

    command_name: str
    title: str
    subject: str
    heading: str
    lead: str  # html
    results: str  # html
    note: str  # html
    sections: Sequence[Section]
    command: str
    made: str = ""  # html under the command, folded
    contents: bool = False  # whether the sections are listed first
    banner: str = ""
    panels: list[Panel] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "panels", [panel for section in self.sections for panel in (*section.panels, *section.more)]
        )

    def render(self) -> str:
        """Return the page as text."""
        themes = {name: look.to_plotly_json() for name, look in (("light", theme.LIGHT), ("dark", theme.DARK))}
        index, shown = numbers(), [section for section in self.sections if not section.empty]
        return Template(_resource("report.html")).substitute(
            title=html.escape(self.title),
            style=_resource("report.css"),
            script=_resource("report.js"),
            plotly=get_plotlyjs(),
            figures=_json({"figures": [_figure(panel) for panel in self.panels], "themes": themes}),
            name=self.command_name,
            subject=html.escape(self.subject),
            banner=f'<p class="banner" role="note">{html.escape(self.banner)}</p>' if self.banner else "",
            heading=self.heading,
            lead=self.lead,
            contents=_contents(shown) if self.contents else "",
            results=self.results,
            note=self.note,
            sections="\n".join(_section(section, index, place) for place, section in enumerate(shown)),
            command=html.escape(self.command),
            made=f"<details><summary>Settings, data and versions</summary>{self.made}</details>" if self.made else "",
        )


def write(text: str, path: str | os.PathLike[str], option: str) -> Path:
    """Write a page to `path`, whole or not at all, and return it.

    Raises:
        RunError: when the file cannot be written there; `option` is what names another place.
    """
    target = Path(path)
    try:
        write_whole(target, text)
    except OSError as error:
        raise RunError(f"cannot write {target}: {error.strerror}", f"choose another place with {option}") from None
    return target


def paragraphs(text: str) -> str:
    """Return lines of text as HTML paragraphs."""
    lines = html.escape(text).replace(" %", "&nbsp;%").splitlines()
    return "".join(f"<p>{line}</p>" for line in lines)


def table(found: Table, caption: str) -> str:
    """Return a table as HTML that scrolls, and says so, where it is wider than the page.

    A row of one cell heads those that follow.
    """
    said = [any(_sentence(row[i]) for row in found.rows if i < len(row)) for i in range(len(found.header))]
    kinds = [' class="sentence"' if one else "" for one in said]
    head = "".join(
        f'<th scope="col"{kind}>{html.escape(name)}</th>' for name, kind in zip(found.header, kinds, strict=True)
    )
    body = "".join(_row(row, kinds) for row in found.rows)
    return (
        '<p class="more" aria-hidden="true">more columns: scroll sideways →</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(caption)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def folded(found: Table, caption: str) -> str:
    """Return a table under its caption, shown when a reader opens it."""
    return f"<details><summary>{html.escape(caption)}</summary>{table(found, caption)}</details>"


def _resource(name: str) -> str:
    return (files("tiewise.report") / "templates" / name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that can stand inside a script element whatever its strings hold."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _contents(sections: Sequence[Section]) -> str:
    items = "".join(f'<li><a href="#section-{place}">{one.title}</a></li>' for place, one in enumerate(sections))
    return f'<nav aria-label="Contents"><ol>{items}</ol></nav>'


def _section(section: Section, index: Iterator[int], place: int) -> str:
    body = "".join(_panel(panel, next(index)) for panel in section.panels)
    grid = f'<div class="{section.kind}">{body}</div>' if body else ""
    more = "".join(_panel(panel, next(index)) for panel in section.more)
    if more:
        said = f"{len(section.more)} more figure{'s' if len(section.more) > 1 else ''}"
        grid += f'<details><summary>{said}</summary><div class="{section.kind}">{more}</div></details>'
    return f'<section id="section-{place}"><h2>{section.title}</h2>{section.lead}{grid}{section.extra}</section>'


def _panel(panel: Panel, index: int) -> str:
    caption = html.escape(panel.caption)
    height = panel.figure.layout.height - theme.MARGIN["t"] + _margin(panel)["t"]
    return (
        f'<figure class="panel"><h3>{panel.title}</h3>'
        f'<div class="plot" id="plot-{index}" role="img" aria-label="{panel.title}. {caption}" '
        f'style="height:{height}px"></div>'
        f"<figcaption>{caption}</figcaption>"
        f'<details><summary>Data<span class="hidden"> of: {panel.title}</span></summary>'
        f"{table(panel.table, f'Data of: {html.unescape(panel.title)}')}</details></figure>"
    )


def _margin(panel: Panel) -> dict[str, int]:
    """Margins in the page, which writes the title itself: only a legend or a colour bar still needs room above."""
    bare = not any(trace.showlegend is not False or trace.type == "heatmap" for trace in panel.figure.data)
    return {"l": 6, "r": 12, "t": 10 if bare else 40, "b": 6}


def _figure(panel: Panel) -> dict[str, Any]:
    """Return a figure as plotly.js takes it, without what the page gives: title, template and outer margins."""
    record, dropped = json.loads(panel.figure.to_json()), ("title", "template", "height")
    layout = {key: value for key, value in record["layout"].items() if key not in dropped}
    return {"data": record["data"], "layout": {**layout, "margin": _margin(panel)}}


def _row(row: Sequence[str], kinds: Sequence[str]) -> str:
    if len(row) == 1 < len(kinds):
        return f'<tr class="head"><th scope="colgroup" colspan="{len(kinds)}">{html.escape(row[0])}</th></tr>'
    first, *rest = (f"{kind}>{html.escape(cell)}" for cell, kind in zip(row, kinds, strict=True))
    return f'<tr><th scope="row"{first}</th>{"".join(f"<td{cell}</td>" for cell in rest)}</tr>'


def _sentence(cell: str) -> bool:
    """Whether a cell's column breaks into lines: sentences and long names do, numbers with their intervals do not."""
    return len(cell) > SENTENCE and any(map(str.isalpha, cell))
