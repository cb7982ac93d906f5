"""`tie`: one table for both ends, and the flag that says so."""

from __future__ import annotations

from typing import Annotated

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rewrite.change import Change, NothingToDo
from tiewise.checkpoint.rewrite.registry import Option, verb
from tiewise.checkpoint.rewrite.ties import require_ends, tied_change
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError

KEEP = ("input", "output", "mean")


@verb(
    order=10,
    details="",
    live="tiewise.installed(model).tie()",
    keeps_logits="all",
    logits_differ="the two tables differed",
    example="untied --keep=mean",
)
def tie(
    facts: Facts,
    *,
    keep: Annotated[
        str | None, Option("Whose values the one table gets, where the two differ.", metavar="input|output|mean")
    ] = None,
    force: bool = False,
) -> Change:
    """Give both ends of a checkpoint one table.

    It is stored under the input's name, and the config says so at every level.

    Args:
        keep: whose values the table gets where the two differ: "input", "output", or "mean", their average,
            rounded once to the input table's type. Without effect where they are equal.
    """
    if keep is not None and keep not in KEEP:
        raise CheckpointError(f"keep is {short(keep)}", f"choose one of {', '.join(KEEP)}")
    require_ends(facts, "tie")
    change = tied_change(facts, keep, force)
    if change.is_empty:
        raise NothingToDo(f"{facts.path}: it is tied already, and stores one table", "nothing to do")
    return change
