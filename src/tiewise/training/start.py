"""What comes before the first run: the text becomes tokens, every arm is built once, minutes become steps.

    settings ─ checked → OUT/.starting: data/, a model of every arm, a short trial of each → env.json, run.yaml → OUT

Whatever cannot be used is found here, before anything is trained, and then OUT is as it was.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tiewise.core.errors import DataError, UnsupportedError
from tiewise.data.corpus import prepare
from tiewise.data.prepared import PreparedText, load_prepared
from tiewise.data.word_corpus import prepare_words, unknown_share
from tiewise.training import ranks
from tiewise.training.albert.assemble import check_arms, marked
from tiewise.training.environment import environment
from tiewise.training.folder import DATA, ENVIRONMENT, folder_name, saved_run, starting, write_json
from tiewise.training.job import Job
from tiewise.training.minutes import Gone, steps_within
from tiewise.training.model import make_config, matched_feed_forward
from tiewise.training.recurrent.assemble import run_plan
from tiewise.training.run import built
from tiewise.training.settings import Settings
from tiewise.training.shown import Shown, Whole

ONE = "train on one process, or leave tie_at and untie_at out"


def start(
    settings: Settings, out: Path, command: str, shown: Shown, *, overwrite: bool = False, gone: Gone | None = None
) -> None:
    """Make `out` a run that `tiewise.training.compare.compare` or `tiewise.training.single.train_one` finishes.

    Args:
        settings: what is asked for.
        out: the run's folder.
        command: as typed, for the report.
        shown: where progress goes.
        overwrite: replace the run that `out` holds.
        gone: seconds since the command began, of which minutes are counted; None counts from here.

    Raises:
        TiewiseError: a setting, text, model or folder that cannot be used; `out` is as it was.
    """
    began = time.monotonic()
    gone = gone or (lambda: time.monotonic() - began)
    with ExitStack() as stack:
        stage = ranks.first_does(lambda: stack.enter_context(starting(out, overwrite=overwrite)))
        settings = ranks.first_does(lambda: _staged(settings, stage, shown))
        if settings.minutes is not None:
            settings = _within(settings, stage, shown, gone)
        ranks.first_does(lambda: _put(settings, stage, command))
        ranks.first_does(stack.close)


def _staged(settings: Settings, stage: Path, shown: Shown) -> Settings:
    """Prepare the text and build every arm once; return the checked settings."""
    settings = _check_processes(settings.checked())
    _check_widths(settings)
    text = _prepared(settings, stage, shown)
    for job in make_jobs(settings, text, stage):
        built(job, text, 1)
    if settings.recurrent is not None:
        settings = replace(settings, steps=len(run_plan(settings, text, 1))).checked()
    shown.say(_described(settings, text))
    return settings


def _put(settings: Settings, stage: Path, command: str) -> None:
    write_json(stage / ENVIRONMENT, environment() | {"command": command})
    settings.save(stage)


def open_run(out: Path) -> Settings:
    """Return the settings of the run in `out`, which as many processes as are here can train.

    Raises:
        RunError: no run is there, or its batch cannot be divided.
        UnsupportedError: an arm that only one process can train.
    """
    return ranks.first_does(lambda: _check_processes(saved_run(out)))


def open_text(out: Path) -> PreparedText:
    """Open the tokens of the run in `out`. Its sources may be gone by now."""
    return load_prepared(out / DATA)


def make_jobs(settings: Settings, text: PreparedText, out: Path, bar: Whole | None = None) -> list[Job]:
    """One job per arm, not yet seeded.

    Raises:
        SpecError, RunError: an arm that this model or vocabulary cannot have.
    """
    wide = matched_feed_forward(settings, text.vocab)
    return [
        Job(arm, spec, 0, settings, out / folder_name(arm), feed_forward=wide[arm], bar=bar)
        for arm, spec in settings.specs().items()
    ]


def seeded(job: Job, seed: int, title: str) -> Job:
    """Return the job of one seed, counted from 1."""
    return replace(job, seed=seed, folder=job.folder / f"seed-{seed}", title=title)


def _check_processes(settings: Settings) -> Settings:
    """Return the settings; refuse what several processes cannot do, before any of them has begun."""
    ranks.share(settings.batch)
    if settings.recurrent is not None and ranks.size() > 1:
        raise UnsupportedError(
            "recurrent models on several processes", "train them on one: a state is carried in order"
        )
    for name, spec in settings.specs().items():
        if ranks.size() > 1 and spec != spec.plainly():
            raise UnsupportedError(f"{name}: the boundary cannot change while several processes train", ONE)
    return settings


def _check_widths(settings: Settings) -> None:
    """Refuse what needs no text to be seen, before gigabytes of it are read."""
    if settings.albert is not None:
        check_arms(settings)
        return
    config = make_config(settings, vocab=1)
    d = settings.width if settings.recurrent is not None else int(config.get_text_config().hidden_size)
    for spec in settings.specs().values():
        spec.maps(d)


def _prepared(settings: Settings, stage: Path, shown: Shown) -> PreparedText:
    with shown.stages():
        if settings.recurrent is not None:
            return prepare_words(settings.text[0], stage / DATA, settings.recurrent.files)
        text = prepare(
            settings.text,
            settings.tokenizer,
            stage / DATA,
            length=settings.length,
            split=settings.split,
            apart=settings.albert is not None,
        )
    if settings.albert is not None:
        return marked(settings, text)
    blocks, needed = len(text.split("train")) // settings.length, settings.batch * settings.accumulate
    if blocks < needed:
        what = f"the text has {blocks} training blocks of {settings.length} tokens, and one step takes {needed}"
        raise DataError(what, "give more text, or less of length, batch or accumulate (--set batch=1, say)")
    return text


def _described(settings: Settings, text: PreparedText) -> str:
    splits = text.facts["splits"]
    sizes = ", ".join(f"{name} {splits[name]['tokens']:,}" for name in splits)
    if settings.recurrent is not None:
        shares = ", ".join(f"{unknown_share(text.facts, name):.2%} of {name}" for name in ("tune", "heldout"))
        files = ", ".join(text.facts["files"])
        known = f"vocabulary {text.vocab:,}; <unk> for words that training does not have: {shares}"
        return f"text: {settings.text[0]} ({files}); words: {sizes}; {known}; {settings.steps:,} steps"
    return f"text: {', '.join(settings.text)}; {settings.tokenizer} tokens: {sizes}; vocabulary {text.vocab:,}"


def _within(settings: Settings, stage: Path, shown: Shown, gone: Gone) -> Settings:
    """Turn minutes into steps, equal for all arms and seeds."""
    text = open_text(stage)
    with shown.stages():
        steps = steps_within(make_jobs(settings, text, stage), text, stage / "calibration", gone)
    shown.say(f"{settings.minutes:g} minutes: {steps} steps for each run")
    return replace(settings, steps=steps, minutes=None).checked()
