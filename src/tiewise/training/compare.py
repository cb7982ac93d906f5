"""The main job: train every arm with every seed on the same data, and say what differs; or train one.

    settings ─ start → OUT/.starting: the text as tokens, a model of every arm, minutes as steps → env.json, run.yaml
             ─ finish → (tune) → arms × seeds → paired differences → results.json

Whatever cannot be used is found by `start`, before anything is trained, and then OUT is as it was. Arms of one seed
share data order and body initialisation; runs go seed by seed, so that an interrupted comparison holds whole pairs.
Everything that finished is on disk, and the next call of `finish` takes it up.
"""

from __future__ import annotations

import os
import platform
import time
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from tiewise.core import __version__
from tiewise.core.errors import RunError
from tiewise.core.frequency import asymmetric_bigrams, token_counts
from tiewise.data.corpus import PreparedText, load_prepared
from tiewise.training import ranks
from tiewise.training.display import Display, RunsBar
from tiewise.training.folder import DATA, ENVIRONMENT, folder_name, read_json, saved_run, starting, write_json
from tiewise.training.results import ArmDirectPath, Comparison, SingleRun, complete
from tiewise.training.run import Outcome, kind_of, train
from tiewise.training.settings import Settings
from tiewise.training.short_trials import Gone, per_arm, short_steps, steps_within, tune
from tiewise.training.trainer import Job

BIGRAMS = 7  # two tokens each: as many as a heat map's labels can name
CANDIDATES = 200


def start(
    settings: Settings, out: Path, command: str, display: Display, *, overwrite: bool = False, gone: Gone | None = None
) -> None:
    """Make `out` a run that `finish` or `finish_one` finishes.

    Args:
        settings: what is asked for.
        out: the run's folder.
        command: as typed, for the report.
        display: where progress goes.
        overwrite: replace the run that `out` holds.
        gone: seconds since the command began, of which minutes are counted; None counts from here.

    Raises:
        TiewiseError: a setting, text, model or folder that cannot be used; `out` is as it was.
    """
    began = time.monotonic()
    gone = gone or (lambda: time.monotonic() - began)

    def staged() -> Settings:
        checked = settings.checked()
        kind = kind_of(checked)
        kind.check_processes(checked)
        kind.check_sizes(checked)
        with display.stages():
            text = kind.prepare(checked, stage / DATA)
        for job in make_jobs(checked, text, stage):
            kind.build(job)
        checked = replace(checked, steps=kind.steps(checked, text)).checked()
        display.say(kind.described(checked, text))
        return checked

    def put(made: Settings) -> None:
        write_json(stage / ENVIRONMENT, environment() | {"command": command})
        made.save(stage)

    with ranks.first_holds(starting(out, overwrite=overwrite)) as stage:
        made = ranks.first_does(staged)
        if made.minutes is not None:
            jobs = make_jobs(made, load_prepared(stage / DATA), stage)
            with display.stages():
                steps = steps_within(jobs, stage / "calibration", gone)
            display.say(f"{made.minutes:g} minutes: {steps} steps for each run")
            made = replace(made, steps=steps, minutes=None).checked()
        ranks.first_does(lambda: put(made))


def finish(out: Path, display: Display) -> Comparison:
    """Run or finish the comparison in `out`, and write `results.json`.

    Raises:
        RunError: `out` holds no run, or a single one.
        Interrupted: after Ctrl-C, with a checkpoint written.
    """
    settings, text = opened(out)
    if settings.seed is not None:
        raise RunError(f"{out} holds a single run", f"use tiewise train --out {out} --resume")
    found = asymmetric_bigrams(text.split("train"), text.vocab, top=CANDIDATES, eos_id=text.eos_id)
    tokenizer = text.tokenizer()
    names = {token: tokenizer.decode([token]) for b in found for token in (b.left, b.right)}
    # two words come before punctuation, which says less to a reader
    bigrams = sorted(found, key=lambda b: not all(names[t].strip().isalpha() for t in (b.left, b.right)))[:BIGRAMS]
    probe = tuple(dict.fromkeys(token for b in bigrams for token in (b.left, b.right)))
    steps = settings.seeds * settings.steps + (per_arm() * short_steps(settings) if settings.tune else 0)
    trials: list[dict[str, Any]] = []
    outcomes: list[Outcome] = []
    with display.runs(len(settings.arms) * steps) as bar:
        jobs = make_jobs(settings, text, out, bar)
        if settings.tune:
            jobs, trials = tune(jobs, out, display.say)
        for seed in range(1, settings.seeds + 1):
            for job in jobs:
                title = f"{len(outcomes) + 1}/{settings.seeds * len(jobs)} {job.arm} seed {seed}"
                outcomes.append(train(replace(seeded(job, seed, title), probe=probe)))
                r = outcomes[-1].result
                display.say(f"{title}: held-out nll {r.heldout_nll:.4f}, training {r.train_nll:.4f}, {r.seconds:.0f} s")
                bar.ended(job.settings.steps)
    kind = kind_of(settings)
    paths = {o.result.arm: o.direct_path for o in reversed(outcomes)}  # of the first seed
    comparison = complete(
        Comparison(
            version=__version__,
            command=(read_json(out / ENVIRONMENT) or {}).get("command", ""),
            demo=bool(text.facts.get("demo")),
            arms=list(settings.arms),
            seeds=list(range(1, settings.seeds + 1)),
            reference=settings.arms[0],
            setting=kind.setting(settings, text),
            data={k: v for k, v in text.facts.items() if k != "request"},
            env=environment() | {package: version(package) for package in kind.packages},
            runs=[o.result for o in outcomes],
            tuning=trials,
            direct_path=[
                ArmDirectPath(arm, [names[t] for t in probe], paths[arm]) for arm in settings.arms if paths[arm]
            ],
            bigrams=[
                {
                    "left": names[b.left],
                    "right": names[b.right],
                    "forward": b.p_forward,
                    "backward": b.p_backward,
                    "count": b.forward,
                }
                for b in bigrams
            ],
        )
    )
    ranks.first_does(lambda: write_json(out / "results.json", comparison.record()))
    return replace(comparison, folder=out)


def finish_one(out: Path, display: Display) -> SingleRun:
    """Train or finish the single run in `out`.

    Raises:
        RunError: `out` holds no run, or a comparison.
        Interrupted: after Ctrl-C, with a checkpoint written.
    """
    settings, text = opened(out)
    if settings.seed is None:
        raise RunError(f"{out} holds a comparison", f"use tiewise compare --out {out} --resume")
    with display.runs(settings.steps) as bar:
        job = seeded(make_jobs(settings, text, out, bar)[0], settings.seed, f"{settings.arms[0]} seed {settings.seed}")
        result = train(job).result
    return SingleRun(result, job.folder, kind_of(settings).setting(settings, text), text.facts)


def opened(out: Path) -> tuple[Settings, PreparedText]:
    """Settings and tokens of the run in `out`, which as many processes as are here can train."""

    def settings() -> Settings:
        saved = saved_run(out)
        kind_of(saved).check_processes(saved)
        return saved

    return ranks.first_does(settings), load_prepared(out / DATA)


def make_jobs(settings: Settings, text: PreparedText, out: Path, bar: RunsBar | None = None) -> list[Job]:
    """One job per arm, not yet seeded."""
    wide = kind_of(settings).feed_forward(settings, text.vocab)
    counts = token_counts(text.split("train"), text.vocab)
    return [
        Job(arm, spec, settings, out / folder_name(arm), text, counts, feed_forward=wide[arm], bar=bar or RunsBar())
        for arm, spec in settings.specs().items()
    ]


def seeded(job: Job, seed: int, title: str) -> Job:
    """Return the job of one seed, counted from 1."""
    return replace(job, seed=seed, folder=job.folder / f"seed-{seed}", title=title)


def environment() -> dict[str, Any]:
    """Versions, processor and threads of what runs here, as `env.json` and the report say them."""
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
        "processes": ranks.size(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
