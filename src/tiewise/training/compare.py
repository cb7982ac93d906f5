"""The main job: train every arm with every seed on the same data, and say what differs and whether it is real.

    text → tokens → (tune) → arms × seeds → paired differences → results.json

Arms of one seed share data order and body initialisation; runs go seed by seed, so that an interrupted comparison
holds whole pairs. Everything that finished is on disk, and the next call takes it up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from tiewise.core.errors import RunError
from tiewise.core.version import __version__
from tiewise.data.frequency import Bigram, asymmetric_bigrams, token_counts
from tiewise.data.prepared import PreparedText
from tiewise.training import ranks
from tiewise.training.environment import environment
from tiewise.training.folder import ENVIRONMENT, read_json, write_json
from tiewise.training.job import Job
from tiewise.training.recurrent.assemble import options, run_plan
from tiewise.training.recurrent.recipes import changed
from tiewise.training.results import Comparison, DirectPath
from tiewise.training.run import Outcome, Train, train, tuned
from tiewise.training.settings import ALL, Settings
from tiewise.training.shown import Shown
from tiewise.training.start import make_jobs, open_run, open_text, seeded
from tiewise.training.statistics import complete
from tiewise.training.tuning import per_arm, short_steps, tune

BIGRAMS = 7  # two tokens each: as many as a heat map's labels can name
CANDIDATES = 200


def compare(out: Path, shown: Shown, trainer: Callable[[str], Train] = lambda backend: train) -> Comparison:
    """Run or finish the comparison in `out` (made by `tiewise.training.start.start`) and write `results.json`.

    Args:
        out: the run's folder.
        shown: how progress is shown.
        trainer: backend ("torch", "flax") → what trains one job; given by the caller so that nobody loads both.

    Raises:
        RunError: `out` holds no run, or a single one.
        Interrupted: after Ctrl-C, with a checkpoint written.
    """
    settings = open_run(out)
    if settings.seed is not None:
        raise RunError(f"{out} holds a single run", f"use tiewise train --out {out} --resume")
    text = open_text(out)
    counts = token_counts(text.split("train"), text.vocab)
    train_one = trainer(settings.backend)
    trials: list[Any] = []
    bigrams = _telling_bigrams(text)
    probe = list(dict.fromkeys(token for b in bigrams for token in (b.left, b.right)))
    steps = settings.seeds * settings.steps + (per_arm() * short_steps(settings) if settings.tune else 0)
    with shown.whole(len(settings.arms) * steps) as bar:
        jobs = make_jobs(settings, text, out, bar)
        if settings.tune:
            choices, trials = tune(jobs, out, text, counts, shown.say, train_one)
            jobs = [tuned(job, choices[job.arm].init, choices[job.arm].learning_rate) for job in jobs]
        outcomes = _train_all(train_one, jobs, text, counts, probe, shown, settings.seeds)
    command = (read_json(out / ENVIRONMENT) or {}).get("command", "")
    comparison = _comparison(settings, text, command, outcomes, trials, bigrams, probe)
    ranks.first_does(lambda: write_json(out / "results.json", comparison.to_dict()))
    return comparison


def _train_all(
    train_one: Train,
    jobs: Sequence[Job],
    text: PreparedText,
    counts: np.ndarray,
    probe: list[int],
    shown: Shown,
    seeds: int,
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    whole = seeds * len(jobs)
    for seed in range(1, seeds + 1):
        for job in jobs:
            title = f"{len(outcomes) + 1}/{whole} {job.arm} seed {seed}"
            outcome = train_one(seeded(job, seed, title), text, counts, probe)
            r = outcome.result
            shown.say(f"{title}: held-out nll {r.heldout_nll:.4f}, training {r.train_nll:.4f}, {r.seconds:.0f} s")
            outcomes.append(outcome)
            if job.bar is not None:
                job.bar.ended(job.settings.steps)
    return outcomes


def _comparison(
    settings: Settings,
    text: PreparedText,
    command: str,
    outcomes: Sequence[Outcome],
    trials: list[Any],
    bigrams: Sequence[Bigram],
    probe: list[int],
) -> Comparison:
    name = _names(text)
    first = {o.result.arm: o for o in reversed(outcomes)}
    return complete(
        Comparison(
            version=__version__,
            command=command,
            demo=bool(text.facts.get("demo")),
            arms=list(settings.arms),
            seeds=list(range(1, settings.seeds + 1)),
            reference=settings.arms[0],
            setting=_setting(settings, text),
            data={k: v for k, v in text.facts.items() if k != "request"},
            env=environment() | _jax(settings),
            runs=[o.result for o in outcomes],
            tuning=trials,
            direct_path=[
                DirectPath(arm, [name(t) for t in probe], first[arm].direct_path)
                for arm in settings.arms
                if first[arm].direct_path
            ],
            bigrams=[
                {
                    "left": name(b.left),
                    "right": name(b.right),
                    "forward": b.p_forward,
                    "backward": b.p_backward,
                    "count": b.forward,
                }
                for b in bigrams
            ],
        )
    )


def _telling_bigrams(text: PreparedText) -> list[Bigram]:
    """Return the most asymmetric bigrams; two words come before punctuation, which says less to a reader."""
    found = asymmetric_bigrams(text.split("train"), text.vocab, top=CANDIDATES, eos_id=text.eos_id)
    name = _names(text)
    return sorted(found, key=lambda b: not all(name(t).strip().isalpha() for t in (b.left, b.right)))[:BIGRAMS]


def _names(text: PreparedText) -> Callable[[int], str]:
    tokenizer = text.tokenizer()
    return lambda token: tokenizer.decode([token])


def _setting(settings: Settings, text: PreparedText) -> dict[str, Any]:
    names = (
        "model",
        "width",
        "layers",
        "heads",
        "length",
        "batch",
        "accumulate",
        "steps",
        "learning_rate",
        "weight_decay",
        "match",
        "tune",
        "bf16",
        "backend",
    )
    shape = {name: getattr(settings, name) for name in names}
    if settings.recurrent is not None:
        return _recurrent_setting(settings, text)
    tokens = settings.steps * settings.batch * settings.accumulate * settings.length
    shape |= vars(settings.albert) if settings.albert is not None else {}
    return {**shape, "vocab": text.vocab, "tokens_per_run": tokens, "tokenizer": settings.tokenizer}


def _jax(settings: Settings) -> dict[str, str]:
    """Versions of what trained, where it was not PyTorch."""
    return {name: version(name) for name in ("jax", "flax", "optax")} if settings.backend == "flax" else {}


def _recurrent_setting(settings: Settings, text: PreparedText) -> dict[str, Any]:
    steps = run_plan(settings, text, 1)
    kept = ("recipe", "model", "width", "layers", "length", "batch", "steps", "learning_rate", "weight_decay", "bf16")
    shape = {name: getattr(settings, name) for name in kept}
    tokens = int(steps.words(settings.batch)[-1])
    own = {"changed": changes(settings, text), "vocab": text.vocab, "tokens_per_run": tokens, "tokenizer": "words"}
    return {**shape, **vars(options(settings)), **own}


def changes(settings: Settings, text: PreparedText) -> list[str]:
    """Settings of a recurrent run that differ from its recipe's, fewer steps than its epochs have among them."""
    short = settings.steps < len(run_plan(replace(settings, steps=ALL), text, 1))
    return changed(settings) + ([f"steps={settings.steps}"] if short else [])
