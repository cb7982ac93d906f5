"""The main job in one call: `tiewise.compare` and `tiewise.train`, and what their commands do with settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tiewise.core import ranks
from tiewise.core.errors import RunError
from tiewise.internals.passages import Healed, healed, passages
from tiewise.report.comparison_page import write_report
from tiewise.training.compare import Display, finish, finish_one, opened, start
from tiewise.training.folder import locked, write_json
from tiewise.training.kinds.heal import HEAL, healing
from tiewise.training.launchers import LOCAL, RAY, on
from tiewise.training.results import Comparison, SingleRun
from tiewise.training.settings import Settings, recipe
from tiewise.training.short_trials import Gone
from tiewise.training.workers import Workers

REPORT, HEALED = "report.html", "healed.json"
MOST_HELD_OUT = 1_000_000  # tokens that passages are taken from
Found = TypeVar("Found")


def compare(
    out: str | os.PathLike[str] = "runs/compare",
    *,
    resume: bool = False,
    overwrite: bool = False,
    jobs: int | str = "auto",
    launcher: str = LOCAL,
    quiet: bool = False,
    **settings: Any,
) -> Comparison:
    """Train a model under several tying choices and say which is better here, and whether the difference is real.

    Args:
        out: the folder that takes `results.json`, `report.html` and the models.
        resume: finish the run in `out`, which has its settings.
        overwrite: replace the run in `out`.
        jobs: runs that are trained at a time, in processes of their own with a share of the threads each; "auto" takes
            one, or as many as there are threads and memory for, whichever a trial finds faster.
        launcher: "local", or "ray": runs are spread over the cluster of RAY_ADDRESS, or over this machine's cores.
        quiet: no progress on stderr.
        settings: any setting of `run.yaml`: `arms=["tied", "untied"]`, `text="my.txt"`, `steps=2000`; `recipe="awd"`
            begins with a recipe's.

    Raises:
        TiewiseError: a setting, text or folder that cannot be used; nothing was written.
        Interrupted: after Ctrl-C, with a checkpoint written; `resume=True` goes on from it.
    """
    folder = Path(out)
    command = _command("compare", folder, settings)
    given = _settings(settings, folder, resume)
    display = Display.on_stderr(quiet=quiet)
    if launcher not in (LOCAL, RAY):
        raise RunError(f"launcher = {launcher!r}", f"choose {LOCAL} or {RAY}; scripts are written by the command")
    return carry_out(finish, given, folder, command, display, overwrite=overwrite, jobs=jobs, launcher=launcher)


def train(
    out: str | os.PathLike[str] = "runs/train",
    *,
    boundary: str = "tied",
    seed: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> SingleRun:
    """Train one model with a boundary, by the same code as `compare`; `.model` is its folder.

    Args:
        out: the folder that takes the run.
        boundary: what to train, e.g. "factored:64+bias".
        seed: of data order, body and tables.
        resume: finish the run in `out`, which has its settings.
        overwrite: replace the run in `out`.
        quiet: no progress on stderr.
        settings: as of `compare`.

    Raises:
        TiewiseError, Interrupted: as `compare`.
    """
    folder = Path(out)
    given = _settings(settings if resume else {**settings, "arms": [boundary], "seed": seed}, folder, resume)
    command = _command("train", folder, {**settings, "boundary": boundary, "seed": seed})
    return carry_out(finish_one, given, folder, command, Display.on_stderr(quiet=quiet), overwrite=overwrite)


def heal(
    model: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] = "runs/heal",
    *,
    teacher: str | os.PathLike[str] | None = None,
    seed: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    **settings: Any,
) -> Healed:
    """Have a rewritten model learn back what it lost, from the model that it was made of.

    Args:
        model: folder of the model: tied, factored, trimmed, given another vocabulary.
        out: the folder that takes the run.
        teacher: folder of the model that it was made of.
        seed: of data order.
        resume: finish the run in `out`, which has its settings.
        overwrite: replace the run in `out`.
        quiet: no progress on stderr.
        settings: `text`, `what="tables"` or `"all"`, `steps`, and others of `train`.

    Raises:
        TiewiseError, Interrupted: as `compare`.
    """
    folder = Path(out)
    given = settings if resume else {**healing(model, teacher), "seed": seed, **settings}
    command, display = _command("heal", folder, given), Display.on_stderr(quiet=quiet)
    return carry_out(finish_healing, _settings(given, folder, resume), folder, command, display, overwrite=overwrite)


def finish_healing(out: Path, display: Display, workers: Workers | None = None) -> Healed:
    """Train or finish the healing in `out`, and measure what came back."""
    settings, text = opened(out, single=True)
    if settings.kind != HEAL:
        raise RunError(f"{out} holds no healing", f"use tiewise train --out {out} --resume")
    run, tokenizer = finish_one(out, display, workers), text.tokenizer()
    held_out = tokenizer.decode(text.split("heldout")[:MOST_HELD_OUT]).replace(tokenizer.eos_token, "\n\n")
    with display.stages():
        found = healed(run.model, settings.model, settings.own.teacher, passages([held_out]))
    write_json(out / HEALED, found.record())
    return found


def carry_out(
    finish: Callable[[Path, Display, Workers], Found],
    settings: Settings | None,
    out: Path,
    command: str,
    display: Display,
    *,
    overwrite: bool,
    jobs: int | str = 1,
    launcher: str = LOCAL,
    gone: Gone | None = None,
    begun: Callable[[], None] = lambda: None,
) -> Found:
    """Start the run in `out`, if there are settings, say so by `begun`, finish it, and write a comparison's report."""
    out = out if launcher == LOCAL else out.absolute()  # other machines have other working folders
    with on(launcher, jobs, out, display.say, settings) as workers, ranks.first_holds(locked(out)):
        if settings is not None:
            start(settings, out, command, display, overwrite=overwrite, gone=gone, workers=workers)
        begun()
        found = finish(out, display, workers)
        if isinstance(found, Comparison):
            ranks.first_does(lambda: write_report(found, out / REPORT))
    return found


def _settings(given: dict[str, Any], out: Path, resume: bool) -> Settings | None:
    if resume:
        if given:
            raise RunError(f"resume takes its settings from the run in {out}", f"leave {', '.join(given)} out")
        return None
    return Settings.of({**(recipe(given["recipe"]) if given.get("recipe") else {}), **given})


def _command(name: str, out: Path, settings: dict[str, Any]) -> str:
    """Return the call as typed, for the report."""
    return f"tiewise.{name}({', '.join([repr(str(out)), *(f'{key}={value!r}' for key, value in settings.items())])})"
