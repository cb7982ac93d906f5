"""Run a model on a small random batch, the same way each time, and ask what its loss depends on.

transformers decides by class names and signatures whether a loss shifts its labels and whether it divides by the
number of items it is told. Names are wrong for a quarter of the classes, so the model is asked instead:

    shifts          the label at position 0 counts for nothing, even where it is the only one
    counts items    another `num_items_in_batch` changes the loss
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tiewise.boundary.lazy import computed
from tiewise.boundary.link import Link
from tiewise.core.errors import InstallError

Batch = dict[str, Any]
_SEED = 20240229
_ROWS, _LENGTH = 2, 8


def random_batch(model: Any, link: Link) -> Batch:
    """Token ids and labels [2, 8], avoiding the special ids, on the model's device.

    Raises:
        InstallError: the model's forward takes no labels.
    """
    if "labels" not in inspect.signature(model.forward).parameters:
        fix = "install works on models that compute their loss from labels"
        raise InstallError(f"{type(model).__name__}.forward takes no labels", fix)
    source = torch.Generator().manual_seed(_SEED)
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    special = {v for k, v in config.to_dict().items() if k.endswith("token_id") and isinstance(v, int)}

    def draw(rows: int) -> Tensor:
        ordinary = torch.tensor([i for i in range(min(rows, 4096)) if i not in special] or [0])
        return ordinary[torch.randint(len(ordinary), (_ROWS, _LENGTH), generator=source)].to(link.head.weight.device)

    rows_in = min(lookup.weight.shape[0] for lookup in link.lookups)
    rows_out = link.head.weight.shape[0]
    predicted = getattr(config, "output_vocab_size", None) or rows_out  # fewer where one table serves two vocabularies
    return {"input_ids": draw(rows_in), "labels": draw(min(predicted, rows_out))}


def run(model: Any, batch: Batch, *, training: bool = False) -> tuple[Tensor, Any]:
    """Loss and logits (as the model hands them out) of one forward, with fixed randomness and no trace left."""
    # BigBird settles for another kind of attention, with other modules, in a forward of a short batch
    was = [(module, dict(vars(module)), dict(module._modules)) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if training else []
    model.train(training)
    try:
        with _fixed_randomness(), torch.set_grad_enabled(training):
            output = model(**batch)
    finally:
        for module, attributes, children in was:
            vars(module).clear()
            vars(module).update(attributes)
            module._modules.clear()
            module._modules.update(children)
        with torch.no_grad():
            for buffer, old in buffers:
                buffer.copy_(old)
    if not isinstance(output, dict):
        return output[0], output[1]
    return output["loss"], next((value for key, value in output.items() if "logits" in key), None)


def shifts_labels(model: Any, batch: Batch) -> bool:
    """Whether position 0's label never counts, because position i predicts label i + 1.

    With every label ignored, and with every label but those of position 0, a loss that shifts has nothing to count: it
    is the same nan, 0 or auxiliary loss.
    """
    nothing = torch.full_like(batch["labels"], -100)
    first = nothing.clone()
    first[:, 0] = batch["labels"].max()  # those of the batch may be ignored
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:  # which ignored labels cannot be made into
        batch = {"decoder_input_ids": batch["labels"].clamp(min=0), **batch}
    without, counted = (run(model, {**batch, "labels": labels})[0] for labels in (nothing, first))
    # an auxiliary loss may differ by the rounding of kernels that sum in any order, a label by whole nats
    return torch.allclose(counted, without, rtol=1e-5, atol=0, equal_nan=True)


def counts_items(model: Any, batch: Batch, base: Tensor) -> bool:
    """Whether the loss is divided by the `num_items_in_batch` it is given."""
    more = torch.tensor(2 * batch["labels"].numel(), device=base.device)  # than any mean was divided by
    loss, _ = run(model, {**batch, "num_items_in_batch": more})
    return not torch.allclose(loss.float(), base.float(), rtol=1e-4, atol=0)


def real_logits(logits: Any) -> Tensor | None:
    """Return logits as a plain tensor, computing them if they were deferred."""
    return None if logits is None else computed(logits).detach()


@contextmanager
def _fixed_randomness() -> Iterator[None]:
    """Seed torch, numpy and random, and put their states back: some families sample in their forward."""
    states = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(_SEED)
        random.seed(_SEED)
        np.random.seed(_SEED)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def on_meta(model: nn.Module) -> bool:
    """Whether the model has shapes but no values yet."""
    return any(parameter.is_meta for parameter in model.parameters())
