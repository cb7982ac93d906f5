"""Ctrl-C, and the signals that end a process.

Ctrl-C is remembered even if its `KeyboardInterrupt` is lost. Python raises that exception in whatever code runs at
the moment, and some code replaces it: `__set_name__` by a `RuntimeError` (before Python 3.12), the imports of a C
extension by an `ImportError` or `TypeError` without a cause. A finalizer discards it. Therefore the command line
records the signal from its first moment. An error that follows Ctrl-C counts as Ctrl-C, and training that starts
after it stops at its first step.

Code that must clean up after itself runs within `graceful_signals`, where SIGTERM and SIGHUP raise too.
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

ENDING_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class _State:
    """State of this process's signal handling."""

    is_pressed = False
    graceful: GracefulSignals | None = None


def listen_for_ctrl_c() -> None:
    """Record Ctrl-C from now on.

    If this process was started to ignore Ctrl-C, as shells do for background jobs, it still ignores it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, raise_at_ctrl_c)
        sys.unraisablehook = _print_unraisable  # prints no Ctrl-C that a finalizer discarded


def raise_at_ctrl_c(number: int, frame: FrameType | None) -> None:
    """Handle the signal: record it, then raise KeyboardInterrupt as Python does by default."""
    _State.is_pressed = True
    raise KeyboardInterrupt


def was_ctrl_c_pressed() -> bool:
    """Return whether `raise_at_ctrl_c` ever handled Ctrl-C, even if its exception was lost."""
    return _State.is_pressed


class NotedCtrlC:
    """Signal handler that records Ctrl-C until the program can act on it.

    A second Ctrl-C raises at once.
    """

    def __init__(self, pressed: bool = False) -> None:
        self.pressed = pressed

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True


def set_ctrl_c_handler(handler: Any) -> Any:
    """Set the handler of Ctrl-C and return the one before.

    Only the main thread can set it, and only the main thread gets Ctrl-C. In other threads nothing is set.
    """
    if threading.current_thread() is threading.main_thread():
        return signal.signal(signal.SIGINT, handler)
    return signal.getsignal(signal.SIGINT)


def is_caused_by_ctrl_c(error: BaseException) -> bool:
    """Return whether Ctrl-C caused an error.

    It did if the error or one of its causes is Ctrl-C, or if Ctrl-C was pressed before.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, (Interrupted, KeyboardInterrupt)):
        cause = cause.__cause__ or cause.__context__
    return cause is not None or was_ctrl_c_pressed()


class GracefulSignals:
    """Signal handler within `graceful_signals`: the first signal raises, later ones wait.

    If `is_deferring` is true, all signals wait.
    """

    def __init__(self) -> None:
        self.previous_handlers: dict[int, Any] = {}  # by signal number
        self.is_deferring = False  # True: signals wait, so that the code that follows always finishes
        self.pending: int | None = None  # number of the signal that waits

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.is_deferring:
            self.pending = number
            return
        self.is_deferring = True
        handler = self.previous_handlers[number]
        if callable(handler):
            handler(number, None)
        raise SystemExit(128 + number)


@contextmanager
def graceful_signals() -> Iterator[GracefulSignals]:
    """Let the first Ctrl-C, SIGTERM or SIGHUP end a block by KeyboardInterrupt or SystemExit.

    Later signals do not interrupt the cleaning up. A signal keeps its handler if it is ignored, as SIGHUP is under
    nohup, or if other code handles it. In other threads than the main one all handlers stay. A block within a block
    changes nothing.
    """
    if _State.graceful is not None or threading.current_thread() is not threading.main_thread():
        yield _State.graceful or GracefulSignals()
        return
    signals = GracefulSignals()
    try:
        _State.graceful = signals
        for number in ENDING_SIGNALS:
            handler = signal.getsignal(number)
            if handler in (signal.SIG_DFL, signal.default_int_handler, raise_at_ctrl_c):
                signals.previous_handlers[number] = handler
                signal.signal(number, signals)
        try:
            yield signals
        finally:
            signals.is_deferring = True
    finally:
        _State.graceful, signals.is_deferring = None, True
        for number, handler in reversed(signals.previous_handlers.items()):  # Ctrl-C last: it may raise at once
            signal.signal(number, handler)
    if signals.pending is not None:
        signals.is_deferring = False
        signals(signals.pending, None)


def _print_unraisable(unraisable: Any) -> None:
    """Print an exception that could not be raised, unless it is a KeyboardInterrupt."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
