"""Trials that choose the learning rates of each arm before the first run (`--tune`).

The learning rate changes a result more than tying does, and its best value differs between arms, so a comparison at
one rate for all arms also compares that choice. Every arm gets the same trials, with a separate seed: a quarter, half,
once, twice and four times the given rate. While the best rate of any arm is the smallest or the largest one, all arms
get the next one, at most 32 times smaller or larger. The lowest loss on the `tune` split, which is neither trained on
nor reported, wins. With `--minutes`, no rates are added, because their time was not counted.

If tables have their own rate (`table_rate`), it is chosen next, with each arm's best rate of the other parameters:

    learning_rate ¼ ½ 1 2 4, tables as given  →  the best of each arm  →  table_rate ¼ ½ 1 2 4  →  the best of each arm

A trial is a whole run, and is measured at the step whose model a run keeps (`select`). Trials of fewer steps would
favour larger rates, which learn fast and end worse. `run.yaml` has the given rates; `results.json` lists all trials and
marks the chosen ones.
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
from tiewise.training.settings import Settings
from tiewise.training.trainer import Job
from tiewise.training.workers import Workers

LEARNING_RATE, TABLE_RATE = "learning_rate", "table_rate"  # settings that trials choose, in this order
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
    table_rate: float | None = None

    def record(self) -> dict[str, Any]:
        """Return the values as `tuning.json` has them, without a `table_rate` of None."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def rates(self) -> str:
        """Return the rates as text.

        >>> TrialKey("tied", 0.004, 0.064).rates()
        'lr 0.004, tables 0.064'
        """
        tables = "" if self.table_rate is None else f", tables {self.table_rate:.4g}"
        return f"lr {self.learning_rate:.4g}{tables}"

    def folder(self) -> str:
        """Return the name of the trial's folder in that of its arm.

        >>> TrialKey("tied", 0.004, 0.064).folder()
        'lr-0.004-tables-0.064'
        """
        return self.rates().replace(", ", "-").replace(" ", "-")


class TrialRound(NamedTuple):
    """Trials that can be trained at the same time."""

    trials: dict[TrialKey, Job]
    is_extra: bool  # whether they are beyond the rates that every arm tries


def tune(
    jobs: list[Job], out: Path, workers: Workers, bar: TrialBar, *, may_add: bool
) -> tuple[list[Job], list[dict[str, Any]]]:
    """Return the jobs with the learning rates that the trials chose, and records of all trials.

    Trials that `tuning.json` lists are not repeated. `may_add` allows rates beyond the first ones. Records are ordered
    by arm and rates.
    """
    notes = TrialNotes(out / TUNING, bar.ended)
    trials: dict[TrialKey, Job] = {}
    for trial_round in _rounds(jobs, out, notes, may_add):
        new_trials = {key: trial for key, trial in trial_round.trials.items() if key not in trials}
        if trial_round.is_extra:
            bar.add(new_trials.values())
        _finish(new_trials, notes, workers, bar.show)
        trials |= new_trials
    best = notes.best_of_arms(trials)
    records = []
    for job in jobs:
        for key in sorted(key for key in trials if key.arm == job.arm):
            records.append({**notes.records[key], "chosen": key == best[job.arm]})
    return [with_best_rates(job, best) for job in jobs], records


def tuned_before(jobs: list[Job], out: Path, option: str, *, may_add: bool) -> list[Job]:
    """Return the jobs with the learning rates that finished trials chose.

    Raises:
        RunError: a trial is missing; the message names the `option` that trains without it.
    """
    notes = TrialNotes(out / TUNING, lambda job, line="": None)
    trials: dict[TrialKey, Job] = {}
    for trial_round in _rounds(jobs, out, notes, may_add):
        if not notes.has_all(trial_round.trials):
            problem = f"{option}: the tuning trials of {out} have not finished"
            raise RunError(problem, f"finish them with `tiewise compare --out {out} --resume`")
        trials |= trial_round.trials
    best = notes.best_of_arms(trials)
    return [with_best_rates(job, best) for job in jobs]


def tuned_rates(settings: Settings) -> tuple[str, ...]:
    """Return the names of the rates that trials choose, in their order."""
    return (LEARNING_RATE,) if settings.table_rate is None else (LEARNING_RATE, TABLE_RATE)


def _rounds(jobs: list[Job], out: Path, notes: TrialNotes, may_add: bool) -> Iterator[TrialRound]:
    """Yield the trials of each rate: the first ones, then those beyond the ends if `may_add`.

    An end is passed while an arm has its best rate there, so the notes need the losses of all earlier trials.
    """
    for name in tuned_rates(jobs[0].settings):
        trials = _trials(jobs, out, name, FACTORS)
        yield TrialRound(trials, is_extra=False)
        tried = FACTORS
        while may_add:
            factors = _factors_beyond(tried, name, jobs, notes.best_of_arms(trials))
            if not factors:
                break
            extra_trials = _trials(jobs, out, name, factors)
            yield TrialRound(extra_trials, is_extra=True)
            trials |= extra_trials
            tried += factors
        best = notes.best_of_arms(trials)
        jobs = [with_best_rates(job, best) for job in jobs]


def _factors_beyond(
    tried: Iterable[float], name: str, jobs: list[Job], best: Mapping[str, TrialKey]
) -> tuple[float, ...]:
    """Return the next factor beyond each end where an arm has its best rate."""
    best_factors = {getattr(best[job.arm], name) / _rate_in_settings(job, name) for job in jobs}
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
        self.records: dict[TrialKey, dict[str, Any]] = {
            _key_of(record): record for record in records if _is_trial(record)
        }

    def add(self, trial: Job, outcome: Outcome) -> None:
        """Store a trial's loss and delete its folder, which has a whole model."""
        key = _key_of_trial(trial)
        nll = outcome.result.heldout_nll  # of the tuning split, which a trial is measured on
        has_diverged = not math.isfinite(nll)
        self.records[key] = key.record() | {"nll": None if has_diverged else nll}
        ranks.on_rank_zero(lambda: write_json(self.path, list(self.records.values())))
        ranks.on_rank_zero(lambda: rmtree(trial.folder))
        verdict = "diverged" if has_diverged else f"{nll:.3f}"
        self.ended(trial, f"tune {key.arm}: {key.rates()} → {verdict}")

    def has_all(self, trials: Iterable[TrialKey]) -> bool:
        """Return whether all of these trials have finished."""
        return all(key in self.records for key in trials)

    def best_of_arms(self, trials: Iterable[TrialKey]) -> dict[str, TrialKey]:
        """Return the best trial of each arm."""
        keys = list(trials)
        return {arm: self.best(arm, keys) for arm in dict.fromkeys(key.arm for key in keys)}

    def best(self, arm: str, trials: Iterable[TrialKey]) -> TrialKey:
        """Return the trial of an arm with the lowest loss.

        A diverged trial is the worst. Of equal ones, that with the smallest rate is best, so that smaller rates are
        tried if all diverge.
        """
        return min((key for key in trials if key.arm == arm), key=lambda key: (self._loss(key), key))

    def _loss(self, key: TrialKey) -> float:
        nll: float | None = self.records[key]["nll"]
        return math.inf if nll is None else nll


def _trials(jobs: Iterable[Job], out: Path, name: str, factors: Iterable[float]) -> dict[TrialKey, Job]:
    """Return the trials of all arms at multiples of one rate, each in a subfolder."""
    trials = {}
    for job, factor in product(jobs, factors):
        varied = _with_rate(job, name, factor * _rate_in_settings(job, name))
        key = _key_of_trial(varied)
        folder = out / "tuning" / folder_name(job.arm) / key.folder()
        trials[key] = make_trial(varied, folder)
    return trials


def _rate_in_settings(job: Job, name: str) -> float:
    """Return a job's learning rate, or that of its tables; checked settings have a number."""
    rate: float = getattr(job.settings, name)
    return rate


def _with_rate(job: Job, name: str, rate: float) -> Job:
    """Return the job with this learning rate, or this one of its tables."""
    if name == LEARNING_RATE:
        return replace(job, settings=replace(job.settings, learning_rate=rate))
    return replace(job, settings=replace(job.settings, table_rate=rate))


def _key_of_trial(trial: Job) -> TrialKey:
    return TrialKey(trial.arm, trial.settings.peak_rate, trial.settings.table_rate)


def with_best_rates(job: Job, best: Mapping[str, TrialKey]) -> Job:
    """Return the job with the learning rates of its arm's best trial."""
    key = best[job.arm]
    settings = replace(job.settings, learning_rate=key.learning_rate, table_rate=key.table_rate)
    return replace(job, settings=settings)


def make_trial(job: Job, folder: Path) -> Job:
    """Return the same run with a separate seed, measured on the tuning split.

    No experiment tracker sees it.
    """
    settings = replace(job.settings, measured=min(TRIAL_TOKENS, job.settings.measured), report_to=())
    return replace(job, seed=SEED, settings=settings, split="tune", folder=folder, title=f"tune {job.arm}")


def _is_trial(record: object) -> bool:
    """Return whether a record of `tuning.json` is complete.

    Otherwise its trial is repeated.
    """
    return isinstance(record, dict) and {"arm", "learning_rate", "nll"} <= record.keys()


def _key_of(record: dict[str, Any]) -> TrialKey:
    return TrialKey(record["arm"], record["learning_rate"], record.get("table_rate"))


def rates_at_the_edge(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each arm whose best rate is at an end of the trials.

    An arm also has a line if all its trials diverged.
    """
    for chosen in (record for record in records if record["chosen"]):
        if chosen["nll"] is None:
            yield f"tune {chosen['arm']}: all trials diverged; try lower rates with --set learning_rate"
            continue
        of_arm = [record for record in records if record["arm"] == chosen["arm"]]
        for name in (LEARNING_RATE, TABLE_RATE):
            if name in chosen:
                yield from _rate_at_the_edge(name, chosen, [record[name] for record in of_arm])


def _rate_at_the_edge(name: str, chosen: Mapping[str, Any], tried: Sequence[float]) -> Iterator[str]:
    """Yield a line if the best rate of an arm is the smallest or the largest."""
    rate = chosen[name]
    which = {min(tried): "smallest", max(tried): "largest"}.get(rate)
    if which is not None:
        best = f"the best {name.replace('_', ' ')} {rate:.4g} is the {which} of the trials"
        yield f"tune {chosen['arm']}: {best}; --set {name}={rate:.4g} tries others"


def least_trials_per_arm(settings: Settings) -> int:
    """Return the number of trials that each arm has at least."""
    others = len(FACTORS) - 1
    return 1 + others * len(tuned_rates(settings))  # the rates as given are one trial
