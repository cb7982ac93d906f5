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
    """Give a function that hears (what is being read, bytes done, bytes in all)."""
    return _bars(quiet, _bytes)


def long_work(quiet: bool) -> AbstractContextManager[Tick]:
    """Give a function that hears (what is being done, steps done, steps in all)."""
    return _bars(quiet, _steps)


def _bytes() -> tuple[Any, ...]:
    from rich.progress import DownloadColumn, TransferSpeedColumn

    return DownloadColumn(), TransferSpeedColumn()


def _steps() -> tuple[Any, ...]:
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    return MofNCompleteColumn(), TimeRemainingColumn()


@contextmanager
def _bars(quiet: bool, columns: Callable[[], tuple[Any, ...]]) -> Iterator[Tick]:
    if quiet or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    bars = Progress(
        TextColumn("{task.description}"), BarColumn(), *columns(), console=Console(stderr=True), transient=True
    )
    tasks: dict[str, Any] = {}
    begun = time.monotonic()

    def tick(what: str, done: int, total: int) -> None:
        if time.monotonic() - begun < SOON:
            return
        if what not in tasks:
            bars.start()
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=done, total=total, visible=done < total)

    try:
        yield tick
    finally:
        bars.stop()
