"""Which operators and torch functions deferred logits record, compute or refuse.

Dynamo, and a tensor on the left, route operators past the methods into `__torch_function__`, as the functions below.
They are found by identity: a compiled function has no name that Dynamo could compare.
"""

from __future__ import annotations

from typing import Any

import torch

_COMMUTING: dict[str, tuple[str, ...]] = {
    "__mul__": ("mul", "multiply", "__mul__", "__rmul__"),
    "__add__": ("add", "__add__", "__radd__"),
}
_FROM_LEFT: dict[str, tuple[str, ...]] = {"__truediv__": ("div", "divide", "true_divide", "__truediv__")}
_FROM_LEFT |= {name: (name,) for name in ("tanh", "flatten", "reshape")}


def _functions(names: dict[str, tuple[str, ...]]) -> dict[Any, str]:
    """{torch function: method that records it}."""
    homes = (torch, torch.Tensor)
    return {getattr(h, n): method for method, alias in names.items() for n in alias for h in homes if hasattr(h, n)}


COMMUTING = _functions(_COMMUTING)
RECORDED = COMMUTING | _functions(_FROM_LEFT)
AUGMENTED = ["__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__setitem__"]
COMPUTED = ["__sub__", "__rsub__", "__rtruediv__", "__matmul__", "__rmatmul__", "__pow__", "__mod__"]
COMPUTED += ["__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"]
COMPUTED += ["__neg__", "__abs__", "__bool__", "__iter__", "__array__"]
