"""What a rewrite did, for the person who asked for it and for a program."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class Receipt:
    """One rewrite, done or (`dry_run`) foreseen.

    Args:
        verb: "untie", …
        source: the checkpoint that was read.
        to: the folder that was made.
        dropped: names of tensors that the result no longer stores.
        written: names of tensors that are new, or new in content.
        bytes_before: of all tensors of the source.
        bytes_after: of all tensors of the result.
        rewritten: files whose tensors changed.
        linked: files that share their bytes on disk with the source.
        copied: files that do not.
        logit_change: largest absolute change of a logit, before the family's own scale and cap.
        input_change: largest Euclidean length by which a row of the input table moves.
        measured_on: what the two were measured on.
        notes: what the user should know, one sentence each.
        dry_run: nothing was written.
    """

    verb: str
    source: Path
    to: Path
    dropped: tuple[str, ...]
    written: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    rewritten: tuple[str, ...]
    linked: tuple[str, ...]
    copied: tuple[str, ...]
    logit_change: float
    input_change: float
    measured_on: str
    notes: tuple[str, ...] = ()
    dry_run: bool = False

    def record(self) -> dict[str, Any]:
        """Return it as JSON can hold it, with the version of this schema; a number that is none becomes null."""
        made = {"schema": SCHEMA, **asdict(self), "source": str(self.source), "to": str(self.to)}
        for key in ("logit_change", "input_change"):
            made[key] = made[key] if math.isfinite(made[key]) else None
        return {key: list(value) if isinstance(value, tuple) else value for key, value in made.items()}
