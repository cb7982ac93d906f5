"""Changes that tie or untie the two ends of a checkpoint, and its flag."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from tiewise.checkpoint.claims import FLAG, SPEC, TEXT_PARTS, dotted_path
from tiewise.checkpoint.config_parts import quantisation
from tiewise.checkpoint.end_names import BY_DATA
from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.family_record import module_of
from tiewise.checkpoint.indexed_tensors import MTP_INPUT, MTP_OUTPUT
from tiewise.checkpoint.numeric_ends import (
    TiedNames,
    find_tied_names,
    require_head,
    require_loadable_options,
    require_readable_tables,
)
from tiewise.checkpoint.rewrite.change import (
    Change,
    Movement,
    NewTensor,
    Pair,
    Rows,
    TableRows,
    measure_movement,
    refuse,
    require_plain_head,
    share_lost,
)
from tiewise.checkpoint.rules.rule import difference, names
from tiewise.checkpoint.stored import Stored, rounded
from tiewise.checkpoint.table_scans import likeness
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError
from tiewise.core.measurement import percent

COPIED = Movement(0.0, 0.0, "nothing: new tensors are copies of stored ones, which keep their bytes")

PACKED_ONCE = "one packed table instead of two equal ones; no logit changes"
CHOOSE = "choose the values with --keep input, output or mean; tiewise untie keeps both"


def flag_changes(facts: Facts, tied: bool) -> dict[str, bool]:
    """Return {dotted path: `tied`} for each level of the config whose flag must change.

    The levels are the root and every text part. Without config.json, the result is empty.
    """
    changes: dict[str, bool] = {}
    for claim in facts.claims.levels:
        if claim.level not in facts.levels or claim.written is tied:
            continue
        if not claim.level or claim.decides or claim.level.rpartition(".")[2] in TEXT_PARTS:
            changes |= dict.fromkeys((dotted_path(claim.level, key) for key in facts.flag_keys(claim)), tied)
    return changes


def keep_layer_ties(facts: Facts, tied: bool, force: bool) -> tuple[str, ...]:
    """Raise if a change of the flag would also untie, or tie, layers.

    In Zamba, the flag that ties the head also lets later layers reuse one transformer block. A tied file stores that
    block once. Under a false flag, a loader would draw the block of every later layer at random. With `force`, return
    the problem as a note instead.
    """
    if not facts.layer_ties or facts.claims.tied is tied:
        return ()
    modules = names(facts.layer_ties)
    stored: list[str] = []
    for module in facts.layer_ties:
        stored += facts.stored_layers(module)
    if not tied:
        problem = f"{facts.path}: the flag also ties {modules} of several layers, stored here as {names(stored)}"
        problem += "; with a false flag, loaders draw the other layers at random"
        return refuse(problem, "keep it tied", force)
    if len(stored) <= len(facts.layer_ties):  # each block is stored once, as in a tied file
        return ()
    problem = f"{facts.path}: the flag also ties {modules}, stored here as {names(stored)}"
    return refuse(problem, "keep it untied, unless these layers share one block", force)


def untied_change(facts: Facts, force: bool = False) -> Change:
    """Return the change that stores a table for each end.

    The change is empty if both tables are stored and the flag is false.
    """
    put = tuple(NewTensor.copy(source, name=name) for name, source in copies_to_untie(facts))
    config = flag_changes(facts, False)
    notes = _notes_on_names(facts, False)
    always_ties = facts.claims.t5_like or facts.claims.fixed
    if always_ties and (put or config):
        problem = f"{facts.path}: this family always ties; the flag false only switches off the scale before the head"
        notes += refuse(problem, "train it tied, or change its family", force)
    notes += keep_layer_ties(facts, False, force)
    notes += _notes_on_parted_head(facts)
    summary = "the config now says untied; no tensor changes"
    if put:
        summary = "two equal tables instead of one; no logit changes"
    return Change(COPIED, put=put, config=config, notes=notes, summary=summary)


def copies_to_untie(facts: Facts) -> Iterator[tuple[str, Stored]]:
    """Yield (missing name, tensor to copy) for each tensor that the flag ties.

    A class with a false flag expects all of them. Examples are the input tables of BART's stacks and BERT's second
    bias.
    """
    for tied in find_tied_names(facts):
        if tied.representative is not None:
            for name in tied.missing:
                yield name, tied.representative


def _notes_on_parted_head(facts: Facts) -> tuple[str, ...]:
    """Return a note on the origin of the result's head if config and tensors disagree."""
    if facts.claims.tied is False and facts.roles.output is None:
        return ("the config said untied and no head was stored, so the head is a copy of the input table",)
    if not facts.claims.tied or facts.ends_likeness is None:
        return ()
    if facts.ends_likeness.equal:
        return ()
    return ("both stored tables are kept; loaders that dropped the head now load it",)


def tied_change(facts: Facts, keep: str | None = None, force: bool = False) -> Change:
    """Return the change that stores one table for both ends.

    The change is empty if one table is stored and the flag is true.

    Args:
        keep: source of the values if the tables differ: "input", "output" or "mean". None to raise in this case.
    """
    notes = _notes_on_names(facts, True) + _notes_on_join(facts, force)
    config = flag_changes(facts, True)
    if facts.packed_twice:
        return Change(drop=_packed_head(facts), config=config, notes=notes, summary=PACKED_ONCE)
    input_table, output_table = facts.roles.input, facts.roles.output
    if input_table is None or output_table is None or facts.are_equal(input_table, output_table):
        drop, put = drop_tied_copies(facts)
        return Change(drop=drop, put=put, config=config, notes=notes, summary=_summary_of_equal(drop, put))
    _require_one_shape(facts, input_table, output_table)
    if keep is None:
        both = f"{short(input_table.name)} and {short(output_table.name)}"
        problem = f"{facts.path}: {both} are two different tables: {how_they_differ(input_table, output_table)}"
        raise CheckpointError(problem, CHOOSE)
    notes += require_plain_head(facts, "tie", force)
    one = _one_table(facts, input_table, output_table, keep)
    movement = measure_movement(one.outputs, one.inputs)
    shares = list(one.shares(input_table, output_table))
    share = max(share for _, share in shares)
    drop, put = drop_tied_copies(facts, output_table, one.new)
    followers = _followers(facts, input_table, output_table, one)
    notes += tuple(f"{short(tensor.name)} was a copy of this table, and changed with it" for tensor in followers)
    return Change(
        movement,
        drop,
        (*put, *followers),
        config,
        notes=notes,
        summary=_summary_of_different(share),
        lost=_lost(shares),
        lost_share=share,
    )


def _lost(shares: Iterable[tuple[str, float]]) -> tuple[str, ...]:
    """Return a sentence on each end that moves: the change as a share of its norm."""
    return tuple(f"{name}: the one table differs from it by {percent(share)} of its norm" for name, share in shares)


def _summary_of_different(share: float) -> str:
    """Return the summary of tying different tables; `share` is the larger change of an end."""
    return f"one table instead of two; it differs from a stored one by {percent(share)} of that table's norm"


def _summary_of_equal(drop: frozenset[str], put: tuple[NewTensor, ...]) -> str:
    """Return the summary of tying equal tables: tensors that are dropped or renamed."""
    if put:
        return "the one table is stored under the input table's name; no logit changes"
    if drop:
        return "one table instead of two equal ones; no logit changes"
    return "the config now says tied; no tensor changes"


def _notes_on_join(facts: Facts, force: bool) -> tuple[str, ...]:
    """Raise if the class computes something else under a true flag.

    With `force`, return the problem as a note instead.
    """
    notes: tuple[str, ...] = ()
    if facts.claims.fixed is False:
        problem = f"{facts.path}: its class never ties, and would draw a dropped head at random"
        notes = refuse(problem, "keep both tables", force)
    elif is_t5_like_untied(facts):
        problem = f"{facts.path}: a true flag also scales hidden states before the head in this family"
        notes = refuse(problem, "keep it as it is", force)
    return notes + keep_layer_ties(facts, True, force)


def is_t5_like_untied(facts: Facts) -> bool:
    """Return True for a T5-like family whose flag is false.

    Its class then uses the stored head without scaling the hidden states.
    """
    return facts.claims.t5_like and facts.claims.deciding.effective is False


def _require_one_shape(facts: Facts, input_table: Stored, output_table: Stored) -> None:
    """Raise if the two tables have different shapes."""
    if input_table.shape == output_table.shape:
        return
    both = f"{short(input_table.name)} and {short(output_table.name)}"
    problem = f"{facts.path}: {both} have shapes {list(input_table.shape)} and {list(output_table.shape)}"
    if facts.unequal_on_purpose is not None:
        raise CheckpointError(f"{problem}: {facts.unequal_on_purpose}", "keep both tables")
    raise CheckpointError(problem, "tiewise vocab resize makes the rows equal")


@dataclass(frozen=True)
class _OneTable:
    """The table that replaces two different tables."""

    new: NewTensor | None  # None if the stored input table stays
    outputs: Pair | None  # output table before and after; None if its values stay
    inputs: Pair | None  # input table before and after; None if its values stay

    def shares(self, input_table: Stored, output_table: Stored) -> Iterator[tuple[str, float]]:
        """Yield (name, change as a share of its norm) of each end that moves. Reads its tables."""
        for end, pair in ((output_table, self.outputs), (input_table, self.inputs)):
            if pair is not None:
                yield short(end.name), share_lost(pair)


def _one_table(facts: Facts, input_table: Stored, output_table: Stored, keep: str) -> _OneTable:
    """Return the table of `keep`: "input", "output" or "mean"."""
    name = _table_name(facts)
    old_input, old_output = TableRows.of(input_table), TableRows.of(output_table)
    if keep == "input":
        return _OneTable(None, outputs=(old_output, old_input), inputs=None)
    if keep == "output":
        copy = NewTensor.copy(output_table, name=name, file=input_table.path.name)
        return _OneTable(copy, outputs=None, inputs=(old_input, old_output))
    mean = TableRows(input_table.rows, input_table.shape[1], _Mean(input_table, output_table).read)
    new = NewTensor.like(input_table, mean.pieces, name=name)
    return _OneTable(new, outputs=(old_output, mean), inputs=(old_input, mean))


def _followers(facts: Facts, input_table: Stored, output_table: Stored, one: _OneTable) -> list[NewTensor]:
    """Return the new table under each name of an MTP layer's copy of an end."""
    moving_ends = {MTP_OUTPUT: output_table}
    if one.inputs is not None:
        moving_ends[MTP_INPUT] = input_table
    followers = []
    for other in facts.roles.indexed_tensors:
        end = moving_ends.get(other.role)
        if end is not None and facts.are_equal(end, other.tensor):
            new = one.new or NewTensor.copy(input_table)
            followers.append(replace(new, name=other.tensor.name, file=other.tensor.path.name))
    return followers


def _packed_head(facts: Facts) -> frozenset[str]:
    """Return the names of all tensors of a packed (quantised) head.

    Raise if the quantisation config requires a packed head.
    """
    if quantisation(facts.config).get("lm_head") is True:
        problem = f"{facts.path}: quantization_config.lm_head is true, so loaders expect a quantised head"
        raise CheckpointError(problem, "keep the head, or first set quantization_config.lm_head to false by hand")
    return frozenset(part.name for part in facts.roles.output_end.parts.values())


def drop_tied_copies(
    facts: Facts, output_table: Stored | None = None, chosen: NewTensor | None = None
) -> tuple[frozenset[str], tuple[NewTensor, ...]]:
    """Return the change that stores each group of tied tensors once.

    The remaining tensor of a group has the name of the source, to which the class ties the others.

    Args:
        output_table: a table that is dropped although it differs.
        chosen: new content of the table, under its source's name.

    Returns:
        Names of tensors to drop, and tensors to write.
    """
    drop: set[str] = set()
    put: dict[str, NewTensor] = {}  # by name
    if chosen is not None:
        put[chosen.name] = chosen
    stored_names = {*facts.folder.tensors, *(facts.folder.weight_map or ())}
    for tied in find_tied_names(facts):
        if tied.representative is None:
            continue
        representative = _bias_in_use(facts, tied)
        if representative is None:
            representative = tied.representative
            _require_equal(facts, representative, [other for other in tied.stored[1:] if other is not output_table])
        drop |= stored_names & set(tied.targets)
        if representative.name != tied.source:
            put.setdefault(tied.source, NewTensor.copy(representative, name=tied.source))
    return frozenset(drop), tuple(put.values())


def _bias_in_use(facts: Facts, tied: TiedNames) -> Stored | None:
    """Return the bias that an untied model adds to its logits, if these names are biases.

    BERT's head has a bias in its linear module and one next to it. Under a false flag it adds the former alone.
    """
    if facts.claims.ties_others is not False or facts.roles.output_name is None:
        return None
    bias = f"{module_of(facts.roles.output_name)[0]}.bias"
    in_use = [tensor for tensor in tied.stored if tensor.name == bias]
    return next(iter(in_use), None)


def _require_equal(facts: Facts, source: Stored, others: Iterable[Stored]) -> None:
    """Raise if a tensor differs from the one that the class ties it to."""
    for other in others:
        if facts.are_equal(source, other):
            continue
        both = f"{short(source.name)} and {short(other.name)}"
        problem = f"{facts.path}: this class ties {both}, and the two differ ({how_they_differ(source, other)})"
        if facts.claims.ties_others is False:
            raise CheckpointError(problem, "keep it untied: its flag ties all of them, and --keep chooses for the head")
        remedy = "tiewise tie --keep chooses one for the head; tiewise untie keeps both"
        raise CheckpointError(problem, remedy)


@dataclass(frozen=True)
class _Mean:
    """The mean of two tables, in the type of the first."""

    input_table: Stored
    output_table: Stored

    def read(self, start: int, stop: int) -> Rows:
        """Return rows [start, stop) of the exact mean, rounded once.

        The result does not depend on the order of the two tables.
        """
        a = self.input_table.read(start, stop).astype(np.float64)
        b = self.output_table.read(start, stop).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            total = a + b
            part = total - a
            lost = (a - (total - part)) + (b - part)  # a + b = total + lost exactly (Knuth's two-sum)
            mean = total / 2
            far = np.flatnonzero(~np.isfinite(total))  # entries whose sum overflows although the mean is finite
            mean.flat[far] = a.flat[far] / 2 + b.flat[far] / 2
            lost.flat[far] = 0.0
            return rounded(mean, self.input_table.dtype, lost)


def require_ends(facts: Facts, name: str) -> None:
    """Raise if a table is quantised or the model has no head.

    Args:
        name: name of the verb, for messages.
    """
    roles = facts.roles
    stores_head_alone = roles.input is None and roles.output is not None
    if not stores_head_alone or roles.output_end.quantised:
        require_readable_tables(facts, name)
    require_loadable_options(facts)
    if facts.is_tiewise_type:
        written = short(facts.config.get(SPEC))
        raise CheckpointError(
            f"{facts.path}: its boundary is {written}", "tiewise factor --undo makes plain tables of it"
        )
    require_head(facts, name)


def _table_name(facts: Facts) -> str:
    """Return the name under which a tied checkpoint stores the one table."""
    output = facts.roles.output_name or ""
    for tied in find_tied_names(facts):
        for name in (tied.source, *tied.targets):
            if name.endswith(output):  # `endswith`, since the class may have the head below a wrapper
                return tied.source
    class_name = facts.config.get("model_type")
    classes = facts.config.get("architectures")
    if isinstance(classes, list) and classes:
        class_name = classes[0]
    problem = f"{facts.path}: the class {short(class_name)} cannot tie its input table and its head"
    raise CheckpointError(problem, "keep both tables")


def _notes_on_names(facts: Facts, tied: bool) -> tuple[str, ...]:
    """Return notes on tensor names that the class lacks, and on a missing config.json."""
    notes, roles = [], facts.roles
    if roles.source != BY_DATA and facts.family.has_facts:
        ends = f"{short(roles.input_name or 'none')} and {short(roles.output_name or 'none')}"
        notes.append(f"the file lacks the names of its class; the ends were identified by {roles.source}: {ends}")
    if facts.folder.config is None:
        notes.append(f"there is no config.json; write {FLAG} = {str(tied).lower()} into the one that you use")
    return tuple(notes)


def how_they_differ(a: Stored, b: Stored) -> str:
    """Return a clause on the difference between two unequal tensors.

    `check` reports more, for example the first rows that differ.
    """
    is_vector = a.shape == b.shape and len(a.shape) == 1
    alike = likeness(_as_column(a), _as_column(b)) if is_vector else likeness(a, b)
    if alike is None:
        return f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    text = re.sub(r" \(first: [^)]*\)|, so they .*", "", difference(alike))
    if is_vector:
        return text.replace(" rows ", " numbers ")
    return text


def _as_column(vector: Stored) -> Stored:
    """Return a stored vector [V] as a matrix [V, 1]."""
    return replace(vector, shape=(*vector.shape, 1))
