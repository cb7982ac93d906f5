"""The augmented loss of Inan, Khosravi and Socher (arXiv:1611.01462, §3): soft targets from the table itself.

    z  = features @ weightᵀ + bias                  logits of the head
    u  = table[t]                                   the target word's vector in the input table
    ỹ  = softmax(table @ u / τ)                     words near the target share its probability
    ŷ  = softmax(z / τ)
    loss_i = hard · CE(softmax(z), t) + α KL(ỹ ‖ ŷ)

In chunks of tokens: neither the logits nor the soft targets exist as [N, V], and the soft targets of a chunk are made
once for each distinct word in it. Gradients are exact.

The paper differentiates the loss by the logits alone and takes ỹ as given, as targets are in distillation: so does the
default. Code that follows it without stopping the gradient lets it pass into the table through both factors of ỹ;
`through_targets` does that. As τ → ∞ the gradient by z becomes α (z − table @ u) / (τ² V) for centred logits (§4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tiewise.core.backends import chunk_rows
from tiewise.ops.autograd import mean_factor
from tiewise.ops.chunked import LossOptions, accumulator, compute_dtype
from tiewise.ops.cross_entropy import check_problem, check_range

_BUFFERS = 6  # of [chunk, V] that are alive at once


@dataclass(frozen=True)
class AugmentedOptions:
    """Options of `augmented_cross_entropy`; each may also be passed to it by keyword."""

    alpha: float = 1.0  # α, the weight of the divergence; the paper chooses it in proportion to the temperature
    temperature: float = 1.0  # τ
    hard: float = 1.0  # weight of the cross-entropy against the target itself; 0 trains on soft targets alone
    through_targets: bool = False  # whether ỹ carries gradient into the table
    ignore_index: int = -100  # target value whose tokens count for nothing
    reduction: str = "mean"  # or `sum` or `none`, as `linear_cross_entropy` has them
    chunk: int | None = None  # tokens per chunk; None chooses by vocabulary


_DEFAULT = AugmentedOptions()


class _Tensors(NamedTuple):
    features: Tensor  # [N, E]
    weight: Tensor  # [V, E]
    table: Tensor  # [V, E'], the weight itself where they are one
    bias: Tensor | None  # [V]
    targets: Tensor  # [N]


class _Gradients(NamedTuple):
    """Accumulators; None where not wanted. `table` is `weight` where the two are one."""

    features: Tensor | None
    weight: Tensor | None
    table: Tensor | None
    bias: Tensor | None


def augmented_cross_entropy(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    table: Tensor | None = None,
    bias: Tensor | None = None,
    options: AugmentedOptions = _DEFAULT,
    **overrides: Any,
) -> Tensor:
    """Compute the augmented loss in chunks of tokens; no [N, V] matrix exists.

    `mean` and `sum` compute the gradients in the forward pass, `none` computes each chunk again in the backward pass.

    Args:
        features: [..., E], any floating type.
        weight: output table [V, E].
        targets: [...] word ids, or `ignore_index`.
        table: input table [V, any width], whose rows give the soft targets; None: `weight`.
        bias: [V] or None.
        options: see `AugmentedOptions`.
        **overrides: single options by name, e.g. `alpha=0.5, temperature=10.0`.

    Returns:
        fp32 scalar (fp64 for fp64 inputs), or a tensor shaped like `targets` for `reduction="none"`.

    Raises:
        ValueError: shapes that do not meet, an option out of range.
        IndexError: a target outside [0, V) (checked on CPU only).
        UnsupportedError: features or a weight of whole or complex numbers, probability targets, `torch.func`
            transforms.
    """
    o = replace(options, **overrides) if overrides else options
    plain = LossOptions(ignore_index=o.ignore_index, reduction=o.reduction, chunk=o.chunk)
    check_problem(features, weight, targets, bias, plain)
    if not o.temperature > 0 or o.alpha < 0 or o.hard < 0:
        raise ValueError("need temperature > 0, alpha ≥ 0, hard ≥ 0")
    if table is not None and (table.dim() != 2 or len(table) != len(weight)):
        raise ValueError(f"table has shape {tuple(table.shape)}; need [V, any] with V = {len(weight)}")
    t = targets.reshape(-1)
    check_range(t, weight.shape[0], o.ignore_index)
    own = None if table is weight else table
    loss = _Augmented.apply(features.reshape(-1, features.shape[-1]), weight, own, bias, t, o, torch.is_grad_enabled())
    return loss.view(targets.shape) if o.reduction == "none" else loss


def oracle(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    table: Tensor | None = None,
    bias: Tensor | None = None,
    options: AugmentedOptions = _DEFAULT,
    **overrides: Any,
) -> Tensor:
    """Compute the same loss by its formula, in fp64, with all logits and soft targets: the truth of the tests."""
    o = replace(options, **overrides) if overrides else options
    table = weight.double() if table is None else table.double()
    z = features.double().reshape(-1, features.shape[-1]) @ weight.double().T
    z = z if bias is None else z + bias.double()
    t = targets.reshape(-1)
    valid = t != o.ignore_index
    at = t.where(valid, 0)
    soft = torch.softmax(table[at] @ table.T / o.temperature, 1)
    soft = soft if o.through_targets else soft.detach()
    divergence = (soft * (soft.log() - torch.log_softmax(z / o.temperature, 1))).sum(1)
    each = (o.hard * F.cross_entropy(z, at, reduction="none") + o.alpha * divergence).where(valid, 0)
    if o.reduction == "none":
        return each.view(targets.shape)
    return each.sum() / valid.sum().clamp(min=1) if o.reduction == "mean" else each.sum()


class _Augmented(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        features, weight, table, bias, targets, o, grad_mode = arguments
        ctx.options, ctx.kind = o, compute_dtype(features, weight)
        ctx.dtypes = [None if x is None else x.dtype for x in (features, weight, table, bias)]
        tensors = _Tensors(features, weight, weight if table is None else table, bias, targets)
        ctx.wanted = tuple(grad_mode and need for need in ctx.needs_input_grad[:4])
        if o.reduction == "none":
            ctx.save_for_backward(*(features, weight, table, bias, targets))
            return _sweep(tensors, o, ctx.kind, None, None)
        wide = accumulator(ctx.kind)
        factor = mean_factor(targets, None, o.ignore_index, wide) if o.reduction == "mean" else None
        ctx.gradients = _allocated(tensors, table is None, ctx.wanted, wide) if any(ctx.wanted) else None
        each = _sweep(tensors, o, ctx.kind, factor, ctx.gradients)
        return each.sum() if factor is None else each.sum() * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        if ctx.options.reduction == "none":
            features, weight, table, bias, targets = ctx.saved_tensors
            tensors = _Tensors(features, weight, weight if table is None else table, bias, targets)
            found = _allocated(tensors, table is None, ctx.wanted, accumulator(ctx.kind))
            _sweep(tensors, ctx.options, ctx.kind, upstream, found)
        else:
            found = _Gradients(*(None if g is None else g * upstream for g in ctx.gradients))
        asked = (want and dtype is not None for want, dtype in zip(ctx.wanted, ctx.dtypes, strict=True))
        pairs = zip(found, ctx.dtypes, asked, strict=True)
        return (*(g.to(dtype) if g is not None and ask else None for g, dtype, ask in pairs), None, None, None)


def _allocated(x: _Tensors, one: bool, wanted: tuple[bool, ...], wide: torch.dtype) -> _Gradients:
    features, weight, table, bias = (
        torch.zeros_like(tensor, dtype=wide) if want and tensor is not None else None
        for tensor, want in zip(x[:4], wanted, strict=True)
    )
    return _Gradients(features, weight, weight if one else table, bias)


def _sweep(x: _Tensors, o: AugmentedOptions, kind: torch.dtype, scale: Tensor | None, out: _Gradients | None) -> Tensor:
    """Loss of each token [N]; adds the gradients of Σ scale_i · loss_i (scale [] or [N]; None: all 1) into `out`."""
    wide = accumulator(kind)
    each = torch.zeros(len(x.targets), dtype=wide, device=x.features.device)
    with torch.autocast(x.features.device.type, enabled=False), torch.no_grad():
        weight, table = x.weight.to(kind), x.table.to(kind)
        rows = chunk_rows(len(each), _BUFFERS * len(weight), x.features.device.type, o.chunk)
        for start in range(0, len(each), rows):
            part = slice(start, start + rows)
            chunk = _Tensors(x.features[part].to(kind), weight, table, x.bias, x.targets[part])
            factor = scale[part] if scale is not None and scale.dim() else scale
            into = out and out._replace(features=None if out.features is None else out.features[part])
            each[part] = _chunk(chunk, o, wide, factor, into)
    return each


def _chunk(x: _Tensors, o: AugmentedOptions, wide: torch.dtype, scale: Tensor | None, out: _Gradients | None) -> Tensor:
    """Loss of each token [n] of a chunk; adds its gradients into `out`."""
    valid = x.targets != o.ignore_index
    at = x.targets.where(valid, 0)
    z = (x.features @ x.weight.T).to(wide)
    z = z if x.bias is None else z + x.bias.to(wide)
    on = valid.to(wide) if scale is None else valid * scale
    each, slope = z.new_zeros(len(z)), torch.zeros_like(z)
    if o.hard:
        log_p = torch.log_softmax(z, 1)
        each -= o.hard * log_p.gather(1, at[:, None])[:, 0]
        slope += log_p.exp_()
        slope[torch.arange(len(at), device=at.device), at] -= 1
        slope *= o.hard
    if o.alpha:
        words, place = at.unique(return_inverse=True)
        u = x.table[words]
        log_soft = torch.log_softmax((u @ x.table.T).to(wide) / o.temperature, 1)[place]
        log_y = torch.log_softmax(z / o.temperature, 1)
        soft, gap = log_soft.exp(), log_soft - log_y
        divergence = (soft * gap).sum(1)
        each += o.alpha * divergence
        slope += (log_y.exp_() - soft) * (o.alpha / o.temperature)
        if out is not None and out.table is not None and o.through_targets:
            spread = soft * (gap - divergence[:, None]) * (on * (o.alpha / o.temperature))[:, None]
            by_word = spread.new_zeros(len(words), spread.shape[1]).index_add_(0, place, spread).to(u.dtype)
            out.table.add_(by_word.T @ u)
            out.table.index_add_(0, words, (by_word @ x.table).to(wide))
    if out is not None:
        narrow = slope.mul_(on[:, None]).to(x.features.dtype)
        if out.features is not None:
            out.features.copy_(narrow @ x.weight)
        if out.weight is not None:
            out.weight.add_(narrow.T @ x.features)
        if out.bias is not None:
            out.bias.add_(slope.sum(0))
    return each.masked_fill_(~valid, 0)
