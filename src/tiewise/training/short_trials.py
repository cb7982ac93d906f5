"""Short trials before the first run, which time it on this machine.

They choose the number of steps that fit (`--minutes`), and the number of runs at a time that is fastest (`--jobs
auto`).

    a short trial of each arm → seconds of a step, of an evaluated token, of the rest of a run (building, saving)
    steps = the most for which   elapsed time + tuning + runs ≤ minutes     (runs: scheduled on this many workers)

Every run of every arm gets equally many steps, so that pairs stay pairs. `run.yaml` stores the choices.

A step of a small model consists of hundreds of small operations, many of them too small to be divided among threads.
Two runs of one thread each may or may not be faster than one run of two threads, depending on what the cores share:
both were measured. A trial therefore times a few steps of a run that has all threads, of several runs at a time, each
with an equal share of the threads, and of the first one again. There are as many as threads, or as memory allows; on a
GPU at most four, as far as its free memory allows. If there is less than a minute's work, one run at a time is trained
without a trial.

Other programs slow down a run of several threads more than runs of one, because its threads wait for each other. The
trial then holds for this load alone, so the line about it names the load and no figure. A run notices load by the share
of the time in which its main thread had a core.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapreplace
from pathlib import Path
from shutil import rmtree
from statistics import fmean
from time import monotonic, thread_time
from typing import TYPE_CHECKING

import psutil
import torch

from tiewise.boundary.ops.fast_products import fast_products
from tiewise.core import ranks
from tiewise.core.errors import Interrupted, RunError
from tiewise.core.measurement import percent
from tiewise.training.folder import remove
from tiewise.training.run import kind_of, train
from tiewise.training.trainer import Job
from tiewise.training.tuning import SEED, Show, least_trials_per_arm, make_trial
from tiewise.training.workers import AUTO, Workers

if TYPE_CHECKING:
    from tiewise.boundary.installation import Installed

CALIBRATION_STEPS = (8, 60)  # fewest and most steps of a timed trial
CALIBRATION_SHARE = 0.02  # share of the minutes for the steps of all timed trials
LEAST_STEPS = 20  # fewest steps of a run, one per point of its curve
LEAST_SECONDS_FOR_TRIAL = 60  # seconds of work; below it, new processes gain little, since each imports for 7 seconds
OPERATIONS = 5e10  # operations of a core per second
OPERATIONS_OF_DEVICE = 5e13  # operations of a GPU per second
STEP_ON_DEVICE = 0.01  # seconds of a small model's step on a GPU: starting its kernels
MOST_ON_DEVICE = 4  # most runs at a time on a GPU: without a shared context their kernels take turns
RESERVE = 0.1  # share of a GPU's free memory that runs do not get
COUNT_TRIAL_STEPS = (6, 40)  # fewest and most steps of a trial of the count, about a second of steps
LARGEST_TIME_RATIO = 0.95  # time of several at a time ÷ time of one at a time, at most; closer to 1 is chance
LEAST_CORE_SHARE = 0.8  # share of the time with a core below which other programs used the cores
OTHERS_COMPUTED = ", during which other programs used the cores"
_PROCESS = 800 << 20  # bytes of a process after all imports, with its buffers
_PROCESS_WITH_DEVICE = 3 << 30  # bytes of a process after CUDA has started
_CONTEXT = 1 << 30  # bytes of a GPU that a process needs before its first tensor
_MEMORY = Path("/sys/fs/cgroup")  # folder with the memory limit of a container

Elapsed = Callable[[], float]  # seconds since the command began


def timed_trial(job: Job, steps: int) -> Job:
    """Return a run of `steps` steps that measures few tokens and has no curve."""
    few = kind_of(job.settings).curve_blocks * job.settings.length
    settings = replace(job.settings, steps=steps, measured=min(job.settings.measured, few))
    return replace(job, spec=job.spec.plainly(), settings=settings, seed=SEED, split="tune", trial=True, title="speed")


@dataclass(frozen=True)
class Pace:
    """Seconds of an arm on this machine: per step, per evaluated token, and other.

    `rest` has the time of building and saving a run, `core` the share of the time in which the main thread had a core.
    """

    step: float
    token: float
    rest: float
    core: float = 1.0

    def seconds(self, job: Job) -> float:
        """Return the seconds of a complete run."""
        return self.rest + job.settings.steps * self.step + kind_of(job.settings).evaluated_tokens(job) * self.token


def mean_pace(paces: Sequence[Pace]) -> Pace:
    """Return the mean of several paces."""
    step = fmean(pace.step for pace in paces)
    token = fmean(pace.token for pace in paces)
    return Pace(step, token, fmean(pace.rest for pace in paces), min(pace.core for pace in paces))


@dataclass(frozen=True)
class Timetable:
    """Jobs of a comparison, one per arm, with their paces and the simultaneous runs."""

    jobs: Sequence[Job]
    paces: Sequence[Pace]
    at_a_time: int

    def seconds(self, steps: int, tune: bool) -> float:
        """Return the seconds of all runs with `steps` steps, and of the trials if `tune`."""
        s = self.jobs[0].settings
        runs: list[float] = []
        trials: list[float] = []
        for job, pace in zip(self.jobs, self.paces, strict=True):
            run = replace(job, settings=replace(s, steps=steps))
            runs.append(pace.seconds(run))
            if tune:
                trials += least_trials_per_arm(s) * [pace.seconds(make_trial(run, run.folder))]
        return self._duration(trials) + self._duration(s.seeds * runs)

    def _duration(self, runs: Sequence[float]) -> float:
        """Return the seconds until all runs have ended.

        Each starts as soon as a worker is free.
        """
        free = [0.0] * self.at_a_time
        for run in runs:
            heapreplace(free, free[0] + run)
        return max(free)

    def most_steps(self, elapsed: float) -> int:
        """Return the most steps for which all runs end within the minutes of their settings.

        `elapsed` seconds of these are past.

        RunError: fewer than `LEAST_STEPS` steps fit.
        """
        s = self.jobs[0].settings
        assert s.minutes is not None, "only a comparison with minutes asks for its steps"
        left = 60 * s.minutes - elapsed
        needed = partial(self.seconds, tune=s.tune)
        if needed(LEAST_STEPS) <= left:
            return LEAST_STEPS - 1 + bisect_right(range(LEAST_STEPS, 1 << 40), left, key=needed)
        tuning, otherwise = "", ""
        if s.tune:
            tuning = f"{least_trials_per_arm(s) * len(self.jobs)} tuning runs and "
            otherwise = f", or {_minutes(elapsed + self.seconds(LEAST_STEPS, tune=False))} without tuning"
        runs = f"{s.seeds * len(self.jobs)} runs of {LEAST_STEPS} steps"
        problem = f"--minutes {s.minutes:g} does not hold {tuning}{runs} on this machine"
        raise RunError(problem, f"give --minutes {_minutes(elapsed + needed(LEAST_STEPS))} or more{otherwise}")


def steps_within(jobs: Sequence[Job], folder: Path, elapsed: Elapsed, workers: Workers, show: Show) -> int:
    """Return how many steps every run can have, from trials in `folder`, which is removed.

    `jobs` are one per arm, and their settings have minutes. `elapsed` returns the seconds of these that are past. A
    trial shares the machine with as many others as a run will: each arm's trial runs as often as runs are trained at a
    time.
    """
    minutes = jobs[0].settings.minutes
    assert minutes is not None, "only a comparison with minutes asks for its steps"
    [first] = _paces(jobs[:1], 2, folder, workers, show)  # also does each process's one-time work
    share = 60 * minutes * CALIBRATION_SHARE / len(jobs)
    fewest, most = CALIBRATION_STEPS
    steps = ranks.on_rank_zero(lambda: max(fewest, int(min(most, share / first.step))))
    timetable = Timetable(jobs, _paces(jobs, steps, folder, workers, show), workers.count)
    ranks.on_rank_zero(lambda: rmtree(folder))
    return ranks.on_rank_zero(lambda: timetable.most_steps(elapsed()))


def _paces(arms: Sequence[Job], steps: int, folder: Path, workers: Workers, show: Show) -> list[Pace]:
    """Time a trial of `steps` steps for each arm; return each arm's mean pace.

    Each trial runs as often as runs are trained at a time.
    """
    trials = []
    for number, job in enumerate([*arms] * workers.count):
        trials.append(replace(job, folder=folder / f"{number}"))
    paces = workers.each(partial(measure_pace, steps=steps), trials, show, lambda job, pace: None)
    return [mean_pace(paces[arm :: len(arms)]) for arm in range(len(arms))]


def measure_pace(job: Job, steps: int) -> Pace:
    """Time evaluation, and a trial of `steps` steps in the job's folder.

    Some tokens are evaluated before the timing, to warm up.
    """
    token = ranks.on_rank_zero(lambda: _seconds_per_token(job))
    trial = timed_trial(job, steps)
    begin, computed = monotonic(), thread_time()
    try:
        result = train(trial).result
    except Interrupted:
        raise KeyboardInterrupt from None  # a timed trial is never resumed
    core = (thread_time() - computed) / max(monotonic() - begin, 1e-9)
    ranks.on_rank_zero(lambda: rmtree(job.folder))
    step = max(result.seconds / (steps - 1), 1e-9)
    evaluation = kind_of(job.settings).evaluated_tokens(trial) * token
    return Pace(step, token, max(0.0, monotonic() - begin - steps * step - evaluation), core)


def _seconds_per_token(job: Job) -> float:
    """Time the second evaluation of a point of the curve."""
    kind = kind_of(job.settings)
    with fast_products(job.products):
        installed = kind.build(job)
        kind.measure(job, installed, job.split, point=True)
        begin = monotonic()
        tokens = kind.measure(job, installed, job.split, point=True).tokens
        return (monotonic() - begin) / max(1, tokens)


def settle_count(workers: Workers, job: Job, runs: int, folder: Path, show: Show, before: int | None = None) -> str:
    """Set how many of `runs` runs like `job` are trained at a time, and their threads.

    `auto` runs a trial in `folder`, once; `before` is its result from when these runs began. Return a line about the
    choice the first time, and "" if there was nothing to choose.
    """
    line = workers.settle_count(runs)
    if line is not None:
        return line
    threads = torch.get_num_threads()
    if workers.requested != AUTO:
        if int(workers.requested) > 1 and ranks.size() > 1:
            raise RunError(f"jobs = {workers.requested} where {ranks.size()} processes train a run", "leave jobs out")
        workers.count = min(int(workers.requested), runs)
    elif not workers.is_settled:
        if before is None or ranks.size() > 1:
            workers.count, why = _choose_count(workers, job, runs, folder, show)
        else:
            workers.count, why = max(1, min(before, runs)), "as before the interruption"
        workers.is_settled = True
        if min(threads, runs) > 1:
            line = f"runs: {workers.count} at a time; {why}"
    workers.threads = max(1, threads // workers.count)
    return line or ""


def _choose_count(workers: Workers, job: Job, runs: int, folder: Path, show: Show) -> tuple[int, str]:
    """Return how many runs at a time are fastest, and the reason."""
    if ranks.size() > 1:
        return 1, "several processes train each run"
    if not kind_of(job.settings).side_by_side:
        return 1, "each run uses the whole machine"
    on_device = torch.accelerator.is_available()
    if on_device and not torch.cuda.is_available():
        return 1, "the free memory of this accelerator is not known"
    most = min(torch.get_num_threads(), runs)
    if on_device:
        most = min(most, MOST_ON_DEVICE * torch.cuda.device_count())
    demand = Demand(1, 1, 0.0)
    if most > 1:
        demand = estimate_demand(job)
    if runs * demand.seconds <= LEAST_SECONDS_FOR_TRIAL:
        return 1, "they are too short for several at a time"
    most = min(most, free_memory() // demand.memory)
    if on_device:
        most = min(most, torch.cuda.device_count() * (free_device_memory() // demand.device_memory))
    if most < 2:
        return 1, "memory is too small for two"
    fewest_steps, most_steps = COUNT_TRIAL_STEPS
    steps = round(min(max(fewest_steps, job.settings.steps / demand.seconds), most_steps))
    return _try_count(workers, job, most, steps, folder, show)


def _try_count(workers: Workers, job: Job, count: int, steps: int, folder: Path, show: Show) -> tuple[int, str]:
    """Compare `count` runs at a time with one alone, in trials of `steps` steps.

    Return the faster number, and the reason.
    """
    remove(folder)  # of a trial that was interrupted
    alone_job = replace(job, folder=folder / "alone")
    before = measure_pace(alone_job, steps)
    _release_device_memory()
    workers.count, workers.threads = count, torch.get_num_threads() // count
    try:
        [together] = _paces([job], steps, folder, workers, show)
    except torch.OutOfMemoryError:
        workers.end()
        remove(folder)
        return 1, f"the GPU's memory did not suffice for {count} at a time"
    after = measure_pace(alone_job, steps)
    _release_device_memory()
    remove(folder)
    alone = min(before, after, key=lambda pace: pace.step)  # load that comes or goes only slows one of them down
    # without the rest of a run, which is mostly imports in a process's first run
    share = replace(together, rest=0.0).seconds(job) / count / replace(alone, rest=0.0).seconds(job)
    is_loaded = min(alone.core, together.core) < LEAST_CORE_SHARE
    load = OTHERS_COMPUTED if is_loaded else ""
    if share > LARGEST_TIME_RATIO:
        workers.end()
        return 1, f"{count} at a time were not clearly faster in a short trial{load}"
    if is_loaded:
        return count, f"they were faster than one at a time in a short trial{load}"
    return count, f"they took {percent(1 - share)} less time than one at a time in a short trial"


@dataclass(frozen=True)
class Demand:
    """Rough needs of one run.

    Attributes:
        memory: bytes of this machine's memory.
        device_memory: bytes of the accelerator's memory; 0 without one.
        seconds: duration of the run.
    """

    memory: int
    device_memory: int
    seconds: float


def estimate_demand(job: Job) -> Demand:
    """Return the needs of a run, roughly, with bytes rather too many.

    Bytes are those of weights, gradients and moments, and three times the inputs and outputs of every matrix of the
    body, for the backward pass. One more table allows for arms with two. On an accelerator, the logits of one chunk are
    added. Seconds are six operations per parameter and token, at the speed of a current core in a small model, or of a
    GPU that is never faster than its kernels can be started.
    """
    s, kind = job.settings, kind_of(job.settings)
    installed = kind.build(job)
    activations = 3 * s.batch * s.length * _matrix_ends(installed)
    numbers = sum(p.numel() for p in installed.model.parameters()) + job.text.vocab * s.width
    # 3 more copies: for saving, and for the model with dense tables
    copies = 2 + kind.moments(job) + 3
    tensors = 4 * (activations + copies * numbers)
    operations = 6 * numbers * s.steps * s.batch * s.accumulate * s.length
    demand = Demand(_PROCESS + tensors, 0, operations / OPERATIONS)
    if torch.accelerator.is_available():
        logits = 4 * s.batch * s.length * job.text.vocab
        seconds = max(s.steps * s.accumulate * STEP_ON_DEVICE, operations / OPERATIONS_OF_DEVICE)
        demand = Demand(_PROCESS_WITH_DEVICE + 4 * copies * numbers, _CONTEXT + tensors + logits, seconds)
    if s.minutes is not None:
        demand = replace(demand, seconds=60 * s.minutes)
    return demand


def _matrix_ends(installed: Installed) -> int:
    """Return the inputs and outputs that one token has at all matrices of the body."""
    tables = {id(table) for table in installed.tables()}
    matrices = [p for p in installed.model.parameters() if p.dim() > 1 and id(p) not in tables]
    return sum(p.shape[0] + p.shape[1] for p in matrices)


def free_device_memory() -> int:
    """Return the bytes of each GPU that new processes can have, less a reserve for fragments."""
    free = min(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))
    return round((1 - RESERVE) * free)


def _release_device_memory() -> None:
    """Return this process's unused memory of the GPU to other processes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_memory() -> int:
    """Return the bytes that new processes can have."""
    free: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # not in a container, or without a limit
        limit, used = (int((_MEMORY / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


def _minutes(seconds: float) -> str:
    """Return seconds as text in minutes, a tenth more since they are estimates: "2.3"."""
    return f"{math.ceil(1.1 * seconds / 6) / 10:g}"
