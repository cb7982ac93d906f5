"""Logits of an evaluation step as a Tensor that is computed when it is first read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from tiewise.boundary.deferred import Deferred
from tiewise.boundary.logit_answers import fused_cross_entropy
from tiewise.boundary.logit_gradients import gradients

if TYPE_CHECKING:
    from typing import Self  # from Python 3.11 on

_FREE = {Tensor.size, Tensor.dim, *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim"))}


class LazyLogits(Tensor):
    """Tensor subclass around `Deferred` logits, which are computed when they are first read.

    If a Trainer only needs the evaluation loss, it never reads them, and they are never computed. `compute_metrics` and
    accelerate accept Tensors only, and get the real logits at their first read.
    """

    deferred: Deferred

    def __new__(cls, deferred: Deferred) -> Self:
        """Wrap deferred logits without computing or allocating anything."""
        self: Self = torch.Tensor._make_wrapper_subclass(
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
        """Apply a function of torch: shapes and cross-entropy without logits, others with them."""
        kwargs = kwargs or {}
        if func in _FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        logits = first_unread(args)
        if func is F.cross_entropy and logits is not None:
            loss = fused_cross_entropy(logits.deferred, *args[1:], **kwargs)
            if loss is not None:
                return loss
        if func is torch.autograd.grad:
            args, kwargs = tree_map(_unwrap, (args, kwargs))
            return gradients(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        return _call_computed(func, args, kwargs, name)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute the logits for code below Python."""
        return _call_computed(func, args, kwargs or {}, str(func))


def first_unread(args: tuple[Any, ...]) -> LazyLogits | None:
    """Return the first argument if it is lazy logits that were never read.

    Logits that were read may have been changed in place, so the recorded steps no longer describe them.
    """
    if not args or not isinstance(args[0], LazyLogits):
        return None
    if args[0].deferred.is_computed:
        return None
    return args[0]


def compute_logits(value: Any, reason: str = "real") -> Any:
    """Return the real logits of a `LazyLogits` or `Deferred`, and anything else unchanged."""
    value = _unwrap(value)
    if isinstance(value, Deferred):
        return value.real(reason)
    return value


def _unwrap(value: Any) -> Any:
    """Return the deferred logits of a `LazyLogits`, and anything else unchanged."""
    if isinstance(value, LazyLogits):
        return value.deferred
    return value


def _call_computed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reason: str) -> Any:
    """Call a function with all logits among its arguments computed."""

    def compute(value: Any) -> Any:
        """Compute logits, with the function as the reason."""
        return compute_logits(value, reason)

    args, kwargs = tree_map(compute, (args, kwargs))
    return func(*args, **kwargs)
