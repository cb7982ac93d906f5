"""Modules that are slow to import, imported when something of theirs is first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Late:
    """Stands for a module of another package: `np = Late("numpy")`, and `np.exp` imports numpy.

    For files that a command may load without using: importing numpy takes longer than a plan.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(import_module(self._name), name)
        setattr(self, name, found)
        return found
