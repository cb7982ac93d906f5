"""A worker: a process of this machine that does one call after another, and what it says meanwhile.

    Worker.send(pickled call)     ── bytes ──►  serve: call()
    Worker.says()                 ◄── at ─────  its progress
                                  ◄── found or error: the value or the error, pickled again

`subprocess` starts it in a separate session, so Ctrl-C reaches it from its parent alone. At the first press the worker
writes a checkpoint, at the second it ends. If the parent ends, in whatever way, the connection closes and the worker
ends at once.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import FrameType
from typing import Literal, Protocol

from tiewise.core.interrupts import listen_for_ctrl_c, raise_at_ctrl_c
from tiewise.core.progress import listen_to_progress

# what libraries would print over each other; the parent shows progress
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
# A worker's messages: its progress (text, steps, of so many), the pickled value or error of its call, how it was lost.
Progress = tuple[Literal["at"], str, float, float]
Answer = tuple[Literal["found", "error"], bytes]
Lost = tuple[Literal["lost"], str]
Message = Progress | Answer | Lost | tuple[Literal["ready"]]


class Work(Protocol):
    """A job as workers see it: a `trainer.Job`, whose file imports torch."""

    @property
    def title(self) -> str:
        """Return its name in messages."""

    @property
    def folder(self) -> Path:
        """Return the folder of its run."""


class Worker:
    """A process on this machine; `job` is what it has in hand."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        """`env` is set beside what this process has."""
        self.job: Work | None = None
        self.ready = False  # to be told of Ctrl-C
        self.connection, theirs = Pipe()
        first = f"import gc, sys; gc.set_threshold{gc.get_threshold()}; sys.path[:] = {sys.path!r}"
        begin = f"{first}; import tiewise.training.run; from tiewise.training.worker_process import serve"
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{begin}; serve({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            env=os.environ | (env or {}) | _QUIET,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    def take(self, job: Work, call: bytes) -> None:
        """Have it do a job: a pickled call without arguments."""
        self.job = job
        self.send(call)

    def send(self, call: bytes) -> None:
        """Have it do a pickled call without arguments."""
        with suppress(OSError):  # it has ended, which is seen when it is asked what it says
            self.connection.send_bytes(call)

    def release(self) -> None:
        """Note that it has no job in hand any more."""
        self.job = None

    def next_message(self) -> Message:
        """Return its next message; that of a process which has ended is that it is lost, and how."""
        try:
            message: Message = pickle.loads(self.connection.recv_bytes())
            self.ready = True
            return message
        except (EOFError, OSError, pickle.UnpicklingError):
            code = self.process.wait()
        if code < 0:
            return "lost", f"was ended by {signal.Signals(-code).name}"
        return "lost", f"ended with exit code {code}"

    def stop(self) -> None:
        """Have it write a checkpoint and stop; one that still imports has nothing to write."""
        self.process.send_signal(signal.SIGINT if self.ready else signal.SIGKILL)

    def end(self) -> None:
        """End the process; a run that is not finished is taken up by its last checkpoint."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def serve(descriptor: int) -> None:
    """Do in a worker's process what comes through the connection, until its parent is gone."""
    if hasattr(signal, "pthread_sigmask"):  # Ray's processes ignore Ctrl-C, and a process inherits that
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    listen_for_ctrl_c()
    settle()
    connection = Connection(descriptor)
    calls: SimpleQueue[bytes] = SimpleQueue()

    def receive() -> None:
        with suppress(EOFError, OSError):
            while True:
                calls.put(connection.recv_bytes())
        os._exit(1)  # in the middle of a step, as a kill would

    def send(message: Message) -> None:
        try:
            connection.send(message)
        except OSError:  # the process that reads it is gone, which `receive` may not have noticed yet
            os._exit(1)

    def show(text: str, n: float, of: float) -> None:
        send(("at", text, n, of))

    press = _PressInCall()
    if signal.getsignal(signal.SIGINT) is raise_at_ctrl_c:
        signal.signal(signal.SIGINT, press)
    Thread(target=receive, daemon=True).start()
    send(("ready",))
    while True:
        send(_outcome(calls.get(), press, show))


class _PressInCall:
    """Handler of Ctrl-C in a worker: a press raises once within a call, and otherwise when the next call starts.

    A press never raises while a message is sent, so every call has one complete answer.
    """

    def __init__(self, raise_press: Callable[[int, FrameType | None], None] = raise_at_ctrl_c) -> None:
        self.raise_press = raise_press
        self.in_call = False
        self.is_waiting = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if not self.in_call:
            self.is_waiting = True
            return
        self.in_call = False  # by itself: a press may come just before the call's own end
        self.raise_press(number, frame)

    def start_call(self) -> None:
        """Let a press raise from now on; raise KeyboardInterrupt for one that waits."""
        self.in_call = True
        if self.is_waiting:
            self.is_waiting = False
            self(signal.SIGINT, None)


def _outcome(pickled: bytes, press: _PressInCall, show: Callable[[str, float, float], None]) -> Answer:
    """Do a pickled call; return ("found", its pickled value) or ("error", the pickled error)."""
    try:
        try:
            press.start_call()
            call: Callable[[], object] = pickle.loads(pickled)
            with listen_to_progress(show):
                value = pickle.dumps(call())
        finally:
            press.in_call = False
    except BaseException as error:
        return "error", pickle.dumps(_portable(error))
    return "found", value


def _portable(error: BaseException) -> BaseException:
    """Return an error with its traceback in a form that survives pickling."""
    try:
        wrapped: BaseException = ExceptionWithTraceback(error, error.__traceback__)
        pickle.loads(pickle.dumps(wrapped))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return wrapped


def settle() -> None:
    """Have a process that does nothing but train keep what it has.

    Every Trainer collects garbage, and imported modules never are any. Memory that a step or an evaluation frees waits
    for the next: to give pages back and to get them again takes a third of an evaluation's time.
    """
    gc.freeze()
    with suppress(AttributeError, OSError, TypeError):  # another C library
        for parameter in (-1, -3):  # from how many bytes on memory is given back, and mapped: never
            ctypes.CDLL(None).mallopt(parameter, 2**31 - 1)
