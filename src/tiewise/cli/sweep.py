"""`tiewise sweep`: a comparison in every cell of a grid, as one table and one page."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tiewise.cli import options as o
from tiewise.core.errors import RunError

if TYPE_CHECKING:
    from tiewise.training.study.grid import StudyGrid

OUT = Path("runs/sweep")


def sweep(
    grid: str = typer.Argument(None, metavar="[GRID]", help="YAML file, or a name: quick, rank, …"),
    out: Path = typer.Option(
        OUT, "--out", "-o", metavar="DIR", help="Folder of the study; it has a folder for each cell."
    ),
    quick: bool = typer.Option(False, "--quick", help="Rehearse: the ends of each axis, two seeds, 30 steps."),
    claim: str = typer.Option(None, "--claim", metavar="ID", help="Test a published claim by its registered rule."),
    claims: bool = typer.Option(False, "--claims", help="List the published claims with their verdicts, and stop."),
    resume: bool = o.RESUME,
    margin: float = o.MARGIN,
    jobs: str = o.JOBS,
    launcher: str = o.LAUNCHER,
    overwrite: bool = o.OVERWRITE,
    report_to: str = o.REPORT_TO,
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Compare tying choices in every cell of a grid, in one table and one map.

    A grid names fixed settings of `run.yaml`, and axes that vary: width, text, vocabulary, rank, α and others.
    docs/sweep.md shows one.
    """
    options = {"margin": margin, "report_to": report_to}
    changed = quick or any(value is not None for value in options.values())
    how: dict[str, Any] = {"overwrite": overwrite, "jobs": jobs, "launcher": launcher}
    if claims or claim is not None:
        _require_claim_alone(claims, claim, grid, changed)
        return _published(claim, out, how, quiet=quiet, as_json=json_)
    _require_grid(grid, out, resume=resume, overwrite=overwrite, changed=changed)
    o.need_torch()
    resume_command = shlex.join(["tiewise", "sweep", "--out", str(out), "--resume"])

    def remains() -> str:
        """Return the command that resumes the study, if it has started."""
        has_started = any(out.glob("**/grid.yaml"))
        return f"; resume with: {resume_command}" if has_started else ""

    with o.interruptible(remains):
        study_grid = _grid(grid, quick, options)
        o.hush_libraries()
        from tiewise.lab.studies import carry_out_study
        from tiewise.training.compare import Display
        from tiewise.training.worker_process import settle

        settle()
        with _disk_errors(out, f"then {resume_command}"):
            display = Display.on_stderr(quiet=quiet)
            study = carry_out_study(study_grid, out, o.command_line(), display, resume=resume, **how)
    if json_:
        return o.print_json(study.record())
    from tiewise.report.sweep_page import sweep_view
    from tiewise.training.folder import REPORT

    if study.results:
        o.print_view(sweep_view(study))
        print(f"report: {out / REPORT}\ntable: {out / 'sweep.csv'}, and the same as sweep.parquet")


def _require_claim_alone(claims: bool, claim: str | None, grid: str | None, changed: bool) -> None:
    """Refuse options that a registered claim cannot have.

    `changed`: other settings are named. Raises RunError.
    """
    if claims and claim is not None:
        raise RunError("--claim and --claims at once", "leave one of them out")
    if changed or grid is not None:
        remedy = "leave out GRID, --quick, --margin and --report-to"
        raise RunError("a claim has the grid and the settings that were registered for it", remedy)


def _published(name: str | None, out: Path, how: dict[str, Any], *, quiet: bool, as_json: bool) -> None:
    """Test a published claim in `out`, or list all if none is named.

    In the default folder, claims of one grid share their runs.
    """
    from tiewise.cli.published import carry_out_claim, list_claims
    from tiewise.lab.claims.registry import find_claim

    if name is None:
        return list_claims(as_json=as_json)
    claim = find_claim(name)
    o.need_torch()
    if out == OUT:
        out = OUT.parent / "claims" / claim.grid.name
    with _disk_errors(out, "then the same command"):
        carry_out_claim(claim, out, how, quiet=quiet, as_json=as_json)


def _require_grid(grid: str | None, out: Path, *, resume: bool, overwrite: bool, changed: bool) -> None:
    """Refuse a call without a grid, or options that a resumed study cannot have.

    `changed`: an option changes the settings of the grid. Raises RunError.
    """
    if resume and (overwrite or (changed and grid is None)):
        raise RunError("--resume takes its grid from the study", f"give only --out {out} --resume")
    if grid is None and not resume:
        raise RunError("no grid is named", "name a YAML file, or quick, which comes along")


def _grid(name: str | None, quick: bool, options: dict[str, Any]) -> StudyGrid | None:
    """Return the named grid or that of a YAML file; None if none is named.

    With `quick` it is shortened. `options` are its settings `margin` and `report_to`, None if not typed.
    """
    from tiewise.training.study.grid import StudyGrid
    from tiewise.training.tracker_names import read_tracker_names, require_packages

    if name is None:
        return None
    grid = StudyGrid.named(name)
    typed = {setting: value for setting, value in options.items() if value is not None}
    if "report_to" in typed:
        trackers = read_tracker_names([typed["report_to"]])
        require_packages(trackers)
        typed["report_to"] = list(trackers)
    grid = replace(grid, settings=grid.settings | typed)
    return grid.quick() if quick else grid


@contextmanager
def _disk_errors(out: Path, next_step: str) -> Iterator[None]:
    """Raise a RunError if the disk of `out` fails within a block.

    `next_step` follows the remedy in its message.
    """
    from tiewise.core.disk_errors import disk_error, quiet_threads

    try:
        with quiet_threads():
            yield
    except Exception as error:
        full_disk = disk_error(error, out, next_step)
        if full_disk is None:
            raise
        raise full_disk from None
