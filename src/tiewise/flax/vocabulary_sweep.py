"""The fused loss in JAX: a scan over chunks of tokens, gradients beside the loss, one [V, E] buffer.

For a chunk of n tokens with features h [n, E], logits z, s = Σ_j exp(z_j − m):

    ∂loss_i/∂z_j = c_i P_ij − q_i [j = t_i] − ε w_j / V      P = exp(z − m) / s
                                                             q = (1 − ε) w_t,  c = q + ε mean(w) + 2ζ lse
    dfeatures = (c/s) ∘ (e W) − q ∘ W[t]                      e = exp(z − m)
    dweight   = eᵀ((c/s) ∘ h) − scatter(t, q ∘ h)

so the exponentials are taken once, the row coefficients act on [n, E] factors, and the target's −1 never enters a
product: beside it the small probabilities would lose their last digits. With a soft-cap or label smoothing the
coefficients of all columns are multiplied out.

Padded rows of a table that is split over devices get a logit of −inf, so they are in no normaliser; a padded token of
the last chunk has the ignored target, so it is in no sum. Inside `shard_map` a gradient must vary over exactly the mesh
axes that its array varies over: `alike` sees to that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class Tensors(NamedTuple):
    """features [N, E], weight [V, E], targets [N]; bias [V] and class weights [V], or None."""

    features: Array
    weight: Array
    targets: Array
    bias: Array | None
    class_weight: Array | None


@dataclass(frozen=True)
class Problem:
    """Options of `linear_cross_entropy` in their checked form."""

    vocab: int  # V of the whole table, of which the weight at hand is one of equal parts where `axis` names a mesh axis
    chunk: int  # tokens
    scale: float
    softcap: float | None
    ignore_index: int
    smoothing: float
    z_loss: float
    axis: str | None


class SweptGradients(NamedTuple):
    """In fp32 (fp64 for fp64 inputs), shaped like features, weight and bias."""

    features: Array
    weight: Array
    bias: Array | None


def sweep(tensors: Tensors, problem: Problem, row_weight: Array | None) -> tuple[Array, SweptGradients | None]:
    """Run over all chunks.

    Returns:
        the loss of each token [N], and the gradients of Σ row_weight_i · loss_i; None where `row_weight` is None.
    """
    features, weight, targets, bias, _ = tensors
    n, chunk = len(targets), problem.chunk
    pieces = max(1, -(-n // chunk))
    lacking = pieces * chunk - n
    rows = jnp.pad(features, ((0, lacking), (0, 0))).reshape(pieces, chunk, -1)
    at = jnp.pad(targets, (0, lacking), constant_values=problem.ignore_index).reshape(pieces, chunk)
    part = _Part.of(tensors, problem)
    if row_weight is None:
        _, each = lax.scan(lambda carry, x: (carry, part.losses(*x)), None, (rows, at))
        return each.reshape(-1)[:n], None
    on = jnp.pad(row_weight.astype(part.wide), (0, lacking)).reshape(pieces, chunk)
    start = (_zeros_like(weight, part.wide), None if bias is None else _zeros_like(bias, part.wide))

    def step(carry: Any, x: tuple[Array, Array, Array]) -> Any:
        each, d_rows, d_weight, d_bias = part.differentiated(*x, carry)
        return (d_weight, d_bias), (each, d_rows)

    (d_weight, d_bias), (each, d_rows) = lax.scan(step, start, (rows, at, on))
    d_features = d_rows.reshape(-1, features.shape[1])[:n]
    if problem.axis is not None:
        d_features = lax.psum(d_features, problem.axis)
    return each.reshape(-1)[:n], SweptGradients(d_features, d_weight, d_bias)


def counted(tensors: Tensors, problem: Problem) -> Array:
    """Σ w_t over the tokens that count: their number where classes have no weights."""
    count = tensors.targets != problem.ignore_index
    return jnp.where(count, _Part.of(tensors, problem).of_class(tensors.targets), 0).sum()


class _Softmax(NamedTuple):
    """Unnormalised exponentials e [n, V], their sum s [n], lse [n]; logits after the soft-cap [n, V]."""

    e: Array
    s: Array
    lse: Array
    logits: Array


@dataclass(frozen=True)
class _Part:
    """One device's rows of the table, and the arithmetic of one chunk against them."""

    weight: Array
    bias: Array | None
    class_weight: Array | None
    problem: Problem
    kind: Any  # type of the products
    wide: Any  # type of everything else
    first: Array | int  # vocabulary number of the first row

    @classmethod
    def of(cls, tensors: Tensors, problem: Problem) -> _Part:
        kind, w = tensors.weight.dtype, tensors.class_weight
        wide = jnp.promote_types(kind, jnp.float32)
        first = 0 if problem.axis is None else lax.axis_index(problem.axis) * tensors.weight.shape[0]
        part = cls(tensors.weight, tensors.bias, None, problem, kind, wide, first)
        return part if w is None else replace(part, class_weight=jnp.where(part._real, w.astype(wide), 0))

    def losses(self, h: Array, t: Array) -> Array:
        """Loss of each token [n]; nan where the target is outside the vocabulary."""
        return self._losses(self._softmax(h), t)

    def differentiated(self, h: Array, t: Array, on: Array, carry: tuple[Array, Array | None]) -> Any:
        """(losses [n], gradient of the features [n, E] from these rows, the carried gradients with this chunk's)."""
        p, d_weight, d_bias = self.problem, *carry
        soft = self._softmax(h)
        each = self._losses(soft, t)
        on = jnp.where(t == p.ignore_index, 0, jnp.where(self._exists(t), on, jnp.nan))
        hit = (1 - p.smoothing) * self.of_class(t)
        c = on * (hit + self._spread + 2 * p.z_loss * soft.lse)
        q = on * hit
        row, here = self._row(t)
        if p.softcap is not None:
            q = q * (1 - (self._at(soft.logits, row) / p.softcap) ** 2)
        q = jnp.where(here, q, 0)
        matrix, factor = self._coefficients(soft, c, on)
        narrow, scaled = matrix.astype(self.kind), h.astype(self.wide) * p.scale
        d_rows = factor[:, None] * self._dot(narrow, self.weight, ((1,), (0,)))
        d_rows = p.scale * (d_rows - q[:, None] * self.weight[row].astype(self.wide))
        product = self._dot(narrow, (factor[:, None] * scaled).astype(self.kind), ((0,), (0,)))
        d_weight = (d_weight + product).at[row].add(-q[:, None] * scaled)
        if d_bias is not None:
            d_bias = (d_bias + factor @ matrix).at[row].add(-q)
        return each, d_rows, d_weight, d_bias

    def of_class(self, t: Array) -> Array | int:
        """w_t [n], or 1 where classes have no weights."""
        if self.class_weight is None:
            return 1
        row, here = self._row(t)
        return self._over(lax.psum, jnp.where(here, self.class_weight[row], 0))

    @property
    def _spread(self) -> Array | float:
        """ε mean(w)."""
        p = self.problem
        if self.class_weight is None or not p.smoothing:
            return p.smoothing
        return p.smoothing / p.vocab * self._over(lax.psum, self.class_weight.sum())

    def _softmax(self, h: Array) -> _Softmax:
        p = self.problem
        z = self._dot((h.astype(self.wide) * p.scale).astype(self.kind), self.weight, ((1,), (1,)))
        if self.bias is not None:
            z = z + self.bias.astype(self.wide)
        if p.softcap is not None:
            z = p.softcap * jnp.tanh(z / p.softcap)
        if self._padded:
            z = jnp.where(self._real, z, -jnp.inf)
        most = self._over(lax.pmax, jnp.maximum(z.max(1), jnp.finfo(self.wide).min))  # a part may be padding alone
        e = jnp.exp(z - most[:, None])
        s = self._over(lax.psum, e.sum(1))
        return _Softmax(e, s, most + jnp.log(s), z)

    def _losses(self, soft: _Softmax, t: Array) -> Array:
        p = self.problem
        row, here = self._row(t)
        logit = self._over(lax.psum, jnp.where(here, self._at(soft.logits, row), 0))
        each = (1 - p.smoothing) * self.of_class(t) * (soft.lse - logit)
        if p.smoothing:
            finite = jnp.where(self._real, soft.logits, 0) if self._padded else soft.logits
            weighted = finite if self.class_weight is None else finite * self.class_weight
            each = each + self._spread * soft.lse - p.smoothing / p.vocab * self._over(lax.psum, weighted.sum(1))
        if p.z_loss:
            each = each + p.z_loss * soft.lse**2
        return jnp.where(t == p.ignore_index, 0, jnp.where(self._exists(t), each, jnp.nan))

    def _coefficients(self, soft: _Softmax, c: Array, on: Array) -> tuple[Array, Array]:
        """Matrix [n, V] and row factors [n] whose product is ∂loss/∂product, the target's own term apart."""
        p = self.problem
        factor = c / soft.s
        if p.softcap is None and not p.smoothing:
            return soft.e, factor
        even = (on * (p.smoothing / p.vocab))[:, None]
        matrix = soft.e * factor[:, None] - (even if self.class_weight is None else even * self.class_weight)
        if p.softcap is not None:
            matrix = matrix * (1 - (soft.logits / p.softcap) ** 2)
        return (jnp.where(self._real, matrix, 0) if self._padded else matrix), jnp.ones_like(factor)

    @property
    def _padded(self) -> bool:
        """Whether any device has rows beyond the vocabulary."""
        parts = 1 if self.problem.axis is None else lax.psum(1, self.problem.axis)
        return self.weight.shape[0] * parts > self.problem.vocab

    @property
    def _real(self) -> Array:
        """[V] which of these rows are in the vocabulary."""
        return self.first + jnp.arange(self.weight.shape[0]) < self.problem.vocab

    def _row(self, t: Array) -> tuple[Array, Array]:
        """(row of each target among these rows, clipped to them; whether it is one of them)."""
        row = t - self.first
        return jnp.clip(row, 0, self.weight.shape[0] - 1), (row >= 0) & (row < self.weight.shape[0])

    def _exists(self, t: Array) -> Array:
        return (t >= 0) & (t < self.problem.vocab)

    def _over(self, collective: Any, x: Array) -> Array:
        return x if self.problem.axis is None else collective(x, self.problem.axis)

    def _dot(self, a: Array, b: Array, contracted: Any) -> Array:
        return lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=self.wide)

    @staticmethod
    def _at(matrix: Array, column: Array) -> Array:
        return jnp.take_along_axis(matrix, column[:, None], 1)[:, 0]


def alike(features: Array, *others: Array | None) -> list[Any]:
    """Let `others` vary over whatever the features vary over: a table's gradient is a sum over the batch axes."""
    return [None if x is None else _varying(x, _mesh_axes(features)) for x in others]


def _zeros_like(x: Array, dtype: Any) -> Array:
    """Zeros of another type that vary as `x` does."""
    return _varying(jnp.zeros(x.shape, dtype), _mesh_axes(x))


def _mesh_axes(x: Any) -> frozenset[str]:
    """Mesh axes along which devices hold different values of `x`; none outside `shard_map`."""
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)  # older versions of jax keep the set itself, as `vma`
    return frozenset(getattr(kind, "vma", ()) if manual is None else manual.varying)


def _varying(x: Array, axes: frozenset[str]) -> Array:
    """`x`, marked as varying over `axes` too; its gradient is summed over the axes that this adds."""
    new = tuple(sorted(axes - _mesh_axes(x)))
    return lax.pcast(x, new, to="varying") if new else x
