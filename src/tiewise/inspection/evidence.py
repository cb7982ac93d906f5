"""Tie or not? What an inspection measured that speaks for one table or for two, each with its uncertainty.

A row speaks for one side only where its interval leaves out all that no effect would give, and still does with Holm's
correction for all rows that could speak: they are read side by side. What every natural text, any
map or any end of training would give as well speaks for neither, whatever its interval. The loss alone decides, so
there is a verdict only where a comparison has trained both on several seeds; everything else is a reason to expect one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tiewise.analysis.estimates import Estimate, p_value
from tiewise.core.errors import printable
from tiewise.core.found import NEITHER, ONE, TWO
from tiewise.core.student import holm
from tiewise.inspection.inspect import ALL, Inspection, Section
from tiewise.inspection.subject import comparison_of
from tiewise.training.statistics import ALPHA, gaps

NAME = "evidence"
NO_VERDICT = "no verdict: no tied and untied model were trained side by side; `tiewise compare` does that"
NO_INTERVAL = "no verdict: the losses' difference has no interval, with one seed or one that diverged; train more seeds"


@dataclass(frozen=True)
class Evidence:
    """One measurement and what it speaks for.

    Args:
        question: what was asked.
        measure: what was measured to answer it, with its unit.
        about: label of the model, or names of the arms.
        value: the answer; None where it is no number.
        low: lower end of its 95 % interval; None without one.
        high: upper end.
        level: what no effect would give, on average.
        p: two-sided, from the interval's distribution, adjusted by Holm over all rows that could speak; None for a row
            that speaks for neither whatever it measures, and without an interval.
        speaks: "one table", "two tables" or "neither".
        why: how the value is read.
        section: where it was measured.
    """

    question: str
    measure: str
    about: str
    value: float | None
    low: float | None
    high: float | None
    level: float
    p: float | None
    speaks: str
    why: str
    section: str


@dataclass(frozen=True)
class TieOrNot:
    """All evidence of one inspection.

    Args:
        rows: in the order of the sections.
        verdict: what a comparison of losses says, or that there is none.
    """

    rows: tuple[Evidence, ...]
    verdict: str

    def record(self) -> dict[str, Any]:
        """Everything as JSON takes it."""
        return asdict(self)


def with_evidence(inspection: Inspection) -> Inspection:
    """Return the inspection with its evidence as the first section, even where there is none."""
    first = Section(NAME, {ALL: gather(inspection)}, {})
    return Inspection(inspection.subjects, inspection.request, (first, *inspection.sections))


def gather(inspection: Inspection) -> TieOrNot:
    """Collect the evidence that the sections hold."""
    rows = list(_losses(inspection))
    compared = len(rows)
    for name, read in _READERS.items():
        for label, found in inspection.found(name).items():
            rows += (row for row in read(label, found) if row.value is not None)
    adjusted = tuple(_adjusted(list(_merged(rows))))
    return TieOrNot(adjusted, _verdict(adjusted[:compared]))


def _adjusted(rows: list[Evidence]) -> Iterator[Evidence]:
    """Let rows that are read side by side speak only where Holm's correction leaves their p below 0.05."""
    p = iter(holm([row.p for row in rows if row.p is not None]))
    for row in rows:
        own = None if row.p is None else next(p)
        yield replace(row, p=own, speaks=NEITHER if own is not None and own >= ALPHA else row.speaks)


def _merged(rows: list[Evidence]) -> Iterator[Evidence]:
    """Join rows that say one thing of several models, as what is measured on one text alone."""
    groups: dict[Evidence, list[str]] = {}
    for row in rows:
        groups.setdefault(replace(row, about=""), []).append(row.about)
    yield from (replace(row, about=", ".join(about)) for row, about in groups.items())


def _losses(inspection: Inspection) -> Iterator[Evidence]:
    """Held-out loss of each arm with two tables less that of each with one, where a comparison has trained both."""
    run = inspection.subjects[0].run
    if run is None:
        return
    found = gaps(comparison_of(run))
    if found is None:
        return
    gap = found[1]  # tied − untied
    low, high = (math.nan, math.nan) if gap.low is None or gap.high is None else (-gap.high, -gap.low)
    yield _row(
        ("Which has the lower held-out loss?", "untied − tied, nats per token"),
        "untied − tied",
        Estimate(-gap.mean, low, high, gap.n),
        0.0,
        (TWO, ONE),
        f"below zero two tables predict held-out text better, over {gap.n} seed{'' if gap.n == 1 else 's'}",
        "comparison",
    )


def _alignment(label: str, found: Any) -> Iterator[Evidence]:
    if found.alignment is None or len(set(found.names)) < 2:  # one stored table, whatever maps stand before its ends
        return
    for name, why in (
        ("identity", "above chance the two stored tables point the same way row by row, whether trained or started so"),
        ("orthogonal", "above chance the two tables are alike after a rotation, which one table cannot hold"),
    ):
        try:
            score = found.alignment.score(name)
        except KeyError:
            continue
        e = score.estimate
        permuted = score.null.values if score.null is not None else ()
        sides = (TWO, ONE) if name == "identity" else (NEITHER, NEITHER)
        yield _row(
            ("Are input and output table alike?", f"{name} map, mean cosine of held-out rows"),
            label,
            e,
            score.chance,
            sides,
            why,
            "alignment",
            permuted,
        )


def _gradients(label: str, found: Any) -> Iterator[Evidence]:
    cosine = found.per_batch.cosine if found.tied else None
    if cosine is not None:
        yield _row(
            ("Do the two uses of the table pull the same way?", "cosine of Path A and Path B per batch"),
            label,
            cosine,
            0.0,
            (NEITHER, ONE),
            "above zero a step for one use helps the other; below zero they work against each other, as in any tied "
            "model where training comes to rest: there the two cancel",
            "gradients",
        )
    share = found.per_batch.share_b
    yield _row(
        ("Which end moves the table?", "Path B's share of the gradient's norm per batch"),
        label,
        share,
        0.5,
        (NEITHER, NEITHER),
        "above one half the output end pulls harder; that alone is no reason for either choice",
        "gradients",
    )


def _tokens(label: str, found: Any) -> Iterator[Evidence]:
    """Signs of the correlation of norm and frequency at both ends of a model with two tables."""
    ends = {t.name: t.norms.frequency for t in found.tables if t.name in ("input", "output")}
    if len(ends) < 2 or None in ends.values():
        return
    low, high = sorted((e.spearman for e in ends.values()), key=lambda e: e.value)
    apart = high.value - low.value
    # ends of the two intervals taken together: wider than the interval of the difference needs to be
    yield _row(
        ("Do norms follow frequency alike at both ends?", "difference of the correlations of norm and frequency"),
        label,
        Estimate(apart, high.low - low.high, high.high - low.low, high.rows),
        0.0,
        (NEITHER, TWO),
        "above zero norms follow frequency more at one end than at the other, and one table has one norm a row",
        "tokens",
        p=_parted(low, high),
    )


def _parted(low: Estimate, high: Estimate) -> float:
    """p at which the two intervals of correlations, by Fisher's z, no longer meet."""
    if max(abs(low.value), abs(high.value)) >= 1:
        return float(low.value == high.value)
    each = 1 / math.sqrt(low.rows - 3) + 1 / math.sqrt(high.rows - 3)
    return math.erfc((math.atanh(high.value) - math.atanh(low.value)) / each / math.sqrt(2))


_READERS: Mapping[str, Callable[[str, Any], Iterator[Evidence]]] = {
    "alignment": _alignment,
    "gradients": _gradients,
    "tokens": _tokens,
}


def _row(
    asked: tuple[str, str],
    about: str,
    estimate: Estimate,
    level: float,
    sides: tuple[str, str],
    why: str,
    section: str,
    permuted: Sequence[float] = (),
    p: float | None = None,
) -> Evidence:
    """Evidence that speaks for `sides[0]` where the whole interval is below the level, `sides[1]` where it is above.

    Where the level was simulated too, the interval must leave out all of `permuted`. `p` is that of Student's t unless
    given.
    """
    value, low, high = (x if math.isfinite(x) else None for x in (estimate.value, estimate.low, estimate.high))
    if value is None or low is None or high is None or sides == (NEITHER, NEITHER):
        return Evidence(*asked, printable(about), value, low, high, level, None, NEITHER, why, section)
    levels = (level, *permuted)
    p = p_value(estimate, levels) if p is None else p
    speaks = sides[0] if high < min(levels) else sides[1] if low > max(levels) else NEITHER
    return Evidence(*asked, printable(about), value, low, high, level, p, speaks, why, section)


def _verdict(losses: tuple[Evidence, ...]) -> str:
    if not losses:
        return NO_VERDICT
    (loss,) = losses
    if loss.low is None:
        return NO_INTERVAL
    if loss.speaks == NEITHER:
        return "no difference of held-out loss was detected between one table and two, at this size, on this text"
    return f"{loss.speaks} had the lower held-out loss at this size, on this text; that says nothing of other sizes"
