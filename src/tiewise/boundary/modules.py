"""The two modules of an installed boundary: `Lookup` under an embedding's class, `Head` under a linear head's.

Install swaps classes, never modules: names, Parameters and hooks stay, and a family's own embedding class keeps its
forward. Python's method resolution puts ours beneath it:

    class GemmaScaled(nn.Embedding): forward = super().forward(ids) * scale
    swapped(GemmaScaled, Lookup):    Tiewise… → GemmaScaled → Lookup → nn.Embedding
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tiewise.boundary.deferred import Deferred
from tiewise.boundary.link import NAME, Link

BACKWARD_HOOK = "a backward hook on its output head"


class Swapped:
    """A class made from a plain one at run time; copies and pickles by naming the two it was made from."""

    plain_class: type
    made_by: tuple[Any, ...]  # (function, *arguments) that makes the class

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, self.made_by, vars(self)


def swapped(plain: Any, mixin: Any) -> Any:
    """Return the class of `plain`'s objects once `mixin` stands beneath it."""
    bases = (mixin,) if issubclass(mixin, plain) else (plain, mixin)
    return make(plain, (Swapped, *bases), (swapped, plain, mixin))


def make(plain: Any, bases: tuple[type, ...], made_by: tuple[Any, ...], **body: Any) -> Any:
    """Make the class `Tiewise…` of `plain`, once; `made_by` says how to make it again in another process."""
    if made_by not in _MADE:
        body = {"plain_class": plain, "made_by": made_by, "__module__": __name__, "__doc__": plain.__doc__, **body}
        _MADE[made_by] = type(f"Tiewise{plain.__name__}", bases, body)
    return _MADE[made_by]


_MADE: dict[tuple[Any, ...], type] = {}


def _blank(function: Any, *arguments: Any) -> Any:
    made = function(*arguments)
    return made.__new__(made)


class Lookup(nn.Embedding):
    """in_map(table[ids]) · input_scale, with the table handed on to the head."""

    input_scale: float

    def forward(self, ids: Tensor) -> Tensor:
        """Rows [..., D] of `ids` [...]."""
        link: Link = vars(self)[NAME]
        weight = self.weight
        if torch.is_grad_enabled() and weight.requires_grad:
            rows = link.look_up(weight, ids, self.padding_idx)
        else:
            rows = super().forward(ids)
        in_map = getattr(self, "in_map", None)
        if in_map is not None:
            rows = in_map(rows)
        return rows if self.input_scale == 1.0 else rows * self.input_scale


class Head(nn.Linear):
    """softcap(out_map(hidden) · tableᵀ · output_scale + bias), deferred where the forward asks for it."""

    output_scale: float
    softcap: float | None

    def forward(self, hidden: Tensor) -> Any:
        """Logits [..., V] of hidden states [..., D]."""
        link: Link = vars(self)[NAME]
        out_map = getattr(self, "out_map", None)
        if out_map is not None:
            hidden = out_map(hidden)
        table, bias = link.table(self.weight), self.bias
        scaled = self.output_scale != 1.0
        first = None if scaled else bias
        logits: Any = Deferred(hidden, table, first, link.counts) if link.defers else F.linear(hidden, table, first)
        if scaled:
            logits = logits * self.output_scale
            logits = logits if bias is None else logits + bias
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        if isinstance(logits, Deferred) and _asks_backward(self):
            return logits.real(BACKWARD_HOOK)
        return logits


def _asks_backward(module: nn.Module) -> bool:
    """Whether a backward hook, its own or one for all modules, wants the gradient of what `module` returns."""
    everywhere = torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks
    return bool(module._backward_hooks or module._backward_pre_hooks or everywhere)
