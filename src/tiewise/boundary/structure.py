"""Give a model's ends the tables, maps and options of a spec, and say so in its config; all of it can be taken back.

Values are kept wherever shapes allow it: tying takes the input's table, untying copies it, and only a table of a new
width is drawn anew. Maps become submodules of the end they belong to (`embed_tokens.in_map`, `lm_head.out_map`), so a
checkpoint names them and the family's own tied keys still hold.

transformers ties by `config.tie_word_embeddings` (may anything be tied?) and `_tied_weights_keys` (what to what). The
flag often rules more than the head: T5 and BART share their input tables by it, BERT its head's bias. Where such
neighbours are shared, untying keeps the flag and takes the head's key away; elsewhere the flag says the whole truth.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tiewise.boundary.locate import FLAG, ModelEnds, allowed_keys
from tiewise.boundary.maps import make_maps
from tiewise.core.errors import InstallError, SpecError
from tiewise.core.spec import BoundarySpec


class _Absent:
    """The old value of an attribute that was not there; a class, which copies of a journal keep."""


class Journal:
    """Attribute changes in the order they were made; `undo` takes them back in reverse.

    Entries hold the old values, so a journal is kept only as long as undoing is meant to be possible.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[Any, ...]] = []

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set `target.name`, remembering what its own value was (class attributes show again after `undo`)."""
        stores = [{"__class__": type(target)}, vars(target)]
        if isinstance(target, nn.Module):
            stores += [target._parameters, target._modules, target._buffers]
        old = next((store[name] for store in stores if name in store), _Absent)
        self.later(_put_back, target, name, old, False)
        setattr(target, name, value)

    def hide(self, target: Any, name: str, value: Any) -> None:
        """Set an attribute that a module must not register: a link, or a submodule that another module owns."""
        self.later(_put_back, target, name, vars(target).get(name, _Absent), True)
        object.__setattr__(target, name, value)

    def later(self, step: Callable[..., None], *arguments: Any) -> None:
        """Remember a step of another kind: `step(*arguments)` is called by `undo`."""
        self._steps.append((step, *arguments))

    def undo(self) -> None:
        """Take everything back and forget it."""
        while self._steps:
            step, *arguments = self._steps.pop()
            step(*arguments)


def _put_back(target: Any, name: str, old: Any, hidden: bool) -> None:
    if old is not _Absent:
        (object.__setattr__ if hidden else setattr)(target, name, old)
    elif hidden:
        vars(target).pop(name, None)
    else:
        delattr(target, name)


def on_meta(model: Any) -> bool:
    """Whether the model has shapes but no values yet."""
    return any(parameter.is_meta for parameter in model.parameters())


# classes that are made, and what a model keeps of its boundary

NAME = "_tiewise"


def link_of(module: Any) -> Any:
    """Return the `Link` of an installed model or module, or None."""
    return vars(module).get(NAME)


class Swapped:
    """A class made from a plain one at run time; copies and pickles by naming what it was made by."""

    plain_class: type
    made_by: tuple[Any, ...]  # (function, *arguments) that makes the class

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, self.made_by, vars(self)


def _blank(function: Any, *arguments: Any) -> Any:
    made = function(*arguments)
    return made.__new__(made)


def make(plain: Any, bases: tuple[type, ...], made_by: tuple[Any, ...], **body: Any) -> Any:
    """Make the class `Tiewise…` of `plain`, once; `made_by` says how to make it again in another process."""
    if made_by not in _MADE:
        body = {"plain_class": plain, "made_by": made_by, "__module__": __name__, "__doc__": plain.__doc__, **body}
        _MADE[made_by] = type(f"Tiewise{plain.__name__}", bases, body)
    return _MADE[made_by]


_MADE: dict[tuple[Any, ...], type] = {}


def swapped(plain: Any, mixin: Any) -> Any:
    """Return the class of `plain`'s objects once `mixin` stands beneath it."""
    bases = (mixin,) if issubclass(mixin, plain) else (plain, mixin)
    return make(plain, (Swapped, *bases), (swapped, plain, mixin))


# tables, maps and options


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
        table_in = table_out = _draw(old_in, width_in, spec.init, padding)
    if spec.tables == 2:
        table_out = old_out
        if spec.init is not None or width_out != d_out:
            table_out = _draw(old_out, width_out, spec.init, spec.pad)
        elif old_out is old_in:
            table_out = nn.Parameter(old_out.detach().clone(), requires_grad=old_out.requires_grad)
    for lookup in lookups:
        if spec.tables == 1 or table_in is not old_in or lookup.weight is old_in:
            journal.set(lookup, "weight", table_in)
    journal.set(head, "weight", table_out)

    # maps
    in_map, out_map = make_maps(spec, d_in)
    if d_out != d_in:
        if spec.kind == "spd":
            fix = "choose factored:k, whose maps are two"
            raise InstallError(f"spd: its two maps are one matrix, and the widths {d_in} and {d_out} differ", fix)
        out_map = make_maps(spec, d_out)[1]
    for module in (in_map, out_map):
        if module is not None:
            module.to(device=table_out.device, dtype=table_out.dtype)
    for lookup in lookups:
        journal.set(lookup, "embedding_dim", int(lookup.weight.size(1)))
        if in_map is not None:  # one owner: the other places refer to it, so that a checkpoint holds it once
            (journal.set if lookup is ends.owner else journal.hide)(lookup, "in_map", in_map)
    journal.set(head, "in_features", table_out.shape[1])
    if out_map is not None:
        journal.set(head, "out_map", out_map)

    # options
    new_bias = spec.bias and head.bias is None
    if new_bias:
        journal.set(head, "bias", nn.Parameter(table_out.new_zeros(len(table_out))))
    if spec.pad is not None:
        tables = [head.weight, *(lookup.weight for lookup in lookups)]
        for table in {id(table): table for table in tables}.values():
            if spec.pad >= len(table):
                raise SpecError(f"pad={spec.pad}: the table has {len(table)} rows", f"choose a row below {len(table)}")
            if not table.is_meta:
                journal.later(_put_row, table, spec.pad, table.detach()[spec.pad].clone())
                _put_row(table, spec.pad, table.new_zeros(()))
    return Structure(
        spec.scales(d_in)[0], spec.scales(d_out)[1], spec.softcap, (in_map, out_map) != (None, None), new_bias
    )


def _draw(like: Tensor, width: int, std: float | None, zero_row: int | None) -> nn.Parameter:
    """Table N(0, std²) of a new width; without a std, as spread as the table it replaces."""
    table = like.new_empty(like.shape[0], width)
    if not table.is_meta:
        table.normal_(0.0, std if std is not None else float(like.detach().float().std()))
        if zero_row is not None:
            table[zero_row] = 0
    return nn.Parameter(table, requires_grad=like.requires_grad)


@torch.no_grad()
def _put_row(table: Tensor, row: int, values: Tensor) -> None:
    table[row] = values


# what config and tied keys say


def own_config(model: Any, journal: Journal) -> Any:
    """Give the model and its parts a copy of their config, so that no other model built from it changes."""
    memo: dict[int, Any] = {}
    copied = copy.deepcopy(model.config, memo)
    for module in model.modules():
        config = vars(module).get("config")
        if hasattr(config, "to_dict") and id(config) in memo:
            journal.set(module, "config", memo[id(config)])
    return copied


def declare_tying(model: Any, ends: ModelEnds, journal: Journal, *, loading: bool = False) -> bool:
    """Set flag and keys to what the tables are; False where the family's own class would not load them so.

    `loading`: the model is being built from a config that already says the flag, and may not have tied yet.
    """
    key = f"{ends.head_name}.weight"
    allowed, own = allowed_keys(model), allowed_keys(model, parts=False)
    neighbours = {target: source for target, source in allowed.items() if target != key}
    table = model.get_parameter_or_buffer
    native = True
    if ends.tied:
        flag = True
        if not loading:  # tie what else the flag ties, as the next `tie_weights` will
            for target, source in neighbours.items():
                # the value in use, the target's, wins
                if "." in source and table(target) is not table(source):
                    owner, _, name = source.rpartition(".")
                    journal.set(model.get_submodule(owner), name, table(target))
        if key not in allowed:
            native = False
            name = next(name for name, module in ends.lookups if module is ends.source)
            journal.set(model, "_tied_weights_keys", {**own, key: f"{name}.weight"})
    else:
        shared = any(table(target) is table(source) for target, source in neighbours.items())
        flag = getattr(model.config, FLAG, False) if loading else shared
        if flag and key in allowed:
            kept = {target: source for target, source in own.items() if target != key}
            journal.set(model, "_tied_weights_keys", kept)
    if getattr(model.config, FLAG, False) != flag:
        journal.set(own_config(model, journal), FLAG, flag)
    keys = model.get_expanded_tied_weights_keys(all_submodels=True)
    if (key in keys) != ends.tied:
        fix = "install into the part that holds the head"
        raise InstallError(f"{type(model).__name__}: a part of it decides by itself whether {key} is tied", fix)
    journal.set(model, "all_tied_weights_keys", keys)
    return native
