"""Both ends of a checkpoint as plain tables of numbers, and the names of tied tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tiewise.checkpoint.claims import SPEC, architecture
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.family_record import module_of
from tiewise.checkpoint.roles import Roles
from tiewise.checkpoint.stored import Stored
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError, SpecError
from tiewise.core.spec import BoundarySpec
from tiewise.core.spec_options import INSTALL


@dataclass(frozen=True)
class TiedNames:
    """Names of one tied tensor, such as those of input embedding and output head."""

    source: str  # name under which a tied checkpoint stores the tensor
    targets: tuple[str, ...]  # the other names
    stored: tuple[Stored, ...]  # stored tensors under these names, the source first

    @property
    def representative(self) -> Stored | None:
        """Return the source if it is stored, else the first stored target, else None."""
        return next(iter(self.stored), None)

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the names that are not stored."""
        stored = {tensor.name for tensor in self.stored}
        return tuple(name for name in (self.source, *self.targets) if name not in stored)


def find_tied_names(facts: Facts) -> list[TiedNames]:
    """Return every tie of the class. For an unknown class, it is the tie of input and output table.

    Some classes have more ties: BERT ties the head's bias, BART the input tables of encoder and decoder.
    """
    ties = _ties(facts.roles)
    prefix = _wrapper_prefix(facts)
    targets_by_source = dict[str, list[str]]()
    for target in ties:
        source = _first_source(ties, target)
        targets_by_source.setdefault(prefix + source, []).append(prefix + target)
    tensors = facts.folder.tensors
    tied = []
    for source, targets in targets_by_source.items():
        stored = [tensors[name] for name in (source, *targets) if name in tensors]
        tied.append(TiedNames(source, tuple(targets), tuple(stored)))
    return tied


def find_differing_tie(facts: Facts) -> tuple[Stored, Stored] | None:
    """Return two stored tables that the class ties and that differ, else None.

    None as well if tables may not be read. The head is left out: rules compare it with the input table.
    """
    if not facts.scan:
        return None
    left_out = (facts.roles.output, *facts.roles.biases)
    for tied in find_tied_names(facts):
        for other in tied.stored[1:]:
            source = tied.stored[0]
            if other not in left_out and not facts.are_equal(source, other):
                return source, other
    return None


def _ties(roles: Roles) -> Mapping[str, str]:
    """Return {target: source} of the class; for an unknown class {output table: input table}."""
    if roles.ties:
        return roles.ties
    if roles.input_name is None or roles.output_name is None:
        return {}
    return {roles.output_name: roles.input_name}


def _first_source(ties: Mapping[str, str], target: str) -> str:
    """Return the last source in the chain of ties from a target."""
    source = ties[target]
    while source in ties and ties[source] != target:  # two tensors may be tied to each other
        source = ties[source]
    return source


def _wrapper_prefix(facts: Facts) -> str:
    """Return the wrapper prefix of the names in this checkpoint, such as `_orig_mod.`; "" for none."""
    roles = facts.roles
    table, name = roles.input, roles.input_name
    if table is None:
        table, name = roles.output, roles.output_name
    if table is None or name is None:
        return ""
    if not table.name.endswith(name):
        return ""
    return table.name.removesuffix(name)


@dataclass(frozen=True)
class PlainEnds:
    """Unquantised tables of both ends."""

    input: Stored  # input table [V, E]
    output: Stored | None  # output table [V, E]; None if the head uses the input table
    spare: tuple[Stored, ...]  # further copies of one of the two, with the same bytes; they can be deleted
    head: str  # module of the head, by its name in this checkpoint

    @property
    def tables(self) -> tuple[Stored, ...]:
        """Return the input table, and the output table if there is one."""
        if self.output is None:
            return (self.input,)
        return (self.input, self.output)


def require_readable_tables(facts: Facts, verb: str) -> tuple[Stored, ...]:
    """Return every stored table of both ends, none of them quantised. `verb` is for errors.

    Raises:
        CheckpointError: a file cannot be read, no input table is stored, or a table is quantised.
    """
    for fault in facts.folder.faults:
        if fault.file.endswith((".safetensors", ".json")):
            raise CheckpointError(fault.problem, fault.remedy)
    roles = facts.roles
    if roles.input is None:
        raise _without_input(facts, verb)
    for table in roles.tables:
        if roles.is_packed(table):
            remedy = f"{verb} the checkpoint from which it was quantised, then quantise again"
            raise CheckpointError(f"{facts.path}: {short(table.name)} is quantised ({table.dtype})", remedy)
    return roles.tables


def _without_input(facts: Facts, verb: str) -> CheckpointError:
    """Return the error on a checkpoint without an input table."""
    remedy = "tiewise check lists the tensors and the names that the class expects"
    if facts.roles.output is not None and facts.claims.tied is True:
        remedy = "tiewise repair stores the one table under the input's name"
    problem = f"no input table is stored, so {verb} has nothing to change"
    if facts.is_without_tokens:
        name = short(architecture(facts.config) or "its class")
        problem = f"no table of tokens is known of {name}, so {verb} has nothing to change"
        remedy = "change the model in transformers, and save it"
    if not facts.family.has_facts:
        problem = f"{facts.family.unknown_message}, and {problem}"
    return CheckpointError(f"{facts.path}: {problem}", remedy)


def require_head(facts: Facts, verb: str) -> str:
    """Return the tensor name of the output table, stored or not. `verb` is for errors.

    Raises:
        CheckpointError: the class has no head, or its name is unknown.
    """
    name = facts.roles.output_name
    if not facts.roles.headless:
        if name is not None:
            return name
        if facts.claims.tied or not facts.family.has_facts:  # it has a head, or may have one
            raise CheckpointError(f"{facts.path}: {_unnamed_head(facts, verb)}", _use_live_model(verb))
    remedy = "give a model with a token head"
    raise CheckpointError(f"{facts.path}: no output head is stored, so {verb} has nothing to change", remedy)


def _unnamed_head(facts: Facts, verb: str) -> str:
    """Return the problem of a head whose name is unknown or that may be absent."""
    why = "its class is not known" if facts.family.has_facts else facts.family.unknown_message
    ties = "no tensor has the usual name of a head"
    if facts.claims.tied:
        ties = "its config says that the head is the input table"
    return f"{why}: {ties}, and {verb} needs the name under which the class stores a head"


def _use_live_model(verb: str) -> str:
    """Return the remedy if only the model's code has the name of its head."""
    spec = {"untie": ', "untied"', "tie": ', "tied"'}.get(verb, "")
    return f"load it with its own code, call tiewise.install(model{spec}), and save it"


def require_plain_ends(facts: Facts, verb: str, *, force: bool) -> PlainEnds:
    """Return the tables of both ends.

    Args:
        facts: the checkpoint.
        verb: command that needs the tables, for errors.
        force: accept two different tables although the config claims one.

    Raises:
        CheckpointError: a table is quantised or absent, copies differ, or the tables contradict the config.
    """
    require_readable_tables(facts, verb)
    require_loadable_options(facts)
    roles = facts.roles
    if facts.is_tiewise_type:
        problem = f"{facts.path}: its boundary is {short(facts.config.get(SPEC))} already"
        raise CheckpointError(problem, "run tiewise factor --undo first")
    head_name = require_head(facts, verb)
    table = _input_of_several(facts)
    spare = _copies_of_input(facts, table)
    output = roles.output
    if output is not None and _is_spare_head(facts, table, output):
        spare.append(output)
        output = None
    _require_claimed(facts, output, force)
    stored_name = head_name if roles.output is None else roles.output.name
    return PlainEnds(table, output, tuple(spare), module_of(stored_name)[0])


def _input_of_several(facts: Facts) -> Stored:
    """Return the input table; of several copies, the source of a tie."""
    sources = {names.source for names in find_tied_names(facts)}
    for table in facts.roles.input_tables:
        if table.name in sources:
            return table
    return facts.roles.input_tables[0]


def _copies_of_input(facts: Facts, table: Stored) -> list[Stored]:
    """Return the other stored input tables. Raise a CheckpointError if one differs from `table`."""
    copies = [other for other in facts.roles.input_tables if other is not table]
    for other in copies:
        if not facts.are_equal(table, other):
            problem = f"{facts.path}: {short(table.name)} and {short(other.name)} are two different input tables"
            remedy = "find out which copy was trained, and store only that one"
            if facts.claims.ties_others is False:
                remedy = "keep them: only a model with one input table can have another boundary"
            raise CheckpointError(problem, remedy)
    return copies


def _is_spare_head(facts: Facts, table: Stored, output: Stored) -> bool:
    """Return whether the stored output table is a spare copy of the input table.

    Its numbers must be equal, and the config must not claim two tables.
    """
    if facts.claims.tied is False:
        return False
    return facts.are_equal(table, output)


def _require_claimed(facts: Facts, output: Stored | None, force: bool) -> None:
    """Raise a CheckpointError if the config claims one table and two are stored, or the reverse.

    T5 is exempt, since its flag decides a scale. `force` accepts two tables.
    """
    if facts.claims.t5_like:
        return
    if output is None:
        if facts.claims.tied is False:
            remedy = "run tiewise repair first"
            raise CheckpointError(f"{facts.path}: the config says untied, and no head is stored", remedy)
    elif facts.claims.tied and not force:
        remedy = "tiewise untie keeps both, tiewise tie --keep keeps one; --force treats them as untied"
        raise CheckpointError(f"{facts.path}: the config says tied, and two different tables are stored", remedy)


def require_loadable_options(facts: Facts) -> None:
    """Refuse a stored boundary with an option that `install` and `tiewise.load` do not support.

    A spec that cannot be parsed is left to the verb.

    Raises:
        CheckpointError: an option is not supported; the message has the first one.
    """
    if facts.boundary is not None:
        require_options(facts, facts.boundary.plainly(), INSTALL)


def require_options(facts: Facts, spec: BoundarySpec, backend: str) -> None:
    """Refuse a stored spec with an option that the backend does not support.

    Raises:
        CheckpointError: an option is not supported.
    """
    try:
        spec.require(backend)
    except SpecError as error:
        raise CheckpointError(f"{facts.path}: {error.problem}", error.remedy) from None
