"""The main job: train every arm with every seed on the same data, and say what differs and whether it is real.

    text → tokens → (tune) → arms × seeds → paired differences → results.json

Arms of one seed share data order and body initialisation; runs go seed by seed, so that an interrupted comparison
holds whole pairs. Everything that finished is on disk, and `resume` takes it up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import tiewise
from tiewise.data.blocks import Bigram, asymmetric_bigrams, token_counts
from tiewise.data.corpus import prepare
from tiewise.data.prepared import FACTS, PreparedText, load_prepared
from tiewise.training.environment import environment
from tiewise.training.folder import folder_name, write_json
from tiewise.training.model import matched_feed_forward
from tiewise.training.results import Comparison, DirectPath
from tiewise.training.run import Job, Outcome, Say, train, tuned
from tiewise.training.settings import Settings
from tiewise.training.statistics import complete
from tiewise.training.tuning import tune

CALIBRATION_STEPS = 30
EVALUATION_SHARE = 0.2  # of a run's time: measuring, saving, building


@dataclass(frozen=True)
class Shown:
    """How progress reaches the user: lines, and whether the Trainer's bars are drawn."""

    say: Say
    bars: bool = False


def compare(settings: Settings, out: Path, command: str, shown: Shown) -> Comparison:
    """Run or finish the comparison in `out` (opened by `tiewise.training.folder.open_run`) and write `results.json`.

    Raises:
        TiewiseError: a setting, text or model that cannot be used, before anything is trained.
        Interrupted: after Ctrl-C, with a checkpoint written.
    """
    settings = settings.checked()
    text = prepare_text(settings, out, shown)
    counts = token_counts(text.split("train"), text.vocab)
    jobs = make_jobs(settings, text, out, shown)
    if settings.minutes is not None:
        settings = _within(settings, jobs, text, counts, out, shown)
        jobs = make_jobs(settings, text, out, shown)
    write_json(out / "env.json", environment())
    trials: list[Any] = []
    if settings.tune:
        choices, trials = tune(jobs, out, text, counts, shown.say)
        jobs = [tuned(job, choices[job.arm].init, choices[job.arm].learning_rate) for job in jobs]
    bigrams = asymmetric_bigrams(text.split("train"), text.vocab, eos_id=text.eos_id)
    probe = list(dict.fromkeys(token for b in bigrams for token in (b.left, b.right)))[:20]
    outcomes = _train_all(settings, jobs, text, counts, probe, shown)
    comparison = _comparison(settings, text, command, outcomes, trials, bigrams, probe)
    write_json(out / "results.json", comparison.to_dict())
    return comparison


def prepare_text(settings: Settings, out: Path, shown: Shown) -> PreparedText:
    """Prepare or reuse the tokens of a run's text in `out`/data."""
    shown.say(f"text: {', '.join(settings.text)}, tokenizer {settings.tokenizer}")
    folder = out / "data"
    if (folder / FACTS).exists():  # a resumed run: its sources may be gone, its tokens are not
        text = load_prepared(folder)
    else:
        text = prepare(settings.text, settings.tokenizer, folder, length=settings.length)
    splits = text.facts["splits"]
    sizes = ", ".join(f"{name} {splits[name]['tokens']:,}" for name in splits)
    shown.say(f"tokens: {sizes}; vocabulary {text.vocab:,}")
    return text


def make_jobs(settings: Settings, text: PreparedText, out: Path, shown: Shown) -> list[Job]:
    """One job per arm, not yet seeded.

    Raises:
        SpecError, RunError: an arm that this model or vocabulary cannot have.
    """
    wide = matched_feed_forward(settings, text.vocab)
    return [
        Job(arm, spec, 0, settings, out / folder_name(arm), feed_forward=wide[arm], bars=shown.bars)
        for arm, spec in settings.specs().items()
    ]


def seeded(job: Job, seed: int, title: str) -> Job:
    """Return the job of one seed, counted from 1."""
    return replace(job, seed=seed, folder=job.folder / f"seed-{seed}", title=title)


def _train_all(
    settings: Settings,
    jobs: Sequence[Job],
    text: PreparedText,
    counts: np.ndarray,
    probe: list[int],
    shown: Shown,
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    whole = settings.seeds * len(jobs)
    for seed in range(1, settings.seeds + 1):
        for job in jobs:
            title = f"{len(outcomes) + 1}/{whole} {job.arm} seed {seed}"
            outcome = train(seeded(job, seed, title), text, counts, probe)
            r = outcome.result
            shown.say(f"{title}: held-out nll {r.heldout_nll:.4f}, training {r.train_nll:.4f}, {r.seconds:.0f} s")
            outcomes.append(outcome)
    return outcomes


def _within(
    settings: Settings, jobs: Sequence[Job], text: PreparedText, counts: np.ndarray, out: Path, shown: Shown
) -> Settings:
    """Turn minutes into steps, equal for all arms, from a short trial of each; kept in `run.yaml` for a resume."""
    assert settings.minutes is not None
    short = replace(settings, steps=CALIBRATION_STEPS, minutes=None)
    per_step = 0.0
    for job in jobs:
        trial = replace(job, spec=job.spec.plainly(), settings=short, folder=out / "calibration" / folder_name(job.arm))
        start = time.perf_counter()
        result = train(trial, text, counts, []).result
        per_step += result.seconds / (CALIBRATION_STEPS - 1) if result.seconds else time.perf_counter() - start
    runs = settings.seeds + (9 / 4 if settings.tune else 0)
    seconds = settings.minutes * 60 * (1 - EVALUATION_SHARE)
    steps = max(20, int(seconds / (per_step * runs)))
    shown.say(f"{settings.minutes:g} minutes: {steps} steps for each run")
    fixed = replace(settings, steps=steps, minutes=None).checked()
    fixed.save(out)
    return fixed


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
            version=tiewise.__version__,
            command=command,
            demo=bool(text.facts.get("demo")),
            arms=list(settings.arms),
            seeds=list(range(1, settings.seeds + 1)),
            reference=settings.arms[0],
            setting=_setting(settings, text),
            data={k: v for k, v in text.facts.items() if k != "request"},
            env=environment(),
            runs=[o.result for o in outcomes],
            tuning=trials,
            direct_path=[DirectPath(arm, [name(t) for t in probe], first[arm].direct_path) for arm in settings.arms],
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
    )
    shape = {name: getattr(settings, name) for name in names}
    tokens = settings.steps * settings.batch * settings.accumulate * settings.length
    return {**shape, "vocab": text.vocab, "tokens_per_run": tokens, "tokenizer": settings.tokenizer}
