"""Autograd around the chunked sweep, eager and under `torch.compile`.

A scalar has its gradients computed beside it, three matrix products in all; of per-token losses, whose upstream
gradient is not known yet, each chunk is computed again in the backward pass (four).

Under `torch.compile` the same sweep is an opaque operator, so that one graph stays around the loss: Dynamo cannot trace
the eager functions (they ask the running backward whether its graph survives), and must not unroll the chunk loop. An
operator's tensors may not be given away either: there the backward scales a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiewise.core.errors import UnsupportedError
from tiewise.ops.chunked import Gradients, LossOptions, Wanted, accumulator, compute_dtype, sweep

_NOTHING = Wanted(False, False, False)


def fused_loss(features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: LossOptions) -> Tensor:
    """Loss of features [N, E], a scalar or [N] for `none`."""
    if options.reduction == "none":
        return _Tokens.apply(features, weight, bias, targets, options)
    return _Scalar.apply(features, weight, bias, targets, options, torch.is_grad_enabled())


def mean_factor(targets: Tensor, class_weight: Tensor | None, ignore_index: int, wide: torch.dtype) -> Tensor:
    """1 / Σ w_t over the tokens that count; 1 where none does, so that an all-ignored batch gives 0."""
    valid = targets != ignore_index
    total = valid.sum() if class_weight is None else (class_weight.to(wide)[targets.where(valid, 0)] * valid).sum()
    return 1 / total.where(total > 0, 1).to(wide)


def _scalar_sweep(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    options: LossOptions,
    wanted: Wanted,
    kind: torch.dtype,
) -> tuple[Tensor, Gradients]:
    """Sum or weighted mean, and its gradients."""
    if options.reduction == "sum":
        each, found = sweep(features, weight, bias, targets, options, wanted, kind)
        return each.sum(), found
    factor = mean_factor(targets, options.class_weight, options.ignore_index, accumulator(kind))
    # the 1/N of a mean costs nothing in the row coefficients; in fp16 it would underflow there and comes last
    last = kind == torch.float16
    each, found = sweep(features, weight, bias, targets, options, wanted, kind, None if last else factor)
    for gradient in found if last else ():
        if gradient is not None:
            gradient.mul_(factor)
    return each.sum() * factor, found


class _Scalar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        features, weight, bias, targets, options, grad_mode = arguments
        wanted = Wanted(*(grad_mode and need for need in ctx.needs_input_grad[:3]))
        kind = compute_dtype(features, weight)
        loss, ctx.gradients = _scalar_sweep(features, weight, bias, targets, options, wanted, kind)
        ctx.dtypes = [None if x is None else x.dtype for x in (features, weight, bias)]
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        gradients: Gradients | None = ctx.gradients
        if gradients is None:
            fix = "pass retain_graph=True to the first backward"
            raise UnsupportedError("this loss was already differentiated and its graph freed", fix)
        # The buffers are given away when the graph dies with this call, and copied when it may be asked again.
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        if not keep:
            ctx.gradients = None
        needless = upstream.device.type == "cpu" and upstream.item() == 1.0  # a GPU would have to synchronise to say so
        given: list[Tensor | None] = []
        for x, dtype in zip(gradients, ctx.dtypes, strict=True):
            if x is not None and not needless:
                x = x * upstream if keep else x.mul_(upstream)
            elif x is not None and keep:
                x = x.clone()
            given.append(None if x is None else x.to(dtype))
        return (*given, None, None, None)


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        features, weight, bias, targets, ctx.options = arguments
        ctx.kind = compute_dtype(features, weight)
        ctx.save_for_backward(features, weight, bias, targets)
        return sweep(features, weight, bias, targets, ctx.options, _NOTHING, ctx.kind)[0]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        features, weight, bias, targets = ctx.saved_tensors
        wanted = Wanted(*ctx.needs_input_grad[:3])
        _, found = sweep(features, weight, bias, targets, ctx.options, wanted, ctx.kind, upstream)
        pairs = zip(found, (features, weight, bias), strict=True)
        return (*(None if x is None else x.to(like.dtype) for x, like in pairs), None, None)


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        fix = "compute the logits and use torch.nn.functional.cross_entropy where create_graph=True is needed"
        raise UnsupportedError("linear_cross_entropy has no second derivative", fix)


# The same under torch.compile: one operator for each question, of tensors and numbers alone.

_KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_REDUCTIONS = ("none", "sum", "mean")
_TENSORS = "Tensor features, Tensor weight, Tensor? bias, Tensor targets, Tensor? class_weight"
_NUMBERS = "float[] floats, int[] ints"


def traced_loss(features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: LossOptions) -> Tensor:
    """Compute what `fused_loss` does, as one operator."""
    # Autocast is decided while tracing: at run time the operator no longer sees which region it stood in.
    kind = _KINDS.index(compute_dtype(features, weight))
    floats = [float(x or 0.0) for x in (options.scale, options.softcap, options.label_smoothing, options.z_loss)]
    ints = [options.ignore_index, options.chunk or 0, _REDUCTIONS.index(options.reduction), kind]
    given = (features, weight, bias, targets, options.class_weight)
    if options.reduction == "none":
        return torch.ops.tiewise.token_losses(*given, floats, ints)
    wanted = [int(torch.is_grad_enabled() and x is not None and x.requires_grad) for x in (features, weight, bias)]
    return torch.ops.tiewise.scalar_loss(*given, floats, [*ints, *wanted])[0]


def _unpacked(class_weight: Tensor | None, floats: list[float], ints: list[int]) -> tuple[LossOptions, torch.dtype]:
    scale, softcap, smoothing, z_loss = floats
    ignored, chunk, reduction, kind = ints[:4]
    options = LossOptions(
        scale, softcap or None, ignored, smoothing, z_loss, class_weight, _REDUCTIONS[reduction], chunk or None
    )
    return options, _KINDS[kind]


def _or_empty(gradients: Gradients, like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0) if x is None else x for x in gradients)  # an operator hands out nothing but tensors


def _empty(like: Tensor, kind: int, *shapes: Any) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(shape, dtype=accumulator(_KINDS[kind])) for shape in shapes)


@torch.library.custom_op(
    "tiewise::scalar_loss", mutates_args=(), schema=f"({_TENSORS}, {_NUMBERS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
def _scalar_loss(*arguments: Any) -> Any:
    features, weight, bias, targets, class_weight, floats, ints = arguments
    options, kind = _unpacked(class_weight, floats, ints)
    loss, found = _scalar_sweep(features, weight, bias, targets, options, Wanted(*map(bool, ints[4:])), kind)
    return (loss, *_or_empty(found, loss))


@_scalar_loss.register_fake
def _(*arguments: Any) -> Any:
    *given, ints = arguments
    shapes = [x.shape if wanted else (0,) for x, wanted in zip(given[:3], ints[4:], strict=True)]
    return _empty(given[0], ints[3], (), *shapes)


def _keep_gradients(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:3]]
    ctx.wanted = inputs[6][4:]


def _scaled_copies(ctx: Any, upstream: Tensor, *_: Any) -> Any:
    triples = zip(ctx.saved_tensors, ctx.dtypes, ctx.wanted, strict=True)
    return (*((x * upstream).to(dtype) if wanted else None for x, dtype, wanted in triples), None, None, None, None)


_scalar_loss.register_autograd(_scaled_copies, setup_context=_keep_gradients)


@torch.library.custom_op("tiewise::token_losses", mutates_args=(), schema=f"({_TENSORS}, {_NUMBERS}) -> Tensor")
def _token_losses(*arguments: Any) -> Any:
    features, weight, bias, targets, class_weight, floats, ints = arguments
    options, kind = _unpacked(class_weight, floats, ints)
    return sweep(features, weight, bias, targets, options, _NOTHING, kind)[0]


@_token_losses.register_fake
def _(features: Tensor, weight: Any, bias: Any, targets: Tensor, class_weight: Any, floats: Any, ints: Any) -> Any:
    return _empty(features, ints[3], targets.shape)[0]


@torch.library.custom_op(
    "tiewise::token_gradients",
    mutates_args=(),
    schema=f"({_TENSORS}, Tensor upstream, {_NUMBERS}) -> (Tensor, Tensor, Tensor)",
)
def _token_gradients(*arguments: Any) -> Any:
    features, weight, bias, targets, class_weight, upstream, floats, ints = arguments
    options, kind = _unpacked(class_weight, floats, ints)
    wanted = Wanted(True, True, bias is not None)
    _, found = sweep(features, weight, bias, targets, options, wanted, kind, upstream)
    return _or_empty(found, upstream.to(accumulator(kind)))


@_token_gradients.register_fake
def _(features: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    return _empty(features, rest[-1][3], features.shape, weight.shape, (0,) if bias is None else bias.shape)


def _keep_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.floats, ctx.ints = inputs[5:]


def _computed_again(ctx: Any, upstream: Tensor) -> Any:
    found = torch.ops.tiewise.token_gradients(*ctx.saved_tensors, upstream, ctx.floats, ctx.ints)
    pairs = zip(found, ctx.saved_tensors[:3], strict=True)
    return (*(None if like is None else x.to(like.dtype) for x, like in pairs), None, None, None, None)


_token_losses.register_autograd(_computed_again, setup_context=_keep_inputs)
