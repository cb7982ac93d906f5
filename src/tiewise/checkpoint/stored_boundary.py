"""A boundary that this package saved: the spec in its config, its tables and its maps, each held against the others.

Both ends are met as the model meets them, rows of a stored table times a map, times a scale:

    input    E = in_map(table) · input_scale          output    U with h·Uᵀ = out_map(h)·tableᵀ · output_scale

    factored, projected   E = T Aᵀ            A = in_map.weight [D, k]       U = T B        B = out_map.weight [k, D]
    residual, strength s  E = T                                              U = T + s T P Q
    spd, S = C Cᵀ         E = T S⁻¹                                          U = T S

Computed in fp64 and rounded once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.facts import SPEC, Facts
from tiewise.checkpoint.families import module_of
from tiewise.checkpoint.plain_ends import is_own, readable
from tiewise.checkpoint.stored import CHUNK_BYTES, FLOATING, Reader, Stored, rounded
from tiewise.checkpoint.untrusted import require_memory, short
from tiewise.core.errors import CheckpointError, SpecError
from tiewise.core.spec import BoundarySpec

IN_MAP, OUT_MAP = ".in_map.", ".out_map."
_SPD_MATRICES = 5  # D × D in fp64: the factor, C, its inverse, and LAPACK's copy and workspace

MapRows = Callable[[NDArray[np.float64]], NDArray[np.float64]]


@dataclass(frozen=True)
class Dense:
    """One end's table [V, D] that acts as a stored table, a map and a scale do."""

    table: Stored  # [V, E]
    width: int  # D
    map: MapRows | None = None  # rows [., E] to rows [., D]; None for the identity
    mapped: str = "identity"  # equal for equal maps
    scale: float = 1.0

    @property
    def mark(self) -> tuple[object, ...]:
        """Equal for two ends that give the same table; the scale stands last."""
        return (self.table.name, self.mapped, self.scale)

    @property
    def changed(self) -> bool:
        """Whether it differs from the stored table."""
        return self.map is not None or self.scale != 1.0

    def exact(self, start: int, stop: int) -> NDArray[np.float64]:
        """Rows [start, stop), not rounded yet."""
        with Reader(self.table) as reader:
            rows = reader.rows(start, stop).astype(np.float64)
        return (rows if self.map is None else self.map(rows)) * self.scale

    def rounded(self, start: int, stop: int) -> NDArray:
        """Rows [start, stop) in the type of the stored table."""
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

    spec: BoundarySpec  # what the config says
    lookup: Dense  # the input's table as the model meets it
    head: Dense  # the output's
    head_name: str  # name of the tensor that an output table of its own has
    maps: tuple[Stored, ...]  # of both ends


def read_boundary(facts: Facts) -> StoredBoundary:
    """Read it.

    Raises:
        CheckpointError: the tables are plain, or the tensors are not what the spec says.
    """
    spec = _spec(facts)
    if spec.out_bias:
        what = f"{facts.path}: {spec}: the projection's bias is no table, so no plain tables do the same"
        raise CheckpointError(what, "keep the boundary, and load the model with tiewise.load")
    readable(facts, "densify")
    table, tensors = facts.roles.input, facts.folder.tensors
    assert table is not None
    parts = {name: tensor for name, tensor in tensors.items() if IN_MAP in name or OUT_MAP in name}
    module = _head_module(facts, parts)
    head = tensors.get(f"{module}.weight") if spec.tables == 2 else table
    if head is None:
        raise _wrong(facts, f"{short(module)}.weight is missing")
    into = parts.get(f"{module_of(table.name)[0]}{IN_MAP}weight")
    out = {name.rpartition(".")[2]: tensor for name, tensor in parts.items() if OUT_MAP in name}
    _check_parts(facts, spec, into is not None, set(out))
    for tensor, width, axis in _joints(table, head, into, out):
        if tensor.dtype not in FLOATING or len(tensor.shape) != 2 or tensor.shape[axis] != width:
            raise _wrong(facts, f"{short(tensor.name)} is {tensor.dtype} {list(tensor.shape)}")
    lookup_end, head_end = _mapped(facts, spec, Dense(table, table.shape[1]), Dense(head, head.shape[1]), into, out)
    if lookup_end.width != head_end.width and spec.tables == 1 and into is None:
        raise _wrong(facts, f"its ends are {lookup_end.width} and {head_end.width} wide")
    lookup_end = replace(lookup_end, scale=spec.scales(lookup_end.width)[0])
    head_end = replace(head_end, scale=spec.scales(head_end.width)[1])
    return StoredBoundary(spec, lookup_end, head_end, f"{module}.weight", tuple(parts.values()))


def _spec(facts: Facts) -> BoundarySpec:
    written = facts.config.get(SPEC)
    if not is_own(facts) or not isinstance(written, str):
        fix = "this is for checkpoints whose model_type is tiewise"
        raise CheckpointError(f"{facts.path}: its tables are plain already", fix)
    try:
        return BoundarySpec.parse(written)
    except SpecError as error:
        raise _wrong(facts, short(error.what, 120)) from None


def _head_module(facts: Facts, parts: dict[str, Stored]) -> str:
    modules = {name.partition(OUT_MAP)[0] for name in parts if OUT_MAP in name}
    if len(modules) > 1:
        raise _wrong(facts, f"it has {len(modules)} output maps")
    if modules:
        return modules.pop()
    name = facts.roles.output.name if facts.roles.output is not None else facts.roles.output_name
    if name is None:
        raise _wrong(facts, "no output head was found")
    return module_of(name)[0]


def _check_parts(facts: Facts, spec: BoundarySpec, has_in: bool, out: set[str]) -> None:
    """Hold the maps that are there against those that the spec has."""
    claim = facts.claims.deciding
    width = facts.text.hidden_size if facts.text is not None else None
    if width is None:
        width = claim.hidden_size if claim is not None else None
    try:
        needs_in, needs_out = spec.maps(width or 2**62)
    except SpecError as error:
        raise _wrong(facts, short(error.what, 120)) from None
    special = {"residual": {"p", "q"}, "spd": {"factor"}}
    wanted = special.get(spec.kind, {"weight"} if needs_out else set())
    if has_in != needs_in or out != wanted:
        stored = ", ".join([*(["in_map"] if has_in else []), *(f"out_map.{part}" for part in sorted(out))]) or "none"
        raise _wrong(facts, f"{spec} does not have the maps that are stored ({stored})")


def _joints(
    table: Stored, head: Stored, into: Stored | None, out: dict[str, Stored]
) -> Iterator[tuple[Stored, int, int]]:
    """(map, width that it must have, along which axis) wherever a map meets a table or another map."""
    if into is not None:
        yield into, table.shape[1], 1
    for part, axis in (("weight", 0), ("p", 0), ("factor", 0), ("factor", 1), ("q", 1)):
        if part in out:
            yield out[part], head.shape[1], axis
    if {"p", "q"} <= out.keys() and len(out["p"].shape) == 2:
        yield out["q"], out["p"].shape[1], 0


def _mapped(
    facts: Facts, spec: BoundarySpec, lookup: Dense, head: Dense, into: Stored | None, out: dict[str, Stored]
) -> tuple[Dense, Dense]:
    """Both ends behind the maps that are stored."""
    if into is not None:
        lookup = _linear(lookup, _values(into).T)
    if "weight" in out:
        head = _linear(head, _values(out["weight"]))
    elif "p" in out:
        p, q = _values(out["p"]), _values(out["q"])
        if p.any() and q.any():  # P Q is never formed
            head = replace(head, map=lambda rows: rows + spec.strength * ((rows @ p) @ q), mapped="correction")
    elif "factor" in out:
        require_memory(8 * _SPD_MATRICES * head.width**2, f"{facts.path}: a positive definite map {head.width} wide")
        factor = _values(out["factor"])  # C below its diagonal, and log C on it
        if np.tril(factor).any():
            c = np.tril(factor, -1) + np.diag(np.exp(np.diagonal(factor)))
            try:
                inverse = np.linalg.inv(c)
            except np.linalg.LinAlgError:
                raise _wrong(facts, f"{short(out['factor'].name)} has no inverse") from None
            lookup = replace(lookup, width=head.width, map=lambda rows: (rows @ inverse.T) @ inverse, mapped="inverse")
            head = replace(head, map=lambda rows: (rows @ c) @ c.T, mapped="definite")
    return lookup, head


def _linear(end: Dense, matrix: NDArray[np.float64]) -> Dense:
    digest = hashlib.sha256(matrix.tobytes()).hexdigest()
    return replace(end, width=matrix.shape[1], map=lambda rows: rows @ matrix, mapped=f"{matrix.shape} {digest}")


def _values(tensor: Stored) -> NDArray[np.float64]:
    """Return a stored map, whole, in fp64."""
    with Reader(tensor) as reader:
        return reader.rows().astype(np.float64)


def _wrong(facts: Facts, what: str) -> CheckpointError:
    fix = "it was not saved by tiewise, or is damaged: take it from its source again"
    return CheckpointError(f"{facts.path}: its boundary {short(facts.config.get(SPEC))}: {what}", fix)
