"""Which applications of a model's layers are one and the same layer, and repeat.

    calls = stack.calls(ids)                 # one `LayerCall` per application
    repeats(keys(calls))                     # runs of applications that use the same parameters again
    one_block(calls)                         # the run that is all of them, where a model repeats one block and no more

Layers are the same where they use the same Parameter objects in the same places, whatever modules hold them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tiewise.core.errors import UnsupportedError
from tiewise.internals.stack import LayerCall

Key = tuple[Any, ...]
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
        run = None
        for period in range(1, (len(found) - start) // 2 + 1):
            block, times = found[start : start + period], 1
            while block == found[start + times * period : start + (times + 1) * period]:
                times += 1
            if times > 1:
                run = Repeat(start, period, times)
                runs.append(run)
                break
        start = run.end if run else start + 1
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
