"""How far long work has come: said where the work is done, heard where somebody looks.

    with heard(bar):                             a command or a notebook: bar("reading wte", 4096, 50257)
        progress("reading wte", 4096, 50257)     anywhere below, at every step

    with doing("direct path", rows):             names what follows
        advance(4096)                            deep inside, which need not know what it is part of

Nobody passes a callback down: the listener is a context variable, and without one nothing happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, float, float], None]  # (what is done, how much of it, of how much)


def _silent(what: str, done: float, total: float) -> None: ...


_LISTENER: ContextVar[Listener] = ContextVar("listener", default=_silent)
_DOING: ContextVar[tuple[str, float, float] | None] = ContextVar("doing", default=None)


def progress(what: str, done: float, total: float) -> None:
    """Say that `done` of `total` of something is done."""
    _LISTENER.get()(what, done, total)


def advance(done: float) -> None:
    """Say how much is done of what the innermost `doing` around this line names; outside of any, say nothing."""
    named = _DOING.get()
    if named is not None:
        what, total, begun = named
        progress(what, begun + done, total)


@contextmanager
def doing(what: str, total: float, begun: float = 0) -> Iterator[None]:
    """Name what is done inside, for `advance`; `begun` of it were done before."""
    before = _DOING.set((what, total, begun))
    try:
        yield
    finally:
        _DOING.reset(before)


@contextmanager
def heard(listener: Listener) -> Iterator[Listener]:
    """Have `listener` called for all progress inside; yield who was called before, for a listener that passes it on."""
    outer = _LISTENER.get()
    before = _LISTENER.set(listener)
    try:
        yield outer
    finally:
        _LISTENER.reset(before)
