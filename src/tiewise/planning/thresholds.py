"""When a choice pays, as formulas of V, d and the body: where tying saves a given share, and the largest rank.

With a body of B parameters (all but the tables; c = B / d², which is 12 L for L plain layers), tying saves V·d of
2·V·d + B. That is more than a share s where V/d > c·s / (1 − 2s), and never where s ≥ ½.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tiewise.core.errors import PlanError

SHARES = (0.05, 0.1, 0.2, 0.3)


@dataclass(frozen=True)
class Threshold:
    """One formula with its value. `here` is the model's own figure where the formula bounds one."""

    name: str
    formula: str
    value: float
    here: float | None = None


def tying_threshold(share: float, body_per_square: float) -> float:
    """V/d above which tying saves more than `share` of the untied model; infinite from a half on.

    Raises:
        PlanError: a share outside 0 to 1.
    """
    if not 0 <= share <= 1:
        raise PlanError(f"share {share}", "a share lies between 0 and 1")
    return math.inf if share >= 0.5 else body_per_square * share / (1 - 2 * share)


def tying_saves(vocab: int, d: int, body: int) -> float:
    """Share of the untied model that tying saves: V·d / (2·V·d + B)."""
    return vocab * d / (2 * vocab * d + body)


def tied_share(vocab: int, d: int, body: int) -> float:
    """Share of the tied model that is its table: 1 / (1 + B / (V·d))."""
    return vocab * d / (vocab * d + body)


def largest_rank(vocab: int, d: int, maps: int) -> int:
    """Largest k at which a factored table is smaller than V·d: k(V + maps·d) < V·d. 0 where none is."""
    return -(-vocab * d // (vocab + maps * d)) - 1


def thresholds(vocab: int, d: int, body: int, head: bool = True) -> tuple[Threshold, ...]:
    """All formulas for one model; without those of tying where it has no head to tie."""
    c, ratio = body / d**2, vocab / d
    scale = f"c = B/d² = {c:.4g}"
    both, one = largest_rank(vocab, d, 2), largest_rank(vocab, d, 1)
    narrow = Threshold("largest k that still saves, one table and one map", "k(V + d) < V·d", one, d)
    share, formula = tied_share(vocab, d, body), "1 / (1 + B/(V·d))"
    if not head:
        return Threshold("share of the model that is its table", f"{formula}, {scale}", share), narrow
    found = [
        Threshold(f"V/d above which tying saves more than {s:.0%}", f"c·s/(1−2s), s = {s:g}, {scale}", v, ratio)
        for s in SHARES
        for v in [tying_threshold(s, c)]
    ]
    return (
        *found,
        Threshold("share of the untied model that tying saves", "V·d / (2·V·d + B)", tying_saves(vocab, d, body)),
        Threshold("share of the tied model that is its table", formula, share),
        Threshold("largest k that still saves, tied, maps at both ends", "k(V + 2d) < V·d", both, d),
        narrow,
    )
