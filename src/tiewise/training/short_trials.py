"""Short trials before the first run: what to start an arm with (`--tune`), and how many steps fit (`--minutes`).

Initialisation and learning rate move a result more than tying does, so a comparison that fixes one of them for all arms
compares that choice. Every arm gets the same nine runs of a quarter of the steps, starting scale × learning rate, with
a seed of their own; the lowest nll on the `tune` split, which neither trains nor reports, wins.

    a short trial of each arm → seconds of a step, of an evaluated token, of the rest of a run (building, saving)
    steps = the most for which   gone already + tuning + runs ≤ minutes     (runs: as they fill so many workers)

Every run of every arm gets as many steps, so that pairs stay pairs; what is decided here stands in `run.yaml`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from heapq import heapreplace
from pathlib import Path
from shutil import rmtree
from typing import Any

from tiewise.core.errors import RunError
from tiewise.training import ranks
from tiewise.training.folder import folder_name, read_json, write_json
from tiewise.training.pace import Pace, mean_pace, pace, short
from tiewise.training.run import Outcome, kind_of, train
from tiewise.training.trainer import Job
from tiewise.training.workers import Workers

INIT_FACTORS = (0.5, 1.0, 2.0)
RATE_FACTORS = (0.5, 1.0, 2.0)
CALIBRATION_STEPS = (8, 60)  # of a trial that is timed: fewest and most
CALIBRATION_SHARE = 0.02  # of the time, for the steps of all of these
LEAST = 20  # steps of a run: its curve has so many points

Gone = Callable[[], float]  # seconds since the command began
Show = Callable[[Job, str, float, float], None]  # told what a run says, how many steps it has done, and of how many
Ended = Callable[..., None]  # told of a run that has ended, perhaps long ago, and the line that says so


def tune(
    jobs: list[Job], out: Path, workers: Workers, show: Show, ended: Ended
) -> tuple[list[Job], list[dict[str, Any]]]:
    """Choose for each job's arm a starting scale and a learning rate, taking up what `tuning.json` already holds.

    Returns the jobs with what was chosen, and every trial (arm, init, learning_rate, nll, chosen) for the report.
    """
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


def _minutes(seconds: float) -> str:
    """Seconds as minutes and a tenth more, since they were estimated from little: 2.3."""
    return f"{math.ceil(1.1 * seconds / 6) / 10:g}"
