"""`transformers.Trainer` for pretraining: masked tokens and pairs, their losses summed, each logged for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler, SequentialSampler

from tiewise.boundary.install import Installed
from tiewise.training import ranks
from tiewise.training.albert.options import Albert
from tiewise.training.lamb import Lamb, lamb_groups
from tiewise.training.trainer import TiewiseTrainer

SAMPLE = 256  # predicted tokens of a micro-batch behind a logged training accuracy
LOGGED = (
    "train_accuracy",
    "pair_nll",
    "pair_accuracy",
    "heldout_accuracy",
    "heldout_pair_nll",
    "heldout_pair_accuracy",
)


class PretrainingTrainer(TiewiseTrainer):
    """Trains on `tiewise.data.training_rows.PairRows`, in their order; its logged loss is the masked tokens' nll.

    Args:
        installed: the boundary of an `OpenAlbertForPreTraining`.
        options: the run's.
        found: called at every log, in the first of several processes: what to say beside the training losses.
        kwargs: as `TiewiseTrainer`.
    """

    def __init__(
        self, installed: Installed, *, options: Albert, found: Callable[[], dict[str, float]], **kwargs: Any
    ) -> None:
        super().__init__(installed, **kwargs)
        self.options = options
        self._found = found
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []
        self._right: list[Tensor] = []

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Loss of one micro-batch: nll of masked tokens plus that of pairs, each a mean over the micro-batch."""
        output = model(**inputs, predict=inputs["labels"] != -100)
        loss, penalty = output.loss, self.installed.penalty()
        none = output.loss.detach().new_zeros(())
        pair_loss, right = none, none
        if output.pair_loss is not None:
            pair_loss = output.pair_loss.detach()
            right = (output.pair_logits.detach().argmax(-1) == inputs["pair_labels"]).float().mean()
        self._parts.append((output.mlm_loss.detach(), pair_loss, right))
        if (self.state.global_step + 1) % self.args.logging_steps == 0:
            self._right.append(_sampled(output.logits, inputs["labels"]))
        loss = loss if penalty is None else loss + penalty
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            loss = loss / self.current_gradient_accumulation_steps  # the Trainer leaves it to such a model
        return (loss, output) if return_outputs else loss

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """LAMB or AdamW; biases and norms neither decay nor are scaled by a trust ratio."""
        groups = lamb_groups(self.model, self.args.weight_decay)
        made: torch.optim.Optimizer
        if self.options.optimizer == "lamb":
            made = Lamb(groups, lr=self.args.learning_rate)
        else:
            plain = [{key: value for key, value in group.items() if key != "adapt"} for group in groups]
            made = torch.optim.AdamW(plain, self.args.learning_rate, eps=1e-6)
        self.optimizer = made
        return made

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Sampler:
        return SequentialSampler(self.train_dataset)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log means over the window's micro-batches, of tokens and pairs apart."""
        if "loss" in logs and self._parts:
            tokens, pairs, right = (float(torch.stack(part).mean()) for part in zip(*self._parts, strict=True))
            logs = {**logs, "loss": tokens}
            if self.options.objective != "none":
                logs |= {"pair_nll": pairs, "pair_accuracy": right}
            if self._right:
                logs["train_accuracy"] = float(torch.cat(self._right).mean())
            self._parts.clear()
            self._right.clear()
            if ranks.first():
                logs |= self._found()
        super().log(logs, start_time)


@torch.no_grad()
def _sampled(logits: Any, labels: Tensor) -> Tensor:
    """Whether the first predicted tokens of a micro-batch are right; the fused loss computes no logits to ask."""
    return (logits[:SAMPLE].argmax(-1) == labels[labels != -100][:SAMPLE]).float()
