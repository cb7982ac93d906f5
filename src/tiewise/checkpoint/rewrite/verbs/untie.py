"""`untie`: store one table for each end, and set the config's flag to false."""

from __future__ import annotations

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.rewrite.change import Change, NothingToDo
from tiewise.checkpoint.rewrite.registry import verb
from tiewise.checkpoint.rewrite.ties import require_ends, untied_change


@verb(order=30, live="tiewise.installed(model).untie()", keeps_logits="all", example="tied")
def untie(facts: Facts, *, force: bool = False) -> Change:
    """Give each end of a checkpoint a separate table.

    The flag of the config becomes false at every level. The head gets a copy of the input table's bytes, in the same
    file. Every other tensor that the class ties by the same flag also gets a copy (BERT's second head bias, BART's
    stacks). If both tables are stored already, only the flag changes.

    >>> import tiewise  # `tied` is a folder with one table for both ends
    >>> tiewise.untie("tied", "two-tables").written
    ('lm_head.weight',)
    """
    require_ends(facts, "untie")
    change = untied_change(facts, force)
    if change.is_empty:
        raise NothingToDo(f"{facts.path}: it is untied already", "nothing to do")
    return change
