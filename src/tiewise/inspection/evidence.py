"""Tie or not? What an inspection measured that speaks for one table or for two, each with its uncertainty.

A row is a `Quantity` with a question that can favour a side. It speaks only where its interval leaves out all that no
effect would give, and still does with Holm's correction for all rows that could speak: they are read side by side. What
could favour neither side, because every natural text, any map or any end of training gives it as well, is no row. The
loss alone decides, so there is a verdict only where a comparison has trained both on several seeds.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from tiewise.core.errors import printable
from tiewise.core.estimates import Estimate, holm, p_value
from tiewise.core.found import NEITHER, ONE, TWO, Quantity
from tiewise.inspection.request import comparison_of
from tiewise.inspection.section import ALL, Inspection, SectionFound
from tiewise.training.results import ALPHA, gaps

NAME = "evidence"
NO_VERDICT = "no verdict: `tiewise compare` trains a tied and an untied model side by side"
NO_INTERVAL = "no verdict: the losses' difference has no interval; train more seeds"


@dataclass(frozen=True)
class Evidence:
    """One measurement and what it speaks for."""

    question: str
    measure: str  # what was measured to answer it, with its unit
    about: str  # label of the model, or names of the arms
    value: float
    low: float | None  # of its 95 % interval; None without one
    high: float | None
    level: float  # what no effect would give, on average
    p: float | None  # two-sided, adjusted by Holm over all rows; None without an interval
    speaks: str  # "one table", "two tables" or "neither"
    why: str  # how the value is read
    section: str  # where it was measured


@dataclass(frozen=True)
class TieOrNot:
    """All evidence of one inspection."""

    rows: tuple[Evidence, ...]  # in the order of the sections
    verdict: str  # what a comparison of losses says, or that there is none

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return asdict(self)


def with_evidence(inspection: Inspection) -> Inspection:
    """Return the inspection with its evidence as the first section, even where there is none."""
    first = SectionFound(NAME, {ALL: gather(inspection)}, {})
    return replace(inspection, sections=(first, *inspection.sections))


def gather(inspection: Inspection) -> TieOrNot:
    """Collect the evidence that the sections hold."""
    losses = [_row(q, "comparison") for q in _losses(inspection)]
    groups: dict[Evidence, list[str]] = {}  # what says one thing of several models, as what is measured on a text alone
    for section in inspection.sections:
        for label, one in section.found.items():
            for q in one.quantities:
                if q.question and {q.below, q.above} != {NEITHER} and math.isfinite(q.value):
                    groups.setdefault(_row(replace(q, of=""), section.name), []).append(printable(q.of or label))
    rows = [*losses, *(replace(row, about=", ".join(about)) for row, about in groups.items())]
    p = iter(holm([row.p for row in rows if row.p is not None]))
    adjusted = []
    for row in rows:
        own = None if row.p is None else next(p)
        adjusted.append(replace(row, p=own, speaks=NEITHER if own is not None and own >= ALPHA else row.speaks))
    verdict = NO_VERDICT
    for loss in adjusted[: len(losses)]:  # none or one
        verdict = f"{loss.speaks} had the lower held-out loss, at this size and on this text"
        if loss.low is None:
            verdict = NO_INTERVAL
        elif loss.speaks == NEITHER:
            verdict = "no difference of held-out loss was detected, at this size and on this text"
    return TieOrNot(tuple(adjusted), verdict)


def _row(q: Quantity, section: str) -> Evidence:
    """Return a quantity as a row, not yet corrected for the others: p is that of Student's t unless it has its own."""
    measure = q.name if not q.unit or q.unit in q.name else f"{q.name}, {q.unit}"
    level = q.chance or 0.0
    row = Evidence(q.question, measure, printable(q.of), q.value, None, None, level, None, NEITHER, q.why, section)
    if math.isnan(q.low) or math.isnan(q.high):
        return row
    p = p_value(Estimate(q.value, q.low, q.high, q.n), (level, *q.null)) if q.p is None else q.p
    return replace(row, low=q.low, high=q.high, p=p, speaks=q.speaks)


def _losses(inspection: Inspection) -> list[Quantity]:
    """Held-out loss of each arm with two tables less that of each with one, where a comparison has trained both."""
    run = inspection.subjects[0].run
    found = gaps(comparison_of(run)) if run is not None else None
    if found is None:
        return []
    gap = found[1]  # tied − untied
    low, high = (math.nan, math.nan) if gap.low is None or gap.high is None else (-gap.high, -gap.low)
    return [
        Quantity(
            "untied − tied", -gap.mean, low, high, gap.n, chance=0.0, of="untied − tied", unit="nats per token",
            question="Which has the lower held-out loss?", below=TWO, above=ONE,
            why=f"below zero two tables predict held-out text better, over {gap.n} seed{'' if gap.n == 1 else 's'}",
        )
    ]  # fmt: skip
