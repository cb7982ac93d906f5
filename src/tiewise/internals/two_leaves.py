"""The two gradients of one table, held apart: the head works with a leaf of its own that has the table's values.

    lookups  →  leaf a  ┐  one storage, two leaves:    loss.backward gives ∂L/∂a = Path A [V, E]
    head     →  leaf b  ┘                                                  ∂L/∂b = Path B [V, E]

A tied table's gradient is A + B. The values are the table's own memory, nothing is copied, and the model is given its
parameters back afterwards, with the `.grad` they had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tiewise.boundary.locate import ModelEnds
from tiewise.internals.text_loss import TextLoss


@dataclass(frozen=True)
class BatchGradient:
    """Gradients of the mean loss of some windows.

    Args:
        a: of the input table through the lookups [V_in, E].
        b: of the output table through the head [V_out, E].
        nll: the mean loss, nats per predicted token.
        rows_l2: L2 norm of the gradient at the lookups' outputs [b, T, D], before rows of one token are added up.
        rows_l1: its L1 norm.
    """

    a: Tensor
    b: Tensor
    nll: float
    rows_l2: float
    rows_l1: float


class TwoLeaves:
    """The ends of a model while they are parted; made by `parted`."""

    def __init__(self, lookups: list[nn.Embedding], a: nn.Parameter, b: nn.Parameter) -> None:
        self.a, self.b = a, b
        self._looked_up: list[Tensor] = []
        self._handles = [module.register_forward_hook(self._keep) for module in lookups]

    def gradient(self, loss: TextLoss, which: Tensor) -> BatchGradient:
        """Differentiate the mean loss per predicted token of the windows `which` [b], a few windows at a time."""
        a, b = torch.zeros_like(self.a), torch.zeros_like(self.b)
        nll = squares = absolute = 0.0
        tokens = loss.per_window * len(which)
        for piece in which.split(loss.at_once):
            self._looked_up.clear()
            part = loss.total(piece) / tokens
            found = torch.autograd.grad(part, [self.a, self.b, *self._looked_up])
            a += found[0]
            b += found[1]
            nll += float(part.detach())
            squares += sum(float(torch.linalg.vector_norm(x)) ** 2 for x in found[2:])
            absolute += sum(float(torch.linalg.vector_norm(x, 1)) for x in found[2:])
        self._looked_up.clear()
        return BatchGradient(a, b, nll, squares**0.5, absolute)

    def close(self) -> None:
        """Take the hooks back."""
        for handle in self._handles:
            handle.remove()

    def _keep(self, module: nn.Module, arguments: object, output: Tensor) -> None:
        if output.requires_grad:
            self._looked_up.append(output)


@contextmanager
def parted(ends: ModelEnds) -> Iterator[TwoLeaves]:
    """Within this context lookups and head have separate leaves; then the model is as it was."""
    table = ends.source.weight
    lookups = [module for _, module in ends.lookups if module.weight is table]
    output = ends.head.weight
    a, b = nn.Parameter(table.detach()), nn.Parameter(output.detach())
    for module in lookups:
        module.weight = a
    ends.head.weight = b
    leaves = TwoLeaves(list({id(module): module for module in lookups}.values()), a, b)
    try:
        yield leaves
    finally:
        leaves.close()
        for module in lookups:
            module.weight = table
        ends.head.weight = output
