"""`link`: connects the input embedding and the output head of a model during a forward.

    begin_forward   with labels or in training, the head defers its logits; the chain of tables starts empty
    lookup          rows, table' = tied_lookup(table, ids): the chain stores table'
    head            takes table' from the chain, so that both gradient paths end in one buffer
    finish_forward  the chain is cleared; evaluation logits become a Tensor that is computed when it is read; a mean
                    loss becomes its share of the optimizer step's loss

The *chain* exists during one forward call. Outside a forward, lookups and head give the same results and gradients with
two gradient buffers.

Modules are never replaced, only their classes: names, Parameters and hooks stay. The forward of a family's embedding
class stays too, since `Lookup` comes after that class in Python's method resolution order:

    class GemmaScaled(nn.Embedding): forward = super().forward(ids) * scale
    swapped(GemmaScaled, Lookup):    Tiewise… → GemmaScaled → Lookup → nn.Embedding
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from tiewise.boundary.boundary import apply_map
from tiewise.boundary.declare_tying import declare_tying
from tiewise.boundary.deferred import Deferred
from tiewise.boundary.free_rows import FreeRows, free_rows_of
from tiewise.boundary.journal import Journal
from tiewise.boundary.lazy_logits import LazyLogits
from tiewise.boundary.locate import ModelEnds, locate
from tiewise.boundary.ops.path_gradient import LookupOptions, several, tied_lookup, without_row
from tiewise.boundary.ops.vocabulary_shard import VocabularyShard
from tiewise.boundary.recorded_logits import Counts, gather_vocabulary
from tiewise.boundary.restructure import Structure, restructure
from tiewise.boundary.saved import NAME, link_of, swapped
from tiewise.boundary.sharded_tables import (
    FSDP_TABLE,
    detach_parallel_forward,
    local_part,
    mixed_precision_dtype,
    shard_of,
)
from tiewise.boundary.watch import watch
from tiewise.core.errors import SpecError, UnsupportedError
from tiewise.core.frequent_tokens import most_frequent
from tiewise.core.spec import BoundarySpec, Vocabularies
from tiewise.core.spec_options import INSTALL

BACKWARD_HOOK = "a backward hook on its output head"


class Link:
    """State of one installed boundary, shared by the model, its lookups and its head.

    `options` has α, the padding row and the record of the lookup path.
    """

    def __init__(self, spec: BoundarySpec, ends: ModelEnds, structure: Structure, hidden_width: int) -> None:
        self.spec, self.ends, self.structure = spec, ends, structure
        self.hidden_width = hidden_width  # D, width of the hidden states before `out_map`
        self.options = LookupOptions(stop_both=spec.pad, alpha=spec.alpha)
        self.counts = Counts()
        self.journal = Journal()  # undoes the hooks and classes of `attach`, but not the tables and maps
        self.is_plain = structure.is_plain  # whether any loader reads the model's checkpoints
        self.shifts_labels = False  # whether position i predicts label i + 1
        self.averages_over_batch = False  # whether the loss is a mean over the batch and ignores num_items_in_batch
        self.logits: str | None = None  # as in `LossOptions`
        self.deferral_depth = 0  # number of open `deferred()` contexts
        self.make_lazy: Callable[[Deferred], Tensor] = LazyLogits  # wraps deferred logits in evaluation
        self.is_running = False  # whether a forward runs
        self.defers_logits = False  # whether this forward's head defers its logits
        self.dtype: torch.dtype | None = None  # compute dtype of tables that fully_shard does not cast
        self.chain: dict[int, Tensor] = {}  # id of a table → the table that its last use in this forward returned

    @property
    def head(self) -> nn.Linear:
        """The output head."""
        return self.ends.head

    @property
    def lookups(self) -> list[nn.Embedding]:
        """All modules that look tokens up."""
        return [module for _, module in self.ends.lookups]

    @property
    def in_map(self) -> Any:
        """The map after every lookup, or None."""
        return getattr(self.ends.first_lookup, "in_map", None)


def attach(
    model: Any, spec: BoundarySpec | None, journal: Journal, *, loading: bool = False, counts: Any = None
) -> Link:
    """Build `spec` into the model and link its ends.

    If `spec` is None, tables and options stay as they are. `journal` gets every change. The model is not run, so a
    model on the meta device can be attached while it loads (`loading`) from a config that was saved with this spec.
    `install` verifies afterwards. `counts` [V] choose the tokens of `+free=K`; a checkpoint has its tokens' ids.
    """
    if spec is not None:
        spec.plainly().require(INSTALL)  # without the schedule that a saved spec may have
    ends = locate(model)
    hidden_width = ends.head.weight.shape[1]
    structure = Structure()
    if spec is not None:
        free_ids = _find_free_ids(spec, len(ends.head.weight), counts, loading=loading)
        structure = restructure(ends, spec.plainly(), journal, free_ids)
    native = declare_tying(model, ends, journal, loading=loading)
    link = Link(spec or ends.plain_spec, ends, structure, hidden_width)
    link.is_plain = structure.is_plain and native
    attached = link.journal
    journal.later(attached.undo)
    attached.set(model, NAME, link)
    for lookup in link.lookups:
        _swap_class(lookup, Lookup, link)
    _swap_class(ends.head, Head, link)
    before = model.register_forward_pre_hook(begin_forward, with_kwargs=True)
    # always_call: the chain must be cleared even if the forward raises
    after = model.register_forward_hook(finish_forward, with_kwargs=True, always_call=True)
    for handle in (before, after):
        attached.later(_remove_hook, model, handle.id)
    return link


def _find_free_ids(spec: BoundarySpec, vocab: int, counts: Any, *, loading: bool) -> tuple[int, ...]:
    """Return the tokens of `+free=K`.

    If the model is loading, they are any K tokens, until their ids are read.
    """
    if spec.free is None:
        return ()
    if loading:
        return tuple(range(spec.free))
    return most_frequent(spec, counts, Vocabularies.same(vocab))


def _swap_class(module: Any, cls: Any, link: Link) -> None:
    """Add `cls` to the bases of a module's class, and store the link in the module."""
    link.journal.set(module, NAME, link)
    link.journal.set(module, "__class__", swapped(module.__class__, cls))
    detach_parallel_forward(module, link.journal)


_HOOK_STORES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def _remove_hook(model: nn.Module, key: int) -> None:
    """Remove a hook by its key, since hook handles do not survive copying a model."""
    for store in _HOOK_STORES:
        getattr(model, store).pop(key, None)


# around a forward


def begin_forward(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Start a forward (a pre-hook): decide whether it defers its logits.

    It also replaces `num_items_in_batch` of 0, by which a loss would be divided.
    """
    link: Link | None = link_of(model)
    # replicas of DataParallel run without the chain: their threads share one link
    if link is not None and not getattr(model, "_is_replica", False):
        _begin_linked(model, link, kwargs)
    items = kwargs.get("num_items_in_batch")
    if items is None:
        return None
    return args, {**kwargs, "num_items_in_batch": divisor(items)}


def divisor(items: Any) -> Any:
    """Return `num_items_in_batch`, or 1 if it is 0.

    Without labels the loss is then 0 / 1 = 0, and so are its gradients.
    """
    if torch.is_tensor(items):
        return items.masked_fill(items == 0, 1)
    return items or 1


def _begin_linked(model: nn.Module, link: Link, kwargs: dict[str, Any]) -> None:
    """Start a forward with an empty chain.

    Its logits are deferred if a loss or the caller can use them so.
    """
    _require_padding_row(link)
    if kwargs.get("fused_lm_head"):
        _require_plain_head(link)
    is_training_step = model.training and torch.is_grad_enabled()
    has_several_processes = not torch.compiler.is_compiling() and several()
    if is_training_step and has_several_processes:
        watch(model, link)
    link.chain.clear()
    link.dtype = None
    if FSDP_TABLE in vars(link.head):
        link.dtype = mixed_precision_dtype(model)
    link.is_running = True
    link.defers_logits = _can_defer(model, link, kwargs)


def _can_defer(model: nn.Module, link: Link, kwargs: dict[str, Any]) -> bool:
    """Return True if a loss or the caller of this forward can use deferred logits."""
    if model.training or link.deferral_depth > 0:
        return True
    if torch.compiler.is_compiling():
        return False
    return kwargs.get("labels") is not None or link.make_lazy is not LazyLogits


def _require_padding_row(link: Link) -> None:
    """Refuse a table whose padding row was cut off when the model was resized."""
    pad = link.spec.pad
    if pad is None:
        return
    rows = len(link.head.weight)
    if pad >= rows:
        raise SpecError(f"pad={pad}: the table has {rows} rows", f"install a boundary with a row below {rows}")


def _require_plain_head(link: Link) -> None:
    """Refuse TRL's fused head (1.15 and later) for a head with more than a table.

    TRL multiplies by the table alone, and would leave out maps, scales, soft-cap and padding row.
    """
    structure = link.structure
    has_options = (structure.output_scale, structure.softcap) != (1.0, None)
    has_map = getattr(link.head, "out_map", None) is not None or structure.has_free_rows
    if has_options or has_map or link.spec.pad is not None:
        remedy = "take TRL 1.13, or tied or untied without options"
        raise UnsupportedError(f"TRL multiplies by the table itself, and {link.spec} has more than a table", remedy)


def finish_forward(model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """End a forward (a hook): clear the chain, and return loss and logits for the caller."""
    link: Link | None = link_of(model)
    if link is None:
        return None
    if link.averages_over_batch and output is not None:  # also in replicas of DataParallel: it reads the link only
        output = _scale_to_step(output, kwargs, link.shifts_labels)
    if not link.is_running:
        return output
    link.chain.clear()
    link.is_running = link.defers_logits = False
    if torch.compiler.is_compiling():
        return _drop_deferred(output)
    if model.training or link.deferral_depth > 0:
        return output
    return _wrap_deferred(output, link.make_lazy)


def _drop_deferred(output: Any) -> Any:
    """Leave deferred logits out of an output with a loss.

    A compiled graph can return Tensors only, and computing the logits would cost as much as deferring saves.
    """
    if not isinstance(output, dict) or output.get("loss") is None:
        return output
    computed = {key: value for key, value in output.items() if not isinstance(value, Deferred)}
    return type(output)(**computed)


def _wrap_deferred(output: Any, lazy: Callable[[Deferred], Tensor]) -> Any:
    """Wrap deferred logits of an output as Tensors that are computed when read."""
    if isinstance(output, tuple):
        values = list(output)
        _replace_deferred(values, enumerate(output), lazy)
        return tuple(values)
    if isinstance(output, dict):
        _replace_deferred(output, output.items(), lazy)
    return output


def _replace_deferred(output: Any, entries: Iterable[tuple[Any, Any]], lazy: Callable[[Deferred], Tensor]) -> None:
    """Replace deferred logits in an output by lazy ones. `entries` are its (key, value) pairs."""
    for key, value in entries:
        if isinstance(value, Deferred):
            output[key] = lazy(value)


def _scale_to_step(output: Any, kwargs: dict[str, Any], shifts_labels: bool) -> Any:
    """Scale the mean loss of this batch to its share of the mean over `num_items_in_batch`."""
    items, labels = kwargs.get("num_items_in_batch"), kwargs.get("labels")
    if items is None or labels is None:
        return output
    if isinstance(output, dict):
        loss = output.get("loss")
    else:
        loss = output[0]
    if loss is None or loss.dim():  # BERT's pretraining class computes no loss without labels of sentence pairs
        return output
    if shifts_labels:
        labels = labels[..., 1:]
    count = labels.ne(-100).sum()
    exact = torch.promote_types(loss.dtype, torch.float32)
    share = count.to(loss.device, exact) / torch.as_tensor(items, device=loss.device)
    if isinstance(output, dict):
        output["loss"] = loss * share
        return output
    return (loss * share, *output[1:])


# the new base classes; their steps are functions, since a family's class may have methods of any name


class Lookup(nn.Embedding):
    """Input embedding in_map(table[ids]) · input_scale, which passes its table to the head."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows [..., D] of token ids [...]."""
        link: Link = vars(self)[NAME]
        shard = shard_of(self)
        if shard is not None or (torch.is_grad_enabled() and self.weight.requires_grad):
            rows = _look_up_linked(self, link, ids, shard)
        else:
            rows = super().forward(ids)
        rows = apply_map(getattr(self, "in_map", link.in_map), rows)
        scale = link.structure.input_scale
        if scale == 1.0:
            return rows
        return rows * scale


def _look_up_linked(lookup: Lookup, link: Link, ids: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Return rows [..., E]. During a forward, store the table for the head in the chain."""
    link_options = link.options
    options = LookupOptions(lookup.padding_idx, link_options.stop_both, link_options.alpha, link_options.record)
    if torch.compiler.is_compiling() or not link.is_running:
        return tied_lookup(local_part(lookup, dtype=link.dtype), ids, options, shard=shard)[0]
    key = id(lookup.weight)
    table = link.chain.get(key)
    if table is None:
        table = local_part(lookup, dtype=link.dtype)
    rows, link.chain[key] = tied_lookup(table, ids, options, shard=shard)
    return rows


class Head(nn.Linear):
    """Output head softcap(out_map(hidden) · tableᵀ · output_scale + bias).

    Its logits are deferred if the link's `defers_logits` is True.
    """

    def forward(self, hidden: Tensor) -> Any:
        """Return the logits [..., V] of hidden states [..., D]."""
        link: Link = vars(self)[NAME]
        hidden = apply_map(getattr(self, "out_map", None), hidden)
        logits = _scaled_product(self, link, hidden)
        cap = link.structure.softcap
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if isinstance(logits, Deferred) and _has_backward_hooks(self):  # such hooks need the logits' gradient
            return logits.real(BACKWARD_HOOK)
        return logits


def _scaled_product(head: Head, link: Link, hidden: Tensor) -> Any:
    """Return hidden · tableᵀ · output_scale + bias, computed or deferred."""
    bias = local_part(head, "bias", link.dtype)
    shard = shard_of(head)
    table = _table_of(head, link, shard)
    scale = link.structure.output_scale
    if scale == 1.0:
        return _product(link, hidden, table, bias, shard)
    logits = _product(link, hidden, table, None, shard) * scale
    if bias is None:
        return logits
    if shard is not None:
        bias = gather_vocabulary(bias, shard)
    return logits + bias


def _product(link: Link, hidden: Tensor, table: Tensor, bias: Tensor | None, shard: VocabularyShard | None) -> Any:
    """Return hidden · tableᵀ + bias with the head's free rows, computed or deferred."""
    free = free_rows_of(link.head)
    if not link.defers_logits and shard is None:
        return _computed_logits(free, hidden, F.linear(hidden, table, bias))
    if free is not None:
        table = free.table(table)
    logits = Deferred(hidden, table, bias, link.counts, link.logits, shard)
    if link.defers_logits:
        return logits
    return logits.compute()


def _computed_logits(free: FreeRows | None, hidden: Tensor, logits: Tensor) -> Tensor:
    """Return the logits [..., V] of hidden states with those of the free rows."""
    if free is None:
        return logits
    return free.add_logits(logits, hidden)


def _table_of(head: Head, link: Link, shard: VocabularyShard | None) -> Tensor:
    """Return the head's table from the chain, or else the head's weight."""
    if not torch.compiler.is_compiling():
        table = link.chain.get(id(head.weight))
        if table is not None:
            return table
    padding_row = link.options.stop_both
    if shard is not None:
        padding_row = shard.row(padding_row)
    return without_row(local_part(head, dtype=link.dtype), padding_row)


def _has_backward_hooks(head: nn.Module) -> bool:
    """Return True if backward hooks are registered on the head or on all modules."""
    if head._backward_hooks or head._backward_pre_hooks:
        return True
    return bool(torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks)
