"""Every application of a model's layers, ready to be called again, and which of them are one and the same layer.

    states, calls = applied(stack, ids)      # residual stream, and one `Call` per application
    calls[3].again(states[4])                # layer 3 applied once more, to its own output
    repeats(keys(calls))                     # runs of applications that use the same parameters again
    one_block(calls)                         # the run that is all of them, where a model repeats one block and no more

Layers are the same where they use the same Parameter objects in the same places, whatever modules hold them.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tiewise.core.errors import UnsupportedError
from tiewise.internals.stack import Stack

Key = tuple[Any, ...]
_WHOLE = "give a model whose whole layers are shared over the whole depth"


@dataclass(frozen=True)
class Call:
    """One application of a layer.

    Args:
        name: the module's (first) name in the model.
        module: what was called.
        args: what it was called with.
        kwargs: and by name.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def again(self, state: Tensor) -> Tensor:
        """Apply the layer to another state [B, T, D]; masks, positions and the rest as they were."""
        args, kwargs, given = list(self.args), dict(self.kwargs), state.clone()  # some families work in place
        place = next((i for i, value in enumerate(args) if _is_state(value)), None)
        if place is not None:
            args[place] = given
        else:
            kwargs[next(name for name, value in kwargs.items() if _is_state(value))] = given
        output = self.module(*args, **kwargs)
        made: Tensor = output[0] if isinstance(output, tuple) else output
        return made


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


def applied(stack: Stack, ids: Tensor, **others: Tensor) -> tuple[list[Tensor], list[Call]]:
    """Run ids [B, T]; return the residual stream, L + 1 tensors [B, T, D], and the L calls between them.

    `others` is what else the model's forward is given by name, as a mask.
    """
    given: list[tuple[Any, Any]] = []
    with ExitStack() as held:
        for module in {id(one.module): one.module for one in stack.applications}.values():
            hook = module.register_forward_pre_hook(lambda _, *found: given.append(found), with_kwargs=True)
            held.callback(hook.remove)
        states = stack.states(ids, **others)
    pairs = zip(stack.applications, given, strict=True)
    return states, [Call(one.name, one.module, *found) for one, found in pairs]


def keys(calls: Iterable[Call]) -> list[Key]:
    """Return for every application what it is made of: equal where the same Parameters stand in the same places."""
    return [_key(call.module) for call in calls]


def repeats(found: list[Key]) -> list[Repeat]:
    """Find runs in which a block of applications follows itself, from the left, the shortest block first."""
    runs, start = [], 0
    while start < len(found):
        run = next((r for p in range(1, (len(found) - start) // 2 + 1) if (r := _run(found, start, p)).times > 1), None)
        if run is not None:
            runs.append(run)
        start = start + 1 if run is None else run.end
    return runs


def one_block(calls: list[Call]) -> Repeat:
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
        what = "every layer has parameters of its own" if count > 1 else "there is one layer, applied once"
        raise UnsupportedError(f"{what}, so none can be applied more or less often", _WHOLE)
    what = f"its {count} layers share parameters in part only, and are no one block that is applied again and again"
    raise UnsupportedError(what, _WHOLE)


def shared_fractions(calls: Iterable[Call]) -> list[float]:
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


def _key(module: nn.Module) -> Key:
    named = tuple((name, id(value)) for name, value in module.named_parameters(remove_duplicate=False))
    return named or (id(module),)


def _is_state(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
