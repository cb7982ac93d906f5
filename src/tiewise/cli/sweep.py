"""`tiewise sweep`: a comparison in every cell of a grid, as one table and one page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import typer

from tiewise.cli import options as o
from tiewise.core.errors import RunError


def sweep(
    grid: str = typer.Argument(None, metavar="GRID", help="A YAML file, or one that comes along: quick, rank, …"),
    out: Path = typer.Option(Path("runs/sweep"), "--out", "-o", help="Folder of the study, every cell a run inside."),
    quick: bool = typer.Option(False, "--quick", help="A rehearsal: the ends of every axis, two seeds, 30 steps."),
    resume: bool = o.RESUME,
    overwrite: bool = o.OVERWRITE,
    jobs: str = o.JOBS,
    launcher: str = o.LAUNCHER,
    json_: bool = o.JSON,
    quiet: bool = o.QUIET,
) -> None:
    """Compare tying choices in every cell of a grid: width, text, vocabulary, rank, α, … in one table and one map.

    A grid names settings of `run.yaml` that stay, and axes that vary. docs/sweep.md shows one.
    """
    if resume and (overwrite or (quick and grid is None)):
        raise RunError("--resume takes its grid from the study", f"give only --out {out} --resume")
    if grid is None and not resume:
        raise RunError("no grid is named", "name a YAML file, or quick, which comes along")
    o.need_torch()
    again = shlex.join(["tiewise", "sweep", "--out", str(out), "--resume"])
    with o.interruptible(lambda: f"; {again} goes on" if any(out.glob("**/grid.yaml")) else ""):
        from tiewise.core.files import disk_error, quiet_threads
        from tiewise.training.study.grid import StudyGrid

        made = None if grid is None else StudyGrid.named(grid)
        o.hush_libraries()
        from tiewise.lab import sweep as carry_out
        from tiewise.report.sweep_page import PAGE, sweep_view
        from tiewise.training.compare import Display
        from tiewise.training.workers import settle

        settle()
        try:
            with quiet_threads():
                asked, display = made.quick() if made and quick else made, Display.on_stderr(quiet=quiet)
                how: dict[str, Any] = {"overwrite": overwrite, "jobs": jobs, "launcher": launcher, "resume": resume}
                study = carry_out(asked, out, o.command_line(), display, **how)
        except Exception as error:
            said = disk_error(error, out, f"make room there, then {again}")
            if said is None:
                raise
            raise said from None
    if json_:
        return o.print_json(study.record())
    if study.rows:
        o.print_view(sweep_view(study))
        print(f"report: {out / PAGE}\ntable: {out / 'sweep.csv'}, and the same as sweep.parquet")
