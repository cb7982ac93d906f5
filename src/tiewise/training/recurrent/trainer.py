"""`transformers.Trainer` for recurrent models: steps in order, the hidden state carried from each to the next.

The state is detached between steps, begins anew with every epoch, and is saved in every checkpoint beside the
optimizer's: a resumed run is the uninterrupted one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Sampler, SequentialSampler

from tiewise.boundary.install import Installed
from tiewise.core.errors import UnsupportedError
from tiewise.models import detached
from tiewise.ops.augmented_loss import AugmentedOptions, augmented_cross_entropy
from tiewise.training.recurrent.annealing import Annealing
from tiewise.training.recurrent.averaged import AveragedSGD
from tiewise.training.recurrent.options import Recurrent
from tiewise.training.recurrent.streams import one_step
from tiewise.training.trainer import TiewiseTrainer

CARRIED = "carried.pt"


class StatefulTrainer(TiewiseTrainer):
    """Trains on `tiewise.training.recurrent.streams.Steps`; its logged loss is the mean nll of the window's words.

    Args:
        installed: the boundary of a model whose forward takes `state` and returns one.
        options: the run's.
        annealing: what sets the rate, also one of the callbacks.
        kwargs: as `TiewiseTrainer`.
    """

    def __init__(self, installed: Installed, *, options: Recurrent, annealing: Annealing, **kwargs: Any) -> None:
        super().__init__(installed, data_collator=one_step, **kwargs)
        self.options, self.annealing = options, annealing
        self.carried: Any = None
        self._nlls: list[tuple[Tensor, int]] = []

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Loss of one step from the state that the last one left; keeps the state that this one leaves."""
        targets = inputs["labels"]
        state = None if bool(inputs["begins"]) else self.carried
        with self.installed.deferred():
            output = model(input_ids=inputs["input_ids"], state=state)
            loss, nll = self._loss(output.logits, targets)
        self.carried = detached(output.state)
        self._nlls.append((nll.detach(), targets.numel()))
        if output.regularisation is not None:
            loss = loss + output.regularisation
        if self.options.objective == "time":
            loss = loss * targets.shape[1]  # the mean over streams of the sum over positions
        penalty = self.installed.penalty()
        loss = loss if penalty is None else loss + penalty
        return (loss, output) if return_outputs else loss

    def _loss(self, logits: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(what is differentiated, nll) as means over words; they differ by the augmented loss alone."""
        flat, wanted = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
        if not self.options.augment:
            nll = F.cross_entropy(flat, wanted)
            return nll, nll
        scale, bias, softcap = flat.fold.parts()
        if softcap is not None:
            raise UnsupportedError("the augmented loss knows no soft-cap", "leave softcap out of the boundary")
        hidden = flat.hidden if scale == 1 else flat.hidden * scale
        chosen = AugmentedOptions(alpha=self.options.augment, temperature=self.options.temperature)
        table = self.installed.tables()[0]
        own = None if table is self.installed.tables()[1] else table
        loss = augmented_cross_entropy(hidden, flat.table, wanted, own, bias, chosen)
        with torch.no_grad():
            nll = F.cross_entropy(flat, wanted)
        return loss, nll

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Plain SGD, able to average, or AdamW, over all weights alike, decay included: as the papers' code does."""
        weights = [p for p in self.model.parameters() if p.requires_grad]
        rate, decay = self.args.learning_rate, self.args.weight_decay
        made: torch.optim.Optimizer
        if self.options.optimizer == "sgd":
            made = AveragedSGD(weights, rate, decay)
        else:
            made = torch.optim.AdamW(weights, rate, weight_decay=decay)
        self.optimizer = made
        return made

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Sampler:
        return SequentialSampler(self.train_dataset)

    def _get_learning_rate(self) -> float:
        return self.annealing.rate

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the mean nll per word of the window in place of the objective's value."""
        if "loss" in logs and self._nlls:
            words = sum(n for _, n in self._nlls)
            logs = {**logs, "loss": sum(float(nll) * n for nll, n in self._nlls) / words}
            self._nlls.clear()
        super().log(logs, start_time)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        torch.save(self.carried, Path(output_dir, CARRIED))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            device = self.installed.tables()[0].device
            self.carried = torch.load(Path(checkpoint, CARRIED), map_location=device, weights_only=True)
