"""How a model's loss counts its labels, and the Trainer's belief about it, made to agree.

The Trainer of transformers counts the labels of all micro-batches of a step, tells the model their number as
`num_items_in_batch`, and believes that the loss was divided by it. In transformers 5.23 two cases differ:

1. Classes that compute their loss inline take a mean over the micro-batch and ignore the number: under accumulation the
   gradients of BERT, T5 and BART are too large, by the number of micro-batches. `Link.averages` says so, and the hook
   after the forward gives such a loss its share of the step's: · labels here / `num_items_in_batch`.
2. The Trainer leaves out position 0 where `loss_type` is a loss that shifts. Classes named `…LMHeadModel` have none, so
   that it counts a label too many per row of GPT-2; a lone BART decoder has one that shifts, though its loss does not.

The Trainer decides by class names and signatures. Names are wrong for a quarter of the classes, so the model is run
instead.
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
    """Return whether position 0's label never counts, because position i predicts label i + 1.

    With every label ignored, and with every label but those of position 0, a loss that shifts has nothing to count: it
    is the same nan, 0 or auxiliary loss.
    """
    nothing = torch.full_like(batch["labels"], -100)
    first = nothing.clone()
    position = first[:1]  # BERT takes flat labels, too
    if first.dim() > 1:
        position = first[:, 0]
    position.fill_(batch["labels"].max())  # those of the batch may be ignored
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:  # the model makes none of ignored labels
        batch = {"decoder_input_ids": batch["labels"].clamp(min=0), **batch}
    loss_of_nothing = run(model, {**batch, "labels": nothing}).loss
    loss_of_first = run(model, {**batch, "labels": first}).loss
    # an auxiliary loss may differ by the rounding of kernels that sum in any order, a label by whole nats
    return torch.allclose(loss_of_first, loss_of_nothing, rtol=1e-5, atol=0, equal_nan=True)


def counts_items(model: Any, batch: Batch, base: Tensor) -> bool:
    """Return whether the loss is divided by `num_items_in_batch`; `base` is the batch's loss without one."""
    more = torch.tensor(2 * batch["labels"].numel(), device=base.device)  # than any mean was divided by
    loss = run(model, {**batch, "num_items_in_batch": more}).loss
    return not torch.allclose(loss.float(), base.float(), rtol=1e-4, atol=0)


def correct_accounting(model: Any, link: Link, batch: Batch | None = None, base: Tensor | None = None) -> None:
    """Run the model to learn how its loss counts labels, and make the Trainer count alike."""
    link.averages_over_batch = False  # as the family's own classes are
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
            return  # it takes no such argument: the Trainer will say so itself
    _correct_loss_type(model, link)


def _trainer_passes_items(model: Any) -> bool:
    """Return whether the Trainer passes `num_items_in_batch`, by the test that it makes itself."""
    accepts = getattr(model, "accepts_loss_kwargs", None)
    if accepts is not None:
        return bool(accepts)
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    return inspect.Parameter.VAR_KEYWORD in kinds


def _correct_loss_type(model: Any, link: Link) -> None:
    """Give the model a `loss_type` that makes the Trainer count position 0 as the loss does."""
    if model.config.is_encoder_decoder:
        return
    loss_type = getattr(model, "loss_type", None)
    trainer_shifts = LOSS_MAPPING.get(loss_type) is ForCausalLMLoss
    is_unused = loss_type is None or link.averages_over_batch  # the model's own loss does not depend on it
    if trainer_shifts == link.shifts_labels or not is_unused:
        return
    loss = ForMaskedLMLoss
    if link.shifts_labels:
        loss = ForCausalLMLoss
    names = [name for name, function in LOSS_MAPPING.items() if function is loss]
    link.journal.set(model, "loss_type", names[0])


@dataclass
class FusedLabelSmoother:
    """Replacement of `trainer.label_smoother`: the same loss, without the log-probabilities [N, V]."""

    epsilon: float  # label smoothing ε
    shifts_labels: bool  # whether position i predicts label i + 1

    def __call__(
        self, model_output: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Return smoothed cross-entropy, averaged over the labels of this batch or over `num_items_in_batch`."""
        if isinstance(model_output, dict):
            logits: Any = model_output["logits"]
        else:
            logits = model_output[0]
        if isinstance(logits, LazyLogits):
            logits = logits.deferred
        if self.shifts_labels:  # the Trainer's `shift_labels` goes by the name of the model's class
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        rows, targets = logits.flatten(0, -2), labels.reshape(-1)
        if num_items_in_batch is None:
            mean: Tensor = F.cross_entropy(rows, targets, label_smoothing=self.epsilon)
            return mean
        total = F.cross_entropy(rows, targets, reduction="sum", label_smoothing=self.epsilon)
        share: Tensor = total / divisor(num_items_in_batch)
        return share
