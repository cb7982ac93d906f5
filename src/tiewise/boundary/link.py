"""What a model and its installed modules share: one `Link` per model, and the two hooks around its forward.

    begin   labels given, or training → the head defers its logits; the chain of tables starts empty
    lookup  rows, table' = tied_lookup(table, ids): table' goes into the chain
    head    takes table' from the chain, so that both gradient paths end in one buffer
    finish  the chain ends; evaluation logits become a Tensor that computes itself when read; a mean loss becomes its
            share of the step's

The chain lives within one forward call. Outside of it lookups and head work unlinked: correct, in two buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tiewise.boundary.deferred import Counts, Deferred
from tiewise.boundary.journal import Journal
from tiewise.boundary.lazy import LazyLogits
from tiewise.boundary.locate import Ends
from tiewise.boundary.structure import Structure
from tiewise.core.spec import BoundarySpec
from tiewise.ops.path_gradient import LookupOptions, tied_lookup, without_row

NAME = "_tiewise"


class Link:
    """State of one installed boundary. `options` holds α, the padding row and the record of Path A."""

    def __init__(self, spec: BoundarySpec, ends: Ends, structure: Structure) -> None:
        self.spec, self.ends, self.structure = spec, ends, structure
        self.options = LookupOptions(stop_both=spec.pad, alpha=spec.alpha)
        self.counts = Counts()
        self.undo = Journal()  # takes back what install attached; structure is not kept
        self.hidden_width = ends.head.weight.shape[1]  # what the head is given, before any map
        self.plain = structure.plain  # whether the checkpoint is one that any loader reads
        self.shifts = False  # whether position i predicts label i + 1
        self.averages = False  # whether the family's loss is a mean over its own batch, whatever number it is told
        self.always = 0  # depth of `deferred()` contexts
        self.active = False
        self.defers = False
        self._chain: dict[int, Tensor] = {}

    @property
    def head(self) -> nn.Linear:
        """The output head."""
        return self.ends.head

    @property
    def lookups(self) -> list[nn.Embedding]:
        """Every module that looks tokens up."""
        return [module for _, module in self.ends.lookups]

    def start(self, *, defers: bool) -> None:
        """Begin a forward."""
        self._chain.clear()
        self.active, self.defers = True, defers

    def stop(self) -> None:
        """End a forward, also one that raised."""
        self._chain.clear()
        self.active = self.defers = False

    def look_up(self, table: Tensor, ids: Tensor, padding_idx: int | None) -> Tensor:
        """Rows of `table` [V, E] at `ids` [...], linked with the other uses of the table in this forward."""
        o = LookupOptions(padding_idx, self.options.stop_both, self.options.alpha, self.options.record)
        if torch.compiler.is_compiling() or not self.active:
            return tied_lookup(table, ids, o)[0]
        rows, self._chain[id(table)] = tied_lookup(self._chain.get(id(table), table), ids, o)
        return rows

    def table(self, table: Tensor) -> Tensor:
        """Return the table as the head uses it: behind its lookups, and without a gradient for the padding row."""
        if not torch.compiler.is_compiling() and id(table) in self._chain:
            return self._chain[id(table)]
        return without_row(table, self.options.stop_both)


def link_of(module: nn.Module) -> Link | None:
    """Return the link of an installed model or module."""
    return vars(module).get(NAME)


def attach_hooks(model: nn.Module, journal: Journal) -> None:
    """Put `begin` and `finish` around the model's forward."""
    # always_call: a forward that raises must not leave its chain behind
    for handle in (
        model.register_forward_pre_hook(begin, with_kwargs=True),
        model.register_forward_hook(finish, with_kwargs=True, always_call=True),
    ):
        journal.later(_remove_hook, model, handle.id)


def _remove_hook(model: nn.Module, key: int) -> None:
    # by key, not by handle: handles do not survive copying a model
    stores = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks")
    for store in (*stores, "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        getattr(model, store).pop(key, None)


def begin(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Pre-hook: decide whether this forward defers its logits."""
    link = link_of(model)
    if link is None or getattr(model, "_is_replica", False):
        return  # DataParallel's replicas share one link between threads: they run unlinked
    compiling = torch.compiler.is_compiling()
    labelled = kwargs.get("labels") is not None
    link.start(defers=model.training or link.always > 0 or (labelled and not compiling))


def finish(model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Hook: end the chain and hand the loss and the logits out in the form that the caller can use."""
    link = link_of(model)
    if link is None:
        return None
    if link.averages and output is not None:  # of DataParallel's replicas too: this needs nothing that they share
        output = _share(output, kwargs, link.shifts)
    if not link.active:
        return output
    handed = link.always > 0
    link.stop()
    if torch.compiler.is_compiling():
        return _without_logits(output) if isinstance(output, dict) and output.get("loss") is not None else output
    return output if model.training or handed else _tensors(output)


def _share(output: Any, kwargs: dict[str, Any], shifts: bool) -> Any:
    """Turn the mean over the labels at hand into their share of the mean over `num_items_in_batch` labels."""
    items, labels = kwargs.get("num_items_in_batch"), kwargs.get("labels")
    if items is None or labels is None:
        return output
    loss = output["loss"] if isinstance(output, dict) else output[0]
    here = (labels[..., 1:] if shifts else labels).ne(-100).sum()
    exact = torch.promote_types(loss.dtype, torch.float32)
    share = here.to(loss.device, exact) / torch.as_tensor(items, device=loss.device).clamp(min=1)
    if isinstance(output, dict):
        output["loss"] = loss * share
        return output
    return (loss * share, *output[1:])


def _tensors(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(LazyLogits(x) if isinstance(x, Deferred) else x for x in output)
    if isinstance(output, dict):
        for key, value in output.items():
            if isinstance(value, Deferred):
                output[key] = LazyLogits(value)
    return output


def _without_logits(output: Any) -> Any:
    # a compiled graph can hand out tensors only, and computing the logits would undo the point
    return type(output)(**{key: value for key, value in output.items() if not isinstance(value, Deferred)})
