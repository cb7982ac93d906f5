"""What logits tell about themselves without being computed: shape, dtype, device."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.fold import Fold


class Described:
    """Shape and kind of hidden [..., E] @ table [V, E]ᵀ, from its factors."""

    hidden: Tensor
    table: Tensor
    dtype: torch.dtype
    fold: Fold
    grad_mode: bool  # whether gradients were enabled where the head was called

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.table.shape[0]))

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self.hidden.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.hidden.dim()

    @property
    def requires_grad(self) -> bool:
        """Whether computing them now would give a tensor with a gradient."""
        leaves = (self.hidden, self.table, self.fold.bias)
        return torch.is_grad_enabled() and self.grad_mode and any(x is not None and x.requires_grad for x in leaves)

    def size(self, dim: int | None = None) -> Any:
        """Shape, or one dimension of it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dimensions."""
        return self.hidden.dim()

    def numel(self) -> int:
        """Number of logits."""
        return prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]
