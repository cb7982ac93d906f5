"""Boundary in JAX, for Flax NNX and Linen (docs/flax.md), without torch."""

from importlib.util import find_spec

from tiewise.core.errors import UnsupportedError

_missing = [name for name in ("jax", "flax", "optax") if find_spec(name) is None]
if _missing:
    raise UnsupportedError(f"tiewise.flax needs {', '.join(_missing)}", "pip install 'tiewise[flax]'")
