"""The Trainer of transformers and a model's loss, made to agree; and its label smoother, fused.

The Trainer counts the labels of all micro-batches of a step, tells the model their number as `num_items_in_batch`, and
believes that the loss was divided by it. Of transformers 5.23 that is not true of every class:

1. Classes that compute their loss inline take a mean over the micro-batch and ignore the number: under accumulation the
   gradients of BERT, T5 and BART come out as many times too large as there are micro-batches. `Link.averages` says so,
   and the hook after the forward gives such a loss its share of the step's: · labels here / `num_items_in_batch`.
2. The Trainer leaves out position 0 where `loss_type` is a loss that shifts. Classes named `…LMHeadModel` have none, so
   that it counts a label too many per row of GPT-2; a lone BART decoder has one that shifts, though its loss does not.

Whether a model is of either kind is found by asking it (see `probe`).
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss

from tiewise.boundary.lazy import LazyLogits
from tiewise.boundary.link import Link
from tiewise.boundary.plain import plainly
from tiewise.boundary.probe import Batch, counts_items, random_batch, run, shifts_labels


def correct_accounting(model: Any, link: Link, batch: Batch | None = None, base: Tensor | None = None) -> None:
    """Find out what the model's loss does with its labels and their number, and make the Trainer know it.

    Args:
        batch: what to ask with; None draws one.
        base: the loss of the batch, where it is known.
    """
    link.averages = False  # as the family's own classes are
    batch = random_batch(model, link) if batch is None else batch
    with plainly(link):
        base = run(model, batch)[0] if base is None else base
        link.shifts = shifts_labels(model, batch)
        if not _trainer_passes_items(model):
            return
        try:
            link.averages = not counts_items(model, batch, base)
        except TypeError:
            return  # it takes no such argument: the Trainer will say so itself
    known = getattr(model, "loss_type", None)
    counted = LOSS_MAPPING.get(known) is ForCausalLMLoss and not model.config.is_encoder_decoder  # as the Trainer asks
    if counted != link.shifts and (known is None or link.averages) and not model.config.is_encoder_decoder:
        named = ForCausalLMLoss if link.shifts else ForMaskedLMLoss
        link.undo.set(model, "loss_type", next(key for key, loss in LOSS_MAPPING.items() if loss is named))


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
        if self.shifts:  # the Trainer's `shift_labels` goes by the name of the model's class
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        loss = F.cross_entropy(
            logits.view(-1, logits.size(-1)) if not isinstance(logits, Tensor) else logits.flatten(0, -2),
            labels.reshape(-1),
            ignore_index=self.ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            label_smoothing=self.epsilon,
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch
