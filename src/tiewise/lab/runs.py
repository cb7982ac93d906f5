"""The main job in one call: `tiewise.compare`, `train` and `heal`.

The commands of the same names call `carry_out` with the settings that they read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tiewise.core import ranks
from tiewise.core.errors import RunError, require_path, suggest_choices
from tiewise.inspection.running.passages import Healed, healed, passages
from tiewise.lab.call_settings import (
    Text,
    call_text,
    read_folder_argument,
    read_settings,
    read_text_argument,
    refuse_unknown_settings,
    shows_settings,
)
from tiewise.report.comparison_page import write_report
from tiewise.report.hub import push_to_hub as upload_to_hub
from tiewise.report.hub import require_repo_id
from tiewise.training.compare import Display, finish, finish_one, open_run, start
from tiewise.training.folder import REPORT, locked, write_json
from tiewise.training.kinds.heal import HEAL, HealOptions, healing_settings
from tiewise.training.launchers import LAUNCHERS, LOCAL, RAY, OnRay
from tiewise.training.results import Comparison, SingleRun
from tiewise.training.setting_types import ComparisonSettings, SharedSettings, TrainingSettings
from tiewise.training.settings import Settings
from tiewise.training.short_trials import Elapsed
from tiewise.training.workers import Workers

if TYPE_CHECKING:
    from typing_extensions import Unpack

HEALED = "healed.json"
MOST_HELDOUT_TOKENS = 1_000_000  # held-out tokens that passages are drawn from, at most
Result = TypeVar("Result")
Uploaded = TypeVar("Uploaded", Comparison, SingleRun, Healed)


@shows_settings("seed")
def compare(
    text: Text | None = None,
    *,
    out: str | os.PathLike[str] = "runs/compare",
    resume: bool = False,
    overwrite: bool = False,
    jobs: int | str = "auto",
    launcher: str = LOCAL,
    push_to_hub: str | None = None,
    quiet: bool = False,
    **settings: Unpack[ComparisonSettings],
) -> Comparison:
    """Train a model under several tying choices and report which is better.

    The report also states whether the difference is significant. Arms of one seed share data order and the
    initialization of their body, so seeds are pairs. Losses are nats per token.

    Args:
        text: file or folder of text, or several of them; None for the built-in demo corpus.
        out: folder for `results.json`, `report.html` and the models.
        resume: finish the run in `out`, with the settings stored there.
        overwrite: replace the run in `out`.
        jobs: number of runs trained at a time, in separate processes that share the threads. "auto" times one run,
            and as many as threads and memory allow, and takes the faster.
        launcher: "local", or "ray". Ray spreads the runs over the cluster of RAY_ADDRESS, or over this machine's cores.
        push_to_hub: repository of the Hugging Face Hub, "USER/NAME", for the best model, its card and the report.
        quiet: show no progress on stderr.
        settings: any setting of `run.yaml`, for example `arms=["tied", "untied"]` or `arms="tied,untied"`, and
            `steps=2000`. `boundary` is another name of `arms`. `recipe="awd"` starts from the settings of that recipe.
            `share="none,all"` trains every arm of an ALBERT with each of these sharings of layers.

    Returns:
        The comparison. In a notebook it shows a table. `.finding` is its sentence, `.runs` are the results of each run.

    Raises:
        TiewiseError: a setting, text or folder cannot be used. Nothing was written.
        RunError: the upload failed. The run in `out` is complete.
        Interrupted: Ctrl-C was pressed, and a checkpoint was written. `resume=True` resumes from it.

    >>> import tempfile
    >>> small = {"width": 16, "heads": 2, "length": 8, "batch": 2, "steps": 2, "tokenizer": "bytes"}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     words = "synthetic:words=4000"
    ...     comparison = compare(words, arms="tied,untied", seeds=1, out=folder, jobs=1, quiet=True, **small)
    >>> [(run.arm, run.seed, run.steps) for run in comparison.runs]
    [('tied', 1, 2), ('untied', 1, 2)]
    """
    folder = read_folder_argument("compare", out)
    texts = read_text_argument("compare", text)
    command = call_text("compare", text, {**settings, "out": str(folder)})
    refuse_unknown_settings("compare", settings, ComparisonSettings)
    checked = read_settings(_with_text(texts, settings), folder, resume)
    display = Display.on_stderr(quiet=quiet)
    require_repo_id(push_to_hub)
    comparison = carry_out(finish, checked, folder, command, display, overwrite=overwrite, jobs=jobs, launcher=launcher)
    return _uploaded(comparison, push_to_hub)


@shows_settings("arms", "seeds", "minutes", "match", "tune", "backend")
def train(
    text: Text | None = None,
    *,
    boundary: str = "tied",
    seed: int = 1,
    out: str | os.PathLike[str] = "runs/train",
    resume: bool = False,
    overwrite: bool = False,
    push_to_hub: str | None = None,
    quiet: bool = False,
    **settings: Unpack[TrainingSettings],
) -> SingleRun:
    """Train one model with a boundary, by the same code as `compare`.

    Args:
        text: as in `compare`.
        boundary: the boundary to train, for example "factored:64+bias".
        seed: seed of data order, body and tables.
        out: folder for the run.
        resume: finish the run in `out`, with the boundary and the seed stored there. Those of the call are ignored.
        push_to_hub: repository of the Hugging Face Hub for the model, with a model card.
        overwrite, quiet, settings: as in `compare`.

    Returns:
        The run. `.model` is the folder of the trained model, `.result` has its losses in nats per token.

    Raises:
        TiewiseError: as in `compare`.
        Interrupted: as in `compare`.

    >>> import tempfile
    >>> small = {"width": 16, "heads": 2, "length": 8, "batch": 2, "steps": 2, "tokenizer": "bytes"}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = train("synthetic:words=4000", boundary="factored:4", out=folder, quiet=True, **small)
    >>> run.result.arm, run.model.name
    ('factored:4', 'final')
    """
    folder = read_folder_argument("train", out)
    refuse_unknown_settings("train", settings, TrainingSettings)
    record = _with_text(read_text_argument("train", text), settings)
    if not resume:
        record |= {"arms": [boundary], "seed": seed}
    command = call_text("train", text, {**settings, "boundary": boundary, "seed": seed, "out": str(folder)})
    display = Display.on_stderr(quiet=quiet)
    require_repo_id(push_to_hub)
    trained = carry_out(
        finish_one, read_settings(record, folder, resume), folder, command, display, overwrite=overwrite
    )
    return _uploaded(trained, push_to_hub)


@shows_settings("arms", "seeds", "minutes", "match", "tune", "backend", "kind", "tokenizer", "recipe")
def heal(
    model: str | os.PathLike[str] | None = None,
    text: Text | None = None,
    *,
    teacher: str | os.PathLike[str] | None = None,
    seed: int = 1,
    out: str | os.PathLike[str] = "runs/heal",
    resume: bool = False,
    overwrite: bool = False,
    push_to_hub: str | None = None,
    quiet: bool = False,
    **settings: Unpack[SharedSettings],
) -> Healed:
    """Train a rewritten model to regain what the rewrite cost, with its original as the teacher.

    Args:
        model: folder of the rewritten model: tied, factored, trimmed, or with another vocabulary.
        text: as in `compare`.
        teacher: folder of the model that it was rewritten from.
        seed: seed of data order.
        out: folder for the run.
        push_to_hub: repository of the Hugging Face Hub for the healed model, with a model card.
        resume, overwrite, quiet: as in `compare`.
        settings: `what="tables"` or `"all"` for the parameters that learn, `steps`, and others of `train`.

    Returns:
        The losses before and after on held-out text, and those of the teacher (bits per byte).

    Raises:
        TiewiseError: as in `compare`.
        Interrupted: as in `compare`.

    >>> import tempfile, tiewise
    >>> small = {"width": 16, "heads": 2, "length": 8, "batch": 2, "steps": 2, "tokenizer": "bytes", "quiet": True}
    >>> text = "synthetic:words=20000"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     original = train(text, boundary="untied", out=f"{folder}/original", **small).model
    ...     receipt = tiewise.tie(original, f"{folder}/tied", keep="mean")
    ...     run = {"out": f"{folder}/healed", "steps": 2, "length": 8, "quiet": True}
    ...     healed = heal(receipt.to, text, teacher=original, **run)
    >>> healed.lost.before > 0  # loss of the original, in bits per byte
    True
    """
    folder = read_folder_argument("heal", out)
    refuse_unknown_settings("heal", settings, SharedSettings)
    record = _with_text(read_text_argument("heal", text), settings)
    for path in (model, teacher):
        if path is not None:
            require_path("heal(FOLDER, text, teacher=FOLDER)", path)
    if not resume:
        record = {**healing_settings(model, teacher), "seed": seed, **record}
    typed = {"text": text, "teacher": teacher, "seed": seed, **settings, "out": str(folder)}
    command = call_text("heal", model, {name: value for name, value in typed.items() if value is not None})
    display, checked = Display.on_stderr(quiet=quiet), read_settings(record, folder, resume)
    require_repo_id(push_to_hub)
    healed_model = carry_out(finish_healing, checked, folder, command, display, overwrite=overwrite)
    return _uploaded(healed_model, push_to_hub)


def _with_text(texts: list[str] | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a call, with its texts if it names any."""
    if texts is None:
        return {**settings}
    return {"text": texts, **settings}


def _uploaded(result: Uploaded, repo_id: str | None) -> Uploaded:
    """Return a finished run after its upload to a repository of the Hub; None uploads nothing."""
    if repo_id is not None and ranks.is_first():
        upload_to_hub(result, repo_id)
    return result


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
