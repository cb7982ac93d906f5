"""A progress bar for what takes long on a checkpoint: on stderr, only where someone looks, only after a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from tiewise.core.long_work import heard

SOON = 1.0  # seconds without a bar: what is over by then needs none


def long_reads(quiet: bool) -> AbstractContextManager[None]:
    """Show the progress inside as bytes read of what is being read; each has the bar to itself."""
    return _bar(quiet, ("DownloadColumn", "TransferSpeedColumn"), each=True)


def long_work(quiet: bool) -> AbstractContextManager[None]:
    """Show the progress inside as a part of the whole work."""
    return _bar(quiet, ("TaskProgressColumn", "TimeRemainingColumn"), each=False)


@contextmanager
def _bar(quiet: bool, columns: tuple[str, str], each: bool) -> Iterator[None]:
    """A bar with these of rich's columns; with `each` it begins anew for whatever is named."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich import progress
    from rich.console import Console

    bar = progress.Progress(
        progress.SpinnerColumn("line"),
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        *(getattr(progress, column)() for column in columns),
        console=Console(stderr=True),
        transient=True,
        speed_estimate_period=600,  # parts of one work differ: what is left is told by all that was done
    )
    task = bar.add_task("", total=None)
    begun = time.monotonic()
    of: tuple[str, float] | None = None

    def show(what: str, done: float, total: float) -> None:
        nonlocal of
        if time.monotonic() - begun < SOON:
            return
        if each and of != (what, total):
            bar.reset(task)
        of = (what, total)
        bar.start()
        bar.update(task, description=what, completed=done, total=total)

    try:
        with heard(show):
            yield
    finally:
        bar.stop()
