"""What comes before the first run: the text becomes tokens, every arm is built once, minutes become steps.

    settings ─ checked → OUT/.starting: data/, a model of every arm, a short trial of each → env.json, run.yaml → OUT

Whatever cannot be used is found here, before anything is trained, and then OUT is as it was.
"""

from __future__ import annotations

import os
import platform
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from tiewise.core import __version__
from tiewise.data.corpus import PreparedText, load_prepared
from tiewise.training import ranks
from tiewise.training.display import Display, RunsBar
from tiewise.training.folder import DATA, ENVIRONMENT, folder_name, saved_run, starting, write_json
from tiewise.training.kind import kind_of
from tiewise.training.settings import Job, Settings
from tiewise.training.short_trials import Gone, steps_within


def start(
    settings: Settings, out: Path, command: str, display: Display, *, overwrite: bool = False, gone: Gone | None = None
) -> None:
    """Make `out` a run that `finish` or `finish_one` of `tiewise.training.compare` finishes.

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
            kind.build(job, text, 1)
        checked = replace(checked, steps=kind.steps(checked, text)).checked()
        display.say(kind.described(checked, text))
        return checked

    def put(made: Settings) -> None:
        write_json(stage / ENVIRONMENT, environment() | {"command": command})
        made.save(stage)

    with ExitStack() as stack:
        stage = ranks.first_does(lambda: stack.enter_context(starting(out, overwrite=overwrite)))
        made = ranks.first_does(staged)
        if made.minutes is not None:
            text = open_text(stage)
            with display.stages():
                steps = steps_within(make_jobs(made, text, stage), text, stage / "calibration", gone)
            display.say(f"{made.minutes:g} minutes: {steps} steps for each run")
            made = replace(made, steps=steps, minutes=None).checked()
        ranks.first_does(lambda: put(made))
        ranks.first_does(stack.close)


def open_run(out: Path) -> Settings:
    """Return the settings of the run in `out`, which as many processes as are here can train.

    Raises:
        RunError: no run is there, or its batch cannot be divided.
        UnsupportedError: a run or an arm that only one process can train.
    """

    def opened() -> Settings:
        settings = saved_run(out)
        kind_of(settings).check_processes(settings)
        return settings

    return ranks.first_does(opened)


def open_text(out: Path) -> PreparedText:
    """Open the tokens of the run in `out`. Its sources may be gone by now."""
    return load_prepared(out / DATA)


def make_jobs(settings: Settings, text: PreparedText, out: Path, bar: RunsBar | None = None) -> list[Job]:
    """One job per arm, not yet seeded.

    Raises:
        SpecError, RunError: an arm that this model or vocabulary cannot have.
    """
    wide = kind_of(settings).feed_forward(settings, text.vocab)
    return [
        Job(arm, spec, 0, settings, out / folder_name(arm), feed_forward=wide[arm], bar=bar)
        for arm, spec in settings.specs().items()
    ]


def environment() -> dict[str, Any]:
    """Versions, processor and threads of what runs here, as `env.json` and the report say them."""
    cuda = torch.cuda.is_available()
    return {
        "tiewise": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "processes": ranks.size(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
