"""A process that does one thing after another, for whoever holds the other end of its connection.

    Worker.take(job, call, …)  ── a call, pickled ──►  serve: calls it, by its share of the threads
           says()              ◄─────── at ─────────   what it says of its progress
                               ◄── found or error ──   the value, or what ended it, pickled a second time

Nothing here imports torch: what carries words between two machines (`streamed`, a Ray task) need not hold a second one.

A worker is started by `subprocess`: `multiprocessing` would run the caller's script again. It is in a session of its
own, so Ctrl-C comes to it from its parent alone, as to a run that is alone: once, and it writes a checkpoint; twice,
and it is gone. However the parent ends, the connection closes and the worker ends at once.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from multiprocessing.connection import Connection, Pipe
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from tiewise.core import __version__
from tiewise.core.errors import RunError
from tiewise.core.long_work import heard, listen_for_ctrl_c

# what libraries would print over each other; the parent shows progress
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
TOKEN = ".token"  # in the folder of a run whose processes are on other machines
_PAUSE = 0.5  # seconds between two words of progress that go to another machine
_PATIENCE = 5.0  # seconds in which what one machine wrote is seen by another, where their file system is slow to tell


class Worker:
    """A process of one's own; `job` is what it has in hand."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        """`env` is set beside what this process has."""
        self.job: Any = None  # or None
        self.ready = False  # to be told of Ctrl-C
        self.connection, theirs = Pipe()
        first = f"import gc, sys; gc.set_threshold{gc.get_threshold()}; sys.path[:] = {sys.path!r}"
        begin = f"{first}; import tiewise.training.run; from tiewise.training.worker import serve"
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{begin}; serve({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            env=os.environ | (env or {}) | _QUIET,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    def take(self, job: Any, call: bytes) -> None:
        """Have it do a piece of work: a pickled call without arguments."""
        self.job = job
        with suppress(OSError):  # it has ended, which is seen when it is asked what it says
            self.connection.send_bytes(call)

    def says(self) -> tuple[Any, ...]:
        """Return its next message; that of a process which has ended is that it is lost, and how."""
        try:
            said: tuple[Any, ...] = pickle.loads(self.connection.recv_bytes())
            self.ready = True
            return said
        except (EOFError, OSError, pickle.UnpicklingError):
            code = self.process.wait()
        return "lost", f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def stop(self) -> None:
        """Have it write a checkpoint and stop; one that still imports has nothing to write."""
        self.process.send_signal(signal.SIGINT if self.ready else signal.SIGKILL)

    def end(self) -> None:
        """End the process; a run that is not finished is taken up by its last checkpoint."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


def serve(descriptor: int) -> None:
    """Do in a worker's process what comes through the connection, until whoever started it is gone."""
    if hasattr(signal, "pthread_sigmask"):  # Ray's processes ignore Ctrl-C, and a process inherits that
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    listen_for_ctrl_c()
    settle()
    connection = Connection(descriptor)
    asked: SimpleQueue[bytes] = SimpleQueue()

    def receive() -> None:
        with suppress(EOFError, OSError):
            while True:
                asked.put(connection.recv_bytes())
        os._exit(1)  # in the middle of a step, as a kill would

    Thread(target=receive, daemon=True).start()
    connection.send(("ready",))
    while True:
        try:
            call: Callable[[], Any] = pickle.loads(asked.get())
            with heard(lambda what, n, of: connection.send(("at", what, n, of))):
                answer = "found", pickle.dumps(call())
        except BaseException as error:
            answer = "error", pickle.dumps(_portable(error))
        connection.send(answer)


def _portable(error: BaseException) -> BaseException:
    """Return an error with its traceback in a form that survives pickling."""
    try:
        wrapped = ExceptionWithTraceback(error, error.__traceback__)
        pickle.loads(pickle.dumps(wrapped))
    except Exception:
        return RuntimeError("".join(traceback.format_exception(error)))
    return wrapped


def settle() -> None:
    """Have a process that does nothing but train keep what it has.

    Every Trainer collects garbage, and what was imported never is any. Memory that a step or an evaluation frees waits
    for the next: to give pages back and to be given them anew takes a third of an evaluation's time.
    """
    gc.freeze()
    with suppress(AttributeError, OSError, TypeError):  # another C library
        for parameter in (-1, -3):  # from how many bytes on memory is given back, and mapped: never
            ctypes.CDLL(None).mallopt(parameter, 2**31 - 1)


_kept: dict[str | None, Worker] = {}  # by the GPUs that it sees: the next task here need not import everything again


def streamed(call: bytes, env: Mapping[str, str], folder: str, token: str, needed: str) -> Iterator[tuple[Any, ...]]:
    """Yield what a worker says of a pickled call, a word of progress now and then: what a Ray task does on its machine.

    A task that is cancelled has the worker write its checkpoint and ends then. A machine that cannot train the run in
    `folder` refuses, see `fault`.
    """
    if wrong := fault(folder, token, needed):
        yield "error", pickle.dumps(RunError(f"{platform.node()} {wrong[0]}", wrong[1]))
        return
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    worker = _kept.pop(gpus, None) or Worker(env)
    worker.take(call, call)
    due = 0.0
    try:
        while worker.job is not None:
            while not worker.connection.poll(_PAUSE):
                pass  # between two of these a cancelled task gets its KeyboardInterrupt, which wakes no waiting read
            what, *said = worker.says()
            if what in ("found", "error", "lost"):
                worker.job = None
                if what != "lost":
                    _kept[gpus] = worker
                yield what, *said
            elif what == "at" and time.monotonic() >= due:
                due = time.monotonic() + _PAUSE
                yield what, *said
    finally:
        if worker.job is not None:
            worker.stop()
            while worker.says()[0] not in ("found", "error", "lost"):
                pass
            worker.end()


def fault(folder: str, token: str, needed: str) -> tuple[str, str] | None:
    """Return why this machine cannot train a run of the head's, and the way out; None where it can.

    The head wrote `token` into the run's folder, and `needed` says what is installed there.
    """
    if (has := installed()) != needed:
        return f"has {has}, and the run began with {needed}", "install the same on every machine"
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        with suppress(OSError):
            if (Path(folder) / TOKEN).read_text(encoding="utf-8") == token:
                return None
        time.sleep(0.2)
    return f"does not see {folder} as it is here", "give an --out on a file system that all machines share"


def installed() -> str:
    """What must be the same on all machines, since their figures are compared."""
    python = ".".join(platform.python_version_tuple()[:2])
    return f"tiewise {__version__}, torch {version('torch')}, Python {python}"
