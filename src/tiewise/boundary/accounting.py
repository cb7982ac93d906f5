"""Two corrections to how transformers' Trainer accounts for a model's loss, and its label smoother, fused.

1. Classes named `…LMHeadModel` get no `loss_type`, so the Trainer does not know that they shift labels and counts one
   label too many per row: GPT-2's loss comes out (T − 1)/T of what it is. Setting `loss_type` corrects it.
2. Classes that compute their loss inline accept `num_items_in_batch` and ignore it; the Trainer believes they divided
   by it and does not divide by the accumulation steps: BERT's and T5's gradients come out as many times too large.
   Setting `accepts_loss_kwargs = False` corrects it.

Whether a model needs either is found by asking it (see `probe`).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from tiewise.boundary.journal import Journal
from tiewise.boundary.lazy import LazyLogits
from tiewise.boundary.probe import Batch, counts_items, shifts_labels


def correct_accounting(model: Any, batch: Batch, base: Tensor, journal: Journal) -> bool:
    """Set what the Trainer reads to what the model does; `base` is the batch's loss. Return whether labels shift."""
    shifts = shifts_labels(model, batch)
    if not _trainer_passes_items(model):
        return shifts
    try:
        counts = counts_items(model, batch, base)
    except TypeError:
        return shifts  # it takes no such argument: the Trainer will say so itself
    if not counts:
        journal.set(model, "accepts_loss_kwargs", False)
    elif shifts and getattr(model, "loss_type", None) is None and not model.config.is_encoder_decoder:
        journal.set(model, "loss_type", next(key for key, loss in LOSS_MAPPING.items() if loss is ForCausalLMLoss))
    return shifts


def _trainer_passes_items(model: Any) -> bool:
    declared = getattr(model, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


@dataclass
class FusedLabelSmoother:
    """Put in place of `trainer.label_smoother`: the same loss, without the log-probabilities [N, V].

    Args:
        epsilon: label smoothing ε.
        shifts: whether position i predicts label i + 1.
        ignore_index: label that counts for nothing.
    """

    epsilon: float
    shifts: bool
    ignore_index: int = -100

    def __call__(
        self, model_output: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Smoothed cross-entropy, averaged over the labels of this batch or over `num_items_in_batch`."""
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        logits = logits.deferred if isinstance(logits, LazyLogits) else logits
        if self.shifts or shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        loss = F.cross_entropy(
            logits.view(-1, logits.size(-1)) if not isinstance(logits, Tensor) else logits.flatten(0, -2),
            labels.reshape(-1),
            ignore_index=self.ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            label_smoothing=self.epsilon,
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch
