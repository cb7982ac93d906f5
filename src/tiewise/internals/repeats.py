"""Which applications of a model's layers are one and the same layer, and repeat; and where repeating leads.

    calls = stack.calls(ids)                 # one `LayerCall` per application
    calls[3].again(calls[3].wrote)           # layer 3 applied once more, to its own output
    repeats(keys(calls))                     # runs of applications that use the same parameters again
    one_block(calls)                         # the run that is all of them, where a model repeats one block and no more
    iterate(block, states[-1], 64, seed)     # the block applied further: does it come to rest?

Layers are the same where they use the same Parameter objects in the same places, whatever modules hold them.

A repeated block is a map f on states [B, T, D], masks and positions as the model gave them. Along h, f(h), f(f(h)), …
every quantity is a mean over the tokens of a window:

    residual     ‖f(h) − h‖ / ‖h‖
    two steps    ‖f(f(h)) − h‖ / ‖h‖: small while the residual is not, where the states alternate
    ratio        ‖f(f(h)) − f(h)‖ / ‖f(h) − h‖ over the whole window: how much f stretched the last change
    growth       how much one application stretches a small random difference that is followed along and rescaled to
                 1e-3 of the state after each (Benettin et al. 1980); below 1 near-by states come together
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiewise.core.errors import UnsupportedError
from tiewise.internals.stack import LayerCall

Key = tuple[Any, ...]
SMALL = 1e-3  # of the state: far above rounding in fp32, small enough to be the map's derivative
_WHOLE = "give a model that repeats whole layers"


@dataclass(frozen=True)
class Repeat:
    """`times` applications of the same block of `period` layers, the first of them at `first` (counted from 0)."""

    first: int
    period: int
    times: int

    @property
    def end(self) -> int:
        """The application after the last."""
        return self.first + self.period * self.times


def keys(calls: Iterable[LayerCall]) -> list[Key]:
    """Return for every application what it is made of: equal where the same Parameters stand in the same places."""
    found = []
    for call in calls:
        named = tuple((name, id(value)) for name, value in call.module.named_parameters(remove_duplicate=False))
        found.append(named or (id(call.module),))
    return found


def repeats(found: list[Key]) -> list[Repeat]:
    """Find runs in which a block of applications follows itself, from the left, the shortest block first."""
    runs, start = [], 0
    while start < len(found):
        run = next((r for p in range(1, (len(found) - start) // 2 + 1) if (r := _run(found, start, p)).times > 1), None)
        if run is not None:
            runs.append(run)
        start = start + 1 if run is None else run.end
    return runs


def one_block(calls: list[LayerCall]) -> Repeat:
    """Return the shortest block that all applications repeat.

    Raises:
        UnsupportedError: there is none; the reason names what the layers share instead.
    """
    found, count = keys(calls), len(calls)
    for period in range(1, count // 2 + 1):
        if found == found[:period] * (count // period):
            return Repeat(0, period, count // period)
    shared = max(shared_fractions(calls), default=0.0)
    if not shared:
        what = "every layer has parameters of its own" if count > 1 else "one layer, applied once"
        raise UnsupportedError(what, _WHOLE)
    what = f"its {count} layers share parameters in part only, and are no one block that is applied again and again"
    raise UnsupportedError(what, _WHOLE)


def shared_fractions(calls: Iterable[LayerCall]) -> list[float]:
    """For every application, the fraction of its parameters (by elements) that an earlier one has used already."""
    seen: set[int] = set()
    fractions = []
    for call in calls:
        sizes = {id(parameter): parameter.numel() for parameter in call.module.parameters()}
        known = sum(size for key, size in sizes.items() if key in seen)
        fractions.append(known / max(sum(sizes.values()), 1))
        seen |= sizes.keys()
    return fractions


def _run(found: list[Key], start: int, period: int) -> Repeat:
    times = 1
    while found[start : start + period] == found[start + times * period : start + (times + 1) * period]:
        times += 1
    return Repeat(start, period, times)


@dataclass(frozen=True)
class Further:
    """What n further applications gave, one value per application and window."""

    residual: Tensor  # [n, B]
    two_steps: Tensor  # [n − 1, B]
    ratio: Tensor  # [n − 1, B]; NaN where the change was rounding error
    growth: Tensor  # [n, B]
    last: Tensor  # state after the last [B, T, D]


def iterate(block: Callable[[Tensor], Tensor], start: Tensor, count: int, seed: int) -> Further:
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
    return Further(torch.stack(residual), torch.stack(two_steps), ratio, torch.stack(growth), state)


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
