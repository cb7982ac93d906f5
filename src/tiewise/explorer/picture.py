"""What is seen of the page where no script runs: its first sentences, and one figure, as SVG."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from tiewise.core.colours import DIVERGING
from tiewise.core.found import count, plain

WIDTH, LINE, LETTERS = 680, 22, 84  # pixels; of a line of text; letters that fit in it
INK, QUIET, CARD, GRID = "#22252b", "#5d626d", "#ffffff", "#e4e1db"
WORDS, TABLE = ("New", "York", "City"), ((1.0, 0.5), (0.8, 0.9), (0.3, 1.2))  # as the story begins


def picture(facts: Mapping[str, Any]) -> str:
    """Return an SVG of what the page is told."""
    said = [line for text in _sentences(facts) for line in textwrap.wrap(text, LETTERS)]
    top = 24 + LINE * len(said)
    figure, height = _curves(facts["runs"], top) if "runs" in facts else _scores(top)
    body = [_text(20, 34 + LINE * i, line, size=15) for i, line in enumerate(said)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + height}" width="{WIDTH}" '
        f'height="{top + height}" role="img" font-family="sans-serif">'
        f'<rect width="100%" height="100%" rx="12" fill="{CARD}"/>{"".join([*body, *figure])}</svg>'
    )


def _sentences(facts: Mapping[str, Any]) -> Iterator[str]:
    for run in facts.get("runs", {}).get("runs", ()):
        yield f"{run['name']}: {run['verdict']}"
    if held := facts["checkpoint"]["embedded"]:
        tables = [tensor for tensor in held["tensors"] if "data" in tensor and len(tensor["shape"]) == 2]
        shapes = (f"{t['name']} [{', '.join(map(count, t['shape']))}] {t['dtype']}" for t in tables)
        yield f"{held['name']}: {' and '.join(shapes) or 'no tables'}."
    if "runs" not in facts:
        yield "One table at both ends scores every pair of words alike both ways:"


def _scores(top: int) -> tuple[list[str], int]:
    """The direct path of a tied table, which is symmetric."""
    parts, end = [], DIVERGING["light"][2]
    for i, (row, before) in enumerate(zip(TABLE, WORDS, strict=True)):
        y = top + 40 + 44 * i
        parts += [_text(20, y + 26, before), _text(130 + 96 * i, top + 30, WORDS[i])]
        for j, other in enumerate(TABLE):
            score = sum(a * b for a, b in zip(row, other, strict=True))
            share = f'fill="{end}" fill-opacity="{0.5 * score / 1.53:.2f}"'
            parts.append(f'<rect x="{100 + 96 * j}" y="{y}" width="90" height="40" rx="6" {share}/>')
            parts.append(_text(130 + 96 * j, y + 26, plain(score, 2)))
    return parts, 190


def _curves(told: Mapping[str, Any], top: int) -> tuple[list[str], int]:
    """The first measure of the first run that has one."""
    first = next((m for run in told["runs"] for m in run["measures"].values()), None)
    if first is None:
        return [], 12
    left, right, high = 64, WIDTH - 150, 220
    points = zip(*(point for line in first["lines"] for point in line["points"]), strict=True)
    ends = ((min(values), max(values)) for values in points)
    (x0, x1), (y0, y1) = (pair if pair[0] < pair[1] else (pair[0] - 0.5, pair[1] + 0.5) for pair in ends)

    def at(x: float, y: float) -> str:
        across, up = (x - x0) / (x1 - x0), (y - y0) / (y1 - y0)
        return f"{left + across * (right - left):.1f} {top + 40 + (1 - up) * high:.1f}"

    parts = [_text(20, top + 24, f"{first['title']}, {first['unit']}", QUIET)]
    for y in (y0, y1):
        parts.append(f'<path d="M{at(x0, y)}L{at(x1, y)}" stroke="{GRID}"/>')
        parts.append(_text(14, float(at(x0, y).split()[1]) + 4, plain(y, 2), QUIET))
    named = [line for line in first["lines"] if not line.get("thin")]
    for i, line in enumerate(named):
        colour = told["colours"][line["arm"]]
        path = "L".join(at(x, y) for x, y in line["points"])
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<rect x="{right + 14}" y="{top + 40 + 22 * i}" width="12" height="12" rx="3" fill="{colour}"/>')
        parts.append(_text(right + 32, top + 51 + 22 * i, line["arm"]))
    return parts, high + 64


def _text(x: float, y: float, said: str, fill: str = INK, size: int = 13) -> str:
    return f'<text x="{x}" y="{y}" fill="{fill}" font-size="{size}">{escape(said)}</text>'
