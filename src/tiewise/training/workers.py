"""Several runs at a time, each in a process of its own (`worker`).

    Workers.each(train, jobs, …)  ── (work, job, threads) ──►  a worker: work(job), with its share of the threads
        show(job, what, n, of)    ◄───────── at ───────────    what it says of its progress
        done(job, value)          ◄──────── found ─────────    the value, or the error that ended it

Where the processes are is decided by `hire` and `hear`: here on this machine, in `launchers` on others.
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import wait
from types import FrameType
from typing import Any, TypeVar

import torch

from tiewise.core.errors import Interrupted, RunError
from tiewise.core.long_work import NotedPress, ctrl_c_was_pressed, heard, set_ctrl_c
from tiewise.training.trainer import Job
from tiewise.training.worker import Worker

T = TypeVar("T")
AUTO = "auto"


class Workers:
    """How many runs are trained at a time (`auto`: 1 until they are known), and a context that ends their processes."""

    retries = 0  # so often a run whose process is lost is taken up again

    def __init__(self, asked: int | str = AUTO, say: Callable[[str], None] = lambda line: None) -> None:
        """`asked`: so many, or `auto`; `say` takes a line. Raises RunError for anything else."""
        if asked != AUTO and not (str(asked).isdecimal() and int(asked) > 0):
            raise RunError(f"jobs = {asked!r}", "give how many runs are trained at a time, 1 or more, or auto")
        self.asked, self.say = asked, say
        self.count, self.threads = 1 if asked == AUTO else int(asked), torch.get_num_threads()
        self.chosen = False  # whether `auto` has found its count
        self.place: dict[str, Any] = {}  # what results.json says of where runs were trained, if it is not here
        self._open: list[Any] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.end()

    def end(self) -> None:
        """End all processes."""
        while self._open:
            self._open.pop().end()

    def fit(self, runs: int) -> str | None:
        """Settle how many of so many runs are trained at a time; return a line about it, None where a trial decides."""
        return None

    def hire(self) -> Any:
        """Return one more that takes, says, stops and ends as a `Worker` does."""
        return Worker()

    def hear(self, busy: Sequence[Any]) -> Sequence[Any]:
        """Return those that have something to say, as soon as there are any."""
        heard = wait([worker.connection for worker in busy])
        return [worker for worker in busy if worker.connection in heard]

    def alone(self) -> bool:
        """Whether this process trains one run after another itself."""
        return self.count == 1

    def shares(self, jobs: int) -> list[int]:
        """Threads of each: the last ones, where there are fewer of them than are done at a time, share all threads."""
        last = jobs % self.count
        return [self.threads] * (jobs - last) + [max(1, torch.get_num_threads() // max(1, last))] * last

    def each(
        self,
        work: Callable[[Job], T],
        jobs: Sequence[Job],
        show: Callable[[Job, str, float, float], None],
        done: Callable[[Job, T], None],
    ) -> list[T]:
        """Return `work(job)` of each job, in this order; `done` is told of each as it ends, `show` of its progress.

        Raises the first error of any, when the others have stopped with a checkpoint; Interrupted after Ctrl-C.
        """
        if self.alone():
            found = []
            for job in jobs:
                with heard(lambda what, n, of, job=job: show(job, what, n, of)):  # type: ignore[misc]
                    found.append(work(job))
                done(job, found[-1])
            return found
        while len(self._open) < min(self.count, len(jobs)):
            self._open.append(self.hire())
        values, waiting = {}, deque(zip(jobs, self.shares(len(jobs)), strict=True))
        lost: Counter[Job] = Counter()
        end: BaseException | None = None
        press = _PassedOn(self._open)
        before = set_ctrl_c(press)
        try:
            while True:
                for worker in self._open:
                    if worker.job is None and waiting and end is None and not press.pressed:
                        job, threads = waiting.popleft()
                        worker.take(job, pickle.dumps(partial(by_threads, work, job, threads)))
                        if press.pressed:  # meanwhile
                            worker.stop()
                busy = [worker for worker in self._open if worker.job is not None]
                if not busy:
                    break
                for worker in self.hear(busy):
                    what, *said = worker.says()
                    if what == "at":
                        show(worker.job, *said)
                    if what not in ("found", "error", "lost"):
                        continue
                    job, worker.job = worker.job, None
                    if what == "found":
                        values[job] = pickle.loads(said[0])
                        done(job, values[job])
                        continue
                    if what == "lost" and end is None and not press.pressed and lost[job] < self.retries:
                        lost[job] += 1
                        self.say(f"{job.title}: its process {said[0]}; taken up again, {lost[job]} of {self.retries}")
                        waiting.appendleft((job, self.threads))
                        continue
                    if what == "error":
                        error: BaseException = pickle.loads(said[0])
                    else:
                        error = KeyboardInterrupt() if press.pressed else self.gone(job, said[0])
                    if end is None and not press.pressed:  # the others need not go on
                        press.stop()
                    if end is None or (press.pressed and isinstance(error, Interrupted)):
                        end = error
        finally:
            set_ctrl_c(before)
        if end is not None or press.pressed:
            raise end or KeyboardInterrupt
        return [values[job] for job in jobs]

    def gone(self, job: Job, how: str) -> RunError:
        """Return what is said where the process of a run is lost, and not taken up again."""
        fix = "--resume goes on from its last checkpoint, with a smaller --jobs where memory ran out"
        before = f", as {self.retries} before it" if self.retries else ""
        return RunError(f"{job.title}: its process {how}{before}", fix)


class _PassedOn(NotedPress):
    """Passes Ctrl-C on to the workers that have something in hand."""

    def __init__(self, workers: list[Any]) -> None:
        super().__init__(ctrl_c_was_pressed())
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


def by_threads(work: Callable[[Job], T], job: Job, threads: int) -> T:
    """Return `work(job)`, done by so many threads."""
    torch.set_num_threads(threads)
    return work(job)
