"""`write_plan`: a plan as one HTML file (see `tiewise.report.sheet`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tiewise.core.numerals import NONE, count, plain, size
from tiewise.planning.plan import Plan
from tiewise.report import plan_figures as figures
from tiewise.report import sheet
from tiewise.report.grid import Table
from tiewise.report.models import BETTER
from tiewise.report.plan_rows import (
    NEIGHBOUR_HEADER,
    columns,
    near,
    nearest,
    neighbour_cells,
    remarks,
    rows,
    scale,
    subject,
    thresholds,
)
from tiewise.report.sheet import Panel, Section, Sheet


def write_plan(plan: Plan, path: str | os.PathLike[str], command: str) -> Path:
    """Write the page to `path`, whole or not at all, and return it.

    Raises:
        RunError: when the file cannot be written there.
    """
    return sheet.write(render(plan, command), path, "--plot")


def render(plan: Plan, command: str) -> str:
    """Return the page as text."""
    return Sheet(
        command_name="plan",
        title=f"{plan.name}: tiewise plan",
        subject=subject(plan),
        heading="What each choice costs",
        answer=list(_lead(plan)),
        results=_results(plan),
        sections=[
            Section("This model", list(_own(plan))),
            Section("As models grow", list(_growing(plan))),
            Section("What others built", list(_published()) if _has_published(plan) else []),
        ],
        command=command,
    ).render()


def _has_published(plan: Plan) -> bool:
    """Whether published figures are of the plan's family."""
    return plan.architecture.family in {family for family, *_ in figures.PRESETS.values()}


def _lead(plan: Plan) -> Iterator[str]:
    yield nearest(plan)
    for name, choice in zip(figures.names(plan), plan.choices, strict=True):
        total = f"{name}: {count(choice.budget.total)} parameters"
        if choice.saved > 0:
            yield f"{total}, {plain(100 * choice.saved_share, 1)} % fewer than untied with nothing shared."
        else:
            yield f"{total}."


def _results(plan: Plan) -> Section:
    header = ["", *(name.replace("\n", " · ") for name in columns(plan))]
    costs = Table(header, [[row.name, *row.cells] for row in rows(plan)])
    limits = Table([f"threshold; {scale(plan)}", "value", "formula"], [list(row) for row in thresholds(plan)])
    others = Table(NEIGHBOUR_HEADER, [neighbour_cells(model) for model in near(plan)])
    tables = [("Costs by choice", costs), ("Thresholds", limits), ("Nearest in V, D and L", others)]
    return Section("Results", tables=tables, notes=[BETTER, *remarks(plan)])


def _own(plan: Plan) -> Iterator[Panel]:
    shares, memory = figures.shares(plan), figures.memory(plan)
    yield Panel(
        figures.shares_figure(plan),
        "A table used at both ends is counted once; every bar is the whole of its own choice.",
        _stack(shares, lambda value: f"{plain(100 * value, 1)} %"),
    )
    yield Panel(
        figures.memory_figure(plan),
        "AdamW and the fused loss. Weights, gradients, state and loss are counted; activations are an estimate, "
        "and the same for every choice.",
        _stack(memory, size),
    )
    shared = figures.sharing(plan)
    if shared:
        yield Panel(
            figures.sharing_figure(plan),
            "Norms go with their sublayer. Every layer is still applied, so the work per token stays the same.",
            Table(["sharing", "parameters"], [[name, count(total)] for name, total in shared.items()]),
        )


def _growing(plan: Plan) -> Iterator[Panel]:
    here = "The dotted line is this model's width."
    yield Panel(
        figures.tables_figure(plan),
        f"Plain tables grow as V·D; a factored one as k·V + 2·k·D, k = {figures.RANK}, with maps at both ends. {here}",
        Table(*figures.steps(figures.tables_by_width(plan))),
    )
    if not plan.architecture.layers:
        return
    yield Panel(
        figures.growth_figure(plan),
        "Plain decoders of 12·D² per layer with this model's vocabulary and depth. With one shared layer the body "
        f"grows as 12·D² instead of 12·L·D². {here}",
        Table(*figures.steps(figures.growth(plan))),
    )


def _published() -> Iterator[Panel]:
    yield Panel(
        figures.presets_figure(),
        "Encoders with their pooler, counted from their sizes with the vocabularies of transformers' defaults.",
        _stack(figures.presets(), count),
    )
    found = [result for group in figures.published().values() for result in group]
    yield Panel(
        figures.published_figure(),
        "Scores and parameters as the paper (arXiv:1909.11942) prints them, an average over SQuAD, MNLI, SST-2 and "
        "RACE: the higher and the further left, the more quality per parameter.",
        Table(
            ["model", "choice", "parameters", "score", "points per million", "source"],
            [
                [r.model, r.choice, count(printed), f"{r.value:g}", f"{r.per_million:.3g}", r.source]
                for r in found
                if (printed := r.parameters_printed) is not None
            ],
        ),
    )


def _stack(values: Mapping[str, Mapping[str, float]], shown: Callable[[float], str]) -> Table:
    parts = list(dict.fromkeys(part for bar in values.values() for part in bar))
    rows = [[bar, *(shown(found[p]) if p in found else NONE for p in parts)] for bar, found in values.items()]
    return Table(["", *parts], rows)
