"""The main job: train every arm with every seed on the same data, and say what differs; or train one.

    text → tokens → (tune) → arms × seeds → paired differences → results.json

Arms of one seed share data order and body initialisation; runs go seed by seed, so that an interrupted comparison
holds whole pairs. Everything that finished is on disk, and the next call takes it up.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tiewise.core import __version__
from tiewise.core.errors import RunError
from tiewise.core.frequency import asymmetric_bigrams, token_counts
from tiewise.training import ranks
from tiewise.training.display import Display
from tiewise.training.folder import ENVIRONMENT, read_json, write_json
from tiewise.training.kind import kind_of
from tiewise.training.results import ArmDirectPath, Comparison, SingleRun
from tiewise.training.run import Outcome, Train, train
from tiewise.training.settings import Job
from tiewise.training.short_trials import per_arm, short_steps, tune
from tiewise.training.start import environment, make_jobs, open_run, open_text
from tiewise.training.statistics import complete

BIGRAMS = 7  # two tokens each: as many as a heat map's labels can name
CANDIDATES = 200


def finish(out: Path, display: Display, train: Train = train) -> Comparison:
    """Run or finish the comparison in `out` (made by `tiewise.training.start.start`) and write `results.json`.

    Args:
        out: the run's folder.
        display: how progress is shown.
        train: what trains one job.

    Raises:
        RunError: `out` holds no run, or a single one.
        Interrupted: after Ctrl-C, with a checkpoint written.
    """
    settings = open_run(out)
    if settings.seed is not None:
        raise RunError(f"{out} holds a single run", f"use tiewise train --out {out} --resume")
    text = open_text(out)
    counts = token_counts(text.split("train"), text.vocab)
    trials: list[Any] = []
    found = asymmetric_bigrams(text.split("train"), text.vocab, top=CANDIDATES, eos_id=text.eos_id)
    tokenizer = text.tokenizer()
    names = {token: tokenizer.decode([token]) for b in found for token in (b.left, b.right)}
    # two words come before punctuation, which says less to a reader
    bigrams = sorted(found, key=lambda b: not all(names[t].strip().isalpha() for t in (b.left, b.right)))[:BIGRAMS]
    probe = list(dict.fromkeys(token for b in bigrams for token in (b.left, b.right)))
    steps = settings.seeds * settings.steps + (per_arm() * short_steps(settings) if settings.tune else 0)
    outcomes: list[Outcome] = []
    with display.runs(len(settings.arms) * steps) as bar:
        jobs = make_jobs(settings, text, out, bar)
        if settings.tune:
            choices, trials = tune(jobs, out, text, counts, display.say, train)
            jobs = [choices[job.arm].of(job) for job in jobs]
        for seed in range(1, settings.seeds + 1):
            for job in jobs:
                title = f"{len(outcomes) + 1}/{settings.seeds * len(jobs)} {job.arm} seed {seed}"
                outcomes.append(train(seeded(job, seed, title), text, counts, probe))
                r = outcomes[-1].result
                display.say(f"{title}: held-out nll {r.heldout_nll:.4f}, training {r.train_nll:.4f}, {r.seconds:.0f} s")
                if job.bar is not None:
                    job.bar.ended(job.settings.steps)
    kind = kind_of(settings)
    first = {o.result.arm: o for o in reversed(outcomes)}
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
                ArmDirectPath(arm, [names[t] for t in probe], first[arm].direct_path)
                for arm in settings.arms
                if first[arm].direct_path
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
    settings = open_run(out)
    if settings.seed is None:
        raise RunError(f"{out} holds a comparison", f"use tiewise compare --out {out} --resume")
    text = open_text(out)
    with display.runs(settings.steps) as bar:
        job = seeded(make_jobs(settings, text, out, bar)[0], settings.seed, f"{settings.arms[0]} seed {settings.seed}")
        result = train(job, text, token_counts(text.split("train"), text.vocab), []).result
    return SingleRun(result, job.folder, kind_of(settings).setting(settings, text), text.facts)


def seeded(job: Job, seed: int, title: str) -> Job:
    """Return the job of one seed, counted from 1."""
    return replace(job, seed=seed, folder=job.folder / f"seed-{seed}", title=title)
