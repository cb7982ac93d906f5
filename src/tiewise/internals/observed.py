"""What modules read and write while a model runs, and which of them form its stack of layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Call:
    """One call of a module that takes a tensor of floats and returns one.

    Args:
        name: of the module.
        module: itself.
        read: first tensor of floats among its arguments, as it was before the call.
        wrote: what it returned, or the first element of the tuple that it returned.
        returns: length of that tuple, 0 for a bare tensor.
        inside: whether it was called by another recorded module.
    """

    name: str
    module: nn.Module
    read: Tensor
    wrote: Tensor
    returns: int
    inside: bool


@contextmanager
def recorded(modules: Mapping[str, nn.Module]) -> Iterator[list[Call]]:
    """Record the calls of some modules in the order in which they end. Tensors are copied: models may work in place."""
    calls: list[Call] = []
    names = {id(module): name for name, module in modules.items()}
    open_calls: list[Tensor | None] = []

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        found = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()), None)
        open_calls.append(None if found is None else found.detach().clone())

    def end(module: nn.Module, _: Any, output: Any) -> None:
        read, returns = open_calls.pop(), len(output) if isinstance(output, tuple) else 0
        wrote = output[0] if returns else output
        if read is not None and isinstance(wrote, Tensor):
            wrote = wrote.detach().clone()
            calls.append(Call(names[id(module)], module, read, wrote, returns, bool(open_calls)))

    with ExitStack() as held:
        for module in {id(module): module for module in modules.values()}.values():
            held.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
            held.callback(module.register_forward_hook(end).remove)
        yield calls


def chain(calls: list[Call], shape: tuple[int, int]) -> list[Call] | str:
    """Find the calls of one list's members that hand states [B, T, D] from one to the next, or say why there are none.

    Args:
        calls: of members of lists, named `<list>.<index>`.
        shape: B and T.
    """
    lists: dict[str, list[Call]] = {}
    for call in calls:
        if not call.inside and call.read.shape == call.wrote.shape and call.read.shape[:-1] == shape:
            lists.setdefault(call.name.rpartition(".")[0], []).append(call)
    if not lists:
        return "no list of layers reads and writes states [batch, length, width]"
    if len(lists) > 1:
        return f"several lists of layers, {' and '.join(sorted(lists))}"
    (found,) = lists.values()
    for i, (before, after) in enumerate(pairwise(found), 1):
        if not torch.equal(before.wrote, after.read):
            return f"layer {i} does not read what layer {i - 1} wrote"
    return found
