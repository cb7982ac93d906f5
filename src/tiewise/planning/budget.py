"""One choice's parameters, counted by component, and from where on a choice pays.

The boundary acts where `tiewise.install` would act: on tables of the model's own width E. A model that maps between its
tables and its body (OPT-350M, ALBERT, ELECTRA) keeps those maps, and a factored table maps to E before them.

With a body of B parameters (all but the tables; c = B / d², which is 12 L for L plain layers), tying saves V·d of
2·V·d + B. That is more than a share s where V/d > c·s / (1 − 2s), and never where s ≥ ½.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tiewise.core.errors import PlanError, SpecError
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.planning.architecture import Architecture, Count, elementwise, linear, lookup, merged, total


@dataclass(frozen=True)
class Budget:
    """Unique parameters of one choice, and what a token does with them."""

    boundary: BoundarySpec
    sharing: SharingSpec
    parameters: Mapping[str, int]  # by component
    frozen: int
    multiplied: int  # weights that a token is multiplied by, over every application of every layer, and the head's
    read: int | None  # parameters that one decoded token needs; None where the model does not decode

    @property
    def total(self) -> int:
        """Unique parameters."""
        return sum(self.parameters.values())

    @property
    def trainable(self) -> int:
        """Unique parameters that get a gradient."""
        return self.total - self.frozen

    @property
    def tables(self) -> int:
        """Parameters of the tables alone, without their maps."""
        return self.parameters["input_table"] + self.parameters.get("output_table", 0)

    @property
    def frozen_tables(self) -> int:
        """Parameters of a table that the boundary freezes."""
        return self.parameters["input_table"] if self.boundary.freeze else 0


def budget(architecture: Architecture, boundary: BoundarySpec, sharing: SharingSpec) -> Budget:
    """Count `architecture` under a choice.

    Raises:
        SpecError: a table or rank wider than the model's table, or more groups than layers.
    """
    vocab, width = architecture.ends.vocab, architecture.ends.width
    in_width, out_width = boundary.table_widths(width)
    ends = {"input_table": lookup(vocab, in_width), "maps": architecture.ends.maps + _maps(boundary, width)}
    every_use = total(ends)
    if architecture.ends.head:
        head = linear(out_width, vocab)
        biases = vocab * max(int(boundary.bias), min(architecture.ends.head_biases, 1))
        ends |= {"head_bias": Count(biases, 0, biases)} | ({"output_table": head} if boundary.tables == 2 else {})
        every_use = total(ends) if boundary.tables == 2 else total(ends) + head  # tied, stored at the input
    around = total(architecture.around)
    applied = sum((stack.applied() for stack in architecture.stacks), around)
    decoder = next((stack for stack in architecture.stacks if stack.name == "decoder"), None)
    return Budget(
        boundary,
        sharing,
        {name: count.parameters for name, count in merged(ends, architecture.body(sharing)).items()},
        architecture.frozen + (ends["input_table"].parameters if boundary.freeze else 0),
        every_use.multiplied + applied.multiplied,
        None if decoder is None else every_use.read + decoder.applied().read + around.read,
    )


def _maps(spec: BoundarySpec, width: int) -> Count:
    """Count what a boundary puts between tables of the model's own `width` and the body."""
    if spec.kind == "residual":
        rank = spec.rank or 0
        if rank > width:
            raise SpecError(f"{spec}: rank {rank} exceeds the table width {width}", f"choose a rank ≤ {width}")
        return linear(width, rank) + linear(rank, width)
    if spec.kind == "spd":
        square = width * width  # one triangular factor, stored square
        return Count(square, 3 * square, square)  # two products at the head, two solves at the input
    behind_lookup, before_head = spec.maps(width)
    in_width, out_width = spec.table_widths(width)
    found = linear(in_width, width) if behind_lookup else Count()
    found += linear(width, out_width) if before_head else Count()
    return found + elementwise(out_width if spec.out_bias else 0)


@dataclass(frozen=True)
class Threshold:
    """One formula with its value."""

    name: str
    formula: str
    value: float
    here: float | None = None  # the model's own figure, where the formula bounds one


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
    c = body / d**2
    scale = f"c = B/d² = {c:.4g}"
    both, one = largest_rank(vocab, d, 2), largest_rank(vocab, d, 1)
    narrow = Threshold("largest k that still saves, one table and one map", "k(V + d) < V·d", one, d)
    share, formula = tied_share(vocab, d, body), "1 / (1 + B/(V·d))"
    if not head:
        return Threshold("share of the model that is its table", f"{formula}, {scale}", share), narrow
    saving = "V/d above which tying saves more than"
    return (
        *(
            Threshold(f"{saving} {s:.0%}", f"c·s/(1−2s), s = {s:g}, {scale}", tying_threshold(s, c), vocab / d)
            for s in (0.05, 0.1, 0.2, 0.3)
        ),
        Threshold("share of the untied model that tying saves", "V·d / (2·V·d + B)", tying_saves(vocab, d, body)),
        Threshold("share of the tied model that is its table", formula, share),
        Threshold("largest k that still saves, tied, maps at both ends", "k(V + 2d) < V·d", both, d),
        narrow,
    )
