"""`linear_cross_entropy` for JAX: the loss of an output head without its logits.

It is the function of `ops/cross_entropy.py`, term by term and with its letters; `mean` divides by Σ_i w_t here too.

One scan over chunks of tokens gives the gradients beside the loss, in one [V, E] buffer. For a chunk of n tokens with
features h [n, E], logits z, s = Σ_j exp(z_j − m):

    ∂loss_i/∂z_j = c_i P_ij − q_i [j = t_i] − ε w_j / V      P = exp(z − m) / s
                                                             q = (1 − ε) w_t,  c = q + ε mean(w) + 2ζ lse
    dfeatures = (c/s) ∘ (e W) − q ∘ W[t]                      e = exp(z − m)
    dweight   = eᵀ((c/s) ∘ h) − scatter(t, q ∘ h)

so the exponentials are taken once, the row coefficients act on [n, E] factors, and the target's −1 never enters a
product: beside it the small probabilities would lose their last digits. With a soft-cap or label smoothing the
coefficients of all columns are multiplied out.

Padded rows of a table that is split over devices get a logit of −inf, so they are in no normaliser; a padded token of
the last chunk has the ignored target, so it is in no sum. Inside `shard_map` a gradient must vary over exactly the mesh
axes that its array varies over: `_varying` sees to that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tiewise.core.backends import LossOptions, check_loss, check_words, chunk_rows
from tiewise.core.errors import UnsupportedError


@dataclass(frozen=True)
class FlaxLossOptions(LossOptions):
    """Options of `linear_cross_entropy`; each may also be passed to it by keyword."""

    axis: str | None = None  # in `shard_map`, the mesh axis that rows of weight, bias and class_weight are split over
    vocab: int | None = None  # V where the rows are more, because they must split evenly: the rest is masked


_DEFAULT = FlaxLossOptions()


def linear_cross_entropy(
    features: Array,
    weight: Array,
    targets: Array,
    bias: Array | None = None,
    options: FlaxLossOptions = _DEFAULT,
    **overrides: Any,
) -> Array:
    """Cross-entropy of `features @ weightᵀ` against `targets`, in chunks of tokens; the [N, V] logits never exist.

    `mean` and `sum` compute the gradients in the forward pass (three matrix products, none repeated), `none` computes
    each chunk again in the backward pass (four). bf16 and fp16 inputs multiply in their own type and accumulate in
    fp32. Works under `jit`, `grad`, `vmap`, `shard_map` (see `axis`) and with sharded arrays under `jit`.

    Args:
        features: [..., E], any floating type.
        weight: [V, E].
        targets: [...] class indices, or `ignore_index`.
        bias: [V] or None.
        options: see `FlaxLossOptions`.
        **overrides: single options by name, e.g. `softcap=30.0, reduction="sum"`.

    Returns:
        fp32 scalar (fp64 for fp64 inputs), or an array shaped like `targets` for `reduction="none"`. A target outside
        the vocabulary gives nan where targets are traced, as under `jit`: there is nobody to raise an error.

    Raises:
        ValueError: shapes that do not meet, an option out of range.
        IndexError: a target outside [0, V), where targets are not traced.
        UnsupportedError: features or a weight of whole or complex numbers, probability targets.
    """
    o = replace(options, **overrides) if overrides else options
    features, weight, targets = jnp.asarray(features), jnp.asarray(weight), as_array(targets)
    if targets.dtype == jnp.bool_ or jnp.issubdtype(targets.dtype, jnp.complexfloating):
        raise UnsupportedError(f"linear_cross_entropy of targets of type {targets.dtype}", "pass class indices")
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        fix = "pass class indices, or compute the logits and use optax.softmax_cross_entropy"
        raise UnsupportedError("linear_cross_entropy takes no probability targets", fix)
    check_loss(features, weight, targets, bias, o, lambda x: jnp.issubdtype(x.dtype, jnp.floating))
    if o.backend is not None:
        raise ValueError("backend is PyTorch's; leave it out here")
    rows = weight.shape[0] * (1 if o.axis is None else lax.psum(1, o.axis))
    check_words(rows)
    if o.vocab is not None and not 1 <= o.vocab <= rows:
        raise ValueError(f"vocab = {o.vocab} of a table of {rows} rows; need 1 ≤ vocab ≤ rows")
    vocab = rows if o.vocab is None else o.vocab
    note = f" (ignore_index={o.ignore_index})"
    check_range(targets, vocab, "target {} is outside the vocabulary of {}" + note, o.ignore_index)
    kind = jnp.promote_types(features.dtype, weight.dtype)  # the wider of the two, in which they are multiplied
    flat, table = features.reshape(targets.size, features.shape[-1]).astype(kind), weight.astype(kind)
    # signed, so that ignored and impossible targets stay apart from the first rows
    at = jnp.asarray(targets).reshape(-1).astype(jnp.int32)
    bias = None if bias is None else bias.astype(_wide(kind))
    w = None if o.class_weight is None else lax.stop_gradient(jnp.asarray(o.class_weight))
    # a table's gradient is a sum over the batch axes: let all vary over whatever the features vary over
    tensors = jax.tree.map(lambda x: _varying(x, flat), _LossInputs(flat, table, at, bias, w))
    chunk = chunk_rows(
        at.size, _numbers_held(vocab, kind, o), "cpu" if jax.default_backend() == "cpu" else "cuda", o.chunk
    )
    loss = _loss(replace(o, chunk=max(1, min(chunk, at.size)), class_weight=None), tensors)
    return loss.reshape(targets.shape) if o.reduction == "none" else loss


def _numbers_held(vocab: int, kind: Any, o: FlaxLossOptions) -> int:
    """Memory per token in fp32 numbers, as XLA allocates it: logits, a narrow copy, and the soft-cap's derivative."""
    wide = jnp.dtype(_wide(kind)).itemsize
    narrow = jnp.dtype(kind).itemsize % wide  # 0 where the products are as wide as their sums
    return -(-vocab * (wide * (1 if o.softcap is None else 2) + narrow) // 4)


def as_array(numbers: Any) -> Any:
    """Return lists of token numbers as numpy arrays; arrays and tracers as they are."""
    return numbers if isinstance(numbers, jax.Array) else np.asarray(numbers)


def check_range(numbers: Any, limit: int, message: str, ignored: int | None = None) -> None:
    """Refuse token numbers outside [0, limit), `ignored` apart, with an IndexError; traced ones cannot be looked at.

    `message` has two places, for the first number outside and for `limit`.
    """
    if isinstance(numbers, jax.core.Tracer) or not np.size(numbers):
        return
    seen = np.asarray(numbers)
    wrong = (seen < 0) | (seen >= limit)
    outside = seen[wrong if ignored is None else wrong & (seen != ignored)]
    if outside.size:
        raise IndexError(message.format(int(outside.flat[0]), limit))


class _LossInputs(NamedTuple):
    """features [N, E], weight [V, E], targets [N]; bias [V] and class weights [V], or None."""

    features: Array
    weight: Array
    targets: Array
    bias: Array | None
    class_weight: Array | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(o: FlaxLossOptions, tensors: _LossInputs) -> Array:
    each, _ = _sweep(o, tensors, None)
    return each if o.reduction == "none" else each.sum() * _factor(o, tensors)


def _loss_forward(o: FlaxLossOptions, tensors: _LossInputs) -> tuple[Array, Any]:
    if o.reduction == "none":  # how much each token's gradient counts is known in the backward pass alone
        return _loss(o, tensors), tensors
    factor = _factor(o, tensors)
    each, found = _sweep(o, tensors, jnp.broadcast_to(factor, tensors.targets.shape))
    return each.sum() * factor, (found, jnp.empty(0, tensors.weight.dtype))  # JAX keeps no type, but an empty array


def _loss_backward(o: FlaxLossOptions, kept: Any, upstream: Array) -> tuple[_LossInputs]:
    if o.reduction == "none":
        (features, weight, bias), kind = _sweep(o, kept, upstream)[1], kept.weight.dtype
    else:
        (features, weight, bias), kind = (None if x is None else x * upstream for x in kept[0]), kept[1].dtype
    return (_LossInputs(features.astype(kind), weight.astype(kind), None, bias, None),)


_loss.defvjp(_loss_forward, _loss_backward)


def _factor(o: FlaxLossOptions, tensors: _LossInputs) -> Array:
    """1 / Σ w_t over the tokens that count, 1 where that is 0; 1 for a sum."""
    counts = tensors.targets != o.ignore_index
    whole = jnp.where(counts, _Part(o, tensors).of_class(tensors.targets), 0).sum() if o.reduction == "mean" else 1
    return 1 / jnp.where(whole > 0, whole, 1).astype(_wide(tensors.weight.dtype))


def _sweep(o: FlaxLossOptions, tensors: _LossInputs, row_weight: Array | None) -> tuple[Array, Any]:
    """Run over all chunks.

    Returns:
        the loss of each token [N], and in fp32 (fp64 for fp64 inputs) the gradients of Σ row_weight_i · loss_i by
        features, weight and bias; None where `row_weight` is None.
    """
    features, weight, targets, bias, _ = tensors
    n, chunk = len(targets), o.chunk or 1
    pieces = max(1, -(-n // chunk))
    lacking = pieces * chunk - n
    rows = jnp.pad(features, ((0, lacking), (0, 0))).reshape(pieces, chunk, features.shape[1])
    at = jnp.pad(targets, (0, lacking), constant_values=o.ignore_index).reshape(pieces, chunk)
    part = _Part(o, tensors)
    if row_weight is None:
        _, each = lax.scan(lambda carry, x: (carry, part.losses(part.softmax(x[0]), x[1])), None, (rows, at))
        return each.reshape(-1)[:n], None
    on = jnp.pad(row_weight.astype(part.wide), (0, lacking)).reshape(pieces, chunk)
    zeros = (None if x is None else _varying(jnp.zeros(x.shape, part.wide), x) for x in (weight, bias))
    (d_weight, d_bias), (each, d_rows) = lax.scan(part.differentiated, tuple(zeros), (rows, at, on))
    d_features = d_rows.reshape(pieces * chunk, features.shape[1])[:n]
    d_features = d_features if o.axis is None else lax.psum(d_features, o.axis)
    return each.reshape(-1)[:n], (d_features, d_weight, d_bias)


class _Softmax(NamedTuple):
    """Unnormalised exponentials e [n, V], their sum s [n], lse [n]; logits after the soft-cap [n, V]."""

    e: Array
    s: Array
    lse: Array
    logits: Array


class _Part:
    """One device's rows of the table, and the arithmetic of one chunk against them."""

    def __init__(self, o: FlaxLossOptions, tensors: _LossInputs) -> None:
        self.o, self.weight, self.bias, w = o, tensors.weight, tensors.bias, tensors.class_weight
        self.kind, self.wide = self.weight.dtype, _wide(self.weight.dtype)  # of the products; of everything else
        rows, parts = self.weight.shape[0], 1 if o.axis is None else lax.psum(1, o.axis)
        self.first = 0 if o.axis is None else lax.axis_index(o.axis) * rows  # vocabulary number of the first row
        self.vocab = o.vocab or rows * parts
        self.real = self.first + jnp.arange(rows) < self.vocab  # [V] which of these rows are in the vocabulary
        self.padded = rows * parts > self.vocab  # whether any device has others
        weights = self.class_weight = None if w is None else jnp.where(self.real, w.astype(self.wide), 0)
        self.even = o.label_smoothing / self.vocab  # ε / V
        self.spread = o.label_smoothing  # ε mean(w)
        if weights is not None and o.label_smoothing:
            self.spread = self.even * self._over(lax.psum, weights.sum())

    def softmax(self, h: Array) -> _Softmax:
        """Logits of features [n, E] and what follows from them."""
        o = self.o
        z = self._dot((h.astype(self.wide) * o.scale).astype(self.kind), self.weight, ((1,), (1,)))
        z = z if self.bias is None else z + self.bias
        z = z if o.softcap is None else o.softcap * jnp.tanh(z / o.softcap)
        z = jnp.where(self.real, z, -jnp.inf) if self.padded else z
        most = self._over(lax.pmax, jnp.maximum(z.max(1), jnp.finfo(self.wide).min))  # a part may be padding alone
        e = jnp.exp(z - most[:, None])
        s = self._over(lax.psum, e.sum(1))
        return _Softmax(e, s, most + jnp.log(s), z)

    def losses(self, soft: _Softmax, t: Array) -> Array:
        """Loss of each token [n]; nan where the target is outside the vocabulary."""
        o, (row, here) = self.o, self._row(t)
        logit = self._over(lax.psum, jnp.where(here, _at(soft.logits, row), 0))
        each = (1 - o.label_smoothing) * self.of_class(t) * (soft.lse - logit)
        if o.label_smoothing:
            finite = jnp.where(self.real, soft.logits, 0) if self.padded else soft.logits
            weighted = finite if self.class_weight is None else finite * self.class_weight
            each = each + self.spread * soft.lse - self.even * self._over(lax.psum, weighted.sum(1))
        each = each + o.z_loss * soft.lse**2 if o.z_loss else each
        return self._where_counted(t, each)

    def differentiated(self, carry: tuple[Array, Array | None], chunk: tuple[Array, Array, Array]) -> Any:
        """(the carried gradients with this chunk's, (losses [n], gradient of the features [n, E] from these rows)).

        A chunk is features [n, E], targets [n], and how much each loss counts [n].
        """
        o, (d_weight, d_bias), (h, t, on) = self.o, carry, chunk
        soft = self.softmax(h)
        on = self._where_counted(t, on)
        hit = (1 - o.label_smoothing) * self.of_class(t)
        c, q, (row, here) = on * (hit + self.spread + 2 * o.z_loss * soft.lse), on * hit, self._row(t)
        matrix, factor = soft.e, c / soft.s  # their product is ∂loss/∂product, the target's own term apart
        if o.softcap is not None or o.label_smoothing:
            even = (on * self.even)[:, None]
            matrix = matrix * factor[:, None] - (even if self.class_weight is None else even * self.class_weight)
            factor = jnp.ones_like(factor)
            if o.softcap is not None:
                matrix = matrix * (1 - (soft.logits / o.softcap) ** 2)
                q = q * (1 - (_at(soft.logits, row) / o.softcap) ** 2)
            matrix = jnp.where(self.real, matrix, 0) if self.padded else matrix
        q = jnp.where(here, q, 0)
        narrow, scaled = matrix.astype(self.kind), h.astype(self.wide) * o.scale
        d_rows = factor[:, None] * self._dot(narrow, self.weight, ((1,), (0,)))
        d_rows = o.scale * (d_rows - q[:, None] * self.weight[row].astype(self.wide))
        product = self._dot(narrow, (factor[:, None] * scaled).astype(self.kind), ((0,), (0,)))
        d_weight = (d_weight + product).at[row].add(-q[:, None] * scaled)
        d_bias = None if d_bias is None else (d_bias + factor @ matrix).at[row].add(-q)
        return (d_weight, d_bias), (self.losses(soft, t), d_rows)

    def of_class(self, t: Array) -> Array | int:
        """w_t [n], or 1 where classes have no weights."""
        if self.class_weight is None:
            return 1
        row, here = self._row(t)
        return self._over(lax.psum, jnp.where(here, self.class_weight[row], 0))

    def _row(self, t: Array) -> tuple[Array, Array]:
        """(row of each target among these rows, clipped to them; whether it is one of them)."""
        row = t - self.first
        return jnp.clip(row, 0, self.weight.shape[0] - 1), (row >= 0) & (row < self.weight.shape[0])

    def _where_counted(self, t: Array, x: Array) -> Array:
        """0 where a target is ignored, nan where it is outside the vocabulary."""
        return jnp.where(t == self.o.ignore_index, 0, jnp.where((t >= 0) & (t < self.vocab), x, jnp.nan))

    def _over(self, collective: Any, x: Array) -> Array:
        return x if self.o.axis is None else collective(x, self.o.axis)

    def _dot(self, a: Array, b: Array, contracted: Any) -> Array:
        return lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=self.wide)


def _wide(kind: Any) -> Any:
    """Type of sums over products of this type."""
    return jnp.promote_types(kind, jnp.float32)


def _at(matrix: Array, column: Array) -> Array:
    return jnp.take_along_axis(matrix, column[:, None], 1)[:, 0]


def _varying(x: Array, like: Array) -> Array:
    """`x`, marked as varying over the mesh axes of `like` too; its gradient is summed over the axes that this adds."""
    new = tuple(sorted(_mesh_axes(like) - _mesh_axes(x)))
    return lax.pcast(x, new, to="varying") if new else x


def _mesh_axes(x: Any) -> frozenset[str]:
    """Mesh axes along which devices hold different values of `x`; none outside `shard_map`."""
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)  # older versions of jax keep the set itself, as `vma`
    return frozenset(getattr(kind, "vma", ()) if manual is None else manual.varying)
