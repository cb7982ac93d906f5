"""Ctrl-C that a process does not forget, whatever becomes of the `KeyboardInterrupt`.

Python raises it in whatever runs at that moment, and not everything lets it through: within a `__set_name__` it
comes out as a `RuntimeError` (before Python 3.12), from a C extension's imports as an `ImportError` or `TypeError`
without a cause, from a finalizer not at all. So the command line listens from its first moment: an error behind a
press is the press, and training that begins after one stops at its first step.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Any

from tiewise.errors import Interrupted


class _Heard:
    pressed = False


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


def behind(error: BaseException) -> bool:
    """Whether Ctrl-C is behind an error: pressed before it, itself, or what it came from."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, (Interrupted, KeyboardInterrupt)):
        seen = seen.__cause__ or seen.__context__
    return seen is not None or pressed()


def _unraisable(what: Any) -> None:
    if not isinstance(what.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(what)
