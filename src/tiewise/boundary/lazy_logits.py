"""Logits of an evaluation step as a Tensor that computes itself when something reads it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from tiewise.boundary.deferred import Deferred
from tiewise.boundary.logit_answers import fused_cross_entropy
from tiewise.boundary.logit_gradients import gradients

_FREE = {Tensor.size, Tensor.dim, *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim"))}


class LazyLogits(Tensor):
    """Logits of an evaluation step: a Tensor in name around `Deferred` ones, computed when something reads it.

    A Trainer that only needs the evaluation loss never reads them, so they are never computed; `compute_metrics` and
    accelerate, which accept nothing but Tensors, get the real logits when they first read them.
    """

    deferred: Deferred

    @staticmethod
    def __new__(cls, deferred: Deferred) -> LazyLogits:
        """Wrap; nothing is computed and nothing allocated."""
        self: LazyLogits = torch.Tensor._make_wrapper_subclass(
            cls, deferred.shape, dtype=deferred.dtype, device=deferred.device
        )
        self.deferred = deferred
        return self

    def __init__(self, deferred: Deferred) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyLogits({self.deferred!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer shape, dtype and device; fuse a cross-entropy; compute for everything else."""
        kwargs = kwargs or {}
        if func in _FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        # logits that were read may have been changed since: their loss is that of their values now
        if func is F.cross_entropy and isinstance(first, LazyLogits) and not first.deferred.is_computed:
            loss = fused_cross_entropy(first.deferred, *args[1:], **kwargs)
            if loss is not None:
                return loss
        if func is torch.autograd.grad:
            args, kwargs = tree_map(lambda x: x.deferred if isinstance(x, LazyLogits) else x, (args, kwargs))
            return gradients(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        args, kwargs = tree_map(lambda x: computed(x, name), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute for code that reaches below Python."""
        args, kwargs = tree_map(lambda x: computed(x, str(func)), (args, kwargs or {}))
        return func(*args, **kwargs)


def computed(value: Any, because: str = "real") -> Any:
    """Return the real logits of a `LazyLogits` or `Deferred`, and anything else as it is."""
    if isinstance(value, LazyLogits):
        value = value.deferred
    return value.real(because) if isinstance(value, Deferred) else value
