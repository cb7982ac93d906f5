"""What losses and trainers ask of deferred logits, answered in chunks of tokens: the [N, V] logits never exist.

    asked of z [..., V], t [...] token ids                     answer, from one sweep of all tokens
    F.cross_entropy(z, t)                                      the fused loss, a sweep of its own
    log_softmax(z, -1).gather(-1, t[..., None])                log p_t
    softmax(z, -1).gather(-1, t[..., None])                    exp log p_t
    z.gather(-1, t[..., None])                                 lse + log p_t
    z.logsumexp(-1)                                            lse
    (log_p.exp() * log_p).sum(-1), and p from softmax          −H
    (p * z).sum(-1)                                            lse − H
    z.argmax(-1), and z.mean(-1) without gradients             by rows of logits, a chunk at a time

H is the entropy, lse the log-sum-exp, of the logits with everything recorded before, such as a temperature. The sweep
is remembered, and what iteration, `split` and `chunk` make of z takes its tokens from it: trainers ask row by row to
save memory. `None` says that something else is asked, and the logits are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tiewise.core.backends import LossOptions, chunk_rows
from tiewise.ops.cross_entropy import linear_cross_entropy
from tiewise.ops.log_prob import VocabularyStatistics, vocabulary_statistics

Logits = Any  # `Deferred`, whose file reads this one

# what deferred logits have become
LOGITS, LOG_P, P, P_LOG_P, P_LOGITS = "logits", "log p", "p", "p · log p", "p · logits"
PRODUCTS = {frozenset((P, LOG_P)): P_LOG_P, frozenset((P, LOGITS)): P_LOGITS}
_GATHERED: dict[str, Callable[[Any], Tensor]] = {
    LOGITS: lambda s: s.lse + s.log_prob,
    LOG_P: lambda s: s.log_prob.clone(),  # the caller may write into it
    P: lambda s: s.log_prob.exp(),
}
_SUMMED: dict[str, Callable[[Any], Tensor]] = {P_LOG_P: lambda s: -s.entropy, P_LOGITS: lambda s: s.lse - s.entropy}


def is_last(z: Logits, dim: Any) -> bool:
    """Whether `dim` is the vocabulary's."""
    return dim in (-1, z.ndim - 1, (-1,), [-1]) and not isinstance(dim, bool)


def head_of(z: Logits) -> tuple[Tensor, Tensor, Tensor | None, LossOptions]:
    """Features, table, bias and options whose logits are those of `z`."""
    scale, bias, softcap = z.fold
    if softcap is not None:  # post · tanh(x) = softcap(post · x), with softcap(x) = c · tanh(x / c)
        scale, bias = scale * softcap, None if bias is None else bias * softcap
    return z.hidden, z.table, bias, LossOptions(scale, softcap, logits=z.logits)


def _swept(z: Logits, targets: Tensor | None = None) -> VocabularyStatistics:
    """Statistics [N] of the tokens of `z`; a piece with targets of its own is swept by itself."""
    z.require_unchanged()
    owner = z if targets is not None and z.place is not None else z.origin()
    known, found = owner.swept
    other = targets is not None and (known is None or not torch.equal(known, targets))
    if found is None or other or (owner.requires_grad and not found.lse.requires_grad):
        hidden, table, bias, options = head_of(owner)
        narrow = owner.product in (torch.bfloat16, torch.float16)  # as the head multiplied, whatever autocast is now
        with (
            torch.set_grad_enabled(owner.requires_grad),
            torch.autocast(owner.device.type, owner.product if narrow else None, enabled=narrow),
        ):
            hidden = hidden.reshape(-1, hidden.shape[-1])
            found = vocabulary_statistics(hidden, table, targets, bias, options, entropy=True, shard=owner.shard)
        owner.counts.fused += 1
        owner.swept = None if targets is None else targets.clone(), found  # the caller may write into its own
    if owner is z or z.place is None:
        return found
    return VocabularyStatistics(None, found.lse[z.place], found.entropy[z.place])


def gather(z: Logits, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor | None:
    """`torch.gather` of one token per position."""
    fits = is_last(z, dim) and torch.is_tensor(index) and index.shape == (*z.shape[:-1], 1) and not sparse_grad
    if not fits or index.dtype != torch.long or z.form not in _GATHERED or torch.compiler.is_compiling():
        return None
    if index.device.type == "cpu" and index.numel() and not 0 <= index.min() <= index.max() < z.shape[-1]:
        return None  # torch says what is wrong with it
    with torch.set_grad_enabled(z.requires_grad):
        return _handed(z, _GATHERED[z.form](_swept(z, index.reshape(-1))), keepdim=True)


def take_along_dim(z: Logits, indices: Tensor, dim: int | None = None) -> Tensor | None:
    """`torch.take_along_dim` of one token per position."""
    return None if dim is None else gather(z, dim, indices)


def logsumexp(z: Logits, dim: Any, keepdim: bool = False) -> Tensor | None:
    """`torch.logsumexp` over the vocabulary."""
    if not is_last(z, dim) or z.form != LOGITS or torch.compiler.is_compiling():
        return None
    with torch.set_grad_enabled(z.requires_grad):
        return _handed(z, _swept(z).lse.clone(), keepdim)


def total(z: Logits, dim: Any = None, keepdim: bool = False) -> Tensor | None:
    """`torch.sum` over the vocabulary, of probabilities times something."""
    if not is_last(z, dim) or z.form not in _SUMMED or torch.compiler.is_compiling():
        return None
    with torch.set_grad_enabled(z.requires_grad):
        return _handed(z, _SUMMED[z.form](_swept(z)), keepdim)


def argmax(z: Logits, dim: Any = None, keepdim: bool = False) -> Tensor | None:
    """`torch.argmax` over the vocabulary."""
    return _by_rows(z, torch.argmax, keepdim) if isinstance(dim, int) and is_last(z, dim) else None


def mean(z: Logits, dim: Any = None, keepdim: bool = False) -> Tensor | None:
    """`torch.mean` over the vocabulary, or over everything, where no gradient is wanted."""
    if z.requires_grad or not (dim is None or is_last(z, dim)):
        return None
    found = _by_rows(z, torch.mean, keepdim and dim is not None)
    return found.mean() if dim is None and found is not None else found


def _by_rows(z: Logits, function: Callable[..., Tensor], keepdim: bool) -> Tensor | None:
    apart = z.shard is not None and z.shard.own_tokens  # ranks that may have other numbers of chunks
    if z.form in _SUMMED or apart or torch.compiler.is_compiling():
        return None
    with torch.no_grad():
        rows = z.rows(chunk_rows(z.shape[:-1].numel(), z.shape[-1], z.device.type))
        return _handed(z, torch.cat([function(piece.computed(), -1) for piece in rows]), keepdim)


def _handed(z: Logits, found: Tensor, keepdim: bool) -> Tensor:
    # transformers casts logits to fp32, which narrows those of an fp64 model: what is made of them is fp32 then
    found = found.to(z.dtype) if found.dtype == torch.float64 else found
    return found.reshape((*z.shape[:-1], 1) if keepdim else z.shape[:-1])


def fused_cross_entropy(
    input: Logits,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """`F.cross_entropy` of deferred logits [N, V], fused; None where the fused loss does not compute what is asked."""
    if not torch.is_tensor(target) or target.is_floating_point() or input.form != LOGITS:
        return None
    if input.dim() != 2 or target.dim() != 1 or (size_average, reduce) != (None, None):
        return None
    input.require_unchanged()
    if not torch.compiler.is_compiling():
        input.counts.fused += 1
    chosen: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "class_weight": weight}
    hidden, table, bias, options = head_of(input)
    with torch.set_grad_enabled(input.requires_grad):
        loss = linear_cross_entropy(
            hidden, table, target, bias, options, shard=input.shard, reduction=reduction, **chosen
        )
    return loss.to(input.dtype) if loss.dtype == torch.float64 else loss  # as in `_handed`


ANSWERS: dict[str, Callable[..., Tensor | None]] = {
    "gather": gather,
    "take_along_dim": take_along_dim,
    "logsumexp": logsumexp,
    "sum": total,
    "argmax": argmax,
    "mean": mean,
    "cross_entropy": fused_cross_entropy,
}
