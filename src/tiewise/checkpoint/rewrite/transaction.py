"""Write the changed checkpoint beside its destination, look at it, and give it its name: all of it, or nothing."""

from __future__ import annotations

from pathlib import Path

from tiewise.checkpoint.facts import Progress, _silent
from tiewise.checkpoint.folder import Folder
from tiewise.checkpoint.rewrite.change import Change
from tiewise.checkpoint.rewrite.receipt import Receipt


def apply(
    folder: Folder,
    change: Change,
    to: Path,
    *,
    command: str,
    dry_run: bool = False,
    force: bool = False,
    progress: Progress = _silent,
) -> Receipt:
    """Write `folder` with `change` to the new folder `to`; the source is only read.

    Args:
        folder: the source.
        change: what differs in the result.
        to: absent, or an empty folder; its parent exists.
        command: the verb, for the receipt and for `tiewise.json`.
        dry_run: check and foresee everything, write nothing.
        force: recorded in `tiewise.json`.
        progress: hears of bytes written.

    Raises:
        CheckpointError: the source is damaged or changes meanwhile, the destination is unusable or full, or the result
            does not stand up to its audit. Nothing is left at `to` or beside it.
    """
    raise NotImplementedError
