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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from tiewise.boundary.ops.fast_products import LARGE, ProductChoice, kernels_state, product_choice, same_here
from tiewise.boundary.undisturbed import kept_generators
from tiewise.core import __version__, ranks
from tiewise.core.errors import RunError, heard
from tiewise.core.files import from_record
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
from tiewise.training.run import Outcome, finished, kind_of, train
from tiewise.training.settings import Settings
from tiewise.training.short_trials import Gone, Show, how_many, per_arm, short_steps, steps_within, tune
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
        """Lines on stderr, bars too where someone is looking; nothing when quiet, or from any process but the first."""
        if quiet or not ranks.first():
            return cls(lambda line: None)
        # above a bar that is there
        return cls(lambda line: tqdm.write(line, file=sys.stderr), bars=sys.stderr.isatty())

    @contextmanager
    def stages(self) -> Iterator[Show]:
        """Show the progress of each stage inside: reading, tokenizer, tokens, speed; workers tell theirs."""
        bar: tqdm | None = None  # where nothing is told there is none

        def show(stage: str, done: float, total: float) -> None:
            nonlocal bar
            if bar is None:
                form = "{desc:<10}{percentage:3.0f}%|{bar}|"
                bar = made.enter_context(tqdm(total=100, leave=False, disable=not self.bars, bar_format=form))
            bar.set_description_str(stage, refresh=False)
            bar.n = round(100 * min(1, done / total)) if total else 0  # the size of a stream is unknown
            bar.refresh()

        with ExitStack() as made, heard(show):
            yield lambda job, *said: show(*said)

    @contextmanager
    def runs(self, steps: int) -> Iterator[RunsBar]:
        """Show one bar over the steps of all runs inside."""
        with tqdm(total=steps, disable=not self.bars, leave=False, miniters=1, smoothing=0, unit=" steps") as bar:
            yield RunsBar(bar, self.say)


class RunsBar:
    """The bar over the steps of all runs. What an earlier process did is shown, and not taken for this one's speed."""

    def __init__(self, bar: tqdm, say: Callable[[str], None]) -> None:
        self.bar, self.say = bar, say
        self.past = 0  # steps of the runs that have ended
        self.at_hand: dict[Job, tuple[str, float]] = {}  # what each says, and how many steps it has done

    def show(self, job: Job, what: str, done: float, total: float) -> None:
        """Show how many of its steps a run has done."""
        begun = job in self.at_hand
        self.at_hand[job] = what, done
        self._reach(begun)

    def ended(self, job: Job, line: str = "") -> None:
        """Take the steps of a run that has ended, perhaps long ago, and say a line."""
        begun = self.at_hand.pop(job, None) is not None
        self.past += job.settings.steps
        self._reach(begun)
        if line:
            self.say(line)

    def _reach(self, begun: bool) -> None:
        if not self.bar.disable:
            whats, steps = zip(*self.at_hand.values(), strict=True) if self.at_hand else ((), ())
            step = self.past + sum(steps)
            self.bar.set_description_str(" · ".join(whats), refresh=False)
            self.bar.initial += 0 if begun else step - self.bar.n
            self.bar.update(step - self.bar.n)


def start(
    settings: Settings,
    out: Path,
    command: str,
    display: Display,
    *,
    overwrite: bool = False,
    gone: Gone | None = None,
    workers: Workers | None = None,
) -> None:
    """Make `out` a run that `finish` or `finish_one` finishes; `overwrite` replaces the one that it holds.

    `command` is as typed, for the report; `gone` says the seconds since it began, which minutes include, None counts
    from here; `workers` will train, None one run at a time. Raises TiewiseError for a setting, text, model or folder
    that cannot be used: `out` is as it was.
    """
    began = time.monotonic()
    gone = gone or (lambda: time.monotonic() - began)

    def staged() -> Settings:
        checked = settings.checked()
        kind = kind_of(checked)
        kind.check_processes(checked)
        with display.stages():
            text = kind.prepare(checked, stage / DATA)
        with kept_generators():
            for job in make_jobs(checked, text, stage):
                kind.build(job)
        checked = replace(checked, steps=kind.steps(checked, text)).checked()
        display.say(kind.described(checked, text))
        return checked

    def put() -> None:
        write_json(stage / ENVIRONMENT, environment() | {"command": command, "products": asdict(products)})
        made.save(stage)

    with ranks.first_holds(starting(out, overwrite=overwrite)) as stage:
        made = ranks.first_does(staged)
        text = load_prepared(stage / DATA)
        products = ranks.first_does(lambda: products_for(made, text.vocab))
        if made.minutes is not None:
            jobs, workers = make_jobs(made, text, stage, products), workers or Workers(1)
            with display.stages() as show:
                if said := how_many(workers, jobs[0], made.seeds * len(jobs), stage / SPEED, show):
                    display.say(said)
                steps = steps_within(jobs, stage / SPEED, gone, workers, show)
            display.say(f"{made.minutes:g} minutes: {steps} steps for each run")
            made = replace(made, steps=steps, minutes=None).checked()
        ranks.first_does(put)


def finish(out: Path, display: Display, workers: Workers | None = None) -> Comparison:
    """Run or finish the comparison in `out`, one run at a time or by `workers`; RunError where there is none."""
    settings, text = opened(out, single=False)
    bigrams, names = probed(text)
    steps = settings.seeds * settings.steps + (per_arm() * short_steps(settings) if settings.tune else 0)
    trials: list[dict[str, Any]] = []
    products = products_of(out, display)
    jobs, workers = make_jobs(settings, text, out, products), workers or Workers(1)
    env = read_json(out / ENVIRONMENT) or {}
    seeds = range(1, settings.seeds + 1)
    left = any(finished(seeded(job, seed, "").folder) is None for seed in seeds for job in jobs)
    before = env.get("jobs", None if left else 1)
    if left and env.get("threads") != torch.get_num_threads():
        before = None  # of another number of threads the trial was another one
    with display.stages() as show:
        said = how_many(workers, jobs[0], settings.seeds * len(jobs), out / SPEED, show, before)
    if said and left:
        display.say(said)
    # all of them come here: what the first has written already, another may have read
    ranks.first_does(lambda: write_json(out / ENVIRONMENT, {"jobs": workers.count} | env))
    with display.runs(len(jobs) * steps) as bar:
        if settings.tune:
            jobs, trials = tune(jobs, out, workers, bar.show, bar.ended)
        runs = all_runs(jobs, settings.seeds, names)

        def ended(job: Job, outcome: Outcome) -> None:
            r = outcome.result
            losses = f"validation nll {r.heldout_nll:.4f}, training {r.train_nll:.4f}"
            bar.ended(job, f"{job.title}: {losses}, {r.seconds:.0f} s")

        outcomes = workers.each(train, runs, bar.show, ended)
    kind = kind_of(settings)
    comparison = complete(
        Comparison(
            version=__version__,
            command=env.get("command", ""),
            demo=bool(text.facts.get("demo")),
            arms=list(settings.arms),
            seeds=list(seeds),
            reference=settings.arms[0],
            setting=kind.setting(settings, text),
            data={k: v for k, v in text.facts.items() if k != "request"},
            env=environment()
            | {"products": str(products), "jobs": workers.count, "threads": workers.threads}
            | workers.place
            | {package: version(package) for package in kind.packages},
            runs=[o.result for o in outcomes],
            tuning=trials,
            direct_path=[
                ArmDirectPath(first.result.arm, list(names.values()), first.direct_path)
                for first in outcomes[: len(jobs)]  # of the first seed
                if first.direct_path
            ],
            bigrams=[
                {"left": names[b.left], "right": names[b.right]}
                | {"forward": b.p_forward, "backward": b.p_backward, "count": b.forward}
                for b in bigrams
            ],
        )
    )
    comparison = replace(comparison, expectation=expected(settings, comparison))
    ranks.first_does(lambda: write_json(out / RESULTS, comparison.record()))
    return replace(comparison, folder=out)


def expected(settings: Settings, comparison: Comparison) -> Expectation | None:
    """Hold tied − untied in held-out nll against the atlas; None where one of them is missing, or diverged."""
    found = gaps(comparison)
    if found is None or not math.isfinite(found[1].mean):
        return None
    setting, train = comparison.setting, comparison.data["splits"]["train"]
    sizes = {"width": settings.width, "layers": settings.layers, "vocab": setting["vocab"]}
    sizes |= {"tokens": train["tokens"], "seen": setting["tokens_per_run"]}
    given, default = vars(replace(settings, own=None)), vars(Settings())
    other = [f"{name}={value}" for name, value in given.items() if name not in FREE and value != default[name]]
    other += ["no layers"] * (not settings.layers) + [text for text in settings.text if text.startswith(MADE)]
    return expectation(sizes, found[1].mean, found[1].n, ", ".join(other[:3]))


def finish_one(out: Path, display: Display, workers: Workers | None = None) -> SingleRun:
    """Train or finish the single run in `out`. Raises as `finish`."""
    settings, text = opened(out, single=True)
    assert settings.seed is not None
    jobs = make_jobs(settings, text, out, products_of(out, display))
    return finish_run(seeded(jobs[0], settings.seed, f"{settings.arms[0]} seed {settings.seed}"), display, workers)


@dataclass(frozen=True)
class Prepared:
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
            what = f"{name} with --element 0, which trains nothing"
            raise RunError(what, f"leave {name} out, or use --launcher ray without --element")


def prepared(out: Path, display: Display, workers: Workers | None = None) -> Prepared:
    """Count the runs of the comparison in `out`, and train none. Raises as `finish`."""
    settings, _ = opened(out, single=False)
    return Prepared(out, len(settings.arms) * settings.seeds)


def finish_element(out: Path, display: Display, number: int) -> SingleRun:
    """Train or finish one run of the comparison in `out`, counted from 1, beside other such processes."""
    settings, text = opened(out, single=False)
    runs = all_runs(make_jobs(settings, text, out, products_of(out, display)), settings.seeds, probed(text)[1])
    if not 1 <= number <= len(runs):
        raise RunError(f"--element {number}: {out} has {len(runs)} runs", f"choose 1 to {len(runs)}")
    return finish_run(runs[number - 1], display)


def finish_run(job: Job, display: Display, workers: Workers | None = None) -> SingleRun:
    """Train or finish one run. Raises as `train`."""
    with display.runs(job.settings.steps) as bar:
        [outcome] = (workers or Workers(1)).each(train, [job], bar.show, lambda job, outcome: None)
    return SingleRun(outcome.result, job.folder, kind_of(job.settings).setting(job.settings, job.text), job.text.facts)


def opened(out: Path, *, single: bool) -> tuple[Settings, PreparedText]:
    """Settings and tokens of the comparison or the single run in `out`, which the processes that are here can train."""

    def settings() -> Settings:
        saved = saved_run(out)
        if (saved.seed is not None) != single:
            holds, command = ("a comparison", "compare") if single else ("a single run", "train")
            raise RunError(f"{out} holds {holds}", f"use tiewise {command} --out {out} --resume")
        kind_of(saved).check_processes(saved)
        return saved

    return ranks.first_does(settings), load_prepared(out / DATA)


def products_for(settings: Settings, vocab: int) -> ProductChoice:
    """Choose the matrix products of all runs that begin now: one choice, whatever a resume finds."""
    on_cpu = settings.backend == "torch" and not torch.accelerator.is_available()
    through = settings.batch * settings.length * settings.width  # numbers between two matrices
    found = product_choice("auto", through * vocab if on_cpu else 0)
    if found.product == "default" or found.default_ms is None or through * settings.width >= LARGE:
        return found
    # the trial was a loss's: oneDNN gains nothing in a small body, whose attention took seven times as long by it
    return replace(found, product="default", reason=f"{found.reason}; the body's are too small for it")


def products_of(out: Path, display: Display) -> ProductChoice:
    """Return what the run in `out` began with; where that would be another product here, say so and take torch's."""
    record = ranks.first_does(lambda: (read_json(out / ENVIRONMENT) or {}).get("products"))
    if record is None:  # it began before there was a choice
        return product_choice("default")
    begun = from_record(ProductChoice, record, f"{out / ENVIRONMENT}: products", "start anew with --overwrite")
    if same_here(begun):
        return begun
    display.say(f"the run began with {begun.product} products, which differ on this machine: torch's own from here on")
    return product_choice("default")


def make_jobs(
    settings: Settings, text: PreparedText, out: Path, products: str | ProductChoice = "default"
) -> list[Job]:
    """One job per arm, not yet seeded."""
    wide = kind_of(settings).feed_forward(settings, text.vocab)
    return [
        Job(arm, spec, settings, out / folder_name(arm), text, feed_forward=wide[arm], products=products)
        for arm, spec in settings.specs().items()
    ]


def probed(text: PreparedText) -> tuple[list[Bigram], dict[int, str]]:
    """Return the bigrams whose direct path is measured, and their tokens by name, in the order of the measurement."""
    found = asymmetric_bigrams(text.split("train"), text.vocab, top=CANDIDATES, eos_id=text.eos_id)
    tokenizer = text.tokenizer
    names = {token: tokenizer.decode([token]) for b in found for token in (b.left, b.right)}
    # two words come before punctuation, which says less to a reader
    bigrams = sorted(found, key=lambda b: not all(names[t].strip().isalpha() for t in (b.left, b.right)))[:BIGRAMS]
    return bigrams, {token: names[token] for b in bigrams for token in (b.left, b.right)}


def all_runs(jobs: Sequence[Job], seeds: int, probe: Iterable[int]) -> list[Job]:
    """Return every run of these arms in the order in which they are trained: seed by seed, each with its title."""
    pairs = [(job, seed) for seed in range(1, seeds + 1) for job in jobs]
    titles = [f"{number}/{len(pairs)} {job.arm} seed {seed}" for number, (job, seed) in enumerate(pairs, 1)]
    return [seeded(*pair, title, tuple(probe)) for pair, title in zip(pairs, titles, strict=True)]


def seeded(job: Job, seed: int, title: str, probe: tuple[int, ...] = ()) -> Job:
    """Return the job of one seed, counted from 1."""
    return replace(job, seed=seed, folder=job.folder / f"seed-{seed}", title=title, probe=probe)


def environment() -> dict[str, Any]:
    """Versions, processor, threads and kernels of what runs here, as `env.json` and the report say them.

    Which kernels there are binds no resume: all figures agree within rounding. Which products ran is a choice that it
    keeps (`products_of`).
    """
    processor = platform.processor() or "unknown"
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        processor = names[0] if names else processor
    return {
        "tiewise": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "processor": processor,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "kernels": kernels_state(full=False),
        "processes": ranks.size(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
