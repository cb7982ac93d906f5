"""SOP beside NSP: models pretrained on one objective of pairs and judged on both, beside the paper's Table 5.

    runs = [Comparison.from_dict(json.loads(Path(f"runs/{name}/results.json").read_text())) for name in ("sop", "nsp")]
    write_objectives(runs, "objectives.html")

The paper is Lan et al. 2020 (arXiv:1909.11942). Its pairs are of other texts, so directions are compared, not sizes.
"""

from __future__ import annotations

import html
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from tiewise.core.errors import RunError
from tiewise.core.found import Quantity
from tiewise.core.ledger import results
from tiewise.core.numerals import NONE, plain
from tiewise.report import theme
from tiewise.report.bars import finish
from tiewise.report.comparison_figures import CHANCE
from tiewise.report.comparison_found import SHARES_NOTE, share
from tiewise.report.grid import Table
from tiewise.report.sheet import Panel, Section, Sheet, write
from tiewise.training.results import MASKED, Comparison, RunResult, Share

SOURCE = "ALBERT (arXiv:1909.11942), Table 5"
METRICS = {
    MASKED: "masked tokens right, %",
    "nsp": "pairs right as nsp, %",
    "sop": "pairs right as sop, %",
}  # of the ledger
TOLD = "Told from chance means by that interval and by Wilson’s over the rows."
SHOWN = {MASKED: "masked tokens", "nsp": "pairs as nsp", "sop": "pairs as sop"}
JUDGED = {"nsp": "next sentence (nsp)", "sop": "sentence order (sop)"}


@cache
def published() -> Mapping[str, Mapping[str, float]]:
    """Table 5: objective → share → percent."""
    found: dict[str, dict[str, float]] = {}
    for name, metric in METRICS.items():
        for result in results(metric):
            found.setdefault(result.setting.removeprefix("objective="), {})[name] = result.value
    return found


def write_objectives(comparisons: Sequence[Comparison], path: str | os.PathLike[str]) -> Path:
    """Write the figure and its table as one HTML file, whole or not at all, and return it.

    Args:
        comparisons: of ALBERTs, one for each objective (`--set objective=…`); the first arm of each is shown.
        path: of the page.

    Raises:
        RunError: one that is no ALBERT's, an objective given twice, or a file that cannot be written.
    """
    found = objectives_table(comparisons)
    caption = "Filled marks with 95 % intervals are measured here, hollow ones are the paper’s. The line is chance."
    return write(
        Sheet(
            command_name="objectives",
            title="SOP beside NSP: tiewise",
            subject=", ".join(_by_objective(comparisons)),
            heading="SOP beside NSP",
            answer=finding(comparisons).splitlines(),
            results=Section(
                "Judged as both",
                [Panel(objectives_figure(comparisons), caption, found)],
                tables=[("Judged right by objective of pretraining", found)],
                notes=[f"{SHARES_NOTE} {TOLD} The paper: {SOURCE}, on other texts."],
            ),
            sections=[],
            command="\n".join(one.command for one in comparisons),
        ).render(),
        path,
        "path",
    )


def objectives_table(comparisons: Sequence[Comparison]) -> Table:
    """One row per objective: what is judged right, here and in the paper. Raises as `write_objectives`."""
    header = ["pretrained on", *(f"{name}, {whose}" for whose in ("here", "paper %") for name in SHOWN.values())]
    rows = [
        [
            objective,
            *(str(share(one.of(one.reference), name) or NONE) for name in METRICS),
            *(plain(published()[objective][name], 1) if objective in published() else NONE for name in METRICS),
        ]
        for objective, one in _by_objective(comparisons).items()
    ]
    return Table(header, rows)


def objectives_figure(comparisons: Sequence[Comparison]) -> go.Figure:
    """Pairs judged right as nsp and as sop, by objective of pretraining. Raises as `write_objectives`."""
    figure = go.Figure()
    by_objective = _by_objective(comparisons)
    for place, (objective, one) in zip(theme.places(list(by_objective)), by_objective.items(), strict=True):
        found = {name: share(one.of(one.reference), name) for name in JUDGED}
        look, name = theme.style(place), f"pretrained {_on(objective)}"
        figure.add_trace(_marks(found, {"color": look.colour, "size": 10, "symbol": look.marker}, name, objective))
        theirs = {key: published().get(objective, {}).get(key) for key in JUDGED}
        paper = {key: None if x is None else Quantity(key, x / 100, x / 100, x / 100) for key, x in theirs.items()}
        hollow = {"color": look.colour, "size": 10, "symbol": f"{look.marker}-open"}
        figure.add_trace(_marks(paper, hollow, f"{objective}, the paper", f"{objective}, paper"))
    figure.add_hline(y=CHANCE, line={"width": 1, "color": "#8a8f99"})
    figure.update_layout(scattermode="group", scattergap=0.5)
    figure.update_xaxes(type="category", title="judged as")
    lowest = min((y for trace in figure.data for y in trace.y), default=CHANCE)
    figure.update_yaxes(tickformat=".0%", range=[min(lowest - 0.1, 0.4), 1])
    return finish(figure, "Pairs judged right, by objective of pretraining", "share judged right")


def finding(comparisons: Sequence[Comparison]) -> str:
    """Say of each objective's models whether they are told from chance on each judgement, one line each."""
    said = []
    for objective, one in _by_objective(comparisons).items():
        runs = one.of(one.reference)
        judged = ((name, share(runs, name), _over_rows(runs, name)) for name in JUDGED)
        each = [
            f"{name} {seeds}, {_against_chance(seeds, rows)}"
            for name, seeds, rows in judged
            if seeds is not None and rows is not None
        ]
        said.append(f"Pretrained {_on(objective)}: {'; '.join(each)}.")
    return "\n".join(said)


def _on(objective: str) -> str:
    return "without pairs" if objective == "none" else f"on {objective}"


def _over_rows(runs: Sequence[RunResult], name: str) -> Share | None:
    """Mean share with Wilson's interval over the rows that all seeds are asked alike; None where none has it."""
    found = [run.shares[name] for run in runs if name in run.shares]
    if not found:
        return None
    count, mean = found[0].count, statistics.fmean(one.share for one in found)
    return Share.of(round(mean * count), count, math.nan)


def _against_chance(seeds: Quantity, rows: Share) -> str:
    """Judge by both intervals: seeds that all guess alike agree on the same rows by chance."""
    if min(seeds.low, rows.low) > CHANCE:
        return "above chance"
    return "below chance" if max(seeds.high, rows.high) < CHANCE else "not told from chance"


def _marks(found: Mapping[str, Quantity | None], marker: dict[str, Any], name: str, group: str) -> go.Scatter:
    there = {key: one for key, one in found.items() if one is not None}
    return go.Scatter(
        x=[JUDGED[key] for key in there],
        y=[one.value for one in there.values()],
        mode="markers",
        name=html.escape(name),
        offsetgroup=group,
        marker=marker,
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [one.high - one.value for one in there.values()],
            "arrayminus": [one.value - one.low for one in there.values()],
            "thickness": 1.6,
            "width": 5,
            "color": marker["color"],
            "visible": any(one.high > one.low for one in there.values()),
        },
        hovertemplate="%{y:.1%}<extra>" + html.escape(name) + "</extra>",
    )


def _by_objective(comparisons: Sequence[Comparison]) -> dict[str, Comparison]:
    found: dict[str, Comparison] = {}
    for one in comparisons:
        objective = one.setting.get("objective")
        if objective is None or not any(run.shares for run in one.of(one.reference)):
            raise RunError(
                "a comparison without an objective of pairs", "give those of ALBERTs (--recipe albert-small)"
            )
        if objective in found:
            raise RunError(f"objective {objective} twice", "give one comparison for each objective")
        found[objective] = one
    return found
