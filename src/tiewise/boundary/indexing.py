"""Which positions and which tokens an index into logits [..., V] asks for.

logits[..., :-1, :]   positions (..., :-1, :), tokens :         logits[0]          positions (0,), tokens :
logits[..., :n]       positions (..., :),      tokens :n        logits[:, -1, 5]   None: single tokens are no slice
"""

from __future__ import annotations

from typing import Any

import torch


def split_index(index: Any, dims: int) -> tuple[tuple[Any, ...], slice] | None:
    """Return (index into hidden [..., E], slice of tokens), or None where the last dimension is not simply sliced."""
    items = index if isinstance(index, tuple) else (index,)
    used = [_dimensions(item) for item in items]
    if any(count is None for count in used) or sum(item is Ellipsis for item in items) > 1:
        return None
    reaches_last = sum(used) == dims or (Ellipsis in _plain(items) and items[-1] is not Ellipsis)  # type: ignore[arg-type]
    if not reaches_last:
        return items, slice(None)
    last = items[-1]
    if not isinstance(last, slice) or last.step not in (None, 1):
        return None
    return (*items[:-1], slice(None)), last


def _plain(items: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(item for item in items if not torch.is_tensor(item))


def _dimensions(item: Any) -> int | None:
    """How many dimensions an item consumes; None where that takes more thought than it is worth."""
    if item is Ellipsis or item is None:
        return 0
    if torch.is_tensor(item):
        return item.dim() if item.dtype in (torch.bool, torch.uint8) else 1
    return 1 if isinstance(item, int | slice) and not isinstance(item, bool) else None
