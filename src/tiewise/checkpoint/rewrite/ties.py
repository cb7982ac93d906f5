"""One table for both ends, or one for each, and the flag that says so: the changes of several verbs."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.claims import FLAG
from tiewise.checkpoint.end_names import BY_DATA
from tiewise.checkpoint.facts import SPEC, TEXT_PARTS, Facts, quantisation
from tiewise.checkpoint.indexed_tensors import MTP_INPUT, MTP_OUTPUT
from tiewise.checkpoint.numeric_ends import readable, require_head, require_loadable_options, tied_names
from tiewise.checkpoint.rewrite.change import (
    Change,
    Moved,
    NewTensor,
    TableRows,
    measure_move,
    refuse,
    require_plain_head,
    share_lost,
)
from tiewise.checkpoint.rules.rule import difference, names
from tiewise.checkpoint.stored import Stored, rounded
from tiewise.checkpoint.table_scans import likeness
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError

COPIED = Moved(0.0, 0.0, "nothing: what is new is a copy of stored bytes, and no stored table changes")


def flags(facts: Facts, tied: bool) -> dict[str, bool]:
    """Return the flag by dotted path, for the levels that do not say `tied` yet: the root and every text part.

    Empty where there is no config.json.
    """
    return {
        f"{claim.level}.{FLAG}" if claim.level else FLAG: tied
        for claim in facts.claims.levels
        if claim.level in facts.levels and claim.written is not tied
        if claim.decides or not claim.level or claim.level.rpartition(".")[2] in TEXT_PARTS
    }


def keep_layer_ties(facts: Facts, tied: bool, force: bool) -> tuple[str, ...]:
    """Refuse a change of the flag that would part, or join, what the flag ties inside layers; notes if forced.

    Zamba's later layers reuse one transformer block by the flag that ties the head. A tied file stores that block once:
    under a false flag a loader draws the block of every later layer at random.
    """
    if not facts.layer_ties or facts.claims.tied is tied:
        return ()
    modules = names(facts.layer_ties)
    stored = [layer for module in facts.layer_ties for layer in facts.stored_layers(module)]
    if not tied:
        what = f"{facts.path}: the flag also ties {modules} of several layers, stored here as {names(stored)}"
        what += ": under a false flag those of the other layers would be drawn at random"
        return refuse(what, "keep it tied", force)
    if len(stored) <= len(facts.layer_ties):  # stored once, as a tied file does
        return ()
    what = f"{facts.path}: the flag also ties {modules}, stored here as {names(stored)}"
    return refuse(what, "keep it untied, unless these layers share one block", force)


def parted(facts: Facts, force: bool = False) -> Change:
    """Return the change that stores both ends; without tensors and flags where they are stored and said to be."""
    # a copy for every name that the class looks for once its flag is false
    put = [NewTensor.copy(one.kept, name=n) for one in tied_names(facts) if one.kept is not None for n in one.missing]
    config, notes = flags(facts, False), _notes(facts, False)
    if (facts.claims.t5_like or facts.claims.fixed) and (put or config):
        what = f"{facts.path}: this family always ties, and reads the flag false as 'do not scale before the head'"
        notes += refuse(what, "train it tied, or change its family", force)
    notes += keep_layer_ties(facts, False, force)
    if facts.claims.tied is False and facts.roles.output is None:
        notes += ("the config said untied and no head was stored: the input table is the only source for one",)
    if facts.claims.tied and facts.ends is not None and not facts.ends.equal:
        notes += ("the two stored tables differ, and both are kept: loaders that dropped the head now take it",)
    return Change(COPIED, put=tuple(put), config=config, notes=notes)


def joined(facts: Facts, keep: str | None = None, force: bool = False) -> Change:
    """Return the change that stores one table, that of `keep` where two differ; empty where that is so already."""
    claims, table, head = facts.claims, facts.roles.input, facts.roles.output
    notes = _notes(facts, True)
    if claims.fixed is False:
        what = f"{facts.path}: its class never ties, so that a dropped head would be drawn at random"
        notes += refuse(what, "keep both tables", force)
    elif claims.t5_like and claims.deciding.effective is False:
        what = f"{facts.path}: this family reads the flag true also as 'scale before the head', which is now off"
        notes += refuse(what, "keep it as it is", force)
    notes += keep_layer_ties(facts, True, force)
    config = flags(facts, True)
    if facts.packed_twice:
        return Change(drop=_packed_head(facts), config=config, notes=notes)
    if table is None or head is None or facts.same(table, head):
        drop, put = without_copies(facts)
        return Change(drop=drop, put=put, config=config, notes=notes)
    both = f"{short(table.name)} and {short(head.name)}"
    if table.shape != head.shape:
        what = f"{facts.path}: {both} have shapes {list(table.shape)} and {list(head.shape)}"
        if facts.unequal_on_purpose is not None:
            raise CheckpointError(f"{what}: {facts.unequal_on_purpose}", "keep both tables")
        raise CheckpointError(what, "tiewise resize makes the rows equal")
    if keep is None:
        what = f"{facts.path}: {both} are two tables: {how_they_differ(table, head)}"
        raise CheckpointError(what, "choose with --keep input, output or mean, or keep both with tiewise untie")
    notes += require_plain_head(facts, "tie", force)
    old_input, old_output = TableRows.of(table), TableRows.of(head)
    name, chosen = _table_name(facts), None
    outputs = inputs = None  # (old, new) of an end that moves
    if keep == "input":
        outputs = (old_output, old_input)
    elif keep == "output":
        chosen = NewTensor.copy(head, name=name, file=table.path.name)
        inputs = (old_input, old_output)
    else:
        mean = TableRows(table.rows, table.shape[1], partial(_mean, table, head))
        chosen = NewTensor.like(table, mean.pieces, name=name)
        outputs, inputs = (old_output, mean), (old_input, mean)
    moved = measure_move(outputs, inputs)
    lost = tuple(
        f"{short(end.name)}: the one table differs from it by {share_lost(pair):.1%} of its length"
        for end, pair in ((head, outputs), (table, inputs))
        if pair is not None
    )
    drop, put = without_copies(facts, head, chosen)
    # what layers for further tokens hold as copies of an end goes with it
    for other in facts.roles.others:
        end = {MTP_INPUT: table if keep != "input" else None, MTP_OUTPUT: head}.get(other.role)
        if end is not None and facts.same(end, other.tensor):
            follows = replace(chosen or NewTensor.copy(table), name=other.tensor.name, file=other.tensor.path.name)
            put, notes = (*put, follows), (*notes, f"{short(other.tensor.name)} was a copy of it, and still is")
    return Change(moved, drop, put, config, notes=notes, lost=lost)


def _packed_head(facts: Facts) -> frozenset[str]:
    """Return the names of all that is stored for a packed head; refuse if the quantisation says that there is one."""
    if quantisation(facts.config).get("lm_head") is True:
        what = f"{facts.path}: quantization_config.lm_head is true, and loaders then look for a packed head"
        raise CheckpointError(what, "keep it, or set quantization_config.lm_head to false by hand first")
    return frozenset(part.name for part in facts.roles.output_end.parts.values())


def without_copies(
    facts: Facts, head: Stored | None = None, chosen: NewTensor | None = None
) -> tuple[frozenset[str], tuple[NewTensor, ...]]:
    """(names that go, tensors that come), to leave one tensor of those that are tied, under its source's name.

    `head` goes although it differs; `chosen` is new content of the table, under its source's name.
    """
    drop: set[str] = set()
    put = [] if chosen is None else [chosen]
    known = {*facts.folder.tensors, *(facts.folder.weight_map or ())}
    for tied in tied_names(facts):
        if tied.kept is None:
            continue
        for other in tied.stored[1:]:
            if other is not head and not facts.same(tied.kept, other):
                both = f"{short(tied.kept.name)} and {short(other.name)}"
                what = f"{facts.path}: {both} are tied in this class and differ"
                fix = "choose for the head with tiewise tie --keep, or tiewise untie to keep both"
                raise CheckpointError(f"{what} ({how_they_differ(tied.kept, other)})", fix)
        drop |= known & set(tied.targets)
        if tied.kept.name != tied.source and (chosen is None or chosen.name != tied.source):
            put.append(NewTensor.copy(tied.kept, name=tied.source))
    return frozenset(drop), tuple(put)


def _mean(table: Stored, head: Stored, start: int, stop: int) -> NDArray:
    """Rows [start, stop) of the mean, in the table's type: the exact one, rounded once, whichever end comes first."""
    a, b = (end.read(start, stop).astype(np.float64) for end in (table, head))
    with np.errstate(over="ignore", invalid="ignore"):
        total = a + b
        part = total - a
        lost = (a - (total - part)) + (b - part)  # a + b is total + lost, exactly (Knuth)
        far = ~np.isfinite(total)
        return rounded(np.where(far, a / 2 + b / 2, total / 2), table.dtype, np.where(far, 0.0, lost))


def require_ends(facts: Facts, name: str) -> None:
    """Raise unless the tables are plain numbers and the model has a head; `name` is the verb's."""
    if facts.roles.input is not None or facts.roles.output is None or facts.roles.output_end.quantised:
        readable(facts, name)
    require_loadable_options(facts)
    if facts.is_own:
        written = short(facts.config.get(SPEC))
        raise CheckpointError(f"{facts.path}: its boundary is {written}", "tiewise densify makes plain tables of it")
    require_head(facts, name)


def _table_name(facts: Facts) -> str:
    """The name that the one table has where it is tied to the head."""
    output = facts.roles.output_name or ""
    for tied in tied_names(facts):
        if any(name.endswith(output) for name in (tied.source, *tied.targets)):
            return tied.source
    classes = facts.config.get("architectures")
    named = short(classes[0]) if isinstance(classes, list) and classes else short(facts.config.get("model_type"))
    what = f"{facts.path}: the class {named} has no tie between its input table and its head"
    raise CheckpointError(what, "store both, as it expects")


def _notes(facts: Facts, tied: bool) -> tuple[str, ...]:
    """What names that are not those of the class, and a file without a config, leave to the user."""
    notes, roles = [], facts.roles
    if roles.source != BY_DATA and facts.family.is_known:
        ends = f"{short(roles.input_name or 'none')} and {short(roles.output_name or 'none')}"
        notes.append(f"the names of its class are not in the file: the two ends were found by {roles.source}, {ends}")
    if facts.folder.config is None:
        said = f"see that {FLAG} is {str(tied).lower()} in the one that goes with this file"
        notes.append(f"there is no config.json: {said}")
    return tuple(notes)


def how_they_differ(a: Stored, b: Stored) -> str:
    """Half a sentence on two tensors that are not equal; `check` names the first rows, and says more."""
    if (alike := likeness(a, b)) is None:
        return f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    return re.sub(r" \(first: [^)]*\)|; .*", "", difference(alike))
