"""Tie or not? What an inspection measured that speaks for one table or for two, each with its uncertainty.

A row speaks for one side only where its interval leaves out what no effect at all would give. The loss alone decides,
so there is a verdict only where a comparison has trained both; everything else is a reason to expect one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from tiewise.errors import printable
from tiewise.inspection.inspect import ALL, Inspection, Section
from tiewise.inspection.subject import comparison_of

NAME = "evidence"
ONE, TWO, NEITHER = "one table", "two tables", "neither"
NO_VERDICT = "no verdict: no tied and untied model were trained side by side; `tiewise compare` does that"


@dataclass(frozen=True)
class Evidence:
    """One measurement and what it speaks for.

    Args:
        question: what was asked.
        measure: what was measured to answer it, with its unit.
        about: label of the model, or names of the arms.
        value: the answer.
        low: lower end of its 95 % interval; None without one.
        high: upper end.
        level: what no effect would give.
        speaks: "one table", "two tables" or "neither".
        why: how the value is read.
        section: where it was measured.
    """

    question: str
    measure: str
    about: str
    value: float
    low: float | None
    high: float | None
    level: float
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
    losses = tuple(_losses(inspection))
    rows = [*losses]
    for name, read in _READERS.items():
        for label, found in inspection.found(name).items():
            rows += read(label, found)
    return TieOrNot(tuple(_merged(rows)), _verdict(losses))


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
    comparison = comparison_of(run)
    for difference in comparison.differences:
        pair = (comparison.reference, difference.arm)
        if difference.metric != "heldout_nll" or set(pair) != {"tied", "untied"}:
            continue
        sign = 1 if difference.arm == "untied" else -1
        ends = sorted(sign * end for end in (difference.low, difference.high) if end is not None)
        low, high = ends if len(ends) == 2 else (None, None)
        yield _row(
            ("Which has the lower held-out loss?", "untied − tied, nats per token"),
            "untied − tied",
            (sign * difference.mean, low, high),
            0.0,
            (TWO, ONE),
            f"below zero two tables predict held-out text better, over {difference.n} seeds",
            "comparison",
        )


def _bigrams(label: str, found: Any) -> Iterator[Evidence]:
    i = found.irreversibility
    yield _row(
        ("What must any symmetric direct path pay for the order of words?", "nats per token"),
        label,
        (i.held_out, i.low, i.high),
        0.0,
        (NEITHER, TWO),
        f"a lower estimate of the text's irreversibility (counts alone say {i.plug_in:.3f}, and {i.coin:.3f} if order "
        "were tossed); the body of the model can pay it back",
        "bigrams",
    )


def _first_mlp(label: str, found: Any) -> Iterator[Evidence]:
    if not found.tied:
        return
    change = found.change.centred
    yield _row(
        ("Does the first MLP give the tied path an order?", "change of ‖S − Sᵀ‖²/‖S‖², centred"),
        label,
        (change.value, change.low, change.high),
        0.0,
        (NEITHER, ONE),
        "above zero the first layer makes up for the symmetry of one table",
        "first_mlp",
    )


def _alignment(label: str, found: Any) -> Iterator[Evidence]:
    if found.alignment is None or len(set(found.names)) < 2:  # one stored table, whatever maps stand before its ends
        return
    for name, why in (
        ("identity", "above chance the two tables, trained apart, point the same way row by row"),
        ("orthogonal", "above chance the two tables hold the same up to a rotation, which one table has no room for"),
    ):
        try:
            score = found.alignment.score(name)
        except KeyError:
            continue
        e = score.estimate
        level = max((score.chance, *(score.null.values if score.null is not None else ())))
        above = ONE if name == "identity" else NEITHER
        yield _row(
            ("Are input and output table alike?", f"{name} map, mean cosine of held-out rows"),
            label,
            (e.value, e.low, e.high),
            level,
            (TWO if name == "identity" else NEITHER, above),
            why,
            "alignment",
        )


def _gradients(label: str, found: Any) -> Iterator[Evidence]:
    cosine = found.per_batch.cosine if found.tied else None
    if cosine is not None:
        yield _row(
            ("Do the two uses of the table pull the same way?", "cosine of Path A and Path B per batch"),
            label,
            (cosine.value, cosine.low, cosine.high),
            0.0,
            (TWO, ONE),
            "below zero each use undoes some of what the other learns",
            "gradients",
        )
    share = found.per_batch.share_b
    yield _row(
        ("Which end moves the table?", "Path B's share of the gradient's norm per batch"),
        label,
        (share.value, share.low, share.high),
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
        ("Do both ends want the same norms?", "difference of the correlations of norm and frequency"),
        label,
        (apart, high.low - low.high, high.high - low.low),
        0.0,
        (NEITHER, TWO),
        "above zero frequent tokens are long at one end and not at the other, and one table has one norm a row",
        "tokens",
    )


_READERS: Mapping[str, Callable[[str, Any], Iterator[Evidence]]] = {
    "bigrams": _bigrams,
    "first_mlp": _first_mlp,
    "alignment": _alignment,
    "gradients": _gradients,
    "tokens": _tokens,
}


def _row(
    asked: tuple[str, str],
    about: str,
    estimate: tuple[float, float | None, float | None],
    level: float,
    sides: tuple[str, str],
    why: str,
    section: str,
) -> Evidence:
    """Evidence that speaks for `sides[0]` where the whole interval is below the level, `sides[1]` where it is above."""
    value, low, high = estimate
    speaks = NEITHER
    if low is not None and high is not None:
        speaks = sides[0] if high < level else sides[1] if low > level else NEITHER
    return Evidence(*asked, printable(about), value, low, high, level, speaks, why, section)


def _verdict(losses: tuple[Evidence, ...]) -> str:
    if not losses:
        return NO_VERDICT
    (loss,) = losses
    if loss.speaks == NEITHER:
        return "no difference of held-out loss was detected between one table and two, at this size, on this text"
    return f"{loss.speaks} had the lower held-out loss at this size, on this text; that says nothing of other sizes"
