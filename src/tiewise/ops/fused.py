"""Autograd around the chunked sweep: gradients beside the loss for a scalar, recomputed for per-token losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiewise.core.errors import UnsupportedError
from tiewise.ops.chunked import sweep
from tiewise.ops.problem import Gradients, Head, Tensors, TokenLoss, Wanted, accumulator, compute_dtype

_NOTHING = Wanted(False, False, False)


def fused_scalar(tensors: Tensors, head: Head, loss: TokenLoss, *, mean: bool) -> Tensor:
    """Sum or weighted mean; three matrix products if a gradient is wanted, one if not."""
    features, weight, bias, targets, class_weight = tensors
    return _Scalar.apply(features, weight, bias, (targets, class_weight, head, loss, mean, torch.is_grad_enabled()))


def fused_tokens(tensors: Tensors, head: Head, loss: TokenLoss) -> Tensor:
    """Loss of each token [N]; each chunk is computed again in the backward pass (four matrix products)."""
    features, weight, bias, targets, class_weight = tensors
    return _Tokens.apply(features, weight, bias, (targets, class_weight, head, loss))


def mean_factor(targets: Tensor, class_weight: Tensor | None, ignore_index: int, wide: torch.dtype) -> Tensor:
    """1 / Σ w_t over the tokens that count; 1 where none does, so that an all-ignored batch gives 0."""
    valid = targets != ignore_index
    total = valid.sum() if class_weight is None else (class_weight.to(wide)[targets.where(valid, 0)] * valid).sum()
    return 1 / total.where(total > 0, 1).to(wide)


class _Scalar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple[Any, ...]) -> Tensor:
        targets, class_weight, head, loss, mean, grad_mode = rest
        wanted = Wanted(*(grad_mode and need for need in ctx.needs_input_grad[:3]))
        kind = compute_dtype(features, weight)
        factor = mean_factor(targets, class_weight, loss.ignore_index, accumulator(kind)) if mean else None
        # The 1/N of a mean costs nothing in the row coefficients; in fp16 it would underflow there and comes last.
        early, ctx.late = (None, factor) if kind == torch.float16 else (factor, None)
        tensors = (features, weight, bias, targets, class_weight)
        each, ctx.gradients = sweep(tensors, head, loss, wanted, kind, early)
        ctx.dtypes = [None if x is None else x.dtype for x in (features, weight, bias)]
        return each.sum() if factor is None else each.sum() * factor

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        g: Gradients | None = ctx.gradients
        if g is None:
            fix = "pass retain_graph=True to the first backward"
            raise UnsupportedError("this loss was already differentiated and its graph freed", fix)
        # The buffers are given away when the graph dies with this call, and copied when it may be asked again.
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        factor = upstream if ctx.late is None else upstream * ctx.late
        needless = factor.device.type == "cpu" and factor.item() == 1.0  # on a GPU asking would cost a synchronisation
        if not keep:
            ctx.gradients = None
        pairs = zip((g.features, g.weight, g.bias), ctx.dtypes, strict=True)
        return (*(_scaled(x, None if needless else factor, keep, dtype) for x, dtype in pairs), None)


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple[Any, ...]) -> Tensor:
        targets, class_weight, ctx.head, ctx.loss = rest
        ctx.kind = compute_dtype(features, weight)
        tensors = (features, weight, bias, targets, class_weight)
        ctx.save_for_backward(*tensors)
        return sweep(tensors, ctx.head, ctx.loss, _NOTHING, ctx.kind)[0]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivative()
        tensors = ctx.saved_tensors
        _, g = sweep(tensors, ctx.head, ctx.loss, Wanted(*ctx.needs_input_grad[:3]), ctx.kind, upstream)
        pairs = zip((g.features, g.weight, g.bias), tensors, strict=False)
        return (*(None if x is None else x.to(like.dtype) for x, like in pairs), None)


def _scaled(x: Tensor | None, factor: Tensor | None, keep: bool, dtype: torch.dtype) -> Tensor | None:
    if x is None:
        return None
    if factor is not None:
        x = x * factor if keep else x.mul_(factor)
    elif keep:
        x = x.clone()
    return x.to(dtype)


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():
        fix = "compute the logits and use torch.nn.functional.cross_entropy where create_graph=True is needed"
        raise UnsupportedError("linear_cross_entropy has no second derivative", fix)
