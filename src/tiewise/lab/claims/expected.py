"""Range of outcomes that a published claim predicts, and the verdict on an interval.

    whole interval inside the range    reproduced
    whole interval outside             contradicted
    otherwise                          undecided at this size

A claim of no effect has a range around zero, so only an interval within that margin reproduces it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiewise.core.estimates import Estimate
from tiewise.core.measurement import plain

REPRODUCED, CONTRADICTED, UNDECIDED = "reproduced", "contradicted", "undecided at this size"
OTHER_TEXT, NOT_RUN = "not the same text", "not run"
VERDICTS = (REPRODUCED, CONTRADICTED, UNDECIDED, OTHER_TEXT, NOT_RUN)


@dataclass(frozen=True)
class Expected:
    """Open range of predicted outcomes; None: without a limit on this side."""

    above: float | None = None
    below: float | None = None

    @property
    def low(self) -> float:
        """Lower limit; −∞ without one."""
        return -math.inf if self.above is None else self.above

    @property
    def high(self) -> float:
        """Upper limit; +∞ without one."""
        return math.inf if self.below is None else self.below

    def verdict(self, outcome: Estimate) -> str:
        """Return the verdict on an outcome with its 95 % interval.

        >>> positive = Expected(above=0)
        >>> positive.verdict(Estimate(0.2, 0.1, 0.3, 5)), positive.verdict(Estimate(-0.2, -0.3, -0.1, 5))
        ('reproduced', 'contradicted')
        """
        if not math.isfinite(outcome.low + outcome.high):
            return UNDECIDED
        if self.low < outcome.low and outcome.high < self.high:
            return REPRODUCED
        if outcome.high <= self.low or outcome.low >= self.high:
            return CONTRADICTED
        return UNDECIDED

    def spelled(self) -> str:
        """Return the range in words: "above 0", "between −0.02 and 0.02"."""
        if self.above is None:
            return f"below {number(self.high)}"
        if self.below is None:
            return f"above {number(self.low)}"
        return f"between {number(self.low)} and {number(self.high)}"


def number(value: float) -> str:
    """Return a limit of a range without zeros at its end."""
    return plain(value).rstrip("0").rstrip(".")
