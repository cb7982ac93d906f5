"""What the steps between a head and its loss amount to: post · tanh(scale · product + bias), or without the tanh.

    / 30 → tanh → * 30      Fold(scale=1/30) → Fold(scale=1/30, post=1) → Fold(scale=1/30, post=30)
    parts()                 scale 1, bias None, softcap 30: the options of `linear_cross_entropy`

A step that does not fit the form folds to None, and the caller computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Fold:
    """scale · product + bias, and post · tanh(·) of it where `post` is not None."""

    scale: float = 1.0
    bias: Tensor | None = None
    post: float | None = None

    def times(self, factor: Any) -> Fold | None:
        """Multiply by a finite Python number; a soft-cap is only known with a positive factor."""
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not abs(factor) < inf:
            return None
        if self.post is not None:
            return replace(self, post=self.post * factor) if factor > 0 else None
        return Fold(self.scale * factor, None if self.bias is None else self.bias * factor)

    def plus(self, vector: Any, vocabulary: int) -> Fold | None:
        """Add a vector [V] (or [1, V], [1, 1, V]) of biases."""
        fits = isinstance(vector, Tensor) and vector.shape[-1:] == (vocabulary,) and vector.numel() == vocabulary
        if not fits or self.post is not None:
            return None
        vector = vector.reshape(-1)
        return replace(self, bias=vector if self.bias is None else self.bias + vector)

    def squashed(self) -> Fold | None:
        """Apply tanh, once."""
        return replace(self, post=1.0) if self.post is None else None

    def parts(self) -> tuple[float, Tensor | None, float | None]:
        """Return (scale, bias, softcap), with softcap(z) = c · tanh(z / c)."""
        if self.post is None:
            return self.scale, self.bias, None
        return self.scale * self.post, None if self.bias is None else self.bias * self.post, self.post
