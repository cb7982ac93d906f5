"""Losses as the comparison reports them: nats per predicted token of a split, in all and by token frequency.

Not the Trainer's `eval_loss`, which weights batches by rows, and not its `train_loss`, which after a resume covers the
resumed steps alone. Every arm is measured by the same call on the same blocks, training text included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tiewise.boundary.install import Installed
from tiewise.core.frequency import BINS, bin_of
from tiewise.training.results import BinNll, Share

CURVE_BLOCKS = 32  # validation blocks behind each point of a curve; the final figures take the whole split


@dataclass(frozen=True)
class MeasuredSplit:
    """What a split was found to be."""

    nll: float  # mean, in nats per predicted token
    tokens: int  # that were predicted
    bins: list[BinNll]
    shares: dict[str, Share] = field(default_factory=dict)  # this and the next as in `RunResult`
    unigram_nll: float | None = None


class Tally:
    """Losses of predicted tokens, in all and by how often the training text has each; `counts` [V] say how often."""

    def __init__(self, counts: np.ndarray) -> None:
        self._bin_of = torch.from_numpy(bin_of(counts))
        self._sums = torch.zeros(len(BINS), dtype=torch.float64)
        self._sizes = torch.zeros(len(BINS), dtype=torch.long)

    def add(self, losses: Tensor, targets: Tensor) -> None:
        """Take in the losses of these tokens, both [n]."""
        bins = self._bin_of[targets.cpu()]
        self._sums.index_add_(0, bins, losses.double().cpu())
        self._sizes += bins.bincount(minlength=len(BINS))

    def measured(self, **more: Any) -> MeasuredSplit:
        """Return what was found; `more` are further fields."""
        found = [
            BinNll(label, int(n), float(s / n) if n else None)
            for label, s, n in zip(BINS, self._sums, self._sizes, strict=True)
        ]
        total = int(self._sizes.sum())
        return MeasuredSplit(float(self._sums.sum() / total) if total else math.nan, total, found, **more)


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Within this context a model is in evaluation mode."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def measure(
    installed: Installed, tokens: np.ndarray, length: int, counts: np.ndarray, blocks: int | None = None
) -> MeasuredSplit:
    """Evaluate contiguous blocks of `length` tokens (each predicts length − 1); `counts` [V] are training counts.

    At most so many `blocks`, spread evenly over the split; None takes all. The model is put back as it was.
    """
    rows = tokens[: len(tokens) // length * length].reshape(-1, length)
    most = len(rows) if blocks is None else min(blocks, len(rows))
    # evenly apart: texts are in the order of their sources, and starts are alike
    chosen = np.arange(most) * len(rows) // max(most, 1)
    tally, per_batch = Tally(counts), max(1, 4096 // length)
    with evaluating(installed.model):
        for start in range(0, len(chosen), per_batch):
            ids = torch.from_numpy(rows[chosen[start : start + per_batch]].astype(np.int64))
            tally.add(*token_losses(installed, ids))
    return tally.measured()


@torch.no_grad()
def token_losses(installed: Installed, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(loss of each predicted token [B·(T−1)], the tokens [B·(T−1)]) of blocks [B, T], without logits."""
    ids = ids.to(installed.tables()[0].device)
    with installed.deferred():
        logits = installed.model(input_ids=ids, use_cache=False).logits
        targets = ids[:, 1:].reshape(-1)
        shifted = logits[:, :-1, :].reshape(-1, logits.shape[-1])
        return F.cross_entropy(shifted, targets, reduction="none"), targets


def bits_per_byte(nll: float, tokens: int, size: int) -> float:
    """Turn nats per token into bits per byte of a text of `size` bytes and `tokens` tokens: free of the vocabulary."""
    return nll / math.log(2) * tokens / size


@torch.no_grad()
def direct_path(installed: Installed, tokens: list[int]) -> list[list[float]]:
    """Logits [K, K] of the lookup followed at once by the head, on K tokens: rows current, columns next token."""
    model = installed.model
    lookup, head = model.get_input_embeddings(), model.get_output_embeddings()
    ids = torch.tensor(tokens, dtype=torch.long, device=installed.tables()[0].device)
    return head(lookup(ids))[:, ids].float().tolist()
