"""The step that Adam would take from some gradients in a row, divided by path.

Adam's step is linear in its first moment, and the moment of a sum is the sum of moments:

    u = m̂ / (√v̂ + ε)      m of A + B = m_A + m_B      →      u = u_A + u_B, exactly, with the v of the sum

(Kingma & Ba, arXiv:1412.6980, algorithm 1.) Two tables have a v each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
