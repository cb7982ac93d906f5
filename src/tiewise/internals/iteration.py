"""A repeated block applied further than the model applies it: does it come to rest, and how far off was the model?

The block is a map f on states [B, T, D] (masks and positions as the model gave them). Along h, f(h), f(f(h)), …
every quantity is a mean over the tokens of a window:

    residual     ‖f(h) − h‖ / ‖h‖
    two steps    ‖f(f(h)) − h‖ / ‖h‖: small while the residual is not, where the states alternate
    ratio        ‖f(f(h)) − f(h)‖ / ‖f(h) − h‖ over the whole window: how much f stretched the last change
    growth       how much one application stretches a small random difference that is followed along and rescaled to
                 1e-3 of the state after each (Benettin et al. 1980); below 1 near-by states come together
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

State = Callable[[Tensor], Tensor]
SMALL = 1e-3  # of the state: far above rounding in fp32, small enough to be the map's derivative


@dataclass(frozen=True)
class Further:
    """What n further applications gave, one value per application and window.

    Args:
        residual: [n, B].
        two_steps: [n − 1, B].
        ratio: [n − 1, B]; NaN where the change was rounding error.
        growth: [n, B].
        last: state after the last [B, T, D].
        before_last: the state before it.
    """

    residual: Tensor
    two_steps: Tensor
    ratio: Tensor
    growth: Tensor
    last: Tensor
    before_last: Tensor


def iterate(block: State, start: Tensor, count: int, seed: int) -> Further:
    """Apply `block` `count` times (2 or more) from `start` [B, T, D], beside a slightly different start."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(start.shape, generator=generator, dtype=start.dtype).to(start.device)
    state, apart = start, _scaled(noise, start)
    before: Tensor | None = None
    residual, two_steps, sizes, growth = [], [], [], []
    for _ in range(count):
        following = block(state)
        difference = block(state + apart) - following
        growth.append(_norms(difference) / _norms(apart))
        residual.append(relative(following, state))
        sizes.append(_norms(following - state))
        if before is not None:
            two_steps.append(relative(following, before))
        before, state = state, following
        apart = _scaled(torch.where(_norms(difference)[:, None, None] > 0, difference, apart), state)
    change, scale = torch.stack(sizes), _norms(state)
    floor = 10 * torch.finfo(start.dtype).eps * scale
    ratio = torch.where(change[1:] > floor, change[1:] / change[:-1], torch.nan)
    assert before is not None
    return Further(torch.stack(residual), torch.stack(two_steps), ratio, torch.stack(growth), state, before)


def relative(new: Tensor, old: Tensor) -> Tensor:
    """Mean over tokens of ‖new − old‖ / ‖old‖: [B] of two states [B, T, D]; 0 where neither is anything."""
    size = torch.linalg.vector_norm(old, dim=-1)
    change = torch.linalg.vector_norm(new - old, dim=-1)
    return torch.where(change == 0, change, change / size).mean(-1)


def _norms(state: Tensor) -> Tensor:
    return torch.linalg.vector_norm(state, dim=(-2, -1))


def _scaled(difference: Tensor, state: Tensor) -> Tensor:
    """Return a difference as long as SMALL times the state, window by window."""
    return difference * (SMALL * _norms(state) / _norms(difference))[:, None, None]
