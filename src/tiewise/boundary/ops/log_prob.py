"""Log-probabilities, log-sum-exps and entropies of a head's distributions, without its logits.

With z [N, V] the logits as `cross_entropy` has them, after bias and soft-cap, divided by the temperature:

    lse = log Σ_j exp z_j        p_j = exp(z_j − lse)        H = −Σ_j p_j log p_j        (0 log 0 = 0)
    log-probability of t = z_t − lse

    ∂lse/∂z_j = p_j        ∂(z_t − lse)/∂z_j = [j = t] − p_j        ∂H/∂z_j = −p_j (log p_j + H)

One sweep over chunks of tokens finds them; a second one the gradients of those used, whose upstream a, b, c (of
log-probability, lse and entropy) nobody knew before: four matrix products, as per-token losses take.

    slope by z_j = r (a [j = t] + p_j (b − a − c (log p_j + H)))          a, b, c divided by r = |a| + |b| + |c|

so that slopes stay near 1 in fp16, and r acts on [n, E]. What lies between the products is done for a
few rows at a time, which stay in a core's cache: a softmax, its entropy and its slope then cost about what one does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

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
from tiewise.boundary.ops.native_loss import kernel
from tiewise.boundary.ops.problem import LossTensors, accumulator, check_problem, check_range, compute_dtype, flat_rows
from tiewise.boundary.ops.vocabulary_shard import LOWEST, VocabularyShard, beyond, brought, gathered
from tiewise.core.backends import LossOptions
from tiewise.core.errors import UnsupportedError

_DEFAULT = LossOptions()
_LOWEST = -1e4  # log-probabilities below are of exp 0 in fp64, and −inf among them would make 0 · −inf


class VocabularyStatistics(NamedTuple):
    """Of the distribution over the vocabulary at each token; each carries gradient, and all share one backward pass."""

    log_prob: Tensor | None  # [...] log p of the target; None without targets. + lse is the target's logit
    lse: Tensor  # [...] log Σ exp z
    entropy: Tensor | None  # [...] in nats; None where it was not asked for


def linear_log_prob(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    options: LossOptions = _DEFAULT,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    shard: VocabularyShard | None = None,
    **overrides: Any,
) -> Any:
    """Log-probabilities of `targets` under softmax(features @ weightᵀ / temperature); the [N, V] logits never exist.

    What policy gradients and preference losses ask of a head (`log_softmax(logits).gather(...)`), with gradients, as
    `linear_cross_entropy` computes its loss: same types, autocast, `torch.compile`, frozen sides.

    Args:
        features: [..., E], any floating type.
        weight: [V, E].
        targets: [...] token ids, or `ignore_index`.
        bias: [V] or None.
        options: see `LossOptions`; `scale`, `softcap`, `ignore_index`, `chunk` and `logits` mean something here.
        temperature: divides the logits, after the soft-cap; the entropy is that of the distribution so flattened.
        entropy: whether the entropy of each distribution is wanted too, for one more pass over each chunk.
        shard: as in `linear_cross_entropy`.
        **overrides: single options by name, e.g. `softcap=30.0`.

    Returns:
        log-probabilities shaped like `targets`, fp32 (fp64 for fp64 inputs); with `entropy=True` the pair of these and
        the entropies in nats. Both are 0 without gradient where the target is `ignore_index`. A token whose logit is
        −inf has log-probability −inf and adds nothing to the entropy; a logit that is nan or +inf makes its token nan.

    Raises:
        TypeError, ValueError, IndexError, UnsupportedError: as `linear_cross_entropy`; a temperature that is not
            positive, and options of a loss (`label_smoothing`, `z_loss`, `class_weight`, `backend`,
            `reduction="sum"`), are ValueErrors.
    """
    asked: dict[str, Any] = {"temperature": temperature, "entropy": entropy, "shard": shard, **overrides}
    found = vocabulary_statistics(features, weight, targets, bias, options, **asked)
    return (found.log_prob, found.entropy) if entropy else found.log_prob


def vocabulary_statistics(
    features: Tensor,
    weight: Tensor,
    targets: Tensor | None = None,
    bias: Tensor | None = None,
    options: LossOptions = _DEFAULT,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    shard: VocabularyShard | None = None,
    **overrides: Any,
) -> VocabularyStatistics:
    """Return all that one sweep finds, by the arguments of `linear_log_prob`; without targets no token is ignored.

    Ask for all in one call: each tensor of the result can be differentiated by itself or with the others, and what is
    differentiated together is swept together. Where a target is ignored all three are 0 without gradient.
    """
    o = replace(options, **overrides) if overrides else options
    if o.reduction == "sum":
        raise ValueError("log-probabilities are not reduced: their sum is a loss")
    tempered = at_temperature(o, temperature)
    shape = features.shape[:-1] if isinstance(features, Tensor) else ()
    device = features.device if isinstance(features, Tensor) else None
    stand_in = torch.empty(shape, dtype=torch.long, device=device) if targets is None else targets
    check_problem(features, weight, stand_in, bias, o, shard)
    flat, t = flat_rows(features), None if targets is None else targets.reshape(-1).long()
    if t is not None and shard is None and not torch.compiler.is_compiling():
        check_range(t, len(weight), o.ignore_index)
    o, bias = tempered, bias if bias is None or temperature == 1.0 else bias / temperature
    if shard is not None:
        log_prob, lse, spread = _over_ranks(shard, flat, weight, bias, t, entropy, o)
    else:
        how = (compute_dtype(flat, weight), *(getattr(o, name) for name in _FIELDS))
        log_prob, lse, spread, *_ = _statistics(flat, weight, bias, t, entropy, *how)
    of_target = None if t is None else log_prob.view(shape)
    return VocabularyStatistics(of_target, lse.view(shape), spread.view(shape) if entropy else None)


def _over_ranks(
    shard: VocabularyShard, features: Tensor, weight: Tensor, bias: Any, targets: Any, entropy: bool, o: LossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability, lse, entropy), each [N], of what every rank finds of its own rows.

    With P_r = exp(lse_r − lse):    log p = log p_owner + log P_owner        H = Σ_r P_r (H_r − log P_r)
    """
    n, room = len(features), shard.room(features)
    features = brought(features, shard, room)
    if targets is None:
        words = torch.full_like(features[:, 0], shard.start, dtype=torch.long)
    else:
        words = shard.everyone(targets, room)
        check_range(words, shard.total, o.ignore_index)
    column, here = shard.columns(words)
    o, ignored = replace(o, ignore_index=-1), o.ignore_index  # no local row, whatever the whole vocabulary ignores
    if not len(weight) or (bias is not None and bool(bias.isneginf().all())):  # one more row, and no token is here
        weight, column = torch.cat([weight, weight.new_zeros(1, weight.shape[1])]), torch.zeros_like(words)
        bias, o = torch.full_like(weight[:, 0], LOWEST, dtype=torch.float32), replace(o, softcap=None)
    found = vocabulary_statistics(features, weight, column.reshape(-1), bias, o, entropy=entropy)
    told: list[Any] = [found.lse, found.log_prob, found.entropy]
    told[1] = told[1].where(here, 0)
    lses, log_probs, *entropies = gathered(torch.stack(told if entropy else told[:2]), shard).unbind(1)
    lse = lses.logsumexp(0)
    below = lses - lse
    log_prob = log_probs.sum(0) - beyond(lses, shard.owners(lses, words))
    spread = (below.exp() * (entropies[0] - below)).sum(0) if entropy else lse
    everyones = log_prob.masked_fill(log_prob < LOWEST / 2, -torch.inf), lse, spread
    results = [shard.own_part(x, room, n) for x in everyones]
    log_prob, lse, spread = results if targets is None else [x.masked_fill(targets == ignored, 0) for x in results]
    return log_prob, lse, spread


def at_temperature(o: LossOptions, temperature: float) -> LossOptions:
    """Return the options of logits divided by a temperature, whose bias is divided too; refuse those of a loss alone.

    c · tanh((s x + b) / c) / τ = (c / τ) · tanh((s / τ · x + b / τ) / (c / τ))
    """
    if o.label_smoothing or o.z_loss or o.class_weight is not None or o.backend is not None:
        alone = "label_smoothing, z_loss, class_weight and backend"
        raise ValueError(f"{alone} are of cross-entropies alone; leave them out here")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, not {temperature}")
    return replace(o, scale=o.scale / temperature, softcap=None if o.softcap is None else o.softcap / temperature)


# One operator, eager and compiled: Dynamo must not unroll the chunks.

_HOW = "ScalarType kind, float scale, float? softcap, int ignore_index, int? chunk, str? logits"
_FIELDS = [argument.split()[1] for argument in _HOW.split(", ")[1:]]  # of `LossOptions`
_INPUTS = "Tensor features, Tensor weight, Tensor? bias, Tensor? targets"
_UPSTREAM = "Tensor? by_log_prob, Tensor? by_lse, Tensor? by_entropy"


@torch.library.custom_op(
    "tiewise::vocabulary_statistics",
    mutates_args=(),
    schema=f"({_INPUTS}, bool entropy, {_HOW}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _statistics(features: Tensor, weight: Tensor, bias: Any, targets: Any, entropy: bool, *how: Any) -> Any:
    """(log-probability, lse, entropy; and the parts of lse: the largest logit, and log Σ exp(z − that)), each [N]."""
    o, wide = _options(how), accumulator(how[0])
    log_prob, lse, spread, top, rest = found = [features.new_zeros(len(features), dtype=wide) for _ in range(5)]
    at = None if targets is None else targets.where(targets != o.ignore_index, 0)[:, None]
    compute = kernel(o, LossTensors(features, weight, bias, targets), how[0], len(features))
    with own_products(features, weight, how[0]):
        if compute is not None:
            nothing, first = torch.zeros_like(top), torch.zeros_like(top, dtype=torch.long)
            nll, lse, h, *_ = compute(
                features, first if at is None else at[:, 0], nothing, nothing, None, [False] * 3, entropy=entropy
            )
            found[:3], top = [log_prob.sub_(nll), lse, spread.add_(h) if entropy else spread], lse.clone()
        spare: list[Tensor] = []
        for part, _, logits in _chunks(features, weight.to(how[0]), bias, o) if compute is None else ():
            for rows, z, (below, p) in _blocks(part, logits, spare):
                torch.amax(z, 1, out=top[rows])
                torch.sub(z, top[rows, None], out=below)  # not into z, which would be written back to memory
                total = torch.exp(below, out=p).sum(1)
                torch.log(total, out=rest[rows])
                if at is not None:
                    log_prob[rows] = below.gather(1, at[rows])[:, 0] - rest[rows]
                if entropy:  # rest − Σ p (z − top): neither is negative, so that nothing cancels
                    spread[rows] = rest[rows] - below.clamp_(min=_LOWEST).mul_(p).sum(1) / total
        torch.add(top, rest, out=lse)
        for one in found[:3] if at is not None else ():
            one.masked_fill_(targets == o.ignore_index, 0)
    return log_prob if at is not None else lse.new_empty(0), lse, spread if entropy else lse.new_empty(0), top, rest


@torch.library.custom_op(
    "tiewise::vocabulary_statistics_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor entropy, Tensor top, Tensor rest, {_UPSTREAM}, bool[] wanted, {_HOW})"
    " -> (Tensor, Tensor, Tensor)",
)
def _slopes(*arguments: Any) -> Any:
    """Gradients of (features, weight, bias), where wanted; empty elsewhere."""
    features, weight, bias, targets, spread, top, rest, *upstream, wanted = arguments[:11]
    how, inputs = arguments[11:], (features, weight, bias)
    o, wide, n = _options(how), accumulator(how[0]), len(features)
    at = torch.zeros_like(top, dtype=torch.long) if targets is None else targets
    valid = torch.ones_like(at, dtype=torch.bool) if targets is None else targets != o.ignore_index
    with_entropy = upstream[2] is not None and len(spread) == n
    # what was not asked for is empty, and what was not used None
    a, b, c = (torch.zeros_like(top) if x is None or len(x) != n else x.where(valid, 0) for x in upstream)
    if compute := kernel(o, LossTensors(features, weight, bias, targets), how[0], n):
        with own_products(features, weight, how[0]):
            level = b - a - c * spread if with_entropy else b - a
            *_, by_features, by_weight, by_bias = compute(
                features, at.where(valid, 0), level, -a, -c if with_entropy else None, wanted, lse=top + rest
            )
        triples = zip(inputs, (by_features, by_weight, by_bias), wanted, strict=True)
        return tuple(got.to(x.dtype) if want else features.new_empty(0) for x, got, want in triples)
    size = a.abs() + b.abs() + c.abs()  # r
    a, b, c = (x / size.where(size > 0, 1) for x in (a, b, c))
    at, level = at.where(valid, 0)[:, None], b - a
    if with_entropy:
        share = (-rest).exp_()
        level, c = (level + c * (rest - spread)) * share, c * share
    weight = weight.to(how[0])
    found, spare = gradient_buffers(inputs, wanted, wide), list[Tensor]()
    with own_products(features, weight, how[0]):
        for part, h, logits in _chunks(features, weight, bias, o):
            for rows, z, (p, other) in _blocks(part, logits, spare):
                bend = None if o.softcap is None else softcap_slope(z, o.softcap, other)
                if with_entropy:  # z − top = log p + rest, and exp of it is p / share
                    torch.exp(z.sub_(top[rows, None]), out=p)
                    z.clamp_(min=_LOWEST).mul_(-c[rows, None]).add_(level[rows, None]).mul_(p)
                else:
                    torch.mul(torch.softmax(z, 1, out=p), level[rows, None], out=z)
                z.scatter_add_(1, at[rows], a[rows, None])
                if bend is not None:
                    z.mul_(bend)
            into_gradients(found, part, logits, size[part], h, weight, o.scale)
    pairs = zip(inputs, found, strict=True)
    return tuple(features.new_empty(0) if got is None else got.to(x.dtype) for x, got in pairs)


def _options(how: Any) -> LossOptions:
    return LossOptions(**dict(zip(_FIELDS, how[1:], strict=True)))


def _chunks(
    features: Tensor, weight: Tensor, bias: Tensor | None, o: LossOptions
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Which tokens, their features [n, E] in the type of `weight`, and their logits [n, V], of each chunk."""
    (n, v), wide = (len(features), len(weight)), accumulator(weight.dtype)
    bias = None if bias is None else bias.to(wide)
    spare = 0 if devices.is_cpu(features) else 2 / BLOCKS  # of the blocks
    rows = devices.rows_at_once(n, devices.numbers_held(v, 1 + spare, weight.dtype), features, o.chunk)
    buffer = features.new_empty(min(rows, n), v, dtype=wide)
    for start in range(0, n, rows):
        h = features[start : start + rows].to(weight.dtype)
        yield slice(start, start + len(h)), h, chunk_logits(h, weight, bias, o, buffer[: len(h)])


def _blocks(part: slice, z: Tensor, kept: list[Tensor]) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Which tokens, their logits in `z`, the chunk of `part`, and twice as much memory to work in.

    `kept`, empty at first, holds that memory for the next chunk, which is no larger.
    """
    for rows in cached_rows(z):
        block = z[rows]
        if not kept:
            kept.append(block.new_empty(2, *block.shape))
        yield slice(part.start + rows.start, part.start + rows.start + len(block)), block, kept[0][:, : len(block)]


@_statistics.register_fake
def _(features: Tensor, weight: Tensor, bias: Any, targets: Any, entropy: bool, kind: torch.dtype, *_: Any) -> Any:
    there = (targets is not None, True, entropy, True, True)
    return tuple(features.new_empty(len(features) if yes else 0, dtype=accumulator(kind)) for yes in there)


@_slopes.register_fake
def _(*arguments: Any) -> Any:
    pairs = zip(arguments[:3], arguments[10], strict=True)
    return tuple(x.new_empty(x.shape) if want else arguments[0].new_empty(0) for x, want in pairs)


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.how = inputs[5:]
    ctx.save_for_backward(*inputs[:4], *output[2:])


def _derivative(ctx: Any, *upstream: Any) -> Any:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        fix = "compute the logits and their log_softmax where create_graph=True is needed"
        raise UnsupportedError("log-probabilities and entropies have no second derivative", fix)
    wanted = ctx.needs_input_grad[:3]
    found = _slopes(*ctx.saved_tensors, *upstream[:3], wanted, *ctx.how)
    return (*(x if want else None for x, want in zip(found, wanted, strict=True)), *[None] * (2 + len(ctx.how)))


_statistics.register_autograd(_derivative, setup_context=_remember)
