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
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tiewise.core.backends import LossOptions, chunk_rows
from tiewise.ops.chunked import accumulator, check_problem, check_range, chunk_logits, into_gradients
from tiewise.ops.cross_entropy import fused_loss
from tiewise.ops.fast_products import own_products

_BUFFERS = 6  # of [chunk, V] that are alive at once
_PLAIN = LossOptions()


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
    flat = features.reshape(-1, features.shape[-1])
    loss = fused_loss("augmented_cross_entropy", partial(_sweep, o), plain, flat, weight, own, bias, t)
    return loss.view(targets.shape) if o.reduction == "none" else loss


def _sweep(
    o: AugmentedOptions, tensors: Any, kind: torch.dtype, wanted: tuple[bool, ...], scale: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """Loss of each token [N], and the gradients of Σ scale_i · loss_i (scale [] or [N]; None: all 1)."""
    features, weight, table, bias, targets = tensors
    wide = accumulator(kind)
    each = features.new_empty(len(targets), dtype=wide)
    by_features, by_weight, by_table, by_bias = found = [
        torch.zeros_like(x, dtype=wide) if want else None for x, want in zip(tensors[:4], wanted, strict=False)
    ]
    with own_products(features, weight, kind):
        weight = weight.to(kind)
        table, by_table = (weight, by_weight) if table is None else (table.to(kind), by_table)
        rows = chunk_rows(len(each), _BUFFERS * len(weight), features.device.type, o.chunk)
        for start in range(0, len(each), rows):
            part = slice(start, start + rows)
            h, valid = features[part].to(kind), targets[part] != o.ignore_index
            t, on = targets[part].where(valid, 0), valid.to(wide)
            if scale is not None:
                on *= scale[part] if scale.dim() else scale
            z = chunk_logits(h, weight, bias, _PLAIN, each.new_empty(len(h), len(weight)))
            loss, slope = z.new_zeros(len(z)), torch.zeros_like(z)  # slope: ∂loss_i / ∂z_j
            if o.hard:
                log_p = torch.log_softmax(z, 1)
                loss -= o.hard * log_p.gather(1, t[:, None])[:, 0]
                slope += log_p.exp_()
                slope[torch.arange(len(t), device=t.device), t] -= 1
                slope *= o.hard
            if o.alpha:
                words, place = t.unique(return_inverse=True)
                u = table[words]
                log_soft = torch.log_softmax((u @ table.T).to(wide) / o.temperature, 1)[place]
                log_y = torch.log_softmax(z / o.temperature, 1)
                soft, gap = log_soft.exp(), log_soft - log_y
                divergence = (soft * gap).sum(1)
                loss += o.alpha * divergence
                slope += (log_y.exp_() - soft) * (o.alpha / o.temperature)
                if by_table is not None and o.through_targets:  # through u, and the table that u is held against
                    spread = soft * (gap - divergence[:, None]) * (on * (o.alpha / o.temperature))[:, None]
                    by_word = spread.new_zeros(len(words), spread.shape[1]).index_add_(0, place, spread).to(u.dtype)
                    by_table.add_(by_word.T @ u)
                    by_table.index_add_(0, words, (by_word @ table).to(wide))
            each[part] = loss.masked_fill_(~valid, 0)
            into_gradients((by_features, by_weight, by_bias), part, slope, on, h, weight, 1.0, onto=True)
    return each, found
