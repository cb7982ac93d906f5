"""Short trials before the first run: what to start an arm with (`--tune`), and how many steps fit (`--minutes`).

Initialisation and learning rate move a result more than tying does, so a comparison that fixes one of them for all arms
compares that choice. Every arm gets the same nine runs of a quarter of the steps, starting scale × learning rate, with
a seed of their own; the lowest nll on the `tune` split, which neither trains nor reports, wins.

    a short trial of each arm → seconds of a step, of an evaluated token, of the rest of a run (building, saving)
    steps = the most for which   gone already + tuning + runs ≤ minutes

Every run of every arm gets as many steps, so that pairs stay pairs; what is decided here stands in `run.yaml`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

from tiewise.core.errors import Interrupted, RunError
from tiewise.ops.fast_products import fast_products
from tiewise.training import ranks
from tiewise.training.folder import folder_name, read_json, write_json
from tiewise.training.run import kind_of, train
from tiewise.training.settings import Settings
from tiewise.training.trainer import Job

INIT_FACTORS = (0.5, 1.0, 2.0)
RATE_FACTORS = (0.5, 1.0, 2.0)
SEED = 0  # of trials; compared runs count from 1
MEASURED = 32_768  # tokens of the tuning split that choose, at most
CALIBRATION_STEPS = (8, 60)  # of a trial that is timed: fewest and most
CALIBRATION_SHARE = 0.02  # of the time, for the steps of all of these
LEAST = 20  # steps of a run: its curve has so many points

Gone = Callable[[], float]  # seconds since the command began
Ended = Callable[..., None]  # told of a run that has ended, perhaps long ago: its steps, and the line that says so


def tune(jobs: list[Job], out: Path, ended: Ended) -> tuple[list[Job], list[dict[str, Any]]]:
    """Choose for each job's arm a starting scale and a learning rate, taking up what `tuning.json` already holds.

    Returns the jobs with what was chosen, and every trial (arm, init, learning_rate, nll, chosen) for the report.
    """
    path = out / "tuning.json"
    trials: list[dict[str, Any]] = ranks.first_does(lambda: read_json(path) or [])
    known = {(t["arm"], t["init"], t["learning_rate"]) for t in trials}
    chosen = []
    for job in jobs:
        std = kind_of(job.settings).table_std(job)
        for init, rate in ((std * i, job.settings.learning_rate * r) for i in INIT_FACTORS for r in RATE_FACTORS):
            folder = out / "tuning" / folder_name(job.arm) / f"init-{init:.4g}-lr-{rate:.4g}"
            trial, line = started(short(job, folder), init, rate), ""
            if (job.arm, init, rate) not in known:
                found = train(trial).result.heldout_nll
                nll = found if math.isfinite(found) else None
                said = "diverged" if nll is None else f"{nll:.3f}"
                line = f"tune {job.arm}: init {init:.4g}, lr {rate:.4g} → {said}"
                trials.append({"arm": job.arm, "init": init, "learning_rate": rate, "nll": nll})
                ranks.first_does(partial(write_json, path, trials))
                ranks.first_does(partial(rmtree, folder))  # nine models for each arm need not stay
            ended(trial.settings.steps, line)
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


def steps_within(jobs: Sequence[Job], folder: Path, gone: Gone) -> int:
    """Return how many steps every run can have, from trials in `folder`, which is removed.

    `jobs` are one per arm, their settings with minutes, of which `gone` seconds are past.
    """
    s = jobs[0].settings
    assert s.minutes is not None
    seconds = 60 * s.minutes
    few, many = CALIBRATION_STEPS
    first = _pace(jobs[0], 2, folder, gone)  # what a process does once, it does here
    share = seconds * CALIBRATION_SHARE / len(jobs)
    steps = ranks.first_does(lambda: max(few, int(min(many, share / first.step))))
    paces = [_pace(job, steps, folder, gone) for job in jobs]

    def needed(steps: int, tune: bool = s.tune) -> float:
        whole = [(pace, replace(job, settings=replace(s, steps=steps))) for job, pace in zip(jobs, paces, strict=True)]
        tuning = per_arm() * sum(pace.seconds(short(job, job.folder)) for pace, job in whole) if tune else 0.0
        return s.seeds * sum(pace.seconds(job) for pace, job in whole) + tuning

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


def _pace(job: Job, steps: int, folder: Path, gone: Gone) -> Pace:
    """Time evaluation, when some tokens have warmed it up, and a trial of so many steps, made in `folder`."""
    kind = kind_of(job.settings)

    @fast_products(job.products)
    def evaluation() -> float:
        installed = kind.build(job)
        kind.measure(job, installed, job.split, point=True)
        begin = gone()
        measured = kind.measure(job, installed, job.split, point=True).tokens
        return (gone() - begin) / max(1, measured)

    token = ranks.first_does(evaluation)
    whole = replace(job, spec=job.spec.plainly(), settings=replace(job.settings, steps=4 * steps))
    trial = replace(short(whole, folder), title="speed")
    begin = gone()
    try:
        result = train(trial).result
    except Interrupted:
        raise KeyboardInterrupt from None  # nothing here is worth taking up again
    ranks.first_does(lambda: rmtree(folder))
    step = max(result.seconds / (steps - 1), 1e-9)
    return Pace(step, token, max(0.0, gone() - begin - steps * step - kind.evaluated(trial) * token))


def _minutes(seconds: float) -> str:
    """Seconds as minutes and a tenth more, since they were estimated from little: 2.3."""
    return f"{math.ceil(1.1 * seconds / 6) / 10:g}"
