"""Foundation of all other packages, and the letters of all docstrings and annotations.

    B   batch                    V   vocabulary
    T   time (positions)         D   model (hidden) width
    N   tokens, N = B·T          E   table width; E = D unless the table is factored or projected
    L   layers                   k   a factored table's width, r a correction's rank

A *table* is [V, E], one row per token, both in the input embedding and in the output head:
`logits = hidden @ table.T`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

__version__ = "0.2.0"  # defined here because modules may not import the root package
_module = cache(import_module)  # a `Late` looks its module up at every call


class Late:
    """Module that is imported when its first attribute is read.

    With `np = Late("numpy")`, `np.exp` imports numpy. It serves files that a command loads but may not use.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(_module(self._name), name)
