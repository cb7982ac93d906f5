"""One rank's share: memory held and bytes sent per step, for replicated, sharded and vocabulary-parallel tables.

Collectives are counted as rings send them, per rank: an all-reduce of n bytes over p ranks sends 2(p−1)/p·n, an
all-gather or reduce-scatter (p−1)/p·n.
"""

from __future__ import annotations

from dataclasses import dataclass

from tiewise.core.errors import PlanError
from tiewise.planning.budget import Budget
from tiewise.planning.memory import MASTER, Tokens, dtype_bytes, training_bytes


@dataclass(frozen=True)
class World:
    """`size` ranks, of which groups of `tp` split the vocabulary."""

    size: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        if self.size < 1 or self.tp < 1:
            raise PlanError(f"world {self.size}, tp {self.tp}", "both must be 1 or more")
        if self.size % self.tp:
            raise PlanError(f"tp {self.tp} does not divide the world of {self.size}", "choose a tp that divides it")


@dataclass(frozen=True)
class Rank:
    """What one rank holds and sends. Bytes; `memory` is weights, gradients and optimizer state, no activations.

    `sent` is the whole step, `sent_for_tables` its part that the tables cause.
    """

    layout: str
    memory: int
    tables: int
    sent: int
    sent_for_tables: int


def ranks(budget: Budget, world: World, tokens: Tokens, dtype: str, vocab: int) -> tuple[Rank, ...]:
    """Return data parallel, FSDP and, where tp > 1, vocabulary-parallel pictures.

    Memory is that of AdamW in `dtype`, with an fp32 master copy where `dtype` is not float32. In the
    vocabulary-parallel picture tables alone are split, over `tp`; the body is replicated.
    """
    found = [_replicated(budget, world, dtype), _sharded(budget, world, dtype)]
    if world.tp > 1:
        found.append(_vocabulary(budget, world, tokens, dtype, vocab))
    return tuple(found)


def all_reduce(count: int, over: int) -> int:
    """Bytes that one of `over` ranks sends."""
    return 2 * (over - 1) * count // over


def padded_rows(vocab: int, tp: int) -> int:
    """Rows of padding that make the vocabulary divide evenly."""
    return -vocab % tp


def pipeline_tie_bytes(budget: Budget, dtype: str) -> int:
    """Bytes that each of a pipeline's two ends sends per step to keep its copies of a tied table equal; 0 untied.

    Both ends also hold the table, so tying saves no memory there.
    """
    return all_reduce(budget.tables * dtype_bytes(dtype), 2) if budget.boundary.tables == 1 else 0


def _adamw(stored: int, trainable: int, dtype: str) -> int:
    return training_bytes(stored, trainable, dtype)["adamw" if dtype == "float32" else MASTER].total


def _replicated(budget: Budget, world: World, dtype: str) -> Rank:
    size = dtype_bytes(dtype)
    return Rank(
        "data parallel",
        _adamw(budget.total, budget.trainable, dtype),
        budget.tables * size,
        all_reduce(budget.trainable * size, world.size),
        all_reduce((budget.tables - budget.frozen_tables) * size, world.size),
    )


def _sharded(budget: Budget, world: World, dtype: str) -> Rank:
    """Weights gathered for the forward and again for the backward pass, gradients reduced and scattered."""
    size, p = dtype_bytes(dtype), world.size
    stored, trainable = -(-budget.total // p), -(-budget.trainable // p)

    def sent(weights: int, gradients: int) -> int:
        return (p - 1) * (2 * weights + gradients) * size // p

    return Rank(
        "fsdp",
        _adamw(stored, trainable, dtype),
        -(-budget.tables // p) * size,
        sent(budget.total, budget.trainable),
        sent(budget.tables, budget.tables - budget.frozen_tables),
    )


def _vocabulary(budget: Budget, world: World, tokens: Tokens, dtype: str, vocab: int) -> Rank:
    """Each rank of a group holds ⌈V/tp⌉ rows of every table.

    Per step and group: the looked-up rows [N, D] are summed forward, the hidden gradient [N, D] backward, and three
    numbers per token (largest logit, sum of exponentials, target logit) forward. The groups then average gradients.
    """
    size, tp = dtype_bytes(dtype), world.tp
    width = budget.tables // vocab  # columns of all tables together
    rows = -(-vocab // tp)
    tables, still = rows * width, rows * (budget.frozen_tables // vocab)
    body, still_body = budget.total - budget.tables, budget.frozen - budget.frozen_tables
    groups = world.size // tp
    each = all_reduce(tokens.count * width // budget.boundary.tables * size, tp)
    group = 2 * each + all_reduce(3 * tokens.count * 4, tp)
    for_tables = group + all_reduce((tables - still) * size, groups)
    return Rank(
        "vocabulary parallel",
        _adamw(body + tables, body + tables - still - still_body, dtype),
        tables * size,
        for_tables + all_reduce((body - still_body) * size, groups),
        for_tables,
    )
