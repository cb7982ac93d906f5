"""`untie`: one table for each end, and the flag that says so."""

from __future__ import annotations

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rewrite.change import Change, NothingToDo
from tiewise.checkpoint.rewrite.registry import verb
from tiewise.checkpoint.rewrite.ties import require_ends, untied_change


@verb(order=20, live="tiewise.installed(model).untie()", keeps_logits="all", example="tied")
def untie(facts: Facts, *, force: bool = False) -> Change:
    """Give each end of a checkpoint a table of its own.

    The config says so at every level. The head gets the bytes of the input table, in the same file; so does every other
    tensor that the class ties by the same flag (BERT's second head bias, BART's stacks). Where both are stored already,
    only the flag changes.
    """
    require_ends(facts, "untie")
    change = untied_change(facts, force)
    if change.is_empty:
        raise NothingToDo(f"{facts.path}: it is untied already", "nothing to do")
    return change
