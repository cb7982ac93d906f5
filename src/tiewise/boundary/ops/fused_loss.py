"""Reduction of losses that are computed together with their gradients, and their backward pass.

The forward pass of a scalar loss also computes the gradients. The upstream gradient of per-token losses is unknown
until the backward pass, which computes each chunk again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.ops import devices, row_loss
from tiewise.boundary.ops.chunk_products import Gradients
from tiewise.boundary.ops.problem import accumulator, compute_dtype
from tiewise.boundary.ops.vocabulary_shard import VocabularyShard
from tiewise.core.backends import LossOptions
from tiewise.core.errors import UnsupportedError

Needs = tuple[bool, ...]
# (tensors, type of the products, needed gradients, weight of each token's loss) → losses [N], gradients.
# `tensors` is a tuple that each loss defines; its last element are the targets.
LossPass = Callable[[Any, torch.dtype, Needs, Tensor | None], tuple[Tensor, Gradients]]


def reduce_losses(
    loss_pass: LossPass,
    options: LossOptions,
    tensors: Sequence[Tensor | None],
    product_dtype: torch.dtype,
    needs: Needs,
    upstream: Tensor | None = None,
) -> tuple[Tensor, Gradients]:
    """Reduce a pass's losses as `options` say, and return them with their gradients.

    The gradients are those of the reduced loss, or of Σ upstream_i · loss_i if `upstream` is given.
    """
    if options.reduction == "none":
        if upstream is None:
            needs = (False,) * len(needs)
        return loss_pass(tensors, product_dtype, needs, upstream)
    if options.reduction == "sum":
        losses, gradients = loss_pass(tensors, product_dtype, needs, upstream)
        return losses.sum(), gradients
    targets = tensors[-1]
    assert targets is not None, "the last of a loss's tensors are its targets"
    factor = _mean_factor(options, targets, accumulator(product_dtype))
    # fp16: the factor would underflow in the row coefficients, so it multiplies the gradients
    if product_dtype == torch.float16:
        losses, gradients = loss_pass(tensors, product_dtype, needs, None)
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(factor)
    else:  # in the row coefficients the factor costs nothing
        row_weight = factor if upstream is None else factor * upstream
        losses, gradients = loss_pass(tensors, product_dtype, needs, row_weight)
    return losses.sum() * factor, gradients


def _mean_factor(options: LossOptions, targets: Tensor, wide: torch.dtype) -> Tensor:
    """Return 1 / Σ w_t over the counted tokens; 1 without any.

    So the mean of no tokens is 0.
    """
    valid = targets != options.ignore_index
    if options.class_weight is None:
        factor: Tensor = valid.sum().clamp(min=1).to(wide).reciprocal()
        return factor
    total: Tensor = (options.class_weight.to(wide)[targets.where(valid, 0)] * valid).sum()
    return 1 / total.where(total > 0, 1).to(wide)


def fused_loss(
    name: str,
    loss_pass: LossPass,
    options: LossOptions,
    *tensors: Tensor | None,
    upstream: float | None = None,
    shard: VocabularyShard | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """Return the reduced loss, differentiable once.

    `name` is for the message that refuses a second derivative. With `upstream`, the pass writes the second tensor's
    gradient to `into`, already multiplied by `upstream`. With a `shard` whose ranks have separate tokens, that
    gradient sums all ranks' losses. If the ranks' upstream gradients differ, the backward pass computes the loss again.
    """
    call = _Call(name, loss_pass, options, upstream, shard, into)
    apply: Callable[..., Tensor] = _Fused.apply
    return apply(call, torch.is_grad_enabled(), *tensors)


@dataclass(frozen=True, eq=False)
class _Call:
    """Arguments of `fused_loss` other than its tensors."""

    name: str
    loss_pass: LossPass
    options: LossOptions
    upstream: float | None
    shard: VocabularyShard | None
    into: Tensor | None

    @property
    def is_per_token(self) -> bool:
        """Return whether the losses are not reduced."""
        return self.options.reduction == "none"

    def differing_ranks(self) -> VocabularyShard | None:
        """Return the shard if its ranks may multiply their losses by different factors."""
        if self.shard is None or not self.shard.own_tokens:
            return None
        if self.upstream is not None or self.is_per_token:
            return None
        return self.shard

    def find_counted(self, targets: Tensor) -> Tensor | None:
        """Return which tokens are not ignored, or for a reduced loss whether any is.

        It is None if the backward pass does not check it.
        """
        if self.shard is not None or self.upstream is not None:
            return None
        counts = targets != self.options.ignore_index
        return counts if self.is_per_token else counts.any()

    def check_upstream(self, expected: float, upstream: Tensor) -> None:
        """Refuse a factor other than the one by which the gradient in `into` is already multiplied.

        Reading the factor would wait for a GPU. There a wrong one makes the first row of `into` nan, and with it the
        next loss.
        """
        if not devices.is_cpu(upstream):
            is_right = torch.isclose(upstream, torch.full_like(upstream, expected), rtol=1e-6, atol=0)
            assert self.into is not None, "only a gradient in `into` has a factor"
            self.into[:1].masked_fill_(~is_right, torch.nan)
            return
        factor = upstream.item()
        if not math.isclose(factor, expected, rel_tol=1e-6):
            fix = f"give upstream={factor:g} to the loss"
            raise UnsupportedError(f"into has the gradient multiplied by {expected:g} already", fix)


class _Fused(torch.autograd.Function):
    """Autograd function of a loss that a pass computes with its gradients."""

    @staticmethod
    def forward(ctx: Any, call: _Call, grad_mode: bool, *tensors: Any) -> Tensor:
        """Compute the loss, and the gradients of a reduced one.

        The inputs are saved if the backward pass computes the loss again.
        """
        ctx.call, ctx.product_dtype = call, compute_dtype(*tensors[:2])
        ctx.needs = tuple(grad_mode and need for need in ctx.needs_input_grad[2:])
        ctx.dtypes = [None if x is None else x.dtype for x in tensors]
        ctx.differing_ranks = call.differing_ranks()
        if call.is_per_token or ctx.differing_ranks is not None:
            ctx.save_for_backward(*tensors)
        ctx.counts = call.find_counted(tensors[-1])
        upstream = None
        if call.upstream is not None:  # `into` gets the table's gradient, even if autograd needs none
            ctx.needs = (ctx.needs[0], grad_mode, *ctx.needs[2:])
            upstream = tensors[0].new_full((), call.upstream, dtype=accumulator(ctx.product_dtype))
        loss, ctx.gradients = reduce_losses(
            call.loss_pass, call.options, tensors, ctx.product_dtype, ctx.needs, upstream
        )
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the tensors, in the tensors' types."""
        call: _Call = ctx.call
        if torch.is_grad_enabled():
            fix = "compute the logits and use torch.nn.functional.cross_entropy where create_graph=True is needed"
            raise UnsupportedError(f"{call.name} has no second derivative", fix)
        if ctx.counts is not None:  # an ignored token has no gradient, even if its loss is divided by 0 later
            upstream = upstream.where(ctx.counts, 0)
        gradients = _gradients(ctx, upstream)
        targets = None
        return (None, None, *_convert_gradients(gradients, ctx.dtypes[:-1]), targets)


def _gradients(ctx: Any, upstream: Tensor) -> Gradients:
    """Return the gradients from the forward pass, or from another pass."""
    call: _Call = ctx.call
    if call.is_per_token or _ranks_differ(ctx, upstream):
        _, gradients = reduce_losses(
            call.loss_pass, call.options, ctx.saved_tensors, ctx.product_dtype, ctx.needs, upstream
        )
        return gradients
    if ctx.gradients is None:
        fix = "pass retain_graph=True to the first backward" if call.upstream is None else "compute it again"
        raise UnsupportedError("this loss was already differentiated and its graph freed", fix)
    if call.upstream is None:
        return _scale_gradients(ctx, upstream)
    call.check_upstream(call.upstream, upstream)
    by_features, _, *others = ctx.gradients  # `into` holds the second
    ctx.gradients = None
    return [by_features, None, *others]


def _ranks_differ(ctx: Any, upstream: Tensor) -> bool:
    """Return whether the ranks' upstream gradients differ, so that the saved gradients are wrong."""
    if ctx.differing_ranks is None or ctx.gradients is None:
        return False
    return bool((ctx.differing_ranks.gather(upstream) != upstream).any())


def _scale_gradients(ctx: Any, upstream: Tensor) -> Gradients:
    """Return the gradients of a reduced loss multiplied by `upstream`.

    If the graph is freed after this backward pass, the buffers themselves are returned, otherwise copies.
    """
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    gradients: Gradients = ctx.gradients
    if not keep:
        ctx.gradients = None
    is_one = upstream.device.type == "cpu" and upstream.item() == 1.0  # on a GPU this check would synchronise
    if is_one and not keep:
        return gradients
    results: Gradients = []
    for gradient in gradients:
        if gradient is None:
            results.append(None)
        elif is_one:
            results.append(gradient.clone())
        elif keep:
            results.append(gradient * upstream)
        else:
            _scale_in_place(gradient, upstream)
            results.append(gradient)
    return results


def _scale_in_place(gradient: Tensor, factor: Tensor) -> None:
    """Multiply a gradient by a number on its device."""
    if row_loss.can_scale(gradient):
        row_loss.scale_gradient(gradient, factor)
    else:
        gradient.mul_(factor)


def _convert_gradients(gradients: Gradients, dtypes: Sequence[torch.dtype | None]) -> Gradients:
    """Return each gradient in the type of its tensor."""
    results: Gradients = []
    for gradient, dtype in zip(gradients, dtypes, strict=True):
        if gradient is not None:
            gradient = gradient.to(dtype)
        results.append(gradient)
    return results
