"""Lookup in a tied table whose two gradients share one buffer, and the norms of both.

    rows, W' = enter(W, ids)        # forward: rows = W[ids], W' = W
    loss = head(body(rows), W')     # the head uses W', so the backward pass runs head first, lookup last

    backward of `enter`, with both gradients complete:
        gradient of W = gradient of W' (head path), with the gradient of rows (lookup path) scattered into it

Neither a pytree nor a gradient has aliases: without `enter`, JAX builds a dense [V, E] for the lookup path and adds it
to the head path's. The norms of both paths leave the backward pass as the gradient of a `probe`, three numbers that
enter the forward pass and have no effect there:

    loss_of = lambda params, probe: boundary_loss(params, ids, targets, probe)
    loss, (grads, seen) = jax.value_and_grad(loss_of, (0, 1))(params, probe())
    path_norms(seen)                # PathNorms(a=…, b=…, total=…, cosine=…)
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tiewise.core.backends import PathNorms


def probe() -> Array:
    """Return the argument whose gradient `path_norms` reads: ‖A‖², ‖B‖², A·B of one lookup.

    >>> probe().shape
    (3,)
    """
    return jnp.zeros(3, jnp.float32)


def enter(
    table: Array, ids: Array, probe: Array | None = None, *, stopped: int | None = None, alpha: float = 1.0
) -> tuple[Array, Array]:
    """Return the rows of `ids` [...] in `table` [V, E], and the table to use next.

    Several lookups of one table chain: `enter(W', more_ids)`. A probe belongs to one lookup of one backward pass.
    Summed over several (a scan, gradient accumulation) it is a sum of squares, not the square of a sum.

    >>> rows, table = enter(jnp.eye(3), jnp.array([2]))
    >>> rows.tolist()
    [[0.0, 0.0, 1.0]]

    Args:
        table: [V, E].
        ids: [...] token ids.
        probe: result of `probe()`, or None to measure nothing.
        stopped: row that gets no gradient from either path.
        alpha: factor on the lookup path.

    Returns:
        rows [..., E] and the table to use next. An id outside the table gives a row of nan.
    """
    rows, table = _enter(stopped, alpha, table, jnp.asarray(ids), probe)
    return rows, table


def path_norms(seen: Any) -> PathNorms:
    """Return the norms of both paths and their cosine, from the gradient of a `probe`.

    >>> norms = path_norms([9.0, 16.0, 12.0])
    >>> norms.a, norms.b, norms.total, norms.cosine
    (3.0, 4.0, 7.0, 1.0)

    Args:
        seen: gradient of the probe [3]: ‖A‖², ‖B‖² and A·B.

    Returns:
        norms of A (`a`, lookup path), B (`b`, head path) and A + B (`total`), and their cosine; nan if a norm is 0.
    """
    a_squared, b_squared, product = (float(x) for x in seen)
    a, b = math.sqrt(a_squared), math.sqrt(b_squared)
    total = math.sqrt(max(a_squared + b_squared + 2 * product, 0.0))
    cosine = math.nan
    if a and b:
        cosine = product / (a * b)
    return PathNorms(a, b, total, cosine)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _enter(stopped: int | None, alpha: float, table: Array, ids: Array, probe: Array | None) -> tuple[Array, Array]:
    """Return the rows of `ids`, and the table."""
    rows = jnp.take(table, _find_rows(ids, table), axis=0, mode="fill", fill_value=jnp.nan)
    return rows, table


class _Residuals(NamedTuple):
    """Values that the forward pass saves for the backward pass."""

    ids: Array
    has_probe: bool | None  # True or None, both of which JAX passes through a trace


def _enter_forward(
    stopped: int | None, alpha: float, table: Array, ids: Array, probe: Array | None
) -> tuple[tuple[Array, Array], _Residuals]:
    """Return the results of `_enter`, and the values that the gradients need."""
    has_probe = None if probe is None else True
    return _enter(stopped, alpha, table, ids, probe), _Residuals(ids, has_probe)


def _enter_backward(
    stopped: int | None, alpha: float, saved: _Residuals, gradients: tuple[Array, Array]
) -> tuple[Array, None, Array | None]:
    """Return the gradients of table, ids (none) and probe."""
    row_gradient, table_gradient = gradients
    ids = saved.ids.reshape(-1)
    lookups = row_gradient.reshape(-1, table_gradient.shape[1])
    if alpha != 1.0:
        lookups = lookups * alpha
    if stopped is not None:
        lookups = jnp.where((ids == stopped)[:, None], 0, lookups)
        table_gradient = table_gradient.at[stopped].set(0)
    ids = _find_rows(ids, table_gradient)
    both = table_gradient.at[ids].add(lookups.astype(table_gradient.dtype), mode="drop")
    squares = None
    if saved.has_probe is not None:
        squares = _squared_norms(ids, lookups, table_gradient)
    return both, None, squares


_enter.defvjp(_enter_forward, _enter_backward)


def _find_rows(ids: Array, table: Array) -> Array:
    """Return the row of each id.

    A negative id gets a row outside the table, where plain indexing would count from the end.
    """
    ids = ids.astype(jnp.int32)
    return jnp.where(ids < 0, table.shape[0], ids)


def _squared_norms(ids: Array, rows: Array, path_b: Array) -> Array:
    """Return ‖A‖², ‖B‖², A·B [3] in fp32.

    Rows of one token are summed before they are squared.
    """
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    distinct, inverse = jnp.unique(ids, return_inverse=True, size=ids.shape[0], fill_value=path_b.shape[0])
    path_a = jnp.zeros(rows.shape, wide).at[inverse.reshape(-1)].add(rows.astype(wide))
    rows_b = jnp.take(path_b, distinct, axis=0, mode="fill", fill_value=0).astype(wide)
    a_squared = (path_a**2).sum()
    b_squared = (path_b.astype(wide) ** 2).sum()
    product = (path_a * rows_b).sum()
    return jnp.stack([a_squared, b_squared, product]).astype(jnp.float32)
