"""Comparisons over a grid of settings: `tiewise.sweep`.

The command of the same name calls `carry_out_study` with the grid that it reads.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tiewise.core.errors import RunError, TiewiseError
from tiewise.lab.call_settings import call_text, read_folder_argument
from tiewise.lab.runs import carry_out, workers_for
from tiewise.report.sweep_page import write_sweep
from tiewise.training.compare import Display, finish
from tiewise.training.folder import LOCK, REPORT, RESULTS, locked, read_json, remove, replace_path
from tiewise.training.launchers import LOCAL
from tiewise.training.results import Comparison
from tiewise.training.settings import Settings
from tiewise.training.study.grid import GRID, StudyGrid
from tiewise.training.study.study import TABLE, Study, command_for

_STAGE = ".starting"  # subfolder of a study in which its cells are prepared


def sweep(
    grid: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    out: str | os.PathLike[str] = "runs/sweep",
    quick: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    jobs: int | str = "auto",
    launcher: str = LOCAL,
    quiet: bool = False,
) -> Study:
    """Compare tying choices in every cell of a grid.

    Args:
        grid: a YAML file, the name of a grid of the package (`"quick"`, `"rank"`), or the content of such a file:
            `{"asks": …, "settings": {…}, "axes": {…}}`. docs/sweep.md describes it.
        out: folder of the study, with a folder for every cell.
        quick: shorten the grid to the first and last value of every axis, two seeds and 30 steps.
        resume: finish the study in `out`, with the grid stored there.
        overwrite: replace the study in `out`.
        jobs, launcher, quiet: as in `compare`.

    Returns:
        The study, with a result for every cell and contrast. Losses are nats per token.

    Raises:
        TiewiseError: a grid or a folder cannot be used.
        Interrupted: as in `compare`.

    >>> import tempfile
    >>> small = {"width": 16, "heads": 2, "length": 8, "batch": 2, "steps": 2, "seeds": 2, "tokenizer": "bytes"}
    >>> settings = {**small, "arms": ["untied", "tied"], "text": ["synthetic:words=4000"]}
    >>> grid = {"asks": "Does depth matter?", "settings": settings, "axes": {"layers": [0, 1]}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     study = sweep(grid, out=folder, jobs=1, quiet=True)
    >>> [result.cell for result in study.results]
    ['layers=0', 'layers=1']
    """
    folder = read_folder_argument("sweep", out)
    if not isinstance(grid, str | os.PathLike | Mapping) and not (grid is None and resume):
        raise RunError(f"a {type(grid).__name__} is no grid", 'name one: tiewise.sweep("quick")')
    command = call_text("sweep", grid, {"out": str(folder), "quick": quick})
    display = Display.on_stderr(quiet=quiet)
    return carry_out_study(
        _read_grid(grid, quick),
        folder,
        command,
        display,
        overwrite=overwrite,
        resume=resume,
        jobs=jobs,
        launcher=launcher,
    )


def _read_grid(grid: str | os.PathLike[str] | Mapping[str, Any] | None, quick: bool) -> StudyGrid | None:
    """Return the grid that a caller names or gives; None for None."""
    if grid is None:
        return None
    if isinstance(grid, Mapping):
        study_grid = StudyGrid.of(grid, "the grid")
    else:
        study_grid = StudyGrid.named(os.fspath(grid))
    if quick:
        return study_grid.quick()
    return study_grid


def carry_out_study(
    grid: StudyGrid | None,
    out: Path,
    command: str,
    display: Display,
    *,
    overwrite: bool = False,
    resume: bool = False,
    jobs: int | str = "auto",
    launcher: str = LOCAL,
) -> Study:
    """Run the comparison of every cell of a grid, each in its folder of `out`.

    With `resume`, the study in `out` resumes. A grid must then equal that of the study, and None takes it from there.
    Every cell is prepared before any is trained. If one cannot be used, `out` stays as it was. The table is written
    after every cell.

    Raises:
        TiewiseError: a grid or a folder cannot be used.
        Interrupted: as in `compare`.
    """
    if resume and grid is not None:
        _refuse_other_grid(grid, out)
        grid = None
    workers_for(launcher, jobs, out, display)  # raises before any cell is prepared
    with locked(out):
        if grid is not None:
            _prepare_study(grid, out, display, overwrite)
        if (out / _STAGE / GRID).is_file():  # every cell is prepared, also if a kill followed
            _install_prepared_study(out)
        if not (out / GRID).is_file():
            raise RunError(f"{out} holds no study to resume", "leave --resume out, and name a grid")
        grid, done = StudyGrid.named(str(out / GRID)), dict[str, Comparison]()
        cells = grid.cells()
        for number, (cell, settings) in enumerate(cells.items(), 1):
            folder = out / cell
            if (folder / RESULTS).is_file():
                done[cell] = _read_finished_cell(folder, settings)
                continue
            display.say(f"cell {number}/{len(cells)} {cell}")
            done[cell] = carry_out(finish, None, folder, "", display, overwrite=False, jobs=jobs, launcher=launcher)
            Study.of(grid, done, out).save()
        study = Study.of(grid, done, out)
        if study.results:
            study.save()
            write_sweep(study, command)
        return study


def _read_finished_cell(folder: Path, settings: Settings) -> Comparison:
    """Return the comparison of a finished cell.

    RunError: the grid names other arms or seeds by now.
    """
    comparison = Comparison.from_dict(read_json(folder / RESULTS))
    if (tuple(comparison.arms), len(comparison.seeds)) != (settings.arms, settings.seeds):
        problem = f"{GRID} in {folder.parent} has other arms or seeds than its runs"
        raise RunError(problem, "put them back, or sweep elsewhere")
    return comparison


def _refuse_other_grid(grid: StudyGrid, out: Path) -> None:
    """Raise RunError if `out` holds no study, or one of another grid."""
    staged, current = out / _STAGE / GRID, out / GRID
    if staged.is_file():
        current = staged
    elif not current.is_file():
        raise RunError(f"{out} holds no study to resume", "leave --resume out")
    if grid.cells() != StudyGrid.named(str(current)).cells():
        remedy = f"give only --out {out} --resume, or choose another --out"
        raise RunError(f"{out} holds a study of another grid", remedy)


def _prepare_study(grid: StudyGrid, out: Path, display: Display, overwrite: bool) -> None:
    """Prepare every cell of a new study in the stage of `out`.

    Raises as `sweep`, and removes the stage then.
    """
    if (out / GRID).is_file():
        if not overwrite:
            raise RunError(f"{out} holds a study already", "add --resume to finish it, --overwrite to replace it")
    elif any(path.name not in (LOCK, _STAGE) for path in out.iterdir()):
        raise RunError(f"{out} exists and is no study of tiewise", "choose another --out")
    try:
        remove(out / _STAGE)
        for cell, settings in grid.cells().items():
            display.say(f"preparing {cell}")
            _prepare_cell(cell, settings, out, display)
        grid.save(out / _STAGE)
    except BaseException:
        remove(out / _STAGE)
        raise


def _prepare_cell(cell: str, settings: Settings, out: Path, display: Display) -> None:
    """Start a cell's comparison in the stage of a study.

    RunError: as `carry_out`, with the name of the cell.
    """
    command = command_for(settings, str(out / cell))
    try:
        carry_out(lambda *_: None, settings, out / _STAGE / cell, command, display, overwrite=False)
    except TiewiseError as error:
        raise RunError(f"cell {cell}: {error.problem}", error.remedy) from error


def _install_prepared_study(out: Path) -> None:
    """Replace the study in `out` by the prepared one.

    A repetition after a kill ends in the same state.
    """
    new = StudyGrid.named(str(out / _STAGE / GRID)).cells()
    old: dict[str, Settings] = {}
    if (out / GRID).is_file():
        old = StudyGrid.named(str(out / GRID)).cells()
    for name in (*(old.keys() - new.keys()), f"{TABLE}.csv", f"{TABLE}.parquet", REPORT):
        remove(out / name)
    for name in (*new, GRID):
        if (out / _STAGE / name).exists():
            replace_path(out / _STAGE / name, out / name)
    remove(out / _STAGE)
