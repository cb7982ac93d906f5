"""What sharing layers saves and what it does not, measured: one function, its layers shared in four ways.

The record is a file of the package, which `python -m benchmarks.run sharing` writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiewise.analysis.packaged import packaged_json
from tiewise.training.results import from_record

RECORD = "catalogue/sharing_costs.json"


@dataclass(frozen=True)
class Cost:
    """One way of sharing.

    Args:
        sharing: none, attention, ffn or all.
        parameters: each counted once.
        state: bytes of weights, gradients and AdamW's two moments, as found in memory after a step.
        kept: bytes kept for the backward pass, as found in memory; weights are not among them.
        flops: of one forward.
        forward: seconds of one forward in each round.
        step: seconds of forward and backward in each round.
    """

    sharing: str
    parameters: int
    state: int
    kept: int
    flops: int
    forward: list[float]
    step: list[float]


@dataclass(frozen=True)
class SharingCosts:
    """All ways of sharing one model's layers, at one size; the first of them is none.

    Args:
        where: processor and versions.
        threads: of torch.
        batch, length: B and T.
        width, layers, table, vocab: H, L, E and V of the model, an ALBERT.
        equal: whether all of them gave the same logits, bit for bit.
        costs: by sharing, measured in turn in one process.
    """

    where: str
    threads: int
    batch: int
    length: int
    width: int
    layers: int
    table: int
    vocab: int
    equal: bool
    costs: list[Cost]


@dataclass(frozen=True)
class Record:
    """What the file holds."""

    sizes: list[SharingCosts]


def packaged_costs() -> list[SharingCosts]:
    """Return what was measured, size by size; nothing where the package was built without the record."""
    try:
        found = packaged_json(RECORD)
    except FileNotFoundError:
        return []
    return from_record(Record, found, RECORD).sizes
