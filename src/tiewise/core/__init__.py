"""What everything else stands on, and the letters used in every docstring and annotation of this package.

    B   batch                    V   vocabulary
    T   time (positions)         D   model (hidden) width
    N   tokens, N = B·T          E   table width; E = D unless the table is factored or projected
    L   layers                   k   a factored table's width, r a correction's rank

A *table* is [V, E] at both ends, one row per token: `logits = hidden @ table.T`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

__version__ = "0.1.0"  # here, where every module may read it: the root imports modules, and no module the root
_module = cache(import_module)  # products ask for theirs at every call


class Late:
    """`np = Late("numpy")` imports numpy at `np.exp` and not before: for files that a command may load and not use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(_module(self._name), name)
