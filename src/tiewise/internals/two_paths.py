"""The two gradients of one table, held apart; their norms row by row; and Adam's step divided between them.

    lookups  →  leaf a  ┐  one storage, two leaves:    loss.backward gives ∂L/∂a = A, the lookup path [V, E]
    head     →  leaf b  ┘                                                  ∂L/∂b = B, the head path [V, E]

A tied table's gradient is A + B. The values are the table's own memory, nothing is copied, and the model is given its
parameters back afterwards, with the `.grad` they had.

Adam's step is linear in its first moment, and the moment of a sum is the sum of moments (Kingma & Ba, arXiv:1412.6980,
algorithm 1). Two tables have a v each:

    u = m̂ / (√v̂ + ε)      m of A + B = m_A + m_B      →      u = u_A + u_B, exactly, with the v of the sum
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from tiewise.analysis.estimates import ratio
from tiewise.boundary.locate import ModelEnds
from tiewise.internals.text_loss import TextLoss

_ROWS = 4096  # taken to fp64 at once
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class BatchGradient:
    """Gradients of the mean loss of some windows."""

    a: Tensor  # of the input table through the lookups [V_in, E]
    b: Tensor  # of the output table through the head [V_out, E]
    nll: float  # the mean loss, nats per predicted token
    rows_l2: float  # L2 norm of the gradient at the lookups' outputs [b, T, D], before rows of one token are added up
    rows_l1: float  # its L1 norm


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


@dataclass(frozen=True)
class PathSplit:
    """Norms of two parts A and B, gradients or steps, and the shares of B; nan where there is no number."""

    a: float  # ‖A‖, Frobenius
    b: float
    total: float  # ‖A + B‖ of one table; √(‖A‖² + ‖B‖²) of two
    cosine: float  # between A and B; nan for two tables
    a_l1: float  # sum of |A|
    b_l1: float
    share_b: float  # ‖B‖ / (‖A‖ + ‖B‖)
    energy_b: float  # ‖B‖² / (‖A‖² + ‖B‖²)
    share_b_l1: float  # the share of norms by L1


@dataclass(frozen=True)
class RowSums:
    """Sums over each row of A and B, [V] each."""

    a2: Floats  # ‖A_r‖²
    b2: Floats
    ab: Floats  # A_r·B_r; nan for two tables
    a1: Floats  # sum of |A_r|
    b1: Floats

    @property
    def share_b(self) -> Floats:
        """‖B_r‖ / (‖A_r‖ + ‖B_r‖) of every row [V]; nan where both are zero."""
        a, b = np.sqrt(self.a2), np.sqrt(self.b2)
        both = a + b
        return np.divide(b, both, out=np.full_like(b, np.nan), where=both > 0)

    def split(self, rows: NDArray | slice = slice(None)) -> PathSplit:
        """Sum over all rows, or over some."""
        a2, b2, ab, a1, b1 = (float(x[rows].sum()) for x in (self.a2, self.b2, self.ab, self.a1, self.b1))
        a, b = math.sqrt(a2), math.sqrt(b2)
        apart = math.isnan(ab)
        total = math.sqrt(a2 + b2 if apart else max(0.0, a2 + b2 + 2 * ab))
        cosine = ab / (a * b) if a and b and not apart else math.nan
        return PathSplit(a, b, total, cosine, a1, b1, ratio(b, a + b), ratio(b2, a2 + b2), ratio(b1, a1 + b1))


def row_sums(a: Tensor, b: Tensor, one_table: bool) -> RowSums:
    """Count A [V, E] and B [V', E'] row by row in fp64; a shorter table's missing rows are zero."""
    rows = max(len(a), len(b))
    found = np.zeros((5, rows))
    for start in range(0, rows, _ROWS):
        x, y = (t[start : start + _ROWS].double() for t in (a, b))
        products = (x * y).sum(1) if one_table else None
        columns = [x.square().sum(1), y.square().sum(1), products, x.abs().sum(1), y.abs().sum(1)]
        for place, column in enumerate(columns):
            if column is not None:
                found[place, start : start + len(column)] = column.numpy()
    if not one_table:
        found[2] = np.nan
    return RowSums(*found)


def cosine_null(a: Tensor, b: Tensor, rows: Tensor, seed: int, permutations: int) -> tuple[float, float]:
    """(lowest, highest) cosine of A and B where the rows of A among `rows` [U] are permuted: other tokens' A.

    A's rows outside of `rows` must be zero.
    """
    source = torch.Generator().manual_seed(seed)
    own, other = F.embedding(rows, a), F.embedding(rows, b)
    norms = float(torch.linalg.vector_norm(own)) * float(torch.linalg.vector_norm(b))
    if not norms:
        return math.nan, math.nan
    found = []
    for _ in range(permutations):
        order = torch.randperm(len(rows), generator=source)
        pieces = zip(order.split(_ROWS), other.split(_ROWS), strict=True)
        found.append(sum(float((own[piece] * against).sum()) for piece, against in pieces) / norms)
    return min(found), max(found)


@dataclass(frozen=True)
class Adam:
    """Its constants; the defaults are torch's."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


class AdamPaths:
    """Moments of both paths. `add` a step's gradients; `step` gives the update per unit of learning rate."""

    def __init__(self, a: Tensor, b: Tensor, one_table: bool, adam: Adam) -> None:
        self.adam, self.one_table, self.steps = adam, one_table, 0
        self._m = torch.zeros_like(a), torch.zeros_like(b)
        self._v = (torch.zeros_like(a),) if one_table else (torch.zeros_like(a), torch.zeros_like(b))

    def add(self, a: Tensor, b: Tensor) -> None:
        """Take in the gradients of one step."""
        self.steps += 1
        for moment, gradient in zip(self._m, (a, b), strict=True):
            moment.lerp_(gradient, 1 - self.adam.beta1)
        for square, gradient in zip(self._v, (a + b,) if self.one_table else (a, b), strict=True):
            square.mul_(self.adam.beta2).addcmul_(gradient, gradient, value=1 - self.adam.beta2)

    def step(self) -> tuple[Tensor, Tensor]:
        """(u_A, u_B) with bias correction: what weights lose per unit of learning rate. Ends this object's use."""
        first, second = (1 - beta**self.steps for beta in (self.adam.beta1, self.adam.beta2))
        below = [v.div_(second).sqrt_().add_(self.adam.eps) for v in self._v]
        a, b = (m.div_(first) for m in self._m)
        return a.div_(below[0]), b.div_(below[-1])
