"""Averaged SGD: plain steps, and beside them the mean of the weights since a moment (Polyak and Juditsky 1992).

With no decay of its own this is `torch.optim.ASGD` with `lambd=0, t0=-1` (with `t0=0`, which AWD-LSTM's code uses, the
first of the averaged weights is left out), except that the averaging may begin later, as NT-ASGD asks (Merity, Keskar
and Socher 2018, Algorithm 1), and that the mean is a part of the state that is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class AveragedSGD(torch.optim.SGD):
    """SGD that can begin to average: `average()` from then on, `averaged()` puts the means in place for a while."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        for group in self.param_groups:
            group.setdefault("averaged_steps", None)

    @property
    def averages(self) -> bool:
        """Whether it does by now."""
        return self.param_groups[0]["averaged_steps"] is not None

    def average(self) -> None:
        """Begin with the next step."""
        for group in self.param_groups:
            group["averaged_steps"] = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step, then take the new weights into the mean."""
        loss = super().step(closure)
        for group in self.param_groups:
            if group["averaged_steps"] is None:
                continue
            group["averaged_steps"] += 1
            for p in group["params"]:
                state = self.state[p]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].add_(p - state["mean"], alpha=1 / group["averaged_steps"])
        return loss

    @torch.no_grad()
    def settle(self) -> None:
        """Make the means the weights, for good."""
        for p, mean in self._means():
            p.copy_(mean)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context the weights are the means, where there are any."""
        kept = [(p, p.detach().clone()) for p, _ in self._means()]
        self.settle()
        try:
            yield
        finally:
            with torch.no_grad():
                for p, value in kept:
                    p.copy_(value)

    def _means(self) -> list[tuple[Tensor, Tensor]]:
        return [(p, self.state[p]["mean"]) for g in self.param_groups for p in g["params"] if "mean" in self.state[p]]
