"""The gradient of a fused loss with respect to deferred logits, which are not in its graph.

So the logits are computed and the loss is repeated from them, whenever `torch.autograd.grad` has deferred logits among
its inputs.
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
    """Remember a fused loss for `gradients`, if autograd recorded it."""
    if loss.grad_fn is None or torch._C._are_functorch_transforms_active():
        return
    edge = torch.autograd.graph.get_gradient_edge(loss)
    logits.origin().losses.append(FusedLoss(edge, logits.place, logits.dtype, target.clone(), options))


def gradients(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    *,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """Answer `torch.autograd.grad` where deferred logits are among the inputs.

    A fused loss has no logits in its graph. So the logits are computed, each fused loss is repeated from them, and its
    gradient is multiplied by the gradient of `outputs` with respect to the fused loss.
    """
    outputs, inputs = _as_list(outputs), _as_list(inputs)
    real_inputs = [_real(x) for x in inputs]
    losses = _losses_of(inputs)
    if losses and options.get("is_grads_batched"):
        raise UnsupportedError("is_grads_batched with deferred logits", "ask for one gradient at a time")
    real_outputs = [_real(x) for x in outputs]
    sources = [*real_inputs, *(fused.loss.edge for fused in losses)]
    direct = torch.autograd.grad(real_outputs, sources, grad_outputs, allow_unused=True, **options)
    answer = list(direct[: len(inputs)])
    for fused, upstream in zip(losses, direct[len(inputs) :], strict=True):
        if upstream is None:
            continue
        through_loss = _gradient_of_loss(
            fused.loss, real_inputs[fused.input_index], upstream, bool(options.get("create_graph"))
        )
        before = answer[fused.input_index]
        answer[fused.input_index] = through_loss if before is None else before + through_loss
    if materialize_grads:
        return tuple(torch.zeros_like(x) if g is None else g for g, x in zip(answer, real_inputs, strict=True))
    if not allow_unused and any(g is None for g in answer):
        raise RuntimeError("one of the inputs of torch.autograd.grad was not used in the graph: set allow_unused=True")
    return tuple(answer)


def _as_list(tensors: Any) -> list[Any]:
    """Return one tensor or a sequence of them as a list."""
    return [tensors] if isinstance(tensors, Tensor | RecordedLogits) else list(tensors)


def _real(x: Any) -> Any:
    """Return deferred logits computed, and anything else as it is."""
    return x.real("grad") if isinstance(x, RecordedLogits) else x


class _LossOfInput(NamedTuple):
    """A fused loss, and the index of the input whose logits it was computed from."""

    input_index: int
    loss: FusedLoss


def _losses_of(inputs: list[Any]) -> list[_LossOfInput]:
    """Return the fused losses that were computed from each of the inputs that is whole deferred logits."""
    losses = []
    for index, z in enumerate(inputs):
        if isinstance(z, RecordedLogits) and z.form == LOGITS and z.place is None:
            losses += [_LossOfInput(index, loss) for loss in z.origin().losses]
    return losses


def _gradient_of_loss(fused: FusedLoss, logits: Tensor, upstream: Tensor, create_graph: bool) -> Tensor:
    """Return the gradient of a loss with respect to all `logits` [..., V], times its gradient `upstream`."""
    o = fused.options
    if not fused.target.ne(o.ignore_index).any():
        return torch.zeros_like(logits)
    logits = logits if create_graph else logits.detach().requires_grad_()
    with torch.enable_grad():
        rows = logits.reshape(-1, logits.shape[-1]).to(fused.dtype)
        if fused.place is not None:
            rows = rows[fused.place]
        loss = F.cross_entropy(
            rows,
            fused.target,
            o.class_weight,
            ignore_index=o.ignore_index,
            reduction=o.reduction,
            label_smoothing=o.label_smoothing,
        )
    return torch.autograd.grad(loss, logits, upstream.to(loss.dtype), create_graph=create_graph)[0]
