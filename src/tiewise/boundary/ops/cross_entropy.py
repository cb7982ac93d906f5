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

import math
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.ops import chunked
from tiewise.boundary.ops.chunked import accumulator, check_problem, check_range, compute_dtype
from tiewise.boundary.ops.gpu_kernels import VARIABLE, maintained
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
    """Cross-entropy of `features @ weightᵀ` against `targets`, in chunks of tokens; the [N, V] logits never exist.

    bf16 and fp16 inputs multiply in their own type and accumulate in fp32. Works under autocast, `torch.compile`,
    gradient checkpointing, and with frozen features or a frozen weight, whose gradient is then not computed.

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
    flat, t = chunked.flat_rows(features), targets.reshape(-1).long()
    if into is not None:
        _check_into(into, weight, compute_dtype(flat, weight), options)
    if torch.compiler.is_compiling():
        # autocast is decided while tracing: at run time the operator no longer sees which region it stood in
        wanted = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (flat, weight, bias)]
        how: Any = (compute_dtype(flat, weight), wanted, *(getattr(options, name) for name in _FIELDS))
        loss = _operator(flat, weight, bias, t, options.class_weight, None, *how)[0]
    else:
        if shard is None:  # else everyone's are looked at, so that all ranks refuse
            check_range(t, weight.shape[0], options.ignore_index)
        elif shard.own_tokens and compute_dtype(flat, weight) == torch.float16:  # it is divided behind the sum
            raise UnsupportedError("tokens of a rank's own in fp16", "compute in bfloat16")
        how, factor = partial(_sweep, options, into, shard), None if into is None else upstream
        loss = fused_loss("linear_cross_entropy", how, options, flat, weight, bias, t, upstream=factor, shard=shard)
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
    w = z.new_ones(z.shape[1]) if o.class_weight is None else o.class_weight.double()
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


def _check_into(into: Any, weight: Tensor, kind: torch.dtype, o: LossOptions) -> None:
    """Refuse what the gradient of weight cannot be added to, and where it would be added wrongly."""
    wide = accumulator(kind)
    like = isinstance(into, Tensor) and (into.shape, into.dtype, into.device) == (weight.shape, wide, weight.device)
    if not like or into.requires_grad or not into.is_contiguous():
        raise ValueError(f"into must be a contiguous {wide} tensor of shape {tuple(weight.shape)} without gradient")
    if o.reduction == "none":
        raise ValueError("into is for scalar losses: the gradient of losses by token is not known beforehand")
    lacks = {
        "under torch.compile": torch.compiler.is_compiling(),
        "in a backward pass, as a checkpoint runs its forward once more,": torch._C._current_graph_task_id() != -1,
        "in fp16": kind == torch.float16,
        f"by backend={o.backend!r}": o.backend in ("liger", "cce"),
    }
    for where in (where for where, so in lacks.items() if so):
        raise UnsupportedError(f"linear_cross_entropy(into=…) {where}", "leave into out, and autograd has the gradient")


# how it is differentiated

# (tensors, type of the products, wanted gradients, weight of each token's loss) → losses [N], gradients; of `tensors`
# the targets are the last
Wanted = tuple[bool, ...]
Sweep = Callable[[Any, torch.dtype, Wanted, Tensor | None], tuple[Tensor, Any]]


def _sweep(
    o: LossOptions,
    into: Tensor | None,
    shard: VocabularyShard | None,
    tensors: Any,
    kind: torch.dtype,
    wanted: tuple[bool, ...],
    row_weight: Tensor | None,
) -> tuple[Tensor, Any]:
    if shard is not None:
        features, weight, bias, targets = tensors
        n, room = len(targets), shard.room(targets)
        words = shard.everyone(targets, room, o.ignore_index)
        check_range(words, shard.total, o.ignore_index)
        if room is not None and row_weight is not None:  # one number of a rank, or one of each of its tokens
            each = shard.everyone(row_weight, room) if row_weight.dim() else shard.gather(row_weight)
            row_weight = each if row_weight.dim() else each.repeat_interleave(room)
        tensors = (shard.everyone(features, room), weight, bias, words)
        each, found = chunked.sweep(o, tensors, kind, wanted, row_weight, into, shard)
        if found[0] is not None:
            found[0] = shard.summed_part(found[0], room, n)
        return shard.own_part(each, room, n), found
    backend = o.backend or os.environ.get(VARIABLE) or "tiewise"
    if into is None and backend != "tiewise" and (other := maintained(backend, o, tensors, kind, chunked.sweep)):
        return other(o, tensors, kind, wanted, row_weight)
    return chunked.fastest_sweep(o, tensors, kind, wanted, row_weight, into)


def reduced(
    sweep: Sweep, options: LossOptions, tensors: Any, kind: torch.dtype, wanted: Wanted, upstream: Tensor | None = None
) -> tuple[Tensor, Any]:
    """Reduce a sweep's losses as `options` say, with gradients, those of Σ upstream_i · loss_i if that is given."""
    if options.reduction == "none":
        return sweep(tensors, kind, tuple(want and upstream is not None for want in wanted), upstream)
    if options.reduction == "sum":
        each, found = sweep(tensors, kind, wanted, upstream)
        return each.sum(), found
    # 1 / Σ w_t over the tokens that count; 1 where none does, so that an all-ignored batch gives 0
    targets, w, wide = tensors[-1], options.class_weight, accumulator(kind)
    valid = targets != options.ignore_index
    total = valid.sum() if w is None else (w.to(wide)[targets.where(valid, 0)] * valid).sum()
    factor = 1 / total.where(total > 0, 1).to(wide)
    # it costs nothing in the row coefficients; in fp16 it would underflow there and comes last
    last = kind == torch.float16
    each, found = sweep(tensors, kind, wanted, None if last else factor if upstream is None else factor * upstream)
    for gradient in found if last else ():
        if gradient is not None:
            gradient.mul_(factor)
    return each.sum() * factor, found


def fused_loss(
    name: str,
    sweep: Sweep,
    options: LossOptions,
    *tensors: Tensor | None,
    upstream: float | None = None,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Return the reduced loss, differentiable once; `name` is who says that there is no second derivative.

    With `upstream` the sweep keeps the second tensor's gradient for itself, multiplied by that already. With a `shard`
    whose ranks have tokens of their own, it has that of all ranks' losses, and sweeps again where these are not
    multiplied by the same.
    """
    return _Fused.apply(name, sweep, options, torch.is_grad_enabled(), upstream, shard, *tensors)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, sweep: Sweep, options: LossOptions, grad_mode: bool, *rest: Any) -> Tensor:
        ctx.upstream, shard, *tensors = rest
        ctx.name, ctx.sweep, ctx.options, ctx.kind = name, sweep, options, compute_dtype(*tensors[:2])
        ctx.wanted = tuple(grad_mode and need for need in ctx.needs_input_grad[6:])
        ctx.dtypes = [None if x is None else x.dtype for x in tensors]
        alone = shard is None or not shard.own_tokens or ctx.upstream is not None or options.reduction == "none"
        ctx.between = None if alone else shard  # whose ranks may multiply their losses by different numbers
        if options.reduction == "none" or ctx.between is not None:
            ctx.save_for_backward(*tensors)
        counts = None if shard is not None or ctx.upstream is not None else tensors[-1] != options.ignore_index
        ctx.counts = counts if counts is None or options.reduction == "none" else counts.any()
        known = None
        if ctx.upstream is not None:
            ctx.wanted = (ctx.wanted[0], grad_mode, *ctx.wanted[2:])
            known = tensors[0].new_full((), ctx.upstream, dtype=accumulator(ctx.kind))
        loss, ctx.gradients = reduced(sweep, options, tensors, ctx.kind, ctx.wanted, known)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            fix = "compute the logits and use torch.nn.functional.cross_entropy where create_graph=True is needed"
            raise UnsupportedError(f"{ctx.name} has no second derivative", fix)
        if ctx.counts is not None:  # an ignored token has no gradient, also where its loss is divided by 0 afterwards
            upstream = upstream.where(ctx.counts, 0)
        found = ctx.gradients
        unlike = ctx.between is not None and found is not None and (ctx.between.gather(upstream) != upstream).any()
        if ctx.options.reduction == "none" or unlike:
            found = reduced(ctx.sweep, ctx.options, ctx.saved_tensors, ctx.kind, ctx.wanted, upstream)[1]
        elif found is None:
            fix = "pass retain_graph=True to the first backward" if ctx.upstream is None else "compute it again"
            raise UnsupportedError("this loss was already differentiated and its graph freed", fix)
        elif ctx.upstream is not None:
            # with `into` a GPU synchronises once per backward pass: nothing else could refuse a wrong gradient
            if not upstream.is_meta and not math.isclose(upstream.item(), ctx.upstream, rel_tol=1e-6):
                fix = f"give upstream={upstream.item():g} to the loss"
                raise UnsupportedError(f"into has the gradient multiplied by {ctx.upstream:g} already", fix)
            ctx.gradients, found = None, [found[0], None, *found[2:]]
        else:
            # the buffers are given away when the graph dies with this call, and copied when it may be asked again
            keep = torch._C._autograd._get_current_graph_task_keep_graph()
            ctx.gradients = found if keep else None
            if upstream.device.type != "cpu" or upstream.item() != 1.0:  # a GPU would have to synchronise to say so
                found = [x if x is None else x * upstream if keep else x.mul_(upstream) for x in found]
            elif keep:
                found = [x if x is None else x.clone() for x in found]
        pairs = zip(found, ctx.dtypes[:-1], strict=True)
        return (*[None] * 6, *(None if x is None else x.to(dtype) for x, dtype in pairs), None)


# The same under torch.compile: one operator, of tensors and numbers alone.

_TENSORS = "Tensor features, Tensor weight, Tensor? bias, Tensor targets, Tensor? class_weight, Tensor? upstream"
_HOW = (
    "str reduction, int? chunk, float scale, float? softcap, int ignore_index, float label_smoothing, float z_loss,"
    " str? logits, str? backend"
)
_FIELDS = [argument.split()[1] for argument in _HOW.split(", ")]  # of `LossOptions`
_SCHEMA = f"({_TENSORS}, ScalarType kind, bool[] wanted, {_HOW}) -> (Tensor, Tensor, Tensor, Tensor)"


@torch.library.custom_op("tiewise::linear_cross_entropy", mutates_args=(), schema=_SCHEMA)
def _operator(*arguments: Any) -> Any:
    *tensors, weights, upstream, kind, wanted = arguments[:8]
    options = LossOptions(class_weight=weights, **dict(zip(_FIELDS, arguments[8:], strict=True)))
    loss, found = reduced(partial(_sweep, options, None, None), options, tensors, kind, tuple(wanted), upstream)
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
    ignore_index = inputs[8 + _FIELDS.index("ignore_index")]
    counts = inputs[3] != ignore_index
    ctx.save_for_backward(*((*inputs[:5], counts) if ctx.per_token else (*output[1:], counts.any())))


def _derivative(ctx: Any, upstream: Tensor, *_: Any) -> Any:
    *found, counts = ctx.saved_tensors  # of which an operator's own may not be given away
    upstream = upstream.where(counts, 0)  # as in `_Fused.backward`
    found = _operator(*found, upstream, *ctx.how)[1:] if ctx.per_token else [x * upstream for x in found]
    triples = zip(found, ctx.dtypes, ctx.how[1], strict=True)
    return (*(x.to(dtype) if want else None for x, dtype, want in triples), *[None] * (3 + len(ctx.how)))


_operator.register_autograd(_derivative, setup_context=_remember)
