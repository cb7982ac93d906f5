"""Trials that choose the learning rate of each arm before the first run (`--tune`).

The learning rate changes a result more than tying does, and its best value differs between arms, so a comparison at
one rate for all arms also compares that choice. Every arm gets the same trials, with a separate seed: a quarter, half,
once, twice and four times the given rate. While the best rate of any arm is the smallest or the largest one, all arms
get the next one, at most 32 times smaller or larger. The lowest loss on the `tune` split, which is neither trained on
nor reported, wins. With `--minutes`, no rates are added, because their time was not counted.

A trial is a whole run, and is measured at the step whose model a run keeps (`select`). Trials of fewer steps would
favour larger rates, which learn fast and end worse. `run.yaml` has the given rate, `results.json` the chosen ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from shutil import rmtree
from typing import Any, NamedTuple, Protocol

from tiewise.core import ranks
from tiewise.core.errors import RunError
from tiewise.training.folder import folder_name, read_json, write_json
from tiewise.training.run import Outcome, train
from tiewise.training.trainer import Job
from tiewise.training.workers import Workers

FACTORS: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the given rate, in the first trials
LEAST_FACTOR, MOST_FACTOR = 1 / 32, 32.0
TUNING = "tuning.json"  # file of the trials' losses in the folder of a comparison
SEED = 0  # seed of trials; compared runs have seeds from 1
TRIAL_TOKENS = 32_768  # tokens of the tuning split that a trial is measured on, at most

Show = Callable[[Job, str, float, float], None]  # called with a run, its text, its steps so far and its total steps


class TrialBar(Protocol):
    """Display of the progress of trials."""

    def show(self, job: Job, text: str, done: float, total: float) -> None:
        """Show the number of steps that a run has taken."""

    def ended(self, job: Job, line: str = "") -> None:
        """Note that a run has ended, also one of an earlier process; `line` reports it."""

    def add(self, jobs: Iterable[Job]) -> None:
        """Expect more runs than the first trials."""


class TrialKey(NamedTuple):
    """Values that a trial tests."""

    arm: str
    learning_rate: float


def tune(
    jobs: list[Job], out: Path, workers: Workers, bar: TrialBar, *, may_add: bool
) -> tuple[list[Job], list[dict[str, Any]]]:
    """Return the jobs with the learning rates that the trials chose, and records of all trials.

    Trials that `tuning.json` lists are not repeated. `may_add` allows rates beyond the first ones. Records are ordered
    by arm and rate.
    """
    notes = TrialNotes(out / TUNING, bar.ended)
    trials: dict[TrialKey, Job] = {}
    for new_trials in _rounds(jobs, out, notes, may_add):
        if trials:
            bar.add(new_trials.values())
        _finish(new_trials, notes, workers, bar.show)
        trials |= new_trials
    best = notes.best_of_arms(trials)
    records = []
    for job in jobs:
        of_arm = [key for key in trials if key.arm == job.arm]
        for key in sorted(of_arm, key=lambda key: key.learning_rate):
            records.append({**notes.records[key], "chosen": key == best[job.arm]})
    return [with_best_rate(job, best) for job in jobs], records


def tuned_before(jobs: list[Job], out: Path, option: str, *, may_add: bool) -> list[Job]:
    """Return the jobs with the learning rates that finished trials chose.

    Raises:
        RunError: a trial is missing; the message names the `option` that trains without it.
    """
    notes = TrialNotes(out / TUNING, lambda job, line="": None)
    trials: dict[TrialKey, Job] = {}
    for new_trials in _rounds(jobs, out, notes, may_add):
        if not notes.has_all(new_trials):
            problem = f"{option}: the tuning trials of {out} have not finished"
            raise RunError(problem, f"finish them with `tiewise compare --out {out} --resume`")
        trials |= new_trials
    best = notes.best_of_arms(trials)
    return [with_best_rate(job, best) for job in jobs]


def _rounds(jobs: list[Job], out: Path, notes: TrialNotes, may_add: bool) -> Iterator[dict[TrialKey, Job]]:
    """Yield the first trials, then those beyond the ends if `may_add`.

    An end is passed while an arm has its best rate there, so the notes need the losses of all earlier trials.
    """
    yield _trials(jobs, out, FACTORS)
    tried = FACTORS
    while may_add:
        best = notes.best_of_arms(_trials(jobs, out, tried))
        factors = _factors_beyond(tried, jobs, best)
        if not factors:
            return
        yield _trials(jobs, out, factors)
        tried += factors


def _factors_beyond(tried: Iterable[float], jobs: list[Job], best: Mapping[str, TrialKey]) -> tuple[float, ...]:
    """Return the next factor beyond each end where an arm has its best rate."""
    best_factors = {best[job.arm].learning_rate / job.settings.peak_rate for job in jobs}
    smallest, largest = min(tried), max(tried)
    factors = []
    if smallest in best_factors and smallest > LEAST_FACTOR:
        factors.append(smallest / 2)
    if largest in best_factors and largest < MOST_FACTOR:
        factors.append(largest * 2)
    return tuple(factors)


def _finish(trials: Mapping[TrialKey, Job], notes: TrialNotes, workers: Workers, show: Show) -> None:
    """Train the trials that have no record."""
    missing = []
    for key, trial in trials.items():
        if key in notes.records:
            notes.ended(trial)
        else:
            missing.append(trial)
    workers.each(train, missing, show, notes.add)


class TrialNotes:
    """Losses of finished trials, stored in `tuning.json`."""

    def __init__(self, path: Path, ended: Callable[..., None]) -> None:
        """Read the file; `ended` is called for each trial that ends."""
        self.path, self.ended = path, ended
        records = ranks.on_rank_zero(lambda: read_json(path) or [])
        self.records: dict[TrialKey, dict[str, Any]] = {_key_of(record): record for record in records}

    def add(self, trial: Job, outcome: Outcome) -> None:
        """Store a trial's loss and delete its folder, which has a whole model."""
        key = TrialKey(trial.arm, trial.settings.peak_rate)
        nll = outcome.result.heldout_nll  # of the tuning split, which a trial is measured on
        has_diverged = not math.isfinite(nll)
        self.records[key] = key._asdict() | {"nll": None if has_diverged else nll}
        ranks.on_rank_zero(lambda: write_json(self.path, list(self.records.values())))
        ranks.on_rank_zero(lambda: rmtree(trial.folder))
        verdict = "diverged" if has_diverged else f"{nll:.3f}"
        self.ended(trial, f"tune {key.arm}: lr {key.learning_rate:.4g} → {verdict}")

    def has_all(self, trials: Iterable[TrialKey]) -> bool:
        """Return whether all of these trials have finished."""
        return all(key in self.records for key in trials)

    def best_of_arms(self, trials: Iterable[TrialKey]) -> dict[str, TrialKey]:
        """Return the best trial of each arm."""
        keys = list(trials)
        return {arm: self.best(arm, keys) for arm in dict.fromkeys(key.arm for key in keys)}

    def best(self, arm: str, trials: Iterable[TrialKey]) -> TrialKey:
        """Return the trial of an arm with the lowest loss; a diverged one is the worst."""
        return min((key for key in trials if key.arm == arm), key=self._loss)

    def _loss(self, key: TrialKey) -> float:
        nll: float | None = self.records[key]["nll"]
        return math.inf if nll is None else nll


def _trials(jobs: Iterable[Job], out: Path, factors: Iterable[float]) -> dict[TrialKey, Job]:
    """Return the trials of all arms at multiples of their rates, each in a subfolder."""
    trials = {}
    for job, factor in product(jobs, factors):
        rate = factor * job.settings.peak_rate
        folder = out / "tuning" / folder_name(job.arm) / f"lr-{rate:.4g}"
        trials[TrialKey(job.arm, rate)] = with_rate(make_trial(job, folder), rate)
    return trials


def with_best_rate(job: Job, best: Mapping[str, TrialKey]) -> Job:
    """Return the job with the learning rate of its arm's best trial."""
    return with_rate(job, best[job.arm].learning_rate)


def with_rate(job: Job, rate: float) -> Job:
    """Return the job with this learning rate."""
    return replace(job, settings=replace(job.settings, learning_rate=rate))


def make_trial(job: Job, folder: Path) -> Job:
    """Return the same run with a separate seed, measured on the tuning split.

    No experiment tracker sees it.
    """
    settings = replace(job.settings, measured=min(TRIAL_TOKENS, job.settings.measured), report_to=())
    return replace(job, seed=SEED, settings=settings, split="tune", folder=folder, title=f"tune {job.arm}")


def _key_of(record: dict[str, Any]) -> TrialKey:
    return TrialKey(record["arm"], record["learning_rate"])


def rates_at_the_edge(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each arm whose best rate is the smallest or the largest."""
    for chosen in (record for record in records if record["chosen"]):
        rate = chosen["learning_rate"]
        tried = [record["learning_rate"] for record in records if record["arm"] == chosen["arm"]]
        which = {min(tried): "smallest", max(tried): "largest"}.get(rate)
        if which is not None:
            fix = f"--set learning_rate={rate:.4g} tries others"
            yield f"tune {chosen['arm']}: the best learning rate {rate:.4g} is the {which} of the trials; {fix}"


def least_trials_per_arm() -> int:
    """Return the number of trials that each arm has at least."""
    return len(FACTORS)
