"""`dedupe`: a table that is stored twice is stored once."""

from __future__ import annotations

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rewrite.change import Change, NothingToDo
from tiewise.checkpoint.rewrite.registry import verb
from tiewise.checkpoint.rewrite.ties import (
    how_they_differ,
    is_t5_like_untied,
    joined,
    require_ends,
    without_copies,
)
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError


@verb(order=80, keeps_logits="all", example="equal")
def dedupe(facts: Facts, *, force: bool = False) -> Change:
    """Drop an output head that equals the input table byte by byte.

    Every other equal copy that the class ties to the table goes too. The flag becomes true at every level of the
    config. No logit changes.
    """
    if not facts.packed_twice:
        require_ends(facts, "dedupe")
    head = facts.roles.output
    if head is not None and is_t5_like_untied(facts):
        drop, put = without_copies(facts, head)  # the head is trained apart; only the stacks share the table
        change = Change(drop=drop - {head.name}, put=put)
    else:
        _require_equal_ends(facts)
        change = joined(facts, force=force)
    if change.drop.isdisjoint(facts.folder.tensors):
        raise NothingToDo(f"{facts.path}: no table is stored twice", "nothing to do")
    return change


def _require_equal_ends(facts: Facts) -> None:
    """Raise if both tables are stored and differ."""
    table, head = facts.roles.input, facts.roles.output
    if table is None or head is None:
        return
    if not facts.same(table, head):
        what = f"{facts.path}: {short(table.name)} and {short(head.name)} differ: {how_they_differ(table, head)}"
        raise CheckpointError(what, "nothing is stored twice; tiewise tie --keep makes them one")
