"""Logits for decoding, of which only the largest are computed.

Greedy decoding needs the largest logit, and sampling the `top_k` largest. `ExactTop` finds both without the others:

    with installed.exact_decoding():
        model.generate(ids)                              # logits[:, -1] → float32 → argmax
        model.generate(ids, do_sample=True, top_k=50)    # … → / temperature → topk → "< the 50th" → masked_fill(-inf)

`TopLogits` is a Tensor subclass like `LazyLogits`. It records the steps that do not change the order of the logits
(`Deferred`), and answers these four operations with the results that all logits would give. The comparison is answered
for any number down to logit number `top_k` + 1, the mask if it leaves only tokens that are among the largest. All other
operations compute the real logits: a repetition penalty, beam search, reading `output_scores`. Then decoding is as slow
as without the context, with the same results. `installed.counts` names the operations, and `counts` of the context's
`ExactTop` the number of positions that were answered.
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
    """Logits [..., V] whose largest entries an `ExactTop` of their table computes."""

    exact: ExactTop
    largest: tuple[Tensor, Tensor] | None  # last result of `topk`: scores and tokens [..., top_k + 1]

    def __new__(cls, deferred: Deferred, exact: ExactTop) -> Self:
        """Wrap deferred logits without computing them."""
        self = super().__new__(cls, deferred)
        self.exact, self.largest = exact, None
        return self

    def __init__(self, deferred: Deferred, exact: ExactTop) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply a function of torch: record it, answer it, or leave it to `LazyLogits`."""
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
        """Record an operation that keeps the order, or return its real result."""
        if func is Tensor.to:
            kwargs.pop("copy", None)  # a copy is not needed, since no operation changes these logits in place
        recorded = Deferred.__torch_function__(func, (), (self.deferred, *args), kwargs)
        if isinstance(recorded, Deferred):
            return TopLogits(recorded, self.exact)
        return recorded

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer an operation from the largest logits, or return None."""
        if func not in _ANSWERS:
            return None
        try:
            return _ANSWERS[func](self, *args, **kwargs)
        except TypeError:  # unknown arguments
            return None

    def top(self, top_k: int) -> tuple[Tensor, Tensor] | None:
        """Return scores and tokens [..., top_k], largest first.

        Return None if the logits are of another table, or if autocast rounds the table.
        """
        deferred, table = self.deferred, self.exact.table
        head_table = deferred.table
        if (head_table.data_ptr(), head_table.shape, deferred.product) != (table.data_ptr(), table.shape, table.dtype):
            return None
        hidden, _, bias, options = head_of(deferred)
        scores, tokens = self.exact.top(hidden, top_k, bias, options.scale, options.softcap)
        return scores.to(deferred.dtype), tokens

    def _argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor | None:
        """Answer `argmax` over the vocabulary."""
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
        """Answer `topk` over the vocabulary, and store one more logit for a later comparison."""
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
        """Return whether each logit is less than `bound` [..., 1].

        Return None if a bound is below all of `largest`. If further logits may equal the bound, `largest` is extended
        first.
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
        """Extend `largest` until its last logit is below `bound` or it has all logits."""
        assert self.largest is not None, "`topk` has answered before"
        scores, tokens = self.largest
        width = self.shape[-1]
        while scores.shape[-1] < width and (bound == scores[..., -1:]).any():
            top = self.top(min(2 * scores.shape[-1], width))
            assert top is not None, "the table answered before"
            scores, tokens = self.largest = top
        return scores, tokens

    def _masked_fill(self, mask: Any, value: Any) -> Tensor | None:
        """Return these logits with `value` where `mask` is True.

        Return None if the mask leaves a token that is not among `largest`.
        """
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
def return_top_logits(link: Link) -> Iterator[ExactTop]:
    """Let a model return `TopLogits` in evaluation without labels, within this context."""
    exact, before = ExactTop(link.head.weight), link.make_lazy

    def make_top_logits(deferred: Deferred) -> Tensor:
        """Wrap deferred logits whose largest entries `exact` computes."""
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
