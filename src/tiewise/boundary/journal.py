"""A journal of attribute changes that can be taken back: how `install` leaves a model as it was when it refuses.

    journal = Journal()
    journal.set(head, "weight", embedding.weight)
    journal.undo()                      # head.weight is the old Parameter object again

Entries hold the old values, so a journal is kept only as long as undoing is meant to be possible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_ABSENT = object()


class Journal:
    """Changes in the order they were made; `undo` takes them back in reverse."""

    def __init__(self) -> None:
        self._steps: list[tuple[Any, ...]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set `target.name`, remembering what its own value was (class attributes show again after `undo`)."""
        self._steps.append((_restore, target, name, _own(target, name)))
        setattr(target, name, value)

    def hide(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute that a module must not register: a link, or a submodule that another module owns."""
        self._steps.append((_restore_hidden, target, name, vars(target).get(name, _ABSENT)))
        object.__setattr__(target, name, value)

    def later(self, step: Callable[..., None], *arguments: Any) -> None:
        """Remember a step of another kind: `step(*arguments)` is called by `undo`."""
        self._steps.append((step, *arguments))

    def undo(self) -> None:
        """Take everything back and forget it."""
        while self._steps:
            step, *arguments = self._steps.pop()
            step(*arguments)


def _own(target: Any, name: str) -> Any:
    if name == "__class__":
        return type(target)
    if isinstance(target, nn.Module):
        for store in (target._parameters, target._modules, target._buffers):
            if name in store:
                return store[name]
    return vars(target).get(name, _ABSENT)


def _restore(target: Any, name: str, old: Any) -> None:
    if old is _ABSENT:
        delattr(target, name)
    else:
        setattr(target, name, old)


def _restore_hidden(target: Any, name: str, old: Any) -> None:
    if old is _ABSENT:
        vars(target).pop(name, None)
    else:
        object.__setattr__(target, name, old)
