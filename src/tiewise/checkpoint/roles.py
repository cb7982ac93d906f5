"""Which stored tensor plays which part at the vocabulary's two ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tiewise.checkpoint.header import Stored


@dataclass(frozen=True)
class Roles:
    """The parts of the boundary that a checkpoint stores, and the names they should have.

    Args:
        source: how they were found: "architecture data", "usual names" or "shapes".
        input: the input table [V, E]; None where none is stored.
        input_name: the name under which the class looks for it, stored or not; None where unknown.
        inputs: every stored input table, `input` first (T5 and BART may store `shared` and one for each stack).
        output: the output table [V, E]; None where none is stored.
        output_name: as `input_name`.
        biases: stored biases of the head, [V] or [1, V].
        positions: stored position tables; they are long and wide like a vocabulary, and are none.
        maps: stored matrices between table and hidden width: projections, or the maps of a factored table.
        headless: the class has no token head (an encoder, a classifier, a reward model).
        scalars: numbers in the config that act at the boundary, by dotted key (`text_config.logits_scaling`).
    """

    source: str
    input: Stored | None = None
    input_name: str | None = None
    inputs: tuple[Stored, ...] = ()
    output: Stored | None = None
    output_name: str | None = None
    biases: tuple[Stored, ...] = ()
    positions: tuple[Stored, ...] = ()
    maps: tuple[Stored, ...] = ()
    headless: bool = False
    scalars: dict[str, float] = field(default_factory=dict)


def find_roles(tensors: Mapping[str, Stored], config: Mapping[str, Any] | None) -> Roles:
    """Find them from architecture data, else from usual names, else from shapes."""
    raise NotImplementedError
