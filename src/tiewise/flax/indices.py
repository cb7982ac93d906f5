"""Token numbers: looked at where they are known, which is outside `jit`, `vmap` and the like."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def as_array(numbers: Any) -> Any:
    """Return lists as numpy arrays; arrays and tracers as they are."""
    return numbers if isinstance(numbers, jax.Array) else np.asarray(numbers)


def check_range(numbers: Any, limit: int, message: str, ignored: int | None = None) -> None:
    """Refuse numbers outside [0, limit) with an IndexError; traced ones cannot be looked at.

    Args:
        numbers: [...] integers.
        limit: what they must stay below.
        message: with two places, for the first number outside and for `limit`.
        ignored: a number that may stand there all the same.
    """
    if isinstance(numbers, jax.core.Tracer) or not np.size(numbers):
        return
    seen = np.asarray(numbers)
    wrong = (seen < 0) | (seen >= limit)
    outside = seen[wrong if ignored is None else wrong & (seen != ignored)]
    if outside.size:
        raise IndexError(message.format(int(outside.flat[0]), limit))
