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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from heapq import heapreplace
from pathlib import Path
from shutil import rmtree
from statistics import fmean
from time import monotonic
from typing import Any

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

Gone = Callable[[], float]  # seconds since the command began
Show = Callable[[Job, str, float, float], None]  # told what a run says, how many steps it has done, and of how many
Ended = Callable[..., None]  # told of a run that has ended, perhaps long ago, and the line that says so


def tune(
    jobs: list[Job], out: Path, workers: Workers, show: Show, ended: Ended
) -> tuple[list[Job], list[dict[str, Any]]]:
    """Return the jobs with what trials chose, and all trials; those that `tuning.json` already holds are taken up."""
    path, wanted = out / "tuning.json", {}
    for job in jobs:
        std = kind_of(job.settings).table_std(job)
        for init, rate in ((std * i, job.settings.learning_rate * r) for i in INIT_FACTORS for r in RATE_FACTORS):
            folder = out / "tuning" / folder_name(job.arm) / f"init-{init:.4g}-lr-{rate:.4g}"
            wanted[job.arm, init, rate] = started(short(job, folder), init, rate)
    found = {(t["arm"], t["init"], t["learning_rate"]): t for t in ranks.first_does(lambda: read_json(path) or [])}
    for key in found:
        ended(wanted[key])

    def tried(trial: Job, outcome: Outcome) -> None:
        init, rate, nll = trial.spec.init, trial.settings.learning_rate, outcome.result.heldout_nll
        said = f"{nll:.3f}" if math.isfinite(nll) else "diverged"
        key = {"arm": trial.arm, "init": init, "learning_rate": rate}
        found[trial.arm, init, rate] = key | {"nll": nll if math.isfinite(nll) else None}
        ranks.first_does(lambda: write_json(path, list(found.values())))
        ranks.first_does(partial(rmtree, trial.folder))  # nine models for each arm need not stay
        ended(trial, f"tune {trial.arm}: init {init:.4g}, lr {rate:.4g} → {said}")

    workers.each(train, [trial for key, trial in wanted.items() if key not in found], show, tried)
    trials = [found[key] for key in wanted]
    chosen = []
    for job in jobs:
        own = [t for t in trials if t["arm"] == job.arm]
        best = min(own, key=lambda t: math.inf if t["nll"] is None else t["nll"])
        chosen.append(started(job, best["init"], best["learning_rate"]))
    taken = [(job.arm, job.spec.init, job.settings.learning_rate) for job in chosen]
    return chosen, [{**t, "chosen": (t["arm"], t["init"], t["learning_rate"]) in taken} for t in trials]


def started(job: Job, init: float, rate: float) -> Job:
    """Return the job with this starting scale and learning rate."""
    return replace(job, spec=replace(job.spec, init=init), settings=replace(job.settings, learning_rate=rate))


def per_arm() -> int:
    """Trials that each arm gets."""
    return len(INIT_FACTORS) * len(RATE_FACTORS)


def short_steps(settings: Settings) -> int:
    """Steps of a trial."""
    return max(1, settings.steps // 4)


def short(job: Job, folder: Path) -> Job:
    """Return the trial of a job: a quarter of its steps, judged by a part of the tuning split alone."""
    steps = short_steps(job.settings)
    spec = job.spec if (job.spec.tie_at or job.spec.untie_at or 0) < steps else job.spec.plainly()
    settings = replace(job.settings, steps=steps, measured=min(MEASURED, job.settings.measured))
    job = replace(job, spec=spec, seed=SEED, settings=settings, split="tune", trial=True)
    return replace(job, folder=folder, title=f"tune {job.arm}")


@dataclass(frozen=True)
class Pace:
    """Seconds that an arm takes here: a step, an evaluated token, and a run beside them."""

    step: float
    token: float
    rest: float

    def seconds(self, job: Job) -> float:
        """Of a whole run."""
        return self.rest + job.settings.steps * self.step + kind_of(job.settings).evaluated(job) * self.token


def mean_pace(paces: Sequence[Pace]) -> Pace:
    """Return the mean of several."""
    return Pace(*map(fmean, zip(*map(astuple, paces), strict=True)))


def steps_within(jobs: Sequence[Job], folder: Path, gone: Gone, workers: Workers, show: Show) -> int:
    """Return how many steps every run can have, from trials in `folder`, which is removed.

    `jobs` are one per arm, their settings with minutes, of which `gone` seconds are past. A trial has the company that
    a run will have: each arm's is made as often as runs are trained at a time.
    """
    s, many = jobs[0].settings, workers.count
    assert s.minutes is not None
    seconds = 60 * s.minutes

    def paced(arms: Sequence[Job], steps: int) -> list[Pace]:
        each = [replace(job, folder=folder / f"{number}") for number, job in enumerate([*arms] * many)]
        found = workers.each(partial(pace, steps=steps), each, show, lambda job, pace: None)
        return [mean_pace(found[i :: len(arms)]) for i in range(len(arms))]

    few, most_steps = CALIBRATION_STEPS
    first = paced(jobs[:1], 2)[0]  # what a process does once, it does here
    share = seconds * CALIBRATION_SHARE / len(jobs)
    steps = ranks.first_does(lambda: max(few, int(min(most_steps, share / first.step))))
    paces = paced(jobs, steps)
    ranks.first_does(lambda: rmtree(folder))

    def lasts(runs: list[float]) -> float:
        """Seconds until all have ended, each begun as soon as there is a worker for it."""
        free = [0.0] * many
        for run in runs:
            heapreplace(free, free[0] + run)
        return max(free)

    def needed(steps: int, tune: bool = s.tune) -> float:
        whole = [(pace, replace(job, settings=replace(s, steps=steps))) for job, pace in zip(jobs, paces, strict=True)]
        trials = [pace.seconds(short(job, job.folder)) for pace, job in whole for _ in range(per_arm())] if tune else []
        return lasts(trials) + lasts(s.seeds * [pace.seconds(job) for pace, job in whole])

    def most() -> int:
        past = gone()
        if needed(LEAST) <= seconds - past:
            return LEAST - 1 + bisect_right(range(LEAST, 1 << 40), seconds - past, key=needed)
        runs = f"{s.seeds * len(jobs)} runs of {LEAST} steps"
        tuning = f"{per_arm() * len(jobs)} tuning runs and " if s.tune else ""
        otherwise = f", or {_minutes(past + needed(LEAST, tune=False))} without tuning" if s.tune else ""
        what = f"--minutes {s.minutes:g} does not hold {tuning}{runs} on this machine"
        raise RunError(what, f"give --minutes {_minutes(past + needed(LEAST))} or more{otherwise}")

    return ranks.first_does(most)


def pace(job: Job, steps: int) -> Pace:
    """Time evaluation, when some tokens have warmed it up, and a trial of so many steps, made in the job's folder."""
    kind = kind_of(job.settings)

    @fast_products(job.products)
    def evaluation() -> float:
        installed = kind.build(job)
        kind.measure(job, installed, job.split, point=True)
        begin = monotonic()
        measured = kind.measure(job, installed, job.split, point=True).tokens
        return (monotonic() - begin) / max(1, measured)

    token = ranks.first_does(evaluation)
    whole = replace(job, spec=job.spec.plainly(), settings=replace(job.settings, steps=4 * steps))
    trial = replace(short(whole, job.folder), title="speed")
    begin = monotonic()
    try:
        result = train(trial).result
    except Interrupted:
        raise KeyboardInterrupt from None  # nothing here is worth taking up again
    ranks.first_does(lambda: rmtree(job.folder))
    step = max(result.seconds / (steps - 1), 1e-9)
    return Pace(step, token, max(0.0, monotonic() - begin - steps * step - kind.evaluated(trial) * token))


def how_many(workers: Workers, job: Job, runs: int, folder: Path, show: Show, before: int | None = None) -> str:
    """Settle how many of so many runs like `job` are trained at a time, and the threads of each.

    `auto` tries in `folder`, once; `before` is what it found when these runs began. Returns what is to be said of its
    choice, the first time; nothing where there was nothing to choose.
    """
    if (line := workers.fit(runs)) is not None:
        return line
    threads, said = torch.get_num_threads(), ""
    if workers.asked != AUTO:
        if int(workers.asked) > 1 and ranks.size() > 1:
            raise RunError(f"jobs = {workers.asked} where {ranks.size()} processes train a run", "leave jobs out")
        workers.count = min(int(workers.asked), runs)
    elif not workers.chosen:
        if before is None or ranks.size() > 1:
            workers.count, why = _tried(workers, job, runs, folder, show)
        else:
            workers.count, why = max(1, min(before, runs)), "as when they began"
        workers.chosen = True
        each = threads // workers.count
        shares = f"{each} thread{'s' * (each != 1)}{' each' * (workers.count > 1)}"
        if min(threads, runs) > 1:
            said = f"{workers.count} run{'s' * (workers.count != 1)} at a time, {shares}: {why}"
    workers.threads = max(1, threads // workers.count)
    return said


def _tried(workers: Workers, job: Job, runs: int, folder: Path, show: Show) -> tuple[int, str]:
    """How many at a time get through these runs fastest, and how that is known."""
    threads = torch.get_num_threads()
    if ranks.size() > 1:
        return 1, "several processes train each"
    if torch.accelerator.is_available() or not kind_of(job.settings).side_by_side:
        return 1, "each takes the whole machine"
    most = min(threads, runs)
    needed, seconds = demand(job) if most > 1 else (1, 0.0)
    if runs * seconds <= WORTH:
        return 1, "there is too little to do for several"
    most = min(most, free_memory() // needed)
    if most < 2:
        return 1, "memory holds no second one"
    steps = round(min(max(TRIED[0], job.settings.steps / seconds), TRIED[1]))
    remove(folder)  # of a trial that was interrupted
    alone = pace(replace(job, folder=folder / "alone"), steps)
    workers.count, workers.threads = most, threads // most
    jobs = [replace(job, folder=folder / f"{number}") for number in range(most)]
    found = workers.each(partial(pace, steps=steps), jobs, show, lambda job, found: None)
    remove(folder)
    # the rest of a run is left out: of the first in a process it is mostly imports
    beside, alone = (replace(one, rest=0.0) for one in (mean_pace(found), alone))
    share = beside.seconds(job) / most / alone.seconds(job)
    if share <= FASTER:
        return most, f"in a trial they took {share:.2f} of the time of one at a time"
    workers.end()
    return 1, f"in a trial {most} at a time took {share:.2f} of its time"


def demand(job: Job) -> tuple[int, float]:
    """Bytes and seconds that a run takes, both roughly, the bytes rather more than less.

    Bytes are those of weights, gradients and moments, and three times what goes into and out of every matrix of the
    body, for the backward pass. One table more is for arms that have two. Seconds are six operations for each parameter
    and token, as fast as a core of today does them in a small model.
    """
    s, kind = job.settings, kind_of(job.settings)
    installed = kind.build(job)
    parameters = list(installed.model.parameters())
    body = [p for p in parameters if p.dim() > 1 and not any(p is table for table in installed.tables())]
    kept = 3 * s.batch * s.length * sum(p.shape[0] + p.shape[1] for p in body)
    numbers = sum(p.numel() for p in parameters) + job.text.vocab * s.width
    # the last three: saving, and the same model as dense tables
    needed = _PROCESS + 4 * (kept + (2 + kind.moments(job) + 3) * numbers)
    work = 6 * numbers * s.steps * s.batch * s.accumulate * s.length / OPERATIONS
    return needed, work if s.minutes is None else 60 * s.minutes


def free_memory() -> int:
    """Bytes that processes started now can have."""
    found: int = psutil.virtual_memory().available
    with suppress(OSError, ValueError):  # no container, or one without a limit
        most, used = (int((_MEMORY / f"memory.{name}").read_text()) for name in ("max", "current"))
        found = min(found, most - used)
    return found


def _minutes(seconds: float) -> str:
    """Seconds as minutes and a tenth more, since they were estimated from little: 2.3."""
    return f"{math.ceil(1.1 * seconds / 6) / 10:g}"
