"""`restructure`: build the tables, maps and options of a boundary into a model in place.

It sets the tables, then the maps between tables and body, then bias and padding row. A journal gets every change, so
that it can be undone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tiewise.boundary.boundary import draw, make_maps
from tiewise.boundary.free_rows import FreeRows
from tiewise.boundary.journal import Journal
from tiewise.boundary.locate import ModelEnds
from tiewise.core.errors import InstallError, SpecError
from tiewise.core.spec import BoundarySpec


@dataclass(frozen=True)
class Structure:
    """Options of a model's boundary beyond one or two plain tables."""

    input_scale: float = 1.0
    output_scale: float = 1.0
    softcap: float | None = None
    has_maps: bool = False
    has_free_rows: bool = False
    has_new_bias: bool = False  # whether the head has a bias that the family's head lacks

    @property
    def is_plain(self) -> bool:
        """True if the family's plain class can hold the boundary."""
        return self == Structure()

    @property
    def needs_folding(self) -> bool:
        """True if the dense [V, D] tables of the same function differ from the stored tables."""
        return self.has_maps or self.has_free_rows or (self.input_scale, self.output_scale) != (1.0, 1.0)


def restructure(ends: ModelEnds, spec: BoundarySpec, journal: Journal, free_ids: Sequence[int] = ()) -> Structure:
    """Change tables, maps and options in place. `journal` gets every change.

    `free_ids` are the tokens of `+free=K`.
    """
    widths = _Widths(ends.main_lookup.weight.shape[1], ends.head.weight.shape[1])
    _require_one_vocabulary(ends, spec, widths)
    _set_tables(ends, _make_tables(ends, spec, widths), spec, journal)
    maps = _make_maps(spec, widths, ends.head.weight)
    has_maps = maps != (None, None)
    _set_maps(ends, maps, journal)
    if free_ids:
        _set_free_rows(ends, free_ids, journal)
    new_bias = spec.bias and ends.head.bias is None
    if new_bias:
        table = ends.head.weight
        journal.set(ends.head, "bias", nn.Parameter(table.new_zeros(len(table))))
    if spec.pad is not None:
        _zero_padding_row(ends, spec.pad, journal)
    input_scale, _ = spec.scales(widths.input)
    _, output_scale = spec.scales(widths.output)
    return Structure(input_scale, output_scale, spec.softcap, has_maps, bool(free_ids), new_bias)


class _Widths(NamedTuple):
    """Widths D of the body's input and output, read from the old tables."""

    input: int
    output: int


class _Tables(NamedTuple):
    """Input and output table; the same one if tied."""

    input: Tensor
    output: Tensor


class _Maps(NamedTuple):
    """Map into the body and map out of it; None is the identity."""

    into: nn.Module | None
    out: nn.Module | None


def _require_one_vocabulary(ends: ModelEnds, spec: BoundarySpec, widths: _Widths) -> None:
    """Refuse ends whose rows or widths differ, if the spec has one table or one width."""
    lookup_rows = {len(lookup.weight) for _, lookup in ends.lookups}
    if spec.tables == 2 and len(lookup_rows) == 1:
        return
    counts = {name: len(module.weight) for name, module in ends.named_modules}
    if len(set(counts.values())) > 1:
        sizes = ", ".join(f"{name} {count}" for name, count in counts.items())
        remedy = "choose untied, or resize_token_embeddings to one vocabulary first"
        raise InstallError(f"{spec} needs one vocabulary, and the tables have {sizes} rows", remedy)
    if widths.input != widths.output and spec.width is None:
        problem = f"{spec}: the input table is {widths.input} wide, the output table {widths.output}"
        raise InstallError(problem, "choose factored:k or projected:k, whose maps meet both widths")


# tables


def _make_tables(ends: ModelEnds, spec: BoundarySpec, widths: _Widths) -> _Tables:
    """Return the spec's tables. The model's table is reused if its width and values may stay."""
    old_in, old_out = ends.main_lookup.weight, ends.head.weight
    width_in, _ = spec.table_widths(widths.input)
    _, width_out = spec.table_widths(widths.output)
    table_in = old_in
    if spec.init is not None or width_in != widths.input:
        padding = spec.pad
        if padding is None:
            padding = ends.main_lookup.padding_idx
        table_in = _new_table(old_in, width_in, spec.init, padding)
    if spec.tables == 1:
        return _Tables(table_in, table_in)
    table_out = old_out
    if spec.init is not None or width_out != widths.output:
        table_out = _new_table(old_out, width_out, spec.init, spec.pad)
    elif old_out is old_in:
        table_out = nn.Parameter(old_out.detach().clone(), requires_grad=old_out.requires_grad)
    return _Tables(table_in, table_out)


def _new_table(old_table: Tensor, width: int, std: float | None, zero_row: int | None) -> nn.Parameter:
    """Return a new table of this width from N(0, std²).

    Without a `std` it is that of the old table `old_table`.
    """
    table = nn.Parameter(old_table.new_empty(len(old_table), width), requires_grad=old_table.requires_grad)
    if table.is_meta:
        return table
    if std is None:
        std = float(old_table.detach().float().std())
    draw(table, std, zero_row)
    return table


def _set_tables(ends: ModelEnds, tables: _Tables, spec: BoundarySpec, journal: Journal) -> None:
    """Set the tables of the head and of the lookups.

    A lookup with a separate table, such as an encoder's, keeps it if the boundary is untied with an unchanged input
    table.
    """
    old_in = ends.main_lookup.weight
    replaces_all = spec.tables == 1 or tables.input is not old_in
    for _, lookup in ends.lookups:
        if replaces_all or lookup.weight is old_in:
            journal.set(lookup, "weight", tables.input)
    journal.set(ends.head, "weight", tables.output)


# maps


def _make_maps(spec: BoundarySpec, widths: _Widths, table: Tensor) -> _Maps:
    """Return the initialised maps of the spec, with the dtype and device of `table`."""
    in_map, out_map = None, None
    device = "cpu"  # instead of torch's default device
    if table.is_meta:
        device = "meta"
    with torch.device(device):
        if spec.map_shapes(widths.input):
            in_map, out_map = make_maps(spec, widths.input)
        if widths.output != widths.input:
            if spec.kind == "spd":
                problem = f"spd: its two maps are one matrix, and the widths {widths.input} and {widths.output} differ"
                raise InstallError(problem, "choose factored:k, whose maps are two")
            out_map = make_maps(spec, widths.output)[1]
    for module in (in_map, out_map):
        if module is not None:
            module.to(device=table.device, dtype=table.dtype)
    return _Maps(in_map, out_map)


def _set_maps(ends: ModelEnds, maps: _Maps, journal: Journal) -> None:
    """Attach the maps, and write the widths of the tables into lookups and head."""
    for _, lookup in ends.lookups:
        journal.set(lookup, "embedding_dim", int(lookup.weight.size(1)))
    if maps.into is not None:  # one lookup stores the map for all of them, so that a checkpoint has it once
        journal.set(ends.first_lookup, "in_map", maps.into)
    journal.set(ends.head, "in_features", ends.head.weight.shape[1])
    if maps.out is not None:
        journal.set(ends.head, "out_map", maps.out)


# free rows and the padding row


def _set_free_rows(ends: ModelEnds, ids: Sequence[int], journal: Journal) -> None:
    """Give the head separate rows of some tokens, with the dtype and device of its table."""
    table = ends.head.weight
    free = FreeRows(ids, table.shape[1])
    journal.set(ends.head, "free", free.to(device=table.device, dtype=table.dtype))


def _zero_padding_row(ends: ModelEnds, row: int, journal: Journal) -> None:
    """Set one row of every table to zero."""
    tables = [ends.head.weight, *(lookup.weight for _, lookup in ends.lookups)]
    for table in dict.fromkeys(tables):
        if row >= len(table):
            raise SpecError(f"pad={row}: the table has {len(table)} rows", f"choose a row below {len(table)}")
        if not table.is_meta:
            journal.later(_put_row, table, row, table.detach()[row].clone())
            _put_row(table, row, table.new_zeros(()))


@torch.no_grad()
def _put_row(table: Tensor, row: int, values: Tensor) -> None:
    """Write values into one row of a table."""
    table[row] = values
