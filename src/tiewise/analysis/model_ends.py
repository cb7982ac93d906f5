"""The two tables of a checkpoint as its model meets them, or the reason why it does not have two.

The tables at a checkpoint's two ends, as they are stored and as the model meets them behind their maps.

A factored table is looked at twice: its stored rows [V, k], and what its maps make of them at each end [V, D].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.analysis.row_pairs import texts_of
from tiewise.analysis.token_table import Array, Behind, StoredTable, TokenTable
from tiewise.checkpoint.facts import SPEC, Facts
from tiewise.checkpoint.families import module_of
from tiewise.checkpoint.hf_folder import Folder
from tiewise.checkpoint.numeric_ends import Dense, read_boundary
from tiewise.checkpoint.roles import find_roles
from tiewise.checkpoint.stored import Reader, Stored
from tiewise.checkpoint.table_scans import scan_rows
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError
from tiewise.core.progress import doing


class MappedTable(Behind):
    """A stored table [V, E] behind its map and scale, [V, D]."""

    def __init__(self, dense: Dense) -> None:
        super().__init__(StoredTable(dense.table), self._mapped, dense.width)
        self.dense = dense

    def _mapped(self, rows: Array) -> Array:
        return (rows if self.dense.map is None else self.dense.map(rows)) * self.dense.scale


@dataclass(frozen=True)
class Ends:
    """Both ends of one model."""

    folder: Folder  # where they lie
    input: TokenTable  # the input table [V, D]
    output: TokenTable  # the output table [V', D']; the same object as `input` where the model is tied
    # the one stored table [V, E] that both ends read, directly or through maps; None where there are two
    shared: TokenTable | None
    stored: tuple[Stored, ...]  # the stored tensors behind them, one or two, the input's first
    notes: tuple[str, ...] = ()  # what a reader must know of these tables

    @property
    def tied(self) -> bool:
        """Whether both ends meet the same rows."""
        return self.input is self.output

    @property
    def names(self) -> tuple[str, str]:
        """Names of the stored tensors of the input and of the output."""
        return short(self.stored[0].name), short(self.stored[-1].name)

    @property
    def tables(self) -> tuple[tuple[str, TokenTable], ...]:
        """(which end, table): `input` and `output`, or the one `table` of a tied model."""
        return (("table", self.input),) if self.tied else (("input", self.input), ("output", self.output))

    def texts(self) -> list[str | None]:
        """Text of each row's token, as its vocabulary spells it."""
        return texts_of(self.folder, max(self.input.rows, self.output.rows))

    def unusable(self) -> NDArray[np.bool_]:
        """Mark rows that say nothing of their token [V]: zero, repeated or not finite, in either table. Reads both."""
        mask = np.zeros(max(self.input.rows, self.output.rows), bool)
        for tensor in self.stored:
            with doing(f"rows of {short(tensor.name)}", tensor.nbytes):
                found = scan_rows(tensor)
            for rows in (found.not_finite, found.zero, *found.repeated):
                mask[list(rows)] = True
        return mask


def ends_of(folder: Folder) -> Ends:
    """Find the two ends of a checkpoint. A boundary that this package stored is met through its maps and scales.

    Raises:
        CheckpointError: no input table, no output head, or a table that is quantised.
    """
    facts = Facts(folder)
    return _own_ends(facts) if facts.is_own else _plain_ends(facts)


def stored_ends(facts: Facts) -> tuple[Stored, Stored | None]:
    """(input table, output table or None where the model is tied), as they are stored."""
    roles, path = facts.roles, facts.path
    if roles.input is None:
        raise CheckpointError(f"{path}: no input table is stored", "`tiewise check` says what is")
    if roles.quantised_input or roles.quantised_output:
        raise CheckpointError(f"{path}: a table is quantised", "give the checkpoint that it was made from")
    if roles.output is not None:
        same = facts.ends is not None and facts.ends.equal
        return roles.input, None if same else roles.output
    if roles.headless:
        raise CheckpointError(f"{path}: a model without an output head", "give one with a token head")
    if facts.tied is False:
        raise CheckpointError(f"{path}: it says untied and stores no head", "`tiewise check` says how to repair it")
    return roles.input, None


def _plain_ends(facts: Facts) -> Ends:
    table, head = stored_ends(facts)
    roles, notes = facts.roles, []
    if roles.maps:
        notes.append(f"{short(roles.maps[0].name)} stands between a table and the body: tables are taken as stored")
    if head is not None and facts.tied:
        notes.append("the config says tied, and two different tables are stored: both are taken as stored")
    source = StoredTable(table)
    target = source if head is None else StoredTable(head)
    stored = (table,) if head is None else (table, head)
    return Ends(facts.folder, source, target, source if head is None else None, stored, tuple(notes))


def _own_ends(facts: Facts) -> Ends:
    boundary = read_boundary(facts)
    lookup, head = boundary.lookup, boundary.head
    one = lookup.table.name == head.table.name
    source = dense_table(lookup)
    # the last part of a mark is the scale, which no angle between rows sees
    target = source if one and lookup.mark[:-1] == head.mark[:-1] else dense_table(head)
    notes = []
    if lookup.map is not None or head.map is not None:
        how = "one stored table" if one else "two stored tables"
        written = short(facts.config.get(SPEC))
        notes.append(f"{written}: {how} {lookup.table.shape[1]} wide; each end is taken behind its map")
    shared = StoredTable(lookup.table) if one else None
    stored = (lookup.table,) if one else (lookup.table, head.table)
    return Ends(facts.folder, source, target, source if source is target else shared, stored, tuple(notes))


def dense_table(dense: Dense) -> TokenTable:
    """Return one end of a stored boundary as its model meets it, rows made as they are read."""
    return MappedTable(dense) if dense.changed else StoredTable(dense.table)


BOTH, INPUT, OUTPUT = "both ends", "input", "output"
OUTWARD = "project_out"  # OPT's; every other map that families have between table and body is the input's


@dataclass(frozen=True)
class View:
    """One table to look at."""

    name: str  # "both ends", "input" or "output", for a table behind its map followed by "after its map"
    table: TokenTable  # its rows
    stored: Stored | None = None  # the tensor that it is; None for rows behind a map


def views_of(folder: Folder) -> tuple[tuple[View, ...], tuple[str, ...]]:
    """Return the tables of both ends, stored ones first, and notes on what a reader must know of them."""
    ends = ends_of(folder)
    names = (BOTH,) if len(ends.stored) == 1 else (INPUT, OUTPUT)
    stored = [View(name, StoredTable(tensor), tensor) for name, tensor in zip(names, ends.stored, strict=True)]
    own = [View(f"{name} after its map", table) for name, table in _met(ends) if _is_mapped(table)]
    foreign = find_roles(folder.tensors, folder.config).maps if not own else ()
    mapped = [view for tensor in foreign if (view := _foreign(folder, stored, tensor)) is not None]
    notes = list(ends.notes)
    if mapped:
        notes.append("position rows and norms between a table and its map are left out")
    return (*stored, *own, *mapped), tuple(notes)


def _met(ends: Ends) -> tuple[tuple[str, TokenTable], ...]:
    return ((BOTH, ends.input),) if ends.tied else ((INPUT, ends.input), (OUTPUT, ends.output))


def _is_mapped(table: TokenTable) -> bool:
    """Whether there is a map, and not only a scale, which changes no direction."""
    return isinstance(table, MappedTable) and table.dense.map is not None


def _foreign(folder: Folder, stored: list[View], found: Stored) -> View | None:
    """Rows behind a linear map [out, in] of the family's own; None where it fits no table."""
    module, parameter = module_of(found.name)
    outward = module.rpartition(".")[2] == OUTWARD
    view = stored[-1 if outward else 0]
    if parameter != "weight" or found.shape[0 if outward else 1] != view.table.width:
        return None
    matrix = _values(found) if outward else _values(found).T
    bias = None if outward else folder.tensors.get(f"{module}.bias")
    shift = _values(bias) if bias is not None and bias.shape == matrix.shape[1:] else np.zeros(matrix.shape[1])
    mapped = Behind(view.table, lambda rows: rows @ matrix + shift, matrix.shape[1])
    return View(f"{OUTPUT if outward else INPUT} after its map", mapped)


def _values(tensor: Stored) -> Array:
    with Reader(tensor) as reader:
        return reader.wide().astype(np.float64)
