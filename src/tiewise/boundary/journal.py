"""Attribute changes that can be taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class _Absent:
    """Old value of an attribute that did not exist. It is a class, whose identity copies of a journal keep."""


class Journal:
    """Attribute changes in the order they were made, with the old values. `undo` takes them back in reverse."""

    def __init__(self) -> None:
        self._steps: list[tuple[Any, ...]] = []  # (function, *arguments) each

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set `target.name`, remembering its old value (a class attribute is visible again after `undo`)."""
        old = _instance_value(target, name)
        if old is _Absent:
            self.later(delattr, target, name)
        else:
            self.later(setattr, target, name, old)
        setattr(target, name, value)

    def later(self, step: Callable[..., None], *arguments: Any) -> None:
        """Remember a step of another kind: `step(*arguments)` is called by `undo`."""
        self._steps.append((step, *arguments))

    def undo(self) -> None:
        """Take everything back and forget it."""
        while self._steps:
            step, *arguments = self._steps.pop()
            step(*arguments)


def _instance_value(target: Any, name: str) -> Any:
    """Return the value that an object itself has for an attribute, not its class. `_Absent` where it has none."""
    stores = [{"__class__": type(target)}, vars(target)]
    if isinstance(target, nn.Module):
        stores += [target._parameters, target._modules, target._buffers]
    for store in stores:
        if name in store:
            return store[name]
    return _Absent
