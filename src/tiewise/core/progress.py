"""Progress reports from deep inside a computation to the caller's progress bar.

    with listen_to_progress(bar):                       a command or a notebook: bar("reading wte", 4096, 50257)
        report_progress("reading wte", 4096, 50257)     anywhere below, at every step

    with progress_of("direct path", rows):              names the task of the block
        advance_progress(4096)                          deep inside, where the task is unknown

No function passes a callback down: the listener is a context variable. Without a listener nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ProgressListener = Callable[[str, float, float], None]  # (task, amount done, total amount)

_LISTENER: ContextVar[ProgressListener] = ContextVar("listener", default=lambda task, done, total: None)
_TASK: ContextVar[tuple[str, float, float] | None] = ContextVar("task", default=None)  # (task, total, start)


def report_progress(task: str, done: float, total: float) -> None:
    """Report that `done` of `total` of a task is done. A total of 0 is a wait without a measure."""
    _LISTENER.get()(task, done, total)


def advance_progress(done: float) -> None:
    """Report how much of the innermost `progress_of` block is done.

    Outside of such a block it reports nothing.
    """
    current = _TASK.get()
    if current is not None:
        task, total, start = current
        report_progress(task, start + done, total)


@contextmanager
def progress_of(task: str, total: float, start: float = 0) -> Iterator[None]:
    """Name the task of a block for `advance_progress`.

    `start` is the amount that was done before the block.
    """
    before = _TASK.set((task, total, start))
    try:
        yield
    finally:
        _TASK.reset(before)


@contextmanager
def listen_to_progress(listener: ProgressListener) -> Iterator[ProgressListener]:
    """Call `listener` with every progress report of a block.

    Yields the listener that was active before, so that `listener` can pass reports on to it.
    """
    outer = _LISTENER.get()
    before = _LISTENER.set(listener)
    try:
        yield outer
    finally:
        _LISTENER.reset(before)
