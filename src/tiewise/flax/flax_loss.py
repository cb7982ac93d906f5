"""`linear_cross_entropy` for JAX: the loss of an output head without its logits.

    z      = softcap(scale · features @ weightᵀ + bias)            softcap(z) = c · tanh(z / c)
    lse    = log Σ_j exp z_j
    loss_i = (1 − ε) w_t (lse − z_t) + (ε / V) Σ_j w_j (lse − z_j) + ζ lse²        t = target of token i

with ε label smoothing, w class weights (1 where none) and ζ the z-loss coefficient: the function of
`tiewise.ops.cross_entropy`, term by term. Tokens whose target is `ignore_index` count for nothing. `mean` divides the
sum by Σ_i w_t and gives 0 with zero gradients where every token is ignored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tiewise.core.backends import chunk_rows
from tiewise.core.errors import UnsupportedError
from tiewise.flax.vocabulary_sweep import Problem, Tensors, alike, counted, sweep

REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True)
class FlaxLossOptions:
    """Options of `linear_cross_entropy`; each may also be passed to it by keyword."""

    scale: float = 1.0  # factor on the product, before the bias
    softcap: float | None = None  # c of the soft-cap; None leaves logits as they are
    ignore_index: int = -100  # target value whose tokens count for nothing
    label_smoothing: float = 0.0  # ε, in [0, 1]
    z_loss: float = 0.0  # ζ, the coefficient of lse²
    class_weight: Array | None = None  # w [V]; gets no gradient
    reduction: str = "mean"  # `mean`, `sum` (both an fp32 scalar) or `none` (fp32, shaped like the targets)
    chunk: int | None = None  # tokens per chunk; None chooses so that a chunk of logits is about 100 MB
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
    vocab = _check(features, weight, targets, bias, o)
    note = f" (ignore_index={o.ignore_index})"
    check_range(targets, vocab, "target {} is outside the vocabulary of {}" + note, o.ignore_index)
    kind = jnp.promote_types(features.dtype, weight.dtype)  # the wider of the two, in which they are multiplied
    flat, table = features.reshape(-1, features.shape[-1]).astype(kind), weight.astype(kind)
    # signed, so that ignored and impossible targets stay apart from the first rows
    at = jnp.asarray(targets).reshape(-1).astype(jnp.int32)
    w = None if o.class_weight is None else lax.stop_gradient(jnp.asarray(o.class_weight))
    table, at, bias, w = alike(flat, table, at, bias, w)
    chunk = chunk_rows(len(at), vocab, "cpu" if jax.default_backend() == "cpu" else "cuda", o.chunk)
    problem = Problem(
        vocab, max(1, min(chunk, len(at))), o.scale, o.softcap, o.ignore_index, o.label_smoothing, o.z_loss, o.axis
    )
    tensors = Tensors(flat, table, at, bias, w)
    if o.reduction == "none":
        return _tokens(problem, tensors).reshape(targets.shape)
    return _scalar(problem, o.reduction == "mean", tensors)


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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scalar(problem: Problem, mean: bool, tensors: Tensors) -> Array:
    each, _ = sweep(tensors, problem, None)
    return each.sum() * _factor(tensors, problem, mean)


def _scalar_forward(problem: Problem, mean: bool, tensors: Tensors) -> tuple[Array, Any]:
    factor = _factor(tensors, problem, mean)
    each, found = sweep(tensors, problem, jnp.broadcast_to(factor, tensors.targets.shape))
    return each.sum() * factor, (found, _types(tensors))


def _scalar_backward(problem: Problem, mean: bool, kept: Any, upstream: Array) -> tuple[Tensors]:
    found, types = kept
    return (_cast([None if x is None else x * upstream for x in found], types),)


_scalar.defvjp(_scalar_forward, _scalar_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _tokens(problem: Problem, tensors: Tensors) -> Array:
    return sweep(tensors, problem, None)[0]


def _tokens_forward(problem: Problem, tensors: Tensors) -> tuple[Array, Tensors]:
    return _tokens(problem, tensors), tensors


def _tokens_backward(problem: Problem, tensors: Tensors, upstream: Array) -> tuple[Tensors]:
    return (_cast(sweep(tensors, problem, upstream)[1] or (), _types(tensors)),)


_tokens.defvjp(_tokens_forward, _tokens_backward)


def _cast(gradients: Iterable[Array | None], types: Iterable[Array | None]) -> Tensors:
    """Gradients of features, weight and bias in the types of these; targets and class weights have none."""
    pairs = zip(gradients, types, strict=True)
    features, weight, bias = (None if x is None or like is None else x.astype(like.dtype) for x, like in pairs)
    return Tensors(features, weight, None, bias, None)


def _factor(tensors: Tensors, problem: Problem, mean: bool) -> Array:
    """1 / Σ w_t over the tokens that count, 1 where that is 0; 1 for a sum."""
    whole = counted(tensors, problem) if mean else jnp.ones(())
    return 1 / jnp.where(whole > 0, whole, 1).astype(jnp.promote_types(tensors.weight.dtype, jnp.float32))


def _types(tensors: Tensors) -> tuple[Any, Any, Any]:
    """Empty arrays of the types that the gradients must have: what JAX may keep, unlike a type itself."""
    return tuple(
        None if x is None else jnp.empty((0,), x.dtype) for x in (tensors.features, tensors.weight, tensors.bias)
    )  # type: ignore[return-value]


def _check(features: Array, weight: Array, targets: Any, bias: Array | None, o: FlaxLossOptions) -> int:
    """V, after refusing shapes that do not meet and options out of range."""
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        fix = "pass class indices, or compute the logits and use optax.softmax_cross_entropy"
        raise UnsupportedError("linear_cross_entropy takes no probability targets", fix)
    for name, array in (("features", features), ("a weight", weight)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            fix = "pass floating-point hidden states [..., E] and a table [V, E]; token ids are looked up first"
            raise UnsupportedError(f"linear_cross_entropy of {name} of type {array.dtype}", fix)
    if weight.ndim != 2 or features.shape[-1] != weight.shape[1] or features.shape[:-1] != targets.shape:
        got = f"features {features.shape}, weight {weight.shape}, targets {targets.shape}"
        raise ValueError(f"shapes do not meet: {got}; need [..., E], [V, E], [...]")
    for name, vector in (("bias", bias), ("class_weight", o.class_weight)):
        if vector is not None and vector.shape != (weight.shape[0],):
            raise ValueError(f"{name} has shape {vector.shape}; need [V] = [{weight.shape[0]}]")
    if o.reduction not in REDUCTIONS:
        raise ValueError(f"unknown reduction {o.reduction!r}; choose one of {', '.join(REDUCTIONS)}")
    if not 0 <= o.label_smoothing <= 1 or o.z_loss < 0 or (o.chunk is not None and o.chunk < 1):
        raise ValueError("need 0 ≤ label_smoothing ≤ 1, z_loss ≥ 0, chunk ≥ 1")
    if o.softcap is not None and not o.softcap > 0:
        raise ValueError(f"softcap must be positive, not {o.softcap}")
    rows = weight.shape[0] * (1 if o.axis is None else lax.psum(1, o.axis))
    if o.vocab is not None and not 1 <= o.vocab <= rows:
        raise ValueError(f"vocab = {o.vocab} of a table of {rows} rows; need 1 ≤ vocab ≤ rows")
    return rows if o.vocab is None else o.vocab
