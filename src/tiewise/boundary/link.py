"""What an installed boundary puts into a model: two swapped classes, two hooks around the forward, one `Link` for all.

    begin   labels given, or training → the head defers its logits; the chain of tables starts empty
    lookup  rows, table' = tied_lookup(table, ids): table' goes into the chain
    head    takes table' from the chain, so that both gradient paths end in one buffer
    finish  the chain ends; evaluation logits become a Tensor that computes itself when read; a mean loss becomes its
            share of the step's

The chain lives within one forward call. Outside of it lookups and head work unlinked: correct, in two buffers.

Classes are swapped, never modules: names, Parameters and hooks stay, and a family's own embedding class keeps its
forward. Python's method resolution puts ours beneath it:

    class GemmaScaled(nn.Embedding): forward = super().forward(ids) * scale
    swapped(GemmaScaled, Lookup):    Tiewise… → GemmaScaled → Lookup → nn.Embedding
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_map

from tiewise.boundary.boundary import draw, make_maps
from tiewise.boundary.deferred import Deferred
from tiewise.boundary.locate import Journal, ModelEnds, declare_tying, locate
from tiewise.boundary.logit_answers import fused_cross_entropy
from tiewise.boundary.logit_gradients import gradients
from tiewise.boundary.ops.path_gradient import LookupOptions, several, tied_lookup, without_row
from tiewise.boundary.recorded_logits import Counts, all_words
from tiewise.boundary.saved import NAME, link_of, swapped
from tiewise.boundary.sharded_tables import KEPT, local, narrowed, set_aside, shard_of
from tiewise.boundary.watch import watch
from tiewise.core.errors import InstallError, SpecError, UnsupportedError
from tiewise.core.spec import BoundarySpec
from tiewise.core.spec_options import INSTALL

BACKWARD_HOOK = "a backward hook on its output head"


@dataclass(frozen=True)
class Structure:
    """What a model's ends have beyond one or two plain tables."""

    input_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float | None = None
    maps: bool = False
    new_bias: bool = False

    @property
    def plain(self) -> bool:
        """Whether the family's own class can hold it."""
        return self == Structure()

    @property
    def folded(self) -> bool:
        """Whether its dense tables are others than its tables."""
        return self.maps or (self.input_scale, self.output_scale) != (1.0, 1.0)


def restructure(ends: ModelEnds, spec: BoundarySpec, journal: Journal) -> Structure:
    """Change tables, maps and options in place, remembering everything in `journal`."""
    lookups, head = [module for _, module in ends.lookups], ends.head
    old_in, old_out = ends.source.weight, head.weight
    (rows, d_in), d_out = old_in.shape, old_out.shape[1]

    # can one table, or tables of these widths, serve both ends?
    if spec.tables == 1 or any(len(module.weight) != rows for module in lookups):
        counts = {name: len(module.weight) for name, module in ends.lookups} | {ends.head_name: len(old_out)}
        if len(set(counts.values())) > 1:
            sizes = ", ".join(f"{name} {count}" for name, count in counts.items())
            fix = "choose untied, or resize_token_embeddings to one vocabulary first"
            raise InstallError(f"{spec} needs one vocabulary, and the tables have {sizes} rows", fix)
        if d_in != d_out and spec.width is None:
            what = f"{spec}: the input table is {d_in} wide, the output table {d_out}"
            raise InstallError(what, "choose factored:k or projected:k, whose maps meet both widths")

    # tables: the input's is kept, tied or copied where its width may stay
    width_in, width_out = spec.table_widths(d_in)[0], spec.table_widths(d_out)[1]
    padding = spec.pad if spec.pad is not None else ends.source.padding_idx
    table_in = table_out = old_in
    if spec.init is not None or width_in != d_in:
        table_in = table_out = _new_table(old_in, width_in, spec.init, padding)
    if spec.tables == 2:
        table_out = old_out
        if spec.init is not None or width_out != d_out:
            table_out = _new_table(old_out, width_out, spec.init, spec.pad)
        elif old_out is old_in:
            table_out = nn.Parameter(old_out.detach().clone(), requires_grad=old_out.requires_grad)
    for lookup in lookups:
        if spec.tables == 1 or table_in is not old_in or lookup.weight is old_in:
            journal.set(lookup, "weight", table_in)
    journal.set(head, "weight", table_out)

    # maps
    drawn_on = torch.device("meta" if table_out.is_meta else "cpu")  # whatever the default device is
    with drawn_on:
        in_map, out_map = make_maps(spec, d_in) if spec.map_shapes(d_in) else (None, None)
    if d_out != d_in:
        if spec.kind == "spd":
            fix = "choose factored:k, whose maps are two"
            raise InstallError(f"spd: its two maps are one matrix, and the widths {d_in} and {d_out} differ", fix)
        with drawn_on:
            out_map = make_maps(spec, d_out)[1]
    for module in (in_map, out_map):
        if module is not None:
            module.to(device=table_out.device, dtype=table_out.dtype)
    for lookup in lookups:
        journal.set(lookup, "embedding_dim", int(lookup.weight.size(1)))
    if in_map is not None:  # one owner, to which the other places turn: a checkpoint holds it once
        journal.set(ends.owner, "in_map", in_map)
    journal.set(head, "in_features", table_out.shape[1])
    if out_map is not None:
        journal.set(head, "out_map", out_map)

    # options
    new_bias = spec.bias and head.bias is None
    if new_bias:
        journal.set(head, "bias", nn.Parameter(table_out.new_zeros(len(table_out))))
    if spec.pad is not None:
        for table in dict.fromkeys([head.weight, *(lookup.weight for lookup in lookups)]):
            if spec.pad >= len(table):
                raise SpecError(f"pad={spec.pad}: the table has {len(table)} rows", f"choose a row below {len(table)}")
            if not table.is_meta:
                journal.later(_put_row, table, spec.pad, table.detach()[spec.pad].clone())
                _put_row(table, spec.pad, table.new_zeros(()))
    return Structure(
        spec.scales(d_in)[0], spec.scales(d_out)[1], spec.softcap, (in_map, out_map) != (None, None), new_bias
    )


def _new_table(like: Tensor, width: int, std: float | None, zero_row: int | None) -> nn.Parameter:
    """Table N(0, std²) of a new width; without a std, as spread as the table it replaces."""
    table = nn.Parameter(like.new_empty(len(like), width), requires_grad=like.requires_grad)
    if not table.is_meta:
        draw(table, float(like.detach().float().std()) if std is None else std, zero_row)
    return table


@torch.no_grad()
def _put_row(table: Tensor, row: int, values: Tensor) -> None:
    table[row] = values


class Link:
    """State of one installed boundary. `options` holds α, the padding row and the record of the lookup path."""

    def __init__(self, spec: BoundarySpec, ends: ModelEnds, structure: Structure, hidden_width: int) -> None:
        self.spec, self.ends, self.structure = spec, ends, structure
        self.hidden_width = hidden_width  # what the head is given, before any map
        self.options = LookupOptions(stop_both=spec.pad, alpha=spec.alpha)
        self.counts = Counts()
        self.undo = Journal()  # takes back what install attached; structure is not kept
        self.plain = structure.plain  # whether the checkpoint is one that any loader reads
        self.shifts = False  # whether position i predicts label i + 1
        self.averages = False  # whether the family's loss is a mean over its own batch, whatever number it is told
        self.logits: str | None = None  # as in `LossOptions`
        self.always = 0  # depth of `deferred()` contexts
        self.lazy: Callable[[Deferred], Tensor] = LazyLogits  # what deferred logits are in evaluation
        self.active = self.defers = False  # whether a forward is under way, and whether its logits wait
        self.kind: torch.dtype | None = None  # that the forward computes in, of tables which fully_shard does not cast
        self.chain: dict[int, Tensor] = {}  # table → what its last use in this forward handed on, by id

    @property
    def head(self) -> nn.Linear:
        """The output head."""
        return self.ends.head

    @property
    def lookups(self) -> list[nn.Embedding]:
        """Every module that looks tokens up."""
        return [module for _, module in self.ends.lookups]

    @property
    def in_map(self) -> Any:
        """The map behind every lookup, or None."""
        return getattr(self.ends.owner, "in_map", None)


def attach(model: Any, spec: BoundarySpec | None, journal: Journal, *, loading: bool = False) -> Link:
    """Build `spec` into the model (None: leave it as it is) and link its ends; every change goes into `journal`.

    Nothing is run: a model class that is being loaded (`loading`, from a config that was saved with this spec) attaches
    too, on the meta device. What `install` verifies afterwards.
    """
    if spec is not None:
        spec.plainly().require(INSTALL)  # a saved spec may have a schedule, which is over
    ends = locate(model)
    hidden_width = ends.head.weight.shape[1]
    structure = restructure(ends, spec.plainly(), journal) if spec is not None else Structure()
    native = declare_tying(model, ends, journal, loading=loading)
    link = Link(spec or BoundarySpec("tied" if ends.tied else "untied"), ends, structure, hidden_width)
    link.plain = structure.plain and native
    undo = link.undo
    journal.later(undo.undo)
    undo.set(model, NAME, link)
    modules: list[Any] = [*link.lookups, ends.head]
    for module in modules:
        undo.set(module, NAME, link)
        undo.set(module, "__class__", swapped(module.__class__, Head if module is ends.head else Lookup))
        set_aside(module, undo)
    for handle in (
        model.register_forward_pre_hook(begin, with_kwargs=True),
        # a forward that raises must not leave its chain behind
        model.register_forward_hook(finish, with_kwargs=True, always_call=True),
    ):
        undo.later(_remove_hook, model, handle.id)
    return link


def _remove_hook(model: nn.Module, key: int) -> None:
    # by key, not by handle: handles do not survive copying a model
    stores = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks")
    for store in (*stores, "_forward_hooks_with_kwargs", "_forward_hooks_always_called"):
        getattr(model, store).pop(key, None)


# around a forward


def begin(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Pre-hook: decide whether this forward defers its logits; never have a loss divided by 0 labels."""
    link: Link | None = link_of(model)
    if link is not None and not getattr(model, "_is_replica", False):
        _begin(model, link, kwargs)  # DataParallel's replicas share one link between threads: they run unlinked
    if kwargs.get("num_items_in_batch") is None:
        return None
    return args, {**kwargs, "num_items_in_batch": divisor(kwargs["num_items_in_batch"])}


def divisor(items: Any) -> Any:
    """Return `num_items_in_batch`, with 1 in place of 0: the loss of no labels is 0, and so are its gradients."""
    return items.masked_fill(items == 0, 1) if torch.is_tensor(items) else items or 1


def _begin(model: Any, link: Link, kwargs: dict[str, Any]) -> None:
    if (pad := link.spec.pad) is not None and pad >= (rows := len(link.head.weight)):  # a resize has cut it off
        raise SpecError(f"pad={pad}: the table has {rows} rows", f"install a boundary with a row below {rows}")
    more = pad is not None or getattr(link.head, "out_map", None) is not None
    # TRL's fused head, from 1.15 on, would leave out what is behind the table
    if kwargs.get("fused_lm_head") and (more or (link.structure.output_scale, link.structure.softcap) != (1.0, None)):
        fix = "take TRL 1.13, or tied or untied without options"
        raise UnsupportedError(f"TRL multiplies by the table itself, and {link.spec} has more than a table", fix)
    if model.training and torch.is_grad_enabled() and not torch.compiler.is_compiling() and several():
        watch(model, link)
    asked = kwargs.get("labels") is not None or link.lazy is not LazyLogits
    link.chain.clear()
    link.kind = narrowed(model) if KEPT in vars(link.head) else None
    link.active, link.defers = True, model.training or link.always > 0 or (asked and not torch.compiler.is_compiling())


def finish(model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Hook: end the chain and hand the loss and the logits out in the form that the caller can use."""
    link: Link | None = link_of(model)
    if link is None:
        return None
    if link.averages and output is not None:  # of DataParallel's replicas too: this needs nothing that they share
        output = _share_of_step(output, kwargs, link.shifts)
    if not link.active:
        return output
    link.chain.clear()
    link.active = link.defers = False
    if torch.compiler.is_compiling():
        if not isinstance(output, dict) or output.get("loss") is None:
            return output
        # a compiled graph can hand out tensors only, and computing the logits would undo the point
        return type(output)(**{key: value for key, value in output.items() if not isinstance(value, Deferred)})
    if model.training or link.always > 0:
        return output
    if isinstance(output, tuple):
        return tuple(link.lazy(x) if isinstance(x, Deferred) else x for x in output)
    for key, value in output.items() if isinstance(output, dict) else ():
        if isinstance(value, Deferred):
            output[key] = link.lazy(value)
    return output


def _share_of_step(output: Any, kwargs: dict[str, Any], shifts: bool) -> Any:
    """Turn the mean over the labels at hand into their share of the mean over `num_items_in_batch` labels."""
    items, labels = kwargs.get("num_items_in_batch"), kwargs.get("labels")
    if items is None or labels is None:
        return output
    loss = output.get("loss") if isinstance(output, dict) else output[0]
    if loss is None or loss.dim():  # BERT's pretraining class computes none without labels of its pairs
        return output
    here = (labels[..., 1:] if shifts else labels).ne(-100).sum()
    exact = torch.promote_types(loss.dtype, torch.float32)
    share = here.to(loss.device, exact) / torch.as_tensor(items, device=loss.device)
    if isinstance(output, dict):
        output["loss"] = loss * share
        return output
    return (loss * share, *output[1:])


_FREE = {Tensor.size, Tensor.dim, *(getattr(Tensor, n).__get__ for n in ("shape", "dtype", "device", "ndim"))}


class LazyLogits(Tensor):
    """Logits of an evaluation step: a Tensor in name around `Deferred` ones, computed when something reads it.

    A Trainer that only wants the evaluation loss never reads them, so they are never computed; `compute_metrics` and
    accelerate, which accept nothing but Tensors, get the real logits at their first touch.
    """

    deferred: Deferred

    @staticmethod
    def __new__(cls, deferred: Deferred) -> LazyLogits:
        """Wrap; nothing is computed and nothing allocated."""
        self = torch.Tensor._make_wrapper_subclass(cls, deferred.shape, dtype=deferred.dtype, device=deferred.device)
        self.deferred = deferred
        return self

    def __init__(self, deferred: Deferred) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyLogits({self.deferred!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer shape, dtype and device; fuse a cross-entropy; compute for everything else."""
        kwargs = kwargs or {}
        if func in _FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        # logits that were read may have been changed since: their loss is that of what they are now
        if func is F.cross_entropy and isinstance(first, LazyLogits) and not first.deferred.is_computed:
            loss = fused_cross_entropy(first.deferred, *args[1:], **kwargs)
            if loss is not None:
                return loss
        if func is torch.autograd.grad:
            args, kwargs = tree_map(lambda x: x.deferred if isinstance(x, LazyLogits) else x, (args, kwargs))
            return gradients(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        args, kwargs = tree_map(lambda x: computed(x, name), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Compute for code that reaches below Python."""
        args, kwargs = tree_map(lambda x: computed(x, str(func)), (args, kwargs or {}))
        return func(*args, **kwargs)


def computed(value: Any, because: str = "real") -> Any:
    """Return the real logits of a `LazyLogits` or `Deferred`, and anything else as it is."""
    if isinstance(value, LazyLogits):
        value = value.deferred
    return value.real(because) if isinstance(value, Deferred) else value


# the classes that are swapped in


class Lookup(nn.Embedding):
    """in_map(table[ids]) · input_scale, with the table handed on to the head."""

    def forward(self, ids: Tensor) -> Tensor:
        """Rows [..., D] of `ids` [...]."""
        link: Link = vars(self)[NAME]
        weight, shard, o = self.weight, shard_of(self), link.options
        if shard is not None or (torch.is_grad_enabled() and weight.requires_grad):
            options = LookupOptions(self.padding_idx, o.stop_both, o.alpha, o.record)
            if torch.compiler.is_compiling() or not link.active:
                rows = tied_lookup(local(self, kind=link.kind), ids, options, shard=shard)[0]
            else:
                table = link.chain.get(id(weight))
                table = local(self, kind=link.kind) if table is None else table
                rows, link.chain[id(weight)] = tied_lookup(table, ids, options, shard=shard)
        else:
            rows = super().forward(ids)
        in_map = getattr(self, "in_map", link.in_map)
        if in_map is not None:
            rows = in_map(rows)
        scale = link.structure.input_scale
        return rows if scale == 1.0 else rows * scale


class Head(nn.Linear):
    """softcap(out_map(hidden) · tableᵀ · output_scale + bias), deferred where the forward asks for it."""

    def forward(self, hidden: Tensor) -> Any:
        """Logits [..., V] of hidden states [..., D]."""
        link: Link = vars(self)[NAME]
        scale, cap = link.structure.output_scale, link.structure.softcap
        out_map = getattr(self, "out_map", None)
        if out_map is not None:
            hidden = out_map(hidden)
        table = None if torch.compiler.is_compiling() else link.chain.get(id(self.weight))
        bias = local(self, "bias", link.kind)
        shard, stopped = shard_of(self), link.options.stop_both
        if table is None:  # no lookup before it in this forward
            table = without_row(local(self, kind=link.kind), stopped if shard is None else shard.row(stopped))
        first = bias if scale == 1.0 else None
        if link.defers or shard is not None:
            logits: Any = Deferred(hidden, table, first, link.counts, link.logits, shard)
            logits = logits if link.defers else logits.computed()
        else:
            logits = F.linear(hidden, table, first)
        if scale != 1.0:
            logits = logits * scale
            bias = bias if bias is None or shard is None else all_words(bias, shard)
            logits = logits if bias is None else logits + bias
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if isinstance(logits, Deferred):
            everywhere = torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks
            if self._backward_hooks or self._backward_pre_hooks or everywhere:  # they want the logits' gradient
                return logits.real(BACKWARD_HOOK)
        return logits
