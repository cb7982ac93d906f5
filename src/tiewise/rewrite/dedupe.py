"""`dedupe`: drop what is stored twice at the two ends, where that is proven byte by byte."""

from __future__ import annotations

import os
from pathlib import Path

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError
from tiewise.rewrite.change import Change
from tiewise.rewrite.ends import how_they_differ, opened, require_ends
from tiewise.rewrite.measure import UNCHANGED
from tiewise.rewrite.parting import joined
from tiewise.rewrite.receipt import Receipt
from tiewise.rewrite.tie import join
from tiewise.rewrite.transaction import apply


def dedupe(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    force: bool = False,
) -> Receipt:
    """Drop a head that equals the input table, and every other equal copy that the class ties to it.

    The flag becomes true at every level of the config. No logit changes.

    Args:
        source: checkpoint folder, or one `.safetensors`.
        to: the folder to make.
        dry_run: foresee everything, write nothing.
        force: also where it changes the model's function in a way that the tables do not show.

    Raises:
        CheckpointError: nothing is stored twice, the two tables differ, the ends cannot be found or read, a family that
            ties never or otherwise, or a destination that cannot be used.
    """
    facts = opened(Path(source))
    require_ends(facts, "dedupe")
    change = _change(facts, force)
    if not change.drop & set(facts.folder.tensors):
        raise CheckpointError(f"{facts.path}: no table is stored twice", "nothing to do")
    return apply(facts.folder, change, Path(to), command="dedupe", dry_run=dry_run, force=force)


def _change(facts: Facts, force: bool) -> Change:
    table, head = facts.roles.input, facts.roles.output
    deciding = facts.claims.deciding
    if facts.claims.t5_like and head is not None and deciding is not None and deciding.effective is False:
        moves = joined(facts, head)  # the head is trained apart; only the stacks share the table
        return Change(UNCHANGED, moves.drop - {head.name}, moves.put)
    if table is not None and head is not None and not facts.same(table, head):
        how = how_they_differ(facts, table, head)
        what = f"{facts.path}: {short(table.name)} and {short(head.name)} differ: {how}"
        raise CheckpointError(what, "nothing is stored twice; tiewise tie --keep makes them one")
    return join(facts, force=force)
