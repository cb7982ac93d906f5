"""Callbacks that tie or untie a model at a step of its training."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from tiewise.boundary.install import KEEP, STATE, install
from tiewise.core.errors import SpecError, UnsupportedError


class _Scheduled(TrainerCallback):
    """Change of the boundary before the step after `step` optimizer steps, unless it is already changed."""

    def __init__(self, becomes: str, step: int, choice: str, choices: tuple[str, ...]) -> None:
        is_count = hasattr(step, "__index__") and step >= 0
        if not is_count or choice not in choices:
            problem = f"the boundary cannot change after {step!r} steps by {choice!r}"
            raise SpecError(problem, f"give a number of steps, and one of {', '.join(choices)}")
        self.becomes, self.step, self.choice, self.done = becomes, step, choice, False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Change the boundary once, if the step is due and the model does not have it already."""
        if self.done or state.global_step < self.step:
            return
        self.done = True
        installed = install(kw["model"])
        if installed.spec.kind == self.becomes:  # a run resumed from a checkpoint that was written after the change
            return
        if args.world_size > 1:
            remedy = "train on one process, or start from the final boundary"
            raise UnsupportedError("changing the boundary while several processes train", remedy)
        optimizer = getattr(kw["optimizer"], "optimizer", kw["optimizer"])  # accelerate wraps it
        if self.becomes == "tied":
            installed.tie(optimizer, keep=self.choice)
        else:
            installed.untie(optimizer, state=self.choice)


def tie_at(step: int, keep: str = "mean") -> TrainerCallback:
    """Return a callback for any `transformers.Trainer`: tie the model's tables after `step` optimizer steps.

    `keep` says whose values the table starts from: input, output or their mean. To resume from a checkpoint that was
    written after the step, tie the model first (`tiewise.installed(model).tie()`): it must fit what it loads.
    """
    return _Scheduled("tied", step, keep, KEEP)


def untie_at(step: int, state: str = "copy") -> TrainerCallback:
    """Return a callback for any `transformers.Trainer`: untie the model's tables after `step` optimizer steps.

    `state` says what the optimizer keeps for both: copy, split or reset. To resume from a checkpoint that was written
    after the step, untie the model first (`tiewise.installed(model).untie()`): it must fit what it loads.
    """
    return _Scheduled("untied", step, state, STATE)
