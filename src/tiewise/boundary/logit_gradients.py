"""The gradient of a fused loss with respect to deferred logits.

A fused loss has no logits in its autograd graph. If `torch.autograd.grad` has deferred logits among its inputs, the
logits are computed and the loss is repeated from them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tiewise.boundary.recorded_logits import LOGITS, FusedLoss, RecordedLogits
from tiewise.core.backends import LossOptions
from tiewise.core.errors import UnsupportedError


def note_loss(logits: RecordedLogits, loss: Tensor, target: Tensor, options: LossOptions) -> None:
    """Store a fused loss for `gradients`, if autograd recorded it."""
    if loss.grad_fn is None or torch._C._are_functorch_transforms_active():
        return
    edge = torch.autograd.graph.get_gradient_edge(loss)
    logits.origin().losses.append(FusedLoss(edge, logits.positions, logits.dtype, target.clone(), options))


def gradients(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    *,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """Answer `torch.autograd.grad` if deferred logits are among its inputs.

    The logits are computed, and each fused loss is repeated from them. The gradient of that loss is multiplied by the
    gradient of `outputs` with respect to the fused loss.
    """
    inputs = _as_list(inputs)
    logits = _computed_logits(inputs)
    losses = _losses_of(inputs)
    if losses and options.get("is_grads_batched"):
        raise UnsupportedError("is_grads_batched with deferred logits", "ask for one gradient at a time")
    real_outputs = _computed_logits(_as_list(outputs))
    edges = [fused.loss.edge for fused in losses]
    direct = torch.autograd.grad(real_outputs, [*logits, *edges], grad_outputs, allow_unused=True, **options)
    answer: list[Tensor | None] = list(direct[: len(logits)])
    upstreams = direct[len(logits) :]
    create_graph = bool(options.get("create_graph"))
    for fused, upstream in zip(losses, upstreams, strict=True):
        if upstream is not None:
            index = fused.input_index
            through_loss = _gradient_of_loss(fused.loss, logits[index], upstream, create_graph)
            answer[index] = _add(answer[index], through_loss)
    if materialize_grads:
        _put_zeros(answer, logits)
    elif not allow_unused:
        _require_used(answer)
    return tuple(answer)


def _as_list(tensors: Any) -> list[Any]:
    """Return one tensor or a sequence of them as a list."""
    if isinstance(tensors, Tensor | RecordedLogits):
        return [tensors]
    return list(tensors)


def _computed_logits(tensors: list[Any]) -> list[Any]:
    """Return tensors and graph edges with all deferred logits computed."""
    real = list(tensors)
    for index, x in enumerate(tensors):
        if isinstance(x, RecordedLogits):
            real[index] = x.real("grad")
    return real


def _add(gradient: Tensor | None, addend: Tensor) -> Tensor:
    """Return the sum of two gradients, the first of which may be missing."""
    if gradient is None:
        return addend
    return gradient + addend


def _put_zeros(gradients: list[Tensor | None], inputs: list[Any]) -> None:
    """Replace missing gradients by zeros of the shapes of their inputs."""
    for index, gradient in enumerate(gradients):
        if gradient is None:
            gradients[index] = torch.zeros_like(inputs[index])


def _require_used(gradients: list[Tensor | None]) -> None:
    """Refuse a missing gradient, with the error that torch raises."""
    for gradient in gradients:
        if gradient is None:
            problem = "one of the inputs of torch.autograd.grad was not used in the graph: set allow_unused=True"
            raise RuntimeError(problem)


class _LossOfInput(NamedTuple):
    """A fused loss, and the index of the input whose logits it was computed from."""

    input_index: int
    loss: FusedLoss


def _losses_of(inputs: list[Any]) -> list[_LossOfInput]:
    """Return the fused losses that were computed from the inputs.

    Only inputs that are deferred logits of all tokens count, not probabilities or pieces.
    """
    losses = []
    for index, z in enumerate(inputs):
        if not isinstance(z, RecordedLogits):
            continue
        has_all_tokens = z.form == LOGITS and z.positions is None
        if has_all_tokens:
            losses += [_LossOfInput(index, loss) for loss in z.origin().losses]
    return losses


def _gradient_of_loss(fused: FusedLoss, logits: Tensor, upstream: Tensor, create_graph: bool) -> Tensor:
    """Return the gradient of a loss with respect to all `logits` [..., V], times `upstream`."""
    options = fused.options
    if not fused.target.ne(options.ignore_index).any():
        return torch.zeros_like(logits)
    if not create_graph:
        logits = logits.detach().requires_grad_()
    with torch.enable_grad():
        rows = logits.reshape(-1, logits.shape[-1]).to(fused.dtype)
        if fused.positions is not None:
            rows = rows[fused.positions]
        loss = F.cross_entropy(
            rows,
            fused.target,
            options.class_weight,
            ignore_index=options.ignore_index,
            reduction=options.reduction,
            label_smoothing=options.label_smoothing,
        )
    (gradient,) = torch.autograd.grad(loss, logits, upstream.to(loss.dtype), create_graph=create_graph)
    return gradient
