"""Callbacks that tie or untie a model at a step of its training."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from tiewise.boundary.installation import KEEP, STATE, install
from tiewise.core.errors import SpecError, UnsupportedError


class _ScheduledChange(TrainerCallback):
    """Callback that ties or unties a model once, after `step` optimizer steps."""

    def __init__(self, new_kind: str, step: int, choice: str, choices: tuple[str, ...]) -> None:
        is_count = hasattr(step, "__index__") and step >= 0
        if not is_count or choice not in choices:
            problem = f"the boundary cannot change after {step!r} steps by {choice!r}"
            raise SpecError(problem, f"give a number of steps, and one of {', '.join(choices)}")
        self.new_kind, self.step, self.choice, self.done = new_kind, step, choice, False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Change the boundary if its step has come and the model lacks the change."""
        if self.done or state.global_step < self.step:
            return
        self.done = True
        installed = install(kw["model"])
        if installed.spec.kind == self.new_kind:  # the run was resumed from a checkpoint after the change
            return
        if args.world_size > 1:
            remedy = "train on one process, or start from the final boundary"
            raise UnsupportedError("changing the boundary while several processes train", remedy)
        optimizer = getattr(kw["optimizer"], "optimizer", kw["optimizer"])  # accelerate wraps it
        if self.new_kind == "tied":
            installed.tie(optimizer, keep=self.choice)
        else:
            installed.untie(optimizer, state=self.choice)


def tie_at(step: int, keep: str = "mean") -> TrainerCallback:
    """Return a Trainer callback that ties the model's tables after `step` optimizer steps.

    It works with any `transformers.Trainer`. To resume from a checkpoint that was written after the step, tie the model
    first (`tiewise.installed(model).tie()`), so that it has the tables of the checkpoint.

    Args:
        step: number of optimizer steps before the change.
        keep: the values that the table starts from: `input`, `output` or their `mean`.

    Raises:
        SpecError: `step` is not an integer of 0 or more, or `keep` is unknown.

    >>> callback = tie_at(1000, keep="output")
    """
    return _ScheduledChange("tied", step, keep, KEEP)


def untie_at(step: int, state: str = "copy") -> TrainerCallback:
    """Return a Trainer callback that unties the model's tables after `step` optimizer steps.

    It works with any `transformers.Trainer`. To resume from a checkpoint that was written after the step, untie the
    model first (`tiewise.installed(model).untie()`), so that it has the tables of the checkpoint.

    Args:
        step: number of optimizer steps before the change.
        state: optimizer state of both tables, `copy`, `split` or `reset`, as in `Installed.untie`.

    Raises:
        SpecError: `step` is not an integer of 0 or more, or `state` is unknown.

    >>> callback = untie_at(1000, state="split")
    """
    return _ScheduledChange("untied", step, state, STATE)
