"""Deferred logits, by which an unchanged model's forward ends in the fused loss.

An installed head returns them. A model's forward applies a few operations between its head and its loss: a cast, a
scale, a soft-cap, a bias, a reshape, a slice of positions. `Deferred` records them instead of computing, and `Fold`
combines them:

    logits = head(hidden)                                                   # Deferred(hidden, table)
    logits = logits / cap; logits = torch.tanh(logits); logits = logits * cap
    loss = F.cross_entropy(logits.float().view(-1, V), labels.view(-1))     # linear_cross_entropy(..., softcap=cap)

`Deferred` is no Tensor, so code below Python cannot read it by accident. An unknown method, or an unknown argument of a
known one, computes the real logits by repeating the recorded steps: slower, with the same result. An operation whose
effect would be lost raises UnsupportedError. Such are operations in place, except scales that can be recorded, since
there is no memory to change. The others are hooks on the logits' gradient, which the fused loss never computes.

Losses and statistics that trainers need are computed in chunks of tokens, without the [N, V] logits
(`tiewise.boundary.logit_answers`). A *pass* covers all tokens and the vocabulary once:

    expression of z [..., V], t [...] token ids                result, from one pass
    F.cross_entropy(z, t)                                      the fused loss, by a separate pass
    log_softmax(z, -1).gather(-1, t[..., None])                log p_t
    softmax(z, -1).gather(-1, t[..., None])                    exp log p_t
    z.gather(-1, t[..., None])                                 lse + log p_t
    z.logsumexp(-1)                                            lse
    (log_p.exp() * log_p).sum(-1), and p from softmax          −H
    (−log_p).sum(-1), as the Trainer smooths labels            V times the fused loss with all its weight on smoothing
    (p * z).sum(-1)                                            lse − H
    z.argmax(-1), and z.mean(-1) without gradients             by rows of logits, a chunk at a time

`torch.autograd.grad(loss, z)` computes the logits and repeats the loss from them (`gradients`).

H is the entropy and lse the log-sum-exp of the logits after all recorded steps, such as a temperature. The result of a
pass is stored. Pieces of z by iteration, `split` and `chunk` read their tokens from it, since trainers process tokens
one by one to save memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf, prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tiewise.boundary.logit_answers import ANSWERS
from tiewise.boundary.logit_gradients import gradients
from tiewise.boundary.logit_index import split_index
from tiewise.boundary.recorded_logits import LOG_P, LOGITS, MINUS_LOG_P, PRODUCTS, Fold, P, RecordedLogits, Step
from tiewise.core.errors import UnsupportedError

if TYPE_CHECKING:
    from typing import Self  # from Python 3.11 on


class Deferred(RecordedLogits):
    """Recorded logits with the methods of the Tensor that they represent.

    Each `_record_*` method takes the arguments of a method of Tensor, as listed in `_RECORDERS`. It returns logits with
    one more step. If the fold cannot represent the step, it returns None, and the logits are computed.
    """

    __array_priority__ = Tensor.__array_priority__  # so that NumPy numbers defer to the operators of this class

    # steps that change type or shape

    def _record_to(self, *args: Any, **kwargs: Any) -> Self | None:
        """Record a cast to fp32, or no cast. The fused loss accumulates in fp32 in any case."""
        try:
            device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        except (RuntimeError, TypeError):  # copy=…, another Deferred as argument, or arguments that torch refuses
            return None
        if device not in (None, self.device) or layout is not None:
            return None
        if dtype in (None, self.dtype):
            return self
        if dtype != torch.float32:
            return None
        return self.derive_aligned(Step(Tensor.to, (dtype,)), dtype=dtype)

    def _record_float(self, **kwargs: Any) -> Self | None:
        """Record a cast to fp32."""
        return self._record_to(torch.float32, **kwargs)

    def _record_detach(self) -> Self:
        """Return these logits without a gradient."""
        return self.derive_aligned(grad_mode=False)

    def _record_contiguous(self) -> Self:
        """Return these logits."""
        return self  # logits without memory have no strides

    def _record_view(self, *shape: Any) -> Self | None:
        """Reshape the leading dimensions, or return None if the last would not be the vocabulary."""
        is_one_sequence = len(shape) == 1 and isinstance(shape[0], tuple | list)
        if is_one_sequence:
            (shape,) = shape
        if not shape:
            return None
        *leading, last = shape
        vocab = self.shape[-1]
        if last == -1 and self.numel() == prod(leading) * vocab:
            last = vocab
        if last != vocab:
            return None
        return self.derive_aligned(hidden=self.hidden.reshape(*leading, self.hidden.shape[-1]))

    def _record_flatten(self, start_dim: int = 0, end_dim: int = -1) -> Self | None:
        """Flatten leading dimensions, or return None if the vocabulary's would be among them."""
        if end_dim % self.ndim == self.ndim - 1:
            return None
        return self.derive_aligned(hidden=self.hidden.flatten(start_dim, end_dim))

    # pieces

    def _cut_positions(self, cut: Callable[..., tuple[Tensor, ...]], *sizes: Any, dim: int) -> tuple[Self, ...] | None:
        """Split a leading dimension by `cut(x, *sizes, dim)`. The pieces share the pass of all tokens."""
        if dim % self.ndim == self.ndim - 1:
            return None
        leading = self.hidden.shape[:-1]
        positions = self.positions
        if positions is None:
            positions = torch.arange(leading.numel(), device=self.device)
        hiddens = cut(self.hidden, *sizes, dim)
        piece_positions = cut(positions.view(*leading, 1), *sizes, dim)
        pieces = []
        for hidden, rows in zip(hiddens, piece_positions, strict=True):
            pieces.append(self.derive(hidden=hidden, parent=self.origin(), positions=rows.reshape(-1)))
        return tuple(pieces)

    def _record_iteration(self) -> Iterator[Self] | None:
        """Return an iterator over the first dimension, as `iter(z)` does."""
        rows = self._cut_positions(torch.unbind, dim=0)
        if rows is None:
            return None
        return iter(rows)

    def _record_unbind(self, dim: int = 0) -> tuple[Self, ...] | None:
        """Split one leading dimension into its entries."""
        return self._cut_positions(torch.unbind, dim=dim)

    def _record_split(self, split_size: Any, dim: int = 0) -> tuple[Self, ...] | None:
        """Split a leading dimension into pieces of these sizes."""
        return self._cut_positions(torch.split, split_size, dim=dim)

    def _record_chunk(self, chunks: int, dim: int = 0) -> tuple[Self, ...] | None:
        """Split a leading dimension into this number of pieces."""
        return self._cut_positions(torch.chunk, chunks, dim=dim)

    def _record_index(self, index: Any) -> Self | None:
        """Select positions, and a slice of the vocabulary if all recorded steps allow it."""
        split = split_index(index, self.ndim)
        if split is None:
            return None
        positions, tokens = split
        if tokens == slice(None):
            return self.derive(hidden=self.hidden[positions])
        if not self._can_slice_vocabulary():
            return None
        bias = self.fold.bias
        if bias is not None:
            bias = bias[tokens]
        fold = self.fold._replace(bias=bias)
        return self.derive(hidden=self.hidden[positions], table=self.table[tokens], bias=bias, fold=fold)

    def _can_slice_vocabulary(self) -> bool:
        """Return whether the steps, repeated with some rows of the table, give these tokens' logits."""
        if self.form != LOGITS or self.shard is not None:
            return False
        scale, bias, _ = self.fold
        # a recorded step with a vector [V], or a scaled bias, would be repeated with all tokens
        if bias is not self.bias:
            return False
        return bias is None or scale == 1.0

    # arithmetic

    def _record_product(self, other: Any) -> Self | None:
        """Multiply by a number, or by probabilities of the same logits."""
        if not isinstance(other, Deferred):
            return self._record_scale(Step(Tensor.mul, (other,)), other)
        form = PRODUCTS.get(frozenset((self.form, other.form)))
        if form is None or not self._has_logits_of(other):
            return None
        dtype = torch.promote_types(self.dtype, other.dtype)
        return self.derive_aligned(Step(Tensor.mul, (other,)), form=form, dtype=dtype)

    def _has_logits_of(self, other: Deferred) -> bool:
        """Return whether both come from the same logits."""
        return self.hidden is other.hidden and self.table is other.table and self.fold is other.fold

    def _record_quotient(self, other: Any) -> Self | None:
        """Divide by a number other than 0."""
        if not isinstance(other, int | float) or not other:
            return None
        return self._record_scale(Step(Tensor.div, (other,)), 1 / other)

    def _record_scale(self, step: Step, factor: Any) -> Self | None:
        """Record a step that multiplies by a finite `factor`.

        After a tanh the factor must be positive, as in a soft-cap.
        """
        if self.form != LOGITS or not _is_finite_number(factor):
            return None
        scale, bias, post = self.fold
        if post is None:
            return self.derive(step, fold=Fold(scale * factor, self.fold.scaled_bias(factor)))
        if factor <= 0:
            return None
        return self.derive(step, fold=Fold(scale, bias, post * factor))

    def _record_sum(self, other: Any) -> Self | None:
        """Add a vector [V] (or [1, V], [1, 1, V]) of biases."""
        if not self._is_affine() or not self._is_vector(other):
            return None
        dtype = torch.promote_types(self.dtype, other.dtype)
        if dtype not in (self.dtype, torch.float32):
            return None
        vector = rows = other.reshape(-1)
        if self.shard is not None:
            rows = vector[self.shard.start : self.shard.stop]
        scale, bias, _ = self.fold
        if bias is not None:
            rows = bias + rows
        return self.derive(Step(Tensor.add, (vector,)), fold=Fold(scale, rows), dtype=dtype)

    def _is_affine(self) -> bool:
        """Return whether these are logits, not probabilities, and no tanh was recorded."""
        return self.form == LOGITS and self.fold.post is None

    def _is_vector(self, other: Any) -> bool:
        """Return whether `other` has one number per vocabulary token, for all positions."""
        if not torch.is_tensor(other) or other.dim() > self.ndim:
            return False
        vocab = self.shape[-1]
        return other.shape[-1:] == (vocab,) and other.numel() == vocab

    def _record_tanh(self) -> Self | None:
        """Record one tanh, as the middle of a soft-cap."""
        if not self._is_affine():
            return None
        return self.derive(Step(Tensor.tanh), fold=self.fold._replace(post=1.0))

    def _record_exp(self) -> Self | None:
        """Record exp of log-probabilities: probabilities."""
        return self._from_log_p(torch.exp, P)

    def _record_negation(self) -> Self | None:
        """Record the negation of log-probabilities."""
        return self._from_log_p(torch.neg, MINUS_LOG_P)

    def _from_log_p(self, function: Callable[..., Tensor], form: str) -> Self | None:
        """Record a function of log-probabilities whose result has this form."""
        if self.form != LOG_P:
            return None
        return self.derive_aligned(Step(function), form=form)

    def _record_softmax(self, dim: Any = None, *, dtype: Any = None, _stacklevel: int = 3) -> Self | None:
        """Record the softmax over the vocabulary."""
        return self._record_normalisation(P, torch.softmax, dim, dtype)

    def _record_log_softmax(self, dim: Any = None, *, dtype: Any = None, _stacklevel: int = 3) -> Self | None:
        """Record the log-softmax over the vocabulary."""
        return self._record_normalisation(LOG_P, torch.log_softmax, dim, dtype)

    def _record_normalisation(
        self, form: str, function: Callable[..., Tensor], dim: Any, dtype: torch.dtype | None
    ) -> Self | None:
        """Record the (log-)softmax over the vocabulary."""
        if self.form != LOGITS or not self.is_vocabulary(dim):
            return None
        dtype = dtype or self._softmax_dtype()
        if dtype not in (self.dtype, torch.float32):
            return None
        return self.derive_aligned(Step(function, (-1, dtype)), form=form, dtype=dtype)

    def _softmax_dtype(self) -> torch.dtype:
        """Return the dtype of a softmax that names none.

        Autocast on CUDA uses fp32; on a CPU it does not change the dtype.
        """
        device = self.device.type
        is_narrow = self.dtype in (torch.bfloat16, torch.float16)
        if is_narrow and device == "cuda" and torch.is_autocast_enabled(device):
            return torch.float32
        return self.dtype

    # steps in place

    def _divide_in_place(self, other: Any) -> Self | None:
        """Divide these logits in place by a number."""
        return self._become(self._record_quotient(other))

    def _multiply_in_place(self, other: Any) -> Self | None:
        """Multiply these logits in place by a number."""
        if isinstance(other, Deferred):
            return None
        return self._become(self._record_product(other))

    def _become(self, scaled: Self | None) -> Self | None:
        """Take the state of `scaled`, as an operation in place.

        Other deferred logits that would share memory with these can no longer be read.
        """
        if scaled is None or self.is_computed:
            return None
        with torch.enable_grad():
            has_gradient = self.requires_grad
        if has_gradient and not torch.is_grad_enabled():  # autograd would not record the step
            return None
        self.memory[0] += 1
        vars(self).update(vars(scaled) | {"memory": self.memory, "version": self.memory[0]})
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply a function of torch: record it, answer it, refuse it, or compute the logits."""
        kwargs = dict(kwargs or {})
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        answer = _record_or_answer(func, args, kwargs)
        if answer is not None:
            return answer
        if func is torch.autograd.grad:
            return gradients(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        _refuse_lost_effects(name, args, kwargs)

        def real(x: Any) -> Any:
            """Compute deferred logits, and return anything else as it is."""
            if isinstance(x, Deferred):
                return x.real(name)
            return x

        args, kwargs = tree_map(real, (args, kwargs))
        return func(*args, **kwargs)


def _is_finite_number(factor: Any) -> bool:
    """Return whether a factor is a finite int or float; a bool is not."""
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        return False
    return abs(factor) < inf


def _record_or_answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return recorded logits or an answer, or None if `func` or its arguments are unknown."""
    if func not in _HANDLERS or not args:
        return None
    if func in _COMMUTING and not isinstance(args[0], Deferred):
        args = args[::-1]
    logits = args[0]
    if not isinstance(logits, Deferred):
        return None
    handler = _HANDLERS[func]
    is_product = logits.form in PRODUCTS.values()
    if is_product and handler is not ANSWERS["sum"]:
        return None
    try:
        return handler(*args, **kwargs)
    except TypeError:  # unknown arguments
        return None


def _refuse_lost_effects(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse writing into deferred logits, and hooks on their gradient."""
    changed = [kwargs.get("out")]
    if _is_in_place(name) or kwargs.get("inplace"):
        changed += args[:1]
    if any(isinstance(x, Deferred) for x in tree_leaves(changed)):
        problem = f"{name} would change logits in place, and these are deferred: never computed"
        raise UnsupportedError(problem, "use the operation that returns a new tensor, or take .real() first")
    if name in ("register_hook", "retain_grad"):
        problem = f"{name} asks for the gradient of logits, and these are deferred: the fused loss never makes it"
        raise UnsupportedError(problem, "take .real() first and compute the loss from that")


def _is_in_place(name: str) -> bool:
    """Return whether a method of Tensor, by its name, changes its first argument."""
    if name in ("__setitem__", "__delitem__"):
        return True
    if name.startswith("__i"):
        return hasattr(Tensor, f"__{name[3:]}")  # __imul__ belongs to __mul__, but __invert__ not to __nvert__
    return name.endswith("_") and not name.endswith("__")


# name of a method of Tensor -> method that records it
_COMMUTE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("__mul__", "__rmul__", "mul", "multiply"), Deferred._record_product),
    **dict.fromkeys(("__add__", "__radd__", "add"), Deferred._record_sum),
}
_RECORDERS: dict[str, Callable[..., Any]] = {
    "to": Deferred._record_to,
    "float": Deferred._record_float,
    "detach": Deferred._record_detach,
    "view": Deferred._record_view,
    "reshape": Deferred._record_view,
    "flatten": Deferred._record_flatten,
    "contiguous": Deferred._record_contiguous,
    "__getitem__": Deferred._record_index,
    "__iter__": Deferred._record_iteration,
    "unbind": Deferred._record_unbind,
    "split": Deferred._record_split,
    "chunk": Deferred._record_chunk,
    "tanh": Deferred._record_tanh,
    "exp": Deferred._record_exp,
    **dict.fromkeys(("__neg__", "neg", "negative"), Deferred._record_negation),
    "log_softmax": Deferred._record_log_softmax,
    "softmax": Deferred._record_softmax,
    **_COMMUTE,
    **dict.fromkeys(("__truediv__", "div", "divide", "true_divide"), Deferred._record_quotient),
    **dict.fromkeys(("__itruediv__", "div_", "divide_", "true_divide_"), Deferred._divide_in_place),
    **dict.fromkeys(("__imul__", "mul_", "multiply_"), Deferred._multiply_in_place),
}


def _key_by_function(handlers: dict[str, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return handlers by function of torch, Tensor or F instead of by name.

    Dynamo can compare functions, and cannot read the name of a compiled one.
    """
    by_function = {}
    for name, entry in handlers.items():
        for namespace in (torch, Tensor, F):
            if hasattr(namespace, name):
                by_function[getattr(namespace, name)] = entry
    return by_function


_COMMUTING = _key_by_function(_COMMUTE)
_HANDLERS = _key_by_function(_RECORDERS | ANSWERS)


# all other methods and attributes of Tensor


def _method(name: str) -> Callable[..., Any]:
    """Return a method that records, refuses or computes the method of Tensor with this name."""
    function = getattr(Tensor, name)

    def method(self: Deferred, *args: Any, **kwargs: Any) -> Any:
        """Call the method of Tensor through `Deferred.__torch_function__`."""
        return Deferred.__torch_function__(function, (), (self, *args), kwargs)

    return method


def _attribute(name: str) -> property:
    """Return a property that computes the logits and reads an attribute of theirs."""

    def attribute(self: Deferred) -> Any:
        """Return the attribute of the computed logits."""
        return getattr(self.real(name), name)

    return property(attribute)


def _complete(cls: type[Deferred]) -> None:
    """Give the class every method and attribute of Tensor that it does not define."""
    operators = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__format__", "__reduce_ex__")
    defined = {*dir(cls), "__torch_dispatch__", "__setstate__", "dtype"}
    others = sorted(set(dir(Tensor)) - defined)
    for name in (*operators, *others):
        if callable(getattr(Tensor, name)):
            setattr(cls, name, _method(name))
        elif not name.startswith("__"):
            setattr(cls, name, _attribute(name))


_complete(Deferred)
