"""Which mesh axes an array varies over inside `shard_map`: gradients must vary over exactly those of their arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def axes_of(x: Any) -> frozenset[str]:
    """Mesh axes along which devices hold different values of `x`; none outside `shard_map`."""
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)  # older versions of jax keep the set itself, as `vma`
    return frozenset(getattr(kind, "vma", ()) if manual is None else manual.varying)


def varying(x: Array, axes: frozenset[str]) -> Array:
    """`x`, marked as varying over `axes` too; its gradient is summed over the axes that this adds."""
    new = tuple(sorted(axes - axes_of(x)))
    return lax.pcast(x, new, to="varying") if new else x


def alike(features: Array, *others: Array | None) -> list[Any]:
    """Let `others` vary over whatever the features vary over: a table's gradient is a sum over the batch axes."""
    return [None if x is None else varying(x, axes_of(features)) for x in others]


def zeros_like(x: Array, dtype: Any) -> Array:
    """Zeros of another type that vary as `x` does."""
    return varying(jnp.zeros(x.shape, dtype), axes_of(x))
