"""A worker: a process on this machine that does one call after another.

    Worker.send(pickled call)     ── bytes ──►  serve: call()
    Worker.next_message()         ◄── at ─────  its progress
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

# settings that silence libraries, whose output would mix with the parent's progress
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
# A worker's messages: progress (text, steps, total steps); pickled value or error of a call; how the process was lost.
Progress = tuple[Literal["at"], str, float, float]
Answer = tuple[Literal["found", "error"], bytes]
Lost = tuple[Literal["lost"], str]
Message = Progress | Answer | Lost | tuple[Literal["ready"]]


class Work(Protocol):
    """Protocol of a job: the part of a `trainer.Job`, whose file imports torch, that workers use."""

    @property
    def title(self) -> str:
        """Name of the job in messages."""

    @property
    def folder(self) -> Path:
        """Folder of the job's run."""


class Worker:
    """Process on this machine; `job` is the job that it is doing."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        """Start the process; `env` adds to its environment variables."""
        self.job: Work | None = None
        self.ready = False  # True once the process handles Ctrl-C
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

    def start_job(self, job: Work, call: bytes) -> None:
        """Send the process a job: a pickled call without arguments."""
        self.job = job
        self.send(call)

    def send(self, call: bytes) -> None:
        """Send the process a pickled call without arguments."""
        with suppress(OSError):  # the process has ended; `next_message` reports that
            self.connection.send_bytes(call)

    def clear_job(self) -> None:
        """Note that the process has finished its job."""
        self.job = None

    def next_message(self) -> Message:
        """Return the next message; if the process has ended, one that says how."""
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
        """Make the process write a checkpoint and stop; kill one that still imports."""
        self.process.send_signal(signal.SIGINT if self.ready else signal.SIGKILL)

    def end(self) -> None:
        """End the process; an unfinished run can resume from its last checkpoint."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def serve(descriptor: int) -> None:
    """Do the calls from a connection in a worker's process, until the parent is gone."""
    # The parent stops this process by Ctrl-C. What it inherits may block that (Ray) or ignore it (nohup, jobs with &).
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    listen_for_ctrl_c()
    settle()
    connection = Connection(descriptor)
    calls: SimpleQueue[bytes] = SimpleQueue()

    def receive() -> None:
        """Queue the calls that arrive; exit when the connection closes."""
        with suppress(EOFError, OSError):
            while True:
                calls.put(connection.recv_bytes())
        os._exit(1)  # at once, like a kill, also in the middle of a step

    def send(message: Message) -> None:
        """Send a message to the parent."""
        try:
            connection.send(message)
        except OSError:  # the parent is gone, and `receive` may not have noticed
            os._exit(1)

    def show(text: str, n: float, of: float) -> None:
        """Send progress to the parent."""
        send(("at", text, n, of))

    press = _PressInCall()
    signal.signal(signal.SIGINT, press)
    Thread(target=receive, daemon=True).start()
    send(("ready",))
    while True:
        send(_outcome(calls.get(), press, show))


class _PressInCall:
    """Handler of Ctrl-C in a worker.

    Within a call, a press raises once. At other times it raises when the next call starts. A press never raises while a
    message is sent, so every call has one complete answer.
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
        self.in_call = False  # set here: a press may come just before the call ends
        self.raise_press(number, frame)

    def start_call(self) -> None:
        """Let a press raise from now on.

        KeyboardInterrupt: a press came since the last call.
        """
        self.in_call = True
        if self.is_waiting:
            self.is_waiting = False
            self(signal.SIGINT, None)


def _outcome(pickled: bytes, press: _PressInCall, show: Callable[[str, float, float], None]) -> Answer:
    """Do a pickled call; return ("found", pickled value) or ("error", pickled error)."""
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
    """Return an error with its traceback in a form that can be pickled."""
    try:
        wrapped: BaseException = ExceptionWithTraceback(error, error.__traceback__)
        pickle.loads(pickle.dumps(wrapped))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return wrapped


def settle() -> None:
    """Prepare a process that only trains: no garbage search in old objects, no memory returned.

    Every Trainer collects garbage, and imported modules are never garbage. Memory freed after a step or an evaluation
    waits for the next: returning pages and requesting them again takes a third of an evaluation's time.
    """
    gc.freeze()
    with suppress(AttributeError, OSError, TypeError):  # the C library has no mallopt
        for parameter in (-1, -3):  # thresholds in bytes for returning memory and for mapping it: never reached
            ctypes.CDLL(None).mallopt(parameter, 2**31 - 1)
