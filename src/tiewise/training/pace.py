"""What a run takes here: a short trial of a job, and the seconds of its steps, of its evaluation and of the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from shutil import rmtree
from statistics import fmean
from time import monotonic

from tiewise.core.errors import Interrupted
from tiewise.ops.fast_products import fast_products
from tiewise.training import ranks
from tiewise.training.run import kind_of, train
from tiewise.training.settings import Settings
from tiewise.training.trainer import Job

SEED = 0  # of trials; compared runs count from 1
MEASURED = 32_768  # tokens of the tuning split that choose, at most


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
