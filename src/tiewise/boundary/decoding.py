"""Logits of the position that is decoded, of which nothing is computed but what decoding asks for.

Greedy decoding asks for the largest, `top_k` sampling for the k largest, and `ExactTop` knows both without the others:

    with installed.exact_decoding():
        model.generate(ids)                              # logits[:, -1] → float32 → argmax
        model.generate(ids, do_sample=True, top_k=50)    # … → / temperature → topk → "< the k-th" → masked_fill(-inf)

`TopLogits` is a Tensor in name, as an evaluation step's `LazyLogits`. It records what becomes of the logits on the way,
which keeps their order (`Deferred`), and answers these four operations with what is true of the logits: the comparison
with any number down to the k + 1-th logit, the mask that leaves only tokens it has. All else computes the real logits:
a repetition penalty, beams, `output_scores` that are read. So nothing is refused and nothing is different, only as slow
as without; `installed.counts` says by which operations, and the context's `counts` how many positions were answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tiewise.boundary.deferred import Deferred
from tiewise.boundary.lazy_logits import LazyLogits, first_unread
from tiewise.boundary.link import Link
from tiewise.boundary.ops.exact_top import ExactTop
from tiewise.boundary.recorded_logits import head_of

if TYPE_CHECKING:
    from typing import Self  # from Python 3.11 on


class TopLogits(LazyLogits):
    """Logits [..., V] that answer for their largest, by an `ExactTop` of their table."""

    exact: ExactTop
    largest: tuple[Tensor, Tensor] | None  # what `topk` found last: scores and tokens [..., k + 1]

    def __new__(cls, deferred: Deferred, exact: ExactTop) -> Self:
        """Wrap; nothing is computed."""
        self = super().__new__(cls, deferred)
        self.exact, self.largest = exact, None
        return self

    def __init__(self, deferred: Deferred, exact: ExactTop) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record what keeps the order, answer for the largest, and leave everything else to `LazyLogits`."""
        kwargs = dict(kwargs or {})
        logits = first_unread(args)
        if isinstance(logits, TopLogits):
            if func in _KEEP_ORDER:
                return logits._record(func, args[1:], kwargs)
            answer = logits._answer(func, args[1:], kwargs)
            if answer is not None:
                return answer
        return super().__torch_function__(func, types, args, kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operation that keeps the order; its real result where `Deferred` cannot record it."""
        if func is Tensor.to:
            kwargs.pop("copy", None)  # nothing changes these in place
        recorded = Deferred.__torch_function__(func, (), (self.deferred, *args), kwargs)
        if isinstance(recorded, Deferred):
            return TopLogits(recorded, self.exact)
        return recorded

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer an operation by the largest logits, or return None."""
        if func not in _ANSWERS:
            return None
        try:
            return _ANSWERS[func](self, *args, **kwargs)
        except TypeError:  # arguments that are not known
            return None

    def top(self, k: int) -> tuple[Tensor, Tensor] | None:
        """Return scores and tokens [..., k], largest first. None of another table, or if autocast would round it."""
        d, table = self.deferred, self.exact.table
        if (d.table.data_ptr(), d.table.shape, d.product) != (table.data_ptr(), table.shape, table.dtype):
            return None
        hidden, _, bias, o = head_of(d)
        scores, tokens = self.exact.top(hidden, k, bias, o.scale, o.softcap)
        return scores.to(d.dtype), tokens

    def _argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor | None:
        if not self._is_vocabulary(dim):
            return None
        top = self.top(1)
        if top is None:
            return None
        _, tokens = top
        if keepdim:
            return tokens
        return tokens[..., 0]

    def _topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        self.largest = None
        if not largest or not self._is_vocabulary(dim):
            return None
        if k >= self.shape[-1]:
            return None
        self.largest = self.top(k + 1)
        if self.largest is None:
            return None
        scores, tokens = self.largest
        return torch.return_types.topk((scores[..., :k].contiguous(), tokens[..., :k].contiguous()))

    def _is_vocabulary(self, dim: int | None) -> bool:
        """Return whether `dim` is the vocabulary's dimension."""
        return dim in (-1, self.dim() - 1)

    def _below(self, bound: Any) -> Tensor | None:
        """Return whether each logit is less than `bound` [..., 1]. None if a bound is below all of `largest`.

        Where others may equal it, `largest` grows: computed logits round otherwise, and all could lie below.
        """
        if self.largest is None or not _has_shape(bound, (*self.shape[:-1], 1)):
            return None
        scores, _ = self.largest
        if not (bound >= scores[..., -1:]).all():
            return None
        scores, tokens = self._grow_below(bound)
        below = torch.ones(self.shape, dtype=torch.bool, device="cpu")
        return below.scatter_(-1, tokens, scores < bound)

    def _grow_below(self, bound: Tensor) -> tuple[Tensor, Tensor]:
        """Return `largest`, with more logits until the last is below `bound` or all are there."""
        assert self.largest is not None, "`topk` has answered before"
        scores, tokens = self.largest
        width = self.shape[-1]
        while scores.shape[-1] < width and (bound == scores[..., -1:]).any():
            top = self.top(min(2 * scores.shape[-1], width))
            assert top is not None, "the table answered before"
            scores, tokens = self.largest = top
        return scores, tokens

    def _masked_fill(self, mask: Any, value: Any) -> Tensor | None:
        """Return these logits with `value` where `mask` is True; it must leave tokens of `largest` alone."""
        if self.largest is None or torch.is_tensor(value):
            return None
        if not _has_shape(mask, self.shape):
            return None
        scores, tokens = self.largest
        hidden = mask.gather(-1, tokens)
        if (~mask).sum() != (~hidden).sum():
            return None
        filled = torch.full(self.shape, value, dtype=self.dtype, device="cpu")
        return filled.scatter_(-1, tokens, scores.masked_fill(hidden, value))


def _has_shape(x: Any, shape: tuple[int, ...]) -> bool:
    """Return whether `x` is a tensor of this shape."""
    return torch.is_tensor(x) and x.shape == shape


@contextmanager
def decoding(link: Link) -> Iterator[ExactTop]:
    """Within this context evaluation without labels hands out `TopLogits`."""
    exact, before = ExactTop(link.head.weight), link.make_lazy

    def make_top_logits(deferred: Deferred) -> Tensor:
        """Wrap deferred logits so that `exact` answers for them."""
        return TopLogits(deferred, exact)

    link.make_lazy = make_top_logits
    try:
        yield exact
    finally:
        link.make_lazy = before


_KEEP_ORDER = {Tensor.to, Tensor.float, Tensor.__getitem__, Tensor.__truediv__, Tensor.div, Tensor.__mul__, Tensor.mul}
_KEEP_ORDER |= {torch.div, torch.mul, torch.tanh, Tensor.tanh, Tensor.__add__, Tensor.add, torch.add, Tensor.contiguous}
_ANSWERS: dict[Any, Callable[..., Any]] = dict.fromkeys((torch.argmax, Tensor.argmax), TopLogits._argmax)
_ANSWERS |= dict.fromkeys((torch.topk, Tensor.topk), TopLogits._topk)
_ANSWERS |= dict.fromkeys((torch.lt, Tensor.lt, Tensor.__lt__), TopLogits._below)
_ANSWERS |= dict.fromkeys((torch.masked_fill, Tensor.masked_fill), TopLogits._masked_fill)
