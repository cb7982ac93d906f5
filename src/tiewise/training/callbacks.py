"""What tiewise adds to `transformers.Trainer` as callbacks: scheduled tying, a clean interrupt, curves on disk."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import ExportableState

from tiewise.boundary.install import KEEP, STATE, Installed, install
from tiewise.core import ctrl_c
from tiewise.core.errors import SpecError, UnsupportedError
from tiewise.core.files import write_whole
from tiewise.training import ranks
from tiewise.training.display import RunsBar


class _Scheduled(TrainerCallback):
    """Changes the boundary once, before the step after `step` optimizer steps; not where it is changed already."""

    becomes = ""
    choices: tuple[str, ...] = ()

    def __init__(self, step: int, choice: str) -> None:
        if not hasattr(step, "__index__") or step < 0 or choice not in self.choices:
            what = f"the boundary cannot change after {step!r} steps by {choice!r}"
            raise SpecError(what, f"give a number of steps, and one of {', '.join(self.choices)}")
        self.step, self.choice = step, choice
        self.done = False

    def change(self, installed: Installed, optimizer: Any) -> None:
        raise AssertionError("a subclass says how")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        if self.done or state.global_step < self.step:
            return
        self.done = True
        installed = install(kw["model"])
        if installed.spec.kind == self.becomes:  # a run resumed from a checkpoint that was written after the change
            return
        if args.world_size > 1:
            fix = "train on one process, or start from the final boundary"
            raise UnsupportedError("changing the boundary while several processes train", fix)
        optimizer = kw["optimizer"]
        self.change(installed, getattr(optimizer, "optimizer", optimizer))


class TieAt(_Scheduled):
    """`tie_at(step)`: from then on both ends are one table. See `Installed.tie`."""

    becomes, choices = "tied", KEEP

    def change(self, installed: Installed, optimizer: Any) -> None:
        """Tie, keeping `choice`: input, output or mean."""
        installed.tie(optimizer, self.choice)


class UntieAt(_Scheduled):
    """`untie_at(step)`: from then on each end has its own table. See `Installed.untie`."""

    becomes, choices = "untied", STATE

    def change(self, installed: Installed, optimizer: Any) -> None:
        """Untie, the optimizer's state by `choice`: copy, split or reset."""
        installed.untie(optimizer, self.choice)


def tie_at(step: int, keep: str = "mean") -> TieAt:
    """Callback for any `transformers.Trainer`: tie the model's tables after `step` optimizer steps.

    `keep` says whose values the table starts from: input, output or their mean. To resume from a checkpoint that was
    written after the step, tie the model first (`tiewise.installed(model).tie()`): it must fit what it loads.
    """
    return TieAt(step, keep)


def untie_at(step: int, state: str = "copy") -> UntieAt:
    """Callback for any `transformers.Trainer`: untie the model's tables after `step` optimizer steps.

    `state` says what the optimizer keeps for both: copy, split or reset. To resume from a checkpoint that was written
    after the step, untie the model first (`tiewise.installed(model).untie()`): it must fit what it loads.
    """
    return UntieAt(step, state)


class Interrupt(TrainerCallback):
    """Ctrl-C finishes the step, writes a checkpoint and stops; a second Ctrl-C stops at once.

    Use as a context manager around `trainer.train()`; `.caught` says afterwards whether it was pressed. Of several
    processes that train together all stop after the same step, whichever was told. A press that came before and
    was lost in a library (`tiewise.core.ctrl_c`) counts.
    """

    def __init__(self) -> None:
        self._press = ctrl_c.Noted(ctrl_c.pressed())
        self._before: Any = None

    @property
    def caught(self) -> bool:
        """Whether it was pressed."""
        return self._press.pressed

    def __enter__(self) -> Interrupt:
        self._before = ctrl_c.handle(self._press)
        return self

    def __exit__(self, *exception: Any) -> None:
        ctrl_c.handle(self._before)

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> Any:
        """Ask the Trainer to save and to stop."""
        if ranks.any_of(self.caught):
            self._press.pressed = True
            control.should_save = control.should_training_stop = True
        return control


class Lines(TrainerCallback):
    """`metrics.jsonl`: one line per logged step; lines after the step that a run resumes from are dropped first."""

    def __init__(self, path: Path, more: Sequence[str] = ()) -> None:
        self.path, self.more = path, more  # names that one kind of run logs beside those of all

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Keep what a resumed run has already said up to its checkpoint, and nothing torn or later."""
        ranks.first_does(lambda: keep_lines(self.path, state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kw: Any) -> None:
        """Append the training loss of the window, and what the Trainer measured beside it."""
        if logs and "loss" in logs and ranks.first():
            line = {"step": state.global_step, "train_nll": logs["loss"], "learning_rate": logs.get("learning_rate")}
            add_line(self.path, line | {k: logs[k] for k in (*MEASURED, *self.more) if k in logs})


METRICS = "metrics.jsonl"  # in a run's folder
MEASURED = ("heldout_nll", "path_a", "path_b", "cosine")


def add_line(path: Path, line: dict[str, Any]) -> None:
    """Append a line to a `metrics.jsonl`."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def keep_lines(path: Path, step: int) -> None:
    """Drop the lines of a `metrics.jsonl` after `step`, and a torn last one."""
    kept = [line for line in read_lines(path) if line["step"] <= step]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a `metrics.jsonl`; a torn last line, left by a kill, is not one."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


class Events(TensorBoardCallback):
    """TensorBoard's events in `folder`, written by the first of several processes.

    The Trainer's callback, with an end that all processes reach together: it writes what is still in memory.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(SummaryWriter(log_dir=str(folder)) if ranks.first() else None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Note the arguments and the model."""
        with ranks.agreed():
            super().on_train_begin(args, state, control, **kw)

    def on_train_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Write the rest and close."""
        with ranks.agreed():
            super().on_train_end(args, state, control, **kw)


class Clock(TrainerCallback, ExportableState):
    """Seconds spent in training steps alone: evaluation, saving and set-up do not count.

    Checkpoints carry it, so that a resumed run knows the time of all its steps.
    """

    def __init__(self) -> None:
        self.seconds, self.steps = 0.0, 0
        self._start: float | None = None
        self._warm = False

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, in the form that `transformers` asks for."""
        return {"args": {}, "attributes": {"seconds": self.seconds, "steps": self.steps}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Take up the time that a checkpoint brings."""
        for name, value in state.stateful_callbacks.get(type(self).__name__, self.state())["attributes"].items():
            setattr(self, name, value)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Start."""
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Stop; the first step of a process warms up and does not count."""
        if self._warm and self._start is not None:
            self.seconds += time.perf_counter() - self._start
            self.steps += 1
        self._warm = True


class Bar(TrainerCallback):
    """Moves the bar over all runs, with this one's name and training loss."""

    def __init__(self, bar: RunsBar, name: str) -> None:
        self.bar, self.name = bar, name

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Name the run."""
        self.bar.begun(self.name, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Move."""
        self.bar.stepped(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kw: Any) -> None:
        """Show the loss."""
        if logs and "loss" in logs:
            self.bar.learnt(logs["loss"])
