"""`untie`: give each end a table of its own. The function stays, and further training may part the two."""

from __future__ import annotations

import os
from pathlib import Path

from tiewise.checkpoint.facts import Facts
from tiewise.core.errors import CheckpointError
from tiewise.rewrite.change import Change, Measured
from tiewise.rewrite.ends import opened, refuse, require_ends, source_note
from tiewise.rewrite.flags import flag_note, flags
from tiewise.rewrite.parting import apart
from tiewise.rewrite.receipt import Receipt
from tiewise.rewrite.transaction import apply

COPIED = Measured(0.0, 0.0, "nothing: what is new is a copy of stored bytes, and no stored table changes")


def untie(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    force: bool = False,
) -> Receipt:
    """Store the head as a tensor of its own, and say so in the config at every level.

    The head gets the bytes of the input table, in the same file; so does every other tensor that the class ties by the
    same flag (BERT's second head bias, BART's stacks). Where both are stored already, only the flag changes.

    Args:
        source: checkpoint folder, or one `.safetensors`.
        to: the folder to make.
        dry_run: foresee everything, write nothing.
        force: also where it changes the model's function.

    Raises:
        CheckpointError: nothing to do, ends that cannot be found or read, a family whose flag means something else,
            or a destination that cannot be used.
    """
    facts = opened(Path(source))
    require_ends(facts, "untie")
    change = part(facts, force)
    if not change.put and not change.config:
        raise CheckpointError(f"{facts.path}: it is untied already", "nothing to do")
    return apply(facts.folder, change, Path(to), command="untie", dry_run=dry_run, force=force)


def part(facts: Facts, force: bool = False) -> Change:
    """Return the change that stores both ends; without tensors and flags where they are stored and said to be.

    Raises:
        CheckpointError: it would change the model's function, and `force` is not given.
    """
    moves, config = apart(facts), flags(facts, False)
    notes = (*source_note(facts), *flag_note(facts, False))
    if (facts.claims.t5_like or facts.claims.fixed) and (moves or config):
        what = f"{facts.path}: this family always ties, and reads the flag false as 'do not scale before the head'"
        notes += refuse(what, "train it tied, or change its family", force)
    if facts.claims.tied is False and facts.roles.output is None:
        notes += ("the config said untied and no head was stored: the input table is the only source for one",)
    if facts.claims.tied and facts.ends is not None and not facts.ends.equal:
        notes += ("the two stored tables differ, and both are kept: loaders that dropped the head now take it",)
    return Change(COPIED, put=moves.put, config=config, notes=notes)
