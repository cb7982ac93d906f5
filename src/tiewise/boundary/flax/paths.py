"""One table, two gradients, one buffer: the lookup hands the table on to the head.

    rows, W' = enter(W, ids)        # forward: rows = W[ids], W' = W
    loss = head(body(rows), W')     # the head uses W', so the backward pass runs head first, lookup last

    backward of `enter`, with both gradients complete:
        gradient of W = gradient of W' (head path), with the gradient of rows (lookup path) scattered into it

A pytree does not alias, and neither does a gradient: without this, JAX builds a dense [V, E] for the lookup path and
adds it to the head path's. The norms of both paths leave the backward pass as the gradient of a `probe`, three numbers
that enter the forward pass and do nothing there:

    loss_of = lambda params, probe: boundary_loss(params, ids, targets, probe)
    loss, (grads, seen) = jax.value_and_grad(loss_of, (0, 1))(params, probe())
    path_norms(seen)                # PathNorms(a=…, b=…, total=…, cosine=…)
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tiewise.core.backends import PathNorms


def probe() -> Array:
    """Return the argument whose gradient `path_norms` reads: ‖A‖², ‖B‖² and A·B of one lookup."""
    return jnp.zeros(3, jnp.float32)


def enter(
    table: Array, ids: Array, probe: Array | None = None, *, stopped: int | None = None, alpha: float = 1.0
) -> tuple[Array, Array]:
    """Look up `ids` [...] in `table` [V, E] and hand the table on.

    Several lookups of one table chain: `enter(W', more_ids)`. A probe belongs to one lookup of one backward pass:
    summed over several (a scan, gradient accumulation) it holds sums of squares, not squares of sums.

    Args:
        table, ids, probe: as above.
        stopped: row that receives no gradient from either path.
        alpha: factor on the lookup path.

    Returns:
        rows [..., E] and the table to use from here on. A number outside the table gives a row of nan.
    """
    return _enter(stopped, alpha, table, jnp.asarray(ids), probe)


def path_norms(seen: Any) -> PathNorms:
    """Norms of both paths and their cosine, from the gradient of a `probe`."""
    a2, b2, ab = (float(x) for x in seen)
    a, b = math.sqrt(a2), math.sqrt(b2)
    return PathNorms(a, b, math.sqrt(max(a2 + b2 + 2 * ab, 0.0)), ab / (a * b) if a and b else math.nan)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _enter(stopped: int | None, alpha: float, table: Array, ids: Array, probe: Array | None) -> tuple[Array, Array]:
    return jnp.take(table, _row_of(ids, table), axis=0, mode="fill", fill_value=jnp.nan), table


def _enter_forward(stopped: int | None, alpha: float, table: Array, ids: Array, probe: Array | None) -> tuple[Any, Any]:
    return _enter(stopped, alpha, table, ids, probe), (ids, None if probe is None else True)


def _enter_backward(stopped: int | None, alpha: float, kept: Any, gradients: tuple[Array, Array]) -> tuple[Any, ...]:
    (ids, wanted), (row_grad, table_grad) = kept, gradients
    ids, rows = ids.reshape(-1), row_grad.reshape(-1, table_grad.shape[1])
    rows = rows if alpha == 1.0 else rows * alpha
    if stopped is not None:
        rows = jnp.where((ids == stopped)[:, None], 0, rows)
        table_grad = table_grad.at[stopped].set(0)
    ids = _row_of(ids, table_grad)
    both = table_grad.at[ids].add(rows.astype(table_grad.dtype), mode="drop")
    return both, None, None if wanted is None else _squares(ids, rows, table_grad)


_enter.defvjp(_enter_forward, _enter_backward)


def _row_of(ids: Array, table: Array) -> Array:
    """Rows of these numbers; of a negative one none, where indexing would count from the end."""
    ids = ids.astype(jnp.int32)
    return jnp.where(ids < 0, table.shape[0], ids)


def _squares(ids: Array, rows: Array, path_b: Array) -> Array:
    """‖A‖², ‖B‖², A·B [3] in fp32; rows of one token are summed before they are squared."""
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    distinct, where = jnp.unique(ids, return_inverse=True, size=ids.shape[0], fill_value=path_b.shape[0])
    path_a = jnp.zeros(rows.shape, wide).at[where.reshape(-1)].add(rows.astype(wide))
    beside = jnp.take(path_b, distinct, axis=0, mode="fill", fill_value=0).astype(wide)
    squares = [(path_a**2).sum(), (path_b.astype(wide) ** 2).sum(), (path_a * beside).sum()]
    return jnp.stack(squares).astype(jnp.float32)
