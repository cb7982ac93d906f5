"""Worker processes that train several runs at a time.

    Workers.each(train, jobs, …)  ── (work, job, threads), pickled ──►  serve: work(job), with its share of the threads
        show(job, what, n, of)    ◄────────────── at ──────────────     its progress
        done(job, value)          ◄─────── found or error ─────────     the value or the error, pickled again

`hire` and `hear` decide where the processes are: here on this machine, in `launchers` on others. This module does not
import torch itself, because a process that only passes messages (`streamed`, a Ray task) does not need it.

`subprocess` starts a worker in a separate session, so Ctrl-C reaches it from its parent alone. At the first press the
worker writes a checkpoint, at the second it ends. If the parent ends, in whatever way, the connection closes and the
worker ends at once.

The processes are our own because `concurrent.futures` (Python 3.11) and loky (3.7) break documented promises.
`test_workers.py` tests our side. The tests named for the other side are in `test_process_pools.py`. Each turns red as
soon as `concurrent.futures` keeps the promise:

- A run whose process is killed is named with the signal, and the other runs write a checkpoint
  (`test_a_worker_that_is_killed_is_named_and_the_others_can_be_resumed`). Both pools end all processes with the one
  that is killed, and every run gets the same error
  (`test_one_killed_process_fails_all_calls_and_no_error_names_its_work`). `concurrent.futures` sometimes hangs instead.
- Workers end with their parent, also if it is killed (`test_process.py`). Those of both pools live on
  (`test_a_process_outlives_its_killed_parent`).
- A script may call `tiewise.compare` without `if __name__ == "__main__"` (`test_a_script_without_a_guard_runs_once`).
  `concurrent.futures` runs the script again in every process
  (`test_a_script_without_a_guard_runs_again`).
- Ctrl-C on a terminal prints no traceback, also while a process starts
  (`test_ctrl_c_while_a_worker_is_started_ends_it`). Both pools start processes in the session of the parent, and cannot
  do otherwise (`test_a_process_is_in_the_session_of_its_parent`).
- Ctrl-C just as a run ends prints no traceback either
  (`test_ctrl_c_just_after_a_run_has_ended_keeps_its_value_and_says_nothing`). A process of
  `concurrent.futures` prints one and ends. The next call then raises, or never returns.
- Nothing but the workers is started. Both pools start processes that track semaphores, which end with the parent only
  and print warnings if it is killed.

A prototype had one pool of one process for each worker. An initializer watched the parent, redirected the output and
opened a pipe for progress. It kept the first two promises and broke the others, and loky kept the third as well. Either
took more statements than this module. Ray is an optional package that takes six seconds to start nine processes, and
each of its tasks needs a `Worker` too.
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
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from importlib.metadata import version
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.pool import ExceptionWithTraceback  # type: ignore[attr-defined]
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import FrameType
from typing import Generic, Literal, Protocol, TypeVar

from tiewise.core import Late, __version__
from tiewise.core.errors import (
    Interrupted,
    NotedPress,
    RunError,
    ctrl_c_came,
    heard,
    listen_for_ctrl_c,
    raise_at_ctrl_c,
    set_ctrl_c,
)

torch = Late("torch")
AUTO = "auto"
# what libraries would print over each other; the parent shows progress
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
TOKEN = ".token"  # in the folder of a run whose processes are on other machines
_PAUSE = 0.5  # seconds between two words of progress that go to another machine
_PATIENCE = 5.0  # seconds in which what one machine wrote is seen by another, where their file system is slow to tell


class Work(Protocol):
    """A job as workers see it: a `trainer.Job`, whose file imports torch."""

    @property
    def title(self) -> str:
        """Return its name in messages."""

    @property
    def folder(self) -> Path:
        """Return the folder of its run."""


T = TypeVar("T")
J = TypeVar("J", bound=Work)
# A worker's messages: its progress (text, steps, of so many), the pickled value or error of its call, how it was lost.
Progress = tuple[Literal["at"], str, float, float]
Answer = tuple[Literal["found", "error"], bytes]
Lost = tuple[Literal["lost"], str]
Message = Progress | Answer | Lost | tuple[Literal["ready"]]


class Hired(Protocol):
    """A process, here or elsewhere, that does one call after another."""

    @property
    def job(self) -> Work | None:
        """Return the job that it has in hand."""

    def take(self, job: Work, call: bytes) -> None:
        """Have it do a job: a pickled call without arguments."""

    def release(self) -> None:
        """Note that it has no job in hand any more."""

    def says(self) -> Message:
        """Return its next message."""

    def stop(self) -> None:
        """Have it write a checkpoint and stop."""

    def end(self) -> None:
        """End it."""


class Workers(AbstractContextManager["Workers"]):
    """How many runs are trained at a time (`auto`: 1 until they are known), and a context that ends their processes."""

    retries = 0  # so often a run whose process is lost is taken up again

    def __init__(self, asked: int | str = AUTO, say: Callable[[str], None] = lambda line: None) -> None:
        """`asked`: so many, or `auto`; `say` takes a line. Raises RunError for anything else."""
        if asked != AUTO and not (str(asked).isdecimal() and int(asked) > 0):
            raise RunError(f"jobs = {asked!r}", "give how many runs are trained at a time, 1 or more, or auto")
        self.asked, self.say = asked, say
        self.count, self.threads = 1 if asked == AUTO else int(asked), torch.get_num_threads()
        self.chosen = False  # whether `auto` has found its count
        self.place: dict[str, object] = {}  # what results.json says of where runs were trained, if it is not here
        self._open: list[Hired] = []

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """End all processes."""
        while self._open:
            self._open.pop().end()

    def fit(self, runs: int) -> str | None:
        """Settle how many of so many runs are trained at a time; return a line about it, None where a trial decides."""
        return None

    def hire(self) -> Hired:
        """Start one more process."""
        return Worker()

    def hear(self, busy: Sequence[Hired]) -> Sequence[Hired]:
        """Return those that have something to say, as soon as there are any."""
        processes = [worker for worker in busy if isinstance(worker, Worker)]
        ready = wait([process.connection for process in processes])
        return [process for process in processes if process.connection in ready]

    def alone(self) -> bool:
        """Return whether this process trains one run after another itself."""
        return self.count == 1

    def shares(self, jobs: int) -> list[int]:
        """Return the threads of each of so many jobs.

        The last ones, where there are fewer of them than are done at a time, share all threads.
        """
        last = jobs % self.count
        return [self.threads] * (jobs - last) + [max(1, torch.get_num_threads() // max(1, last))] * last

    def each(
        self,
        work: Callable[[J], T],
        jobs: Sequence[J],
        show: Callable[[J, str, float, float], None],
        done: Callable[[J, T], None],
    ) -> list[T]:
        """Return `work(job)` of each job, in this order; `done` is told of each as it ends, `show` of its progress.

        Raises the first error of any, when the others have stopped with a checkpoint; Interrupted after Ctrl-C.
        """
        if self.alone():
            return [_done_here(work, job, show, done) for job in jobs]
        while len(self._open) < min(self.count, len(jobs)):
            self._open.append(self.hire())
        values = _Round(self, self._open, work, jobs, show, done).run()
        return [values[job] for job in jobs]

    def gone(self, job: Work, how: str) -> RunError:
        """Return the error for a run whose process is lost, and that is not taken up again."""
        fix = "--resume goes on from its last checkpoint, with a smaller --jobs where memory ran out"
        before = f", as {self.retries} before it" if self.retries else ""
        return RunError(f"{job.title}: its process {how}{before}", fix)


def _done_here(
    work: Callable[[J], T], job: J, show: Callable[[J, str, float, float], None], done: Callable[[J, T], None]
) -> T:
    """Do a job in this process."""

    def show_job(text: str, steps: float, total: float) -> None:
        show(job, text, steps, total)

    with heard(show_job):
        value = work(job)
    done(job, value)
    return value


class _Round(Generic[J, T]):
    """The jobs of one call of `Workers.each`, done by its processes."""

    def __init__(
        self,
        pool: Workers,
        workers: Sequence[Hired],
        work: Callable[[J], T],
        jobs: Sequence[J],
        show: Callable[[J, str, float, float], None],
        done: Callable[[J, T], None],
    ) -> None:
        self.pool, self.workers = pool, workers
        self.work, self.show, self.done = work, show, done
        self.waiting = deque(zip(jobs, pool.shares(len(jobs)), strict=True))  # jobs with their threads
        self.in_hand: dict[Hired, J] = {}  # the last job of each
        self.values: dict[J, T] = {}
        self.losses: Counter[J] = Counter()  # how often its process was lost
        self.error: BaseException | None = None  # that ends the round
        self.press = _PassedOn(workers)

    def run(self) -> dict[J, T]:
        """Do all jobs; return their values. Raises as `Workers.each`."""
        before = set_ctrl_c(self.press)
        try:
            self._hand_out()
            while busy := [worker for worker in self.workers if worker.job is not None]:
                for worker in self.pool.hear(busy):
                    self._receive(worker)
                self._hand_out()
        finally:
            set_ctrl_c(before)
        if self.error is not None:
            raise self.error
        if self.press.pressed:
            raise KeyboardInterrupt
        return self.values

    def _is_ending(self) -> bool:
        return self.error is not None or self.press.pressed

    def _hand_out(self) -> None:
        """Give every idle worker a job, if any waits and the round goes on."""
        for worker in self.workers:
            if worker.job is None and self.waiting and not self._is_ending():
                job, threads = self.waiting.popleft()
                self.in_hand[worker] = job
                worker.take(job, pickle.dumps(partial(by_threads, self.work, job, threads)))
                if self.press.pressed:  # meanwhile
                    worker.stop()

    def _receive(self, worker: Hired) -> None:
        """Act on a worker's next message."""
        message, job = worker.says(), self.in_hand[worker]
        if message[0] == "at":
            _, text, steps, total = message
            self.show(job, text, steps, total)
        elif message[0] == "found":
            worker.release()
            self.values[job] = pickle.loads(message[1])
            self.done(job, self.values[job])
        elif message[0] == "error":
            worker.release()
            self._fail(pickle.loads(message[1]))
        elif message[0] == "lost":
            worker.release()
            self._lose(job, message[1])

    def _lose(self, job: J, how: str) -> None:
        """Take a job up again whose process is lost, or fail if that happened too often or the round ends."""
        if self._is_ending() or self.losses[job] >= self.pool.retries:
            self._fail(KeyboardInterrupt() if self.press.pressed else self.pool.gone(job, how))
            return
        self.losses[job] += 1
        again = f"taken up again, {self.losses[job]} of {self.pool.retries}"
        self.pool.say(f"{job.title}: its process {how}; {again}")
        self.waiting.appendleft((job, self.pool.threads))

    def _fail(self, error: BaseException) -> None:
        """End the round by the first error; after Ctrl-C by one that says that a checkpoint was written."""
        if not self._is_ending():
            self.press.stop()  # the others need not go on
        if self.error is None or (self.press.pressed and isinstance(error, Interrupted)):
            self.error = error


class _PassedOn(NotedPress):
    """Passes Ctrl-C on to the workers that have something in hand."""

    def __init__(self, workers: Sequence[Hired]) -> None:
        super().__init__(ctrl_c_came())
        self.workers = workers

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        self.stop()
        super().__call__(number, frame)

    def stop(self) -> None:
        """Have all of them write a checkpoint and stop."""
        for worker in self.workers:
            if worker.job is not None:
                worker.stop()


def by_threads(work: Callable[[J], T], job: J, threads: int) -> T:
    """Return `work(job)`, done by so many threads."""
    torch.set_num_threads(threads)
    return work(job)


# one process


class Worker:
    """A process on this machine; `job` is what it has in hand."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        """`env` is set beside what this process has."""
        self.job: Work | None = None
        self.ready = False  # to be told of Ctrl-C
        self.connection, theirs = Pipe()
        first = f"import gc, sys; gc.set_threshold{gc.get_threshold()}; sys.path[:] = {sys.path!r}"
        begin = f"{first}; import tiewise.training.run; from tiewise.training.workers import serve"
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

    def says(self) -> Message:
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

    def __init__(self) -> None:
        self.in_call = False
        self.is_waiting = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if not self.in_call:
            self.is_waiting = True
            return
        self.in_call = False  # by itself: a press may come just before the call's own end
        raise_at_ctrl_c(number, frame)

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
            with heard(show):
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


# on another machine

_LAST = ("found", "error", "lost")  # messages that end a call
_kept: dict[str | None, Worker] = {}  # by the GPUs that it sees: the next task here need not import everything again


def streamed(call: bytes, env: Mapping[str, str], folder: str, token: str, needed: str) -> Iterator[Message]:
    """Yield what a worker says of a pickled call, some of its progress: the work of a Ray task on its machine.

    A task that is cancelled has the worker write its checkpoint and ends then. A machine that cannot train the run in
    `folder` refuses, see `fault`.
    """
    problem = fault(folder, token, needed)
    if problem is not None:
        what, fix = problem
        yield "error", pickle.dumps(RunError(f"{platform.node()} {what}", fix))
        return
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    worker = _kept.pop(gpus, None) or Worker(env)
    worker.send(call)
    has_ended, due = False, 0.0
    try:
        while not has_ended:
            message = _next_message(worker)
            has_ended = message[0] in _LAST
            if message[0] in ("found", "error"):
                _kept[gpus] = worker
            if has_ended:
                yield message
            elif message[0] == "at" and time.monotonic() >= due:
                due = time.monotonic() + _PAUSE
                yield message
    finally:
        if not has_ended:
            worker.stop()
            while worker.says()[0] not in _LAST:
                pass
            worker.end()


def _next_message(worker: Worker) -> Message:
    """Wait for a worker's next message."""
    while not worker.connection.poll(_PAUSE):
        pass  # between two of these a cancelled task gets its KeyboardInterrupt, which wakes no waiting read
    return worker.says()


def fault(folder: str, token: str, needed: str) -> tuple[str, str] | None:
    """Return why this machine cannot train a run of the head, who wrote `token` and has `needed`; None where it can."""
    present = installed()
    if present != needed:
        return f"has {present}, and the run began with {needed}", "install the same on every machine"
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        with suppress(OSError):
            if (Path(folder) / TOKEN).read_text(encoding="utf-8") == token:
                return None
        time.sleep(0.2)
    return f"does not see {folder} as it is here", "give an --out on a file system that all machines share"


def installed() -> str:
    """Return what must be the same on all machines, since their figures are compared."""
    python = ".".join(platform.python_version_tuple()[:2])
    return f"tiewise {__version__}, torch {version('torch')}, Python {python}"
