"""Training of every arm with every seed on the same data, or of one run.

    settings ─ start → OUT/.starting: the text as tokens, a model of every arm, minutes as steps → env.json, run.yaml
             ─ finish → (tune) → arms × seeds → paired differences → results.json

`start` refuses whatever cannot be used before any training, and then leaves OUT as it was. Arms of one seed share data
order and the initialization of the body. Runs go seed by seed, so an interrupted comparison has complete pairs. Every
finished run is on disk, and the next call of `finish` continues after it.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from tiewise.boundary.ops.compiled_kernels import kernels_state
from tiewise.boundary.ops.fast_products import LARGE, ProductChoice, choose_products, is_same_here
from tiewise.boundary.undisturbed import preserve_generators
from tiewise.core import __version__, ranks
from tiewise.core.errors import RunError
from tiewise.core.progress import listen_to_progress
from tiewise.core.records import from_record
from tiewise.core.text import Bigram, asymmetric_bigrams
from tiewise.training.data.corpus import PreparedText, load_prepared
from tiewise.training.descent import descent_note, descents_of
from tiewise.training.finding import complete
from tiewise.training.folder import (
    DATA,
    ENVIRONMENT,
    RESULTS,
    SPEED,
    folder_name,
    read_json,
    saved_run,
    stage_run,
    write_json,
)
from tiewise.training.results import ArmDirectPath, Comparison, SingleRun, step_in_words
from tiewise.training.run import Kind, Outcome, kind_of, read_outcome, train
from tiewise.training.settings import Settings
from tiewise.training.short_trials import Elapsed, settle_count, steps_within
from tiewise.training.trackers import require_trackers
from tiewise.training.trainer import Job
from tiewise.training.tuning import Show, least_trials_per_arm, rates_at_the_edge, tune, tuned_before
from tiewise.training.workers import Workers

BIGRAMS = 7  # of two tokens each, as many as the labels of a heat map have room for
CANDIDATES = 200  # asymmetric bigrams that the BIGRAMS are chosen from


@dataclass(frozen=True)
class Display:
    """Output of a run: lines of text, and progress bars if `bars`.

    `say` takes one line for every stage and every finished training.
    """

    say: Callable[[str], None]
    bars: bool = False

    @classmethod
    def on_stderr(cls, *, quiet: bool = False) -> Display:
        """Show lines on stderr, and bars if it is a terminal.

        Nothing is shown if `quiet`, nor by any process but the first.
        """
        if quiet or not ranks.is_first():
            return cls(lambda line: None)
        # writes above a bar that is on the screen
        return cls(lambda line: tqdm.write(line, file=sys.stderr), bars=sys.stderr.isatty())

    @contextmanager
    def stages(self) -> Iterator[Show]:
        """Show the progress of each stage inside this context.

        Stages are reading, tokenizer, tokens and speed. Workers report theirs.
        """
        bar = StageBar(self.bars)
        try:
            with listen_to_progress(bar.show):
                yield lambda job, stage, done, total: bar.show(stage, done, total)
        finally:
            bar.close()

    @contextmanager
    def runs(self, steps: int) -> Iterator[RunsBar]:
        """Show one bar over the steps of all runs inside this context."""
        with tqdm(total=steps, disable=not self.bars, leave=False, miniters=1, smoothing=0, unit=" steps") as bar:
            yield RunsBar(bar, self.say)


class StageBar:
    """Bar that shows one stage after another, created at the first progress."""

    def __init__(self, is_visible: bool) -> None:
        self.is_visible = is_visible
        self.bar: tqdm | None = None

    def show(self, stage: str, done: float, total: float) -> None:
        """Show how far a stage is."""
        if self.bar is None:
            form = "{desc:<10}{percentage:3.0f}%|{bar}|"
            self.bar = tqdm(total=100, leave=False, disable=not self.is_visible, bar_format=form)
        self.bar.set_description_str(stage, refresh=False)
        self.bar.n = round(100 * min(1, done / total)) if total else 0  # total 0: the size of a stream is unknown
        self.bar.refresh()

    def close(self) -> None:
        """Remove the bar, if it was created."""
        if self.bar is not None:
            self.bar.close()


class RunsBar:
    """Bar over the steps of all runs.

    Steps of an earlier process are shown, but they do not count in the speed.
    """

    def __init__(self, bar: tqdm, say: Callable[[str], None]) -> None:
        self.bar, self.say = bar, say
        self.ended_steps = 0  # total steps of the runs that have ended
        self.running: dict[Job, tuple[str, float]] = {}  # run → (its text, its steps so far)

    def show(self, job: Job, text: str, done: float, total: float) -> None:
        """Show the number of steps that a run has taken."""
        is_running = job in self.running
        self.running[job] = text, done
        self._reach(is_running)

    def ended(self, job: Job, line: str = "") -> None:
        """Add the steps of a run that has ended, and print its line.

        The run may have ended in an earlier process.
        """
        was_running = self.running.pop(job, None) is not None
        self.ended_steps += job.settings.steps
        self._reach(was_running)
        if line:
            self.say(line)

    def add(self, jobs: Iterable[Job]) -> None:
        """Expect the steps of more runs."""
        self.bar.total += sum(job.settings.steps for job in jobs)

    def _reach(self, in_this_process: bool) -> None:
        """Move the bar to the steps of all runs."""
        if self.bar.disable:
            return
        texts = [text for text, _ in self.running.values()]
        step = self.ended_steps + sum(done for _, done in self.running.values())
        self.bar.set_description_str(" · ".join(texts), refresh=False)
        if not in_this_process:  # steps of an earlier process must not raise this one's speed
            self.bar.initial += step - self.bar.n
        self.bar.update(step - self.bar.n)


def start(
    settings: Settings,
    out: Path,
    command: str,
    display: Display,
    *,
    overwrite: bool = False,
    elapsed: Elapsed | None = None,
    workers: Workers | None = None,
) -> None:
    """Prepare a run in `out` that `finish` or `finish_one` completes.

    `command` is the command as typed, for the report. `elapsed` returns the seconds since it began, which count against
    `minutes`; None counts from this call. `workers` will train the runs; None means one run at a time. `overwrite`
    replaces the run in `out`.

    Raises:
        TiewiseError: a setting, text, model or folder cannot be used. `out` is as it was.
    """
    began = time.monotonic()

    def since_start() -> float:
        """Return the seconds since this call of `start`."""
        return time.monotonic() - began

    with ranks.hold_on_rank_zero(stage_run(out, overwrite=overwrite)) as stage:
        checked = ranks.on_rank_zero(lambda: _prepare_stage(settings, stage, display))
        text = load_prepared(stage / DATA)
        products = ranks.on_rank_zero(lambda: products_for(checked, text.vocab))
        minutes = checked.minutes
        if minutes is not None:
            jobs = make_jobs(checked, text, stage, products)
            checked = _with_steps(checked, jobs, stage / SPEED, elapsed or since_start, workers or Workers(1), display)

        def write() -> None:
            """Write the environment and the settings."""
            facts: dict[str, Any] = {"command": command, "products": asdict(products)}
            if minutes is not None:
                facts["minutes"] = minutes
            if checked.report_to:
                facts["started"] = f"{datetime.now():%Y-%m-%dT%H-%M-%S}"
            write_json(stage / ENVIRONMENT, environment() | facts)
            checked.save(stage)

        ranks.on_rank_zero(write)


def _prepare_stage(settings: Settings, stage: Path, display: Display) -> Settings:
    """Prepare the text of a run in a folder, and check that its models build.

    Return the settings, checked.
    """
    checked = settings.checked()
    kind = kind_of(checked)
    kind.check_processes(checked)
    require_trackers(checked.report_to)
    with display.stages():
        text = kind.prepare(checked, stage / DATA)
    with preserve_generators():
        for job in make_jobs(checked, text, stage):
            kind.build(job)
    checked = replace(checked, steps=kind.steps(checked, text)).checked()
    display.say(kind.describe(checked, text))
    return checked


def _with_steps(
    settings: Settings, jobs: Sequence[Job], trials: Path, elapsed: Elapsed, workers: Workers, display: Display
) -> Settings:
    """Return settings with steps instead of minutes, timed by short trials in a folder."""
    with display.stages() as show:
        line = settle_count(workers, jobs[0], settings.seeds * len(jobs), trials, show)
        if line:
            display.say(line)
        steps = steps_within(jobs, trials, elapsed, workers, show)
    display.say(f"{settings.minutes:g} minutes allow {steps} steps for each run")
    return replace(settings, steps=steps, minutes=None).checked()


def finish(out: Path, display: Display, workers: Workers | None = None) -> Comparison:
    """Run or finish the comparison in `out`, one run at a time or by `workers`.

    RunError: `out` has no comparison.
    """
    settings, text = open_run(out, single=False)
    bigrams, names = choose_bigrams(text)
    products = products_of(out, display)
    jobs, workers = make_jobs(settings, text, out, products), workers or Workers(1)
    env = read_json(out / ENVIRONMENT) or {}
    _settle_count(jobs, settings.seeds, out, env, workers, display)
    # every process comes here, and the others may have read the file that the first one wrote
    ranks.on_rank_zero(lambda: write_json(out / ENVIRONMENT, {"jobs": workers.count} | env))
    trials: list[dict[str, Any]] = []
    with display.runs(len(jobs) * _steps_of_arm(settings)) as bar:
        if settings.tune:
            jobs, trials = _tune(jobs, out, workers, bar, may_add="minutes" not in env)
        runs = all_runs(jobs, settings.seeds, names)
        outcomes = workers.each(train, runs, bar.show, partial(_say_result, bar))
    kind = kind_of(settings)
    comparison = complete(
        Comparison(
            version=__version__,
            command=env.get("command", ""),
            demo=bool(text.facts.get("demo")),
            arms=list(settings.arms),
            seeds=list(range(1, settings.seeds + 1)),
            reference=settings.arms[0],
            setting=kind.setting(settings, text),
            data={name: value for name, value in text.facts.items() if name != "request"},
            env=_environment_record(kind, products, workers),
            runs=[outcome.result for outcome in outcomes],
            tuning=trials,
            direct_path=_direct_paths(outcomes[: len(jobs)], list(names.values())),  # runs of the first seed
            bigrams=[_bigram_record(bigram, names) for bigram in bigrams],
        )
    )
    ranks.on_rank_zero(lambda: write_json(out / RESULTS, comparison.record()))
    return replace(comparison, folder=out)


def _tune(
    jobs: list[Job], out: Path, workers: Workers, bar: RunsBar, may_add: bool
) -> tuple[list[Job], list[dict[str, Any]]]:
    """Return what `tune` returns, and report best rates at the edge of the trials."""
    jobs, trials = tune(jobs, out, workers, bar, may_add=may_add)
    for line in rates_at_the_edge(trials):
        bar.say(line)
    return jobs, trials


def _steps_of_arm(settings: Settings) -> int:
    """Return the total steps of an arm's runs and of its first trials."""
    runs = settings.seeds
    if settings.tune:
        runs += least_trials_per_arm(settings)
    return runs * settings.steps


def _settle_count(
    jobs: Sequence[Job], seeds: int, out: Path, env: dict[str, Any], workers: Workers, display: Display
) -> None:
    """Set the number of runs trained at a time.

    `env` has the number with which the comparison began.
    """
    runs = [with_seed(job, seed, "") for seed in range(1, seeds + 1) for job in jobs]
    has_work = any(read_outcome(run.folder) is None for run in runs)
    before = env.get("jobs", None if has_work else 1)
    if has_work and env.get("threads") != torch.get_num_threads():
        before = None  # the trial's result holds for its number of threads alone
    with display.stages() as show:
        line = settle_count(workers, jobs[0], len(runs), out / SPEED, show, before)
    if line and has_work:
        display.say(line)


def _say_result(bar: RunsBar, job: Job, outcome: Outcome) -> None:
    """Print the losses of a run that has ended, above the bar."""
    result = outcome.result
    losses = f"validation loss {result.heldout_nll:.4f}, training loss {result.train_nll:.4f} nats/token"
    if result.is_before_end:
        losses += f" after {step_in_words(result)}"
    bar.ended(job, f"{job.title}: {losses}, {result.seconds:.0f} s")


def _environment_record(kind: Kind, products: ProductChoice, workers: Workers) -> dict[str, Any]:
    """Return the environment of the runs as results.json records it."""
    packages = {package: version(package) for package in kind.packages}
    counts = {"products": str(products), "jobs": workers.count, "threads": workers.threads}
    return environment() | counts | workers.location | packages


def _direct_paths(outcomes: Sequence[Outcome], tokens: list[str]) -> list[ArmDirectPath]:
    """Return the direct path of each arm that has one."""
    measured = [outcome for outcome in outcomes if outcome.direct_path]
    return [ArmDirectPath(outcome.result.arm, tokens, outcome.direct_path) for outcome in measured]


def _bigram_record(bigram: Bigram, names: dict[int, str]) -> dict[str, Any]:
    """Return a bigram as results.json records it."""
    return {
        "left": names[bigram.left],
        "right": names[bigram.right],
        "forward": bigram.p_forward,
        "backward": bigram.p_backward,
        "count": bigram.forward,
    }


def finish_one(out: Path, display: Display, workers: Workers | None = None) -> SingleRun:
    """Train or finish the single run in `out`; raises as `finish`."""
    settings, text = open_run(out, single=True)
    assert settings.seed is not None
    jobs = make_jobs(settings, text, out, products_of(out, display))
    return finish_run(with_seed(jobs[0], settings.seed, f"{settings.arms[0]} seed {settings.seed}"), display, workers)


@dataclass(frozen=True)
class PreparedComparison:
    """A comparison whose runs are all still to be trained."""

    folder: Path
    runs: int

    def record(self) -> dict[str, Any]:
        """Return the fields as `--json` prints them."""
        return {"folder": str(self.folder), "runs": self.runs}


def refuse_trials(settings: Settings) -> None:
    """Raise RunError for settings that need trials before the first run."""
    for name in ("tune", "minutes"):
        if getattr(settings, name):
            problem = f"{name} with --element 0, which trains nothing"
            raise RunError(problem, f"leave {name} out, or use --launcher ray without --element")


def count_runs(out: Path, display: Display, workers: Workers | None = None) -> PreparedComparison:
    """Return the comparison in `out` with its number of runs, without training; raises as `finish`."""
    settings, _ = open_run(out, single=False)
    return PreparedComparison(out, len(settings.arms) * settings.seeds)


def finish_element(out: Path, display: Display, number: int) -> SingleRun:
    """Train or finish run `number`, counted from 1, of the comparison in `out`.

    Other processes may train other runs of it at the same time.
    """
    settings, text = open_run(out, single=False)
    jobs = make_jobs(settings, text, out, products_of(out, display))
    if settings.tune:
        env = read_json(out / ENVIRONMENT) or {}
        jobs = tuned_before(jobs, out, f"--element {number}", may_add="minutes" not in env)
    runs = all_runs(jobs, settings.seeds, choose_bigrams(text)[1])
    if not 1 <= number <= len(runs):
        raise RunError(f"--element {number}: {out} has {len(runs)} runs", f"choose 1 to {len(runs)}")
    return finish_run(runs[number - 1], display)


def finish_run(job: Job, display: Display, workers: Workers | None = None) -> SingleRun:
    """Train or finish one run; raises as `train`."""
    with display.runs(job.settings.steps) as bar:
        [outcome] = (workers or Workers(1)).each(train, [job], bar.show, lambda job, outcome: None)
    setting, falls = kind_of(job.settings).setting(job.settings, job.text), descents_of({job.arm: [outcome.result]})
    return SingleRun(outcome.result, job.folder, setting, job.text.facts, descent_note(falls), falls)


def open_run(out: Path, *, single: bool) -> tuple[Settings, PreparedText]:
    """Return the settings and the tokens of the comparison, or the single run, in `out`.

    RunError: these processes cannot train it together, or raises as `_settings_of`.
    """
    return ranks.on_rank_zero(lambda: _settings_of(out, single)), load_prepared(out / DATA)


def _settings_of(out: Path, single: bool) -> Settings:
    """Return the settings of the run in `out`.

    RunError: the run belongs to the other command, or these processes cannot train it.
    """
    saved = saved_run(out)
    if (saved.seed is not None) != single:
        holds, command = ("a comparison", "compare") if single else ("a single run", "train")
        raise RunError(f"{out} holds {holds}", f"use tiewise {command} --out {out} --resume")
    kind_of(saved).check_processes(saved)
    require_trackers(saved.report_to)
    return saved


def products_for(settings: Settings, vocab: int) -> ProductChoice:
    """Choose the matrix products of a new comparison's runs.

    All runs use one choice, and a resume keeps it.
    """
    width = settings.body_width
    through = settings.batch * settings.length * width  # numbers that pass from one matrix to the next
    on_cpu = settings.backend == "torch" and not torch.accelerator.is_available()
    choice = choose_products("auto", through * vocab if on_cpu else 0)
    if choice.product == "default" or choice.default_ms is None:
        return choice
    if through * width >= LARGE:
        return choice
    # the trial timed the loss. In a small body oneDNN gains nothing, and its attention took seven times as long
    return replace(choice, product="default", reason=f"{choice.reason}; the body's are too small for it")


def products_of(out: Path, display: Display) -> ProductChoice:
    """Return the matrix products that the run in `out` began with.

    If they differ on this machine, a line says so, and torch's products are returned.
    """
    record = ranks.on_rank_zero(lambda: (read_json(out / ENVIRONMENT) or {}).get("products"))
    if record is None:  # a run of an older version, which had no choice
        return choose_products("default")
    first = from_record(ProductChoice, record, f"{out / ENVIRONMENT}: products", "start anew with --overwrite")
    if is_same_here(first):
        return first
    display.say(
        f"this machine computes {first.product} products otherwise than the run did so far; torch's own are used now"
    )
    return choose_products("default")


def make_jobs(
    settings: Settings, text: PreparedText, out: Path, products: str | ProductChoice = "default"
) -> list[Job]:
    """Return one job per arm, not yet seeded."""
    widths, name = kind_of(settings).feed_forward(settings, text.vocab), _name_with_start(out)
    jobs = []
    for arm, spec in settings.specs().items():
        job = Job(arm, spec, settings, out / folder_name(arm), text, products=products)
        jobs.append(replace(job, feed_forward=widths[arm], comparison=name))
    return jobs


def _name_with_start(out: Path) -> str:
    """Return the name of a run's folder with the time of its start.

    A tracker thus distinguishes a run from the one that it replaced. A resumed run has the same name.
    """
    started = (read_json(out / ENVIRONMENT) or {}).get("started", "")
    return f"{out.absolute().name}-{started}"


def choose_bigrams(text: PreparedText) -> tuple[list[Bigram], dict[int, str]]:
    """Return the bigrams whose direct path is measured, and the texts of their tokens.

    The texts are in the order of the measurement, by token id.
    """
    candidates = asymmetric_bigrams(text.split("train"), text.vocab, top=CANDIDATES, eos_id=text.eos_id)
    names = _token_names(text, candidates)

    def has_other_than_words(bigram: Bigram) -> bool:
        """Return whether a token of a bigram has other characters than letters."""
        return not (names[bigram.left].strip().isalpha() and names[bigram.right].strip().isalpha())

    # bigrams of two words first: punctuation tells a reader less
    bigrams = sorted(candidates, key=has_other_than_words)[:BIGRAMS]
    return bigrams, _token_names(text, bigrams)


def _token_names(text: PreparedText, bigrams: Sequence[Bigram]) -> dict[int, str]:
    """Return the text of every token of the bigrams, in order."""
    tokens = chain.from_iterable((bigram.left, bigram.right) for bigram in bigrams)
    return {token: text.tokenizer.decode([token]) for token in tokens}


def all_runs(jobs: Sequence[Job], seeds: int, measured_ids: Iterable[int]) -> list[Job]:
    """Return every run of these arms in training order: seed by seed, with titles."""
    ids = tuple(measured_ids)
    runs: list[Job] = []
    for seed in range(1, seeds + 1):
        for job in jobs:
            title = f"{len(runs) + 1}/{seeds * len(jobs)} {job.arm} seed {seed}"
            runs.append(with_seed(job, seed, title, ids))
    return runs


def with_seed(job: Job, seed: int, title: str, measured_ids: tuple[int, ...] = ()) -> Job:
    """Return the job of one seed, counted from 1."""
    return replace(job, seed=seed, folder=job.folder / f"seed-{seed}", title=title, measured_ids=measured_ids)


def environment() -> dict[str, Any]:
    """Return versions, processor, threads and kernels of this process, for `env.json` and the report.

    A resume may have other kernels: all figures agree within rounding. It keeps the choice of matrix products
    (`products_of`).
    """
    return {
        "tiewise": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "kernels": kernels_state(full=False),
        "processes": ranks.size(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def _processor() -> str:
    """Return the processor's name from Linux, else from Python."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
