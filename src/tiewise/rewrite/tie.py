"""`tie`: give both ends one table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiewise.checkpoint.facts import Facts
from tiewise.checkpoint.stored import Reader, Stored, rounded, widened
from tiewise.checkpoint.untrusted import short
from tiewise.core.errors import CheckpointError
from tiewise.rewrite.change import Change, Measured, NewTensor, copy_of
from tiewise.rewrite.ends import how_they_differ, opened, refuse, require_ends, source_note, table_group
from tiewise.rewrite.flags import flag_note, flags
from tiewise.rewrite.measure import UNCHANGED, Rows, measured, rows_of
from tiewise.rewrite.parting import joined
from tiewise.rewrite.receipt import Receipt
from tiewise.rewrite.transaction import apply

INPUT, OUTPUT, MEAN = "input", "output", "mean"
KEEP = (INPUT, OUTPUT, MEAN)


def tie(
    source: str | os.PathLike[str],
    to: str | os.PathLike[str],
    *,
    keep: str | None = None,
    dry_run: bool = False,
    force: bool = False,
) -> Receipt:
    """Store one table for both ends, under the input's name, and say so in the config at every level.

    Args:
        source: checkpoint folder, or one `.safetensors`.
        to: the folder to make.
        keep: whose values the table gets where the two differ: "input", "output", or "mean", their average,
            rounded once to the input table's type. Without effect where they are equal.
        dry_run: foresee everything, write nothing.
        force: also where it changes the model's function in a way that the tables do not show.

    Raises:
        CheckpointError: nothing to do, two tables that differ without `keep`, ends that cannot be found or read, a
            family that ties never or otherwise, or a destination that cannot be used.
    """
    if keep is not None and keep not in KEEP:
        raise CheckpointError(f"keep is {short(keep)}", f"choose one of {', '.join(KEEP)}")
    facts = opened(Path(source))
    require_ends(facts, "tie")
    change = join(facts, keep, force)
    if not change.drop and not change.put and not change.config:
        raise CheckpointError(f"{facts.path}: it is tied already, and stores one table", "nothing to do")
    return apply(facts.folder, change, Path(to), command="tie", dry_run=dry_run, force=force)


def join(facts: Facts, keep: str | None = None, force: bool = False) -> Change:
    """Return the change that stores one table; empty where that is so already.

    Raises:
        CheckpointError: the two differ and nothing says which to keep; or it would change the model's function beyond
            that, and `force` is not given.
    """
    table, head = facts.roles.input, facts.roles.output
    notes = (*source_note(facts), *flag_note(facts, True), *_foreign_flag(facts, force))
    config = flags(facts, True)
    if table is None or head is None or facts.same(table, head):
        moves = joined(facts)
        return Change(UNCHANGED, moves.drop, moves.put, config, notes=notes)
    _require_choice(facts, table, head, keep)
    chosen, found = _choose(facts, table, head, keep)
    moves = joined(facts, head, chosen)
    return Change(found, moves.drop, moves.put, config, notes=notes)


def _foreign_flag(facts: Facts, force: bool) -> tuple[str, ...]:
    claims = facts.claims
    if claims.fixed is False:
        what = f"{facts.path}: its class never ties, so that a dropped head would be drawn at random"
        return refuse(what, "keep both tables", force)
    if claims.t5_like and claims.deciding is not None and claims.deciding.effective is False:
        what = f"{facts.path}: this family reads the flag true also as 'scale before the head', which is now off"
        return refuse(what, "keep it as it is", force)
    return ()


def _require_choice(facts: Facts, table: Stored, head: Stored, keep: str | None) -> None:
    names = f"{short(table.name)} and {short(head.name)}"
    if table.shape != head.shape:
        what = f"{facts.path}: {names} have shapes {list(table.shape)} and {list(head.shape)}"
        raise CheckpointError(what, "tiewise resize makes the rows equal")
    if keep is None:
        what = f"{facts.path}: {names} differ: {how_they_differ(facts, table, head)}"
        raise CheckpointError(what, "say which to keep: --keep input, output or mean; or tiewise untie keeps both")


def _choose(facts: Facts, table: Stored, head: Stored, keep: str | None) -> tuple[NewTensor | None, Measured]:
    """The new content of the table, if it gets one, and how far that moves both ends."""
    old_input, old_output = rows_of(table), rows_of(head)
    name, file = table_group(facts).source, table.path.name
    if keep == INPUT:
        return None, measured((old_output, old_input), None)
    if keep == OUTPUT:
        copy = copy_of(head, name)
        return NewTensor(name, copy.dtype, copy.shape, file, copy.write), measured(None, (old_input, old_output))
    mean = Rows(table.rows, table.shape[1], lambda start, stop: widened(_mean(table, head, start, stop)))
    found = measured((old_output, mean), (old_input, mean))
    return NewTensor(name, table.dtype, table.shape, file, lambda: _means(table, head)), found


def _means(table: Stored, head: Stored) -> Iterator[memoryview]:
    with Reader(table) as reader:
        spans = list(reader.spans())
    for start, stop in spans:
        yield _mean(table, head, start, stop).reshape(-1).view(np.uint8).data


def _mean(table: Stored, head: Stored, start: int, stop: int) -> NDArray:
    """Rows [start, stop) of the mean, in the table's type: the exact one, rounded once, whichever end comes first."""
    with Reader(table) as one, Reader(head) as other:
        a, b = (reader.rows(start, stop).astype(np.float64) for reader in (one, other))
    with np.errstate(over="ignore", invalid="ignore"):
        total = a + b
        part = total - a
        lost = (a - (total - part)) + (b - part)  # a + b is total + lost, exactly (Knuth)
        far = ~np.isfinite(total)
        return rounded(np.where(far, a / 2 + b / 2, total / 2), table.dtype, np.where(far, 0.0, lost))
