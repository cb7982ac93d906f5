"""One comparison of a study that a script trains."""

from __future__ import annotations

from pathlib import Path

from tiewise.training.compare import Display, finish, start
from tiewise.training.results import Comparison
from tiewise.training.settings import Settings


def train_comparison(settings: Settings, out: Path, command: str) -> Comparison:
    """Train the runs that a folder lacks, and return the comparison. `command` is recorded in a new folder."""
    if not out.exists():
        start(settings, out, command, Display.on_stderr())
    return finish(out, Display.on_stderr())
