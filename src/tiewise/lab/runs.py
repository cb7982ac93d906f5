"""The main job in one call: `tiewise.compare`, `train` and `heal`.

The commands of the same names call `carry_out` with the settings that they read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tiewise.core import ranks
from tiewise.core.errors import RunError, suggest_choices
from tiewise.core.spec import split_specs
from tiewise.inspection.running.passages import Healed, healed, passages
from tiewise.report.comparison_page import write_report
from tiewise.training.compare import Display, finish, finish_one, open_run, start
from tiewise.training.folder import locked, write_json
from tiewise.training.kinds.heal import HEAL, HealOptions, healing_settings
from tiewise.training.launchers import LAUNCHERS, LOCAL, RAY, OnRay
from tiewise.training.results import Comparison, SingleRun
from tiewise.training.settings import Settings, recipe
from tiewise.training.short_trials import Elapsed
from tiewise.training.workers import Workers

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tiewise.training.setting_types import ComparisonSettings, SharedSettings, TrainingSettings

REPORT, HEALED = "report.html", "healed.json"
MOST_HELDOUT_TOKENS = 1_000_000  # held-out tokens that passages are drawn from, at most
Result = TypeVar("Result")


def compare(
    out: str | os.PathLike[str] = "runs/compare",
    *,
    resume: bool = False,
    overwrite: bool = False,
    jobs: int | str = "auto",
    launcher: str = LOCAL,
    quiet: bool = False,
    **settings: Unpack[ComparisonSettings],
) -> Comparison:
    """Train a model under several tying choices and report which is better.

    The report also states whether the difference is significant. Arms of one seed share data order and the
    initialization of their body, so seeds are pairs. Losses are nats per token.

    Args:
        out: folder for `results.json`, `report.html` and the models.
        resume: finish the run in `out`, with the settings stored there.
        overwrite: replace the run in `out`.
        jobs: number of runs trained at a time, in separate processes that share the threads. "auto" times one run,
            and as many as threads and memory allow, and takes the faster.
        launcher: "local", or "ray". Ray spreads the runs over the cluster of RAY_ADDRESS, or over this machine's cores.
        quiet: show no progress on stderr.
        settings: any setting of `run.yaml`, for example `arms=["tied", "untied"]` or `arms="tied,untied"`,
            `text="my.txt"`, `steps=2000`. `boundary` is another name of `arms`. `recipe="awd"` starts from the
            settings of that recipe.

    Returns:
        The comparison. In a notebook it shows a table. `.finding` is its sentence, `.runs` are the results of each run.

    Raises:
        TiewiseError: a setting, text or folder cannot be used. Nothing was written.
        Interrupted: Ctrl-C was pressed, and a checkpoint was written. `resume=True` resumes from it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     small = {"width": 16, "heads": 2, "length": 8, "batch": 2, "steps": 2, "seeds": 1, "tokenizer": "bytes"}
    ...     comparison = compare(folder, arms="tied,untied", text="synthetic:words=4000", jobs=1, quiet=True, **small)
    >>> [(run.arm, run.seed, run.steps) for run in comparison.runs]
    [('tied', 1, 2), ('untied', 1, 2)]
    """
    folder = run_folder("compare", out)
    record: dict[str, Any] = {**settings}
    command = call_text("compare", str(folder), record)
    if "boundary" in record:  # the same setting as the command's --boundary
        if "arms" in record:
            raise RunError("both arms and boundary are given", "they are one setting: leave one of them out")
        record["arms"] = record.pop("boundary")
    checked = _read_settings(record, folder, resume)
    display = Display.on_stderr(quiet=quiet)
    return carry_out(finish, checked, folder, command, display, overwrite=overwrite, jobs=jobs, launcher=launcher)


def train(
    out: str | os.PathLike[str] = "runs/train",
    *,
    boundary: str = "tied",
    seed: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    **settings: Unpack[TrainingSettings],
) -> SingleRun:
    """Train one model with a boundary, by the same code as `compare`.

    Args:
        out: folder for the run.
        boundary: the boundary to train, for example "factored:64+bias".
        seed: seed of data order, body and tables.
        resume: finish the run in `out`, with the boundary and the seed stored there. Those of the call are ignored.
        overwrite, quiet, settings: as in `compare`.

    Returns:
        The run. `.model` is the folder of the trained model, `.result` has its losses in nats per token.

    Raises:
        TiewiseError: as in `compare`.
        Interrupted: as in `compare`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     small = {"width": 16, "heads": 2, "length": 8, "batch": 2, "steps": 2, "tokenizer": "bytes"}
    ...     run = train(folder, boundary="factored:4", text="synthetic:words=4000", quiet=True, **small)
    >>> run.result.arm, run.model.name
    ('factored:4', 'final')
    """
    folder = run_folder("train", out)
    record: dict[str, Any] = {**settings}
    if not resume:
        record |= {"arms": [boundary], "seed": seed}
    command = call_text("train", str(folder), {**settings, "boundary": boundary, "seed": seed})
    display = Display.on_stderr(quiet=quiet)
    return carry_out(finish_one, _read_settings(record, folder, resume), folder, command, display, overwrite=overwrite)


def heal(
    model: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] = "runs/heal",
    *,
    teacher: str | os.PathLike[str] | None = None,
    seed: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    **settings: Unpack[SharedSettings],
) -> Healed:
    """Train a rewritten model to regain what the rewrite cost, with its original as the teacher.

    Args:
        model: folder of the rewritten model: tied, factored, trimmed, or with another vocabulary.
        out: folder for the run.
        teacher: folder of the model that it was rewritten from.
        seed: seed of data order.
        resume, overwrite, quiet: as in `compare`.
        settings: `text`, `what="tables"` or `"all"` for the parameters that learn, `steps`, and others of `train`.

    Returns:
        The losses before and after on held-out text, and those of the teacher (bits per byte).

    Raises:
        TiewiseError: as in `compare`.
        Interrupted: as in `compare`.

    >>> import tempfile, tiewise
    >>> small = {"width": 16, "heads": 2, "length": 8, "batch": 2, "steps": 2, "tokenizer": "bytes", "quiet": True}
    >>> text = "synthetic:words=20000"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     original = train(f"{folder}/original", boundary="untied", text=text, **small).model
    ...     receipt = tiewise.tie(original, f"{folder}/tied", keep="mean")
    ...     healed = heal(receipt.to, f"{folder}/healed", teacher=original, text=text, steps=2, length=8, quiet=True)
    >>> healed.lost.before > 0  # loss of the original, in bits per byte
    True
    """
    folder = run_folder("heal", out)
    record: dict[str, Any] = {**settings}
    if not resume:
        record = {**healing_settings(model, teacher), "seed": seed, **settings}
    command, display = call_text("heal", str(folder), record), Display.on_stderr(quiet=quiet)
    checked = _read_settings(record, folder, resume)
    return carry_out(finish_healing, checked, folder, command, display, overwrite=overwrite)


def finish_healing(out: Path, display: Display, workers: Workers | None = None) -> Healed:
    """Train or finish the healing in `out`, and measure how much it regained."""
    settings, text = open_run(out, single=True)
    if settings.kind != HEAL:
        raise RunError(f"{out} holds no healing", f"use tiewise train --out {out} --resume")
    run, tokenizer = finish_one(out, display, workers), text.tokenizer
    heldout_text = tokenizer.decode(text.split("heldout")[:MOST_HELDOUT_TOKENS]).replace(tokenizer.eos_token, "\n\n")
    with display.stages():
        teacher = HealOptions.of(settings).teacher
        result = healed(run.model, settings.model, teacher, passages([heldout_text]))
    write_json(out / HEALED, result.record())
    return result


def carry_out(
    finish: Callable[[Path, Display, Workers], Result],
    settings: Settings | None,
    out: Path,
    command: str,
    display: Display,
    *,
    overwrite: bool,
    jobs: int | str = 1,
    launcher: str = LOCAL,
    elapsed: Elapsed | None = None,
    on_started: Callable[[], None] = lambda: None,
) -> Result:
    """Start the run in `out` if there are settings, finish it, and write the report.

    `on_started` is called between the two. `elapsed` returns the seconds since the command began.
    """
    if launcher != LOCAL:
        out = out.absolute()  # other machines have other working folders
    with workers_for(launcher, jobs, out, display) as workers, ranks.hold_on_rank_zero(locked(out)):
        if settings is not None:
            start(settings, out, command, display, overwrite=overwrite, elapsed=elapsed, workers=workers)
        on_started()
        result = finish(out, display, workers)
        if isinstance(result, Comparison):
            ranks.on_rank_zero(lambda: write_report(result, out / REPORT))
    return result


def workers_for(launcher: str, jobs: int | str, out: Path, display: Display) -> Workers:
    """Return the workers that train the runs in `out`, `jobs` at a time.

    RunError: this machine cannot start them.
    """
    if launcher not in LAUNCHERS:
        raise RunError(f"no launcher {launcher!r}", suggest_choices(launcher, LAUNCHERS))
    if launcher != LOCAL and ranks.size() > 1:
        raise RunError(f"launcher {launcher} where {ranks.size()} processes train a run", "start one process")
    return OnRay(jobs, out, display.say) if launcher == RAY else Workers(jobs)


def run_folder(name: str, out: str | os.PathLike[str]) -> Path:
    """Return the folder of a run.

    RunError: it is a file, which was most likely meant as `text`.
    """
    folder = Path(out)
    if folder.is_file():
        problem = f"{folder} is a file, and `out` is the folder that tiewise.{name} writes"
        raise RunError(problem, f"name the text: tiewise.{name}(text={str(folder)!r})")
    return folder


def _read_settings(record: dict[str, Any], out: Path, resume: bool) -> Settings | None:
    """Return the settings of a call on top of its recipe's; None if it resumes."""
    if resume:
        if record:
            raise RunError(f"resume takes its settings from the run in {out}", f"leave {', '.join(record)} out")
        return None
    if isinstance(record.get("arms"), str):
        record = {**record, "arms": split_specs(record["arms"])}
    if record.get("recipe"):
        record = {**recipe(record["recipe"]), **record}
    return Settings.of(record)


def call_text(name: str, first: object, settings: dict[str, Any]) -> str:
    """Return the call as typed, for the report."""
    keywords = [f"{key}={value!r}" for key, value in settings.items()]
    return f"tiewise.{name}({', '.join([repr(first), *keywords])})"
