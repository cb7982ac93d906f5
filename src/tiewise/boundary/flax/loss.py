"""`linear_cross_entropy` for JAX: the loss of an output head without its logits.

It computes the formula of `ops/cross_entropy.py`, with the same letters; `mean` also divides by Σ_i w_t.

One scan over chunks of tokens computes the gradients together with the loss, in one [V, E] buffer. For a chunk of n
tokens with features h [n, E], logits z, s = Σ_j exp(z_j − m):

    ∂loss_i/∂z_j = c_i P_ij − q_i [j = t_i] − ε w_j / V      P = exp(z − m) / s
                                                             q = (1 − ε) w_t,  c = q + ε mean(w) + 2ζ lse
    dfeatures = (c/s) ∘ (e W) − q ∘ W[t]                      e = exp(z − m)
    dweight   = eᵀ((c/s) ∘ h) − scatter(t, q ∘ h)

So the exponentials are computed once, and the row coefficients multiply [n, E] factors. The target's −1 enters no
product, where the small probabilities would lose their last digits. With a soft-cap or label smoothing every column has
a coefficient, and the matrix is multiplied by it.

Padded rows of a table that is split over devices get a logit of −inf, so they are in no normaliser. A padded token of
the last chunk has the ignored target, so it is in no sum. Inside `shard_map` a gradient must vary over exactly the mesh
axes of its array: `_mark_varying` ensures that.
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
    """Options of `linear_cross_entropy` in JAX; each may also be passed to it by keyword.

    >>> FlaxLossOptions(softcap=30.0).reduction
    'mean'

    Attributes:
        axis: in `shard_map`, the mesh axis over which rows of weight, bias and class_weight are split.
        vocab: V, if the table has more rows because they must split evenly; the other rows are masked.
    """

    axis: str | None = None
    vocab: int | None = None


_DEFAULT = FlaxLossOptions()


def linear_cross_entropy(
    features: Array,
    weight: Array,
    targets: Array,
    bias: Array | None = None,
    options: FlaxLossOptions = _DEFAULT,
    **overrides: Any,
) -> Array:
    """Return the cross-entropy of `features @ weightᵀ` against `targets` without the [N, V] logits.

    The loss is computed in chunks of tokens. `mean` and `sum` compute the gradients in the forward pass (three matrix
    products, none repeated). `none` computes each chunk again in the backward pass (four). bf16 and fp16 inputs
    multiply in their type and accumulate in fp32. The function works under `jit`, `grad`, `vmap`, `shard_map` (see
    `axis`) and with sharded arrays under `jit`. `ops/cross_entropy.py` has the formula and its sources.

    >>> round(float(linear_cross_entropy(jnp.zeros((2, 4)), jnp.zeros((8, 4)), [1, 5])), 4)  # ln 8
    2.0794

    Args:
        features: [..., E], any floating type.
        weight: [V, E].
        targets: [...] class indices, or `ignore_index`.
        bias: [V] or None.
        options: see `FlaxLossOptions`.
        **overrides: single options by name, e.g. `softcap=30.0, reduction="sum"`.

    Returns:
        fp32 scalar (fp64 for fp64 inputs), or an array shaped like `targets` for `reduction="none"`. If targets are
        traced, as under `jit`, no error can be raised: a target outside the vocabulary gives nan.

    Raises:
        ValueError: the shapes do not fit together, or an option is out of range.
        IndexError: a target is outside [0, V), unless targets are traced.
        UnsupportedError: features or a weight are integers or complex, or targets are probabilities.
    """
    options = replace(options, **overrides) if overrides else options
    features, weight, targets = jnp.asarray(features), jnp.asarray(weight), as_array(targets)
    _check_target_type(targets.dtype)
    check_loss(features, weight, targets, bias, options, lambda x: jnp.issubdtype(x.dtype, jnp.floating))
    if options.backend is not None:
        raise ValueError("backend is PyTorch's; leave it out here")
    vocab = _find_vocab(weight, options)
    message = "target {} is outside the vocabulary of {}" + f" (ignore_index={options.ignore_index})"
    check_range(targets, vocab, message, options.ignore_index)
    tensors = _flatten_inputs(features, weight, targets, bias, options)
    numbers = _numbers_per_token(vocab, tensors.weight.dtype, options)
    chunk = chunk_rows(targets.size, numbers, jax.default_backend(), options.chunk)
    loss = _loss(replace(options, chunk=max(1, min(chunk, targets.size)), class_weight=None), tensors)
    if options.reduction == "none":
        return loss.reshape(targets.shape)
    return loss


def _check_target_type(dtype: Any) -> None:
    """Refuse targets that are not class indices."""
    if dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.complexfloating):
        raise UnsupportedError(f"linear_cross_entropy of targets of type {dtype}", "pass class indices")
    if not jnp.issubdtype(dtype, jnp.integer):
        fix = "pass class indices, or compute the logits and use optax.softmax_cross_entropy"
        raise UnsupportedError("linear_cross_entropy takes no probability targets", fix)


def _find_vocab(weight: Array, options: FlaxLossOptions) -> int:
    """Return V over all devices, without padded rows.

    Raises:
        ValueError: the table has fewer rows than V.
    """
    rows: int = weight.shape[0] * _count_devices(options.axis)
    check_words(rows)
    if options.vocab is None:
        return rows
    if not 1 <= options.vocab <= rows:
        raise ValueError(f"vocab = {options.vocab} of a table of {rows} rows; need 1 ≤ vocab ≤ rows")
    return options.vocab


def _count_devices(axis: str | None) -> int:
    """Return the number of devices along a mesh axis of `shard_map`; 1 without an axis."""
    if axis is None:
        return 1
    devices: int = lax.psum(1, axis)  # the sum of a constant is a Python number even while JAX traces
    return devices


class _LossInputs(NamedTuple):
    """Inputs of the loss, flattened over tokens.

    Features [N, E], weight [V, E], targets [N]; bias [V] and class weights [V], or None.
    """

    features: Array
    weight: Array
    targets: Array
    bias: Array | None
    class_weight: Array | None


def _flatten_inputs(
    features: Array, weight: Array, targets: Any, bias: Array | None, options: FlaxLossOptions
) -> _LossInputs:
    """Return the inputs flattened over tokens, in the types of the products and sums."""
    product_dtype = jnp.promote_types(features.dtype, weight.dtype)  # the wider type, in which they are multiplied
    features = features.reshape(targets.size, features.shape[-1]).astype(product_dtype)
    weight = weight.astype(product_dtype)
    # signed, so that ignored and impossible targets differ from the first rows
    targets = jnp.asarray(targets).reshape(-1).astype(jnp.int32)
    if bias is not None:
        bias = bias.astype(_sum_type(product_dtype))
    class_weight = None
    if options.class_weight is not None:
        class_weight = lax.stop_gradient(jnp.asarray(options.class_weight))
    tensors = _LossInputs(features, weight, targets, bias, class_weight)
    # a table's gradient is a sum over the batch axes, so all inputs must vary over the axes of the features
    varying: _LossInputs = jax.tree.map(lambda x: _mark_varying(x, features), tensors)
    return varying


def _numbers_per_token(vocab: int, product_dtype: Any, options: FlaxLossOptions) -> int:
    """Return the memory of a token in fp32 numbers, as XLA allocates it.

    It is for the logits, a narrow copy of them, and the soft-cap's derivative.
    """
    wide: int = jnp.dtype(_sum_type(product_dtype)).itemsize
    narrow: int = jnp.dtype(product_dtype).itemsize % wide  # 0 if the products are as wide as their sums
    wide_rows = 1 if options.softcap is None else 2
    return -(-vocab * (wide * wide_rows + narrow) // 4)


def as_array(numbers: Any) -> Any:
    """Return lists of token numbers as numpy arrays; leave JAX arrays and tracers as they are."""
    return numbers if isinstance(numbers, jax.Array) else np.asarray(numbers)


def check_range(numbers: Any, limit: int, message: str, ignored: int | None = None) -> None:
    """Raise an IndexError for a token number outside [0, limit), except `ignored`.

    Traced numbers have no values and are not checked. `message` is a format for the first number outside and for
    `limit`.
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
    """Gradients by features, weight and bias, in fp32 or fp64.

    Their shapes are [N, E], [V, E] and [V]; the bias's is None without a bias.
    """

    features: Array
    weight: Array
    bias: Array | None


class _Reduced(NamedTuple):
    """Values that the forward pass of a mean or a sum saves for the backward pass."""

    gradients: _Gradients
    of_weight_type: Array  # empty array of the weight's type: JAX can save an array, and no type


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(options: FlaxLossOptions, tensors: _LossInputs) -> Array:
    """Return the losses [N], or their mean or sum."""
    losses, _ = _loss_pass(options, tensors, None)
    if options.reduction == "none":
        return losses
    return losses.sum() * _reduction_factor(options, tensors)


def _loss_forward(options: FlaxLossOptions, tensors: _LossInputs) -> tuple[Array, _LossInputs | _Reduced]:
    """Return the loss and the values that the backward pass needs."""
    if options.reduction == "none":  # the upstream gradient of each token is known only in the backward pass
        return _loss(options, tensors), tensors
    factor = _reduction_factor(options, tensors)
    losses, gradients = _loss_pass(options, tensors, jnp.broadcast_to(factor, tensors.targets.shape))
    assert gradients is not None, "a pass with row weights has gradients"
    return losses.sum() * factor, _Reduced(gradients, jnp.empty(0, tensors.weight.dtype))


def _loss_backward(options: FlaxLossOptions, saved: _LossInputs | _Reduced, upstream: Array) -> tuple[_LossInputs]:
    """Return the gradients; those of features and weight have the inputs' type."""
    if isinstance(saved, _Reduced):
        gradients = jax.tree.map(lambda x: x * upstream, saved.gradients)
        product_dtype = saved.of_weight_type.dtype
    else:
        _, gradients = _loss_pass(options, saved, upstream)
        product_dtype = saved.weight.dtype
    features, weight, bias = gradients
    return (_LossInputs(features.astype(product_dtype), weight.astype(product_dtype), None, bias, None),)


_loss.defvjp(_loss_forward, _loss_backward)


def _reduction_factor(options: FlaxLossOptions, tensors: _LossInputs) -> Array:
    """Return the factor that turns the sum of the losses into their `reduction`.

    It is 1 for a sum. For a mean it is 1 / Σ w_t over the tokens that are not ignored, or 1 if Σ w_t is 0.
    """
    is_counted = tensors.targets != options.ignore_index
    total: Array | int = 1
    if options.reduction == "mean":
        class_weights = _TableShard(options, tensors).class_weights_of(tensors.targets)
        total = jnp.where(is_counted, class_weights, 0).sum()
    return 1 / jnp.where(total > 0, total, 1).astype(_sum_type(tensors.weight.dtype))


def _loss_pass(
    options: FlaxLossOptions, tensors: _LossInputs, row_weight: Array | None
) -> tuple[Array, _Gradients | None]:
    """Compute losses and gradients in one scan over all chunks.

    Returns:
        the loss of each token [N], and in fp32 (fp64 for fp64 inputs) the gradients of Σ row_weight_i · loss_i by
        features, weight and bias. If `row_weight` is None, the gradients are None.
    """
    features, weight, targets, bias, _ = tensors
    n, width = features.shape
    chunk = options.chunk or 1
    pieces = max(1, -(-n // chunk))
    padding = pieces * chunk - n
    rows = jnp.pad(features, ((0, padding), (0, 0))).reshape(pieces, chunk, width)
    at = jnp.pad(targets, (0, padding), constant_values=options.ignore_index).reshape(pieces, chunk)
    shard = _TableShard(options, tensors)
    if row_weight is None:
        _, losses = lax.scan(shard.scan_losses, None, (rows, at))
        return losses.reshape(-1)[:n], None
    row_weight = jnp.pad(row_weight.astype(shard.wide), (0, padding)).reshape(pieces, chunk)
    zeros = shard.zero_gradients(weight), shard.zero_gradients(bias)
    (d_weight, d_bias), (losses, d_rows) = lax.scan(shard.scan_gradients, zeros, (rows, at, row_weight))
    d_features = d_rows.reshape(pieces * chunk, width)[:n]
    if options.axis is not None:
        d_features = lax.psum(d_features, options.axis)
    return losses.reshape(-1)[:n], _Gradients(d_features, d_weight, d_bias)


# one chunk


class _Softmax(NamedTuple):
    """Softmax of a chunk in parts.

    Unnormalised exponentials e [n, V], their sum s [n], lse [n], and the logits after the soft-cap [n, V].
    """

    e: Array
    s: Array
    lse: Array
    logits: Array


class _Slopes(NamedTuple):
    """∂loss/∂product of a chunk, in parts: factor_i · matrix_ij, and −q_i at the target."""

    matrix: Array  # [n, V]
    factor: Array  # [n]
    q: Array  # [n], 0 if the target is on another device


class _Row(NamedTuple):
    """Rows [n] of targets in one device's part of the table."""

    index: Array  # row number, clipped to the rows of the part
    is_here: Array  # whether this device has the target's row


class _TableShard:
    """One device's rows of the table, and the arithmetic of one chunk with them."""

    def __init__(self, options: FlaxLossOptions, tensors: _LossInputs) -> None:
        """Find the position of these rows in the vocabulary."""
        self.options, self.weight, self.bias = options, tensors.weight, tensors.bias
        self.product_dtype = self.weight.dtype  # type of the products
        self.wide = _sum_type(self.product_dtype)  # type of everything else
        rows, all_rows = self.weight.shape[0], self.weight.shape[0] * _count_devices(options.axis)
        self.first: Array | int = 0  # vocabulary number of the first row
        if options.axis is not None:
            self.first = lax.axis_index(options.axis) * rows
        self.vocab = options.vocab or all_rows
        self.is_real = self.first + jnp.arange(rows) < self.vocab  # [V] whether each row is in the vocabulary
        self.has_padding = all_rows > self.vocab  # whether any device has rows outside the vocabulary
        self.class_weight: Array | None = None
        self.uniform = options.label_smoothing / self.vocab  # ε / V
        self.spread: Array | float = options.label_smoothing  # ε mean(w)
        if tensors.class_weight is not None:
            self.class_weight = jnp.where(self.is_real, tensors.class_weight.astype(self.wide), 0)
            if options.label_smoothing:
                self.spread = self.uniform * self._reduce(lax.psum, self.class_weight.sum())

    def zero_gradients(self, x: Array | None) -> Array | None:
        """Return zeros to which the gradients of `x` are added; None for None."""
        if x is None:
            return None
        return _mark_varying(jnp.zeros(x.shape, self.wide), x)

    def softmax(self, h: Array) -> _Softmax:
        """Return the logits of features [n, E], and their softmax in parts."""
        z = self._logits(h)
        smallest = jnp.finfo(self.wide).min  # all rows of a device may be padding
        most = self._reduce(lax.pmax, jnp.maximum(z.max(1), smallest))
        e = jnp.exp(z - most[:, None])
        s = self._reduce(lax.psum, e.sum(1))
        return _Softmax(e, s, most + jnp.log(s), z)

    def _logits(self, h: Array) -> Array:
        """Return the logits [n, V] of features [n, E], −inf in padded rows."""
        options = self.options
        z = self._dot((h.astype(self.wide) * options.scale).astype(self.product_dtype), self.weight, ((1,), (1,)))
        if self.bias is not None:
            z = z + self.bias
        if options.softcap is not None:
            z = options.softcap * jnp.tanh(z / options.softcap)
        if self.has_padding:
            z = jnp.where(self.is_real, z, -jnp.inf)
        return z

    def losses(self, soft: _Softmax, t: Array) -> Array:
        """Return the loss of each token [n]; nan if the target is outside the vocabulary."""
        options, row = self.options, self._find_rows(t)
        logit = self._reduce(lax.psum, jnp.where(row.is_here, _select_columns(soft.logits, row.index), 0))
        losses = (1 - options.label_smoothing) * self.class_weights_of(t) * (soft.lse - logit)
        if options.label_smoothing:
            weighted = self._mask_padding(soft.logits)
            if self.class_weight is not None:
                weighted = weighted * self.class_weight
            losses = losses + self.spread * soft.lse - self.uniform * self._reduce(lax.psum, weighted.sum(1))
        if options.z_loss:
            losses = losses + options.z_loss * soft.lse**2
        return self._mask_targets(t, losses)

    def scan_losses(self, carry: None, chunk: tuple[Array, Array]) -> tuple[None, Array]:
        """Return the losses [n] of a chunk: features [n, E] and targets [n]."""
        h, t = chunk
        return carry, self.losses(self.softmax(h), t)

    def scan_gradients(
        self, carry: tuple[Array, Array | None], chunk: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, Array | None], tuple[Array, Array]]:
        """Add a chunk's gradients to the carried gradients of weight and bias.

        A chunk consists of features [n, E], targets [n], and the weight of each loss [n]. The function returns the
        carried gradients, the losses [n], and the gradient of the features [n, E] from these rows.
        """
        options, (d_weight, d_bias), (h, t, row_weight) = self.options, carry, chunk
        soft = self.softmax(h)
        matrix, factor, q = self._slopes(soft, t, row_weight)
        row = self._find_rows(t).index
        narrow, scaled = matrix.astype(self.product_dtype), h.astype(self.wide) * options.scale
        d_rows = factor[:, None] * self._dot(narrow, self.weight, ((1,), (0,)))
        d_rows = options.scale * (d_rows - q[:, None] * self.weight[row].astype(self.wide))
        product = self._dot(narrow, (factor[:, None] * scaled).astype(self.product_dtype), ((0,), (0,)))
        d_weight = (d_weight + product).at[row].add(-q[:, None] * scaled)
        if d_bias is not None:
            d_bias = (d_bias + factor @ matrix).at[row].add(-q)
        return (d_weight, d_bias), (self.losses(soft, t), d_rows)

    def _slopes(self, soft: _Softmax, t: Array, row_weight: Array) -> _Slopes:
        """Return ∂loss/∂product of a chunk, each loss multiplied by `row_weight` [n]."""
        options = self.options
        row_weight = self._mask_targets(t, row_weight)
        hit = (1 - options.label_smoothing) * self.class_weights_of(t)
        c = row_weight * (hit + self.spread + 2 * options.z_loss * soft.lse)
        q = row_weight * hit
        row = self._find_rows(t)
        matrix, factor = soft.e, c / soft.s
        # each column has a coefficient too, so multiply the matrix
        if options.softcap is not None or options.label_smoothing:
            uniform = (row_weight * self.uniform)[:, None]
            if self.class_weight is not None:
                uniform = uniform * self.class_weight
            matrix = matrix * factor[:, None] - uniform
            factor = jnp.ones_like(factor)
            if options.softcap is not None:
                matrix = matrix * (1 - (soft.logits / options.softcap) ** 2)
                q = q * (1 - (_select_columns(soft.logits, row.index) / options.softcap) ** 2)
            matrix = self._mask_padding(matrix)
        return _Slopes(matrix, factor, jnp.where(row.is_here, q, 0))

    def class_weights_of(self, t: Array) -> Array | int:
        """Return w_t [n], or 1 without class weights."""
        if self.class_weight is None:
            return 1
        row = self._find_rows(t)
        return self._reduce(lax.psum, jnp.where(row.is_here, self.class_weight[row.index], 0))

    def _find_rows(self, t: Array) -> _Row:
        """Return the targets' rows among this device's rows."""
        row, rows = t - self.first, self.weight.shape[0]
        return _Row(jnp.clip(row, 0, rows - 1), (row >= 0) & (row < rows))

    def _mask_targets(self, t: Array, x: Array) -> Array:
        """Return 0 for an ignored target, nan for a target outside the vocabulary, else `x`."""
        return jnp.where(t == self.options.ignore_index, 0, jnp.where((t >= 0) & (t < self.vocab), x, jnp.nan))

    def _mask_padding(self, matrix: Array) -> Array:
        """Return a matrix [n, V] with 0 in the columns of padded rows."""
        return jnp.where(self.is_real, matrix, 0) if self.has_padding else matrix

    def _reduce(self, collective: Callable[[Array, str], Array], x: Array) -> Array:
        """Return the sum or maximum over the parts of the table.

        If one device has the full table, it is `x` itself.
        """
        return x if self.options.axis is None else collective(x, self.options.axis)

    def _dot(self, a: Array, b: Array, contracted: tuple[tuple[int], tuple[int]]) -> Array:
        """Multiply two matrices over an axis of each, and sum in the wide type."""
        return lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=self.wide)


def _sum_type(product_dtype: Any) -> Any:
    """Return the type of sums over products of this type."""
    return jnp.promote_types(product_dtype, jnp.float32)


def _select_columns(matrix: Array, column: Array) -> Array:
    """Return one column's entry of each row [n]."""
    return jnp.take_along_axis(matrix, column[:, None], 1)[:, 0]


def _mark_varying(x: Array, like: Array) -> Array:
    """Mark `x` as varying over the mesh axes of `like` too.

    Its gradient is summed over the added axes.
    """
    new = tuple(sorted(_mesh_axes(like) - _mesh_axes(x)))
    return lax.pcast(x, new, to="varying") if new else x


def _mesh_axes(x: Any) -> frozenset[str]:
    """Return the mesh axes along which devices have different values of `x`.

    Outside `shard_map` there are none.
    """
    array_type = jax.typeof(x)
    manual = getattr(array_type, "manual_axis_type", None)
    if manual is None:  # older versions of jax have the set itself
        return frozenset(getattr(array_type, "vma", ()))
    return frozenset(manual.varying)
