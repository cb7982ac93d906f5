"""Both paths' gradients over the training of a comparison, as figures: thin lines are seeds, thick ones their mean."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping

import plotly.graph_objects as go

from tiewise.internals.course import Course
from tiewise.numerals import NONE, count, plain
from tiewise.report import theme
from tiewise.report.bars import finish
from tiewise.report.grid import Table
from tiewise.report.inspected.gradients import percent
from tiewise.report.sheet import Panel

_GREY = {"width": 1, "color": "#8a8f99"}
_PUBLISHED = {"width": 1.2, "color": "#8a8f99", "dash": "dot"}
_SEEDS = "Thin lines: seeds; thick: their mean. A point is the mean over its logging window."


def panels(found: Mapping[str, Course]) -> list[Panel]:
    """Return the share with the published levels, both norms, and the cosine where a table is shared."""
    return [panel for one in found.values() for panel in _panels(one)]


def _panels(one: Course) -> list[Panel]:
    made = [_share(one), _norms(one)]
    if any(math.isfinite(c) for arm in one.arms for c in arm.mean("cosine")):
        figure = _lines(one, {"": "cosine"}, "Do both paths pull the same way over training?", "cosine of A and B")
        figure.add_hline(y=0, line=_GREY)
        made.append(
            Panel(figure, f"{_SEEDS} Arms with two tables have no cosine.", _table(one, {"": "cosine"}, _plain))
        )
    return made


def _share(one: Course) -> Panel:
    figure = _lines(one, {"": "share_b"}, "Share of Path B over training", "‖B‖ / (‖A‖ + ‖B‖)")
    for last, result in one.published:
        text = f"{result.model}, steps 1–{count(last)}: {percent(result.value)} (activation norms)"
        figure.add_hline(
            y=result.value,
            line=_PUBLISHED,
            annotation={"text": text, "font": {"size": 11, "color": "#8a8f99"}},
            annotation_position="top right",
        )
    lowest = min([0.6, *(share for arm in one.arms for p in arm.points for share in p.share_b if math.isfinite(share))])
    figure.update_yaxes(range=[max(0.0, math.floor(20 * lowest - 0.5) / 20), 1], tickformat=".0%")
    caption = (
        f"{_SEEDS} Dotted: what arXiv:2603.26663 measured of a tied OLMo-1B, as means over those steps, in its "
        "activation-norm convention: another model, another batch, and an input side that is no gradient of the table."
    )
    return Panel(figure, caption, _table(one, {"": "share_b"}, percent))


def _norms(one: Course) -> Panel:
    fields = {"Path A": "a", "Path B": "b"}
    figure = _lines(one, fields, "Norms of both paths over training", "norm of the gradient")
    figure.update_yaxes(type="log", dtick="D2")
    caption = f"{_SEEDS} Path A, through the lookup, is dotted; Path B, through the output, is not. Before clipping."
    return Panel(figure, caption, _table(one, fields, _plain))


def _lines(one: Course, fields: Mapping[str, str], title: str, unit: str) -> go.Figure:
    figure = go.Figure()
    for arm, place in zip(one.arms, theme.places([arm.arm for arm in one.arms]), strict=True):
        look = theme.style(place)
        steps = [point.step for point in arm.points]
        for name, field in fields.items():
            label = f"{arm.arm}, {name}" if name else arm.arm
            means = arm.mean(field)
            if not any(map(math.isfinite, means)):
                continue
            group = {"legendgroup": label, "mode": "lines", "x": steps}
            for place in range(len(arm.seeds)) if len(arm.seeds) > 1 else ():
                values = [getattr(point, field)[place] for point in arm.points]
                thin = {"color": look.colour, "width": 1}
                figure.add_scatter(
                    **group, y=_drawn(values), line=thin, opacity=0.3, showlegend=False, hoverinfo="skip"
                )
            dash = look.dash if len(fields) == 1 else "dot" if field == "a" else "solid"
            figure.add_scatter(
                **group,
                y=_drawn(means),
                name=html.escape(label),
                line={"color": look.colour, "width": 2.2, "dash": dash},
                hovertemplate="%{y:.4f}",
            )
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(title="training step", zeroline=False)
    return finish(figure, title, unit)


def _drawn(values: list[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]


def _plain(value: float) -> str:
    return plain(value)


def _table(one: Course, fields: Mapping[str, str], text: Callable[[float], str]) -> Table:
    columns = {
        f"{arm.arm}, {name}" if name else arm.arm: dict(
            zip([point.step for point in arm.points], arm.mean(field), strict=True)
        )
        for arm in one.arms
        for name, field in fields.items()
    }
    steps = sorted(set().union(*columns.values())) if columns else []
    rows = [[count(s), *(text(values[s]) if s in values else NONE for values in columns.values())] for s in steps]
    return Table(["step", *columns], rows)
