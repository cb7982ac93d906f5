"""Attribute changes that can be undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class _Absent:
    """Mark for the old value of an attribute that did not exist.

    It is a class, so that a copy of a journal has the same object.
    """


class Journal:
    """List of attribute changes with the old values, which `undo` reverts, last first."""

    def __init__(self) -> None:
        self._steps: list[tuple[Any, ...]] = []  # (function, *arguments) each

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set `target.name`, and store the old value.

        If the object had no such attribute, `undo` deletes it, so that a class attribute is visible again.
        """
        old = _instance_value(target, name)
        if old is _Absent:
            self.later(delattr, target, name)
        else:
            self.later(setattr, target, name, old)
        setattr(target, name, value)

    def later(self, step: Callable[..., None], *arguments: Any) -> None:
        """Let `undo` call `step(*arguments)`."""
        self._steps.append((step, *arguments))

    def undo(self) -> None:
        """Revert all changes, last first, and clear the journal."""
        while self._steps:
            step, *arguments = self._steps.pop()
            step(*arguments)


def _instance_value(target: Any, name: str) -> Any:
    """Return the value of an attribute that an object itself has, not its class, or `_Absent`."""
    stores = [{"__class__": type(target)}, vars(target)]
    if isinstance(target, nn.Module):
        stores += [target._parameters, target._modules, target._buffers]
    for store in stores:
        if name in store:
            return store[name]
    return _Absent
