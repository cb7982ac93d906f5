"""Optimizers that PyTorch lacks: LAMB, and SGD that can start to average its weights late."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiewise.core.errors import RunError


class Lamb(Optimizer):
    """LAMB: Adam's step, scaled for every tensor by its trust ratio.

    Source: You et al. 2020, arXiv:1904.00962, Algorithm 2.

        m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²
        u = m̂ / (√v̂ + ε) + λ x       m̂ = m / (1 − β₁ᵗ), v̂ = v / (1 − β₂ᵗ)
        x ← x − η · ratio · u        ratio = ‖x‖ / ‖u‖

    Where the paper leaves a choice, this class follows the authors' code. φ(z) = z, so the ratio is not clipped. It is
    1 if ‖x‖ or ‖u‖ is 0. Each Parameter, also a table, has one ratio, taken before the step. `adapt=False` in a group
    of parameters sets the ratio to 1; biases and norms have this, and no weight decay.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1.76e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        adapt: bool = True,
    ) -> None:
        if not (lr >= 0 and eps > 0 and weight_decay >= 0):
            raise RunError(f"LAMB with lr={lr}, eps={eps}, weight_decay={weight_decay}", "use positive numbers")
        if not all(0 <= beta < 1 for beta in betas):
            raise RunError(f"LAMB with betas={betas}", "use numbers from 0, below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one step; parameters of lower precision have moments in fp32."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step_one(p, group)
        return loss

    def _step_one(self, p: Tensor, group: dict[str, Any]) -> None:
        """Step one parameter; the letters are those of the class."""
        assert p.grad is not None, "only parameters with a gradient are stepped"
        if p.grad.is_sparse:
            raise RunError("LAMB needs dense gradients", "build the table with sparse=False")
        state, wide = self.state[p], torch.promote_types(p.dtype, torch.float32)
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(p, dtype=wide)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=wide)
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"]), group["betas"]
        grad, x = p.grad.to(wide), p.to(wide)
        mean = state["exp_avg"].lerp_(grad, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = (mean / (1 - beta1**step)).div_(root).add_(x, alpha=group["weight_decay"])
        if group["adapt"]:
            update.mul_(trust_ratio(x, update))
        p.copy_(x - update.mul_(group["lr"]))


def trust_ratio(x: Tensor, update: Tensor) -> Tensor:
    """Return ‖x‖ / ‖update‖ as a scalar on their device; 1 if either norm is 0."""
    weight, change = torch.linalg.vector_norm(x), torch.linalg.vector_norm(update)
    is_defined = (weight > 0) & (change > 0)
    return torch.where(is_defined, weight / torch.where(is_defined, change, 1), 1)


def lamb_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups of LAMB's authors.

    Matrices have weight decay and a trust ratio, biases and norms have neither.
    """
    chosen = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in chosen if p.ndim > 1], "weight_decay": weight_decay, "adapt": True},
        {"params": [p for p in chosen if p.ndim < 2], "weight_decay": 0.0, "adapt": False},
    ]


class AveragedSGD(torch.optim.SGD):
    """SGD that also stores the mean of the weights since a step (Polyak and Juditsky 1992).

    `average()` starts the averaging, `averaged()` swaps the means in for a while. Without weight decay this is
    `torch.optim.ASGD` with `lambd=0, t0=-1`. (AWD-LSTM's code uses `t0=0`, which leaves out the first averaged
    weights.) Two things differ: the averaging may start later, as in NT-ASGD (Merity, Keskar and Socher 2018, Algorithm
    1), and the mean is part of the saved state.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        for group in self.param_groups:
            group.setdefault("averaged_steps", None)

    @property
    def averages(self) -> bool:
        """True once the averaging has started."""
        return self.param_groups[0]["averaged_steps"] is not None

    def average(self) -> None:
        """Start averaging with the next step."""
        for group in self.param_groups:
            group["averaged_steps"] = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Step, then add the new weights to the mean if the averaging has started."""
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

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the means as weights within this context, if there are any.

        The weights' tensors are swapped, without copies.
        """
        current: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if "mean" in self.state[p]:
                    current[p] = p.data
        for p in current:
            p.data = self.state[p]["mean"]
        try:
            yield
        finally:
            for p, data in current.items():
                p.data = data
