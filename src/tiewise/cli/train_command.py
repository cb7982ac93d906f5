"""A training command from its parameters to its result, with messages for an early end."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import typer

from tiewise.cli import options as o
from tiewise.cli.train_settings import choose_settings
from tiewise.core import ranks
from tiewise.core.errors import Interrupted, RunError, TiewiseError
from tiewise.core.interrupts import is_caused_by_ctrl_c


def carry_out_command(command: str, parameters: dict[str, Any]) -> Any:
    """Carry out a training command and return its result.

    The result is None if it was printed as JSON, or if rank 0 has it. Ctrl-C exits with 130, and a full disk raises
    `RunError`; both messages name the command that resumes the run. Of several processes rank 0 prints, and the others
    exit with the same code.
    """
    return _TrainingCommand(command, parameters).carry_out()


class _TrainingCommand:
    """A call of `compare`, `train` or `heal`."""

    def __init__(self, command: str, parameters: dict[str, Any]) -> None:
        self.start = time.monotonic()
        self.command, self.parameters = command, parameters
        self.out: Path = parameters["out"] or Path(f"runs/{command}")
        self.launcher: str = parameters.get("launcher", "local")
        self.element: int | None = parameters.get("element")
        self.can_resume: bool = parameters["resume"]  # whether the run is on disk

    def carry_out(self) -> Any:
        """Do the work; see `carry_out_command`."""
        o.need_torch()
        from tiewise.core.disk_errors import quiet_threads

        if self.element is not None:
            refuse_with_element(self.element, self.out, self.launcher, self.parameters)
        check_upload(self.command, self.out, self.parameters)
        try:
            with quiet_threads():
                result = self._work()
                prints = ranks.is_first()
        except (Exception, KeyboardInterrupt) as error:
            self._stop(error)
        ranks.leave(together=False)
        if not prints:
            return None
        if self.parameters["json_"]:
            o.print_json(result.record())
            upload(self.parameters, result)
            return None
        return result

    def _work(self) -> Any:
        """Choose the settings, train, and return the result."""
        from tiewise.training.least_time import refuse_impossible_minutes

        parameters = self.parameters
        ranks.join(parameters["fsdp"], parameters["tp"], parameters["tables"])
        is_single = self.command != "compare"
        settings = ranks.on_rank_zero(lambda: choose_settings(self.out, parameters, single=is_single))
        is_one_process = ranks.size() == 1 and self.launcher == "local"
        if settings is not None and is_one_process:
            refuse_impossible_minutes(settings)
        o.hush_libraries()
        from tiewise.lab.runs import carry_out
        from tiewise.training.compare import Display, count_runs, finish_element, refuse_trials
        from tiewise.training.worker_process import settle

        settle()
        display = Display.on_stderr(quiet=parameters["quiet"])
        if self.element:
            return finish_element(self.out, display, self.element)
        work = self._finish()
        if settings is not None and self.element == 0:
            refuse_trials(settings)
            work = count_runs
        return carry_out(
            work,
            settings,
            self.out,
            o.command_line(),
            display,
            overwrite=parameters["overwrite"],
            jobs=parameters.get("jobs", 1),
            launcher=self.launcher,
            elapsed=lambda: time.monotonic() - self.start,
            on_started=self._note_start,
        )

    def _finish(self) -> Callable[..., Any]:
        """Return the function that does the command's runs."""
        from tiewise.lab.runs import finish_healing
        from tiewise.training.compare import finish, finish_one

        return {"compare": finish, "train": finish_one, "heal": finish_healing}[self.command]

    def _note_start(self) -> None:
        """Record that the run is on disk, so that `--resume` can resume it."""
        self.can_resume = True

    def _stop(self, error: BaseException) -> NoReturn:
        """End the command by an error: print what happened and how to resume, and exit."""
        code = 2
        if isinstance(error, ranks.RemoteError):
            pass  # the process that raised it prints it
        elif is_caused_by_ctrl_c(error):
            code = 130
            if ranks.is_first() and self.can_resume:
                remains = "a checkpoint is written" if isinstance(error, Interrupted) else "what was finished is kept"
                o.print_to_stderr(f"tiewise: interrupted, {remains}; resume with: {self._resume_command()}")
        else:
            expected = self._expected_error(error)
            if expected is None:
                raise error
            if ranks.size() == 1:
                raise expected from None
            o.print_to_stderr(f"tiewise: {expected}")
        ranks.leave(together=ranks.is_raised_everywhere(error))
        raise typer.Exit(code) from None

    def _expected_error(self, error: BaseException) -> TiewiseError | None:
        """Return the one-line error of a cause that a user can remove; None for a defect."""
        from tiewise.core.disk_errors import disk_error

        if isinstance(error, TiewiseError):
            return error
        next_step = "or choose another --out"
        if self.can_resume:
            next_step = f"then {self._resume_command()}"
        full_disk = disk_error(error, self.out, next_step)
        if full_disk is None and ranks.is_lost_peer(error):
            remedy = f"resume from the last checkpoint with: {self._resume_command()}"
            return RunError("another process of this run has ended", remedy)
        return full_disk

    def _resume_command(self) -> str:
        """Return the command that resumes this one."""
        words = ["tiewise", self.command, "--out", str(self.out), "--resume"]
        if self.launcher != "local":
            words += ["--launcher", self.launcher]
        if self.element is not None:
            words += ["--element", str(self.element)]
        return shlex.join(words)


def check_upload(command: str, out: Path, parameters: dict[str, Any]) -> None:
    """Raise RunError if `--push-to-hub` names no repository, and print what an upload from here lacks.

    The training continues, because the upload can follow later.
    """
    repo_id = parameters.get("push_to_hub")
    if repo_id is None:
        return
    from tiewise.report.hub import require_repo_id, warning_before_training

    require_repo_id(repo_id)
    if parameters["resume"] or not ranks.is_first():
        return
    warning = warning_before_training(command, out, repo_id)
    if warning is not None:
        o.print_to_stderr(f"tiewise: {warning}")


def upload(parameters: dict[str, Any], result: Any) -> None:
    """Upload a finished run if `--push-to-hub` is typed, and print its address.

    RunError: the upload failed; the run is complete.
    """
    repo_id = parameters.get("push_to_hub")
    if repo_id is None:
        return
    from tiewise.report.hub import push_to_hub

    line = f"on the Hub: {push_to_hub(result, repo_id)}"
    if parameters["json_"]:
        o.print_to_stderr(line)
    else:
        print(line)


def refuse_with_element(element: int, out: Path, launcher: str, parameters: dict[str, Any]) -> None:
    """Refuse options that contradict `--element`. Raises RunError."""
    resume = parameters["resume"]
    if parameters["push_to_hub"] is not None:
        from tiewise.report.hub import upload_command

        later = upload_command("compare", out, parameters["push_to_hub"])
        raise RunError(f"--element {element} trains no whole comparison to upload", f"after all elements, {later}")
    if element == 0:
        if launcher != "local":
            raise RunError(f"--element 0 with --launcher {launcher}", "leave --launcher out")
        if resume:
            raise RunError("--element 0 with --resume", f"{out} is prepared; give a number from 1")
    elif not resume or launcher != "local":
        raise RunError(f"--element {element}", f"give no option but --out {out} --resume with it")
