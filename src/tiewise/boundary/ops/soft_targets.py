"""Losses against whole distributions, a teacher's or one that the table itself gives; no [N, V] matrix exists.

`linear_divergence`: how far the student's q = softmax(z) is, token by token, from the teacher's p = softmax(y) over one
vocabulary, each of features, table and options of its own (widths may differ), both at one temperature. With
m = (1 − β) q + β p:

    β = 0        D = KL(p ‖ q)                                 ∂D/∂z_j = q_j − p_j
    β = 1        D = KL(q ‖ p)                                 ∂D/∂z_j = q_j (log q_j/p_j − KL(q ‖ p))
    0 < β < 1    D = β KL(p ‖ m) + (1 − β) KL(q ‖ m)           ∂D/∂z_j = (1 − β) q_j (log q_j/m_j − KL(q ‖ m))

the generalised Jensen–Shannon divergence of GKD (Agarwal et al. 2024, arXiv:2306.13649, eq. 1), β as TRL's
`generalized_jsd_loss` has it. The teacher is given, as targets are: it gets no gradient. Gradients stand beside the
loss, for one matrix product more than a cross-entropy takes.

`augmented_cross_entropy`, of Inan, Khosravi and Socher (arXiv:1611.01462, §3):

    z  = features @ weightᵀ + bias                  logits of the head
    u  = table[t]                                   the target word's vector in the input table
    ỹ  = softmax(table @ u / τ)                     words near the target share its probability
    ŷ  = softmax(z / τ)
    loss_i = hard · CE(softmax(z), t) + α KL(ỹ ‖ ŷ)

The soft targets of a chunk are made once for each distinct word in it. The paper differentiates by the logits alone and
takes ỹ as given: so does the default. Code that follows it without stopping the gradient lets it pass into the table
through both factors of ỹ; `through_targets` does that. As τ → ∞ the gradient by z becomes α (z − table @ u) / (τ² V)
for centred logits (§4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.ops import devices
from tiewise.boundary.ops.chunk_products import (
    BLOCKS,
    cached_rows,
    chunk_logits,
    gradient_buffers,
    into_gradients,
    softcap_slope,
)
from tiewise.boundary.ops.fast_products import own_products
from tiewise.boundary.ops.fused_loss import fused_loss
from tiewise.boundary.ops.log_prob import at_temperature
from tiewise.boundary.ops.problem import accumulator, check_problem, check_range, compute_dtype, flat_rows
from tiewise.core.backends import LossOptions

_BUFFERS = 8  # of [chunk, V] that are alive at once
_WORK = 9  # copies of a block that a divergence holds at once
_PLAIN = LossOptions()


@torch.compiler.disable  # whose tracing would unroll the chunks
def linear_divergence(
    features: Tensor,
    weight: Tensor,
    teacher_features: Tensor,
    teacher_weight: Tensor,
    targets: Tensor | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    options: LossOptions = _PLAIN,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    teacher_options: LossOptions | None = None,
    **overrides: Any,
) -> Tensor:
    """Divergence of softmax(features @ weightᵀ / temperature) from the teacher's; no [N, V] matrix exists.

    Types and frozen sides as in `linear_cross_entropy`; under `torch.compile` it runs eagerly, between two graphs.

    Args:
        features: the student's [..., E], any floating type.
        weight: the student's table [V, E].
        teacher_features: [..., F] at the same tokens.
        teacher_weight: [V, F] over the same vocabulary.
        targets: [...] labels, of which only matters where they are `ignore_index`; None: every token counts.
        bias: the student's [V] or None.
        teacher_bias: the teacher's [V] or None.
        options: see `LossOptions`; `scale`, `softcap`, `ignore_index`, `reduction`, `chunk` and `logits` mean something
            here. `mean` divides by the number of tokens that count.
        beta: 0 forward KL(teacher ‖ student), 1 reverse KL(student ‖ teacher), between them Jensen–Shannon.
        temperature: divides both sides' logits, after the soft-cap; the result is not multiplied by its square.
        teacher_options: the teacher's `scale`, `softcap` and `logits`; None: those of `options`.
        **overrides: single options by name, e.g. `reduction="sum"`.

    Returns:
        nats, an fp32 scalar (fp64 for fp64 inputs), or a tensor [...] for `reduction="none"`. A token that one side
        rules out (a logit of −inf) is inf in the KL that expects it, as its definition says, and adds 0 elsewhere.

    Raises:
        TypeError, ValueError, UnsupportedError: as `linear_cross_entropy`; sides that do not meet, a beta outside
            [0, 1], a temperature that is not positive and options of cross-entropies alone are ValueErrors.
    """
    o = replace(options, **overrides) if overrides else options
    shape = features.shape[:-1] if isinstance(features, Tensor) else ()
    if targets is None:
        device = features.device if isinstance(features, Tensor) else None
        targets = torch.full(shape, o.ignore_index + 1, device=device)
    check_problem(features, weight, targets, bias, o)
    for name, given in (("teacher_features", teacher_features), ("teacher_weight", teacher_weight)):
        if not isinstance(given, Tensor):
            raise TypeError(f"{name} must be a tensor, not a {type(given).__name__}")
    if teacher_features.shape[:-1] != shape or len(teacher_weight) != len(weight):
        got = f"teacher_features {tuple(teacher_features.shape)}, teacher_weight {tuple(teacher_weight.shape)}"
        raise ValueError(f"the teacher does not meet the student: {got}; need {[*shape, 'F']} and [{len(weight)}, F]")
    check_problem(teacher_features, teacher_weight, targets, teacher_bias, teacher_options or o)
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1], not {beta}")
    o, theirs = at_temperature(o, temperature), at_temperature(teacher_options or o, temperature)
    if temperature != 1.0:
        bias, teacher_bias = (None if x is None else x / temperature for x in (bias, teacher_bias))
    teacher = (flat_rows(teacher_features), teacher_weight, teacher_bias)
    fixed = (None if x is None else x.detach() for x in teacher)
    sweep = partial(_divergence_sweep, o, theirs, beta, compute_dtype(teacher_features, teacher_weight))
    flat = flat_rows(features)
    loss = fused_loss("linear_divergence", sweep, o, flat, weight, bias, *fixed, targets.reshape(-1))
    return loss.view(shape) if o.reduction == "none" else loss


def _divergence_sweep(
    o: LossOptions,
    theirs: LossOptions,
    beta: float,
    teacher_kind: torch.dtype,
    tensors: Any,
    kind: torch.dtype,
    wanted: tuple[bool, ...],
    row_weight: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Divergence of each token [N], and the gradients of Σ row_weight_i · D_i (row_weight [] or [N]; None: all 1)."""
    features, weight, bias, teacher_features, teacher_weight, teacher_bias, targets = tensors
    wide, (n, v) = accumulator(kind), (len(features), len(weight))
    teacher_kind = teacher_kind if accumulator(teacher_kind) == wide else wide
    each = features.new_empty(n, dtype=wide)
    found = gradient_buffers(tensors[:3], wanted[:3], wide)
    with own_products(features, weight, kind):
        weight, teacher_weight = weight.to(kind), teacher_weight.to(teacher_kind)
        bias, teacher_bias = (None if x is None else x.to(wide) for x in (bias, teacher_bias))
        work = 0 if devices.is_cpu(features) else _WORK / BLOCKS  # on the blocks of a chunk
        rows = devices.rows_at_once(n, devices.numbers_held(v, 2 + work, kind), features, o.chunk)
        ours, others = each.new_empty(2, min(rows, n), v)
        for start in range(0, n, rows):
            part = slice(start, start + rows)
            h, valid = features[part].to(kind), targets[part] != o.ignore_index
            z = chunk_logits(h, weight, bias, o, ours[: len(h)])
            x = teacher_features[part].to(teacher_kind)
            y = chunk_logits(x, teacher_weight, teacher_bias, theirs, others[: len(h)])
            for block in cached_rows(z):
                slope = None
                if o.softcap is not None:
                    slope = softcap_slope(z[block], o.softcap, torch.empty_like(z[block]))
                each[part][block], z[block] = _divergence(z[block], y[block], beta)
                if slope is not None:
                    z[block].mul_(slope)
                del slope  # before the next block has its own
            each[part].masked_fill_(~valid, 0)
            if any(wanted):
                c = valid if row_weight is None else valid * (row_weight[part] if row_weight.dim() else row_weight)
                into_gradients(found, part, z, c.to(wide), h, weight, o.scale)
    return each, [*found, None, None, None]


def _divergence(z: Tensor, y: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """D [n] of student's and teacher's logits [n, V], and ∂D/∂z [n, V]."""
    log_q, log_p = z.log_softmax(1), y.log_softmax(1)
    q, p = log_q.exp(), log_p.exp()
    if beta == 0:
        return _expected(p, log_p - log_q).sum(1), q - p
    log_m = log_p if beta == 1 else ((1 - beta) * q + beta * p).log()
    share = 1.0 if beta == 1 else 1 - beta
    terms = _expected(q, log_q - log_m)
    reverse = terms.sum(1)
    found = share * reverse if beta == 1 else share * reverse + beta * _expected(p, log_p - log_m).sum(1)
    return found, terms.sub_(q.mul_(reverse[:, None])).mul_(share)


def _expected(p: Tensor, x: Tensor) -> Tensor:
    """Terms p · x of an expectation, 0 where p is, even if x is infinite there."""
    return x.mul_(p).masked_fill_(p == 0, 0)


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
    if not (0 < o.temperature < math.inf and 0 <= o.alpha < math.inf and 0 <= o.hard < math.inf):
        raise ValueError("need temperature > 0, alpha ≥ 0, hard ≥ 0, all finite")
    if table is not None and (table.dim() != 2 or len(table) != len(weight)):
        raise ValueError(f"table has shape {tuple(table.shape)}; need [V, any] with V = {len(weight)}")
    t = targets.reshape(-1).long()
    check_range(t, weight.shape[0], o.ignore_index)
    own = None if table is weight else table
    flat = flat_rows(features)
    loss = fused_loss("augmented_cross_entropy", partial(_augmented_sweep, o), plain, flat, weight, own, bias, t)
    return loss.view(targets.shape) if o.reduction == "none" else loss


def _augmented_sweep(
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
        rows = devices.rows_at_once(len(each), devices.numbers_held(len(weight), _BUFFERS, kind), features, o.chunk)
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
                del log_p
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
