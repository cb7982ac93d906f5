"""`verify`: compare a model with an installed boundary with its original classes.

The original classes give the reference for three checks. The loss must agree, the logits must agree, and a training
forward must end in the fused loss without an operation that computes the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tiewise.boundary.lazy_logits import compute_logits
from tiewise.boundary.link import BACKWARD_HOOK, Link
from tiewise.boundary.plain_classes import in_plain_classes
from tiewise.boundary.random_batch import Batch, run
from tiewise.boundary.recorded_logits import Counts
from tiewise.boundary.saved import plain_class_of
from tiewise.boundary.sharded_tables import mixed_precision_dtype
from tiewise.core.errors import InstallError, TiewiseError

# allowed difference relative to the largest value: rounding of the dtype over a few hundred additions
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def verify(model: Any, link: Link, batch: Batch) -> Tensor:
    """Return the reference loss of the batch.

    Raises:
        InstallError: the boundary would change the model's results, or the model does not run on the batch.
    """
    class_name = plain_class_of(model).__name__
    dtype = mixed_precision_dtype(model) or link.head.weight.dtype
    try:
        with in_plain_classes(link):
            reference = run(model, batch)
        # prepended, since FSDP's hook may free the table
        with model.register_forward_hook(_compute_logits, prepend=True):
            result = run(model, batch)
        _require_equal(f"{class_name}: loss", result.loss, reference.loss, dtype)
        if reference.logits is not None:
            _require_equal(f"{class_name}: logits", compute_logits(result.logits), reference.logits, dtype)
        link.counts = Counts()
        run(model, batch, training=True)
    except InstallError:
        raise
    except TiewiseError as error:
        raise InstallError(f"{class_name}: {error.problem}", error.remedy) from error
    except Exception as error:  # a model that lacks an input may raise any error
        message = str(error).strip() or type(error).__name__
        reason = message.splitlines()[0]
        remedy = "pass batch={...} with the inputs that it needs, labels included"
        raise InstallError(f"{class_name} does not run on a random batch: {reason}", remedy) from error
    _require_fused(link, class_name)
    return reference.loss


def _require_fused(link: Link, class_name: str) -> None:
    """Refuse a model whose training forward computed its logits or used no fused loss."""
    if link.counts.materialised:
        operations = ", ".join(dict.fromkeys(link.counts.operations))
        if BACKWARD_HOOK in link.counts.operations:
            remedy = "register the hook after install: it fires, and the logits are computed as long as it is there"
        elif link.structure.softcap is not None:
            remedy = "leave softcap out: this family has steps of its own behind its head"
        else:
            steps = "scales, one soft-cap, biases before it, casts, reshapes and slices"
            remedy = f"tiewise knows {steps} between head and loss"
        raise InstallError(f"{class_name} does something else to its logits before the loss: {operations}", remedy)
    if not link.counts.fused:
        remedy = "the loss must be torch.nn.functional.cross_entropy of what the head module returns"
        raise InstallError(f"{class_name} computes its loss past its output head", remedy)


def _compute_logits(model: nn.Module, args: Any, output: Any) -> None:
    """Compute all deferred logits of an output (a forward hook)."""
    if isinstance(output, dict):
        output = output.values()
    for value in output:
        compute_logits(value)


def _require_equal(quantity: str, result: Tensor | None, reference: Tensor, dtype: torch.dtype) -> None:
    """Refuse a result that differs from its reference by more than rounding in `dtype`."""
    tolerance = max(_TOLERANCE[dtype], _TOLERANCE[reference.dtype])  # families cast an fp64 model's logits to fp32
    if result is None or result.shape != reference.shape:
        raise InstallError(f"{quantity} changed shape", "please report this model")
    largest = reference.double().abs().max().clamp_min(1e-12)
    distance = (result.double() - reference.double()).abs().max() / largest
    if not distance <= tolerance:
        remedy = "the model uses its tables in a way that the boundary does not know"
        raise InstallError(f"{quantity} would change by {distance:.1e} (allowed {tolerance:g})", remedy)
