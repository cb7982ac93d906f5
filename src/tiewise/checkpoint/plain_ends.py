"""The two ends of a checkpoint as plain tables, and the names that are one tensor while they are tied."""

from __future__ import annotations

from dataclasses import dataclass

from tiewise.checkpoint.claims import OWN_TYPE
from tiewise.checkpoint.facts import SPEC, Facts
from tiewise.checkpoint.families import module_of
from tiewise.checkpoint.stored import FLOATING, Stored
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError


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
    found: dict[str, list[str]] = {}
    for target, source in ties.items():
        while source in ties and ties[source] != target:
            source = ties[source]
        found.setdefault(prefix + source, []).append(prefix + target)
    tensors = facts.folder.tensors
    return [
        TiedNames(source, tuple(targets), tuple(tensors[n] for n in (source, *targets) if n in tensors))
        for source, targets in found.items()
    ]


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


def is_own(facts: Facts) -> bool:
    """Whether the checkpoint has a boundary that only this package loads."""
    return facts.config.get("model_type") == OWN_TYPE


def readable(facts: Facts, verb: str) -> tuple[Stored, ...]:
    """Return every stored table of both ends, after checking that their rows are numbers; `verb` is for errors.

    Raises:
        CheckpointError: no input table, a part that cannot be read, or quantised tables.
    """
    for fault in facts.folder.faults:
        if fault.file.endswith((".safetensors", ".json")):
            raise CheckpointError(fault.what, fault.fix)
    roles = facts.roles
    if roles.input is None:
        fix = "tiewise check says what is there, and what the names should be"
        if roles.output is not None and facts.claims.tied is True:
            fix = "tiewise repair stores the one table under the input's name"
        raise CheckpointError(f"{facts.path}: no input table was found, so there is nothing to {verb}", fix)
    tables = (*roles.inputs, *([roles.output] if roles.output is not None else []))
    odd = [table for table in tables if table.dtype not in FLOATING]
    for table in (*roles.quantised_input[:1], *roles.quantised_output[:1], *odd):  # the packed numbers stand first
        fix = f"{verb} the checkpoint from which it was quantised, then quantise again"
        raise CheckpointError(f"{facts.path}: {short(table.name)} is quantised ({table.dtype})", fix)
    return tables


def require_head(facts: Facts, verb: str) -> str:
    """Return the name of the output table, stored or not.

    Raises:
        CheckpointError: the model has no token head.
    """
    if facts.roles.headless or facts.roles.output_name is None:
        fix = "a model without a token head has one end only; give one with a head"
        raise CheckpointError(f"{facts.path}: no output head was found, so there is nothing to {verb}", fix)
    return facts.roles.output_name


def plain_ends(facts: Facts, verb: str, *, force: bool) -> PlainEnds:
    """Return the tables of both ends; with `force` two different ones are two, whatever the config claims.

    Raises:
        CheckpointError: as `readable` and `require_head`; a boundary that only this package loads; or files and config
            that do not agree on what the model is.
    """
    readable(facts, verb)
    roles, where = facts.roles, facts.path
    if is_own(facts):
        fix = "tiewise densify it first"
        raise CheckpointError(f"{where}: its boundary is {short(facts.config.get(SPEC))} already", fix)
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
