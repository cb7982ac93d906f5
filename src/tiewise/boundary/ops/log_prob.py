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
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiewise.boundary.ops.problem import check_problem, check_range, flat_rows
from tiewise.boundary.ops.statistics_operators import token_statistics
from tiewise.boundary.ops.vocabulary_shard import LOWEST, VocabularyShard, beyond, brought, gathered
from tiewise.core.backends import LossOptions

_DEFAULT = LossOptions()


class VocabularyStatistics(NamedTuple):
    """Statistics of the distribution at each token, which share one backward pass."""

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
    chosen: dict[str, Any] = {"temperature": temperature, "entropy": entropy, "shard": shard, **overrides}
    statistics = vocabulary_statistics(features, weight, targets, bias, options, **chosen)
    if entropy:
        return statistics.log_prob, statistics.entropy
    return statistics.log_prob


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
    """Return all that one sweep computes, by the arguments of `linear_log_prob`.

    Without targets no token is ignored. Ask for all in one call: each tensor of the result can be differentiated by
    itself or with the others, and what is differentiated together is swept together. Where a target is ignored all
    three are 0 without gradient.
    """
    o = replace(options, **overrides) if overrides else options
    if o.reduction == "sum":
        raise ValueError("log-probabilities are not reduced: their sum is a loss")
    tempered = at_temperature(o, temperature)
    check_problem(features, weight, _targets_to_check(features, targets), bias, o, shard)
    flat, t = flat_rows(features), None
    if targets is not None:
        t = targets.reshape(-1).long()
        if shard is None and not torch.compiler.is_compiling():
            check_range(t, len(weight), o.ignore_index)
    if bias is not None and temperature != 1.0:
        bias = bias / temperature
    if shard is None:
        log_prob, lse, entropies = token_statistics(flat, weight, bias, t, entropy, tempered)
    else:
        inputs = _TokenInputs(flat, weight, bias, t)
        log_prob, lse, entropies = _over_ranks(shard, inputs, entropy, tempered)
    shape = features.shape[:-1]
    return VocabularyStatistics(
        log_prob=None if targets is None else log_prob.view(shape),
        lse=lse.view(shape),
        entropy=entropies.view(shape) if entropy else None,
    )


def _targets_to_check(features: Any, targets: Tensor | None) -> Tensor:
    """Return the targets, or some that pass every check where there are none."""
    if targets is not None:
        return targets
    if not isinstance(features, Tensor):  # which is refused before targets are looked at
        return torch.empty((), dtype=torch.long)
    return torch.empty(features.shape[:-1], dtype=torch.long, device=features.device)


def at_temperature(o: LossOptions, temperature: float) -> LossOptions:
    """Return the options of logits divided by a temperature, whose bias is divided too.

    Options of a loss alone are refused.

    c · tanh((s x + b) / c) / τ = (c / τ) · tanh((s / τ · x + b / τ) / (c / τ))
    """
    has_loss_option = o.label_smoothing or o.z_loss or o.class_weight is not None or o.backend is not None
    if has_loss_option:
        alone = "label_smoothing, z_loss, class_weight and backend"
        raise ValueError(f"{alone} are of cross-entropies alone; leave them out here")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, not {temperature}")
    if o.softcap is not None:
        o = replace(o, softcap=o.softcap / temperature)
    return replace(o, scale=o.scale / temperature)


# over ranks


class _TokenInputs(NamedTuple):
    """Features [N, E], rows [V_r, E] and bias [V_r] of this rank, and targets [N] of the whole vocabulary."""

    features: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor | None


def _over_ranks(
    shard: VocabularyShard, inputs: _TokenInputs, entropy: bool, o: LossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, lse and entropy, each [N], from those of every rank's rows."""
    n, room = len(inputs.features), shard.room(inputs.features)
    features, targets = brought(inputs.features, shard, room), inputs.targets
    if targets is None:
        words = torch.full_like(features[:, 0], shard.start, dtype=torch.long)
    else:
        words = shard.everyone(targets, room)
        check_range(words, shard.total, o.ignore_index)
    parts = _statistics_of_rows(shard, inputs._replace(features=features), words, entropy, o)
    results = [shard.own_part(x, room, n) for x in _joined(shard, parts, words)]
    if targets is not None:
        results = [x.masked_fill(targets == o.ignore_index, 0) for x in results]
    log_prob, lse, entropies = results
    return log_prob, lse, entropies


def _statistics_of_rows(
    shard: VocabularyShard, inputs: _TokenInputs, words: Tensor, entropy: bool, o: LossOptions
) -> list[Tensor]:
    """Return lse and log-probability over the rows here, and if needed the entropy.

    The log-probability of a word that is elsewhere is 0.
    """
    features, weight, bias, _ = inputs
    column, is_here = shard.columns(words)
    o = replace(o, ignore_index=-1)  # no local row, whatever the whole vocabulary ignores
    has_no_logit = not len(weight) or (bias is not None and bool(bias.isneginf().all()))
    if has_no_logit:  # then one more row has the lowest logit, and no token is here
        weight = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
        bias = torch.full_like(weight[:, 0], LOWEST, dtype=torch.float32)
        column, o = torch.zeros_like(words), replace(o, softcap=None)
    statistics = vocabulary_statistics(features, weight, column.reshape(-1), bias, o, entropy=entropy)
    assert statistics.log_prob is not None, "there are targets"
    parts = [statistics.lse, statistics.log_prob.where(is_here, 0)]
    if statistics.entropy is not None:
        parts.append(statistics.entropy)
    return parts


def _joined(shard: VocabularyShard, parts: list[Tensor], words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, lse and entropy over all ranks' rows from lse, log-probability and entropy over these.

    With P_r = exp(lse_r − lse):    log p = log p_owner + log P_owner        H = Σ_r P_r (H_r − log P_r)

    Without an entropy lse is in its place.
    """
    lses, log_probs, *entropies = gathered(torch.stack(parts), shard).unbind(1)
    lse = lses.logsumexp(0)
    below = lses - lse
    log_prob = log_probs.sum(0) - beyond(lses, shard.owners(lses, words))
    entropy = lse
    if entropies:
        entropy = (below.exp() * (entropies[0] - below)).sum(0)
    return log_prob.masked_fill(log_prob < LOWEST / 2, -torch.inf), lse, entropy
