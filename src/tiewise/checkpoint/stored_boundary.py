"""A boundary that this package saved, as the two dense tables that the model computes with.

A checkpoint stores its spec in the config, its tables and its maps; each is checked against the others. An end is the
rows of a stored table times a map, times a scale:

    input    E = in_map(table) · input_scale          output    U with h·Uᵀ = out_map(h)·tableᵀ · output_scale

    factored, projected   E = T Aᵀ            A = in_map.weight [D, k]       U = T B        B = out_map.weight [k, D]
    residual, strength s  E = T                                              U = T + s T P Q
    spd, S = C Cᵀ         E = T S⁻¹                                          U = T S

Computed in fp64 and rounded once.
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

IN_MAP, OUT_MAP = ".in_map.", ".out_map."
_SPD_MATRICES = 5  # D × D in fp64: the factor, C, its inverse, and LAPACK's copy and workspace
_OUT_PARTS = {"residual": {"out_map.p", "out_map.q"}, "spd": {"out_map.factor"}}  # by kind; else a weight

Float64: TypeAlias = NDArray[np.float64]
MapRows: TypeAlias = Callable[[Float64], Float64]


@dataclass(frozen=True)
class Dense:
    """One end's table [V, D], equal to a stored table, a map and a scale one after another."""

    table: Stored  # [V, E]
    width: int  # D
    map: MapRows | None = None  # rows [., E] to rows [., D]; None for the identity
    mapped: str = "identity"  # equal for equal maps
    scale: float = 1.0

    @property
    def mark(self) -> tuple[object, ...]:
        """Return a value that is equal for two ends with the same table. The scale is its last item."""
        return (self.table.name, self.mapped, self.scale)

    @property
    def changed(self) -> bool:
        """Return whether it differs from the stored table."""
        return self.map is not None or self.scale != 1.0

    def exact(self, start: int, stop: int) -> Float64:
        """Return rows [start, stop), not rounded yet."""
        rows = self.table.read(start, stop).astype(np.float64)
        if self.map is not None:
            rows = self.map(rows)
        return rows * self.scale

    def rounded(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows [start, stop) in the type of the stored table."""
        with np.errstate(over="ignore", invalid="ignore"):
            return rounded(self.exact(start, stop), self.table.dtype)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of the dense table, rounded."""
        step = max(1, CHUNK_BYTES // (8 * self.width))
        for start in range(0, self.table.rows, step):
            yield self.rounded(start, start + step).tobytes()


@dataclass(frozen=True)
class StoredBoundary:
    """A boundary as a checkpoint of config type `tiewise` stores it."""

    spec: BoundarySpec  # from the config
    lookup: Dense  # the input embedding
    head: Dense  # the output head
    head_name: str  # name of the tensor of a separate output table
    maps: tuple[Stored, ...]  # of both ends


class _BoundaryMaps:
    """The stored maps of both ends."""

    def __init__(self, tensors: Mapping[str, Stored], table: Stored) -> None:
        self.into = tensors.get(f"{module_of(table.name)[0]}{IN_MAP}weight")  # the input's map [D, k]
        self.out = dict[str, Stored]()  # parts of the output's map
        self.head_modules = set[str]()
        maps = list[Stored]()
        for name, tensor in tensors.items():
            is_output = OUT_MAP in name
            if is_output:
                self.out[name.rpartition(".")[2]] = tensor
                self.head_modules.add(name.partition(OUT_MAP)[0])
            if is_output or IN_MAP in name:
                maps.append(tensor)
        self.tensors = tuple(maps)

    @property
    def names(self) -> set[str]:
        """Return the maps that are stored: "in_map", and "out_map." with the part of the output's map."""
        names = {f"out_map.{part}" for part in self.out}
        if self.into is not None:
            names.add("in_map")
        return names


class _MapAxis(NamedTuple):
    """An axis of a map that a table or another map multiplies."""

    map: Stored
    axis: int
    width: int  # that it must have

    @property
    def fits(self) -> bool:
        """Return whether the map is a matrix of numbers with this width along this axis."""
        if self.map.dtype not in FLOATING or len(self.map.shape) != 2:
            return False
        return self.map.shape[self.axis] == self.width


def read_boundary(facts: Facts, backend: str) -> StoredBoundary:
    """Read the boundary of a checkpoint for a backend, one of `STORED` of the spec's options."""
    spec, needed = _read_spec(facts)
    require_options(facts, spec, backend)
    require_readable_tables(facts, "densify")
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
    output = _mapped_head(maps, head, spec)
    if "factor" in maps.out:
        lookup, output = _definite_ends(facts, maps.out["factor"], lookup, output)
    needs_one_width = spec.tables == 1 and maps.into is None
    if needs_one_width and lookup.width != output.width:
        raise _wrong(facts, f"its ends are {lookup.width} and {output.width} wide")
    lookup = replace(lookup, scale=spec.scales(lookup.width)[0])
    output = replace(output, scale=spec.scales(output.width)[1])
    return StoredBoundary(spec, lookup, output, f"{module}.weight", maps.tensors)


def _read_spec(facts: Facts) -> tuple[BoundarySpec, set[str]]:
    """Return the spec in the config, and the maps that it needs by `_BoundaryMaps.names`."""
    written = facts.config.get(SPEC)
    if not facts.is_tiewise_type or not isinstance(written, str):
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
    return spec, needed


def _head_module(facts: Facts, maps: _BoundaryMaps) -> str:
    """Return the head's module.

    It is that of the output map, else that of the stored head, else the one that the class names.
    """
    if len(maps.head_modules) > 1:
        raise _wrong(facts, f"it has {len(maps.head_modules)} output maps")
    if maps.head_modules:
        return next(iter(maps.head_modules))
    output = facts.roles.output
    name = facts.roles.output_name if output is None else output.name
    if name is None:
        raise _wrong(facts, "no output head was found")
    return module_of(name)[0]


def _multiplied_axes(maps: _BoundaryMaps, table: Stored, head: Stored) -> Iterator[_MapAxis]:
    """Yield each axis of a map that a table or another map multiplies."""
    if maps.into is not None:
        yield _MapAxis(maps.into, 1, table.shape[1])
    for part, axis in (("weight", 0), ("p", 0), ("factor", 0), ("factor", 1), ("q", 1)):
        if part in maps.out:
            yield _MapAxis(maps.out[part], axis, head.shape[1])
    if "q" in maps.out and len(maps.out["p"].shape) == 2:
        yield _MapAxis(maps.out["q"], 0, maps.out["p"].shape[1])


def _mapped_lookup(maps: _BoundaryMaps, table: Stored) -> Dense:
    """Return the input embedding without its scale: the table behind its map, if stored."""
    lookup = Dense(table, table.shape[1])
    if maps.into is None:
        return lookup
    return _linear(lookup, read_float64(maps.into).T)


def _mapped_head(maps: _BoundaryMaps, table: Stored, spec: BoundarySpec) -> Dense:
    """Return the output head without its scale: the table behind its map or correction."""
    head = Dense(table, table.shape[1])
    if "weight" in maps.out:
        return _linear(head, read_float64(maps.out["weight"]))
    if "p" not in maps.out:
        return head
    p, q = read_float64(maps.out["p"]), read_float64(maps.out["q"])
    if not p.any() or not q.any():  # as training starts: the correction is zero
        return head

    def corrected(rows: Float64) -> Float64:
        return rows + spec.strength * ((rows @ p) @ q)  # P Q is never formed

    return replace(head, map=corrected, mapped="correction")


def _definite_ends(facts: Facts, stored_factor: Stored, lookup: Dense, head: Dense) -> tuple[Dense, Dense]:
    """Return both ends behind a positive definite map: S⁻¹ at the input, S at the head."""
    require_memory(8 * _SPD_MATRICES * head.width**2, f"{facts.path}: a positive definite map {head.width} wide")
    factor = read_float64(stored_factor)  # C below its diagonal, and log C on it
    if not np.tril(factor).any():  # as training starts: C is the identity
        return lookup, head
    c: NDArray[Any] = np.tril(factor, -1) + np.diag(np.exp(np.diagonal(factor)))
    try:
        inverse: Float64 = np.linalg.inv(c)
    except np.linalg.LinAlgError:
        raise _wrong(facts, f"{short(stored_factor.name)} has no inverse") from None

    def divided(rows: Float64) -> Float64:
        return (rows @ inverse.T) @ inverse

    def multiplied(rows: Float64) -> Float64:
        product: Float64 = (rows @ c) @ c.T
        return product

    lookup = replace(lookup, width=head.width, map=divided, mapped="inverse")
    return lookup, replace(head, map=multiplied, mapped="definite")


def _linear(end: Dense, matrix: Float64) -> Dense:
    """Return an end behind the map of its rows by a matrix [E, D]."""
    digest = hashlib.sha256(matrix.tobytes()).hexdigest()

    def multiplied(rows: Float64) -> Float64:
        product: Float64 = rows @ matrix
        return product

    return replace(end, width=matrix.shape[1], map=multiplied, mapped=f"{matrix.shape} {digest}")


def _wrong(facts: Facts, problem: str) -> CheckpointError:
    """Return the error on a boundary that its spec, tables and maps contradict."""
    remedy = "it was not saved by tiewise, or is damaged: take it from its source again"
    return CheckpointError(f"{facts.path}: its boundary {short(facts.config.get(SPEC))}: {problem}", remedy)
