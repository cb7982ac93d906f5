"""What may stand between a table and the body, as functions of a boundary's parameters; see `tiewise.boundary.maps`.

    in_map   behind the lookup    [.., E] -> [.., D]
    out_map  before the head      [.., D] -> [.., E]

Parameters bear the names that PyTorch's boundary has: `in_map.weight`, `out_map.p`, `out_map.factor`, …
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array

from tiewise.core.spec import BoundarySpec

Params = Mapping[str, Array]
Shape = tuple[int, ...]


def shapes(spec: BoundarySpec, d: int) -> dict[str, Shape]:
    """Name → shape of the maps' parameters in a model of width `d`.

    Raises:
        SpecError: where the widths do not allow the spec.
    """
    if spec.kind == "residual":
        assert spec.rank is not None
        return {"out_map.p": (d, spec.rank), "out_map.q": (spec.rank, d)}
    if spec.kind == "spd":
        return {"out_map.factor": (d, d)}
    has_in, has_out = spec.maps(d)
    in_width, out_width = spec.table_widths(d)
    found: dict[str, Shape] = {"in_map.weight": (d, in_width)} if has_in else {}
    found |= {"out_map.weight": (out_width, d)} if has_out else {}
    return found | ({"out_map.bias": (out_width,)} if spec.out_bias else {})


def draw(name: str, shape: Shape, key: Array) -> Array:
    """Draw a map's parameter: N(0, 1/from), and P of a correction, the definite map's factor and a bias zero."""
    if name in ("out_map.p", "out_map.factor", "out_map.bias"):
        return jnp.zeros(shape)
    return jax.random.normal(key, shape) * shape[1] ** -0.5


def through_in_map(params: Params, rows: Array) -> Array:
    """[.., E] -> [.., D], or the rows themselves where nothing stands there."""
    if "in_map.weight" in params:
        return rows @ params["in_map.weight"].T
    if "out_map.factor" in params:
        return _inverse(_cholesky(params["out_map.factor"]), rows)
    return rows


def through_out_map(spec: BoundarySpec, params: Params, hidden: Array) -> Array:
    """[.., D] -> [.., E], or the hidden states themselves where nothing stands there."""
    if "out_map.weight" in params:
        mapped = hidden @ params["out_map.weight"].T
        return mapped + params["out_map.bias"] if "out_map.bias" in params else mapped
    if "out_map.p" in params:
        return hidden + spec.strength * (hidden @ params["out_map.q"].T) @ params["out_map.p"].T
    if "out_map.factor" in params:
        c = _cholesky(params["out_map.factor"])
        return (hidden @ c) @ c.T
    return hidden


def against_hidden(spec: BoundarySpec, params: Params, rows: Array, d: int) -> Array:
    """[V, E] -> [V, D]: rows that meet hidden states as these do behind the map before the head; no bias."""
    if not any(name.startswith("out_map.") for name in params):
        return rows
    return rows @ through_out_map(spec, params, jnp.eye(d, dtype=rows.dtype)).T


def penalty(spec: BoundarySpec, params: Params) -> Array:
    """λ‖P‖₂ + c/2 ‖P‖²_F of a projection P before the head, to be added to the loss; 0 where the spec has neither."""
    if not (spec.penalty or spec.decay) or "out_map.weight" not in params:
        return jnp.zeros(())
    squares = (params["out_map.weight"] ** 2).sum()
    if not spec.penalty:
        return spec.decay / 2 * squares
    safe = jnp.where(squares > 0, squares, 1)  # the norm has no derivative at zero, where its gradient is taken as zero
    return spec.penalty * jnp.where(squares > 0, jnp.sqrt(safe), 0) + spec.decay / 2 * squares


def _cholesky(factor: Array) -> Array:
    """C [D, D], lower triangular, its diagonal the exponential of the parameter's."""
    return jnp.tril(factor, -1) + jnp.diag(jnp.exp(jnp.diag(factor)))


def _inverse(c: Array, x: Array) -> Array:
    """Solve for x (C Cᵀ)⁻¹ [.., D] by two triangular systems, in fp32 at least."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    columns = x.reshape(-1, x.shape[-1]).T.astype(wide)
    half = jax.scipy.linalg.solve_triangular(c.astype(wide), columns, lower=True)
    solved = jax.scipy.linalg.solve_triangular(c.astype(wide), half, lower=True, trans=1)
    return solved.T.reshape(x.shape).astype(x.dtype)
