"""A small random batch for a model, and one forward that leaves the model unchanged."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tiewise.boundary.link import Link
from tiewise.boundary.saved import plain_class_of
from tiewise.boundary.trial_runs import SEED, ordinary_ids, run_without_trace
from tiewise.core.errors import InstallError

Batch = dict[str, Any]
_ROWS, _LENGTH = 2, 8
# labels [batch] of sentence pairs; without them BERT's and ALBERT's pretraining classes compute no loss
_PAIR_LABELS = ("next_sentence_label", "sentence_order_label")


def random_batch(model: Any, link: Link) -> Batch:
    """Draw ordinary token ids and labels [2, 8], and labels of sentence pairs [2].

    All are on the model's device.
    """
    accepted = inspect.signature(model.forward).parameters
    if "labels" not in accepted:
        remedy = "install works on models that compute their loss from labels"
        raise InstallError(f"{type(model).__name__}.forward takes no labels", remedy)
    input_rows = min(len(lookup.weight) for lookup in link.lookups)
    output_rows = len(link.head.weight)
    output_vocab = getattr(model.config.get_text_config(), "output_vocab_size", None)
    if output_vocab:  # fewer than the table's rows if one table has two vocabularies
        output_rows = min(output_vocab, output_rows)
    source = torch.Generator().manual_seed(SEED)
    shape = (_ROWS, _LENGTH)
    batch = {
        "input_ids": ordinary_ids(model, input_rows, shape, source),
        "labels": ordinary_ids(model, output_rows, shape, source),
    }
    for name in _PAIR_LABELS:
        if name in accepted:
            batch[name] = torch.arange(_ROWS, device="cpu") % 2
    return {name: ids.to(link.head.weight.device) for name, ids in batch.items()}


class LossAndLogits(NamedTuple):
    """Loss of one forward, and its logits as the model returned them."""

    loss: Tensor
    logits: Any


def run(model: Any, batch: Batch, *, training: bool = False) -> LossAndLogits:
    """Run one forward, leave the model unchanged, and return loss and logits."""
    output = run_without_trace(model, batch, training=training)
    if isinstance(output, dict):
        loss = output.get("loss")
        every_logits = [value for key, value in output.items() if "logits" in key]
        logits = next(iter(every_logits), None)
    else:
        loss, logits = output[0], output[1]
    if not isinstance(loss, Tensor) or loss.dim():  # a tuple without a loss begins with the logits
        raise _no_loss(model, batch)
    return LossAndLogits(loss, logits)


def _no_loss(model: Any, batch: Batch) -> InstallError:
    """Return the error for a model that computed no loss. It names labels that the batch lacks."""
    accepted = inspect.signature(model.forward).parameters
    labels = [name for name in accepted if name.endswith(("label", "labels"))]
    absent = [name for name in labels if name not in batch]
    remedy = "pass batch={...} with all inputs that its loss needs"
    if absent:
        remedy += f"; this batch lacks {', '.join(absent)}"
    class_name = plain_class_of(model).__name__
    return InstallError(f"{class_name} computed no loss from {', '.join(batch)}", remedy)
