"""Boundary that tiewise saved, as the two dense tables of the model.

A checkpoint stores the spec in its config, the tables and the maps. `read_boundary` compares them with each other. An
end is the rows of a stored table times a map, times a scale:

    input    E = in_map(table) · input_scale          output    U with h·Uᵀ = out_map(h)·tableᵀ · output_scale

    factored, projected   E = T Aᵀ            A = in_map.weight [D, k]       U = T B        B = out_map.weight [k, D]
    residual, strength s  E = T                                              U = T + s T P Q
    spd, S = C Cᵀ         E = T S⁻¹                                          U = T S
    free=K, tokens i      E = T                                              U = T, U[i] = T[i] + Δ

All products are computed in fp64 and rounded once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.claims import SPEC
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.family_record import module_of
from tiewise.checkpoint.numeric_ends import require_options, require_readable_tables
from tiewise.checkpoint.stored import CHUNK_BYTES, FLOATING, Stored, read_float64, rounded
from tiewise.checkpoint.untrusted import require_memory, short
from tiewise.core.errors import CheckpointError, SpecError
from tiewise.core.spec import BoundarySpec

IN_MAP, OUT_MAP, FREE = ".in_map.", ".out_map.", ".free."
_SPD_MATRICES = 5  # D × D in fp64: the factor, C, its inverse, and LAPACK's copy and workspace
# {kind of a spec: stored parts of its output map}; any other kind has "out_map.weight"
_OUT_PARTS = {"residual": {"out_map.p", "out_map.q"}, "spd": {"out_map.factor"}}

Float64: TypeAlias = NDArray[np.float64]
MapRows: TypeAlias = Callable[[Float64], Float64]


class FreeTokens(NamedTuple):
    """Tokens with separate output rows, as `+free=K` stores them."""

    ids: NDArray[np.int64]  # [K], ascending
    correction: Float64  # Δ [K, D]

    def add(self, rows: Float64, start: int) -> None:
        """Add Δ to those of the rows [start, …) in place."""
        first, last = np.searchsorted(self.ids, (start, start + len(rows)))
        rows[self.ids[first:last] - start] += self.correction[first:last]


@dataclass(frozen=True)
class Dense:
    """Dense table [V, D] of one end: a stored table times a map, times a scale."""

    table: Stored  # stored table [V, E]
    width: int  # hidden width D
    map: MapRows | None = None  # map of rows [., E] to rows [., D]; None for the identity
    map_key: str = "identity"  # equal for equal maps
    scale: float = 1.0
    free: FreeTokens | None = None  # tokens with separate rows

    @property
    def mark(self) -> tuple[object, ...]:
        """Return a key that is equal for equal ends: (table, map, scale)."""
        return (self.table.name, self.map_key, self.scale)

    @property
    def changed(self) -> bool:
        """Return whether the end differs from the stored table."""
        return (self.map, self.scale, self.free) != (None, 1.0, None)

    def exact(self, start: int, stop: int) -> Float64:
        """Return rows [start, stop) in fp64, not rounded."""
        rows = self.table.read(start, stop).astype(np.float64)
        if self.map is not None:
            rows = self.map(rows)
        if self.free is not None:
            self.free.add(rows, start)
        return rows * self.scale

    def rounded(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows [start, stop), rounded to the type of the stored table."""
        with np.errstate(over="ignore", invalid="ignore"):
            return rounded(self.exact(start, stop), self.table.dtype)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the rounded dense table, in row order."""
        step = max(1, CHUNK_BYTES // (8 * self.width))
        for start in range(0, self.table.rows, step):
            yield self.rounded(start, start + step).tobytes()


@dataclass(frozen=True)
class StoredBoundary:
    """Boundary as a checkpoint with model_type "tiewise" stores it."""

    spec: BoundarySpec  # spec in the config
    lookup: Dense  # input embedding
    head: Dense  # output head
    head_name: str  # tensor name of a separate output table
    maps: tuple[Stored, ...]  # stored maps of both ends


class _BoundaryMaps:
    """Stored maps of both ends."""

    def __init__(self, tensors: Mapping[str, Stored], table: Stored) -> None:
        self.into = tensors.get(f"{module_of(table.name)[0]}{IN_MAP}weight")  # input map [D, k]
        self.out = dict[str, Stored]()  # {part: tensor} of the output map
        self.free = dict[str, Stored]()  # "rows" and "ids" of the free rows
        self.head_modules = set[str]()  # modules with an output map or free rows
        maps = list[Stored]()
        for name, tensor in tensors.items():
            is_output = OUT_MAP in name
            if is_output:
                self.out[name.rpartition(".")[2]] = tensor
                self.head_modules.add(name.partition(OUT_MAP)[0])
            is_free = FREE in name
            if is_free:
                self.free[name.rpartition(".")[2]] = tensor
                self.head_modules.add(name.partition(FREE)[0])
            if is_output or is_free or IN_MAP in name:
                maps.append(tensor)
        self.tensors = tuple(maps)

    @property
    def names(self) -> set[str]:
        """Return the names of stored maps: "in_map", and "out_map." or "free." with each part."""
        names = {f"out_map.{part}" for part in self.out} | {f"free.{part}" for part in self.free}
        if self.into is not None:
            names.add("in_map")
        return names


class _MapAxis(NamedTuple):
    """Axis of a map that a table or another map multiplies."""

    map: Stored
    axis: int
    width: int  # required length of the axis

    @property
    def fits(self) -> bool:
        """Return whether the map is a floating-point matrix with the required width."""
        if self.map.dtype not in FLOATING or len(self.map.shape) != 2:
            return False
        return self.map.shape[self.axis] == self.width


def read_boundary(facts: Facts, backend: str) -> StoredBoundary:
    """Read the boundary of a checkpoint.

    Args:
        facts: the checkpoint.
        backend: reader whose support for the spec's options is checked; see `STORED` in `core.spec_options`.

    Raises:
        CheckpointError: the config has no spec, the backend lacks an option, or spec, tables and maps disagree.
    """
    spec, needed = _read_spec(facts)
    require_options(facts, spec, backend)
    require_readable_tables(facts, "multiply out")
    table = facts.roles.input
    assert table is not None, "require_readable_tables raises without an input table"

    maps = _BoundaryMaps(facts.folder.tensors, table)
    module = _head_module(facts, maps)
    head = facts.folder.tensors.get(f"{module}.weight") if spec.tables == 2 else table
    if head is None:
        raise _wrong(facts, f"{short(module)}.weight is missing")
    if maps.names != needed:
        stored = ", ".join(sorted(maps.names)) or "none"
        raise _wrong(facts, f"{spec} does not have the maps that are stored ({stored})")
    for multiplied in _multiplied_axes(maps, table, head):
        if not multiplied.fits:
            tensor = multiplied.map
            raise _wrong(facts, f"{short(tensor.name)} is {tensor.dtype} {list(tensor.shape)}")

    lookup = _mapped_lookup(maps, table)
    output = _with_free_tokens(facts, maps.free, spec, _mapped_head(maps, head, spec))
    if "factor" in maps.out:
        lookup, output = _definite_ends(facts, maps.out["factor"], lookup, output)
    needs_one_width = spec.tables == 1 and maps.into is None
    if needs_one_width and lookup.width != output.width:
        raise _wrong(facts, f"its ends are {lookup.width} and {output.width} wide")
    lookup = replace(lookup, scale=spec.scales(lookup.width)[0])
    output = replace(output, scale=spec.scales(output.width)[1])
    return StoredBoundary(spec, lookup, output, f"{module}.weight", maps.tensors)


def _read_spec(facts: Facts) -> tuple[BoundarySpec, set[str]]:
    """Return the spec in the config, and the names (`_BoundaryMaps.names`) of the maps that it needs."""
    written = None
    if facts.boundary_level is not None:
        written = facts.levels[facts.boundary_level].get(SPEC)
    if not isinstance(written, str):
        remedy = "this is for checkpoints whose model_type is tiewise"
        raise CheckpointError(f"{facts.path}: its tables are plain already", remedy)
    width = facts.text.hidden_size or facts.claims.deciding.hidden_size or 2**62
    try:
        spec = BoundarySpec.parse(written)
        needs_in, needs_out = spec.maps(width)
    except SpecError as error:
        raise _wrong(facts, short(error.problem, 120)) from None
    needed = set(_OUT_PARTS.get(spec.kind, ()))
    if needs_out and not needed:
        needed.add("out_map.weight")
    if needs_in:
        needed.add("in_map")
    if spec.free is not None:
        needed |= {"free.rows", "free.ids"}
    return spec, needed


def _head_module(facts: Facts, maps: _BoundaryMaps) -> str:
    """Return the head's module: by the output map, else the stored head, else the class.

    It has its name in a saved file. transformers renames the head of some composite models when it saves them, and
    leaves the name of the map.
    """
    if len(maps.head_modules) > 1:
        raise _wrong(facts, f"it has {len(maps.head_modules)} output maps")
    if maps.head_modules:
        return module_of(facts.saved_name(f"{next(iter(maps.head_modules))}.weight"))[0]
    output = facts.roles.output
    name = facts.roles.output_name if output is None else output.name
    if name is None:
        raise _wrong(facts, "no output head was found")
    return module_of(name)[0]


def _multiplied_axes(maps: _BoundaryMaps, table: Stored, head: Stored) -> Iterator[_MapAxis]:
    """Yield every axis of a map that a table or another map multiplies."""
    if maps.into is not None:
        yield _MapAxis(maps.into, 1, table.shape[1])
    for part, axis in (("weight", 0), ("p", 0), ("factor", 0), ("factor", 1), ("q", 1)):
        if part in maps.out:
            yield _MapAxis(maps.out[part], axis, head.shape[1])
    if "q" in maps.out and len(maps.out["p"].shape) == 2:
        yield _MapAxis(maps.out["q"], 0, maps.out["p"].shape[1])


def _mapped_lookup(maps: _BoundaryMaps, table: Stored) -> Dense:
    """Return the input embedding without its scale: the table times its stored map, if any."""
    lookup = Dense(table, table.shape[1])
    if maps.into is None:
        return lookup
    return _linear(lookup, read_float64(maps.into).T)


def _mapped_head(maps: _BoundaryMaps, table: Stored, spec: BoundarySpec) -> Dense:
    """Return the output head without its scale: the table times its map, or plus its correction."""
    head = Dense(table, table.shape[1])
    if "weight" in maps.out:
        return _linear(head, read_float64(maps.out["weight"]))
    if "p" not in maps.out:
        return head
    p, q = read_float64(maps.out["p"]), read_float64(maps.out["q"])
    if not p.any() or not q.any():  # initial values: the correction is zero
        return head

    def add_correction(rows: Float64) -> Float64:
        """Return T + s T P Q for rows of T."""
        return rows + spec.strength * ((rows @ p) @ q)  # P Q is never formed

    return replace(head, map=add_correction, map_key="correction")


def _with_free_tokens(facts: Facts, parts: Mapping[str, Stored], spec: BoundarySpec, head: Dense) -> Dense:
    """Return the head with its free rows; refuse wrong shapes, types and ids."""
    if not parts:
        return head
    rows, ids = parts["rows"], parts["ids"]
    stored, expected = (rows.shape, ids.shape), ((spec.free, head.width), (spec.free,))
    if stored != expected or rows.dtype not in FLOATING or ids.dtype != "I32":
        raise _wrong(facts, f"{short(rows.name)} is {rows.dtype} {list(rows.shape)}, its ids {ids.dtype}")
    tokens = ids.read().astype(np.int64)
    steps = np.diff(tokens, prepend=-1, append=head.table.rows)
    if steps.min() < 1:
        raise _wrong(facts, f"{short(ids.name)} are not ascending tokens")
    return replace(head, free=FreeTokens(tokens, read_float64(rows)), map_key="free")


def _definite_ends(facts: Facts, stored_factor: Stored, lookup: Dense, head: Dense) -> tuple[Dense, Dense]:
    """Return both ends times the positive definite map: S⁻¹ at the input, S at the head."""
    require_memory(8 * _SPD_MATRICES * head.width**2, f"{facts.path}: a positive definite map {head.width} wide")
    factor = read_float64(stored_factor)  # C below its diagonal, and log C on it
    if not np.tril(factor).any():  # initial values: C is the identity
        return lookup, head
    c: NDArray[Any] = np.tril(factor, -1) + np.diag(np.exp(np.diagonal(factor)))
    try:
        inverse: Float64 = np.linalg.inv(c)
    except np.linalg.LinAlgError:
        raise _wrong(facts, f"{short(stored_factor.name)} has no inverse") from None

    def divide(rows: Float64) -> Float64:
        """Return T S⁻¹ for rows of T."""
        return (rows @ inverse.T) @ inverse

    def multiply(rows: Float64) -> Float64:
        """Return T S for rows of T."""
        product: Float64 = (rows @ c) @ c.T
        return product

    lookup = replace(lookup, width=head.width, map=divide, map_key="inverse")
    return lookup, replace(head, map=multiply, map_key="definite")


def _linear(end: Dense, matrix: Float64) -> Dense:
    """Return an end whose rows are multiplied by a matrix [E, D]."""
    digest = hashlib.sha256(matrix.tobytes()).hexdigest()

    def multiply(rows: Float64) -> Float64:
        """Return the product of rows and the matrix."""
        product: Float64 = rows @ matrix
        return product

    return replace(end, width=matrix.shape[1], map=multiply, map_key=f"{matrix.shape} {digest}")


def _wrong(facts: Facts, problem: str) -> CheckpointError:
    """Return the error on a boundary that its spec, tables and maps contradict."""
    remedy = "it was not saved by tiewise, or is damaged: take it from its source again"
    return CheckpointError(f"{facts.path}: its boundary {short(facts.config.get(SPEC))}: {problem}", remedy)
