"""Verdicts about differences in validation loss: better, worse, equivalent within a margin, or undecided.

    better, worse   the difference is detected: p < 0.05 with Holm's correction over the family
    equivalent      every loss difference of the margin or more is rejected, with Holm's correction as well
    undecided       neither is shown

A difference that is detected and smaller than the margin is *equivalent*: the margin is the smallest difference that
matters. The margin is in nats per token and is chosen before a run, as a setting of it.

**Verdict and printed interval.** Without the correction, a difference is detected exactly if its 95 % interval excludes
zero, and equivalent exactly if its 95 % interval lies within ± margin. The correction only withholds verdicts. So a
better arm has its interval on one side of zero, and an equivalent one has it within the margin. An undecided arm has an
interval that shows neither, or a p above 0.05 after correction.

Equivalence takes two one-sided tests (Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 1987). He tests each
at 5 %, which corresponds to a 90 % interval. Here each has 2.5 %, so that the printed 95 % interval decides.

**Power.** `Difference.detectable` is the true difference that a repetition detects in 80 of 100 cases. The margin does
not change what is detected, only what it is called: a difference of the margin or more is called equivalent in at most
2.5 of 100 cases. `tools/power_check.py` simulates both for every study of the atlas.

Both null hypotheses of an arm, difference zero and difference of the margin or more, exclude each other. Holm corrects
each kind over the arms separately: at most one family in 20 has a wrong better or worse, and at most one in 40 has a
wrong *equivalent*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tiewise.core.crossed_effects import DifferenceInterval
from tiewise.core.estimates import ALPHA, holm_adjusted, two_sided_p
from tiewise.training.results import Difference, correct_by_holm

BETTER, WORSE, EQUIVALENT, UNDECIDED = VERDICTS = ("better", "worse", "equivalent", "undecided")


def equivalence_p(interval: DifferenceInterval, margin: float) -> float:
    """Return the p of a true difference of `margin` or more on either side.

    It is twice the larger p of both one-sided t tests, so it is below 0.05 exactly if the 95 % interval of `mean` lies
    within ± `margin`.

    >>> round(equivalence_p(DifferenceInterval.of(0.001, 0.004, 4), margin=0.02), 3)
    0.009
    >>> equivalence_p(DifferenceInterval.of(0.03, 0.004, 4), margin=0.02)
    1.0
    """
    distance = margin - abs(interval.estimate)
    if distance <= 0:
        return 1.0
    if interval.standard_error == 0:
        return 0.0
    return two_sided_p(distance / interval.standard_error, interval.degrees_of_freedom)


def verdict_of(d: Difference) -> str:
    """Return the verdict that follows from the p of a difference with an interval."""
    if d.p_equivalence is not None and d.p_equivalence < ALPHA:
        return EQUIVALENT
    if not d.detected:
        return UNDECIDED
    if d.mean < 0:
        return BETTER
    return WORSE


def sign_of(d: Difference) -> int:
    """Return −1 for the verdict better, 1 for worse, else 0."""
    return {BETTER: -1, WORSE: 1}.get(verdict_of(d), 0)


def with_verdicts(family: Sequence[Difference]) -> list[Difference]:
    """Return differences of one family with Holm's p of both kinds, and their verdicts.

    Each has its margin. Differences without an interval stay as they are.
    """
    p_by_index = {index: _equivalence_of(d) for index, d in enumerate(family) if d.p is not None}
    adjusted = holm_adjusted(list(p_by_index.values()))
    decided = correct_by_holm(family)
    for index, p in zip(p_by_index, adjusted, strict=True):
        d = replace(decided[index], p_equivalence=p)
        decided[index] = replace(d, verdict=verdict_of(d))
    return decided


def _equivalence_of(d: Difference) -> float:
    """Return the unadjusted p of equivalence; 1 without a margin."""
    interval = d.estimated
    assert interval is not None
    return equivalence_p(interval, d.margin or 0.0)
