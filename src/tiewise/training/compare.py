"""The main job: train every arm with every seed on the same data, and say what differs; or train one.

    settings ─ start → OUT/.starting: the text as tokens, a model of every arm, minutes as steps → env.json, run.yaml
             ─ finish → (tune) → arms × seeds → paired differences → results.json

Whatever cannot be used is found by `start`, before anything is trained, and then OUT is as it was. Arms of one seed
share data order and body initialisation; runs go seed by seed, so that an interrupted comparison holds whole pairs.
Everything that finished is on disk, and the next call of `finish` takes it up.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from tiewise.boundary.ops.compiled_kernels import kernels_state
from tiewise.boundary.ops.fast_products import LARGE, ProductChoice, product_choice, same_here
from tiewise.boundary.undisturbed import preserve_generators
from tiewise.core import __version__, ranks
from tiewise.core.errors import RunError
from tiewise.core.files import from_record
from tiewise.core.progress import listen_to_progress
from tiewise.core.text import Bigram, asymmetric_bigrams
from tiewise.planning.evidence import FREE, MADE, Expectation, expectation
from tiewise.training.data.corpus import PreparedText, load_prepared
from tiewise.training.folder import (
    DATA,
    ENVIRONMENT,
    RESULTS,
    SPEED,
    folder_name,
    read_json,
    saved_run,
    starting,
    write_json,
)
from tiewise.training.results import ArmDirectPath, Comparison, SingleRun, complete, gaps
from tiewise.training.run import Kind, Outcome, kind_of, read_outcome, train
from tiewise.training.settings import Settings
from tiewise.training.short_trials import Elapsed, Show, how_many, per_arm, short_steps, steps_within, tune
from tiewise.training.trainer import Job
from tiewise.training.workers import Workers

BIGRAMS = 7  # two tokens each: as many as a heat map's labels can name
CANDIDATES = 200


@dataclass(frozen=True)
class Display:
    """Where the lines of a run go, one for every stage and every finished training; and whether bars are drawn."""

    say: Callable[[str], None]
    bars: bool = False

    @classmethod
    def on_stderr(cls, *, quiet: bool = False) -> Display:
        """Show lines on stderr, bars too on a terminal; nothing when quiet, or from any process but the first."""
        if quiet or not ranks.first():
            return cls(lambda line: None)
        # above a bar that is there
        return cls(lambda line: tqdm.write(line, file=sys.stderr), bars=sys.stderr.isatty())

    @contextmanager
    def stages(self) -> Iterator[Show]:
        """Show the progress of each stage inside: reading, tokenizer, tokens, speed; workers tell theirs."""
        bar = StageBar(self.bars)
        try:
            with listen_to_progress(bar.show):
                yield lambda job, stage, done, total: bar.show(stage, done, total)
        finally:
            bar.close()

    @contextmanager
    def runs(self, steps: int) -> Iterator[RunsBar]:
        """Show one bar over the steps of all runs inside."""
        with tqdm(total=steps, disable=not self.bars, leave=False, miniters=1, smoothing=0, unit=" steps") as bar:
            yield RunsBar(bar, self.say)


class StageBar:
    """The bar of one stage after another, made at the first progress."""

    def __init__(self, is_visible: bool) -> None:
        self.is_visible = is_visible
        self.bar: tqdm | None = None

    def show(self, stage: str, done: float, total: float) -> None:
        """Show how much of a stage is done."""
        if self.bar is None:
            form = "{desc:<10}{percentage:3.0f}%|{bar}|"
            self.bar = tqdm(total=100, leave=False, disable=not self.is_visible, bar_format=form)
        self.bar.set_description_str(stage, refresh=False)
        self.bar.n = round(100 * min(1, done / total)) if total else 0  # the size of a stream is unknown
        self.bar.refresh()

    def close(self) -> None:
        """Remove the bar, if there is one."""
        if self.bar is not None:
            self.bar.close()


class RunsBar:
    """The bar over the steps of all runs. Steps of an earlier process are shown, but not counted in the speed."""

    def __init__(self, bar: tqdm, say: Callable[[str], None]) -> None:
        self.bar, self.say = bar, say
        self.ended_steps = 0  # steps of the runs that have ended
        self.running: dict[Job, tuple[str, float]] = {}  # the text of each, and how many steps it has done

    def show(self, job: Job, text: str, done: float, total: float) -> None:
        """Show how many of its steps a run has done."""
        is_running = job in self.running
        self.running[job] = text, done
        self._reach(is_running)

    def ended(self, job: Job, line: str = "") -> None:
        """Take the steps of a run that has ended, perhaps long ago, and say a line."""
        was_running = self.running.pop(job, None) is not None
        self.ended_steps += job.settings.steps
        self._reach(was_running)
        if line:
            self.say(line)

    def _reach(self, in_this_process: bool) -> None:
        """Move the bar to the steps of all runs."""
        if self.bar.disable:
            return
        texts = [text for text, _ in self.running.values()]
        step = self.ended_steps + sum(done for _, done in self.running.values())
        self.bar.set_description_str(" · ".join(texts), refresh=False)
        if not in_this_process:  # from where a run was: not taken for this process's speed
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
    """Make `out` a run that `finish` or `finish_one` finishes; `overwrite` replaces the one that it holds.

    `command` is as typed, for the report; `elapsed` says the seconds since it began, which minutes include, None counts
    from here; `workers` will train, None one run at a time. Raises TiewiseError for a setting, text, model or folder
    that cannot be used: `out` is as it was.
    """
    began = time.monotonic()

    def since_start() -> float:
        return time.monotonic() - began

    with ranks.first_holds(starting(out, overwrite=overwrite)) as stage:
        checked = ranks.on_rank_zero(lambda: _prepare_stage(settings, stage, display))
        text = load_prepared(stage / DATA)
        products = ranks.on_rank_zero(lambda: products_for(checked, text.vocab))
        if checked.minutes is not None:
            jobs = make_jobs(checked, text, stage, products)
            checked = _with_steps(checked, jobs, stage / SPEED, elapsed or since_start, workers or Workers(1), display)

        def write() -> None:
            write_json(stage / ENVIRONMENT, environment() | {"command": command, "products": asdict(products)})
            checked.save(stage)

        ranks.on_rank_zero(write)


def _prepare_stage(settings: Settings, stage: Path, display: Display) -> Settings:
    """Prepare the text of a run in a folder and see that every arm's model can be built; return checked settings."""
    checked = settings.checked()
    kind = kind_of(checked)
    kind.check_processes(checked)
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
    """Return settings with steps instead of minutes, from short trials in a folder."""
    with display.stages() as show:
        line = how_many(workers, jobs[0], settings.seeds * len(jobs), trials, show)
        if line:
            display.say(line)
        steps = steps_within(jobs, trials, elapsed, workers, show)
    display.say(f"{settings.minutes:g} minutes: {steps} steps for each run")
    return replace(settings, steps=steps, minutes=None).checked()


def finish(out: Path, display: Display, workers: Workers | None = None) -> Comparison:
    """Run or finish the comparison in `out`, one run at a time or by `workers`; RunError where there is none."""
    settings, text = open_run(out, single=False)
    bigrams, names = choose_probe(text)
    products = products_of(out, display)
    jobs, workers = make_jobs(settings, text, out, products), workers or Workers(1)
    env = read_json(out / ENVIRONMENT) or {}
    _settle_count(jobs, settings.seeds, out, env, workers, display)
    # all of them come here: what the first has written already, another may have read
    ranks.on_rank_zero(lambda: write_json(out / ENVIRONMENT, {"jobs": workers.count} | env))
    trials: list[dict[str, Any]] = []
    with display.runs(len(jobs) * _steps_of_arm(settings)) as bar:
        if settings.tune:
            jobs, trials = tune(jobs, out, workers, bar.show, bar.ended)
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
            direct_path=_direct_paths(outcomes[: len(jobs)], list(names.values())),  # of the first seed
            bigrams=[_bigram_record(bigram, names) for bigram in bigrams],
        )
    )
    comparison = replace(comparison, expectation=compare_with_atlas(settings, comparison))
    ranks.on_rank_zero(lambda: write_json(out / RESULTS, comparison.record()))
    return replace(comparison, folder=out)


def _steps_of_arm(settings: Settings) -> int:
    """Return the steps of all runs of an arm, with its trials."""
    steps = settings.seeds * settings.steps
    if settings.tune:
        steps += per_arm() * short_steps(settings)
    return steps


def _settle_count(
    jobs: Sequence[Job], seeds: int, out: Path, env: dict[str, Any], workers: Workers, display: Display
) -> None:
    """Settle how many runs are trained at a time; `env` says how many were when they began."""
    runs = [with_seed(job, seed, "") for seed in range(1, seeds + 1) for job in jobs]
    has_work = any(read_outcome(run.folder) is None for run in runs)
    before = env.get("jobs", None if has_work else 1)
    if has_work and env.get("threads") != torch.get_num_threads():
        before = None  # of another number of threads the trial was another one
    with display.stages() as show:
        line = how_many(workers, jobs[0], len(runs), out / SPEED, show, before)
    if line and has_work:
        display.say(line)


def _say_result(bar: RunsBar, job: Job, outcome: Outcome) -> None:
    """Say the losses of a run that has ended, above the bar."""
    result = outcome.result
    losses = f"validation nll {result.heldout_nll:.4f}, training {result.train_nll:.4f}"
    bar.ended(job, f"{job.title}: {losses}, {result.seconds:.0f} s")


def _environment_record(kind: Kind, products: ProductChoice, workers: Workers) -> dict[str, Any]:
    """Return the environment as results.json has it."""
    packages = {package: version(package) for package in kind.packages}
    counts = {"products": str(products), "jobs": workers.count, "threads": workers.threads}
    return environment() | counts | workers.location | packages


def _direct_paths(outcomes: Sequence[Outcome], tokens: list[str]) -> list[ArmDirectPath]:
    """Return the direct path of each arm that has one."""
    measured = [outcome for outcome in outcomes if outcome.direct_path]
    return [ArmDirectPath(outcome.result.arm, tokens, outcome.direct_path) for outcome in measured]


def _bigram_record(bigram: Bigram, names: dict[int, str]) -> dict[str, Any]:
    return {
        "left": names[bigram.left],
        "right": names[bigram.right],
        "forward": bigram.p_forward,
        "backward": bigram.p_backward,
        "count": bigram.forward,
    }


def compare_with_atlas(settings: Settings, comparison: Comparison) -> Expectation | None:
    """Compare tied − untied in held-out nll with the atlas; None where one of them is missing, or diverged."""
    both = gaps(comparison)
    if both is None or not math.isfinite(both[1].mean):
        return None
    _, generalisation = both
    setting, train = comparison.setting, comparison.data["splits"]["train"]
    sizes = {"width": settings.width, "layers": settings.layers, "vocab": setting["vocab"]}
    sizes |= {"tokens": train["tokens"], "seen": setting["tokens_per_run"]}
    other = ", ".join(_unlike_the_atlas(settings)[:3])
    return expectation(sizes, generalisation.mean, generalisation.n, other)


def _unlike_the_atlas(settings: Settings) -> list[str]:
    """Return settings that no run of the atlas has."""
    values, defaults = vars(replace(settings, kind_options=None)), vars(Settings())
    bound = [name for name in values if name not in FREE]
    other = [f"{name}={values[name]}" for name in bound if values[name] != defaults[name]]
    if not settings.layers:
        other.append("no layers")
    return other + [text for text in settings.text if text.startswith(MADE)]


def finish_one(out: Path, display: Display, workers: Workers | None = None) -> SingleRun:
    """Train or finish the single run in `out`. Raises as `finish`."""
    settings, text = open_run(out, single=True)
    assert settings.seed is not None
    jobs = make_jobs(settings, text, out, products_of(out, display))
    return finish_run(with_seed(jobs[0], settings.seed, f"{settings.arms[0]} seed {settings.seed}"), display, workers)


@dataclass(frozen=True)
class PreparedComparison:
    """A comparison of which no run is trained yet."""

    folder: Path
    runs: int

    def record(self) -> dict[str, Any]:
        """Return it as `--json` prints it."""
        return {"folder": str(self.folder), "runs": self.runs}


def refuse_trials(settings: Settings) -> None:
    """Refuse settings that need trials before the first run. Raises RunError."""
    for name in ("tune", "minutes"):
        if getattr(settings, name):
            problem = f"{name} with --element 0, which trains nothing"
            raise RunError(problem, f"leave {name} out, or use --launcher ray without --element")


def count_runs(out: Path, display: Display, workers: Workers | None = None) -> PreparedComparison:
    """Count the runs of the comparison in `out`, and train none. Raises as `finish`."""
    settings, _ = open_run(out, single=False)
    return PreparedComparison(out, len(settings.arms) * settings.seeds)


def finish_element(out: Path, display: Display, number: int) -> SingleRun:
    """Train or finish one run of the comparison in `out`, counted from 1, beside other such processes."""
    settings, text = open_run(out, single=False)
    runs = all_runs(make_jobs(settings, text, out, products_of(out, display)), settings.seeds, choose_probe(text)[1])
    if not 1 <= number <= len(runs):
        raise RunError(f"--element {number}: {out} has {len(runs)} runs", f"choose 1 to {len(runs)}")
    return finish_run(runs[number - 1], display)


def finish_run(job: Job, display: Display, workers: Workers | None = None) -> SingleRun:
    """Train or finish one run. Raises as `train`."""
    with display.runs(job.settings.steps) as bar:
        [outcome] = (workers or Workers(1)).each(train, [job], bar.show, lambda job, outcome: None)
    return SingleRun(outcome.result, job.folder, kind_of(job.settings).setting(job.settings, job.text), job.text.facts)


def open_run(out: Path, *, single: bool) -> tuple[Settings, PreparedText]:
    """Open the comparison or the single run in `out`, which the processes that are here can train.

    Returns its settings and tokens.
    """
    return ranks.on_rank_zero(lambda: _settings_of(out, single)), load_prepared(out / DATA)


def _settings_of(out: Path, single: bool) -> Settings:
    """Return the settings of the run in `out`; RunError if it is of the other command, or for other processes."""
    saved = saved_run(out)
    if (saved.seed is not None) != single:
        holds, command = ("a comparison", "compare") if single else ("a single run", "train")
        raise RunError(f"{out} holds {holds}", f"use tiewise {command} --out {out} --resume")
    kind_of(saved).check_processes(saved)
    return saved


def products_for(settings: Settings, vocab: int) -> ProductChoice:
    """Choose the matrix products of all runs that begin now: one choice, whatever a resume finds."""
    through = settings.batch * settings.length * settings.width  # numbers between two matrices
    on_cpu = settings.backend == "torch" and not torch.accelerator.is_available()
    choice = product_choice("auto", through * vocab if on_cpu else 0)
    if choice.product == "default" or choice.default_ms is None:
        return choice
    if through * settings.width >= LARGE:
        return choice
    # the trial was a loss's: oneDNN gains nothing in a small body, whose attention took seven times as long by it
    return replace(choice, product="default", reason=f"{choice.reason}; the body's are too small for it")


def products_of(out: Path, display: Display) -> ProductChoice:
    """Return the products that the run in `out` began with; if these differ here, say so and take torch's."""
    record = ranks.on_rank_zero(lambda: (read_json(out / ENVIRONMENT) or {}).get("products"))
    if record is None:  # it began before there was a choice
        return product_choice("default")
    first = from_record(ProductChoice, record, f"{out / ENVIRONMENT}: products", "start anew with --overwrite")
    if same_here(first):
        return first
    display.say(f"the run began with {first.product} products, which differ on this machine: torch's own from here on")
    return product_choice("default")


def make_jobs(
    settings: Settings, text: PreparedText, out: Path, products: str | ProductChoice = "default"
) -> list[Job]:
    """Return one job per arm, not yet seeded."""
    widths = kind_of(settings).feed_forward(settings, text.vocab)
    return [
        Job(arm, spec, settings, out / folder_name(arm), text, feed_forward=widths[arm], products=products)
        for arm, spec in settings.specs().items()
    ]


def choose_probe(text: PreparedText) -> tuple[list[Bigram], dict[int, str]]:
    """Return the bigrams whose direct path is measured, and their tokens by name, in the order of the measurement."""
    candidates = asymmetric_bigrams(text.split("train"), text.vocab, top=CANDIDATES, eos_id=text.eos_id)
    names = _token_names(text, candidates)

    def has_other_than_words(bigram: Bigram) -> bool:
        return not (names[bigram.left].strip().isalpha() and names[bigram.right].strip().isalpha())

    # two words come before punctuation, which says less to a reader
    bigrams = sorted(candidates, key=has_other_than_words)[:BIGRAMS]
    return bigrams, _token_names(text, bigrams)


def _token_names(text: PreparedText, bigrams: Sequence[Bigram]) -> dict[int, str]:
    """Return the text of every token of bigrams, in their order."""
    tokens = chain.from_iterable((bigram.left, bigram.right) for bigram in bigrams)
    return {token: text.tokenizer.decode([token]) for token in tokens}


def all_runs(jobs: Sequence[Job], seeds: int, probe: Iterable[int]) -> list[Job]:
    """Return every run of these arms in the order in which they are trained: seed by seed, each with its title."""
    tokens = tuple(probe)
    runs: list[Job] = []
    for seed in range(1, seeds + 1):
        for job in jobs:
            title = f"{len(runs) + 1}/{seeds * len(jobs)} {job.arm} seed {seed}"
            runs.append(with_seed(job, seed, title, tokens))
    return runs


def with_seed(job: Job, seed: int, title: str, probe: tuple[int, ...] = ()) -> Job:
    """Return the job of one seed, counted from 1."""
    return replace(job, seed=seed, folder=job.folder / f"seed-{seed}", title=title, probe=probe)


def environment() -> dict[str, Any]:
    """Return versions, processor, threads and kernels of what runs here, as `env.json` and the report say them.

    The kernels that are there bind no resume: all figures agree within rounding. Which products ran is a choice that it
    keeps (`products_of`).
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
    """Return the processor's name, as Linux says it, or as Python does."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
