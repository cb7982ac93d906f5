"""`Job`: one arm with one seed, as it is handed to a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tiewise.spec import BoundarySpec
from tiewise.training.settings import Settings


@dataclass(frozen=True)
class Job:
    """What to train and where; `title` names it in progress, `bars` shows the Trainer's bar."""

    arm: str
    spec: BoundarySpec
    seed: int
    settings: Settings
    folder: Path
    feed_forward: int | None = None
    title: str = ""
    bars: bool = False
    split: str = "heldout"  # what the run is measured on
