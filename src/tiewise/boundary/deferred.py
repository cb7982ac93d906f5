"""Deferred logits: what an installed head returns so that a model's own forward ends in the fused loss.

A family's forward does a handful of things between its head and its loss: a cast, a scale, a soft-cap, a bias, a
reshape, a slice of positions. `Deferred` records them instead of computing, and `Fold` says what they amount to:

    logits = head(hidden)                                                   # Deferred(hidden, table)
    logits = logits / cap; logits = torch.tanh(logits); logits = logits * cap
    loss = F.cross_entropy(logits.float().view(-1, V), labels.view(-1))     # linear_cross_entropy(..., softcap=cap)

It is no Tensor: nothing outside Python can touch it by accident, and what it does not know, a method or an argument of
one, computes the real logits by repeating the recorded steps: slower, never different. What would be lost is refused:
steps in place, as there is nothing to change, and hooks on a gradient that the fused loss never makes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tiewise.core.backends import LossOptions
from tiewise.core.errors import UnsupportedError
from tiewise.ops.chunked import compute_dtype
from tiewise.ops.cross_entropy import linear_cross_entropy


class Fold(NamedTuple):
    """scale · product + bias, and post · tanh(·) of it where `post` is not None.

    / 30 → tanh → * 30          Fold(scale=1/30) → Fold(scale=1/30, post=1) → Fold(scale=1/30, post=30)
    """

    scale: float = 1.0
    bias: Tensor | None = None
    post: float | None = None


@dataclass
class Counts:
    """What became of deferred logits: losses fused, logits computed, and by which operations."""

    fused: int = 0
    materialised: int = 0
    operations: list[str] = field(default_factory=list)


class Deferred:
    """Logits [..., V] = steps(hidden [..., E] @ table [V, E]ᵀ + bias [V]) that have not been computed."""

    __array_priority__ = Tensor.__array_priority__  # NumPy's numbers leave their operators to ours

    def __init__(self, hidden: Tensor, table: Tensor, bias: Tensor | None, counts: Counts) -> None:
        self.hidden, self.table, self.bias, self.counts = hidden, table, bias, counts
        self.fold = Fold(bias=bias)  # what the steps amount to
        self.steps: tuple[tuple[Any, ...], ...] = ()  # (function, *arguments) behind the logits
        self.dtype = self.product = compute_dtype(hidden, table)
        self.grad_mode = torch.is_grad_enabled()  # where the head was called
        self._real: Tensor | None = None

    def _with(self, *step: Any, **changed: Any) -> Deferred:
        """Return these logits with other attributes, and one more `step` where there is one."""
        new = Deferred(self.hidden, self.table, self.bias, self.counts)
        new.fold, new.dtype, new.product = self.fold, self.dtype, self.product
        new.steps = (*self.steps, step) if step else self.steps
        new.grad_mode = new.grad_mode and self.grad_mode
        for name, value in changed.items():
            setattr(new, name, value)
        return new

    def __repr__(self) -> str:
        return f"Deferred(shape={tuple(self.shape)}, dtype={self.dtype}, {len(self.steps)} steps)"

    @property
    def shape(self) -> torch.Size:
        """Shape of the logits."""
        return torch.Size((*self.hidden.shape[:-1], self.table.shape[0]))

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self.hidden.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.hidden.dim()

    @property
    def requires_grad(self) -> bool:
        """Whether computing them now would give a tensor with a gradient."""
        leaves = (self.hidden, self.table, self.fold.bias)
        return torch.is_grad_enabled() and self.grad_mode and any(x is not None and x.requires_grad for x in leaves)

    def size(self, dim: int | None = None) -> Any:
        """Shape, or one dimension of it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Number of dimensions."""
        return self.ndim

    def numel(self) -> int:
        """Number of logits."""
        return prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    # each records a method of torch (`_RECORDERS` says which) as a step, or is None where the fold cannot hold it

    def _to(self, *args: Any, **kwargs: Any) -> Deferred | None:
        """Cast to fp32, in which the fused loss accumulates in any case, or stay as it is."""
        try:
            device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        except (RuntimeError, TypeError):  # a copy, deferred logits whose type is wanted, or nothing that torch knows
            return None
        dtype = dtype or self.dtype
        if device not in (None, self.device) or dtype not in (self.dtype, torch.float32) or layout is not None:
            return None
        return self if dtype == self.dtype else self._with(Tensor.to, dtype, dtype=dtype)

    def _float(self, **kwargs: Any) -> Deferred | None:
        return self._to(torch.float32, **kwargs)

    def _contiguous(self) -> Deferred:
        return self  # logits that do not exist are contiguous

    def _view(self, *shape: Any) -> Deferred | None:
        """Reshape the leading dimensions."""
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        width = self.table.shape[0]
        if sizes and (sizes[-1] == width or (sizes[-1] == -1 and self.numel() == prod(sizes[:-1]) * width)):
            return self._with(hidden=self.hidden.reshape(*sizes[:-1], self.hidden.shape[-1]))
        return None

    def _flatten(self, start_dim: int = 0, end_dim: int = -1) -> Deferred | None:
        last = end_dim % self.ndim == self.ndim - 1
        return None if last else self._with(hidden=self.hidden.flatten(start_dim, end_dim))

    def _at(self, index: Any) -> Deferred | None:
        split = _split_index(index, self.ndim)
        if split is None:
            return None
        positions, tokens = split
        if tokens == slice(None):
            return self._with(hidden=self.hidden[positions])
        scale, bias, post = self.fold
        if bias is not self.bias or (bias is not None and scale != 1.0):  # a bias of steps has all tokens
            return None
        bias = None if bias is None else bias[tokens]
        changed = {"table": self.table[tokens], "bias": bias, "fold": Fold(scale, bias, post)}
        return self._with(hidden=self.hidden[positions], **changed)

    def _times(self, other: Any) -> Deferred | None:
        return self._scaled(Tensor.mul, other, other)

    def _divided(self, other: Any) -> Deferred | None:
        return self._scaled(Tensor.div, other, 1 / other) if isinstance(other, int | float) and other else None

    def _scaled(self, function: Any, number: Any, factor: Any) -> Deferred | None:
        """`function` of `number` multiplies by a finite `factor`; a soft-cap is only known with a positive one."""
        scale, bias, post = self.fold
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not abs(factor) < inf:
            return None
        if post is None:
            fold = Fold(scale * factor, None if bias is None else bias * factor)
            return self._with(function, number, fold=fold)
        return self._with(function, number, fold=Fold(scale, bias, post * factor)) if factor > 0 else None

    def _plus(self, other: Any) -> Deferred | None:
        """Add a vector [V] (or [1, V], [1, 1, V]) of biases."""
        v, (scale, bias, post) = self.table.shape[0], self.fold
        if not torch.is_tensor(other) or other.shape[-1:] != (v,) or other.numel() != v or post is not None:
            return None
        dtype = torch.promote_types(self.dtype, other.dtype)
        if other.dim() > self.ndim or dtype not in (self.dtype, torch.float32):
            return None
        vector = other.reshape(-1)
        fold = Fold(scale, vector if bias is None else bias + vector)
        return self._with(Tensor.add, vector, fold=fold, dtype=dtype)

    def _tanh(self) -> Deferred | None:
        """Squash, once, as the middle of a soft-cap."""
        return None if self.fold.post is not None else self._with(Tensor.tanh, fold=self.fold._replace(post=1.0))

    def real(self, because: str = "real") -> Tensor:
        """Compute the logits by repeating the recorded steps; `because` names the operation that needs them."""
        if self._real is not None and (self._real.requires_grad or not self.requires_grad):
            return self._real
        # as the head would have: autocast and gradient mode may have changed since
        kind = self.product
        with torch.set_grad_enabled(self.requires_grad), torch.autocast(self.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(kind)
            logits = F.linear(self.hidden.to(kind), self.table.to(kind), bias)
            for function, *arguments in self.steps:
                logits = function(logits, *arguments)
        if not torch.compiler.is_compiling():
            self.counts.materialised += 1
            self.counts.operations.append(because)
            self._real = logits
        return logits

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Fuse the cross-entropy, record what can be, refuse what would be lost, and compute everything else."""
        kwargs = kwargs or {}
        if func is F.cross_entropy and (loss := fused_cross_entropy(*args, **kwargs)) is not None:
            return loss
        operands = args[::-1] if func in _COMMUTING and args and not isinstance(args[0], Deferred) else args
        if func in _RECORDED and operands and isinstance(operands[0], Deferred):
            try:
                recorded = _RECORDED[func](*operands, **kwargs)
            except TypeError:  # arguments that are not recorded
                recorded = None
            if recorded is not None:
                return recorded
        name = getattr(func, "__name__", str(func))
        augmented = name.startswith("__i") and hasattr(Tensor, f"__{name[3:]}")  # __imul__ of __mul__, not __invert__
        in_place = augmented or name in ("__setitem__", "__delitem__") or (name[-1:] == "_" and name[-2:] != "__")
        changed = (args[:1] if in_place or kwargs.get("inplace") else (), kwargs.get("out"))
        if any(isinstance(x, Deferred) for x in tree_leaves(changed)):
            what = f"{name} would change logits in place, and these are deferred: never computed"
            raise UnsupportedError(what, "use the operation that returns a new tensor, or take .real() first")
        if name in ("register_hook", "retain_grad"):
            what = f"{name} asks for the gradient of logits, and these are deferred: the fused loss never makes it"
            raise UnsupportedError(what, "take .real() first and compute the loss from that")
        args, kwargs = tree_map(lambda x: x.real(name) if isinstance(x, Deferred) else x, (args, kwargs))
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
    """`F.cross_entropy` of deferred logits [N, V], fused; None where the fused loss does not compute what is asked."""
    if not isinstance(input, Deferred) or not torch.is_tensor(target) or target.is_floating_point():
        return None
    if input.dim() != 2 or target.dim() != 1 or (size_average, reduce) != (None, None):
        return None
    if not torch.compiler.is_compiling():
        input.counts.fused += 1
    scale, bias, softcap = input.fold
    if softcap is not None:  # post · tanh(z) = softcap(post · z), with softcap(z) = c · tanh(z / c)
        scale, bias = scale * softcap, None if bias is None else bias * softcap
    options = LossOptions(scale, softcap, ignore_index, label_smoothing, class_weight=weight, reduction=reduction)
    with torch.set_grad_enabled(input.requires_grad):
        loss = linear_cross_entropy(input.hidden, input.table, target, bias, options)
    # transformers casts logits to fp32, which narrows those of an fp64 model: its loss is fp32 then
    return loss.to(input.dtype) if loss.dtype == torch.float64 else loss


def _split_index(index: Any, dims: int) -> tuple[tuple[Any, ...], slice] | None:
    """Which positions and which tokens an index into logits [..., V] asks for; None where it does not slice tokens.

    (..., :-1, :) → (..., :-1, :), all        0 → (0,), all        (..., :n) → (..., :), :n        (:, -1, 5) → None
    """
    items, used, dots = index if isinstance(index, tuple) else (index,), 0, False
    for item in items:
        if item is Ellipsis and not dots:
            dots = True
        elif torch.is_tensor(item):
            used += item.dim() if item.dtype in (torch.bool, torch.uint8) else 1
        elif isinstance(item, int | slice) and not isinstance(item, bool):
            used += 1
        elif item is not None:  # two ellipses, or what takes more thought than it is worth
            return None
    if used != dims and (not dots or items[-1] is Ellipsis):
        return items, slice(None)
    last = items[-1]
    if not isinstance(last, slice) or last.step not in (None, 1):
        return None
    return (*items[:-1], slice(None)), last


# name of a method -> what records it, where it can
_COMMUTE = dict.fromkeys(("__mul__", "__rmul__", "mul", "multiply"), Deferred._times)
_COMMUTE |= dict.fromkeys(("__add__", "__radd__", "add"), Deferred._plus)
_RECORDERS: dict[str, Callable[..., Deferred | None]] = {"to": Deferred._to, "float": Deferred._float}
_RECORDERS |= {"view": Deferred._view, "reshape": Deferred._view, "flatten": Deferred._flatten}
_RECORDERS |= {"contiguous": Deferred._contiguous, "tanh": Deferred._tanh, "__getitem__": Deferred._at, **_COMMUTE}
_RECORDERS |= dict.fromkeys(("__truediv__", "div", "divide", "true_divide"), Deferred._divided)
# and by the functions of torch and Tensor, since a compiled function has no name that Dynamo could compare
_COMMUTING, _RECORDED = (
    {getattr(home, name): found[name] for name in found for home in (torch, Tensor) if hasattr(home, name)}
    for found in (_COMMUTE, _RECORDERS)
)


def _method(name: str) -> Callable[..., Any]:
    """What stands for a tensor's method: recorded, refused, or computed."""
    function = getattr(Tensor, name)
    return lambda self, *args, **kwargs: Deferred.__torch_function__(function, (), (self, *args), kwargs)


_OPERATORS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__format__", "__reduce_ex__")
_OF_OBJECTS = {*dir(Deferred), "__torch_dispatch__", "__setstate__", "dtype"}
for _name in (*_OPERATORS, *(name for name in dir(Tensor) if name not in _OF_OBJECTS)):
    if callable(getattr(Tensor, _name)):
        setattr(Deferred, _name, _method(_name))
    elif not _name.startswith("__"):
        setattr(Deferred, _name, property(lambda self, name=_name: getattr(self.real(name), name)))  # type: ignore[misc]
