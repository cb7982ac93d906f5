"""How the learning rate falls, when averaging begins, and which weights are kept: decided at the ends of epochs.

anneal: epochs     rate · decay^max(0, e − n) in epoch e (from 1), n = decay_after        Zaremba et al. 2014
anneal: plateau    rate · decay^k after k epochs whose validation nll was not the lowest so far
vary_length        every step's rate in proportion to its length                        Merity et al. 2018, §4.1
average_patience   averaging begins when the validation nll is above the lowest of all but the last n epochs
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from tiewise.training.recurrent.averaged import AveragedSGD
from tiewise.training.recurrent.options import Recurrent
from tiewise.training.recurrent.streams import Plan


class Annealing(TrainerCallback, ExportableState):
    """Sets the rate before every step, and validates after every epoch where something depends on it.

    Args:
        plan: the run's steps.
        options: the run's.
        rate: the full learning rate.
        length: T, of which a varied step is a part.
        validate: returns the validation nll of the weights as they are.
        keep: called when these weights are the best so far.
    """

    def __init__(
        self,
        plan: Plan,
        options: Recurrent,
        rate: float,
        length: int,
        validate: Callable[[], float],
        keep: Callable[[], None],
    ) -> None:
        self.plan, self.options, self.full, self.length = plan, options, rate, length
        self._validate, self._keep = validate, keep
        self.validations: list[float] = []
        self.cuts = 0
        self.rate = rate  # of the step at hand, as logs say it

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, in the form that `transformers` asks for."""
        return {"args": {}, "attributes": {"validations": self.validations, "cuts": self.cuts}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Take up what a checkpoint brings."""
        found = state.stateful_callbacks.get(type(self).__name__, self.state())["attributes"]
        self.validations, self.cuts = list(found["validations"]), int(found["cuts"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """Set the rate of this step."""
        self.rate = self.rate_of(state.global_step)
        for group in kw["optimizer"].param_groups:
            group["lr"] = self.rate

    def rate_of(self, step: int) -> float:
        """Learning rate of a step, from 0."""
        o, epoch = self.options, int(self.plan.epochs[step]) + 1
        power = self.cuts if o.anneal == "plateau" else max(0, epoch - o.decay_after)
        part = self.plan.lengths[step] / self.length if o.vary_length else 1.0
        return float(self.full * o.decay**power * part)

    def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
        """At the end of an epoch: validate, and decide."""
        if not self.options.validates or not self.plan.ends_epoch(state.global_step - 1):
            return
        optimizer = getattr(kw["optimizer"], "optimizer", kw["optimizer"])
        if isinstance(optimizer, AveragedSGD) and optimizer.averages:
            with optimizer.averaged():
                self._take(self._validate())
            return
        before = list(self.validations)
        self._take(self._validate())
        patience = self.options.average_patience
        if patience and len(before) > patience and self.validations[-1] > min(before[:-patience]):
            optimizer.average()

    def _take(self, nll: float) -> None:
        nll = nll if math.isfinite(nll) else float("1e30")  # a diverged epoch is the worst; JSON has no infinity
        if nll < min(self.validations, default=math.inf):
            self._keep()
        else:
            self.cuts += 1
        self.validations.append(nll)
