"""`linear_cross_entropy`: the loss of an output head without its logits, and the oracle that it must equal.

    z      = softcap(scale · features @ weightᵀ + bias)            softcap(z) = c · tanh(z / c)
    lse    = log Σ_j exp z_j
    loss_i = (1 − ε) w_t (lse − z_t) + (ε / V) Σ_j w_j (lse − z_j) + ζ lse²        t = target of token i

with ε label smoothing, w class weights (1 where none), ζ the z-loss coefficient. Tokens whose target is `ignore_index`
count for nothing. `mean` divides the sum by Σ_i w_t, as `torch.nn.functional.cross_entropy` does, and gives 0 with zero
gradients, not nan, where every token is ignored.

Sources: label smoothing, Szegedy et al. 2016 §7; z-loss, PaLM (Chowdhery et al. 2022) §5; soft-cap, Gemma 2 §2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tiewise.core.errors import UnsupportedError
from tiewise.ops.autograd import fused_loss, traced_loss
from tiewise.ops.chunked import LossOptions

REDUCTIONS = ("mean", "sum", "none")


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

    `mean` and `sum` compute the gradients in the forward pass (three matrix products in all, none of them repeated),
    `none` recomputes each chunk in the backward pass (four). bf16 and fp16 inputs multiply in their own type and
    accumulate in fp32. Works under autocast, `torch.compile` (as one opaque operator), gradient checkpointing, and
    with frozen features or a frozen weight, whose gradient is then not computed.

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
            transforms, second derivatives.
    """
    options = replace(options, **overrides) if overrides else options
    check_problem(features, weight, targets, bias, options)
    flat, t = features.reshape(-1, features.shape[-1]), targets.reshape(-1)
    if torch.compiler.is_compiling():
        loss = traced_loss(flat, weight, bias, t, options)
    else:
        check_range(t, weight.shape[0], options.ignore_index)
        loss = fused_loss(flat, weight, bias, t, options)
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


def plain(
    features: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, ignore_index: int = -100
) -> Tensor:
    """Compute mean cross-entropy as most code does, in the dtype given: the baseline of tests and benchmarks."""
    return F.cross_entropy(F.linear(features, weight, bias), targets, ignore_index=ignore_index)


def check_problem(features: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, o: LossOptions) -> None:
    """Refuse shapes that do not meet and options out of range; raises as `linear_cross_entropy`."""
    for name, given in (("features", features), ("weight", weight), ("targets", targets)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a tensor, not a {type(given).__name__}")
    if torch.is_floating_point(targets):
        fix = "pass class indices, or compute the logits and use torch.nn.functional.cross_entropy"
        raise UnsupportedError("linear_cross_entropy takes no probability targets", fix)
    for name, tensor in (("features", features), ("a weight", weight)):
        if not tensor.is_floating_point():
            fix = "pass floating-point hidden states [..., E] and a table [V, E]; token ids are looked up first"
            raise UnsupportedError(f"linear_cross_entropy of {name} of type {tensor.dtype}", fix)
    if features.shape[-1] != weight.shape[1] or features.shape[:-1] != targets.shape:
        got = f"features {tuple(features.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}"
        raise ValueError(f"shapes do not meet: {got}; need [..., E], [V, E], [...]")
    for name, vector in (("bias", bias), ("class_weight", o.class_weight)):
        if vector is not None and vector.shape != (weight.shape[0],):
            raise ValueError(f"{name} has shape {tuple(vector.shape)}; need [V] = [{weight.shape[0]}]")
    if o.reduction not in REDUCTIONS:
        raise ValueError(f"unknown reduction {o.reduction!r}; choose one of {', '.join(REDUCTIONS)}")
    if not 0 <= o.label_smoothing <= 1 or o.z_loss < 0 or (o.chunk is not None and o.chunk < 1):
        raise ValueError("need 0 ≤ label_smoothing ≤ 1, z_loss ≥ 0, chunk ≥ 1")
    if o.softcap is not None and not o.softcap > 0:
        raise ValueError(f"softcap must be positive, not {o.softcap}")
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        fix = "compute the logits there, or use tiewise.ops.cross_entropy.oracle"
        raise UnsupportedError("linear_cross_entropy inside a torch.func transform", fix)


def check_range(targets: Tensor, vocab: int, ignore_index: int) -> None:
    """Refuse targets outside [0, vocab) with an IndexError; looked at on a CPU only."""
    if targets.device.type != "cpu" or not targets.numel():
        return
    low, high = (int(v) for v in targets.aminmax())
    if low >= 0 and high < vocab:
        return
    outside = targets[((targets < 0) | (targets >= vocab)) & (targets != ignore_index)]
    if outside.numel():
        raise IndexError(f"target {int(outside[0])} is outside the vocabulary of {vocab} (ignore_index={ignore_index})")
