"""How a model's loss counts its labels, and corrections where the Trainer counts otherwise.

The Trainer of transformers counts the labels of all micro-batches of an optimizer step. It passes their number to the
model as `num_items_in_batch`, and assumes that the loss is divided by it. In transformers 5.23 two cases differ:

1. Classes that compute their loss inline ignore the number and return a mean over the micro-batch. With gradient
   accumulation the gradients of BERT, T5 and BART are too large, by the number of micro-batches. For such a class
   `Link.averages_over_batch` is True, and the hook after the forward multiplies the loss by (labels in this batch /
   `num_items_in_batch`).
2. The Trainer does not count position 0 if `loss_type` names a loss that shifts labels. Classes named `…LMHeadModel`
   have no `loss_type`, so it counts one label too many per row of GPT-2. A BART decoder without encoder has one that
   shifts, though its loss does not.

The Trainer decides by class names and signatures. Names are wrong for a quarter of the classes, so tiewise runs the
model to find out.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss

from tiewise.boundary.lazy_logits import LazyLogits
from tiewise.boundary.link import Link, divisor
from tiewise.boundary.plain_classes import in_plain_classes
from tiewise.boundary.random_batch import Batch, random_batch, run


def shifts_labels(model: Any, batch: Batch) -> bool:
    """Return whether position i predicts label i + 1, so that label 0 never counts.

    The model runs twice: with all labels ignored, and with all labels ignored except those of position 0. A loss that
    shifts has no labels in both cases, and gives the same nan, 0 or auxiliary loss.
    """
    nothing = torch.full_like(batch["labels"], -100)
    first = nothing.clone()
    position = first[:1]  # if labels are flat, as BERT accepts
    if first.dim() > 1:
        position = first[:, 0]
    position.fill_(batch["labels"].max())  # an ordinary label, since those of the batch may be -100
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:  # else derived from labels, here ignored
        batch = {"decoder_input_ids": batch["labels"].clamp(min=0), **batch}
    loss_of_nothing = run(model, {**batch, "labels": nothing}).loss
    loss_of_first = run(model, {**batch, "labels": first}).loss
    # an auxiliary loss may differ by rounding, since kernels may sum in any order; a label differs by nats
    return torch.allclose(loss_of_first, loss_of_nothing, rtol=1e-5, atol=0, equal_nan=True)


def counts_items(model: Any, batch: Batch, base: Tensor) -> bool:
    """Return whether the loss is divided by `num_items_in_batch`.

    `base` is the batch's loss without that argument.
    """
    items = torch.tensor(2 * batch["labels"].numel(), device=base.device)  # more than the number of labels
    loss = run(model, {**batch, "num_items_in_batch": items}).loss
    return not torch.allclose(loss.float(), base.float(), rtol=1e-4, atol=0)


def correct_accounting(model: Any, link: Link, batch: Batch | None = None, base: Tensor | None = None) -> None:
    """Run the model to learn how its loss counts labels, and make the Trainer count alike."""
    link.averages_over_batch = False  # the hook must not correct the losses below
    if batch is None:
        batch = random_batch(model, link)
    with in_plain_classes(link):
        if base is None:
            base = run(model, batch).loss
        link.shifts_labels = shifts_labels(model, batch)
        if not _trainer_passes_items(model):
            return
        try:
            link.averages_over_batch = not counts_items(model, batch, base)
        except TypeError:
            return  # the model does not accept the argument: the Trainer will raise the error
    _correct_loss_type(model, link)


def _trainer_passes_items(model: Any) -> bool:
    """Return whether the Trainer passes `num_items_in_batch`, by the Trainer's rule."""
    accepts = getattr(model, "accepts_loss_kwargs", None)
    if accepts is not None:
        return bool(accepts)
    parameters = inspect.signature(model.forward).parameters.values()
    parameter_kinds = {parameter.kind for parameter in parameters}
    return inspect.Parameter.VAR_KEYWORD in parameter_kinds


def _correct_loss_type(model: Any, link: Link) -> None:
    """Give the model a `loss_type` that makes the Trainer count position 0 as the loss does."""
    if model.config.is_encoder_decoder:
        return
    loss_type = getattr(model, "loss_type", None)
    trainer_shifts = LOSS_MAPPING.get(loss_type) is ForCausalLMLoss
    is_unused = loss_type is None or link.averages_over_batch  # the model's loss does not depend on `loss_type`
    if trainer_shifts == link.shifts_labels or not is_unused:
        return
    loss = ForMaskedLMLoss
    if link.shifts_labels:
        loss = ForCausalLMLoss
    names = [name for name, function in LOSS_MAPPING.items() if function is loss]
    link.journal.set(model, "loss_type", names[0])


@dataclass
class FusedLabelSmoother:
    """Replacement of `trainer.label_smoother`, without the log-probabilities [N, V].

    The loss is the same.
    """

    epsilon: float  # label smoothing ε
    shifts_labels: bool  # whether position i predicts label i + 1

    def __call__(
        self, model_output: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Return the smoothed cross-entropy in nats.

        It is the mean over the labels of this batch, or the sum divided by `num_items_in_batch`.
        """
        if isinstance(model_output, dict):
            logits: Any = model_output["logits"]
        else:
            logits = model_output[0]
        if isinstance(logits, LazyLogits):
            logits = logits.deferred
        if self.shifts_labels:  # instead of `shift_labels`, which the Trainer sets by class name
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        rows, targets = logits.flatten(0, -2), labels.reshape(-1)
        if num_items_in_batch is None:
            mean: Tensor = F.cross_entropy(rows, targets, label_smoothing=self.epsilon)
            return mean
        total = F.cross_entropy(rows, targets, reduction="sum", label_smoothing=self.epsilon)
        share: Tensor = total / divisor(num_items_in_batch)
        return share
