"""Losses of a model on a split, by token frequency, and shares of correct predictions.

Losses are nats per predicted token. Every arm is measured on the same rows. The shares are those of masked tokens and
of sentence pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tiewise.core.text import BINS, frequency_bins
from tiewise.training.document_losses import DocumentLosses, TextUnits, sum_by_unit
from tiewise.training.results import MASKED, BinNll, Share


@dataclass(frozen=True)
class MeasuredSplit:
    """Losses of a model on a split."""

    nll: float  # mean nll in nats per predicted token
    tokens: int  # number of predicted tokens
    bins: list[BinNll]  # mean nll by the token's count in the training text
    shares: dict[str, Share] = field(default_factory=dict)  # this field and the next are those of `RunResult`
    unigram_nll: float | None = None
    documents: DocumentLosses | None = None  # of the validation split, for kinds that know the document of a token


def measure_by_frequency(
    pieces: Iterable[tuple[Tensor, Tensor]], counts: np.ndarray, units: TextUnits | None = None
) -> MeasuredSplit:
    """Gather losses [n] of predicted tokens [n] into bins of their training counts [V].

    `units` [n] are the units of these tokens, in the same order.
    """
    loss_parts, target_parts = [], []
    for piece_losses, piece_targets in pieces:
        loss_parts.append(piece_losses.double().cpu().numpy())
        target_parts.append(piece_targets.cpu().numpy())
    if not loss_parts:
        return MeasuredSplit(math.nan, 0, [BinNll(label, 0, None) for label in BINS])
    losses = np.concatenate(loss_parts)
    bins = frequency_bins(counts[np.concatenate(target_parts)])
    sums, sizes = np.bincount(bins, losses, len(BINS)), np.bincount(bins, minlength=len(BINS))
    by_bin = []
    for label, total, size in zip(BINS, sums, sizes, strict=True):
        mean = float(total / size) if size else None
        by_bin.append(BinNll(label, int(size), mean))
    documents = None
    if units is not None:
        documents = sum_by_unit(losses, units.of_token, units.name)
    return MeasuredSplit(float(sums.sum() / len(losses)), len(losses), by_bin, documents=documents)


@dataclass(frozen=True)
class JudgedPredictions:
    """Losses of n predictions, and which of them are right.

    A prediction is that of a masked token, or of the order of a pair.
    """

    losses: Tensor  # fp64 [n], nats
    targets: Tensor  # [n]
    right: Tensor  # bool [n], True if the likeliest class was the target

    @classmethod
    def of(cls, logits: Tensor, targets: Tensor) -> JudgedPredictions:
        """Return the losses of logits [n, V] at targets [n], and which are right."""
        losses = F.cross_entropy(logits, targets, reduction="none").double()
        return cls(losses, targets, logits.argmax(-1) == targets)

    @classmethod
    def joined(cls, parts: Sequence[JudgedPredictions]) -> JudgedPredictions:
        """Join the predictions of several batches."""
        losses = torch.cat([part.losses for part in parts])
        targets = torch.cat([part.targets for part in parts])
        return cls(losses, targets, torch.cat([part.right for part in parts]))

    def cpu(self) -> JudgedPredictions:
        """Return the same predictions in main memory."""
        return JudgedPredictions(self.losses.cpu(), self.targets.cpu(), self.right.cpu())

    def share(self) -> Share:
        """Return the share of right predictions."""
        return Share.of(int(self.right.sum()), len(self.losses), float(self.losses.mean()))


def measure_shares(predictions: Mapping[str, JudgedPredictions], counts: np.ndarray) -> MeasuredSplit:
    """Return the split of the MASKED predictions, with the shares of all predictions."""
    shares = {name: judged.share() for name, judged in predictions.items()}
    masked = predictions[MASKED]
    # nll of the same tokens under a unigram model: training counts, one added to each
    log_probabilities = np.log((counts + 1) / (counts.sum() + len(counts)))
    unigram = -log_probabilities[masked.targets.cpu().numpy()].mean()
    split = measure_by_frequency([(masked.losses, masked.targets)], counts)
    return replace(split, shares=shares, unigram_nll=float(unigram))


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode within this context."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
