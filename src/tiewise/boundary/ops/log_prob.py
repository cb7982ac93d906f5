"""Log-probabilities, log-sum-exps and entropies of a head's distributions, without its logits.

With z [N, V] the logits as `cross_entropy` has them, after bias and soft-cap, divided by the temperature:

    lse = log Σ_j exp z_j        p_j = exp(z_j − lse)        H = −Σ_j p_j log p_j        (0 log 0 = 0)
    log-probability of t = z_t − lse

    ∂lse/∂z_j = p_j        ∂(z_t − lse)/∂z_j = [j = t] − p_j        ∂H/∂z_j = −p_j (log p_j + H)

One pass over chunks of tokens computes the statistics. A second pass computes their gradients from the upstream
gradients a, b, c of log-probability, lse and entropy, which are unknown before. Both take four matrix products, as
per-token losses do.

    slope by z_j = r (a [j = t] + p_j (b − a − c (log p_j + H)))          a, b, c divided by r = |a| + |b| + |c|

So slopes stay near 1 in fp16, and r multiplies [n, E]. The steps between the products process a few rows at a time,
which stay in a core's cache: softmax, entropy and slope together then cost about as much as one of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiewise.boundary.ops.problem import accumulator, check_problem, check_range, flat_rows
from tiewise.boundary.ops.statistics_operators import token_statistics
from tiewise.boundary.ops.vocabulary_shard import LOWEST, VocabularyShard, gather_inputs, gather_ranks, logsumexp_minus
from tiewise.core.backends import LossOptions

_DEFAULT = LossOptions()


class VocabularyStatistics(NamedTuple):
    """Statistics of the distribution at each token, which share one backward pass."""

    log_prob: Tensor | None  # [...] log p of the target; None without targets. Adding lse gives the target's logit
    lse: Tensor  # [...] log Σ exp z
    entropy: Tensor | None  # [...] in nats; None unless requested


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
    """Return log-probabilities of `targets` under softmax(features @ weightᵀ / temperature), without [N, V] logits.

    Policy gradients and preference losses need these (`log_softmax(logits).gather(...)`). They are differentiable.
    Types, autocast, `torch.compile` and frozen inputs work as in `linear_cross_entropy`. The module's header has the
    formulas.

    >>> import torch
    >>> features, weight = torch.zeros(2, 4), torch.zeros(8, 4)
    >>> linear_log_prob(features, weight, torch.tensor([1, 5]))  # −ln 8
    tensor([-2.0794, -2.0794])

    Args:
        features: [..., E], any floating type.
        weight: [V, E].
        targets: [...] token ids, or `ignore_index`.
        bias: [V] or None.
        options: see `LossOptions`; only `scale`, `softcap`, `ignore_index`, `chunk` and `logits` apply.
        temperature: divides the logits, after the soft-cap; the entropy is that of the resulting distribution.
        entropy: whether to return the entropy of each distribution too, for one more pass over each chunk.
        shard: as in `linear_cross_entropy`.
        **overrides: single options by name, e.g. `softcap=30.0`.

    Returns:
        log-probabilities in nats, shaped like `targets`, fp32 (fp64 for fp64 inputs); with `entropy=True` the pair of
        these and the entropies in nats. If the target is `ignore_index`, both are 0 without gradient. A token whose
        logit is −inf has the log-probability −inf and adds nothing to the entropy. A logit that is nan or +inf makes
        its token nan.

    Raises:
        TypeError: as `linear_cross_entropy`.
        ValueError: as `linear_cross_entropy`; the temperature is not positive, or an option applies to losses only
            (`label_smoothing`, `z_loss`, `class_weight`, `backend`, `reduction="sum"`).
        IndexError: as `linear_cross_entropy`.
        UnsupportedError: as `linear_cross_entropy`.
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
    """Return all statistics that one pass computes, by the arguments of `linear_log_prob`.

    Without targets no token is ignored. Request all statistics in one call: each tensor of the result can be
    differentiated alone or with the others, and tensors that are differentiated together share one pass. If a target
    is ignored, its three statistics are 0 without gradient.
    """
    options = replace(options, **overrides) if overrides else options
    if options.reduction == "sum":
        raise ValueError("log-probabilities are not reduced: their sum is a loss")
    tempered = at_temperature(options, temperature)
    check_problem(features, weight, _targets_to_check(features, targets), bias, options, shard)
    flat, t = flat_rows(features), None
    if targets is not None:
        t = targets.reshape(-1).long()
        if shard is None and not torch.compiler.is_compiling():
            check_range(t, len(weight), options.ignore_index)
    bias = bias_at_temperature(bias, temperature)
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
    """Return the targets, or placeholders that pass every check if there are none."""
    if targets is not None:
        return targets
    if not isinstance(features, Tensor):  # features are refused before the targets are checked
        return torch.empty((), dtype=torch.long)
    return torch.empty(features.shape[:-1], dtype=torch.long, device=features.device)


def at_temperature(options: LossOptions, temperature: float) -> LossOptions:
    """Return the options of logits divided by a temperature; `bias_at_temperature` divides the bias.

        c · tanh((s x + b) / c) / τ = (c / τ) · tanh((s / τ · x + b / τ) / (c / τ))

    Raises:
        ValueError: an option applies to losses only, or the temperature is not positive and finite.
    """
    has_loss_option = (
        options.label_smoothing or options.z_loss or options.class_weight is not None or options.backend is not None
    )
    if has_loss_option:
        alone = "label_smoothing, z_loss, class_weight and backend"
        raise ValueError(f"{alone} are of cross-entropies alone; leave them out here")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, not {temperature}")
    if options.softcap is not None:
        options = replace(options, softcap=options.softcap / temperature)
    return replace(options, scale=options.scale / temperature)


def bias_at_temperature(bias: Tensor | None, temperature: float) -> Tensor | None:
    """Return a bias [V] divided by a temperature, in fp32 or wider."""
    if bias is None or temperature == 1.0:
        return bias
    return bias.to(accumulator(bias.dtype)) / temperature


# over ranks


class _TokenInputs(NamedTuple):
    """Inputs of the statistics on one rank.

    Features [N, E], the local rows [V_r, E] and their bias [V_r], and targets [N] of the full vocabulary.
    """

    features: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor | None


def _over_ranks(
    shard: VocabularyShard, inputs: _TokenInputs, entropy: bool, options: LossOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, lse and entropy, each [N], from the statistics of every rank's rows."""
    n, max_tokens = len(inputs.features), shard.max_tokens(inputs.features)
    features, targets = gather_inputs(inputs.features, shard, max_tokens), inputs.targets
    if targets is None:
        words = torch.full_like(features[:, 0], shard.start, dtype=torch.long)
    else:
        words = shard.gather_tokens(targets, max_tokens)
        check_range(words, shard.total, options.ignore_index)
    parts = _statistics_of_rows(shard, inputs._replace(features=features), words, entropy, options)
    results = [shard.local_part(x, max_tokens, n) for x in _combine_ranks(shard, parts, words)]
    if targets is not None:
        results = [x.masked_fill(targets == options.ignore_index, 0) for x in results]
    log_prob, lse, entropies = results
    return log_prob, lse, entropies


def _statistics_of_rows(
    shard: VocabularyShard, inputs: _TokenInputs, words: Tensor, entropy: bool, options: LossOptions
) -> list[Tensor]:
    """Return lse and log-probability over the local rows, and the entropy if requested.

    The log-probability of a word on another rank is 0.
    """
    features, weight, bias, _ = inputs
    column, is_here = shard.columns(words)
    options = replace(options, ignore_index=-1)  # −1 is no local row, whichever token is ignored
    has_no_logit = not len(weight) or (bias is not None and bool(bias.isneginf().all()))
    if has_no_logit:  # add one row with the lowest logit, which is no token's
        weight = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
        bias = torch.full_like(weight[:, 0], LOWEST, dtype=torch.float32)
        column, options = torch.zeros_like(words), replace(options, softcap=None)
    statistics = vocabulary_statistics(features, weight, column.reshape(-1), bias, options, entropy=entropy)
    assert statistics.log_prob is not None, "there are targets"
    parts = [statistics.lse, statistics.log_prob.where(is_here, 0)]
    if statistics.entropy is not None:
        parts.append(statistics.entropy)
    return parts


def _combine_ranks(shard: VocabularyShard, parts: list[Tensor], words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, lse and entropy over all ranks' rows, from those of the local rows.

    With P_r = exp(lse_r − lse):    log p = log p_owner + log P_owner        H = Σ_r P_r (H_r − log P_r)

    If the entropy was not requested, the third tensor is lse.
    """
    lses, log_probs, *entropies = gather_ranks(torch.stack(parts), shard).unbind(1)
    lse = lses.logsumexp(0)
    below = lses - lse
    log_prob = log_probs.sum(0) - logsumexp_minus(lses, shard.owner_lse(lses, words))
    entropy = lse
    if entropies:
        entropy = (below.exp() * (entropies[0] - below)).sum(0)
    return log_prob.masked_fill(log_prob < LOWEST / 2, -torch.inf), lse, entropy
