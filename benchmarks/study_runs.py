"""One comparison of a study that a script trains, also with seeds after those of the study."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tiewise.training import compare
from tiewise.training.compare import Display, finish, start
from tiewise.training.results import Comparison
from tiewise.training.settings import Settings
from tiewise.training.trainer import Job


def train_comparison(settings: Settings, out: Path, command: str) -> Comparison:
    """Train the runs that a folder lacks, and return the comparison. `command` is recorded in a new folder."""
    if not out.exists():
        start(settings, out, command, Display.on_stderr())
    return finish(out, Display.on_stderr())


@contextmanager
def later_seeds(earlier: int) -> Iterator[None]:
    """Give the runs that are trained meanwhile the seeds after `earlier` ones: the first has `earlier` + 1."""
    plain = compare.with_seed

    def with_later_seed(job: Job, seed: int, *rest: Any) -> Job:
        return plain(job, seed + earlier, *rest)

    with patch.object(compare, "with_seed", with_later_seed):
        yield
