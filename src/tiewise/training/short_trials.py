"""Short trials before the first run: what to start an arm with (`--tune`), how many steps fit (`--minutes`), and how
many runs at a time get on fastest (`--jobs auto`).

Initialisation and learning rate move a result more than tying does, so a comparison that fixes one of them for all arms
compares that choice. Every arm gets the same nine runs of a quarter of the steps, starting scale × learning rate, with
a seed of their own; the lowest nll on the `tune` split, which neither trains nor reports, wins.

    a short trial of each arm → seconds of a step, of an evaluated token, of the rest of a run (building, saving)
    steps = the most for which   gone already + tuning + runs ≤ minutes     (runs: as they fill so many workers)

Every run of every arm gets as many steps, so that pairs stay pairs; what is decided here stands in `run.yaml`.

A step of a small model is hundreds of small operations, many of them too small to be divided among threads. Whether two
runs of one thread each get through more than one of two depends on what the cores share: both were measured. So it is
tried: a few steps of a run that has all threads, then of as many runs side by side as there are threads, or as memory
holds, with an equal share of them. Where there is less than a minute's work it is one at a time without a trial.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapreplace
from itertools import product
from pathlib import Path
from shutil import rmtree
from statistics import fmean
from time import monotonic
from typing import Any, NamedTuple, Protocol

import psutil
import torch

from tiewise.boundary.ops.fast_products import fast_products
from tiewise.core import ranks
from tiewise.core.errors import Interrupted, RunError
from tiewise.training.folder import folder_name, read_json, remove, write_json
from tiewise.training.run import Outcome, kind_of, train
from tiewise.training.settings import Settings
from tiewise.training.trainer import Job
from tiewise.training.workers import AUTO, Workers

INIT_FACTORS = (0.5, 1.0, 2.0)
RATE_FACTORS = (0.5, 1.0, 2.0)
SEED = 0  # of trials; compared runs count from 1
MEASURED = 32_768  # tokens of the tuning split that choose, at most
CALIBRATION_STEPS = (8, 60)  # of a trial that is timed: fewest and most
CALIBRATION_SHARE = 0.02  # of the time, for the steps of all of these
LEAST = 20  # steps of a run: its curve has so many points
WORTH = 60  # seconds of a comparison up to which processes that import everything, for 7 seconds each, gain little
OPERATIONS = 5e10  # of a core in a second
TRIED = (6, 40)  # steps of a trial of both ways, a second's worth of them: fewest and most
FASTER = 0.95  # of the time of one at a time, the most that side by side may take: a trial differs by as much by chance
_PROCESS = 800 << 20  # bytes of a process that has imported everything, and of its buffers
_MEMORY = Path("/sys/fs/cgroup")  # what a container may take

Elapsed = Callable[[], float]  # seconds since the command began
Show = Callable[[Job, str, float, float], None]  # told what a run says, how many steps it has done, and of how many


class Ended(Protocol):
    """Function that is told of a run that has ended, perhaps long ago, and of the line that says so."""

    def __call__(self, job: Job, line: str = "") -> None:
        """Take note of a run's end."""


class TrialKey(NamedTuple):
    """What a trial tries."""

    arm: str
    init: float
    learning_rate: float


def tune(
    jobs: list[Job], out: Path, workers: Workers, show: Show, ended: Ended
) -> tuple[list[Job], list[dict[str, Any]]]:
    """Return the jobs with what trials chose, and all trials; those that `tuning.json` already holds are taken up."""
    trials: dict[TrialKey, Job] = {}
    for job in jobs:
        trials |= _trials(job, out / "tuning")
    notes = TrialNotes(out / "tuning.json", ended)
    for key in notes.records:
        ended(trials[key])
    workers.each(train, [trial for key, trial in trials.items() if key not in notes.records], show, notes.add)
    best = {job.arm: notes.best(job.arm, trials) for job in jobs}
    chosen = [started(job, best[job.arm].init, best[job.arm].learning_rate) for job in jobs]
    return chosen, [{**notes.records[key], "chosen": best[key.arm] == key} for key in trials]


class TrialNotes:
    """Losses of trials that have ended, in `tuning.json`."""

    def __init__(self, path: Path, ended: Ended) -> None:
        """`ended` is told of each trial that ends."""
        self.path, self.ended = path, ended
        records = ranks.on_rank_zero(lambda: read_json(path) or [])
        self.records: dict[TrialKey, dict[str, Any]] = {_key_of(record): record for record in records}

    def add(self, trial: Job, outcome: Outcome) -> None:
        """Write a trial's loss; its folder goes, nine models for each arm need not stay."""
        assert trial.spec.init is not None, "a trial has a starting scale"
        key = TrialKey(trial.arm, trial.spec.init, trial.settings.learning_rate)
        nll = outcome.result.heldout_nll
        has_diverged = not math.isfinite(nll)
        self.records[key] = key._asdict() | {"nll": None if has_diverged else nll}
        ranks.on_rank_zero(lambda: write_json(self.path, list(self.records.values())))
        ranks.on_rank_zero(lambda: rmtree(trial.folder))
        verdict = "diverged" if has_diverged else f"{nll:.3f}"
        self.ended(trial, f"tune {key.arm}: init {key.init:.4g}, lr {key.learning_rate:.4g} → {verdict}")

    def best(self, arm: str, trials: Iterable[TrialKey]) -> TrialKey:
        """Return the trial of an arm with the lowest loss; one that diverged is the worst."""
        return min((key for key in trials if key.arm == arm), key=self._loss)

    def _loss(self, key: TrialKey) -> float:
        nll: float | None = self.records[key]["nll"]
        return math.inf if nll is None else nll


def _trials(job: Job, folder: Path) -> dict[TrialKey, Job]:
    """Return the trials of an arm, each in a folder below `folder`."""
    std = kind_of(job.settings).table_std(job)
    trials = {}
    for init_factor, rate_factor in product(INIT_FACTORS, RATE_FACTORS):
        key = TrialKey(job.arm, std * init_factor, job.settings.learning_rate * rate_factor)
        name = f"init-{key.init:.4g}-lr-{key.learning_rate:.4g}"
        trial = short(job, folder / folder_name(job.arm) / name)
        trials[key] = started(trial, key.init, key.learning_rate)
    return trials


def _key_of(record: dict[str, Any]) -> TrialKey:
    return TrialKey(record["arm"], record["init"], record["learning_rate"])


def started(job: Job, init: float, rate: float) -> Job:
    """Return the job with this starting scale and learning rate."""
    return replace(job, spec=replace(job.spec, init=init), settings=replace(job.settings, learning_rate=rate))


def per_arm() -> int:
    """Return how many trials each arm gets."""
    return len(INIT_FACTORS) * len(RATE_FACTORS)


def short_steps(settings: Settings) -> int:
    """Return the steps of a trial."""
    return max(1, settings.steps // 4)


def short(job: Job, folder: Path) -> Job:
    """Return the trial of a job: a quarter of its steps, judged by a part of the tuning split alone."""
    steps, spec = short_steps(job.settings), job.spec
    change = spec.tie_at or spec.untie_at or 0
    if change >= steps:  # the boundary does not change within the trial
        spec = spec.plainly()
    settings = replace(job.settings, steps=steps, measured=min(MEASURED, job.settings.measured))
    job = replace(job, spec=spec, seed=SEED, settings=settings, split="tune", trial=True)
    return replace(job, folder=folder, title=f"tune {job.arm}")


@dataclass(frozen=True)
class Pace:
    """Seconds that an arm takes here: a step, an evaluated token, and the rest of a run."""

    step: float
    token: float
    rest: float

    def seconds(self, job: Job) -> float:
        """Return the seconds of a whole run."""
        return self.rest + job.settings.steps * self.step + kind_of(job.settings).evaluated_tokens(job) * self.token


def mean_pace(paces: Sequence[Pace]) -> Pace:
    """Return the mean of several."""
    step = fmean(pace.step for pace in paces)
    token = fmean(pace.token for pace in paces)
    return Pace(step, token, fmean(pace.rest for pace in paces))


@dataclass(frozen=True)
class Timetable:
    """Jobs of a comparison, one per arm, the pace of each, and how many are trained at a time."""

    jobs: Sequence[Job]
    paces: Sequence[Pace]
    at_a_time: int

    def seconds(self, steps: int, tune: bool) -> float:
        """Return the seconds of all runs of so many steps, and of the trials that choose their settings."""
        s = self.jobs[0].settings
        runs: list[float] = []
        trials: list[float] = []
        for job, pace in zip(self.jobs, self.paces, strict=True):
            run = replace(job, settings=replace(s, steps=steps))
            runs.append(pace.seconds(run))
            if tune:
                trials += per_arm() * [pace.seconds(short(run, run.folder))]
        return self._lasts(trials) + self._lasts(s.seeds * runs)

    def _lasts(self, runs: Sequence[float]) -> float:
        """Return the seconds until all have ended, each begun as soon as there is a worker for it."""
        free = [0.0] * self.at_a_time
        for run in runs:
            heapreplace(free, free[0] + run)
        return max(free)

    def most_steps(self, elapsed: float) -> int:
        """Return the most steps for which all runs end within the minutes of their settings, `elapsed` seconds past.

        Raises RunError if fewer than `LEAST` do.
        """
        s = self.jobs[0].settings
        assert s.minutes is not None, "only a comparison with minutes asks for its steps"
        left = 60 * s.minutes - elapsed
        needed = partial(self.seconds, tune=s.tune)
        if needed(LEAST) <= left:
            return LEAST - 1 + bisect_right(range(LEAST, 1 << 40), left, key=needed)
        tuning, otherwise = "", ""
        if s.tune:
            tuning = f"{per_arm() * len(self.jobs)} tuning runs and "
            otherwise = f", or {_minutes(elapsed + self.seconds(LEAST, tune=False))} without tuning"
        runs = f"{s.seeds * len(self.jobs)} runs of {LEAST} steps"
        problem = f"--minutes {s.minutes:g} does not hold {tuning}{runs} on this machine"
        raise RunError(problem, f"give --minutes {_minutes(elapsed + needed(LEAST))} or more{otherwise}")


def steps_within(jobs: Sequence[Job], folder: Path, elapsed: Elapsed, workers: Workers, show: Show) -> int:
    """Return how many steps every run can have, from trials in `folder`, which is removed.

    `jobs` are one per arm, and their settings have minutes. `elapsed` returns the seconds of these that are past. A
    trial shares the machine with as many others as a run will: each arm's trial runs as often as runs are trained at a
    time.
    """
    minutes = jobs[0].settings.minutes
    assert minutes is not None, "only a comparison with minutes asks for its steps"
    [first] = _paces(jobs[:1], 2, folder, workers, show)  # what a process does once, it does here
    share = 60 * minutes * CALIBRATION_SHARE / len(jobs)
    fewest, most = CALIBRATION_STEPS
    steps = ranks.on_rank_zero(lambda: max(fewest, int(min(most, share / first.step))))
    timetable = Timetable(jobs, _paces(jobs, steps, folder, workers, show), workers.count)
    ranks.on_rank_zero(lambda: rmtree(folder))
    return ranks.on_rank_zero(lambda: timetable.most_steps(elapsed()))


def _paces(arms: Sequence[Job], steps: int, folder: Path, workers: Workers, show: Show) -> list[Pace]:
    """Time a trial of so many steps for each arm, as often as runs are trained at a time; return each arm's mean."""
    trials = []
    for number, job in enumerate([*arms] * workers.count):
        trials.append(replace(job, folder=folder / f"{number}"))
    paces = workers.each(partial(pace, steps=steps), trials, show, lambda job, pace: None)
    return [mean_pace(paces[arm :: len(arms)]) for arm in range(len(arms))]


def pace(job: Job, steps: int) -> Pace:
    """Time evaluation, when some tokens have warmed it up, and a trial of so many steps, made in the job's folder."""
    token = ranks.on_rank_zero(lambda: _seconds_per_token(job))
    trial_settings = replace(job.settings, steps=4 * steps)  # of which a trial is a quarter
    trial = short(replace(job, spec=job.spec.plainly(), settings=trial_settings), job.folder)
    trial = replace(trial, title="speed")
    begin = monotonic()
    try:
        result = train(trial).result
    except Interrupted:
        raise KeyboardInterrupt from None  # nothing here is worth taking up again
    ranks.on_rank_zero(lambda: rmtree(job.folder))
    step = max(result.seconds / (steps - 1), 1e-9)
    evaluation = kind_of(job.settings).evaluated_tokens(trial) * token
    return Pace(step, token, max(0.0, monotonic() - begin - steps * step - evaluation))


def _seconds_per_token(job: Job) -> float:
    """Time the evaluation of a point of the curve, the second time that it is made."""
    kind = kind_of(job.settings)
    with fast_products(job.products):
        installed = kind.build(job)
        kind.measure(job, installed, job.split, point=True)
        begin = monotonic()
        tokens = kind.measure(job, installed, job.split, point=True).tokens
        return (monotonic() - begin) / max(1, tokens)


def how_many(workers: Workers, job: Job, runs: int, folder: Path, show: Show, before: int | None = None) -> str:
    """Settle how many of so many runs like `job` are trained at a time, and the threads of each.

    `auto` tries in `folder`, once; `before` is its result when these runs began. Returns a line about its choice, the
    first time; "" where there was nothing to choose.
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
            workers.count, why = _tried(workers, job, runs, folder, show)
        else:
            workers.count, why = max(1, min(before, runs)), "as when they began"
        workers.is_settled = True
        if min(threads, runs) > 1:
            line = _choice_line(workers.count, threads // workers.count, why)
    workers.threads = max(1, threads // workers.count)
    return line or ""


def _choice_line(count: int, threads: int, why: str) -> str:
    """Return "1 run at a time, 4 threads: …", "2 runs at a time, 1 thread each: …"."""
    each = f"{threads} thread{'s' * (threads != 1)}{' each' * (count > 1)}"
    return f"{count} run{'s' * (count != 1)} at a time, {each}: {why}"


def _tried(workers: Workers, job: Job, runs: int, folder: Path, show: Show) -> tuple[int, str]:
    """Return how many at a time get through these runs fastest, and how that is known."""
    threads = torch.get_num_threads()
    if ranks.size() > 1:
        return 1, "several processes train each"
    if torch.accelerator.is_available() or not kind_of(job.settings).side_by_side:
        return 1, "each takes the whole machine"
    most, bytes_of_run, seconds = min(threads, runs), 1, 0.0
    if most > 1:
        bytes_of_run, seconds = demand(job)
    if runs * seconds <= WORTH:
        return 1, "there is too little to do for several"
    most = min(most, free_memory() // bytes_of_run)
    if most < 2:
        return 1, "memory holds no second one"
    fewest_steps, most_steps = TRIED
    steps = round(min(max(fewest_steps, job.settings.steps / seconds), most_steps))
    remove(folder)  # of a trial that was interrupted
    alone = pace(replace(job, folder=folder / "alone"), steps)
    workers.count, workers.threads = most, threads // most
    [together] = _paces([job], steps, folder, workers, show)
    remove(folder)
    # the rest of a run is left out: of the first in a process it is mostly imports
    share = replace(together, rest=0.0).seconds(job) / most / replace(alone, rest=0.0).seconds(job)
    if share <= FASTER:
        return most, f"in a trial they took {share:.2f} of the time of one at a time"
    workers.end()
    return 1, f"in a trial {most} at a time took {share:.2f} of its time"


def demand(job: Job) -> tuple[int, float]:
    """Return the bytes and seconds that a run takes, both roughly, the bytes rather more than less.

    Bytes are those of weights, gradients and moments, and three times what goes into and out of every matrix of the
    body, for the backward pass. One table more is for arms that have two. Seconds are six operations for each parameter
    and token, as fast as a core of today does them in a small model.
    """
    s, kind = job.settings, kind_of(job.settings)
    installed = kind.build(job)
    parameters = list(installed.model.parameters())
    tables = {id(table) for table in installed.tables()}
    matrices = [p for p in parameters if p.dim() > 1 and id(p) not in tables]
    activations = 3 * s.batch * s.length * sum(p.shape[0] + p.shape[1] for p in matrices)
    numbers = sum(p.numel() for p in parameters) + job.text.vocab * s.width
    # the last three: saving, and the same model as dense tables
    copies = 2 + kind.moments(job) + 3
    bytes_of_run = _PROCESS + 4 * (activations + copies * numbers)
    if s.minutes is not None:
        return bytes_of_run, 60 * s.minutes
    tokens = s.steps * s.batch * s.accumulate * s.length
    return bytes_of_run, 6 * numbers * tokens / OPERATIONS


def free_memory() -> int:
    """Return the bytes that processes started now can have."""
    free: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no container, or one without a limit
        limit, used = (int((_MEMORY / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


def _minutes(seconds: float) -> str:
    """Return seconds as minutes and a tenth more, since they were estimated from little: 2.3."""
    return f"{math.ceil(1.1 * seconds / 6) / 10:g}"
