"""Several runs at a time, each in a process of its own.

    Workers.each(train, jobs, …)  ── (work, job, threads) ──►  a worker: work(job), with its share of the threads
        show(job, what, n, of)    ◄───────── at ───────────    what it says of its progress
        done(job, value)          ◄──────── found ─────────    the value, or the error that ended it

A worker is started by `subprocess`: `multiprocessing` would run the caller's script again. It is in a session of its
own, so Ctrl-C comes to it from its parent alone, as to a run that is alone: once, and it writes a checkpoint; twice,
and it is gone. However the parent ends, the connection closes and the worker ends at once.
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
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from queue import SimpleQueue
from threading import Thread
from types import FrameType
from typing import Any, TypeVar

import torch

from tiewise.core.errors import Interrupted, RunError
from tiewise.core.long_work import NotedPress, ctrl_c_was_pressed, heard, listen_for_ctrl_c, set_ctrl_c
from tiewise.training.trainer import Job

T = TypeVar("T")
AUTO = "auto"
# what libraries would print over each other; the parent shows progress
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}


class Workers:
    """How many runs are trained at a time (`auto`: 1 until they are known), and a context that ends their processes."""

    def __init__(self, asked: int | str = AUTO) -> None:
        """`asked`: so many, or `auto`. Raises RunError for anything else."""
        if asked != AUTO and not (str(asked).isdecimal() and int(asked) > 0):
            raise RunError(f"jobs = {asked!r}", "give how many runs are trained at a time, 1 or more, or auto")
        self.asked = asked
        self.count, self.threads = 1 if asked == AUTO else int(asked), torch.get_num_threads()
        self.chosen = False  # whether `auto` has found its count
        self._open: list[_Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.end()

    def end(self) -> None:
        """End all processes."""
        while self._open:
            worker = self._open.pop()
            worker.connection.close()
            worker.process.kill()  # a run that is not finished is taken up by its last checkpoint
            worker.process.wait()

    def each(
        self,
        work: Callable[[Job], T],
        jobs: Sequence[Job],
        show: Callable[[Job, str, float, float], None],
        done: Callable[[Job, T], None],
    ) -> list[T]:
        """Return `work(job)` of each job, in this order; `done` is told of each as it ends, `show` of its progress.

        The last jobs, where there are fewer of them than are done at a time, share all threads.

        Raises the first error of any, when the others have stopped with a checkpoint; Interrupted after Ctrl-C.
        """
        if self.count == 1:
            found = []
            for job in jobs:
                with heard(lambda what, n, of, job=job: show(job, what, n, of)):  # type: ignore[misc]
                    found.append(work(job))
                done(job, found[-1])
            return found
        while len(self._open) < min(self.count, len(jobs)):
            self._open.append(_Worker())
        last = len(jobs) % self.count
        shares = [self.threads] * (len(jobs) - last) + [max(1, torch.get_num_threads() // max(1, last))] * last
        values, waiting, end = {}, deque(zip(jobs, shares, strict=True)), None
        press = _PassedOn(self._open)
        before = set_ctrl_c(press)
        try:
            while True:
                for worker in self._open:
                    if worker.job is None and waiting and end is None and not press.pressed:
                        worker.take(work, *waiting.popleft())
                busy = {worker.connection: worker for worker in self._open if worker.job is not None}
                if not busy:
                    break
                for connection in wait(list(busy)):
                    worker = busy[connection]  # type: ignore[index]
                    what, *said = worker.says(press.pressed)
                    if what == "at":
                        show(worker.job, *said)
                    elif what == "found":
                        job, worker.job = worker.job, None
                        values[job] = said[0]
                        done(job, said[0])
                    elif what == "error":
                        worker.job = None
                        if end is None and not press.pressed:  # the others need not go on
                            press.stop()
                        if end is None or (press.pressed and isinstance(said[0], Interrupted)):
                            end = said[0]
        finally:
            set_ctrl_c(before)
        if end is not None or press.pressed:
            raise end or KeyboardInterrupt
        return [values[job] for job in jobs]


class _Worker:
    """A process that does one thing after another; `job` is what it has in hand."""

    def __init__(self) -> None:
        self.job: Any = None  # or None
        self.ready = False  # to be told of Ctrl-C
        self.connection, theirs = Pipe()
        first = f"import gc, sys; gc.set_threshold{gc.get_threshold()}; sys.path[:] = {sys.path!r}"
        begin = f"{first}; from tiewise.training.workers import serve"
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{begin}; serve({theirs.fileno()})"],
            pass_fds=[theirs.fileno()],
            env=os.environ | _QUIET,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    def take(self, work: Callable[[Job], Any], job: Job, threads: int) -> None:
        """Have it do a piece of work by so many threads."""
        self.job = job
        with suppress(OSError):  # it has ended, which is seen when it is asked what it says
            self.connection.send((work, job, threads))

    def says(self, stopped: bool) -> tuple[Any, ...]:
        """Return its next message; that of a process which has ended is the error that this is."""
        try:
            said: tuple[Any, ...] = self.connection.recv()
            self.ready = True
            return said
        except (EOFError, OSError, pickle.UnpicklingError):
            code = self.process.wait()
        if stopped:
            return "error", KeyboardInterrupt()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        fix = "--resume goes on from its last checkpoint, with a smaller --jobs where memory ran out"
        return "error", RunError(f"{self.job.title}: its process {how}", fix)


class _PassedOn(NotedPress):
    """Passes Ctrl-C on to the workers that have something in hand."""

    def __init__(self, workers: list[_Worker]) -> None:
        super().__init__(ctrl_c_was_pressed())
        self.workers = workers

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        self.stop()
        super().__call__(number, frame)

    def stop(self) -> None:
        """Have all of them write a checkpoint and stop; one that still imports has nothing to write."""
        for worker in self.workers:
            if worker.job is not None:
                worker.process.send_signal(signal.SIGINT if worker.ready else signal.SIGKILL)


def serve(descriptor: int) -> None:
    """Do in a worker's process what comes through the connection, until whoever started it is gone."""
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
            work, job, threads = pickle.loads(asked.get())
            torch.set_num_threads(threads)
            with heard(lambda what, n, of: connection.send(("at", what, n, of))):
                answer = "found", work(job)
        except BaseException as error:
            answer = "error", _portable(error)
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
