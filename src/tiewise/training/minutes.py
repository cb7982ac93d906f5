"""`--minutes`: the steps of every run with which all of them, tuning and evaluation too, end in that time.

    a short trial of each arm → seconds of a step, of an evaluated token, of the rest of a run (building, saving)
    steps = the most for which   gone already + tuning + runs ≤ minutes

Every run of every arm gets as many, so that pairs stay pairs; what is decided here stands in `run.yaml`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import rmtree

import numpy as np

from tiewise.core.errors import Interrupted, RunError
from tiewise.core.progress import progress
from tiewise.data.frequency import token_counts
from tiewise.data.prepared import PreparedText
from tiewise.training import ranks
from tiewise.training.kind import kind_of
from tiewise.training.run import train
from tiewise.training.settings import Job, Settings
from tiewise.training.tuning import per_arm, short

CALIBRATION_STEPS = (8, 60)  # of a trial: fewest and most
CALIBRATION_SHARE = 0.02  # of the time, for the steps of all trials
LEAST = 20  # steps of a run: a course has so many points

Gone = Callable[[], float]  # seconds since the command began


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
    paces = _paces(jobs, text, folder, gone)
    return ranks.first_does(lambda: _most(jobs, paces, text, gone()))


def _paces(jobs: Sequence[Job], text: PreparedText, folder: Path, gone: Gone) -> list[Pace]:
    counts = token_counts(text.split("train"), text.vocab)

    def pace(job: Job, steps: int) -> Pace:
        token = ranks.first_does(lambda: _token(job, text, counts, gone))
        four = replace(job, spec=job.spec.plainly(), settings=replace(job.settings, steps=4 * steps))
        trial, begin = short(four, folder), gone()
        try:
            result = train(trial, text, counts, []).result
        except Interrupted:
            raise KeyboardInterrupt from None  # nothing here is worth taking up again
        ranks.first_does(lambda: rmtree(folder))
        step = max(result.seconds / (steps - 1), 1e-9)
        return Pace(
            step,
            token,
            max(0.0, gone() - begin - steps * step - kind_of(trial.settings).evaluated(trial, text) * token),
        )

    few, many = CALIBRATION_STEPS
    first = pace(jobs[0], 2)  # what a process does once, it does here
    share = _seconds(jobs[0].settings) * CALIBRATION_SHARE / len(jobs)
    steps = ranks.first_does(lambda: max(few, int(min(many, share / first.step))))
    found = []
    for done, job in enumerate(jobs):
        progress("speed", done, len(jobs))
        found.append(pace(job, steps))
    return found


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
