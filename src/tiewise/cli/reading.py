"""A progress bar for what takes long on a checkpoint: on stderr, only where someone looks, only after a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

SOON = 1.0  # seconds without a bar: what is over by then needs none
Tick = Callable[[str, int, int], None]


def long_reads(quiet: bool) -> AbstractContextManager[Tick]:
    """Give a function that hears (what is being read, bytes done, bytes in all); each has the bar to itself."""
    return _bar(quiet, _bytes)


def long_work(quiet: bool) -> AbstractContextManager[Tick]:
    """Give a function that hears (what is being done, parts done, parts in all of the whole work)."""
    return _bar(quiet, _whole)


def _bytes(progress: Any) -> tuple[Any, ...]:
    return progress.DownloadColumn(), progress.TransferSpeedColumn()


def _whole(progress: Any) -> tuple[Any, ...]:
    return progress.TaskProgressColumn(), progress.TimeRemainingColumn()


@contextmanager
def _bar(quiet: bool, columns: Callable[[Any], tuple[Any, ...]]) -> Iterator[Tick]:
    if quiet or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.SpinnerColumn("line"),
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        *columns(progress),
        console=Console(stderr=True),
        transient=True,
        speed_estimate_period=600,  # parts of one work differ: what is left is told by all that was done
    )
    task = bar.add_task("", total=None)
    begun = time.monotonic()
    of: tuple[str, int] | None = None

    def tick(what: str, done: int, total: int) -> None:
        nonlocal of
        if time.monotonic() - begun < SOON:
            return
        if columns is _bytes and of != (what, total):
            bar.reset(task)
        of = (what, total)
        bar.start()
        bar.update(task, description=what, completed=done, total=total)

    try:
        yield tick
    finally:
        bar.stop()
