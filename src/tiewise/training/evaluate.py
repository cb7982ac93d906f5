"""Losses as the comparison reports them: nats per predicted token of a split, in all and by token frequency.

Not the Trainer's `eval_loss`, which weights batches by rows, and not its `train_loss`, which after a resume covers the
resumed steps alone. Every arm is measured by the same call on the same blocks, training text included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tiewise.boundary.install import Installed
from tiewise.data.frequency import bin_of, frequency_bins
from tiewise.training.results import BinNll, Share


@dataclass(frozen=True)
class Measured:
    """Mean nll in nats per predicted token, the tokens that were predicted, and the same by frequency bin.

    `shares` and `unigram_nll` as in `RunResult`.
    """

    nll: float
    tokens: int
    bins: list[BinNll]
    shares: dict[str, Share] = field(default_factory=dict)
    unigram_nll: float | None = None


def measure(
    installed: Installed, tokens: np.ndarray, length: int, counts: np.ndarray, blocks: int | None = None
) -> Measured:
    """Evaluate contiguous blocks of `length` tokens (each predicts length − 1); `counts` [V] are training counts.

    Args:
        installed: the model, put into evaluation mode and back.
        tokens: the split.
        length: T.
        counts: how often each token occurs in training, for the bins.
        blocks: at most so many blocks, spread evenly over the split; None takes all.
    """
    rows = tokens[: len(tokens) // length * length].reshape(-1, length)
    chosen = _spread(len(rows), len(rows) if blocks is None else min(blocks, len(rows)))
    where = torch.from_numpy(bin_of(counts))
    labels = [b.label for b in frequency_bins(counts)]
    sums, sizes = torch.zeros(len(labels), dtype=torch.float64), torch.zeros(len(labels), dtype=torch.long)
    per_batch = max(1, 4096 // length)
    was_training = installed.model.training
    installed.model.eval()
    try:
        for start in range(0, len(chosen), per_batch):
            ids = torch.from_numpy(rows[chosen[start : start + per_batch]].astype(np.int64))
            losses, targets = token_losses(installed, ids)
            bins = where[targets.cpu()]
            sums.index_add_(0, bins, losses.double().cpu())
            sizes += bins.bincount(minlength=len(labels))
    finally:
        installed.model.train(was_training)
    found = [
        BinNll(label, int(n), float(s / n) if n else None) for label, s, n in zip(labels, sums, sizes, strict=True)
    ]
    total = int(sizes.sum())
    return Measured(float(sums.sum() / total) if total else math.nan, total, found)


def _spread(count: int, chosen: int) -> np.ndarray:
    """`chosen` of `count` indices, evenly apart: texts are in the order of their sources, and starts are alike."""
    return np.arange(chosen) * count // max(chosen, 1)


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
