"""The direct path of a checkpoint: its two tables, and the operations between them.

Tables are opened, not read; only vectors (a norm's weight, a bias) are read. The operations before the head are exact
for families whose record has a `final_norm`. Tests compare each with transformers' own class without layers, whose
logits are the direct path. For any other family nothing is assumed: its tables are multiplied as they are stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tiewise.checkpoint.claims import BASE_TYPE, finite_number
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.families import family
from tiewise.checkpoint.family_record import LAYER, NONE, FinalNorm, module_of
from tiewise.checkpoint.hf_folder import Folder
from tiewise.checkpoint.stored import FLOATING, Stored, read_float64, rounded
from tiewise.checkpoint.stored_boundary import StoredBoundary, read_boundary
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError, DataError
from tiewise.core.spec_options import INSPECT
from tiewise.inspection.tables.model_tables import Array, Ids, StoredTable, TokenTable, dense_table, stored_ends


@dataclass(frozen=True)
class Norm:
    """The normalisation between the body and the head."""

    kind: str = NONE  # "none"; "rms", x / √(mean x² + eps); "layer", (x − mean x) / √(var x + eps)
    eps: float = 0.0  # eps of the formulas above
    gain: Array | None = None  # factor of each element [E]; None for ones; applied also if `kind` is "none"
    shift: Array | None = None  # added by element [E], after the gain; None for zeros


@dataclass(frozen=True)
class DirectPath:
    """Both tables and all operations between them."""

    input: TokenTable  # input table [V, E]
    output: TokenTable  # output table [V', E]; the same object if the model is tied
    norm: Norm = Norm()  # the model's final norm, applied to the scaled input row
    input_scale: float = 1.0  # factor of every input row
    output_scale: float = 1.0  # factor of every logit
    bias: Array | None = None  # added to the logits, after the scale [V']
    softcap: float | None = None  # c · tanh(logit / c); None: no soft-cap
    notes: tuple[str, ...] = ()  # operations that were applied, and parts of the model that are left out

    def __post_init__(self) -> None:
        if self.input.width != self.output.width:
            problem = f"the input table is {self.input.width} wide, the output table {self.output.width}"
            raise DataError(problem, "only tables of one width have a direct path")
        for vector in (self.norm.gain, self.norm.shift):
            if vector is not None and vector.shape != (self.input.width,):
                raise DataError(f"a norm of shape {vector.shape}", f"the tables are {self.input.width} wide")
        if self.bias is not None and self.bias.shape != (self.output.rows,):
            raise DataError(f"a bias of shape {self.bias.shape}", f"the output table has {self.output.rows:,} rows")

    @property
    def tied(self) -> bool:
        """Return True if both ends are one table."""
        return self.input is self.output

    @property
    def rows(self) -> int:
        """Return the number of tokens that both tables have: the first rows of the longer one."""
        return min(self.input.rows, self.output.rows)

    @property
    def linear(self) -> DirectPath:
        """Return the path without division by the size of rows, W_E diag(g) W_Uᵀ.

        Gain and scales remain.
        """
        return replace(self, norm=replace(self.norm, kind=NONE))

    @property
    def weights(self) -> Array:
        """Return the factor of each element between `base` rows and output rows [E]."""
        scale = self.output_scale
        if self.norm.kind == NONE:  # otherwise the norm applies the input scale
            scale *= self.input_scale
        factors: Array = np.full(self.input.width, scale)
        if self.norm.gain is not None:
            factors = factors * self.norm.gain
        return factors

    def base(self, rows: Array) -> Array:
        """Return input rows [n, E] as they are before `weights`.

        They are unchanged in a linear path, otherwise scaled and normalised.
        """
        if self.norm.kind == NONE:
            return rows
        rows = rows * self.input_scale
        if self.norm.kind == LAYER:
            rows = rows - rows.mean(1, keepdims=True)
        normalised: Array = rows / np.sqrt(np.square(rows).mean(1, keepdims=True) + self.norm.eps)
        return normalised

    def left(self, rows: Array) -> Array:
        """Return the rows of A for input rows [n, E].

        The norm's shift is left out, because it is the same for every token.
        """
        return self.base(rows) * self.weights

    def logits(self, dots: Array, output_rows: Array, indices: slice | Ids) -> Array:
        """Return the head's logits from dot products of A with some output rows.

        `indices` are the indices of these rows in the output table. The logits include the norm's shift, which does not
        depend on
        the input token, the bias and the soft-cap.
        """
        if self.norm.shift is not None:
            dots = dots + output_rows @ self.norm.shift * self.output_scale
        if self.bias is not None:
            dots = dots + self.bias[indices]
        if self.softcap is not None:
            dots = self.softcap * np.tanh(dots / self.softcap)
        return dots


def open_path(folder: Folder) -> DirectPath:
    """Open the direct path of a checkpoint.

    `notes` name the parts of the model that the path applies and those that it leaves out.

    Raises:
        CheckpointError: a table is missing, quantised or mapped to another width, or the final norm is not stored.
    """
    return path_of(Facts(folder))


def path_of(facts: Facts) -> DirectPath:
    """Open the direct path of a checkpoint from its facts.

    Raises as `open_path`.
    """
    boundary, boundary_softcap = None, None
    if facts.is_tiewise_type:
        boundary = read_boundary(facts, INSPECT)
        boundary_softcap = boundary.spec.softcap
        tables = _boundary_tables(boundary)
    else:
        tables = _plain_tables(facts)
    ending = final_norm_of(facts)
    norm, norm_note = _applied_norm(facts, ending, tables)
    scales = _scales(facts, ending, tables)
    notes = [norm_note, *scales.notes]
    stored_bias, bias = _head_bias(facts, tables.target.rows), None
    if stored_bias is not None:
        bias = _vector(stored_bias, tables.target.rows)
        notes.append(f"bias {short(stored_bias.name)} applied")
    if boundary is not None:
        notes.append("each end is taken behind its map and scale")
    softcap = scales.softcap
    if boundary_softcap is not None:
        if softcap is not None:
            problem = f"{facts.path}: two soft-caps, the boundary's and the family's"
            raise CheckpointError(problem, "its direct path is not measured")
        softcap = boundary_softcap
        notes.append(f"soft-cap {softcap:g} applied")
    if facts.roles.positions:
        notes.append("position rows are left out")
    return DirectPath(
        tables.source,
        tables.target,
        norm,
        scales.input,
        scales.output,
        bias,
        softcap,
        tuple(notes),
    )


@dataclass(frozen=True)
class _PathTables:
    """Both tables of a path."""

    stored: Stored  # the input table as it is stored
    source: TokenTable  # input rows as the body receives them
    target: TokenTable  # output rows; the same object if the model is tied


def _plain_tables(facts: Facts) -> _PathTables:
    """Open the tables of a model that has no map between them and its body.

    Raises:
        CheckpointError: the model has a map.
    """
    table, head = stored_ends(facts)
    maps = facts.roles.maps
    if maps:
        problem = f"{facts.path}: {short(maps[0].name)} stands between a table and the body"
        raise CheckpointError(problem, "give a model whose tables are as wide as its body")
    source = StoredTable(table)
    if head is None:
        return _PathTables(table, source, source)
    return _PathTables(table, source, StoredTable(head))


def _boundary_tables(boundary: StoredBoundary) -> _PathTables:
    """Open the tables of a boundary that this package stored, after its maps and scales."""
    lookup, head = boundary.lookup, boundary.head
    source = dense_table(lookup)
    if lookup.mark == head.mark:
        return _PathTables(lookup.table, source, source)
    return _PathTables(lookup.table, source, dense_table(head))


@dataclass(frozen=True)
class _Scales:
    """Scales and soft-cap of a family, from its record and the config."""

    input: float
    output: float
    softcap: float | None
    notes: tuple[str, ...]  # one text for each scale that is applied, and for each of the config that is not


def _scales(facts: Facts, ending: FinalNorm | None, tables: _PathTables) -> _Scales:
    """Read the scales that the family's class applies.

    Scales of an unsupported family are named in a note and not applied.
    """
    scalars = {key.rpartition(".")[2]: value for key, value in facts.roles.scalars.items()}
    ending = ending or FinalNorm()  # whose class applies no scale
    applied = {key: value for key, value in scalars.items() if key in ending.scalars}
    input_scale = applied.get("embedding_multiplier", 1.0)
    if ending.root_width:
        input_scale *= _root(tables.source.width, tables.stored)
    divisor = applied.get("logits_scaling") or 1.0
    output_scale = applied.get("logit_scale", 1.0) / divisor
    softcap = applied.get("final_logit_softcapping") or None
    notes = []
    if input_scale != 1:
        notes.append(f"input rows times {input_scale:g}")
    if output_scale != 1:
        notes.append(f"logits times {output_scale:g}")
    if softcap is not None:
        notes.append(f"soft-cap {softcap:g} applied")
    for key, value in scalars.items():
        if key not in applied:
            notes.append(f"{key} = {value:g} of the config is not applied")
    return _Scales(input_scale, output_scale, softcap, tuple(notes))


def _head_bias(facts: Facts, rows: int) -> Stored | None:
    """Return the head's stored bias, one number per row, or None.

    The bias stored next to the head's weight is preferred, then the first that fits.
    """
    head, _ = module_of(facts.roles.output_name or "")
    fitting = [bias for bias in facts.roles.biases if bias.shape in ((rows,), (1, rows))]
    return min(fitting, key=lambda bias: bias.name != f"{head}.bias", default=None)


def final_norm_of(facts: Facts) -> FinalNorm | None:
    """Return the record of the final norm of a checkpoint's family; None if it has none."""
    return family(_family(facts)[1]).final_norm


def _applied_norm(facts: Facts, ending: FinalNorm | None, tables: _PathTables) -> tuple[Norm, str]:
    """Return the norm before the head, and a note about it.

    `ending` is None if the family has no record of its final norm.
    """
    level, model_type = _family(facts)
    if ending is None:
        return Norm(), _without_norm(facts, model_type)
    norm = _norm(facts, ending, level, tables.stored, tables.source.width)
    if norm.kind == NONE:
        return norm, "no final norm"
    return norm, f"{norm.kind} norm applied, eps {norm.eps:g}"


def _without_norm(facts: Facts, model_type: Any) -> str:
    """Return a note why no final norm is applied.

    The family is unknown, or its record has no final norm.
    """
    if not facts.family.has_facts and not family(model_type).has_facts:
        tables = f"its tables were identified by {facts.roles.source}"
        return f"{facts.family.unknown_message}: no final norm is applied, and {tables}"
    named = short(model_type) if isinstance(model_type, str) else "of no stated type"
    return f"the final norm of a model {named} is not known: none is applied"


def _family(facts: Facts) -> tuple[Mapping[str, Any], Any]:
    """Return the part of the config that describes the text model, and its family."""
    level = facts.levels.get(facts.text.level, facts.config)
    return level, level.get(BASE_TYPE if facts.is_tiewise_type else "model_type")


def _root(width: int, table: Stored) -> float:
    """Return √E as Gemma multiplies rows by it.

    It is rounded to the type of the table: 34.0 for E = 1,152 in bf16.
    """
    root = math.sqrt(width)
    if table.dtype not in FLOATING:
        return root
    return float(rounded(np.array([root]), table.dtype)[0])


def _norm(facts: Facts, ending: FinalNorm, level: Mapping[str, Any], table: Stored, width: int) -> Norm:
    """Return the final norm, with its stored vectors."""
    norm = Norm(ending.kind, _epsilon(ending, level))
    if not ending.stored:
        return norm
    if level.get("do_layer_norm_before") is False:  # OPT-350M normalises inside its layers only
        return Norm()
    table_module, _ = module_of(table.name)
    body, _ = module_of(table_module)
    name = f"{body}.{ending.norm}" if body else ending.norm
    weight = facts.folder.tensors.get(f"{name}.weight")
    if weight is None:
        problem = f"{facts.path}: the final norm {short(name)}.weight is not stored"
        raise CheckpointError(problem, "`tiewise check` says what is missing")
    gain = _vector(weight, width)
    if ending.plus_one:
        gain = gain + 1.0
    norm = replace(norm, gain=gain)
    shift = facts.folder.tensors.get(f"{name}.bias")
    if shift is None:
        return norm
    return replace(norm, shift=_vector(shift, width))


def _epsilon(ending: FinalNorm, level: Mapping[str, Any]) -> float:
    """Return the eps of a final norm: the config's, else the family's.

    The config's eps is ignored unless it is a number of 0 or more.
    """
    if not ending.eps_key:
        return ending.eps
    eps = finite_number(level.get(ending.eps_key))
    if eps is None or eps < 0:
        return ending.eps
    return eps


def _vector(tensor: Stored, size: int) -> Array:
    """Read a stored vector [size]; CheckpointError if it has another shape."""
    if tensor.shape not in ((size,), (1, size)):
        problem = f"{tensor.path}: {short(tensor.name)} has shape {list(tensor.shape)}, not [{size}]"
        raise CheckpointError(problem, "`tiewise check` says what does not fit")
    return read_float64(tensor).reshape(size)
