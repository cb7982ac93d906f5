"""Hold an installed model against its family's own classes on a random batch, and name what differs.

Three questions, each a reason to refuse: does the loss agree, do the logits agree, and does a training forward end in
the fused loss without anything having asked for the logits?
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.link import Link
from tiewise.boundary.modules import BACKWARD_HOOK
from tiewise.boundary.plain import plainly
from tiewise.boundary.probe import Batch, real_logits, run
from tiewise.core.errors import InstallError, TiewiseError

# relative to the largest value: rounding of the dtype, over a few hundred additions
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def verify(model: Any, link: Link, batch: Batch) -> Tensor:
    """Return the reference loss of the batch.

    Raises:
        InstallError: the model cannot run on the batch, or one of the three questions has the wrong answer.
    """
    kind = _family(model)
    with plainly(link):
        reference, reference_logits = _run(model, batch, training=False)
        reference_logits = real_logits(reference_logits)
    loss, logits = _run(model, batch, training=False)
    _agree(f"{kind}: loss", loss, reference, link.head.weight.dtype)
    if reference_logits is not None:
        _agree(f"{kind}: logits", real_logits(logits), reference_logits, link.head.weight.dtype)
    link.counts.reset()
    _run(model, batch, training=True)
    if link.counts.materialised:
        operations = ", ".join(dict.fromkeys(link.counts.operations))
        fix = "tiewise knows scales, one soft-cap, biases before it, casts, reshapes and slices between head and loss"
        if BACKWARD_HOOK in link.counts.operations:
            fix = "register the hook after install: it fires, and the logits are computed as long as it is there"
        elif link.structure.softcap is not None:
            fix = "leave softcap out: this family has steps of its own behind its head"
        raise InstallError(f"{kind} does something else to its logits before the loss: {operations}", fix)
    if not link.counts.fused:
        fix = "the loss must be torch.nn.functional.cross_entropy of what the head module returns"
        raise InstallError(f"{kind} computes its loss past its output head", fix)
    link.counts.reset()
    return reference


def _run(model: Any, batch: Batch, *, training: bool) -> Any:
    try:
        return run(model, batch, training=training)
    except TiewiseError as error:
        raise InstallError(f"{_family(model)}: {error.what}", error.fix) from error
    except Exception as error:  # any family may need any input: whatever it raises is the answer
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        fix = "pass batch={...} with the inputs that it needs, labels included"
        raise InstallError(f"{_family(model)} does not run on a random batch: {reason}", fix) from error


def _family(model: Any) -> str:
    return getattr(type(model), "plain_class", type(model)).__name__


def _agree(what: str, got: Tensor | None, wanted: Tensor, kind: torch.dtype) -> None:
    tolerance = max(_TOLERANCE[kind], _TOLERANCE[wanted.dtype])  # families cast the logits of an fp64 model to fp32
    if got is None or got.shape != wanted.shape:
        raise InstallError(f"{what} changed shape", "please report this model")
    distance = (got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-12)
    if not distance <= tolerance:
        fix = "the model uses its tables in a way that the boundary does not know"
        raise InstallError(f"{what} would change by {distance:.1e} (allowed {tolerance:g})", fix)
