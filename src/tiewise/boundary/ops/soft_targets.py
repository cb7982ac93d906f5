"""Losses against distributions, from a teacher or from the table, without an [N, V] matrix.

`linear_divergence` measures, for each token, the distance of the student's q = softmax(z) from the teacher's p =
softmax(y) over one vocabulary. Each side has its features, table and options (widths may differ); both use one
temperature. With m = (1 − β) q + β p:

    β = 0        D = KL(p ‖ q)                                 ∂D/∂z_j = q_j − p_j
    β = 1        D = KL(q ‖ p)                                 ∂D/∂z_j = q_j (log q_j/p_j − KL(q ‖ p))
    0 < β < 1    D = β KL(p ‖ m) + (1 − β) KL(q ‖ m)           ∂D/∂z_j = (1 − β) q_j (log q_j/m_j − KL(q ‖ m))

This is the generalised Jensen–Shannon divergence of GKD (Agarwal et al. 2024, arXiv:2306.13649, eq. 1), with β as in
TRL's `generalized_jsd_loss`. The teacher is constant, as targets are: it gets no gradient. The gradients are computed
next to the loss, for one matrix product more than a cross-entropy takes.

`augmented_cross_entropy`, of Inan, Khosravi and Socher (arXiv:1611.01462, §3):

    z  = features @ weightᵀ + bias                  logits of the head
    u  = table[t]                                   the target word's vector in the input table
    ỹ  = softmax(table @ u / τ)                     words near the target share its probability
    ŷ  = softmax(z / τ)
    loss_i = hard · CE(softmax(z), t) + α KL(ỹ ‖ ŷ)

The soft targets of a chunk are computed once for each distinct word in it. The paper differentiates by the logits alone
and treats ỹ as constant, and so does the default. Implementations that do not stop the gradient there let it reach the
table through both factors of ỹ; `through_targets` selects that. As τ → ∞ the gradient by z becomes α (z − table @ u) /
(τ² V) for centred logits (§4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tiewise.boundary.ops import devices
from tiewise.boundary.ops.chunk_products import (
    BLOCKS,
    Gradients,
    accumulate_gradients,
    chunk_logits,
    gradient_buffers,
    row_blocks,
    softcap_slope,
)
from tiewise.boundary.ops.fast_products import pass_products
from tiewise.boundary.ops.fused_loss import Needs, fused_loss
from tiewise.boundary.ops.log_prob import at_temperature, bias_at_temperature
from tiewise.boundary.ops.problem import (
    accumulator,
    check_problem,
    check_range,
    compute_dtype,
    flat_rows,
    require_tensors,
)
from tiewise.core.backends import LossOptions

_BUFFERS = 8  # matrices [chunk, V] that are alive at once
_WORK = 9  # copies of a block that are alive at once in a divergence
_PLAIN = LossOptions()

Function = TypeVar("Function", bound=Callable[..., Any])
_eager: Callable[[Function], Function] = torch.compiler.disable


@_eager  # tracing would unroll the chunks
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
    """Return the divergence of softmax(features @ weightᵀ / temperature) from the teacher's distribution.

    No [N, V] matrix exists. Types and frozen inputs work as in `linear_cross_entropy`. Under `torch.compile` the
    function runs eagerly, between two graphs. The module's header has the formulas and their source.

    >>> import torch
    >>> features, weight = torch.ones(2, 4), torch.eye(4)
    >>> linear_divergence(features, weight, features, weight)  # the teacher equals the student
    tensor(0.)

    Args:
        features: the student's [..., E], any floating type.
        weight: the student's table [V, E].
        teacher_features: [..., F] at the same tokens.
        teacher_weight: [V, F] over the same vocabulary.
        targets: [...] labels; a token is left out if its label is `ignore_index`, and other values have no effect.
            None: no token is left out.
        bias: the student's [V] or None.
        teacher_bias: the teacher's [V] or None.
        options: see `LossOptions`; only `scale`, `softcap`, `ignore_index`, `reduction`, `chunk` and `logits` apply.
            `mean` divides by the number of tokens that are not left out.
        beta: 0 forward KL(teacher ‖ student), 1 reverse KL(student ‖ teacher), between them Jensen–Shannon.
        temperature: divides both sides' logits, after the soft-cap; the result is not multiplied by its square.
        teacher_options: the teacher's `scale`, `softcap` and `logits`; None: those of `options`.
        **overrides: single options by name, e.g. `reduction="sum"`.

    Returns:
        nats, an fp32 scalar (fp64 for fp64 inputs), or a tensor [...] for `reduction="none"`. If one side excludes a
        word (a logit of −inf), a KL in which the other side expects it is inf, by its definition; otherwise the word
        adds 0.

    Raises:
        TypeError: as `linear_cross_entropy`.
        ValueError: as `linear_cross_entropy`; the two sides do not fit together, `beta` is outside [0, 1], the
            temperature is not positive, or an option applies to cross-entropies only.
        UnsupportedError: as `linear_cross_entropy`.
    """
    options = replace(options, **overrides) if overrides else options
    theirs = teacher_options or options
    if targets is None:
        targets = _counting_targets(features, options.ignore_index)
    check_problem(features, weight, targets, bias, options)
    require_tensors(teacher_features=teacher_features, teacher_weight=teacher_weight)
    _check_sides(features, weight, teacher_features, teacher_weight)
    check_problem(teacher_features, teacher_weight, targets, teacher_bias, theirs)
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1], not {beta}")
    options, theirs = at_temperature(options, temperature), at_temperature(theirs, temperature)
    bias, teacher_bias = (bias_at_temperature(one, temperature) for one in (bias, teacher_bias))
    if teacher_bias is not None:
        teacher_bias = teacher_bias.detach()
    teacher = (flat_rows(teacher_features).detach(), teacher_weight.detach(), teacher_bias)
    loss_pass = _DivergencePass(options, theirs, beta, compute_dtype(teacher_features, teacher_weight))
    flat = flat_rows(features)
    loss = fused_loss("linear_divergence", loss_pass, options, flat, weight, bias, *teacher, targets.reshape(-1))
    if options.reduction == "none":
        return loss.view(features.shape[:-1])
    return loss


def _check_sides(features: Tensor, weight: Tensor, teacher_features: Tensor, teacher_weight: Tensor) -> None:
    """Raise a ValueError if the teacher has other tokens or another vocabulary."""
    shape = features.shape[:-1]
    if teacher_features.shape[:-1] != shape or len(teacher_weight) != len(weight):
        got = f"teacher_features {tuple(teacher_features.shape)}, teacher_weight {tuple(teacher_weight.shape)}"
        raise ValueError(f"the teacher does not meet the student: {got}; need {[*shape, 'F']} and [{len(weight)}, F]")


def _counting_targets(features: Any, ignore_index: int) -> Tensor:
    """Return targets of which none is ignored.

    If the features are not a tensor, a later check refuses them.
    """
    if not isinstance(features, Tensor):
        return torch.full((), ignore_index + 1)
    return torch.full(features.shape[:-1], ignore_index + 1, device=features.device)


class _DivergenceTensors(NamedTuple):
    """Inputs of the divergence: the student's, the teacher's, and the targets [N]."""

    features: Tensor
    weight: Tensor
    bias: Tensor | None
    teacher_features: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor | None
    targets: Tensor


@dataclass(frozen=True, eq=False)
class _DivergencePass:
    """Function that computes each token's divergence and its gradients, in chunks of tokens."""

    options: LossOptions
    teacher_options: LossOptions
    beta: float
    teacher_dtype: torch.dtype

    def __call__(
        self, tensors: Any, product_dtype: torch.dtype, needs: Needs, row_weight: Tensor | None
    ) -> tuple[Tensor, Gradients]:
        """Return D [N], and the gradients of Σ row_weight_i · D_i.

        `row_weight` is [] or [N]; None: all 1.
        """
        t, options, wide = _DivergenceTensors(*tensors), self.options, accumulator(product_dtype)
        losses = t.features.new_empty(len(t.features), dtype=wide)
        gradients = gradient_buffers((t.features, t.weight, t.bias), needs[:3], wide)
        with pass_products(t.features, t.weight, product_dtype):
            t = self._convert(t, product_dtype)
            rows, (logits, teacher_logits) = self._allocate(t, losses, product_dtype)
            for start in range(0, len(losses), rows):
                part = slice(start, start + rows)
                h, x = t.features[part].to(product_dtype), t.teacher_features[part].to(t.teacher_weight.dtype)
                z = chunk_logits(h, t.weight, t.bias, options, logits[: len(h)])
                y = chunk_logits(x, t.teacher_weight, t.teacher_bias, self.teacher_options, teacher_logits[: len(h)])
                self._diverge(losses[part], z, y)
                valid = t.targets[part] != options.ignore_index
                losses[part].masked_fill_(~valid, 0)
                if any(needs):
                    c = valid if row_weight is None else valid * _select_row_weight(row_weight, part)
                    accumulate_gradients(gradients, part, z, c.to(wide), h, t.weight, options.scale)
        return losses, [*gradients, None, None, None]  # the teacher gets no gradient

    def _convert(self, t: _DivergenceTensors, product_dtype: torch.dtype) -> _DivergenceTensors:
        """Return the tensors with tables in the products' types, and biases in the sums' types."""
        wide = accumulator(product_dtype)
        teacher_dtype = self.teacher_dtype if accumulator(self.teacher_dtype) == wide else wide
        return t._replace(
            weight=t.weight.to(product_dtype),
            teacher_weight=t.teacher_weight.to(teacher_dtype),
            bias=None if t.bias is None else t.bias.to(wide),
            teacher_bias=None if t.teacher_bias is None else t.teacher_bias.to(wide),
        )

    def _allocate(self, t: _DivergenceTensors, losses: Tensor, product_dtype: torch.dtype) -> tuple[int, Tensor]:
        """Return the tokens of a chunk, and memory for both sides' logits [2, rows, V]."""
        n, v = len(losses), len(t.weight)
        work = 0 if devices.is_cpu(t.features) else _WORK / BLOCKS  # copies of a block, as a share of the chunk
        numbers = devices.numbers_per_token(v, 2 + work, product_dtype)
        rows = devices.chunk_size(n, numbers, t.features, self.options.chunk)
        return rows, losses.new_empty(2, min(rows, n), v)

    def _diverge(self, losses: Tensor, z: Tensor, y: Tensor) -> None:
        """Write D [n] of both sides' logits into `losses`, and ∂D/∂z over the student's `z`."""
        for block in row_blocks(z):
            slope = None
            if self.options.softcap is not None:
                slope = softcap_slope(z[block], self.options.softcap, torch.empty_like(z[block]))
            losses[block], z[block] = _divergence(z[block], y[block], self.beta)
            if slope is not None:
                z[block].mul_(slope)
            del slope  # frees the memory before the next block allocates


def _select_row_weight(row_weight: Tensor, part: slice) -> Tensor:
    """Return the factors of some tokens' losses, or the one factor of all tokens."""
    return row_weight[part] if row_weight.dim() else row_weight


def _divergence(z: Tensor, y: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return D [n] of the student's logits `z` and the teacher's `y`, and ∂D/∂z [n, V]."""
    log_q, log_p = z.log_softmax(1), y.log_softmax(1)
    q, p = log_q.exp(), log_p.exp()
    if beta == 0:
        return _weight_by(p, log_p - log_q).sum(1), q - p
    if beta == 1:
        terms = _weight_by(q, log_q - log_p)
        reverse = terms.sum(1)
        return reverse, terms.sub_(q.mul_(reverse[:, None]))
    log_m = ((1 - beta) * q + beta * p).log()
    terms = _weight_by(q, log_q - log_m)
    reverse = terms.sum(1)
    divergence = (1 - beta) * reverse + beta * _weight_by(p, log_p - log_m).sum(1)
    return divergence, terms.sub_(q.mul_(reverse[:, None])).mul_(1 - beta)


def _weight_by(p: Tensor, x: Tensor) -> Tensor:
    """Overwrite x with the terms p · x of an expectation.

    They are 0 if p is 0, even if x is infinite.
    """
    return x.mul_(p).masked_fill_(p == 0, 0)


@dataclass(frozen=True)
class AugmentedOptions:
    """Options of `augmented_cross_entropy`; each may also be passed to it by keyword.

    >>> AugmentedOptions(alpha=0.5).temperature
    1.0

    Attributes:
        alpha: α, the weight of the divergence; the paper chooses it in proportion to the temperature.
        temperature: τ.
        hard: weight of the cross-entropy against the target itself; 0 trains on soft targets alone.
        through_targets: whether ỹ carries gradient into the table.
        ignore_index: target value of ignored tokens.
        reduction: `mean`, `sum` or `none`, as in `linear_cross_entropy`.
        chunk: tokens per chunk; None chooses by vocabulary.
    """

    alpha: float = 1.0
    temperature: float = 1.0
    hard: float = 1.0
    through_targets: bool = False
    ignore_index: int = -100
    reduction: str = "mean"
    chunk: int | None = None


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
    """Return the cross-entropy plus a divergence from soft targets, without [N, V] logits.

    It is computed in chunks of tokens. The module's header has the formula and its source (arXiv:1611.01462, §3).

    >>> import torch
    >>> features, weight = torch.zeros(2, 4), torch.zeros(8, 4)
    >>> augmented_cross_entropy(features, weight, torch.tensor([1, 5]))  # ln 8, and a divergence of 0
    tensor(2.0794)

    Args:
        features: [..., E], any floating type.
        weight: output table [V, E].
        targets: [...] word ids, or `ignore_index`.
        table: input table [V, any width], whose rows give the soft targets; None: `weight`.
        bias: [V] or None.
        options: see `AugmentedOptions`.
        **overrides: single options by name, e.g. `alpha=0.5, temperature=10.0`.

    Returns:
        fp32 scalar in nats (fp64 for fp64 inputs), or a tensor shaped like `targets` for `reduction="none"`.

    Raises:
        TypeError: as `linear_cross_entropy`.
        ValueError: the shapes do not fit together, or an option is out of range.
        IndexError: a target is outside [0, V) (checked on a CPU only).
        UnsupportedError: features or a weight are integers or complex, targets are probabilities, or the call is inside
            a `torch.func` transform.
    """
    options = replace(options, **overrides) if overrides else options
    plain = LossOptions(ignore_index=options.ignore_index, reduction=options.reduction, chunk=options.chunk)
    check_problem(features, weight, targets, bias, plain)
    are_in_range = 0 < options.temperature < math.inf and 0 <= options.alpha < math.inf and 0 <= options.hard < math.inf
    if not are_in_range:
        raise ValueError("need temperature > 0, alpha ≥ 0, hard ≥ 0, all finite")
    if table is not None and (table.dim() != 2 or len(table) != len(weight)):
        raise ValueError(f"table has shape {tuple(table.shape)}; need [V, any] with V = {len(weight)}")
    t = targets.reshape(-1).long()
    check_range(t, weight.shape[0], options.ignore_index)
    input_table = None if table is weight else table
    flat, loss_pass = flat_rows(features), partial(_augmented_pass, options)
    loss = fused_loss("augmented_cross_entropy", loss_pass, plain, flat, weight, input_table, bias, t)
    if options.reduction == "none":
        return loss.view(targets.shape)
    return loss


class _AugmentedTensors(NamedTuple):
    """Inputs of the augmented loss; if `table` is None, it is `weight`."""

    features: Tensor
    weight: Tensor
    table: Tensor | None
    bias: Tensor | None
    targets: Tensor


def _augmented_pass(
    options: AugmentedOptions, tensors: Any, product_dtype: torch.dtype, needs: Needs, row_weight: Tensor | None
) -> tuple[Tensor, Gradients]:
    """Return the losses [N], and the gradients of Σ row_weight_i · loss_i.

    `row_weight` is [] or [N]; None: all 1.
    """
    t, wide = _AugmentedTensors(*tensors), accumulator(product_dtype)
    losses = t.features.new_empty(len(t.targets), dtype=wide)
    gradients: Gradients = []
    for x, is_needed in zip(t[:4], needs, strict=False):
        gradients.append(torch.zeros_like(x, dtype=wide) if x is not None and is_needed else None)
    by_features, by_weight, by_table, by_bias = gradients
    head_gradients = (by_features, by_weight, by_bias)
    with pass_products(t.features, t.weight, product_dtype):
        weight = t.weight.to(product_dtype)
        if t.table is None:
            loss = _AugmentedLoss(options, weight, by_weight)
        else:
            loss = _AugmentedLoss(options, t.table.to(product_dtype), by_table)
        numbers = devices.numbers_per_token(len(weight), _BUFFERS, product_dtype)
        rows = devices.chunk_size(len(losses), numbers, t.features, options.chunk)
        for start in range(0, len(losses), rows):
            part = slice(start, start + rows)
            h, valid = t.features[part].to(product_dtype), t.targets[part] != options.ignore_index
            at, token_weight = t.targets[part].where(valid, 0), valid.to(wide)
            if row_weight is not None:
                token_weight *= _select_row_weight(row_weight, part)
            z = chunk_logits(h, weight, t.bias, _PLAIN, losses.new_empty(len(h), len(weight)))
            chunk_losses, slope = loss.compute(z, at, token_weight)
            losses[part] = chunk_losses.masked_fill_(~valid, 0)
            accumulate_gradients(head_gradients, part, slope, token_weight, h, weight, 1.0, onto=True)
    return losses, gradients


@dataclass(frozen=True, eq=False)
class _AugmentedLoss:
    """Augmented loss of a chunk's logits against soft targets from a table [V, any width]."""

    options: AugmentedOptions
    table: Tensor
    by_table: Tensor | None  # gradient of the table, to which `through_targets` adds

    def compute(self, z: Tensor, targets: Tensor, token_weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses [n] of the logits `z`, and the slopes by them [n, V].

        `token_weight` [n] is the factor on each loss. The slopes do not include it.
        """
        losses, slope = z.new_zeros(len(z)), torch.zeros_like(z)
        if self.options.hard:
            self._add_cross_entropy(losses, slope, z, targets)
        if self.options.alpha:
            self._add_divergence(losses, slope, z, targets, token_weight)
        return losses, slope

    def _add_cross_entropy(self, losses: Tensor, slope: Tensor, z: Tensor, targets: Tensor) -> None:
        """Add hard · CE(softmax(z), t)."""
        hard = self.options.hard
        log_p = torch.log_softmax(z, 1)
        losses -= hard * log_p.gather(1, targets[:, None])[:, 0]
        slope += log_p.exp_()
        slope[torch.arange(len(targets), device=targets.device), targets] -= 1
        slope *= hard

    def _add_divergence(self, losses: Tensor, slope: Tensor, z: Tensor, targets: Tensor, token_weight: Tensor) -> None:
        """Add α KL(ỹ ‖ ŷ) to the losses and slopes.

        With `through_targets`, add its gradient through ỹ to the table's.
        """
        options = self.options
        words, inverse = torch.unique(targets, return_inverse=True)  # soft targets are computed once a word
        u = self.table[words]
        log_soft = torch.log_softmax((u @ self.table.T).to(z.dtype) / options.temperature, 1)[inverse]
        log_y = torch.log_softmax(z / options.temperature, 1)
        soft, gap = log_soft.exp(), log_soft - log_y
        divergence = (soft * gap).sum(1)
        losses += options.alpha * divergence
        slope += (log_y.exp_() - soft) * (options.alpha / options.temperature)
        if self.by_table is None or not options.through_targets:
            return
        # the gradient through u, and through the table whose products with u give ỹ
        spread = soft * (gap - divergence[:, None]) * (token_weight * (options.alpha / options.temperature))[:, None]
        by_word = spread.new_zeros(len(words), spread.shape[1]).index_add_(0, inverse, spread).to(u.dtype)
        self.by_table.add_(by_word.T @ u)
        self.by_table.index_add_(0, words, (by_word @ self.table).to(z.dtype))
