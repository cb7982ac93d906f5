"""Ctrl-C that a process does not forget, whatever becomes of the `KeyboardInterrupt`.

Python raises it in whatever runs at that moment, and not everything lets it through: within a `__set_name__` it
comes out as a `RuntimeError` (before Python 3.12), from a C extension's imports as an `ImportError` or `TypeError`
without a cause, from a finalizer not at all. So the command line listens from its first moment: an error behind a
press is the press, and training that begins after one stops at its first step.

What must clean up behind itself works within `ending`, where SIGTERM and SIGHUP raise too.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tiewise.core.errors import Interrupted

ENDS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class _Heard:
    pressed = False
    ending: Ending | None = None


def listen() -> None:
    """Remember Ctrl-C from now on, in this process; a press that a finalizer swallows is not printed.

    A process that was started to ignore it, as a shell starts what runs in the background, goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, press)
        sys.unraisablehook = _unraisable


def press(number: int, frame: FrameType | None) -> None:
    """Handle the signal: note it, and raise as Python does by itself."""
    _Heard.pressed = True
    raise KeyboardInterrupt


def pressed() -> bool:
    """Whether Ctrl-C was pressed while `press` handled it, seen since or not."""
    return _Heard.pressed


class Noted:
    """A handler that notes Ctrl-C until somebody can act on it; a second press acts at once."""

    def __init__(self, pressed: bool = False) -> None:
        self.pressed = pressed

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


def handle(handler: Any) -> Any:
    """Set what Ctrl-C does and return what it did; only the main thread can, and only it gets Ctrl-C."""
    if threading.current_thread() is threading.main_thread():
        return signal.signal(signal.SIGINT, handler)
    return signal.getsignal(signal.SIGINT)


def behind(error: BaseException) -> bool:
    """Whether Ctrl-C is behind an error: pressed before it, itself, or what it came from."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, (Interrupted, KeyboardInterrupt)):
        seen = seen.__cause__ or seen.__context__
    return seen is not None or pressed()


class Ending:
    """What signals do within `ending`: the first raises, further ones wait; all of them once `hold` was called."""

    def __init__(self) -> None:
        self.before: dict[int, Any] = {}
        self._held = False
        self._waiting: int | None = None

    def hold(self) -> None:
        """Let signals wait from now on: what follows is finished whatever comes."""
        self._held = True

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self._held:
            self._waiting = number
            return
        self._held = True
        self._raise(number)

    def put_back(self) -> None:
        """Give every signal the handler back that it had."""
        self._held = True
        for number, handler in reversed(self.before.items()):  # Ctrl-C last: it may raise as soon as it can
            signal.signal(number, handler)

    def catch_up(self) -> None:
        """Raise for a signal that waited."""
        if self._waiting is not None:
            self._raise(self._waiting)

    def _raise(self, number: int) -> None:
        handler = self.before[number]
        if callable(handler):
            handler(number, None)
        raise SystemExit(128 + number)


@contextmanager
def ending() -> Iterator[Ending]:
    """Let Ctrl-C, SIGTERM and SIGHUP end a block by raising, KeyboardInterrupt or SystemExit, and only once.

    Cleaning up behind that is not interrupted. A signal that is ignored, as SIGHUP under nohup, or that somebody else
    handles keeps its handler; so do all in other threads than the main one. A block within a block adds nothing.
    """
    if _Heard.ending is not None or threading.current_thread() is not threading.main_thread():
        yield _Heard.ending or Ending()
        return
    made = Ending()
    try:
        _Heard.ending = made
        for number in ENDS:
            handler = signal.getsignal(number)
            if handler in (signal.SIG_DFL, signal.default_int_handler, press):
                made.before[number] = handler
                signal.signal(number, made)
        try:
            yield made
        finally:
            made.hold()
    finally:
        _Heard.ending = None
        made.put_back()
    made.catch_up()


def _unraisable(what: Any) -> None:
    if not isinstance(what.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(what)
