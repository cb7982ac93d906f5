"""Read a saved boundary: the spec in its config, its tables and its maps, each checked against the others."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.facts import SPEC, Facts
from tiewise.checkpoint.families import module_of
from tiewise.checkpoint.stored import FLOATING, Reader, Stored
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError, SpecError
from tiewise.core.spec import BoundarySpec
from tiewise.rewrite import memory
from tiewise.rewrite.dense import Apply, Dense, correction, definite, product
from tiewise.rewrite.low_rank import WORK_MATRICES
from tiewise.rewrite.plain_ends import is_own, readable

IN_MAP, OUT_MAP = ".in_map.", ".out_map."
_DAMAGED = "it was not saved by tiewise, or is damaged: take it from its source again"


@dataclass(frozen=True)
class Boundary:
    """A boundary as a checkpoint of config type `tiewise` stores it.

    Args:
        spec: what the config says.
        lookup: the input's table as the model meets it.
        head: the output's.
        head_name: name of the tensor that an output table of its own has.
        maps: stored tensors of the two maps.
    """

    spec: BoundarySpec
    lookup: Dense
    head: Dense
    head_name: str
    maps: tuple[Stored, ...]


def read_boundary(facts: Facts) -> Boundary:
    """Read it.

    Raises:
        CheckpointError: the tables are plain, or the tensors are not what the spec says.
    """
    spec = _spec(facts)
    if spec.out_bias:
        what = f"{facts.path}: {spec}: the projection's bias is no table, so no plain tables do the same"
        raise CheckpointError(what, "keep the boundary, and load the model with tiewise.load")
    readable(facts, "densify")
    table, parts = facts.roles.input, _parts(facts)
    assert table is not None
    module = _head_module(facts, parts)
    head = facts.folder.tensors.get(f"{module}.weight") if spec.tables == 2 else table
    if head is None:
        raise _wrong(facts, f"{short(module)}.weight is missing")
    into = parts.get(f"{module_of(table.name)[0]}{IN_MAP}weight")
    out = {name.rpartition(".")[2]: tensor for name, tensor in parts.items() if OUT_MAP in name}
    _check_parts(facts, spec, into is not None, set(out))
    for tensor, width, axis in _joints(table, head, into, out):
        if tensor.dtype not in FLOATING or len(tensor.shape) != 2 or tensor.shape[axis] != width:
            raise _wrong(facts, f"{short(tensor.name)} is {tensor.dtype} {list(tensor.shape)}")
    lookup_map, head_map = _maps(facts, spec, (table.shape[1], head.shape[1]), into, out)
    if lookup_map.width != head_map.width and spec.tables == 1 and into is None:
        raise _wrong(facts, f"its ends are {lookup_map.width} and {head_map.width} wide")
    scale_in, scale_out = spec.scales(lookup_map.width)[0], spec.scales(head_map.width)[1]
    lookup, made = lookup_map.over(table, scale_in), head_map.over(head, scale_out)
    return Boundary(spec, lookup, made, f"{module}.weight", tuple(parts.values()))


@dataclass(frozen=True)
class _Map:
    """A map to width D; `mark` is equal for equal maps."""

    width: int
    apply: Apply | None = None
    mark: str = "identity"

    def over(self, table: Stored, scale: float) -> Dense:
        return Dense(table, self.width, self.apply, scale, (table.name, self.mark, scale))


def _spec(facts: Facts) -> BoundarySpec:
    written = facts.config.get(SPEC)
    if not is_own(facts) or not isinstance(written, str):
        fix = "this is for checkpoints whose model_type is tiewise"
        raise CheckpointError(f"{facts.path}: its tables are plain already", fix)
    try:
        return BoundarySpec.parse(written)
    except SpecError as error:
        raise _wrong(facts, short(error.what, 120)) from None


def _parts(facts: Facts) -> dict[str, Stored]:
    return {name: tensor for name, tensor in facts.folder.tensors.items() if IN_MAP in name or OUT_MAP in name}


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
    special = {"residual": {"p", "q"}, "spd": {"factor"}}
    needs_in, needs_out = _needed(facts, spec)
    wanted = special.get(spec.kind, {"weight"} if needs_out else set())
    if has_in != needs_in or out != wanted:
        stored = ", ".join([*(["in_map"] if has_in else []), *(f"out_map.{part}" for part in sorted(out))]) or "none"
        raise _wrong(facts, f"{spec} does not have the maps that are stored ({stored})")


def _needed(facts: Facts, spec: BoundarySpec) -> tuple[bool, bool]:
    claim = facts.claims.deciding
    width = facts.text.hidden_size if facts.text is not None else None
    if width is None:
        width = claim.hidden_size if claim is not None else None
    try:
        return spec.maps(width or 2**62)
    except SpecError as error:
        raise _wrong(facts, short(error.what, 120)) from None


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


def _maps(
    facts: Facts, spec: BoundarySpec, widths: tuple[int, int], into: Stored | None, out: dict[str, Stored]
) -> tuple[_Map, _Map]:
    lookup, head = (_Map(width) for width in widths)
    if into is not None:
        lookup = _linear(_values(into).T)
    if "weight" in out:
        head = _linear(_values(out["weight"]))
    elif "p" in out:
        p, q = _values(out["p"]), _values(out["q"])
        if p.any() and q.any():
            head = _Map(head.width, correction(p, q, spec.strength), "correction")
    elif "factor" in out:
        memory.require(8 * WORK_MATRICES * head.width**2, f"{facts.path}: a positive definite map {head.width} wide")
        factor = _values(out["factor"])
        if np.tril(factor).any():
            try:
                inverse, forward = definite(factor)
            except np.linalg.LinAlgError:
                raise _wrong(facts, f"{short(out['factor'].name)} has no inverse") from None
            lookup, head = _Map(head.width, inverse, "inverse"), _Map(head.width, forward, "definite")
    return lookup, head


def _linear(matrix: NDArray[np.float64]) -> _Map:
    mark = hashlib.sha256(matrix.tobytes()).hexdigest()
    return _Map(matrix.shape[1], product(matrix), f"linear {matrix.shape} {mark}")


def _values(tensor: Stored) -> NDArray[np.float64]:
    """Return a stored map, whole, in fp64."""
    with Reader(tensor) as reader:
        return reader.rows().astype(np.float64)


def _wrong(facts: Facts, what: str) -> CheckpointError:
    return CheckpointError(f"{facts.path}: its boundary {short(facts.config.get(SPEC))}: {what}", _DAMAGED)
