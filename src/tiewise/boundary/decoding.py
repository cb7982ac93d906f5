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
from typing import Any

import torch
from torch import Tensor

from tiewise.boundary.deferred import Deferred
from tiewise.boundary.lazy_logits import LazyLogits
from tiewise.boundary.link import Link
from tiewise.boundary.ops.exact_top import ExactTop
from tiewise.boundary.recorded_logits import head_of


class TopLogits(LazyLogits):
    """Logits [..., V] that answer for their largest, by an `ExactTop` of their table."""

    exact: ExactTop
    largest: tuple[Tensor, Tensor] | None  # what `topk` found last: scores and tokens [..., k + 1]

    @staticmethod
    def __new__(cls, deferred: Deferred, exact: ExactTop) -> TopLogits:
        """Wrap; nothing is computed."""
        self: Any = LazyLogits.__new__(cls, deferred)
        self.exact, self.largest = exact, None
        return self

    def __init__(self, deferred: Deferred, exact: ExactTop) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record what keeps the order, answer for the largest, and leave everything else to `LazyLogits`."""
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if isinstance(first, TopLogits) and not first.deferred.is_computed:
            if func in _KEPT:
                if func is Tensor.to:
                    kwargs.pop("copy", None)  # nothing changes these in place
                found = Deferred.__torch_function__(func, (), (first.deferred, *args[1:]), kwargs)
                return TopLogits(found, first.exact) if isinstance(found, Deferred) else found
            try:
                answer = _ANSWERS[func](first, *args[1:], **kwargs) if func in _ANSWERS else None
            except TypeError:  # arguments that are not known
                answer = None
            if answer is not None:
                return answer
        return super().__torch_function__(func, types, args, kwargs)

    def top(self, k: int) -> tuple[Tensor, Tensor] | None:
        """Scores and tokens [..., k], largest first; None of another table, and where autocast would round it."""
        d, table = self.deferred, self.exact.table
        if (d.table.data_ptr(), d.table.shape) != (table.data_ptr(), table.shape) or d.product != table.dtype:
            return None
        hidden, _, bias, o = head_of(d)
        scores, tokens = self.exact.top(hidden, k, bias, o.scale, o.softcap)
        return scores.to(d.dtype), tokens

    def _argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor | None:
        found = self.top(1) if dim in (-1, self.dim() - 1) else None
        return None if found is None else found[1] if keepdim else found[1][..., 0]

    def _topk(self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        fits = largest and dim in (-1, self.dim() - 1) and k < self.shape[-1]
        self.largest = found = self.top(k + 1) if fits else None
        if found is None:
            return None
        scores, tokens = found
        return torch.return_types.topk((scores[..., :k].contiguous(), tokens[..., :k].contiguous()))

    def _below(self, bound: Any) -> Tensor | None:
        """Whether each logit is less than `bound` [..., 1], none of which is less than all that were found.

        Where others may equal it more are found: computed logits round otherwise, and all could lie below.
        """
        found, width = self.largest, self.shape[-1]
        if found is None or not torch.is_tensor(bound) or bound.shape != (*self.shape[:-1], 1):
            return None
        if not (bound >= found[0][..., -1:]).all():
            return None
        while (count := found[0].shape[-1]) < width and (bound == found[0][..., -1:]).any():
            found = self.top(min(2 * count, width)) or found
        self.largest = scores, tokens = found
        return torch.ones(self.shape, dtype=torch.bool, device="cpu").scatter_(-1, tokens, scores < bound)

    def _masked_fill(self, mask: Any, value: Any) -> Tensor | None:
        """These logits where `mask` is False, which must be at tokens that were found, and `value` elsewhere."""
        if self.largest is None or not torch.is_tensor(mask) or mask.shape != self.shape or torch.is_tensor(value):
            return None
        scores, tokens = self.largest
        hidden = mask.gather(-1, tokens)
        if (~mask).sum() != (~hidden).sum():
            return None
        return torch.full(self.shape, value, dtype=self.dtype, device="cpu").scatter_(
            -1, tokens, scores.masked_fill(hidden, value)
        )


@contextmanager
def decoding(link: Link) -> Iterator[ExactTop]:
    """Within this context evaluation without labels hands out `TopLogits`."""
    exact, before = ExactTop(link.head.weight), link.lazy
    link.lazy = lambda deferred: TopLogits(deferred, exact)
    try:
        yield exact
    finally:
        link.lazy = before


_KEPT = {Tensor.to, Tensor.float, Tensor.__getitem__, Tensor.__truediv__, Tensor.div, Tensor.__mul__, Tensor.mul}
_KEPT |= {torch.div, torch.mul, torch.tanh, Tensor.tanh, Tensor.__add__, Tensor.add, torch.add, Tensor.contiguous}
_ANSWERS: dict[Any, Callable[..., Any]] = dict.fromkeys((torch.argmax, Tensor.argmax), TopLogits._argmax)
_ANSWERS |= dict.fromkeys((torch.topk, Tensor.topk), TopLogits._topk)
_ANSWERS |= dict.fromkeys((torch.lt, Tensor.lt, Tensor.__lt__), TopLogits._below)
_ANSWERS |= dict.fromkeys((torch.masked_fill, Tensor.masked_fill), TopLogits._masked_fill)
