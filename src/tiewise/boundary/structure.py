"""Give a model's ends the tables, maps and options of a spec.

Values are kept wherever shapes allow it: tying takes the input's table, untying copies it, and only a table of a new
width is drawn anew. Maps become submodules of the end they belong to (`embed_tokens.in_map`, `lm_head.out_map`), so a
checkpoint names them and the family's own tied keys still hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tiewise.boundary.journal import Journal
from tiewise.boundary.locate import Ends
from tiewise.boundary.maps import make_maps
from tiewise.core.errors import InstallError, SpecError
from tiewise.core.spec import BoundarySpec


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


def restructure(ends: Ends, spec: BoundarySpec, journal: Journal) -> Structure:
    """Change tables, maps and options in place, remembering everything in `journal`.

    Raises:
        SpecError: the spec cannot be had here.
        InstallError: the two ends do not meet: other vocabularies, or other widths and no map between.
    """
    head, d_in, d_out = ends.head, ends.source.weight.shape[1], ends.head.weight.shape[1]
    _check_meeting(ends, spec)
    _set_tables(ends, spec, journal)
    in_map, out_map = _maps(spec, d_in, d_out, head.weight)
    for _, module in ends.lookups:
        journal.set(module, "embedding_dim", int(module.weight.size(1)))
        if in_map is not None:  # one owner: the other places refer to it, so that a checkpoint holds it once
            (journal.set if module is ends.owner else journal.hide)(module, "in_map", in_map)
    journal.set(head, "in_features", head.weight.shape[1])
    if out_map is not None:
        journal.set(head, "out_map", out_map)
    new_bias = spec.bias and head.bias is None
    if new_bias:
        journal.set(head, "bias", nn.Parameter(head.weight.new_zeros(head.weight.shape[0])))
    if spec.pad is not None:
        _zero_row(ends, spec.pad, journal)
    return Structure(
        input_scale=spec.scales(d_in)[0],
        output_scale=spec.scales(d_out)[1],
        softcap=spec.softcap,
        maps=in_map is not None or out_map is not None,
        new_bias=new_bias,
    )


def _check_meeting(ends: Ends, spec: BoundarySpec) -> None:
    lookup, head = ends.source, ends.head
    if spec.tables == 2 and all(module.weight.shape[0] == lookup.weight.shape[0] for _, module in ends.lookups):
        return
    rows = {name: len(module.weight) for name, module in ends.lookups} | {ends.head_name: len(head.weight)}
    if len(set(rows.values())) > 1:
        sizes = ", ".join(f"{name} {count}" for name, count in rows.items())
        fix = "choose untied, or resize_token_embeddings to one vocabulary first"
        raise InstallError(f"{spec} needs one vocabulary, and the tables have {sizes} rows", fix)
    if lookup.weight.shape[1] != head.weight.shape[1] and spec.width is None:
        what = f"{spec}: the input table is {lookup.weight.shape[1]} wide, the output table {head.weight.shape[1]}"
        raise InstallError(what, "choose factored:k or projected:k, whose maps meet both widths")


def _set_tables(ends: Ends, spec: BoundarySpec, journal: Journal) -> None:
    lookup, head = ends.source, ends.head
    old_in, old_out = lookup.weight, head.weight
    width_in, width_out = (spec.table_widths(old.shape[1])[i] for i, old in enumerate((old_in, old_out)))
    padding = spec.pad if spec.pad is not None else lookup.padding_idx
    if spec.init is None and width_in == old_in.shape[1]:
        table_in = old_in
    else:
        table_in = _draw(old_in, width_in, spec.init, padding)
    if spec.tables == 1:
        table_out = table_in
    elif spec.init is not None or width_out != old_out.shape[1]:
        table_out = _draw(old_out, width_out, spec.init, spec.pad)
    else:
        table_out = _copy(old_out) if old_out is old_in else old_out
    shared = spec.tables == 1 or table_in is not old_in
    for _, module in ends.lookups:
        if shared or module.weight is old_in:
            journal.set(module, "weight", table_in)
    journal.set(head, "weight", table_out)


def _copy(table: Tensor) -> nn.Parameter:
    return nn.Parameter(table.detach().clone(), requires_grad=table.requires_grad)


def _draw(like: Tensor, width: int, std: float | None, zero_row: int | None) -> nn.Parameter:
    """Table N(0, std²) of a new width; without a std, as spread as the table it replaces."""
    table = like.new_empty(like.shape[0], width)
    if not table.is_meta:
        table.normal_(0.0, std if std is not None else float(like.detach().float().std()))
        if zero_row is not None:
            table[zero_row] = 0
    return nn.Parameter(table, requires_grad=like.requires_grad)


def _maps(spec: BoundarySpec, d_in: int, d_out: int, like: Tensor) -> tuple[nn.Module | None, nn.Module | None]:
    in_map, out_map = make_maps(spec, d_in)
    if d_out != d_in:
        if spec.kind == "spd":
            fix = "choose factored:k, whose maps are two"
            raise InstallError(f"spd: its two maps are one matrix, and the widths {d_in} and {d_out} differ", fix)
        out_map = make_maps(spec, d_out)[1]
    for module in (in_map, out_map):
        if module is not None:
            module.to(device=like.device, dtype=like.dtype)
    return in_map, out_map


def _zero_row(ends: Ends, row: int, journal: Journal) -> None:
    tables = {id(table): table for table in (ends.head.weight, *(module.weight for _, module in ends.lookups))}
    for table in tables.values():
        if row >= table.shape[0]:
            raise SpecError(f"pad={row}: the table has {table.shape[0]} rows", f"choose a row below {table.shape[0]}")
        if not table.is_meta:
            journal.later(_put_row, table, row, table.detach()[row].clone())
            _put_row(table, row, torch.zeros((), dtype=table.dtype, device=table.device))


def _put_row(table: Tensor, row: int, values: Tensor) -> None:
    with torch.no_grad():
        table[row] = values
