"""`tie`: store one table for both ends, and set the config's flag to true."""

from __future__ import annotations

from typing import Annotated

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rewrite.change import Change, NothingToDo
from tiewise.checkpoint.rewrite.registry import Option, verb
from tiewise.checkpoint.rewrite.ties import require_ends, tied_change
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError, suggest_choices
from tiewise.core.written_options import written_option

KEEP = ("input", "output", "mean")


@verb(
    order=20,
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
        str | None, Option("Source of the values if the two tables differ.", metavar="input|output|mean")
    ] = None,
    force: bool = False,
) -> Change:
    """Give both ends of a checkpoint one table.

    The result stores the table under the input table's name, and the flag of the config becomes true at every level.

    >>> import tiewise  # `untied` is a folder with two tables
    >>> receipt = tiewise.tie("untied", "one-table", keep="mean")
    >>> receipt.dropped, receipt.next_command
    (('lm_head.weight',), 'tiewise heal one-table --teacher untied')

    Args:
        keep: source of the values if the two tables differ: "input", "output" or "mean". "mean" is their average,
            rounded once to the input table's type. If the tables are equal, `keep` has no effect.
    """
    if keep is not None and keep not in KEEP:
        raise CheckpointError(f"no choice {written_option('keep', short(keep))}", suggest_choices(keep, KEEP))
    require_ends(facts, "tie")
    change = tied_change(facts, keep, force)
    if change.is_empty:
        raise NothingToDo(f"{facts.path}: it is tied already, and stores one table", "nothing to do")
    return change
