"""`Job`: one arm with one seed, as it is handed to a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tiewise.core.spec import BoundarySpec
from tiewise.training.settings import Settings
from tiewise.training.shown import Whole


@dataclass(frozen=True)
class Job:
    """What to train and where; `title` names it in progress, which `bar` shows."""

    arm: str
    spec: BoundarySpec
    seed: int
    settings: Settings
    folder: Path
    feed_forward: int | None = None
    title: str = ""
    bar: Whole | None = None
    split: str = "heldout"  # what the run is measured on
    trial: bool = False  # of tuning: nothing but its last loss on `split` is wanted
