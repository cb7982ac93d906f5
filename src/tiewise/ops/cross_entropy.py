"""`linear_cross_entropy`: the loss of an output head without its logits, and the oracle that it must equal.

    z      = softcap(scale · features @ weightᵀ + bias)            softcap(z) = c · tanh(z / c)
    lse    = log Σ_j exp z_j
    loss_i = (1 − ε) w_t (lse − z_t) + (ε / V) Σ_j w_j (lse − z_j) + ζ lse²        t = target of token i

with ε label smoothing, w class weights (1 where none), ζ the z-loss coefficient. Tokens whose target is `ignore_index`
count for nothing. `mean` divides the sum by Σ_i w_t, as `torch.nn.functional.cross_entropy` does, and gives 0 with zero
gradients, not nan, where every token is ignored.

Sources: label smoothing, Szegedy et al. 2016 §7; z-loss, PaLM (Chowdhery et al. 2022) §5; soft-cap, Gemma 2 §2.

A scalar has its gradients computed beside it, three matrix products in all; of per-token losses, whose upstream
gradient is not known yet, each chunk is computed again in the backward pass (four). Under `torch.compile` the same
is an opaque operator: Dynamo cannot trace the eager function (it asks the running backward whether its graph survives),
and must not unroll the chunk loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tiewise.core.backends import LossOptions, check_loss
from tiewise.core.errors import UnsupportedError
from tiewise.ops.chunked import accumulator, compute_dtype
from tiewise.ops.gpu_kernels import maintained
from tiewise.ops.native_loss import sweep

_DEFAULT = LossOptions()


def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    options: LossOptions = _DEFAULT,
    **overrides: Any,
) -> Tensor:
    """Cross-entropy of `features @ weightᵀ` against `targets`, in chunks of tokens; the [N, V] logits never exist.

    bf16 and fp16 inputs multiply in their own type and accumulate in fp32. Works under autocast, `torch.compile`,
    gradient checkpointing, and with frozen features or a frozen weight, whose gradient is then not computed.

    Args:
        features: [..., E], any floating type.
        weight: [V, E].
        targets: [...] class indices, or `ignore_index`.
        bias: [V] or None.
        options: see `LossOptions`.
        **overrides: single options by name, e.g. `softcap=30.0, reduction="sum"`.

    Returns:
        fp32 scalar (fp64 for fp64 inputs), or a tensor shaped like `targets` for `reduction="none"`. A target whose
        logit is −inf costs inf, and its gradient is finite.

    Raises:
        TypeError: features, weight or targets that are no tensors: a module in place of its weight, say.
        ValueError: shapes that do not meet, an option out of range.
        IndexError: a target outside [0, V) (checked on CPU only; on a GPU it would cost a synchronisation).
        UnsupportedError: features or a weight of whole or complex numbers, probability targets, `torch.func`
            transforms, second derivatives, a backend that is not installed or has not what is asked.
        RunError: the environment variable TIEWISE_LOSS names no backend.
    """
    options = replace(options, **overrides) if overrides else options
    check_problem(features, weight, targets, bias, options)
    flat, t = features.reshape(-1, features.shape[-1]), targets.reshape(-1)
    if torch.compiler.is_compiling():
        loss = _traced(flat, weight, bias, t, options)
    else:
        check_range(t, weight.shape[0], options.ignore_index)
        loss = fused_loss("linear_cross_entropy", partial(_sweep, options), options, flat, weight, bias, t)
    return loss.view(targets.shape) if options.reduction == "none" else loss


def oracle(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    options: LossOptions = _DEFAULT,
    **overrides: Any,
) -> Tensor:
    """Compute the same loss by its formula, in fp64, with all logits: the truth that the tests measure against."""
    o = replace(options, **overrides) if overrides else options
    z = o.scale * (features.double().reshape(-1, features.shape[-1]) @ weight.double().T)
    z = z if bias is None else z + bias.double()
    z = z if o.softcap is None else o.softcap * torch.tanh(z / o.softcap)
    t = targets.reshape(-1)
    valid = t != o.ignore_index
    at = t.where(valid, 0)
    w = torch.ones(z.shape[1], dtype=z.dtype) if o.class_weight is None else o.class_weight.double()
    lse = z.logsumexp(1)
    hit = w[at] * (lse - z.gather(1, at[:, None])[:, 0])
    each = (1 - o.label_smoothing) * hit + o.z_loss * lse.square()
    if o.label_smoothing:  # 0 · inf is no 0, where a logit is −inf
        each = each + o.label_smoothing * (w * (lse[:, None] - z)).mean(1)
    each = each.where(valid, 0)
    if o.reduction == "none":
        return each.view(targets.shape)
    weight_sum = (w[at] * valid).sum()
    return each.sum() / weight_sum.where(weight_sum > 0, 1) if o.reduction == "mean" else each.sum()


def check_problem(features: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, o: LossOptions) -> None:
    """Refuse shapes that do not meet and options out of range; raises as `linear_cross_entropy`."""
    for name, given in (("features", features), ("weight", weight), ("targets", targets)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a tensor, not a {type(given).__name__}")
    if torch.is_floating_point(targets):
        fix = "pass class indices, or compute the logits and use torch.nn.functional.cross_entropy"
        raise UnsupportedError("linear_cross_entropy takes no probability targets", fix)
    check_loss(features, weight, targets, bias, o, torch.is_floating_point)
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        fix = "compute the logits there, or use tiewise.ops.cross_entropy.oracle"
        raise UnsupportedError("linear_cross_entropy inside a torch.func transform", fix)


def check_range(targets: Tensor, vocab: int, ignore_index: int) -> None:
    """Refuse targets outside [0, vocab) with an IndexError; looked at on a CPU only."""
    if targets.device.type != "cpu" or not targets.numel():
        return
    low, high = targets.aminmax()
    if low >= 0 and high < vocab:  # which spares what follows
        return
    outside = targets[((targets < 0) | (targets >= vocab)) & (targets != ignore_index)]
    if outside.numel():
        raise IndexError(f"target {int(outside[0])} is outside the vocabulary of {vocab} (ignore_index={ignore_index})")


# how it is differentiated

# (tensors, type of the products, wanted gradients, weight of each token's loss) → losses [N], gradients; of `tensors`
# the targets are the last
Sweep = Callable[[Any, torch.dtype, tuple[bool, ...], Tensor | None], tuple[Tensor, Any]]


def _sweep(o: LossOptions, tensors: Any, kind: torch.dtype, *rest: Any) -> tuple[Tensor, Any]:
    return (maintained(o, tensors, kind) or sweep)(o, tensors, kind, *rest)


def reduced(
    sweep: Sweep,
    options: LossOptions,
    tensors: Any,
    kind: torch.dtype,
    wanted: tuple[bool, ...],
    upstream: Tensor | None = None,
) -> tuple[Tensor, Any]:
    """Reduce a sweep's losses as `options` say, with gradients: for `none` those of Σ upstream_i · loss_i."""
    if options.reduction == "none":
        return sweep(tensors, kind, tuple(want and upstream is not None for want in wanted), upstream)
    if options.reduction == "sum":
        each, found = sweep(tensors, kind, wanted, None)
        return each.sum(), found
    # 1 / Σ w_t over the tokens that count; 1 where none does, so that an all-ignored batch gives 0
    targets, w, wide = tensors[-1], options.class_weight, accumulator(kind)
    valid = targets != options.ignore_index
    total = valid.sum() if w is None else (w.to(wide)[targets.where(valid, 0)] * valid).sum()
    factor = 1 / total.where(total > 0, 1).to(wide)
    # it costs nothing in the row coefficients; in fp16 it would underflow there and comes last
    last = kind == torch.float16
    each, found = sweep(tensors, kind, wanted, None if last else factor)
    for gradient in found if last else ():
        if gradient is not None:
            gradient.mul_(factor)
    return each.sum() * factor, found


def fused_loss(name: str, sweep: Sweep, options: LossOptions, *tensors: Tensor | None) -> Tensor:
    """Return the reduced loss, differentiable once; `name` is who says that there is no second derivative."""
    return _Fused.apply(name, sweep, options, torch.is_grad_enabled(), *tensors)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, sweep: Sweep, options: LossOptions, grad_mode: bool, *tensors: Any) -> Tensor:
        ctx.name, ctx.sweep, ctx.options, ctx.kind = name, sweep, options, compute_dtype(*tensors[:2])
        ctx.wanted = tuple(grad_mode and need for need in ctx.needs_input_grad[4:])
        ctx.dtypes = [None if x is None else x.dtype for x in tensors]
        if options.reduction == "none":
            ctx.save_for_backward(*tensors)
        loss, ctx.gradients = reduced(sweep, options, tensors, ctx.kind, ctx.wanted)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            fix = "compute the logits and use torch.nn.functional.cross_entropy where create_graph=True is needed"
            raise UnsupportedError(f"{ctx.name} has no second derivative", fix)
        found = ctx.gradients
        if ctx.options.reduction == "none":
            found = reduced(ctx.sweep, ctx.options, ctx.saved_tensors, ctx.kind, ctx.wanted, upstream)[1]
        elif found is None:
            fix = "pass retain_graph=True to the first backward"
            raise UnsupportedError("this loss was already differentiated and its graph freed", fix)
        else:
            # the buffers are given away when the graph dies with this call, and copied when it may be asked again
            keep = torch._C._autograd._get_current_graph_task_keep_graph()
            ctx.gradients = found if keep else None
            if upstream.device.type != "cpu" or upstream.item() != 1.0:  # a GPU would have to synchronise to say so
                found = [x if x is None else x * upstream if keep else x.mul_(upstream) for x in found]
            elif keep:
                found = [x if x is None else x.clone() for x in found]
        pairs = zip(found, ctx.dtypes[:-1], strict=True)
        return (*[None] * 4, *(None if x is None else x.to(dtype) for x, dtype in pairs), None)


# The same under torch.compile: one operator, of tensors and numbers alone.

_TENSORS = "Tensor features, Tensor weight, Tensor? bias, Tensor targets, Tensor? class_weight, Tensor? upstream"
_HOW = (
    "str reduction, int? chunk, float scale, float? softcap, int ignore_index, float label_smoothing, float z_loss,"
    " str? logits, str? backend"
)
_FIELDS = [argument.split()[1] for argument in _HOW.split(", ")]  # of `LossOptions`
_SCHEMA = f"({_TENSORS}, ScalarType kind, bool[] wanted, {_HOW}) -> (Tensor, Tensor, Tensor, Tensor)"


def _traced(features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, o: LossOptions) -> Tensor:
    # Autocast is decided while tracing: at run time the operator no longer sees which region it stood in.
    kind = compute_dtype(features, weight)
    wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (features, weight, bias)]
    how = (getattr(o, name) for name in _FIELDS)
    return _operator(features, weight, bias, targets, o.class_weight, None, kind, wanted, *how)[0]


@torch.library.custom_op("tiewise::linear_cross_entropy", mutates_args=(), schema=_SCHEMA)
def _operator(*arguments: Any) -> Any:
    *tensors, weights, upstream, kind, wanted = arguments[:8]
    options = LossOptions(class_weight=weights, **dict(zip(_FIELDS, arguments[8:], strict=True)))
    loss, found = reduced(partial(_sweep, options), options, tensors, kind, tuple(wanted), upstream)
    return (loss, *(loss.new_empty(0) if x is None else x for x in found))  # it hands out nothing but tensors


@_operator.register_fake
def _(*arguments: Any) -> Any:
    *inputs, targets, _, upstream, kind, wanted, reduction = arguments[:9]
    shapes = [targets.shape if reduction == "none" else ()]
    for x, want in zip(inputs, wanted, strict=True):
        shapes.append(x.shape if want and not (reduction == "none" and upstream is None) else (0,))
    return tuple(targets.new_empty(shape, dtype=accumulator(kind)) for shape in shapes)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.how, ctx.per_token = inputs[6:], inputs[8] == "none"
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:3]]
    ctx.save_for_backward(*(inputs[:5] if ctx.per_token else output[1:]))


def _derivative(ctx: Any, upstream: Tensor, *_: Any) -> Any:
    found = ctx.saved_tensors
    if ctx.per_token:
        found = _operator(*found, upstream, *ctx.how)[1:]
    else:  # an operator's tensors may not be given away
        found = [x * upstream for x in found]
    triples = zip(found, ctx.dtypes, ctx.how[1], strict=True)
    return (*(x.to(dtype) if want else None for x, dtype, want in triples), *[None] * (3 + len(ctx.how)))


_operator.register_autograd(_derivative, setup_context=_remember)
