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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np

from tiewise.core.errors import Interrupted, RunError
from tiewise.core.frequency import token_counts
from tiewise.core.progress import progress
from tiewise.data.corpus import PreparedText
from tiewise.training import ranks
from tiewise.training.display import Say
from tiewise.training.folder import folder_name, read_json, write_json
from tiewise.training.kind import kind_of
from tiewise.training.run import Train, train
from tiewise.training.settings import Job, Settings

INIT_FACTORS = (0.5, 1.0, 2.0)
RATE_FACTORS = (0.5, 1.0, 2.0)
SEED = 0  # of trials; compared runs count from 1
MEASURED = 32_768  # tokens of the tuning split that choose, at most
CALIBRATION_STEPS = (8, 60)  # of a trial that is timed: fewest and most
CALIBRATION_SHARE = 0.02  # of the time, for the steps of all of these
LEAST = 20  # steps of a run: its curve has so many points

Gone = Callable[[], float]  # seconds since the command began


@dataclass(frozen=True)
class Choice:
    """An arm's starting scale and learning rate."""

    init: float
    learning_rate: float

    def of(self, job: Job) -> Job:
        """Return the job with these of its own."""
        settings = replace(job.settings, learning_rate=self.learning_rate)
        return replace(job, spec=replace(job.spec, init=self.init), settings=settings)


def tune(
    jobs: list[Job], out: Path, text: PreparedText, counts: np.ndarray, say: Say, train: Train = train
) -> tuple[dict[str, Choice], list[Any]]:
    """Choose for each job's arm, taking up what `tuning.json` already holds; `train` is what trains one job.

    Returns:
        the choice per arm, and every trial (arm, init, learning_rate, nll, chosen) for the report.
    """
    path = out / "tuning.json"
    trials: list[dict[str, Any]] = ranks.first_does(lambda: read_json(path) or [])
    known = {(t["arm"], t["init"], t["learning_rate"]) for t in trials}
    for job in jobs:
        for choice in grid(job, text.vocab):
            folder = out / "tuning" / folder_name(job.arm) / f"init-{choice.init:.4g}-lr-{choice.learning_rate:.4g}"
            trial = choice.of(short(job, folder))
            if (job.arm, choice.init, choice.learning_rate) not in known:
                found = train(trial, text, counts, []).result.heldout_nll
                nll = found if math.isfinite(found) else None
                ended = "diverged" if nll is None else f"{nll:.3f}"
                say(f"tune {job.arm}: init {choice.init:.4g}, lr {choice.learning_rate:.4g} → {ended}")
                trials.append({"arm": job.arm, "init": choice.init, "learning_rate": choice.learning_rate, "nll": nll})
                ranks.first_does(partial(write_json, path, trials))
                ranks.first_does(partial(rmtree, folder))  # nine models for each arm need not stay
            if job.bar is not None:
                job.bar.ended(trial.settings.steps)
    chosen: dict[str, Choice] = {}
    for job in jobs:
        best = min((t for t in trials if t["arm"] == job.arm), key=lambda t: math.inf if t["nll"] is None else t["nll"])
        chosen[job.arm] = Choice(best["init"], best["learning_rate"])
    marked = [{**t, "chosen": chosen[t["arm"]] == Choice(t["init"], t["learning_rate"])} for t in trials]
    return chosen, marked


def grid(job: Job, vocab: int) -> list[Choice]:
    """Nine choices around the arm's own defaults."""
    std = kind_of(job.settings).table_std(job, vocab)
    return [Choice(std * i, job.settings.learning_rate * r) for i in INIT_FACTORS for r in RATE_FACTORS]


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
    return replace(
        job,
        spec=spec,
        seed=SEED,
        settings=settings,
        folder=folder,
        title=f"tune {job.arm}",
        split="tune",
        trial=True,
    )


@dataclass(frozen=True)
class Pace:
    """Seconds that an arm takes here: a step, an evaluated token, and a run beside them."""

    step: float
    token: float
    rest: float

    def seconds(self, job: Job, text: PreparedText) -> float:
        """Of a whole run."""
        return self.rest + job.settings.steps * self.step + kind_of(job.settings).evaluated(job, text) * self.token


def steps_within(jobs: Sequence[Job], text: PreparedText, folder: Path, gone: Gone) -> int:
    """Return how many steps every run can have.

    Args:
        jobs: one per arm, their settings with minutes.
        text: the prepared text.
        folder: for the trials, removed afterwards.
        gone: seconds since the command began.

    Raises:
        RunError: not even `LEAST` steps of each run fit; says what would.
    """
    counts = token_counts(text.split("train"), text.vocab)
    few, many = CALIBRATION_STEPS
    first = _pace(jobs[0], 2, text, counts, folder, gone)  # what a process does once, it does here
    share = _seconds(jobs[0].settings) * CALIBRATION_SHARE / len(jobs)
    steps = ranks.first_does(lambda: max(few, int(min(many, share / first.step))))
    paces = []
    for done, job in enumerate(jobs):
        progress("speed", done, len(jobs))
        paces.append(_pace(job, steps, text, counts, folder, gone))
    return ranks.first_does(lambda: _most(jobs, paces, text, gone()))


def _pace(job: Job, steps: int, text: PreparedText, counts: np.ndarray, folder: Path, gone: Gone) -> Pace:
    """Time a trial of so many steps, made in `folder` and removed."""
    token = ranks.first_does(lambda: _token(job, text, counts, gone))
    trial = short(replace(job, spec=job.spec.plainly(), settings=replace(job.settings, steps=4 * steps)), folder)
    begin = gone()
    try:
        result = train(trial, text, counts, []).result
    except Interrupted:
        raise KeyboardInterrupt from None  # nothing here is worth taking up again
    ranks.first_does(lambda: rmtree(folder))
    step = max(result.seconds / (steps - 1), 1e-9)
    evaluated = kind_of(trial.settings).evaluated(trial, text) * token
    return Pace(step, token, max(0.0, gone() - begin - steps * step - evaluated))


def _token(job: Job, text: PreparedText, counts: np.ndarray, gone: Gone) -> float:
    """Return the seconds of an evaluated token, measured when some have warmed up."""
    kind = kind_of(job.settings)
    installed = kind.build(job, text, 1)
    kind.measure(job, installed, text, counts, job.split, point=True)
    begin = gone()
    measured = kind.measure(job, installed, text, counts, job.split, point=True).tokens
    return (gone() - begin) / max(1, measured)


def _most(jobs: Sequence[Job], paces: Sequence[Pace], text: PreparedText, gone: float) -> int:
    """Return the most steps with which all ends in time, `gone` seconds of it past. Raises as `steps_within`."""
    s = jobs[0].settings
    left = _seconds(s) - gone

    def needed(steps: int, tune: bool = s.tune) -> float:
        whole = [(pace, replace(job, settings=replace(s, steps=steps))) for job, pace in zip(jobs, paces, strict=True)]
        runs = s.seeds * sum(pace.seconds(job, text) for pace, job in whole)
        return runs + (
            per_arm() * sum(pace.seconds(short(job, job.folder), text) for pace, job in whole) if tune else 0
        )

    if needed(LEAST) > left:
        runs = f"{s.seeds * len(jobs)} runs of {LEAST} steps"
        tuning = f"{per_arm() * len(jobs)} tuning runs and " if s.tune else ""
        otherwise = f", or {_minutes(gone + needed(LEAST, tune=False))} without tuning" if s.tune else ""
        what = f"--minutes {s.minutes:g} does not hold {tuning}{runs} on this machine"
        raise RunError(what, f"give --minutes {_minutes(gone + needed(LEAST))} or more{otherwise}")
    fewest, most = LEAST, LEAST
    while needed(most) <= left:
        fewest, most = most, 2 * most
    while most - fewest > 1:
        middle = (fewest + most) // 2
        fewest, most = (middle, most) if needed(middle) <= left else (fewest, middle)
    return fewest


def _seconds(settings: Settings) -> float:
    assert settings.minutes is not None
    return 60 * settings.minutes


def _minutes(seconds: float) -> str:
    """Seconds as minutes and a tenth more, since they were estimated from little: 2.3."""
    return f"{math.ceil(1.1 * seconds / 6) / 10:g}"
