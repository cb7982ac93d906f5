"""Deferred logits: what an installed head returns so that a model's own forward ends in the fused loss.

A family's forward does a handful of things between its head and its loss: a cast, a scale, a soft-cap, a bias, a
reshape, a slice of positions. `Deferred` records them instead of computing:

    logits = head(hidden)                                                   # Deferred(hidden, table)
    logits = logits / cap; logits = torch.tanh(logits); logits = logits * cap
    loss = F.cross_entropy(logits.float().view(-1, V), labels.view(-1))     # linear_cross_entropy(..., softcap=cap)

It is no Tensor: nothing outside Python can touch it by accident, and what it does not know computes the real logits by
repeating the recorded steps: slower, never different. Steps in place are refused, as there is nothing to change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from tiewise.boundary.described import Described
from tiewise.boundary.fold import Fold
from tiewise.boundary.indexing import split_index
from tiewise.boundary.operators import AUGMENTED, COMMUTING, COMPUTED, RECORDED
from tiewise.errors import UnsupportedError
from tiewise.ops.cross_entropy import LossOptions, linear_cross_entropy


@dataclass
class Counts:
    """What became of deferred logits: losses fused, logits computed, and by which operations."""

    fused: int = 0
    materialised: int = 0
    operations: list[str] = field(default_factory=list)

    def reset(self) -> None:
        """Start counting anew."""
        self.fused = self.materialised = 0
        self.operations.clear()


class Deferred(Described):
    """Logits [..., V] = steps(hidden [..., E] @ table [V, E]ᵀ + bias [V]) that have not been computed."""

    def __init__(self, hidden: Tensor, table: Tensor, bias: Tensor | None, counts: Counts) -> None:
        self.hidden, self.table, self.bias, self.counts = hidden, table, bias, counts
        self.fold = Fold(bias=bias)
        self.steps: tuple[tuple[Any, ...], ...] = ()
        self.dtype = _product_dtype(hidden)
        self._real: Tensor | None = None

    def _after(self, fold: Fold, *step: Any) -> Deferred:
        new = self._at(self.hidden)
        new.fold, new.steps = fold, (*self.steps, step)
        return new

    def _at(self, hidden: Tensor) -> Deferred:
        new = Deferred(hidden, self.table, self.bias, self.counts)
        new.fold, new.steps, new.dtype = self.fold, self.steps, self.dtype
        return new

    def __repr__(self) -> str:
        return f"Deferred(shape={tuple(self.shape)}, dtype={self.dtype}, {len(self.steps)} steps)"

    def float(self) -> Deferred:
        """Cast to fp32 (the fused loss accumulates in fp32 in any case)."""
        return self.to(torch.float32)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Cast to a wider type or stay on this device; anything else computes the logits."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        stays = device is None or device == self.device
        dtype = dtype or self.dtype
        if not stays or dtype != torch.promote_types(dtype, self.dtype):
            return self.real("to").to(*args, **kwargs)
        if dtype == self.dtype:
            return self
        new = self._after(self.fold, torch.Tensor.to, dtype)
        new.dtype = dtype
        return new

    def contiguous(self, **kwargs: Any) -> Deferred:
        """Return itself: logits that do not exist are contiguous."""
        return self

    def view(self, *shape: Any) -> Any:
        """Reshape the leading dimensions."""
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        width = self.table.shape[0]
        if sizes[-1] == width or (sizes[-1] == -1 and self.numel() == prod(sizes[:-1]) * width):
            return self._at(self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))
        return self.real("view").view(*shape)

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Merge leading dimensions."""
        if end_dim % self.ndim == self.ndim - 1:
            return self.real("flatten").flatten(start_dim, end_dim)
        return self._at(self.hidden.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> Any:
        split = split_index(index, self.ndim)
        if split is None:
            return self.real("__getitem__")[index]
        positions, tokens = split
        hidden = self._at(self.hidden[positions])
        return hidden if tokens == slice(None) else hidden._narrow(tokens)

    def _narrow(self, tokens: slice) -> Any:
        if self.fold.bias is not self.bias or (self.bias is not None and self.fold.scale != 1.0):
            return self.real("__getitem__")[..., tokens]
        new = self._at(self.hidden)
        new.table, new.bias = self.table[tokens], None if self.bias is None else self.bias[tokens]
        new.fold = Fold(self.fold.scale, new.bias, self.fold.post)
        return new

    def __mul__(self, other: Any) -> Any:
        fold = self.fold.times(other)
        return self._compute("__mul__", other) if fold is None else self._after(fold, torch.Tensor.mul, other)

    def __truediv__(self, other: Any) -> Any:
        fold = self.fold.times(1 / other) if isinstance(other, int | float) else None
        return self._compute("__truediv__", other) if fold is None else self._after(fold, torch.Tensor.div, other)

    def __add__(self, other: Any) -> Any:
        fold = self.fold.plus(other, self.table.shape[0]) if torch.is_tensor(other) else None
        if fold is None or other.dim() > self.ndim:
            return self._compute("__add__", other)
        return self._after(fold, torch.Tensor.add, other.reshape(-1))

    __rmul__ = __mul__
    __radd__ = __add__

    def tanh(self) -> Any:
        """Squash, as the middle of a soft-cap."""
        fold = self.fold.squashed()
        return self.real("tanh").tanh() if fold is None else self._after(fold, torch.Tensor.tanh)

    def cross_entropy(self, targets: Tensor, **options: Any) -> Tensor:
        """Fused loss of logits shaped [N, V] against `targets` [N]; options as in `LossOptions`."""
        if not torch.compiler.is_compiling():
            self.counts.fused += 1
        scale, bias, softcap = self.fold.parts()
        everything = LossOptions(scale=scale, softcap=softcap, **options)
        return linear_cross_entropy(self.hidden, self.table, targets, bias, everything)

    def real(self, because: str = "real") -> Tensor:
        """Compute the logits by repeating the recorded steps; `because` names the operation that needs them."""
        if self._real is not None:
            return self._real
        logits = F.linear(self.hidden, self.table, self.bias)
        for function, *arguments in self.steps:
            logits = function(logits, *arguments)
        if not torch.compiler.is_compiling():
            self.counts.materialised += 1
            self.counts.operations.append(because)
            self._real = logits
        return logits

    def _compute(self, name: str, *arguments: Any) -> Any:
        return getattr(self.real(name), name)(*(_real(x, name) for x in arguments))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"deferred logits have no attribute {name!r}")
        if name.endswith("_"):
            raise _in_place(name)
        function = getattr(torch.Tensor, name)
        if function in RECORDED:
            return lambda *args, **kwargs: self.__torch_function__(function, (), (self, *args), kwargs)
        return getattr(self.real(name), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Fuse the cross-entropy, record what has a method here, and compute the logits for everything else."""
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            loss = fused_cross_entropy(*args, **kwargs)
            if loss is not None:
                return loss
        deferred = bool(args) and isinstance(args[0], Deferred)
        if not kwargs and func in (RECORDED if deferred else COMMUTING):
            first, *rest = args if deferred else args[::-1]
            return getattr(first, RECORDED[func])(*rest)
        name = getattr(func, "__name__", str(func))
        mutates = (name.endswith("_") and not name.endswith("__")) or name in AUGMENTED
        if (mutates and deferred) or isinstance(kwargs.get("out"), Deferred):
            raise _in_place(name)
        args, kwargs = tree_map(lambda x: _real(x, name), (args, kwargs))
        return func(*args, **kwargs)


def fused_cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Take `F.cross_entropy`'s arguments; None where the fused loss does not compute what they ask for."""
    if not isinstance(input, Deferred) or not torch.is_tensor(target) or target.is_floating_point():
        return None
    if input.dim() != 2 or target.dim() != 1 or (size_average, reduce) != (None, None):
        return None
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    return input.cross_entropy(target, class_weight=weight, **options)


def _real(value: Any, because: str) -> Any:
    return value.real(because) if isinstance(value, Deferred) else value


def _product_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


def _in_place(name: str) -> UnsupportedError:
    what = f"{name} would change logits in place, and these are deferred: never computed"
    return UnsupportedError(what, "use the operation that returns a new tensor, or take .real() first")


def _computing(name: str) -> Callable[..., Any]:
    return lambda self, *arguments: self._compute(name, *arguments)


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: Deferred, *arguments: Any) -> Any:
        raise _in_place(name)

    return refuse


for _name in COMPUTED:
    setattr(Deferred, _name, _computing(_name))
for _name in AUGMENTED:
    setattr(Deferred, _name, _refusing(_name))
