"""The two ends of a checkpoint as numbers: plain tables, or a boundary that this package saved.

Such a boundary is its spec in the config, its tables and its maps, each held against the others. Both ends are met as
the model meets them, rows of a stored table times a map, times a scale:

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
from tiewise.checkpoint.family_record import module_of
from tiewise.checkpoint.stored import CHUNK_BYTES, FLOATING, Stored, read_float64, rounded
from tiewise.checkpoint.untrusted import require_memory, short
from tiewise.core.errors import CheckpointError, SpecError
from tiewise.core.spec import BoundarySpec
from tiewise.core.spec_options import INSTALL


@dataclass(frozen=True)
class TiedNames:
    """One tensor under several names: the table under the input's, the head's, and in some families more."""

    source: str  # the name under which a tied checkpoint keeps it
    targets: tuple[str, ...]  # the other names
    stored: tuple[Stored, ...]  # those of all the names that are stored, the source first

    @property
    def kept(self) -> Stored | None:
        """The stored tensor that stands for all: the source where it is stored."""
        return self.stored[0] if self.stored else None

    @property
    def missing(self) -> tuple[str, ...]:
        """Names that are not stored."""
        held = {tensor.name for tensor in self.stored}
        return tuple(name for name in (self.source, *self.targets) if name not in held)


def tied_names(facts: Facts) -> list[TiedNames]:
    """Return every tie of the class; of an unknown class that of the table and the head.

    BERT ties its head's bias by the same flag, BART its stacks' input tables.
    """
    roles = facts.roles
    ties = dict(roles.ties)
    if not ties and roles.input_name is not None and roles.output_name is not None:
        ties = {roles.output_name: roles.input_name}
    # what stands before every name of this checkpoint: `_orig_mod.` and the like
    end, name = (roles.input, roles.input_name) if roles.input else (roles.output, roles.output_name)
    prefix = end.name.removesuffix(name) if end is not None and name is not None and end.name.endswith(name) else ""
    found, tensors = dict[str, list[str]](), facts.folder.tensors
    for target, source in ties.items():
        while source in ties and ties[source] != target:
            source = ties[source]
        found.setdefault(prefix + source, []).append(prefix + target)
    held = {source: tuple(tensors[n] for n in (source, *targets) if n in tensors) for source, targets in found.items()}
    return [TiedNames(source, tuple(targets), held[source]) for source, targets in found.items()]


@dataclass(frozen=True)
class PlainEnds:
    """Tables that can be read as numbers."""

    input: Stored  # [V, E]
    output: Stored | None  # [V, E]; None where the head uses the input table
    spare: tuple[Stored, ...]  # further copies of one of the two, with the same bytes; they can go
    head: str  # name of the head's module, as this checkpoint writes names

    @property
    def tables(self) -> tuple[Stored, ...]:
        """One table or two, the input's first."""
        return (self.input,) if self.output is None else (self.input, self.output)


def readable(facts: Facts, verb: str) -> tuple[Stored, ...]:
    """Return every stored table of both ends, after checking that their rows are numbers; `verb` is for errors."""
    for fault in facts.folder.faults:
        if fault.file.endswith((".safetensors", ".json")):
            raise CheckpointError(fault.what, fault.fix)
    roles = facts.roles
    if roles.input is None:
        fix = "tiewise check says what is there, and what the names should be"
        if roles.output is not None and facts.claims.tied is True:
            fix = "tiewise repair stores the one table under the input's name"
        why = "" if facts.family.is_known else f"{facts.family.unknown}, and "
        raise CheckpointError(f"{facts.path}: {why}no input table was found, so there is nothing to {verb}", fix)
    for table in filter(roles.packed, roles.tables):
        fix = f"{verb} the checkpoint from which it was quantised, then quantise again"
        raise CheckpointError(f"{facts.path}: {short(table.name)} is quantised ({table.dtype})", fix)
    return roles.tables


def require_head(facts: Facts, verb: str) -> str:
    """Return the name of the output table, stored or not."""
    name = facts.roles.output_name
    if name is not None and not facts.roles.headless:
        return name
    if not facts.roles.headless and (facts.claims.tied or not facts.family.is_known):
        raise CheckpointError(f"{facts.path}: {_unnamed_head(facts, verb)}", _use_live_model(verb))
    fix = "a model without a token head has one end only; give one with a head"
    raise CheckpointError(f"{facts.path}: no output head was found, so there is nothing to {verb}", fix)


def _unnamed_head(facts: Facts, verb: str) -> str:
    """Say that the head's name is not known, of a model that has or may have one."""
    why = "its class is not known" if facts.family.is_known else facts.family.unknown
    ties = (
        "its config says that the head is the input table"
        if facts.claims.tied
        else "no tensor has the usual name of a head"
    )
    return f"{why}: {ties}, and {verb} needs the name under which the class stores a head"


def _use_live_model(verb: str) -> str:
    """Return what to do where only the model's own class knows the name of its head."""
    spec = {"untie": ', "untied"', "tie": ', "tied"'}.get(verb, "")
    return f"load it with its own code, call tiewise.install(model{spec}), and save it"


def plain_ends(facts: Facts, verb: str, *, force: bool) -> PlainEnds:
    """Return the tables of both ends; with `force` two different ones are two, whatever the config claims."""
    readable(facts, verb)
    require_loadable_options(facts)
    roles, where = facts.roles, facts.path
    if facts.is_own:
        what = f"{where}: its boundary is {short(facts.config.get(SPEC))} already"
        raise CheckpointError(what, "tiewise densify it first")
    output, name = roles.output, require_head(facts, verb)
    sources = {names.source for names in tied_names(facts)}
    # of several copies of the input table, the one under the name that stands for all
    table = next((table for table in roles.inputs if table.name in sources), roles.inputs[0])
    spare = [other for other in roles.inputs if other is not table]
    for other in spare:
        if not facts.same(table, other):
            what = f"{where}: {short(table.name)} and {short(other.name)} are two different input tables"
            raise CheckpointError(what, "tiewise check says more; the two must be made one first")
    if output is not None and facts.claims.tied is not False and facts.same(table, output):
        spare.append(output)
        output = None
    if output is None and facts.claims.tied is False and not facts.claims.t5_like:
        fix = "tiewise repair it first"
        raise CheckpointError(f"{where}: the config claims a head of its own, and none is stored", fix)
    if output is not None and facts.claims.tied and not facts.claims.t5_like and not force:
        fix = "decide first: tiewise untie keeps both, tiewise tie --keep one of them; --force takes them as two"
        raise CheckpointError(f"{where}: the config claims one table, and two different ones are stored", fix)
    head = module_of(roles.output.name if roles.output is not None else name)[0]
    return PlainEnds(table, output, tuple(spare), head)


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
        rows = self.table.read(start, stop).astype(np.float64)
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


def require_loadable_options(facts: Facts) -> None:
    """Refuse a stored boundary with an option that `install`, and so `tiewise.load`, does not honour.

    Raises:
        CheckpointError: names the first such option. A spec that cannot be parsed is left to the verb.
    """
    if facts.boundary is not None:
        _require(facts, facts.boundary.plainly(), INSTALL)


def _require(facts: Facts, spec: BoundarySpec, backend: str) -> None:
    """Refuse a stored spec with an option that the backend does not honour, and name the checkpoint."""
    try:
        spec.require(backend)
    except SpecError as error:
        raise CheckpointError(f"{facts.path}: {error.what}", error.fix) from None


def read_boundary(facts: Facts, backend: str) -> StoredBoundary:
    """Read it for a backend, one of `STORED` of the spec's options."""
    written, fix = facts.config.get(SPEC), "this is for checkpoints whose model_type is tiewise"
    if not facts.is_own or not isinstance(written, str):
        raise CheckpointError(f"{facts.path}: its tables are plain already", fix)
    width = facts.text.hidden_size or facts.claims.deciding.hidden_size or 2**62
    try:
        spec = BoundarySpec.parse(written)
        needs_in, needs_out = spec.maps(width)
    except SpecError as error:
        raise _wrong(facts, short(error.what, 120)) from None
    _require(facts, spec, backend)
    readable(facts, "densify")
    table, tensors = facts.roles.input, facts.folder.tensors
    assert table is not None

    # the head's module: the one that has the output map, else the one that is stored, else the one that the class has
    parts = {name: tensor for name, tensor in tensors.items() if IN_MAP in name or OUT_MAP in name}
    modules = {name.partition(OUT_MAP)[0] for name in parts if OUT_MAP in name}
    if len(modules) > 1:
        raise _wrong(facts, f"it has {len(modules)} output maps")
    own_name = facts.roles.output.name if facts.roles.output is not None else facts.roles.output_name
    if not modules and own_name is None:
        raise _wrong(facts, "no output head was found")
    module = modules.pop() if modules else module_of(own_name or "")[0]
    head = tensors.get(f"{module}.weight") if spec.tables == 2 else table
    if head is None:
        raise _wrong(facts, f"{short(module)}.weight is missing")

    into = parts.get(f"{module_of(table.name)[0]}{IN_MAP}weight")
    out = {name.rpartition(".")[2]: tensor for name, tensor in parts.items() if OUT_MAP in name}
    needed = {"residual": {"p", "q"}, "spd": {"factor"}}.get(spec.kind, {"weight"} if needs_out else set())
    if (into is not None) != needs_in or set(out) != needed:
        stored = [*(["in_map"] if into is not None else []), *(f"out_map.{part}" for part in sorted(out))]
        raise _wrong(facts, f"{spec} does not have the maps that are stored ({', '.join(stored) or 'none'})")
    # wherever a map meets a table or another map: the width that it must have, and along which axis
    meets = [] if into is None else [(into, table.shape[1], 1)]
    axes = (("weight", 0), ("p", 0), ("factor", 0), ("factor", 1), ("q", 1))
    meets += [(out[part], head.shape[1], axis) for part, axis in axes if part in out]
    if "q" in out and len(out["p"].shape) == 2:
        meets.append((out["q"], out["p"].shape[1], 0))
    for tensor, width, axis in meets:
        if tensor.dtype not in FLOATING or len(tensor.shape) != 2 or tensor.shape[axis] != width:
            raise _wrong(facts, f"{short(tensor.name)} is {tensor.dtype} {list(tensor.shape)}")

    ends = _mapped(facts, spec, Dense(table, table.shape[1]), Dense(head, head.shape[1]), into, out)
    if ends[0].width != ends[1].width and spec.tables == 1 and into is None:
        raise _wrong(facts, f"its ends are {ends[0].width} and {ends[1].width} wide")
    lookup, last = (replace(end, scale=spec.scales(end.width)[which]) for which, end in enumerate(ends))
    return StoredBoundary(spec, lookup, last, f"{module}.weight", tuple(parts.values()))


def _mapped(
    facts: Facts, spec: BoundarySpec, lookup: Dense, head: Dense, into: Stored | None, out: dict[str, Stored]
) -> tuple[Dense, Dense]:
    """Both ends behind the maps that are stored."""
    if into is not None:
        lookup = _linear(lookup, read_float64(into).T)
    if "weight" in out:
        head = _linear(head, read_float64(out["weight"]))
    elif "p" in out:
        p, q = read_float64(out["p"]), read_float64(out["q"])
        if p.any() and q.any():  # P Q is never formed
            head = replace(head, map=lambda rows: rows + spec.strength * ((rows @ p) @ q), mapped="correction")
    elif "factor" in out:
        require_memory(8 * _SPD_MATRICES * head.width**2, f"{facts.path}: a positive definite map {head.width} wide")
        factor = read_float64(out["factor"])  # C below its diagonal, and log C on it
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


def _wrong(facts: Facts, what: str) -> CheckpointError:
    fix = "it was not saved by tiewise, or is damaged: take it from its source again"
    return CheckpointError(f"{facts.path}: its boundary {short(facts.config.get(SPEC))}: {what}", fix)
