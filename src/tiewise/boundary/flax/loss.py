"""`linear_cross_entropy` for JAX: the loss of an output head without its logits.

It is the function of `ops/cross_entropy.py`, term by term and with its letters; `mean` divides by Σ_i w_t here too.

One scan over chunks of tokens gives the gradients together with the loss, in one [V, E] buffer. For a chunk of n
tokens with features h [n, E], logits z, s = Σ_j exp(z_j − m):

    ∂loss_i/∂z_j = c_i P_ij − q_i [j = t_i] − ε w_j / V      P = exp(z − m) / s
                                                             q = (1 − ε) w_t,  c = q + ε mean(w) + 2ζ lse
    dfeatures = (c/s) ∘ (e W) − q ∘ W[t]                      e = exp(z − m)
    dweight   = eᵀ((c/s) ∘ h) − scatter(t, q ∘ h)

so the exponentials are taken once, the row coefficients act on [n, E] factors, and the target's −1 never enters a
product: next to it the small probabilities would lose their last digits. With a soft-cap or label smoothing the
coefficients of all columns are multiplied out.

Padded rows of a table that is split over devices get a logit of −inf, so they are in no normaliser; a padded token of
the last chunk has the ignored target, so it is in no sum. Inside `shard_map` a gradient must vary over exactly the mesh
axes that its array varies over: `_varying` sees to that.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Return the cross-entropy of `features @ weightᵀ` against `targets`; the [N, V] logits never exist.

    It is computed in chunks of tokens. `mean` and `sum` compute the gradients in the forward pass (three matrix
    products, none repeated), `none` computes each chunk again in the backward pass (four). bf16 and fp16 inputs
    multiply in their own type and accumulate in fp32. It works under `jit`, `grad`, `vmap`, `shard_map` (see `axis`)
    and with sharded arrays under `jit`.

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
    _check_target_type(targets.dtype)
    check_loss(features, weight, targets, bias, o, lambda x: jnp.issubdtype(x.dtype, jnp.floating))
    if o.backend is not None:
        raise ValueError("backend is PyTorch's; leave it out here")
    vocab = _vocabulary(weight, o)
    message = "target {} is outside the vocabulary of {}" + f" (ignore_index={o.ignore_index})"
    check_range(targets, vocab, message, o.ignore_index)
    tensors = _loss_inputs(features, weight, targets, bias, o)
    numbers = _numbers_held(vocab, tensors.weight.dtype, o)
    chunk = chunk_rows(targets.size, numbers, jax.default_backend(), o.chunk)
    loss = _loss(replace(o, chunk=max(1, min(chunk, targets.size)), class_weight=None), tensors)
    if o.reduction == "none":
        return loss.reshape(targets.shape)
    return loss


def _check_target_type(dtype: Any) -> None:
    """Refuse targets that are no class indices."""
    if dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.complexfloating):
        raise UnsupportedError(f"linear_cross_entropy of targets of type {dtype}", "pass class indices")
    if not jnp.issubdtype(dtype, jnp.integer):
        fix = "pass class indices, or compute the logits and use optax.softmax_cross_entropy"
        raise UnsupportedError("linear_cross_entropy takes no probability targets", fix)


def _vocabulary(weight: Array, o: FlaxLossOptions) -> int:
    """Return V of all devices together, without padded rows.

    A ValueError where the table lacks rows for it.
    """
    rows: int = weight.shape[0] * _devices_along(o.axis)
    check_words(rows)
    if o.vocab is None:
        return rows
    if not 1 <= o.vocab <= rows:
        raise ValueError(f"vocab = {o.vocab} of a table of {rows} rows; need 1 ≤ vocab ≤ rows")
    return o.vocab


def _devices_along(axis: str | None) -> int:
    """Return the number of devices along a mesh axis of `shard_map`; 1 without one."""
    if axis is None:
        return 1
    devices: int = lax.psum(1, axis)  # of a constant: a number while JAX traces
    return devices


class _LossInputs(NamedTuple):
    """features [N, E], weight [V, E], targets [N]; bias [V] and class weights [V], or None."""

    features: Array
    weight: Array
    targets: Array
    bias: Array | None
    class_weight: Array | None


def _loss_inputs(features: Array, weight: Array, targets: Any, bias: Array | None, o: FlaxLossOptions) -> _LossInputs:
    """Return the inputs flattened over tokens, in the types of the products and sums."""
    kind = jnp.promote_types(features.dtype, weight.dtype)  # the wider of the two, in which they are multiplied
    features = features.reshape(targets.size, features.shape[-1]).astype(kind)
    weight = weight.astype(kind)
    # signed, so that ignored and impossible targets stay apart from the first rows
    targets = jnp.asarray(targets).reshape(-1).astype(jnp.int32)
    if bias is not None:
        bias = bias.astype(_wide(kind))
    class_weight = None
    if o.class_weight is not None:
        class_weight = lax.stop_gradient(jnp.asarray(o.class_weight))
    tensors = _LossInputs(features, weight, targets, bias, class_weight)
    # a table's gradient is a sum over the batch axes: let all vary over whatever the features vary over
    varying: _LossInputs = jax.tree.map(lambda x: _varying(x, features), tensors)
    return varying


def _numbers_held(vocab: int, kind: Any, o: FlaxLossOptions) -> int:
    """Return the memory of a token in fp32 numbers, as XLA allocates it.

    It holds the logits, a narrow copy of them, and the soft-cap's derivative.
    """
    wide: int = jnp.dtype(_wide(kind)).itemsize
    narrow: int = jnp.dtype(kind).itemsize % wide  # 0 where the products are as wide as their sums
    wide_rows = 1 if o.softcap is None else 2
    return -(-vocab * (wide * wide_rows + narrow) // 4)


def as_array(numbers: Any) -> Any:
    """Return lists of token numbers as numpy arrays; arrays and tracers as they are."""
    return numbers if isinstance(numbers, jax.Array) else np.asarray(numbers)


def check_range(numbers: Any, limit: int, message: str, ignored: int | None = None) -> None:
    """Refuse token numbers outside [0, limit), except `ignored`, with an IndexError; traced ones have no values.

    `message` has two places, for the first number outside and for `limit`.
    """
    if isinstance(numbers, jax.core.Tracer) or not np.size(numbers):
        return
    values = np.asarray(numbers)
    is_outside = (values < 0) | (values >= limit)
    if ignored is not None:
        is_outside &= values != ignored
    outside = values[is_outside]
    if outside.size:
        raise IndexError(message.format(int(outside.flat[0]), limit))


# loss and gradient for autograd


class _Gradients(NamedTuple):
    """Gradients by features [N, E], weight [V, E] and bias [V] (None without one), in fp32 or fp64."""

    features: Array
    weight: Array
    bias: Array | None


class _Reduced(NamedTuple):
    """The forward pass of a mean or a sum leaves this for the backward pass."""

    gradients: _Gradients
    of_weight_type: Array  # empty: JAX keeps no type for the backward pass, but an array


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(o: FlaxLossOptions, tensors: _LossInputs) -> Array:
    """Return the losses [N], or their mean or sum."""
    losses, _ = _sweep(o, tensors, None)
    if o.reduction == "none":
        return losses
    return losses.sum() * _reduction_factor(o, tensors)


def _loss_forward(o: FlaxLossOptions, tensors: _LossInputs) -> tuple[Array, _LossInputs | _Reduced]:
    """Return the loss and what the backward pass needs."""
    if o.reduction == "none":  # how much each token's gradient counts is known in the backward pass alone
        return _loss(o, tensors), tensors
    factor = _reduction_factor(o, tensors)
    losses, gradients = _sweep(o, tensors, jnp.broadcast_to(factor, tensors.targets.shape))
    assert gradients is not None, "a sweep with row weights has gradients"
    return losses.sum() * factor, _Reduced(gradients, jnp.empty(0, tensors.weight.dtype))


def _loss_backward(o: FlaxLossOptions, saved: _LossInputs | _Reduced, upstream: Array) -> tuple[_LossInputs]:
    """Return the gradients, of features and weight in their own type."""
    if isinstance(saved, _Reduced):
        gradients = jax.tree.map(lambda x: x * upstream, saved.gradients)
        kind = saved.of_weight_type.dtype
    else:
        _, gradients = _sweep(o, saved, upstream)
        kind = saved.weight.dtype
    features, weight, bias = gradients
    return (_LossInputs(features.astype(kind), weight.astype(kind), None, bias, None),)


_loss.defvjp(_loss_forward, _loss_backward)


def _reduction_factor(o: FlaxLossOptions, tensors: _LossInputs) -> Array:
    """Return the factor that turns the sum of the losses into their `reduction`.

    It is 1 for a sum; for a mean it is 1 / Σ w_t over the tokens that count, or 1 where Σ w_t is 0.
    """
    is_counted = tensors.targets != o.ignore_index
    total: Array | int = 1
    if o.reduction == "mean":
        class_weights = _Part(o, tensors).of_class(tensors.targets)
        total = jnp.where(is_counted, class_weights, 0).sum()
    return 1 / jnp.where(total > 0, total, 1).astype(_wide(tensors.weight.dtype))


def _sweep(o: FlaxLossOptions, tensors: _LossInputs, row_weight: Array | None) -> tuple[Array, _Gradients | None]:
    """Run over all chunks.

    Returns:
        the loss of each token [N], and in fp32 (fp64 for fp64 inputs) the gradients of Σ row_weight_i · loss_i by
        features, weight and bias; None where `row_weight` is None.
    """
    features, weight, targets, bias, _ = tensors
    n, width = features.shape
    chunk = o.chunk or 1
    pieces = max(1, -(-n // chunk))
    lacking = pieces * chunk - n
    rows = jnp.pad(features, ((0, lacking), (0, 0))).reshape(pieces, chunk, width)
    at = jnp.pad(targets, (0, lacking), constant_values=o.ignore_index).reshape(pieces, chunk)
    part = _Part(o, tensors)
    if row_weight is None:
        _, losses = lax.scan(part.undifferentiated, None, (rows, at))
        return losses.reshape(-1)[:n], None
    counted = jnp.pad(row_weight.astype(part.wide), (0, lacking)).reshape(pieces, chunk)
    zeros = part.zero_gradients(weight), part.zero_gradients(bias)
    (d_weight, d_bias), (losses, d_rows) = lax.scan(part.differentiated, zeros, (rows, at, counted))
    d_features = d_rows.reshape(pieces * chunk, width)[:n]
    if o.axis is not None:
        d_features = lax.psum(d_features, o.axis)
    return losses.reshape(-1)[:n], _Gradients(d_features, d_weight, d_bias)


# one chunk


class _Softmax(NamedTuple):
    """Unnormalised exponentials e [n, V], their sum s [n], lse [n]; logits after the soft-cap [n, V]."""

    e: Array
    s: Array
    lse: Array
    logits: Array


class _Slopes(NamedTuple):
    """∂loss/∂product of a chunk, in parts: factor_i · matrix_ij, and −q_i at the target."""

    matrix: Array  # [n, V]
    factor: Array  # [n]
    q: Array  # [n], 0 where the target is not among these rows


class _Row(NamedTuple):
    """Rows [n] of targets in one device's part of the table."""

    index: Array  # clipped to the rows of the part
    is_here: Array  # whether the target is one of them


class _Part:
    """One device's rows of the table, and the arithmetic of one chunk against them."""

    def __init__(self, o: FlaxLossOptions, tensors: _LossInputs) -> None:
        """Find the place of these rows in the vocabulary."""
        self.o, self.weight, self.bias = o, tensors.weight, tensors.bias
        self.kind = self.weight.dtype  # of the products
        self.wide = _wide(self.kind)  # of everything else
        rows, all_rows = self.weight.shape[0], self.weight.shape[0] * _devices_along(o.axis)
        self.first: Array | int = 0  # vocabulary number of the first row
        if o.axis is not None:
            self.first = lax.axis_index(o.axis) * rows
        self.vocab = o.vocab or all_rows
        self.real = self.first + jnp.arange(rows) < self.vocab  # [V] which of these rows are in the vocabulary
        self.padded = all_rows > self.vocab  # whether any device has others
        self.class_weight: Array | None = None
        self.even = o.label_smoothing / self.vocab  # ε / V
        self.spread: Array | float = o.label_smoothing  # ε mean(w)
        if tensors.class_weight is not None:
            self.class_weight = jnp.where(self.real, tensors.class_weight.astype(self.wide), 0)
            if o.label_smoothing:
                self.spread = self.even * self._over_devices(lax.psum, self.class_weight.sum())

    def zero_gradients(self, x: Array | None) -> Array | None:
        """Return zeros to which the gradients of `x` are added; None for None."""
        if x is None:
            return None
        return _varying(jnp.zeros(x.shape, self.wide), x)

    def softmax(self, h: Array) -> _Softmax:
        """Return the logits of features [n, E], and their softmax in parts."""
        z = self._logits(h)
        smallest = jnp.finfo(self.wide).min  # a part may be padding alone
        most = self._over_devices(lax.pmax, jnp.maximum(z.max(1), smallest))
        e = jnp.exp(z - most[:, None])
        s = self._over_devices(lax.psum, e.sum(1))
        return _Softmax(e, s, most + jnp.log(s), z)

    def _logits(self, h: Array) -> Array:
        """Return the logits [n, V] of features [n, E], −inf in padded rows."""
        o = self.o
        z = self._dot((h.astype(self.wide) * o.scale).astype(self.kind), self.weight, ((1,), (1,)))
        if self.bias is not None:
            z = z + self.bias
        if o.softcap is not None:
            z = o.softcap * jnp.tanh(z / o.softcap)
        if self.padded:
            z = jnp.where(self.real, z, -jnp.inf)
        return z

    def losses(self, soft: _Softmax, t: Array) -> Array:
        """Return the loss of each token [n]; nan where the target is outside the vocabulary."""
        o, row = self.o, self._row(t)
        logit = self._over_devices(lax.psum, jnp.where(row.is_here, _at(soft.logits, row.index), 0))
        losses = (1 - o.label_smoothing) * self.of_class(t) * (soft.lse - logit)
        if o.label_smoothing:
            weighted = self._without_padding(soft.logits)
            if self.class_weight is not None:
                weighted = weighted * self.class_weight
            losses = losses + self.spread * soft.lse - self.even * self._over_devices(lax.psum, weighted.sum(1))
        if o.z_loss:
            losses = losses + o.z_loss * soft.lse**2
        return self._where_counted(t, losses)

    def undifferentiated(self, carry: None, chunk: tuple[Array, Array]) -> tuple[None, Array]:
        """Return the losses [n] of a chunk: features [n, E] and targets [n]."""
        h, t = chunk
        return carry, self.losses(self.softmax(h), t)

    def differentiated(
        self, carry: tuple[Array, Array | None], chunk: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array | None], tuple[Array, Array]]:
        """Add a chunk's gradients to the carried ones of weight and bias.

        A chunk is features [n, E], targets [n], and how much each loss counts [n]. With the carried gradients it
        returns the losses [n], and the gradient of the features [n, E] from these rows.
        """
        o, (d_weight, d_bias), (h, t, counted) = self.o, carry, chunk
        soft = self.softmax(h)
        matrix, factor, q = self._slopes(soft, t, counted)
        row = self._row(t).index
        narrow, scaled = matrix.astype(self.kind), h.astype(self.wide) * o.scale
        d_rows = factor[:, None] * self._dot(narrow, self.weight, ((1,), (0,)))
        d_rows = o.scale * (d_rows - q[:, None] * self.weight[row].astype(self.wide))
        product = self._dot(narrow, (factor[:, None] * scaled).astype(self.kind), ((0,), (0,)))
        d_weight = (d_weight + product).at[row].add(-q[:, None] * scaled)
        if d_bias is not None:
            d_bias = (d_bias + factor @ matrix).at[row].add(-q)
        return (d_weight, d_bias), (self.losses(soft, t), d_rows)

    def _slopes(self, soft: _Softmax, t: Array, counted: Array) -> _Slopes:
        """Return ∂loss/∂product of a chunk, each loss multiplied by `counted` [n]."""
        o = self.o
        counted = self._where_counted(t, counted)
        hit = (1 - o.label_smoothing) * self.of_class(t)
        c = counted * (hit + self.spread + 2 * o.z_loss * soft.lse)
        q = counted * hit
        row = self._row(t)
        matrix, factor = soft.e, c / soft.s
        if o.softcap is not None or o.label_smoothing:  # each column has a coefficient too: multiply all out
            even = (counted * self.even)[:, None]
            if self.class_weight is not None:
                even = even * self.class_weight
            matrix = matrix * factor[:, None] - even
            factor = jnp.ones_like(factor)
            if o.softcap is not None:
                matrix = matrix * (1 - (soft.logits / o.softcap) ** 2)
                q = q * (1 - (_at(soft.logits, row.index) / o.softcap) ** 2)
            matrix = self._without_padding(matrix)
        return _Slopes(matrix, factor, jnp.where(row.is_here, q, 0))

    def of_class(self, t: Array) -> Array | int:
        """Return w_t [n], or 1 where classes have no weights."""
        if self.class_weight is None:
            return 1
        row = self._row(t)
        return self._over_devices(lax.psum, jnp.where(row.is_here, self.class_weight[row.index], 0))

    def _row(self, t: Array) -> _Row:
        """Return the rows of targets among these rows."""
        row, rows = t - self.first, self.weight.shape[0]
        return _Row(jnp.clip(row, 0, rows - 1), (row >= 0) & (row < rows))

    def _where_counted(self, t: Array, x: Array) -> Array:
        """Return 0 where a target is ignored, nan where it is outside the vocabulary, `x` elsewhere."""
        return jnp.where(t == self.o.ignore_index, 0, jnp.where((t >= 0) & (t < self.vocab), x, jnp.nan))

    def _without_padding(self, matrix: Array) -> Array:
        """Return a matrix [n, V] with 0 in the columns of padded rows."""
        return jnp.where(self.real, matrix, 0) if self.padded else matrix

    def _over_devices(self, collective: Callable[[Array, str], Array], x: Array) -> Array:
        """Return the sum or maximum over the parts of the table.

        It is `x` itself where one device has the whole table.
        """
        return x if self.o.axis is None else collective(x, self.o.axis)

    def _dot(self, a: Array, b: Array, contracted: tuple[tuple[int], tuple[int]]) -> Array:
        """Multiply two matrices over an axis of each, and sum in the wide type."""
        return lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=self.wide)


def _wide(kind: Any) -> Any:
    """Return the type of sums over products of this type."""
    return jnp.promote_types(kind, jnp.float32)


def _at(matrix: Array, column: Array) -> Array:
    """Return one column's entry of each row [n]."""
    return jnp.take_along_axis(matrix, column[:, None], 1)[:, 0]


def _varying(x: Array, like: Array) -> Array:
    """Mark `x` as varying over the mesh axes of `like` too.

    Its gradient is summed over the axes that this adds.
    """
    new = tuple(sorted(_mesh_axes(like) - _mesh_axes(x)))
    return lax.pcast(x, new, to="varying") if new else x


def _mesh_axes(x: Any) -> frozenset[str]:
    """Return the mesh axes along which devices hold different values of `x`; none outside `shard_map`."""
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)
    if manual is None:  # older versions of jax keep the set itself
        return frozenset(getattr(kind, "vma", ()))
    return frozenset(manual.varying)
