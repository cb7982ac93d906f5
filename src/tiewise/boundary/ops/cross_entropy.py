"""`linear_cross_entropy`: the loss of an output head without its logits; and its oracle.

    z      = softcap(scale · features @ weightᵀ + bias)            softcap(z) = c · tanh(z / c)
    lse    = log Σ_j exp z_j
    loss_i = (1 − ε) w_t (lse − z_t) + (ε / V) Σ_j w_j (lse − z_j) + ζ lse²        t = target of token i

with ε label smoothing, w class weights (1 where none), ζ the z-loss coefficient. Tokens whose target is `ignore_index`
count for nothing. `mean` divides the sum by Σ_i w_t, as `torch.nn.functional.cross_entropy` does, and gives 0 with zero
gradients, not nan, where every token is ignored.

Sources: label smoothing, Szegedy et al. 2016 §7; z-loss, PaLM (Chowdhery et al. 2022) §5; soft-cap, Gemma 2 §2.

A scalar has its gradients computed next to it, three matrix products in all; of per-token losses, whose upstream
gradient is not known yet, each chunk is computed again in the backward pass (four). Under `torch.compile` the same
is an opaque operator: Dynamo cannot trace the eager function (it asks the running backward whether its graph survives),
and must not unroll the chunk loop.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiewise.boundary.ops import chunked
from tiewise.boundary.ops.chunk_products import Gradients
from tiewise.boundary.ops.fused_loss import Needs, fused_loss, reduced
from tiewise.boundary.ops.gpu_kernels import VARIABLE, maintained
from tiewise.boundary.ops.native_loss import fastest_sweep
from tiewise.boundary.ops.problem import (
    LossTensors,
    accumulator,
    check_problem,
    check_range,
    compute_dtype,
    flat_rows,
)
from tiewise.boundary.ops.vocabulary_shard import VocabularyShard
from tiewise.core.backends import LossOptions
from tiewise.core.errors import UnsupportedError

_DEFAULT = LossOptions()


def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    options: LossOptions = _DEFAULT,
    *,
    into: Tensor | None = None,
    upstream: float = 1.0,
    shard: VocabularyShard | None = None,
    **overrides: Any,
) -> Tensor:
    """Return the cross-entropy of `features @ weightᵀ` against `targets`; the [N, V] logits never exist.

    It is computed in chunks of tokens. bf16 and fp16 inputs multiply in their own type and accumulate in fp32. It works
    under autocast, `torch.compile`, gradient checkpointing, and with frozen features or a frozen weight, whose gradient
    is then not computed.

    Args:
        features: [..., E], any floating type.
        weight: [V, E].
        targets: [...] class indices, or `ignore_index`.
        bias: [V] or None.
        options: see `LossOptions`.
        into: [V, E], fp32 (fp64 for fp64 inputs), contiguous: the gradient of `weight` is added to it in this call, if
            gradients are on, and autograd has none to give. So no second table is made, and a narrow `weight` has its
            gradient summed over batches in fp32. `weight.grad` itself may be given. Hooks of `weight`, and DDP, see
            nothing of it, and it is for scalar losses whose backward pass follows, once.
        upstream: by what that pass multiplies, which `into` must know beforehand: 1 / 4 for `(loss / 4).backward()`.
        shard: where `weight` and `bias` are this rank's rows [V_r, E] and [V_r] of a table over several ranks. All of
            them call this, with the same features, targets and options; each gets the loss and the features' gradient
            over the whole vocabulary, and the gradient of its own rows. A class weight is that of the whole [V]. Where
            ranks have `own_tokens`, each has the loss of its own, and the gradient of its rows is that of all losses,
            each multiplied by its rank's upstream: of a mean over all tokens, divide the table's by the ranks.
        **overrides: single options by name, e.g. `softcap=30.0, reduction="sum"`.

    Returns:
        fp32 scalar (fp64 for fp64 inputs), or a tensor shaped like `targets` for `reduction="none"`. A target whose
        logit is −inf costs inf, and its gradient is finite.

    Raises:
        TypeError: features, weight or targets that are no tensors: a module in place of its weight, say; an option
            that is no number.
        ValueError: shapes that do not meet, a table without rows, tensors on several devices, an option out of range,
            `into` unlike what it must be, rows that are not those of the shard.
        IndexError: a target outside [0, V) (checked on CPU only; on a GPU it would cost a synchronisation).
        UnsupportedError: features or a weight of whole or complex numbers, targets that are probabilities or bools, a
            tensor as an option, `torch.func` transforms, second derivatives, a backend that is missing, lacks a
            requested option, or is not in a tested version; with `into` also checkpointing, `torch.compile`, fp16, and
            a backward pass by another factor than `upstream`; with a shard also `torch.compile` and every backend but
            our own.
        RunError: the environment variable TIEWISE_LOSS names no backend.
    """
    options = replace(options, **overrides) if overrides else options
    check_problem(features, weight, targets, bias, options, shard)
    if not -math.inf < upstream < math.inf:
        raise ValueError(f"upstream must be finite, not {upstream}")
    tensors = LossTensors(flat_rows(features), weight, bias, targets.reshape(-1).long())
    kind = compute_dtype(tensors.features, weight)
    if into is not None:
        _check_into(into, weight, kind, options)
    if torch.compiler.is_compiling():
        loss = _compiled_loss(tensors, kind, options)
    else:
        _check_values(tensors, kind, options, shard)
        sweep = _Sweep(options, into, shard)
        factor = None if into is None else upstream
        loss = fused_loss("linear_cross_entropy", sweep, options, *tensors, upstream=factor, shard=shard)
    if options.reduction == "none":
        return loss.view(targets.shape)
    return loss


def _check_values(tensors: LossTensors, kind: torch.dtype, options: LossOptions, shard: VocabularyShard | None) -> None:
    """Refuse targets outside the vocabulary, and a type that a rank's own tokens cannot have."""
    if shard is None:
        check_range(tensors.targets, tensors.weight.shape[0], options.ignore_index)
    # a shard's sweep checks the targets of everyone, so that all ranks refuse
    elif shard.own_tokens and kind == torch.float16:  # whose gradients are divided after they are summed
        raise UnsupportedError("tokens of a rank's own in fp16", "compute in bfloat16")


def oracle(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    options: LossOptions = _DEFAULT,
    **overrides: Any,
) -> Tensor:
    """Compute the same loss by its formula, in fp64, with all logits.

    It is the truth that the tests measure against.
    """
    o = replace(options, **overrides) if overrides else options
    z = _oracle_logits(features, weight, bias, o)
    t = targets.reshape(-1)
    valid = t != o.ignore_index
    at = t.where(valid, 0)
    w = z.new_ones(z.shape[1])
    if o.class_weight is not None:
        w = o.class_weight.double()
    lse = z.logsumexp(1)
    hit = w[at] * (lse - z.gather(1, at[:, None])[:, 0])
    losses = (1 - o.label_smoothing) * hit + o.z_loss * lse.square()
    if o.label_smoothing:  # 0 · inf is no 0, where a logit is −inf
        losses = losses + o.label_smoothing * (w * (lse[:, None] - z)).mean(1)
    losses = losses.where(valid, 0)
    if o.reduction == "none":
        return losses.view(targets.shape)
    if o.reduction == "sum":
        return losses.sum()
    weight_sum = (w[at] * valid).sum()
    return losses.sum() / weight_sum.where(weight_sum > 0, 1)


def _oracle_logits(features: Tensor, weight: Tensor, bias: Tensor | None, o: LossOptions) -> Tensor:
    """Return all logits [N, V] in fp64."""
    z = o.scale * (features.double().reshape(-1, features.shape[-1]) @ weight.double().T)
    if bias is not None:
        z = z + bias.double()
    if o.softcap is not None:
        z = o.softcap * torch.tanh(z / o.softcap)
    return z


def _check_into(into: Any, weight: Tensor, kind: torch.dtype, o: LossOptions) -> None:
    """Refuse an `into` that is no buffer for weight's gradient, and calls that add it wrongly."""
    if not _is_buffer_for(into, weight, accumulator(kind)):
        what = f"a contiguous {accumulator(kind)} tensor of shape {tuple(weight.shape)} without gradient"
        raise ValueError(f"into must be {what}")
    if o.reduction == "none":
        raise ValueError("into is for scalar losses: the gradient of losses by token is not known beforehand")
    lacks = {
        "under torch.compile": torch.compiler.is_compiling(),
        "in a backward pass, as a checkpoint runs its forward once more,": torch._C._current_graph_task_id() != -1,
        "in fp16": kind == torch.float16,
        f"by backend={o.backend!r}": o.backend in ("liger", "cce"),
    }
    for where, is_so in lacks.items():
        if is_so:
            fix = "leave into out, and autograd has the gradient"
            raise UnsupportedError(f"linear_cross_entropy(into=…) {where}", fix)


def _is_buffer_for(into: Any, weight: Tensor, wide: torch.dtype) -> bool:
    """Return whether the gradient of weight in type `wide` can be added to `into`."""
    if not isinstance(into, Tensor):
        return False
    is_alike = (into.shape, into.dtype, into.device) == (weight.shape, wide, weight.device)
    return is_alike and into.is_contiguous() and not into.requires_grad


# losses and gradients of one problem


@dataclass(frozen=True, eq=False)
class _Sweep:
    """Losses and gradients of one call, as `chunked.sweep` computes them."""

    options: LossOptions
    into: Tensor | None = None
    shard: VocabularyShard | None = None

    def __call__(
        self, tensors: Sequence[Any], kind: torch.dtype, needs: Needs, row_weight: Tensor | None
    ) -> tuple[Tensor, Gradients]:
        """Compute them here, or together with the other ranks of a shard."""
        if self.shard is None:
            return self._here(LossTensors(*tensors), kind, needs, row_weight)
        return self._over_ranks(self.shard, LossTensors(*tensors), kind, needs, row_weight)

    def _here(
        self, tensors: LossTensors, kind: torch.dtype, needs: Needs, row_weight: Tensor | None
    ) -> tuple[Tensor, Gradients]:
        """Compute them by the backend that the options or the environment choose."""
        o = self.options
        backend = o.backend or os.environ.get(VARIABLE) or "tiewise"
        if self.into is None and backend != "tiewise":
            other = maintained(backend, o, tensors, kind, chunked.sweep)
            if other is not None:
                return other(o, tensors, kind, needs, row_weight)
        return fastest_sweep(o, tensors, kind, needs, row_weight, self.into)

    def _over_ranks(
        self,
        shard: VocabularyShard,
        tensors: LossTensors,
        kind: torch.dtype,
        needs: Needs,
        row_weight: Tensor | None,
    ) -> tuple[Tensor, Gradients]:
        """Compute those of everyone's tokens with the rows here; return those of this rank's tokens."""
        o, n = self.options, len(tensors.targets)
        room = shard.room(tensors.targets)
        targets = shard.everyone(tensors.targets, room, o.ignore_index)
        check_range(targets, shard.total, o.ignore_index)
        if room is not None and row_weight is not None:
            row_weight = _everyones_weight(row_weight, shard, room)
        everyones = tensors._replace(features=shard.everyone(tensors.features, room), targets=targets)
        losses, gradients = chunked.sweep(o, everyones, kind, needs, row_weight, self.into, shard)
        if gradients[0] is not None:
            gradients[0] = shard.summed_part(gradients[0], room, n)
        return shard.own_part(losses, room, n), gradients


def _everyones_weight(row_weight: Tensor, shard: VocabularyShard, room: int) -> Tensor:
    """Return the factors [W · room] on everyone's losses, from one a rank or a token."""
    if row_weight.dim():
        return shard.everyone(row_weight, room)
    return shard.gather(row_weight).repeat_interleave(room)


# The same under torch.compile: one operator, of tensors and numbers alone.

_TENSORS = "Tensor features, Tensor weight, Tensor? bias, Tensor targets, Tensor? class_weight, Tensor? upstream"
_HOW = (
    "str reduction, int? chunk, float scale, float? softcap, int ignore_index, float label_smoothing, float z_loss,"
    " str? logits, str? backend"
)
_FIELDS = [argument.split()[1] for argument in _HOW.split(", ")]  # of `LossOptions`
_SCHEMA = f"({_TENSORS}, ScalarType kind, bool[] wanted, {_HOW}) -> (Tensor, Tensor, Tensor, Tensor)"


class _Arguments(NamedTuple):
    """Arguments of the operator, in the order of `_SCHEMA`."""

    features: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    class_weight: Tensor | None
    upstream: Tensor | None  # of per-token losses; None: only the losses are computed
    kind: torch.dtype
    needs: Sequence[bool]
    reduction: str
    chunk: int | None
    scale: float
    softcap: float | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    logits: str | None
    backend: str | None

    def options(self) -> LossOptions:
        """Return the options of the loss."""
        return LossOptions(class_weight=self.class_weight, **{name: getattr(self, name) for name in _FIELDS})


def _compiled_loss(tensors: LossTensors, kind: torch.dtype, options: LossOptions) -> Tensor:
    """Return the loss by the operator, whose arguments are decided while Dynamo traces.

    At run time the operator no longer sees in which autocast region it was called.
    """
    inputs = (tensors.features, tensors.weight, tensors.bias)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    how = [getattr(options, name) for name in _FIELDS]
    loss: Tensor
    loss, *_ = _operator(*inputs, tensors.targets, options.class_weight, None, kind, needs, *how)
    return loss


@torch.library.custom_op("tiewise::linear_cross_entropy", mutates_args=(), schema=_SCHEMA)
def _operator(*arguments: Any) -> Any:
    """Compute loss and gradients; an operator returns nothing but tensors, so an unwanted gradient is empty."""
    a = _Arguments(*arguments)
    options = a.options()
    tensors = LossTensors(a.features, a.weight, a.bias, a.targets)
    loss, gradients = reduced(_Sweep(options), options, tensors, a.kind, tuple(a.needs), a.upstream)
    return (loss, *(loss.new_empty(0) if x is None else x for x in gradients))


@_operator.register_fake
def _(*arguments: Any) -> Any:
    a = _Arguments(*arguments)
    is_per_token = a.reduction == "none"
    has_gradients = not is_per_token or a.upstream is not None
    shapes: list[tuple[int, ...]] = [a.targets.shape if is_per_token else ()]
    for x, is_needed in zip((a.features, a.weight, a.bias), a.needs, strict=True):
        if is_needed and has_gradients:
            assert x is not None, "the gradient of a missing bias is never needed"
            shapes.append(x.shape)
        else:
            shapes.append((0,))
    return tuple(a.targets.new_empty(shape, dtype=accumulator(a.kind)) for shape in shapes)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    """Save the gradients of a reduced loss, and the inputs of a per-token one."""
    a = _Arguments(*inputs)
    ctx.how, ctx.is_per_token = inputs[6:], a.reduction == "none"  # `how` is all that follows `upstream`
    ctx.needs = a.needs
    ctx.dtypes = [None if x is None else x.dtype for x in (a.features, a.weight, a.bias)]
    counts = a.targets != a.ignore_index
    if ctx.is_per_token:
        ctx.save_for_backward(*inputs[:5], counts)
    else:
        ctx.save_for_backward(*output[1:], counts.any())


def _derivative(ctx: Any, upstream: Tensor, *_: Any) -> Any:
    """Return the gradients of all arguments, None for those that are no inputs of the loss."""
    *saved, counts = ctx.saved_tensors
    upstream = upstream.where(counts, 0)  # as in `fused_loss`
    if ctx.is_per_token:
        gradients = _operator(*saved, upstream, *ctx.how)[1:]
    else:  # an operator's own results may not be given away
        gradients = [x * upstream for x in saved]
    results = []
    for x, dtype, is_needed in zip(gradients, ctx.dtypes, ctx.needs, strict=True):
        results.append(x.to(dtype) if is_needed else None)
    others = 3 + len(ctx.how)  # targets, class_weight and upstream, and what is no tensor
    return (*results, *[None] * others)


_operator.register_autograd(_derivative, setup_context=_remember)
