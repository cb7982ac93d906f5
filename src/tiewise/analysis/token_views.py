"""The tables at a checkpoint's two ends, as they are stored and as the model meets them behind their maps.

A factored table is looked at twice: its stored rows [V, k], and what its maps make of them at each end [V, D].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tiewise.analysis.ends import Ends, MappedTable, ends_of
from tiewise.analysis.tables import Array, Behind, StoredTable, Table
from tiewise.checkpoint.families import module_of
from tiewise.checkpoint.hf_folder import Folder
from tiewise.checkpoint.roles import find_roles
from tiewise.checkpoint.stored import Reader, Stored

BOTH, INPUT, OUTPUT = "both ends", "input", "output"
OUTWARD = "project_out"  # OPT's; every other map that families have between table and body is the input's


@dataclass(frozen=True)
class View:
    """One table to look at.

    Args:
        name: "both ends", "input" or "output", for a table behind its map followed by "after its map".
        table: its rows.
        stored: the tensor that it is; None for rows behind a map.
    """

    name: str
    table: Table
    stored: Stored | None = None


def views_of(folder: Folder) -> tuple[tuple[View, ...], tuple[str, ...]]:
    """Return the tables of both ends, stored ones first, and notes on what a reader must know of them.

    Raises:
        CheckpointError: no input table, no output head, or a table that is quantised.
    """
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


def _met(ends: Ends) -> tuple[tuple[str, Table], ...]:
    return ((BOTH, ends.input),) if ends.tied else ((INPUT, ends.input), (OUTPUT, ends.output))


def _is_mapped(table: Table) -> bool:
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
