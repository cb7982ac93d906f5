"""Calls that end when their time is over, whatever they wait for.

The timeout of a socket starts again with every byte. So a server that sends a byte now and then, or one informational
answer after the other, never exceeds it. `call_within` runs a call in a separate thread. When the time is over, an
exception raised in that thread ends the call at its next instruction, and so closes its connection.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Result = TypeVar("Result")


class OutOfTime(Exception):
    """A call took longer than its limit."""


class _Stop(BaseException):
    """Raised in the thread of a call that takes too long."""


@dataclass
class TimeLimit:
    """End of the time of a call. The call may move it while it makes progress."""

    end: float  # by time.monotonic(), in seconds

    @classmethod
    def of(cls, seconds: float) -> TimeLimit:
        """Return the limit that ends in so many seconds."""
        return cls(time.monotonic() + seconds)

    @property
    def remaining(self) -> float:
        """Return the seconds that are left; negative after the end."""
        return self.end - time.monotonic()


def call_within(limit: TimeLimit, call: Callable[[], Result]) -> Result:
    """Return the result of a call, or raise its error.

    Raises:
        OutOfTime: the call does not end within the limit.

    >>> call_within(TimeLimit.of(seconds=1), lambda: 2 + 2)
    4
    """
    running = _RunningCall(call)
    running.start()
    try:
        while running.is_alive() and limit.remaining > 0:
            running.join(limit.remaining)
    except BaseException:  # Ctrl-C reaches the waiting thread
        running.stop()
        raise
    if running.is_alive():
        running.stop()
        raise OutOfTime
    return running.result()


class _RunningCall(threading.Thread, Generic[Result]):
    """Thread of one call. Python ends without waiting for it."""

    def __init__(self, call: Callable[[], Result]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._results = list[Result]()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the call, and keep its result or its error."""
        try:
            self._results.append(self._call())
        except BaseException as error:
            self._error = error

    def stop(self) -> None:
        """Raise an exception in the thread.

        It takes effect when the thread runs again: a socket that waits in silence ends by its own timeout.
        """
        assert self.ident is not None, "the thread was started"
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident), ctypes.py_object(_Stop))

    def result(self) -> Result:
        """Return the result of the finished call, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._results[0]
