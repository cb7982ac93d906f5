"""State of the two stored ends for a loader, and its column's entry for the state."""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import replace

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.loader_columns import (
    ALONE,
    CORRECT,
    DEPENDS,
    DIFFERENT,
    DROPPED,
    NEITHER,
    NONE,
    ROUNDED,
    SAME,
    STATES,
    TIED,
    UNKNOWN,
    Loader,
    LoaderOutcome,
    outcome_of,
)
from tiewise.checkpoint.stored import BITS, TORCH_TYPES, Stored
from tiewise.checkpoint.table_scans import SAME_VALUES
from tiewise.checkpoint.untrusted import short

SAME_NUMBERS = "whether table and head hold the same values"
CANONICAL = "The class saves its shared table under the head's name: its own code decides."


def stored_state(facts: Facts, compares: bool = False) -> str:
    """Return the state of the tables that a loader reads: one of `STATES`, `ROUNDED` or `UNKNOWN`.

    Args:
        facts: the checkpoint.
        compares: as in `Loader`.
    """
    table, head = facts.roles.loaded_input, facts.roles.loaded_output
    if not facts.is_complete:
        return UNKNOWN
    if facts.quantised and facts.roles.opaque:
        return UNKNOWN
    if table is not None and head is not None:
        return _compared_state(facts, table, head, compares)
    if table is not None:
        return NONE
    if head is not None:
        return ALONE
    return NEITHER


def is_saved_as_head(facts: Facts) -> bool:
    """Return whether the only stored table is a shared one, saved under the head's name."""
    return facts.roles.saves_shared_table_as_head and stored_state(facts) == ALONE


def _compared_state(facts: Facts, table: Stored, head: Stored, compares: bool) -> str:
    """Return the state of two stored tables: equal, different, or unknown."""
    likeness = facts.ends_likeness
    if likeness is None:
        return _state_without_scan(facts, table, head)
    if compares and likeness.nan:
        return DIFFERENT
    if likeness.kind == SAME_VALUES:
        # equal in the narrower of their types, so also for a loader that uses that type
        _, narrower_type = min((BITS[table.dtype], table.dtype), (BITS[head.dtype], head.dtype))
        if _config_dtype(facts) != narrower_type:
            return ROUNDED
        return SAME
    if likeness.equal:
        return SAME
    return DIFFERENT


def _state_without_scan(facts: Facts, table: Stored, head: Stored) -> str:
    """Return the state of two stored tables that cannot be compared or may not be read."""
    if facts.packed_twice:
        return SAME
    if table.shape == head.shape:
        return UNKNOWN
    # the shape of a quantised table does not give its rows
    if facts.roles.is_packed(table) or facts.roles.is_packed(head):
        return UNKNOWN
    return DIFFERENT


def _config_dtype(facts: Facts) -> str | None:
    """Return the safetensors type of the dtype in the config; None if absent."""
    dtype = facts.config.get("dtype", facts.config.get("torch_dtype"))
    if not isinstance(dtype, str):
        return None
    return TORCH_TYPES.get(dtype)


def from_column(facts: Facts, loader: Loader, flag: bool | None) -> LoaderOutcome:
    """Return the entry of a loader's column for a flag and the stored ends. None is an unknown flag."""
    state = stored_state(facts, loader.compares)
    all_were_read = facts.is_complete and not facts.roles.opaque
    if state == UNKNOWN and not all_were_read:
        return outcome_of(loader, DEPENDS, "Some tensors could not be read.")
    words = _possible_words(loader, flag, state)
    if words == {TIED} and facts.roles.unloaded_names:
        return one_table_unread(facts, loader)
    if len(words) == 1:
        return outcome_of(loader, words.pop())
    possible = " or ".join(sorted(words))
    outcome = outcome_of(loader, DEPENDS, f"It depends on {_cause(flag, state)}: {possible}.")
    if words.issubset(CORRECT):
        return replace(outcome, right=True)
    if words.isdisjoint(CORRECT):
        return replace(outcome, right=False)
    return outcome


def _cause(flag: bool | None, state: str) -> str:
    """Return the unknown that an outcome depends on."""
    if flag is None:
        return "the flag that its own code takes"
    if state == ROUNDED:
        return "the precision in which the two are compared"
    return SAME_NUMBERS


def _possible_words(loader: Loader, flag: bool | None, state: str) -> set[str]:
    """Return the possible entries of a column. Flag and state may be unknown."""
    states = [state]
    if state in (ROUNDED, UNKNOWN):
        states = [SAME, DIFFERENT]
    words = set[str]()
    for possible in states:
        index = STATES.index(possible)
        if flag is not False:
            words.add(loader.tied[index])
        if flag is not True:
            words.add(loader.untied[index])
    return words


def one_table_unread(facts: Facts, loader: Loader) -> LoaderOutcome:
    """Return the outcome if one table serves both ends because the other's name is not loaded."""
    name, expected = next(iter(facts.roles.unloaded_names.items()))
    why = f"{short(name)} is not read, as the class looks for {expected}; the other end takes its place."
    if facts.ends_likeness is None:
        word = DEPENDS
        if _differ_in_shape(facts):
            word = DROPPED
        return outcome_of(loader, word, why)
    if facts.ends_likeness.equal:
        return outcome_of(loader, TIED, why)
    return outcome_of(loader, DROPPED, why)


def _differ_in_shape(facts: Facts) -> bool:
    """Return whether both tables are stored, and surely differ because their shapes do."""
    table, head = facts.roles.input, facts.roles.output
    if table is None or head is None:
        return False
    return _state_without_scan(facts, table, head) == DIFFERENT


def shape_misfit(facts: Facts) -> str | None:
    """Return a sentence about a tensor whose shape differs from the class. None if all shapes fit.

    It checks rows against the vocabulary, widths against the config, and the shapes of end tensors and biases.
    """
    roles = facts.roles
    malformed = malformed_vocab_size(facts)
    if malformed is not None:
        return malformed
    for table in (roles.loaded_input, roles.loaded_output):
        if table is None or roles.is_packed(table):
            continue
        misfit = _table_misfit(facts, table)
        if misfit is not None:
            return misfit
    return misfit_without_tables(facts)


def malformed_vocab_size(facts: Facts) -> str | None:
    """Return a sentence about a `vocab_size` that is no number of rows. None without one."""
    for written in facts.malformed_vocab_sizes.values():
        return f"The config's vocab_size is {short(json.dumps(written))}, which is no number of rows."
    return None


def misfit_without_tables(facts: Facts, compared: Container[str] = ()) -> str | None:
    """Return a sentence about an end that is no table, or a bias of another shape. None if all fit.

    Args:
        facts: the checkpoint.
        compared: names of ends that the caller compares itself.
    """
    opaque = [tensor for tensor in facts.roles.opaque if tensor.name not in compared]
    if opaque and not facts.quantised:
        return f"{short(opaque[0].name)} has the shape {list(opaque[0].shape)}, which no table has."
    for name, shape in facts.misfits.items():
        stored_shape = list(facts.folder.tensors[name].shape)
        return f"{short(name)} has the shape {stored_shape}, and its class {list(shape)}."
    return None


def _table_misfit(facts: Facts, table: Stored) -> str | None:
    """Return a sentence about rows or a width that the config does not explain. None if all fit."""
    vocab_size = facts.text.vocab_size
    if vocab_size is not None and table.rows not in {vocab_size, *facts.text_vocabularies}:
        return f"{short(table.name)} has {table.rows} rows, and the config says {vocab_size}."
    if not facts.explains_width_of(table):
        return f"{short(table.name)} is {table.shape[1]} wide, which nothing in the config explains."
    return None
