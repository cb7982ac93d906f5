"""Worker processes that train several runs at a time.

    Workers.each(train, jobs, …)  ── (work, job, threads), pickled ──►  serve: work(job), with its share of the threads
        show(job, what, n, of)    ◄────────────── at ──────────────     its progress
        done(job, value)          ◄─────── found or error ─────────     the value or the error, pickled again

`start_worker` and `wait_for_messages` decide where the processes are. `Workers` starts them on this machine
(`worker_process`), `launchers.OnRay` on others (`remote_worker`).

The processes are our own because `concurrent.futures` (Python 3.11) and loky (3.7) break documented promises.
`test_workers.py` tests our side. The tests named for the other side are in `test_process_pools.py`. Each turns red as
soon as `concurrent.futures` keeps the promise:

- A run whose process is killed is named with the signal, and the other runs write a checkpoint
  (`test_killed_worker_is_named_and_other_runs_resume`). Both pools end all processes with the one that is killed, and
  every run gets the same error (`test_pool_fails_all_calls_after_one_kill_without_naming_signal`). `concurrent.futures`
  sometimes hangs instead.
- Workers end with their parent, also if it is killed (`test_process.py`). Those of both pools live on
  (`test_pool_process_outlives_killed_parent`).
- A script may call `tiewise.compare` without `if __name__ == "__main__"`
  (`test_workers_run_script_without_main_guard_once`). `concurrent.futures` runs the script again in every process
  (`test_pool_runs_script_without_main_guard_again`).
- Ctrl-C on a terminal prints no traceback, also while a process starts (`test_ctrl_c_ends_workers_that_are_starting`).
  Both pools start processes in the session of the parent, and cannot do otherwise
  (`test_pool_process_shares_session_of_parent`).
- Ctrl-C just as a run ends prints no traceback either
  (`test_ctrl_c_after_run_ends_keeps_its_value_and_interrupts_next_run`). A process of `concurrent.futures` prints one
  and ends. The next call then raises, or never returns.
- Nothing but the workers is started. Both pools start processes that track semaphores, which end with the parent only
  and print warnings if it is killed.

A prototype had one pool of one process for each worker. An initializer watched the parent, redirected the output and
opened a pipe for progress. It kept the first two promises and broke the others, and loky kept the third as well. Either
took more statements than these modules. Ray is an optional package that takes six seconds to start nine processes, and
each of its tasks needs a `Worker` too.
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.connection import wait
from types import FrameType
from typing import Generic, Protocol, TypeVar

from tiewise.core import Late
from tiewise.core.errors import Interrupted, RunError
from tiewise.core.interrupts import NotedCtrlC, set_ctrl_c_handler, was_ctrl_c_pressed
from tiewise.core.progress import listen_to_progress
from tiewise.training.local_gpus import gpu_of_worker
from tiewise.training.worker_process import Message, Work, Worker

torch = Late("torch")
AUTO = "auto"
T = TypeVar("T")  # result of a job
J = TypeVar("J", bound=Work)  # job


class WorkerHandle(Protocol):
    """Handle of a process, here or elsewhere, that does one call after another."""

    @property
    def job(self) -> Work | None:
        """Return the job that the process is doing; None if it is idle."""

    def start_job(self, job: Work, call: bytes) -> None:
        """Send the process a job: a pickled call without arguments."""

    def clear_job(self) -> None:
        """Note that the process has finished its job."""

    def next_message(self) -> Message:
        """Return the next message of the process."""

    def stop(self) -> None:
        """Make the process write a checkpoint and stop."""

    def end(self) -> None:
        """End the process."""


class Workers(AbstractContextManager["Workers"]):
    """Pool of processes that train runs; leaving its context ends them.

    `count` is the number of runs trained at a time, `threads` the threads of each. With `auto` the count is 1 until it
    is settled.
    """

    retries = 0  # how often a run is resumed after its process was lost

    def __init__(self, requested: int | str = AUTO, say: Callable[[str], None] = lambda line: None) -> None:
        """`requested` is a count or `auto`; `say` prints a line.

        RunError: it is neither.
        """
        if requested != AUTO and not (str(requested).isdecimal() and int(requested) > 0):
            raise RunError(f"jobs = {requested!r}", "give how many runs are trained at a time, 1 or more, or auto")
        self.requested, self.say = requested, say
        self.count, self.threads = 1 if requested == AUTO else int(requested), torch.get_num_threads()
        self.is_settled = False  # True once `auto` has chosen a count
        self.location: dict[str, object] = {}  # facts for results.json about other machines that train
        self._open: list[WorkerHandle] = []

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """End all processes."""
        while self._open:
            self._open.pop().end()

    def settle_count(self, runs: int) -> str | None:
        """Set how many of the given number of runs are trained at a time.

        Return a line about it; None if a trial must decide.
        """
        return None

    def start_worker(self) -> WorkerHandle:
        """Start one more process, on the next GPU if this machine has several."""
        return Worker(gpu_of_worker(len(self._open)))

    def wait_for_messages(self, busy: Sequence[WorkerHandle]) -> Sequence[WorkerHandle]:
        """Wait for messages; return the processes that have one."""
        processes = [worker for worker in busy if isinstance(worker, Worker)]
        ready = wait([process.connection for process in processes])
        return [process for process in processes if process.connection in ready]

    def trains_here(self) -> bool:
        """Return True if this process itself trains one run after another."""
        return self.count == 1

    def thread_counts(self, jobs: int) -> list[int]:
        """Return the threads of each job.

        If fewer jobs than `count` are left at the end, these share all threads.
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
        """Return `work(job)` of each job, in this order.

        `done(job, value)` is called as each job ends, `show` for its progress. An error is raised after the other jobs
        have stopped with a checkpoint.

        Raises:
            Interrupted: Ctrl-C was pressed.
        """
        if self.trains_here():
            return [_done_here(work, job, show, done) for job in jobs]
        while len(self._open) < min(self.count, len(jobs)):
            self._open.append(self.start_worker())
        values = _Round(self, self._open, work, jobs, show, done).run()
        return [values[job] for job in jobs]

    def lost_error(self, job: Work, how: str) -> RunError:
        """Return the error for a run whose process was lost too often."""
        remedy = "resume from its last checkpoint with --resume; if memory ran out, use a smaller --jobs"
        before = f", as {self.retries} before it" if self.retries else ""
        return RunError(f"{job.title}: its process {how}{before}", remedy)


def _done_here(
    work: Callable[[J], T], job: J, show: Callable[[J, str, float, float], None], done: Callable[[J, T], None]
) -> T:
    """Do a job in this process."""

    def show_job(text: str, steps: float, total: float) -> None:
        """Show the progress of this job."""
        show(job, text, steps, total)

    with listen_to_progress(show_job):
        value = work(job)
    done(job, value)
    return value


class _Round(Generic[J, T]):
    """One call of `Workers.each`: its jobs, done by the pool's processes."""

    def __init__(
        self,
        pool: Workers,
        workers: Sequence[WorkerHandle],
        work: Callable[[J], T],
        jobs: Sequence[J],
        show: Callable[[J, str, float, float], None],
        done: Callable[[J, T], None],
    ) -> None:
        self.pool, self.workers = pool, workers
        self.work, self.show, self.done = work, show, done
        self.waiting = deque(zip(jobs, pool.thread_counts(len(jobs)), strict=True))  # (job, its threads)
        self.in_hand: dict[WorkerHandle, J] = {}  # process → its latest job
        self.values: dict[J, T] = {}
        self.losses: Counter[J] = Counter()  # job → how often its process was lost
        self.error: BaseException | None = None  # the error that ends the round
        self.press = _CtrlCRelay(workers)

    def run(self) -> dict[J, T]:
        """Do all jobs and return their values; raises as `Workers.each`."""
        before = set_ctrl_c_handler(self.press)
        try:
            self._hand_out()
            while busy := [worker for worker in self.workers if worker.job is not None]:
                for worker in self.pool.wait_for_messages(busy):
                    self._receive(worker)
                self._hand_out()
        finally:
            set_ctrl_c_handler(before)
        if self.error is not None:
            raise self.error
        if self.press.pressed:
            raise KeyboardInterrupt
        return self.values

    def _is_ending(self) -> bool:
        return self.error is not None or self.press.pressed

    def _hand_out(self) -> None:
        """Give every idle process a job, if one waits and the round is not ending."""
        for worker in self.workers:
            if worker.job is None and self.waiting and not self._is_ending():
                job, threads = self.waiting.popleft()
                self.in_hand[worker] = job
                worker.start_job(job, pickle.dumps(partial(run_with_threads, self.work, job, threads)))
                if self.press.pressed:  # Ctrl-C came in the meantime
                    worker.stop()

    def _receive(self, worker: WorkerHandle) -> None:
        """Act on a process's next message."""
        message, job = worker.next_message(), self.in_hand[worker]
        if message[0] == "at":
            _, text, steps, total = message
            self.show(job, text, steps, total)
        elif message[0] == "found":
            worker.clear_job()
            self.values[job] = pickle.loads(message[1])
            self.done(job, self.values[job])
        elif message[0] == "error":
            worker.clear_job()
            self._fail(pickle.loads(message[1]))
        elif message[0] == "lost":
            worker.clear_job()
            self._lose(job, message[1])

    def _lose(self, job: J, how: str) -> None:
        """Queue a job again after its process was lost.

        Fail if that happened too often, or if the round is ending.
        """
        if self._is_ending() or self.losses[job] >= self.pool.retries:
            self._fail(KeyboardInterrupt() if self.press.pressed else self.pool.lost_error(job, how))
            return
        self.losses[job] += 1
        again = f"restarted, {self.losses[job]} of {self.pool.retries}"
        self.pool.say(f"{job.title}: its process {how}; {again}")
        self.waiting.appendleft((job, self.pool.threads))

    def _fail(self, error: BaseException) -> None:
        """End the round with the first error.

        After Ctrl-C an error that says that a checkpoint was written replaces it.
        """
        if not self._is_ending():
            self.press.stop()  # the other jobs write a checkpoint and stop
        if self.error is None or (self.press.pressed and isinstance(error, Interrupted)):
            self.error = error


class _CtrlCRelay(NotedCtrlC):
    """Handler that passes Ctrl-C on to the processes that have a job."""

    def __init__(self, workers: Sequence[WorkerHandle]) -> None:
        super().__init__(was_ctrl_c_pressed())
        self.workers = workers

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        self.stop()
        super().__call__(number, frame)

    def stop(self) -> None:
        """Make every process that has a job write a checkpoint and stop."""
        for worker in self.workers:
            if worker.job is not None:
                worker.stop()


def run_with_threads(work: Callable[[J], T], job: J, threads: int) -> T:
    """Return `work(job)`, run with this number of threads."""
    torch.set_num_threads(threads)
    return work(job)
