"""Pretraining: masked tokens and pairs, their losses summed, and both measured on rows that never change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, SequentialSampler

from tiewise.boundary.install import Installed
from tiewise.data.training_rows import PairRows
from tiewise.training import ranks
from tiewise.training.evaluate import MeasuredSplit, Tally, evaluating
from tiewise.training.optimizers import Lamb, lamb_groups
from tiewise.training.results import MASKED, Share
from tiewise.training.trainer import TiewiseTrainer

SAMPLE = 256  # predicted tokens of a micro-batch behind a logged training accuracy
_BATCH = 16  # rows of a forward pass that measures
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
        paired: whether rows have pairs to judge.
        lamb: the optimizer; AdamW otherwise.
        found: called at every log, in the first of several processes: what to say beside the training losses.
        kwargs: as `TiewiseTrainer`.
    """

    def __init__(
        self, installed: Installed, *, paired: bool, lamb: bool, found: Callable[[], dict[str, float]], **kwargs: Any
    ) -> None:
        super().__init__(installed, **kwargs)
        self._paired, self._lamb, self._found = paired, lamb, found
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
        if self._lamb:
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
            if self._paired:
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


def measure_pretrained(installed: Installed, rows: Mapping[str, PairRows], counts: np.ndarray) -> MeasuredSplit:
    """Evaluate a model on rows by the objective of their pairs; masked tokens are taken from the first of them.

    Args:
        installed: the model, put into evaluation mode and back.
        rows: with a `count`, the same at every call.
        counts: how often each token occurs in training [V].
    """
    with evaluating(installed.model):
        found = {name: outputs(installed.model, own, installed.tables()[0].device) for name, own in rows.items()}
    losses, targets, right = next(iter(found.values()))[:3]
    shares = {MASKED: Share.of(int(right.sum()), len(right), float(losses.mean()))}
    for name, (*_, pair_losses, judged) in found.items():
        if len(judged):
            shares[name] = Share.of(int(judged.sum()), len(judged), float(pair_losses.mean()))
    # what knowing nothing but the training text's frequencies gives, each count plus one
    frequencies = np.log((counts + 1) / (counts.sum() + len(counts)))
    tally = Tally(counts)
    tally.add(losses, targets)
    return tally.measured(shares=shares, unigram_nll=float(-frequencies[targets.numpy()].mean()))


@torch.no_grad()
def outputs(model: Any, rows: PairRows, device: torch.device) -> tuple[Tensor, ...]:
    """(nll, target, whether right) of masked tokens and (nll, whether right) of pairs, on the CPU in fp64."""
    tokens, pairs = [], []
    for batch in DataLoader(rows, _BATCH):
        given = {name: value.to(device) for name, value in batch.items()}
        labels, order = given.pop("labels"), given.pop("pair_labels", None)
        masked = labels != -100
        output = model(**given, predict=masked)
        wanted, logits = labels[masked], output.logits.float()
        tokens.append((F.cross_entropy(logits, wanted, reduction="none").double(), wanted, logits.argmax(-1) == wanted))
        if order is not None:
            judged = output.pair_logits.float()
            pairs.append((F.cross_entropy(judged, order, reduction="none").double(), judged.argmax(-1) == order))
    found = [torch.cat(part).cpu() for part in zip(*tokens, strict=True)]
    judged_all = [torch.cat(part).cpu() for part in zip(*pairs, strict=True)] if pairs else [torch.zeros(0)] * 2
    return (*found, *judged_all)
