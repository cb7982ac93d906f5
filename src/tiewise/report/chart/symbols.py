"""Shapes of markers and patterns of bars.

A page defines each once and refers to it by its id.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from tiewise.report.chart.axis import Record

DASHES = {
    "solid": "",
    "dash": "9 6",
    "dot": "2 4",
    "dashdot": "9 4 2 4",
    "longdash": "15 6",
    "longdashdot": "15 5 2 5",
}
HATCHES = {
    "/": "M-1 1L1 -1M0 6L6 0M5 7L7 5",
    "\\": "M-1 5L1 7M0 0L6 6M5 -1L7 1",
    "x": "M0 0L6 6M0 6L6 0",
    "-": "M0 3H6",
    ".": "M3 3h0",
}


def symbol_path(symbol: str, size: float) -> str:
    """Return the outline of a marker of plotly around (0, 0).

    Raises:
        KeyError: no such marker.
    """
    return OUTLINES[symbol.removesuffix("-open")](size / 2)


def symbol_id(symbol: str, size: float) -> str:
    """Return the id of a marker in the page."""
    return f"s-{symbol.removesuffix('-open')}-{size:g}"


def is_open(symbol: str) -> bool:
    """Return whether a marker has an outline only."""
    return symbol.endswith("-open") or "-thin" in symbol


def pattern_id(colour: str, shape: str) -> str:
    """Return the id of a bar's fill in the page."""
    return f"p-{colour.removeprefix('#')}-{ord(shape)}"


def definitions(figures: Iterable[Record]) -> str:
    """Return the SVG that defines every marker and pattern of the figures."""
    parts: dict[str, str] = {}  # id → element
    for figure in figures:
        for trace in figure["data"]:
            parts.update(_of_trace(trace))
    if not parts:
        return ""
    return f'<svg class="definitions" aria-hidden="true"><defs>{"".join(parts.values())}</defs></svg>'


def _of_trace(trace: Record) -> Iterator[tuple[str, str]]:
    """Yield the ids and elements of a trace's markers or pattern."""
    if trace["type"] == "bar":
        colour, shape = fill_of_bar(trace)
        if shape:
            name = pattern_id(colour, shape)
            yield name, _pattern(name, colour, HATCHES[shape])
    elif "markers" in trace.get("mode", ""):
        size = trace["marker"]["size"]
        for symbol in symbols_of(trace, 1):
            name = symbol_id(symbol, size)
            yield name, f'<path id="{html.escape(name)}" d="{symbol_path(symbol, size)}"/>'


def symbols_of(trace: Record, count: int) -> Sequence[str]:
    """Return the markers of a trace's points, or one marker `count` times."""
    symbol = trace["marker"].get("symbol", "circle")
    if isinstance(symbol, str):
        return [symbol] * count
    return list(symbol)


def fill_of_bar(trace: Record) -> tuple[str, str]:
    """Return the colour and the pattern of a trace of bars."""
    return trace["marker"]["color"], trace["marker"].get("pattern", {}).get("shape", "")


def paint_of_bar(trace: Record) -> str:
    """Return the value of `fill` for a trace of bars: its colour, or its pattern."""
    colour, shape = fill_of_bar(trace)
    if shape:
        return f"url(#{pattern_id(colour, shape)})"
    return colour


def _pattern(name: str, colour: str, hatch: str) -> str:
    """Return a coloured pattern with dark lines."""
    lines = f'<path d="{hatch}" stroke="#000" stroke-opacity=".35" stroke-width="1" stroke-linecap="round"/>'
    size = 'width="6" height="6" patternUnits="userSpaceOnUse"'
    return f'<pattern id="{name}" {size}><rect width="6" height="6" fill="{colour}"/>{lines}</pattern>'


def _polygon(*points: tuple[float, float]) -> str:
    """Return a closed path through points."""
    return "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points) + "Z"


def _circle(radius: float) -> str:
    """Return a circle."""
    arc = f"A{radius:g} {radius:g} 0 1 1"
    return f"M{-radius:g} 0{arc} {radius:g} 0{arc} {-radius:g} 0Z"


def _square(radius: float) -> str:
    """Return a square."""
    return _polygon((-radius, -radius), (radius, -radius), (radius, radius), (-radius, radius))


def _diamond(radius: float) -> str:
    """Return a square on its corner, as large as plotly's."""
    reach = 1.3 * radius
    return _polygon((0, -reach), (reach, 0), (0, reach), (-reach, 0))


def _triangle(radius: float) -> str:
    """Return a triangle with a horizontal base."""
    return _polygon((0, -radius * 1.15), (radius * 1.15, radius * 0.85), (-radius * 1.15, radius * 0.85))


def _cross(radius: float) -> str:
    """Return an upright cross."""
    return _polygon(*_cross_points(radius))


def _cross_points(radius: float) -> Iterator[tuple[float, float]]:
    """Yield the corners of an upright cross."""
    long, short = radius * 1.2, radius * 0.4
    corner = [(short, -long), (short, -short), (long, -short)]
    for _ in range(4):
        yield from corner
        corner = [(-y, x) for x, y in corner]


def _turned_cross(radius: float) -> str:
    """Return a cross of diagonals."""
    half = math.sqrt(0.5)
    return _polygon(*(((x - y) * half, (x + y) * half) for x, y in _cross_points(radius)))


def _star(radius: float) -> str:
    """Return a star with five points."""
    points = []
    for k in range(10):
        reach = radius * (1.4, 0.56)[k % 2]
        angle = math.pi * k / 5
        points.append((reach * math.sin(angle), -reach * math.cos(angle)))
    return _polygon(*points)


def _thin_cross(radius: float) -> str:
    """Return two crossing strokes. The marker x-thin of plotly is as large."""
    return f"M{-radius:g} {-radius:g}L{radius:g} {radius:g}M{-radius:g} {radius:g}L{radius:g} {-radius:g}"


def _stroke(radius: float) -> str:
    """Return a vertical stroke."""
    return f"M0 {-radius:g}V{radius:g}"


OUTLINES: dict[str, Callable[[float], str]] = {
    "circle": _circle,
    "square": _square,
    "diamond": _diamond,
    "triangle-up": _triangle,
    "cross": _cross,
    "x": _turned_cross,
    "star": _star,
    "x-thin": _thin_cross,
    "line-ns": _stroke,
}
