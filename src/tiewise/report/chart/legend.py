"""Key of a chart: swatches and names of traces, or the colours of a map."""

from __future__ import annotations

import html
from collections.abc import Iterator

from tiewise.core.measurement import MINUS
from tiewise.report.chart.axis import Record
from tiewise.report.chart.marks import LEVELS, heat_colour
from tiewise.report.chart.symbols import DASHES, is_open, paint_of_bar, symbol_path, symbols_of

LARGEST = 11  # pixels of a marker in a swatch
SCALE = "linear-gradient(to right,{low},{zero},{high})"


def legend(figure: Record) -> str:
    """Return the key as HTML; "" for a figure that needs none."""
    entries = list(_entries(figure))
    if entries:
        return f'<ul class="legend">{"".join(entries)}</ul>'
    if any(trace["type"] == "heatmap" for trace in figure["data"]):
        return _scale(figure["layout"]["coloraxis"]["cmax"])
    return ""


def _entries(figure: Record) -> Iterator[str]:
    """Yield an entry for each trace that has a name."""
    for trace in figure["data"]:
        if trace["type"] != "heatmap" and trace.get("name") and trace.get("showlegend", True):
            swatch = f'<svg viewBox="-14 -7 28 14" aria-hidden="true">{_swatch(trace)}</svg>'
            # the name is text of HTML, as plotly has it
            yield f"<li>{swatch}{html.escape(html.unescape(trace['name']), quote=False)}</li>"


def _swatch(trace: Record) -> str:
    """Return a sample of a trace's line, marker or bar."""
    if trace["type"] == "bar":
        return f'<rect x="-7" y="-6" width="14" height="12" fill="{paint_of_bar(trace)}"/>'
    parts = []
    if "lines" in trace["mode"]:
        line = trace["line"]
        dashes = DASHES[line.get("dash", "solid")] or "none"
        stroke = f'stroke="{line["color"]}" stroke-width="{line["width"]:g}" stroke-dasharray="{dashes}"'
        parts.append(f'<path d="M-14 0H14" fill="none" {stroke}/>')
    if "markers" in trace["mode"]:
        marker = trace["marker"]
        symbol = symbols_of(trace, 1)[0]
        outline = symbol_path(symbol, min(max(marker["size"], 7), LARGEST))
        fill, width = marker["color"], 0.0
        if is_open(symbol):
            fill, width = "none", 1.6
        stroke = f'stroke="{marker["color"]}" stroke-width="{width}"'
        parts.append(f'<path d="{outline}" fill="{fill}" {stroke}/>')
    return "".join(parts)


def _scale(top: float | None) -> str:
    """Return the colours from −top to top; an empty text if no value is finite (None)."""
    if top is None:
        return ""
    gradient = SCALE.format(low=heat_colour(-LEVELS), zero=heat_colour(0), high=heat_colour(LEVELS))
    end = f"{top:.2g}"
    bar = f'<i style="background:{gradient}"></i>'
    return f'<p class="legend scale">{MINUS}{end}{bar}{end}</p>'
