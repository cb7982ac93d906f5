"""The two ends of a checkpoint as plain tables: what a verb that computes with rows asks for, or the reason against."""

from __future__ import annotations

from dataclasses import dataclass

from tiewise.checkpoint.claims import OWN_TYPE
from tiewise.checkpoint.facts import SPEC, Facts
from tiewise.checkpoint.families import module_of
from tiewise.checkpoint.stored import FLOATING, Stored
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError
from tiewise.rewrite.groups import groups


@dataclass(frozen=True)
class PlainEnds:
    """Tables that can be read as numbers.

    Args:
        input: the input table [V, E].
        output: the output table; None where the head uses the input table.
        spare: further copies of one of the two, with the same bytes; they can go.
        head: name of the head's module, as this checkpoint writes names.
    """

    input: Stored
    output: Stored | None
    spare: tuple[Stored, ...]
    head: str

    @property
    def tables(self) -> tuple[Stored, ...]:
        """One table or two, the input's first."""
        return (self.input,) if self.output is None else (self.input, self.output)

    @property
    def input_module(self) -> str:
        """Name of the lookup's module."""
        return module_of(self.input.name)[0]


def is_own(facts: Facts) -> bool:
    """Whether the checkpoint has a boundary that only this package loads."""
    return facts.config.get("model_type") == OWN_TYPE


def readable(facts: Facts, verb: str) -> tuple[Stored, ...]:
    """Return every stored table of both ends, after checking that their rows are numbers.

    Raises:
        CheckpointError: no input table, a part that cannot be read, or quantised tables.
    """
    where = facts.path
    for fault in facts.folder.faults:
        if fault.file.endswith((".safetensors", ".json")):
            raise CheckpointError(fault.what, fault.fix)
    roles = facts.roles
    if roles.input is None:
        fix = "tiewise check says what is there, and what the names should be"
        if roles.output is not None and facts.claims.tied is True:
            fix = "tiewise repair stores the one table under the input's name"
        raise CheckpointError(f"{where}: no input table was found, so there is nothing to {verb}", fix)
    tables = (*roles.inputs, *([roles.output] if roles.output is not None else []))
    odd = [table for table in tables if table.dtype not in FLOATING]
    for table in (*roles.quantised_input[:1], *roles.quantised_output[:1], *odd):  # the packed numbers stand first
        fix = f"{verb} the checkpoint from which it was quantised, then quantise again"
        raise CheckpointError(f"{where}: {short(table.name)} is quantised ({table.dtype})", fix)
    return tables


def plain_ends(facts: Facts, verb: str, *, force: bool) -> PlainEnds:
    """Return the tables of both ends.

    Args:
        facts: of the checkpoint.
        verb: for errors.
        force: take two different tables as two, whatever the config claims.

    Raises:
        CheckpointError: as `readable`; no head; a boundary that only this package loads; or files and config that do
            not agree on what the model is.
    """
    readable(facts, verb)
    roles, where = facts.roles, facts.path
    if is_own(facts):
        fix = "tiewise densify it first"
        raise CheckpointError(f"{where}: its boundary is {short(facts.config.get(SPEC))} already", fix)
    if roles.headless or roles.output_name is None:
        fix = "a model without a token head has one end only; give one with a head"
        raise CheckpointError(f"{where}: no output head was found, so there is nothing to {verb}", fix)
    table = _source(facts)
    spare = [other for other in roles.inputs if other is not table and _checked_copy(facts, table, other)]
    output = roles.output
    if output is not None and facts.claims.tied is not False and facts.same(table, output):
        spare.append(output)
        output = None
    if output is None and facts.claims.tied is False and not facts.claims.t5_like:
        fix = "tiewise repair it first"
        raise CheckpointError(f"{where}: the config claims a head of its own, and none is stored", fix)
    if output is not None and facts.claims.tied and not facts.claims.t5_like and not force:
        fix = "decide first: tiewise untie keeps both, tiewise tie --keep one of them; --force takes them as two"
        raise CheckpointError(f"{where}: the config claims one table, and two different ones are stored", fix)
    head = module_of(roles.output.name if roles.output is not None else roles.output_name)[0]
    return PlainEnds(table, output, tuple(spare), head)


def _source(facts: Facts) -> Stored:
    """Of several copies of the input table, the one under the name that stands for all."""
    inputs = facts.roles.inputs
    sources = {group.source for group in groups(facts)}
    return next((table for table in inputs if table.name in sources), inputs[0])


def _checked_copy(facts: Facts, table: Stored, other: Stored) -> bool:
    if not facts.same(table, other):
        fix = "tiewise check says more; the two must be made one first"
        what = f"{facts.path}: {short(table.name)} and {short(other.name)} are two different input tables"
        raise CheckpointError(what, fix)
    return True
