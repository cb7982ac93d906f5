"""Losses and statistics of deferred logits, without the [N, V] logits.

They are computed in chunks of tokens. Each function takes the arguments of a function of torch. It returns None for
arguments that it does not support, and then the logits are computed. `tiewise.boundary.deferred` lists the expressions
that are supported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.logit_gradients import note_loss
from tiewise.boundary.ops.cross_entropy import linear_cross_entropy
from tiewise.boundary.ops.log_prob import VocabularyStatistics, vocabulary_statistics
from tiewise.boundary.recorded_logits import (
    LOG_P,
    LOGITS,
    MINUS_LOG_P,
    P_LOG_P,
    P_LOGITS,
    PassTargets,
    RecordedLogits,
    VocabularyPass,
    head_of,
)
from tiewise.core.backends import chunk_rows

# a pass over the vocabulary


def vocabulary_pass(z: RecordedLogits, targets: Tensor | None = None) -> VocabularyStatistics:
    """Return statistics [N] of the tokens of `z`, from an earlier pass if possible.

    Logits of some tokens read theirs from the pass of all tokens. With separate targets they get a separate pass.
    """
    z.require_unchanged()
    has_separate_pass = targets is not None and z.positions is not None
    if has_separate_pass:
        owner = z
    else:
        owner = z.origin()
    last = owner.last_pass
    if last is None or not _is_reusable(last, owner, targets):
        last = owner.last_pass = _new_pass(owner, targets)
        owner.counts.fused += 1
    statistics = last.statistics
    if owner is z or z.positions is None:
        return statistics
    assert statistics.entropy is not None, "every pass is asked for the entropy"
    return VocabularyStatistics(None, statistics.lse[z.positions], statistics.entropy[z.positions])


def _is_reusable(last: VocabularyPass, owner: RecordedLogits, targets: Tensor | None) -> bool:
    """Return whether an earlier pass has the same targets, and a gradient if one is needed."""
    if owner.requires_grad and not last.statistics.lse.requires_grad:
        return False
    if targets is None:
        return True
    return last.targets is not None and last.targets.match(targets)


def _new_pass(owner: RecordedLogits, targets: Tensor | None) -> VocabularyPass:
    """Compute the statistics of all tokens of `owner`, with or without targets [N]."""
    hidden, table, bias, options = head_of(owner)
    with torch.set_grad_enabled(owner.requires_grad), _autocast_of(owner):
        hidden = hidden.reshape(-1, hidden.shape[-1])
        statistics = vocabulary_statistics(hidden, table, targets, bias, options, entropy=True, shard=owner.shard)
    if targets is None:
        return VocabularyPass(None, statistics)
    return VocabularyPass(PassTargets(targets), statistics)


def _autocast_of(owner: RecordedLogits) -> torch.autocast:
    """Return an autocast context with the state that autocast had when the head was called."""
    if owner.product in (torch.bfloat16, torch.float16):
        return torch.autocast(owner.device.type, owner.product)
    return torch.autocast(owner.device.type, enabled=False)


# answers that a pass has


def gather(z: RecordedLogits, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor | None:
    """Answer `torch.gather` of one token per position."""
    if not _allows_pass(z, dim) or z.form in (P_LOG_P, P_LOGITS):
        return None
    if sparse_grad or not _has_one_token_each(index, z.shape):
        return None
    if _has_unknown_token(index, z.shape[-1]):
        return None  # torch raises the error
    with torch.set_grad_enabled(z.requires_grad):
        statistics = vocabulary_pass(z, index.reshape(-1))
        return _reshape_as_reduction(z, _entry_at_target(statistics, z.form), keepdim=True)


def _has_one_token_each(index: Any, shape: torch.Size) -> bool:
    """Return whether an index [..., 1] names one token per position of logits of this shape."""
    if not torch.is_tensor(index) or index.dtype != torch.long:
        return False
    return index.shape == (*shape[:-1], 1)


def _has_unknown_token(index: Tensor, vocab: int) -> bool:
    """Return whether a token is outside the vocabulary.

    On other devices than a CPU the check would cost a synchronisation, and the result is False.
    """
    if index.device.type != "cpu" or not index.numel():
        return False
    return not 0 <= index.min() <= index.max() < vocab


def _entry_at_target(statistics: VocabularyStatistics, form: str) -> Tensor:
    """Return the target's logit, p, log p or −log p, by `form`."""
    log_prob = statistics.log_prob
    assert log_prob is not None, "this pass had no targets"
    if form == LOGITS:
        return statistics.lse + log_prob
    if form == LOG_P:
        return log_prob.clone()  # the caller may write into it
    if form == MINUS_LOG_P:
        return -log_prob
    return log_prob.exp()


def take_along_dim(z: RecordedLogits, indices: Tensor, dim: int | None = None) -> Tensor | None:
    """Answer `torch.take_along_dim` of one token per position."""
    if dim is None:
        return None
    return gather(z, dim, indices)


def logsumexp(z: RecordedLogits, dim: Any, keepdim: bool = False) -> Tensor | None:
    """Answer `torch.logsumexp` over the vocabulary."""
    if z.form != LOGITS or not _allows_pass(z, dim):
        return None
    with torch.set_grad_enabled(z.requires_grad):
        return _reshape_as_reduction(z, vocabulary_pass(z).lse.clone(), keepdim)


def sum_over_vocabulary(
    z: RecordedLogits, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor | None:
    """Answer `torch.sum` over the vocabulary.

    The summands may be log p, −log p, p · log p or p · logits.
    """
    if not _allows_pass(z, dim):
        return None
    if z.form in (LOG_P, MINUS_LOG_P):
        return _sum_of_log_probs(z, keepdim, dtype)
    if z.form not in (P_LOG_P, P_LOGITS) or dtype is not None:
        return None
    with torch.set_grad_enabled(z.requires_grad):
        statistics = vocabulary_pass(z)
        assert statistics.entropy is not None, "every pass is asked for the entropy"
        if z.form == P_LOG_P:
            summed = -statistics.entropy  # Σ p log p = −H
        else:
            summed = statistics.lse - statistics.entropy  # Σ p z = lse − H
        return _reshape_as_reduction(z, summed, keepdim)


def _sum_of_log_probs(z: RecordedLogits, keepdim: bool, dtype: torch.dtype | None) -> Tensor | None:
    """Return the sum over the vocabulary of log p or −log p.

    It comes from a loss with label smoothing 1.
    """
    if dtype not in (None, z.dtype, torch.float32):
        return None
    z.require_unchanged()
    hidden, table, bias, options = head_of(z)
    # with ε = 1 the loss of a token is the mean of −log p over the vocabulary, for any target
    options = replace(options, label_smoothing=1.0, reduction="none")
    targets = torch.zeros(z.shape[:-1], dtype=torch.long, device=z.device)
    with torch.set_grad_enabled(z.requires_grad):
        means = linear_cross_entropy(hidden, table, targets, bias, options, shard=z.shard)
        z.counts.fused += 1
        sums = means * z.shape[-1]
        if z.form == LOG_P:
            sums = -sums
        shaped = _reshape_as_reduction(z, sums, keepdim)
        if dtype is None:
            return shaped
        return shaped.to(dtype)


def _allows_pass(z: RecordedLogits, dim: Any) -> bool:
    """Return whether `dim` is the vocabulary's and no compiler traces.

    A pass stores state between calls, which a compiled graph cannot.
    """
    return z.is_vocabulary(dim) and not torch.compiler.is_compiling()


# answers by rows of logits, a chunk at a time


def argmax(z: RecordedLogits, dim: Any = None, keepdim: bool = False) -> Tensor | None:
    """Answer `torch.argmax` over the vocabulary."""
    if not isinstance(dim, int) or not z.is_vocabulary(dim):
        return None
    return _apply_by_chunks(z, torch.argmax, keepdim)


def mean(z: RecordedLogits, dim: Any = None, keepdim: bool = False) -> Tensor | None:
    """Answer `torch.mean` over the vocabulary or over everything, without gradients."""
    if z.requires_grad:
        return None
    if dim is None:
        means = _apply_by_chunks(z, torch.mean, keepdim=False)
        if means is None:
            return None
        return means.mean()
    if not z.is_vocabulary(dim):
        return None
    return _apply_by_chunks(z, torch.mean, keepdim)


def _apply_by_chunks(z: RecordedLogits, function: Callable[..., Tensor], keepdim: bool) -> Tensor | None:
    """Apply `function` over the vocabulary to one chunk of computed logits at a time, without gradients."""
    if z.form in (P_LOG_P, P_LOGITS) or torch.compiler.is_compiling():
        return None
    if z.shard is not None and z.shard.own_tokens:  # ranks may differ in their numbers of chunks
        return None
    with torch.no_grad():
        hidden = z.hidden.reshape(-1, z.hidden.shape[-1])
        chunks = torch.split(hidden, chunk_rows(len(hidden), z.shape[-1], z.device.type))
        values = torch.cat([function(z.derive(hidden=chunk).compute(), -1) for chunk in chunks])
        return _reshape_as_reduction(z, values, keepdim)


def _reshape_as_reduction(z: RecordedLogits, values: Tensor, keepdim: bool) -> Tensor:
    """Return values of all tokens in the shape and dtype of a reduction over the vocabulary."""
    values = _cast_from_fp64(z, values)
    positions = z.shape[:-1]
    if keepdim:
        return values.reshape(*positions, 1)
    return values.reshape(positions)


def _cast_from_fp64(z: RecordedLogits, values: Tensor) -> Tensor:
    """Return fp64 values in the dtype of `z`.

    They differ because transformers casts logits to fp32, also those of an fp64 model.
    """
    if values.dtype != torch.float64:
        return values
    return values.to(z.dtype)


# the loss


def fused_cross_entropy(
    input: RecordedLogits,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Answer `F.cross_entropy` of deferred logits [N, V] by the fused loss.

    Return None for arguments that the fused loss lacks.
    """
    if input.form != LOGITS or (size_average, reduce) != (None, None):
        return None
    if not torch.is_tensor(target) or target.is_floating_point():
        return None
    if (input.dim(), target.dim()) != (2, 1):
        return None
    input.require_unchanged()
    if not torch.compiler.is_compiling():
        input.counts.fused += 1
    hidden, table, bias, options = head_of(input)
    options = replace(
        options,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        class_weight=weight,
        reduction=reduction,
    )
    with torch.set_grad_enabled(input.requires_grad):
        loss = linear_cross_entropy(hidden, table, target, bias, options, shard=input.shard)
    loss = _cast_from_fp64(input, loss)
    if not torch.compiler.is_compiling():  # Dynamo cannot trace `note_loss`, which reads autograd's graph
        note_loss(input, loss, target, options)
    return loss


# name of a function of torch -> its answer
ANSWERS: dict[str, Callable[..., Tensor | None]] = {
    "gather": gather,
    "take_along_dim": take_along_dim,
    "logsumexp": logsumexp,
    "sum": sum_over_vocabulary,
    "argmax": argmax,
    "mean": mean,
    "cross_entropy": fused_cross_entropy,
}
