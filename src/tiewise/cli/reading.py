"""A progress bar for what takes long on a checkpoint: on stderr, only where someone looks, only after a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SOON = 1.0  # seconds without a bar: what is over by then needs none


@contextmanager
def long_reads(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Give a function that hears (what is being done, bytes done, bytes in all)."""
    if quiet or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    tasks = {}
    begun = time.monotonic()

    def tick(what: str, done: int, total: int) -> None:
        if time.monotonic() - begun < SOON:
            return
        if what not in tasks:
            bars.start()
            tasks[what] = bars.add_task(what, total=total)
        bars.update(tasks[what], completed=done, total=total)

    try:
        yield tick
    finally:
        bars.stop()
