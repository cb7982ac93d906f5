"""One choice's parameters: a boundary and a sharing on an architecture, counted by component.

The boundary acts where `tiewise.install` would act: on tables of the model's own width E. A model that maps between its
tables and its body (OPT-350M, ALBERT, ELECTRA) keeps those maps, and a factored table maps to E before them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiewise.core.errors import SpecError
from tiewise.core.sharing_spec import SharingSpec
from tiewise.core.spec import BoundarySpec
from tiewise.planning.architecture import Architecture
from tiewise.planning.parts import Part, linear, lookup, merged, total

TABLES = ("input_table", "output_table")


@dataclass(frozen=True)
class Budget:
    """Unique parameters of one choice, and what a token does with them.

    `multiplied` counts weights that one token is multiplied by in the forward pass, over every application of every
    layer and with the head, tied or not. `read` counts parameters that one decoded token needs; None where the model
    does not decode.
    """

    boundary: BoundarySpec
    sharing: SharingSpec
    parameters: Mapping[str, int]
    frozen: int
    multiplied: int
    read: int | None

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
        return sum(self.parameters.get(name, 0) for name in TABLES)

    @property
    def frozen_tables(self) -> int:
        """Parameters of a table that the boundary freezes."""
        return self.parameters["input_table"] if self.boundary.freeze else 0


def budget(architecture: Architecture, boundary: BoundarySpec, sharing: SharingSpec) -> Budget:
    """Count `architecture` under a choice.

    Raises:
        SpecError: a table or rank wider than the model's table, or more groups than layers.
    """
    ends, head = boundary_parts(architecture, boundary)
    body = architecture.body(sharing)
    counted = merged(ends, body)
    around = total(architecture.around)
    applied = sum((stack.applied() for stack in architecture.stacks), around)
    every_use = total(ends) + head
    decoder = next((stack for stack in architecture.stacks if stack.name == "decoder"), None)
    read = None if decoder is None else every_use.read + decoder.applied().read + around.read
    return Budget(
        boundary,
        sharing,
        {name: part.parameters for name, part in counted.items()},
        architecture.frozen + (ends["input_table"].parameters if boundary.freeze else 0),
        every_use.multiplied + applied.multiplied,
        read,
    )


def boundary_parts(architecture: Architecture, spec: BoundarySpec) -> tuple[dict[str, Part], Part]:
    """(stored parts of the ends, the head's use of a tied table: multiplied and read, but stored at the input).

    Raises:
        SpecError: a table or rank wider than the model's own table allows.
    """
    ends = architecture.ends
    vocab, width = ends.vocab, ends.width
    in_width, out_width = spec.table_widths(width)
    parts = {"input_table": lookup(vocab, in_width), "maps": ends.maps + _maps(spec, width)}
    if not ends.head:
        return parts, Part()
    head = linear(out_width, vocab)
    biases = max(int(spec.bias), min(ends.head_biases, 1))
    parts["head_bias"] = Part(vocab * biases, 0, vocab * biases)
    if spec.tables == 2:
        parts["output_table"] = head
        return parts, Part()
    return parts, Part(0, head.multiplied, head.read)


def _maps(spec: BoundarySpec, width: int) -> Part:
    if spec.kind == "residual":
        rank = spec.rank or 0
        if rank > width:
            raise SpecError(f"{spec}: rank {rank} exceeds the table width {width}", f"choose a rank ≤ {width}")
        return linear(width, rank) + linear(rank, width)
    if spec.kind == "spd":
        square = (
            width * width
        )  # one triangular factor, stored square: two products at the head, two solves at the input
        return Part(square, 3 * square, square)
    in_map, out_map = spec.maps(width)
    in_width, out_width = spec.table_widths(width)
    behind = linear(in_width, width) if in_map else Part()
    before = linear(width, out_width) if out_map else Part()
    return behind + before + (Part(out_width, 0, out_width) if spec.out_bias else Part())


def native(architecture: Architecture) -> BoundarySpec:
    """Return the boundary that the model has as it is."""
    return BoundarySpec("tied" if architecture.ends.tied or not architecture.ends.head else "untied")
