"""`dedupe`: store a table once that is stored twice."""

from __future__ import annotations

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rewrite.change import Change, NothingToDo
from tiewise.checkpoint.rewrite.registry import verb
from tiewise.checkpoint.rewrite.ties import (
    drop_tied_copies,
    how_they_differ,
    is_t5_like_untied,
    require_ends,
    tied_change,
)
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError


@verb(order=80, keeps_logits="all", example="equal")
def dedupe(facts: Facts, *, force: bool = False) -> Change:
    """Drop an output head that equals the input table byte by byte.

    Every other equal tensor that the class ties to the table is dropped too. The flag becomes true at every level of
    the config. No logit changes.

    >>> import tiewise  # `equal` is a folder that stores one table twice
    >>> receipt = tiewise.checkpoint.dedupe("equal", "once")
    >>> receipt.dropped, receipt.bytes_before - receipt.bytes_after
    (('lm_head.weight',), 1280)
    """
    if not facts.packed_twice:
        require_ends(facts, "dedupe")
    output_table = facts.roles.output
    if output_table is not None and is_t5_like_untied(facts):
        # the head differs on purpose; only the stacks share the table
        drop, put = drop_tied_copies(facts, output_table)
        change = Change(drop=drop - {output_table.name}, put=put)
    else:
        _require_equal_ends(facts)
        change = tied_change(facts, force=force)
    if change.drop.isdisjoint(facts.folder.tensors):
        raise NothingToDo(f"{facts.path}: no table is stored twice", "nothing to do")
    return change


def _require_equal_ends(facts: Facts) -> None:
    """Raise if both tables are stored and are different."""
    input_table, output_table = facts.roles.input, facts.roles.output
    if input_table is None or output_table is None:
        return
    if not facts.are_equal(input_table, output_table):
        both = f"{short(input_table.name)} and {short(output_table.name)}"
        problem = f"{facts.path}: {both} differ: {how_they_differ(input_table, output_table)}"
        raise CheckpointError(problem, "nothing is stored twice; tiewise tie --keep makes them one")
