"""Indices into logits [..., V], split into positions and tokens."""

from __future__ import annotations

from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor

_SIMPLE = (NoneType, EllipsisType, Tensor, int, slice)  # types of items that use a fixed number of dimensions


def split_index(index: Any, dims: int) -> tuple[tuple[Any, ...], slice] | None:
    """Return the parts of an index into logits [..., V]: positions, and a slice of tokens.

    Return None if the index selects tokens in another way than by a slice of step 1.

    (..., :-1, :) → (..., :-1, :), all        0 → (0,), all        (..., :n) → (..., :), :n        (:, -1, 5) → None
    """
    if not isinstance(index, tuple):
        index = (index,)
    ellipses = dimensions = 0
    for item in index:
        if not _is_simple(item):
            return None
        ellipses += item is Ellipsis
        dimensions += _dimensions_used(item)
    if ellipses > 1:
        return None
    reaches_tokens = dimensions == dims or (ellipses == 1 and index[-1] is not Ellipsis)
    if not reaches_tokens:
        return index, slice(None)
    *positions, tokens = index
    if not isinstance(tokens, slice) or tokens.step not in (None, 1):
        return None
    return (*positions, slice(None)), tokens


def _is_simple(item: Any) -> bool:
    """Return whether an item of an index uses a fixed number of dimensions."""
    return isinstance(item, _SIMPLE) and not isinstance(item, bool)


def _dimensions_used(item: Any) -> int:
    """Return the number of the logits' dimensions that a simple item indexes."""
    if item is None or item is Ellipsis:
        return 0
    is_mask = torch.is_tensor(item) and item.dtype in (torch.bool, torch.uint8)
    if is_mask:
        mask_dims: int = item.dim()
        return mask_dims
    return 1
