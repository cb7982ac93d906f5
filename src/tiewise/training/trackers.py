"""Experiment trackers during a run: the Trainer's arguments, and output of a tracker.

transformers' callback of a tracker sends the logged figures of each run, and its settings with `arm` and `seed`.
`trainer.Events` does this for TensorBoard.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from tiewise.core import Late
from tiewise.core.errors import RunError, one_line_message
from tiewise.core.written_options import written_option
from tiewise.training.tracker_names import ALL, TENSORBOARD, is_installed, require_packages

integrations = Late("transformers.integrations.integration_utils")
PROJECT = "tiewise"  # project of the runs, in trackers that the Trainer tells one
EVENTS = "tensorboard"  # subfolder of a run with its TensorBoard events


@dataclass
class ReportedArguments(TrainingArguments):  # type: ignore[misc, unused-ignore]  # no types
    """Arguments of the Trainer with the arm, which trackers record among a run's settings."""

    arm: str = ""


def require_trackers(names: Sequence[str]) -> None:
    """Raise RunError for a tracker that cannot report from here.

    Its package may be missing, or an account that its callback asks for.
    """
    require_packages(names)
    for callback in integrations.get_reporting_integration_callbacks(ALL if ALL in names else list(names)):
        try:
            with without_tracker_output(names):
                callback()
        except (ImportError, RuntimeError) as error:
            problem = f"{callback.__name__} cannot start: {one_line_message(error)}"
            raise RunError(problem, f"set the tracker up, or leave it out of {written_option('report_to')}") from None


def tracker_arguments(names: Sequence[str], tracked_as: str, arm: str) -> dict[str, Any]:
    """Return the Trainer's arguments that concern trackers, for a run of an arm.

    `tracked_as` is the run's name in the trackers.
    """
    project = os.environ.get("TRACKIO_PROJECT", PROJECT)
    return {"report_to": list(names) or "none", "run_name": tracked_as, "project": project, "arm": arm}


def writes_events(names: Sequence[str]) -> bool:
    """Return whether a run with these trackers writes TensorBoard events."""
    return TENSORBOARD in names or (ALL in names and is_installed(TENSORBOARD))


def without_events(arguments: ReportedArguments) -> ReportedArguments:
    """Return the arguments without TensorBoard, whose events `trainer.Events` writes."""
    arguments.report_to = [name for name in arguments.report_to if name != TENSORBOARD]
    return arguments


def events_folder(tracked_as: str, run: Path) -> Path:
    """Return the folder of a run's TensorBoard events.

    It is in the run's folder, or in the place that TENSORBOARD_LOGGING_DIR names.
    """
    root = os.environ.get("TENSORBOARD_LOGGING_DIR")
    if root:
        return Path(root).expanduser() / tracked_as
    return run / EVENTS


@contextmanager
def without_tracker_output(names: Sequence[str]) -> Iterator[None]:
    """Discard text that trackers print on stdout, which has the results alone."""
    if not names:
        yield
        return
    with redirect_stdout(io.StringIO()):
        yield
